"""Training: the optimiser against a plain loop, clipping, and errors that say where a run stopped being finite."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import mxfp8
from gem_model.config import GEMConfig, get_config
from gem_model.data import Dataset, load
from gem_model.jobs import build_model
from gem_model.optim import RowWiseAdagrad, gradient_norm, lr_factor, make_optimizers, scale_gradients
from gem_model.train import NonFiniteError, TrainConfig, Trainer

CONFIG: GEMConfig = get_config(
    "tiny", dim=32, heads=1, layers=1, fm_hidden=(32,), head_hidden=(32,), max_history=6, dense_hidden=32
)
TRAIN = TrainConfig(batch_size=32, window=2)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load("synthetic", num_samples=600, num_users=50, num_ads=40, max_history=6)


def _trainer(dataset: Dataset, precision: str = "bf16", config: TrainConfig = TRAIN) -> Trainer:
    model = build_model(CONFIG, dataset, seed=0)
    if precision != "bf16":
        model = mxfp8.convert(model, mxfp8.policies.recsys(precision, min_dim=32))
    return Trainer(model, dataset.train, config)


def _plain_adagrad(weight: torch.Tensor, grads: list[torch.Tensor], lr: float, eps: float) -> torch.Tensor:
    """Row by row, in float64."""
    weight, sums = weight.double().clone(), [0.0] * len(weight)
    for grad in grads:
        for row in range(len(weight)):
            sums[row] += float(grad[row].double().square().mean())
            weight[row] -= lr * grad[row].double() / (sums[row] ** 0.5 + eps)
    return weight


@pytest.mark.parametrize("sparse", [False, True])
def test_rowwise_adagrad_equals_a_plain_loop(sparse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    ids = [torch.tensor([0, 3, 3, 5]), torch.tensor([3, 1, 1, 1])]
    table = nn.EmbeddingBag(6, 4, mode="sum", sparse=sparse, _weight=start.clone())
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1)
    grads = []
    for step_ids in ids:
        target = torch.randn(len(step_ids), 4, generator=generator)
        optimizer.zero_grad()
        (table(step_ids, torch.arange(len(step_ids))) * target).sum().backward()
        grads.append(torch.zeros(6, 4).index_add_(0, step_ids, target))
        optimizer.step()
    expected = _plain_adagrad(start, grads, lr=0.1, eps=1e-8)
    # A handful of fp32 operations on values of order 1: each rounds by at most 2^-24.
    assert (table.weight.double() - expected).abs().max() < 16 * 2**-24
    assert torch.equal(table.weight[[2, 4]], start[[2, 4]]), "a row without a gradient must not move"
    assert (optimizer.state[table.weight]["sum"] > 0).tolist() == [True, True, False, True, False, True]


def test_rowwise_adagrad_refuses_what_has_no_rows() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        RowWiseAdagrad([torch.zeros(4, requires_grad=True)], lr=0.1)


def test_every_parameter_has_exactly_one_optimizer(dataset: Dataset) -> None:
    model = build_model(CONFIG, dataset, seed=0)
    optimizers = make_optimizers(model, table_lr=0.1, dense_lr=0.1)
    held = [id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_clipping_counts_every_gradient_once() -> None:
    dense, table = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 1))
    dense.grad = torch.tensor([3.0, 0.0])
    # Row 1 twice: its gradient is 1 + 3 = 4, so the norm is 5 and not sqrt(9 + 1 + 9).
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0], [3.0]]), (4, 1))
    norm = gradient_norm([dense, table])
    assert float(norm) == 5.0
    scale_gradients([dense, table], norm, max_norm=1.0)
    assert float(gradient_norm([dense, table])) == pytest.approx(1.0, rel=1e-6)
    scale_gradients([dense, table], torch.tensor(0.5), max_norm=1.0)
    assert float(gradient_norm([dense, table])) == pytest.approx(1.0, rel=1e-6), "a small norm is left alone"


def test_learning_rate_rises_then_falls_to_zero() -> None:
    factors = [lr_factor(step, total=100, warmup=0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert lr_factor(100, 100, 0.1) == pytest.approx(0.0)


def test_training_learns_and_is_deterministic(dataset: Dataset) -> None:
    runs = [_trainer(dataset, config=replace(TRAIN, epochs=3)) for _ in range(2)]
    for run in runs:
        run.run()
    assert runs[0].losses == runs[1].losses
    assert sum(runs[0].losses[-5:]) < sum(runs[0].losses[:5])
    assert runs[0].curve[-1].step == runs[0].total
    assert len(runs[0].curve) == -(-runs[0].total // TRAIN.window)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8_rceil"])
def test_nonfinite_gradient_names_layer_and_step(dataset: Dataset, precision: str) -> None:
    trainer = _trainer(dataset, precision)
    layer = "layers.0.sequence.events.pffn.keys"
    calls = iter(range(100))

    def poison(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan") if next(calls) == 3 else grad

    trainer.model.get_submodule(layer).weight.register_hook(poison)  # type: ignore[union-attr]
    trainer.run(until=3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="step 3") as caught:
        trainer.run()
    assert (caught.value.step, caught.value.layer) == (3, layer)
    assert layer + ".weight" in str(caught.value)
    assert trainer.step == 3
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "mxfp8_rceil"])
def test_nonfinite_weight_names_the_first_layer_that_shows_it(dataset: Dataset, precision: str) -> None:
    trainer = _trainer(dataset, precision)
    layer = "layers.0.interaction.experts.0.fmb.mlp.2"
    trainer.run(until=2)
    with torch.no_grad():
        trainer.model.get_parameter(layer + ".weight")[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=f"step 2: .*{layer}") as caught:
        trainer.run()
    assert caught.value.layer == layer


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TrainConfig(batch_size=0)
    with pytest.raises(ValueError, match="dense_lr must be >= 0 and finite, got nan"):
        TrainConfig(dense_lr=float("nan"))
