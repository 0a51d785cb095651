"""Optimisers that quantise what they update: torch's results, and the manners of torch's optimisers."""

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import MXFP8GroupedLinear, MXFP8Linear, MXTensor, dispatch
from mxfp8.optim import AdamW, RowwiseAdagrad
from mxfp8.recipe import CastSpec, LinearRecipe
from mxfp8.rng import get_step
from numerics_tests import tolerances
from numerics_tests.test_linear import run, same

optimizers = pytest.mark.parametrize("make_optimizer", [AdamW, RowwiseAdagrad], ids=["adamw", "rowwise_adagrad"])


def network(device: torch.device, recipe: LinearRecipe | str = "mxfp8_rceil") -> nn.Sequential:
    """Two MXFP8 layers, of which only the second passes a gradient on, and parameters that have no copies."""
    layers = [nn.Linear(40, 96), nn.LayerNorm(96), nn.Linear(96, 130, bias=False), nn.Linear(130, 8)]
    for i in (0, 2):
        layers[i] = MXFP8Linear.from_linear(layers[i], recipe, fqn=str(i))
    return nn.Sequential(*layers).to(device)


def backward(model: nn.Module, seed: int, features: int = 40) -> None:
    device = next(model.parameters()).device
    x = torch.randn(33, features, generator=torch.Generator().manual_seed(seed)).to(device)
    model.zero_grad()
    model(x).square().sum().backward()


def copies(layer: MXFP8Linear | MXFP8GroupedLinear) -> dict[tuple[CastSpec, int], MXTensor]:
    return dict(layer._cache._copies)


def assert_is_cast_of(q: MXTensor, weight: torch.Tensor, spec: CastSpec, axis: int) -> None:
    want = mxfp8.quantize(weight.detach(), axis, spec.fmt, spec.block, spec.scale_rule, backend="reference")
    assert (q.shape, q.axis, q.block, q.fmt) == (want.shape, want.axis, want.block, want.fmt)
    assert torch.equal(q.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(q.scale_bytes, want.scale_bytes)


def assert_fresh(layer: MXFP8Linear) -> None:
    """What the layer computes is what a new layer with its parameters computes."""
    x = torch.randn(33, layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    fresh = MXFP8Linear.from_linear(layer.to_linear(), layer.recipe, fqn=layer.fqn)
    assert same(run(layer, x), run(fresh, x))


# The update


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.4, 0.5), "eps": 1e-3, "maximize": True}])
def test_adamw_is_torchs(options: dict, device: torch.device) -> None:
    """On CPU the same bits; on a GPU within the rounding of 20 steps."""
    model = network(device)
    other = copy.deepcopy(model)
    ours, theirs = (
        AdamW(model, lr=0.01, **options),
        torch.optim.AdamW(other.parameters(), 0.01, foreach=False, **options),
    )
    largest = max(p.abs().max().item() for p in model.parameters())
    for step in range(1, 21):
        backward(model, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()  # gradients of their own would differ as soon as a weight does
        ours.step()
        theirs.step()
        bound = 0.0
        if device.type == "cuda":
            decay, betas = options.get("weight_decay", 1e-2), options.get("betas", (0.9, 0.999))
            bound = tolerances.adamw_error(step, 0.01, betas, largest, decay)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p - q).abs().max() <= bound
    assert int(ours.state[model[0].weight]["step"]) == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master", [False, True])
def test_narrow_parameters_step_in_float32(master: bool, dtype: torch.dtype, device: torch.device) -> None:
    p = nn.Parameter(torch.randn(33, 70, device=device, dtype=dtype))
    ours = AdamW([p], lr=1e-3, master_weights=master, backend="reference")
    wide = nn.Parameter(p.detach().float())
    theirs = torch.optim.AdamW([wide], lr=1e-3, foreach=False)
    for _ in range(5):
        if not master:
            wide.data.copy_(p.data)
        p.grad = torch.randn_like(p)
        wide.grad = p.grad.float()
        ours.step()
        theirs.step()
        assert torch.equal(p.detach(), wide.detach().to(dtype))
        assert all(v.dtype == torch.float32 for v in ours.state[p].values())
        assert not master or torch.equal(ours.state[p]["master"], wide.detach())


def test_float64_and_transposed_parameters_take_the_plain_path(device: torch.device) -> None:
    for p in (torch.randn(5, 7, dtype=torch.float64, device=device), torch.randn(7, 5, device=device).mT):
        p, q = nn.Parameter(p.clone()), nn.Parameter(p.clone())
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        AdamW([p], lr=0.1).step()
        torch.optim.AdamW([q], lr=0.1, foreach=False).step()
        assert torch.equal(p, q)


@pytest.mark.parametrize("shape", [(50, 48), (3, 20, 33), (70,)], ids=str)
def test_rowwise_adagrad_is_its_formula_in_float64(shape: tuple[int, ...], device: torch.device) -> None:
    p = nn.Parameter(torch.randn(shape, device=device))
    optimizer = RowwiseAdagrad([p], lr=0.1, weight_decay=0.01, eps=1e-6, initial_accumulator_value=0.5)
    want, total, largest = p.detach().double(), torch.full((*shape[:-1], 1), 0.5, device=device).double(), p.abs().max()
    for step in range(1, 21):
        p.grad = torch.randn_like(p)
        g = p.grad.double() + 0.01 * want
        total += g.square().mean(-1, keepdim=True)
        want -= 0.1 * g / (total.sqrt() + 1e-6)
        optimizer.step()
        assert (p - want).abs().max() <= tolerances.rowwise_adagrad_error(step, 0.1, shape[-1], largest.item())
    assert optimizer.state[p]["sum"].shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients_update_their_rows_as_dense_ones_do(dtype: torch.dtype, device: torch.device) -> None:
    tables = [nn.Embedding(40, 16, sparse=sparse, device=device, dtype=dtype) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    steps = [RowwiseAdagrad(t.parameters(), master_weights=True, backend="reference") for t in tables]
    for _ in range(3):
        at = torch.randint(0, 40, (25,), device=device)
        factor = torch.randn(25, 16, device=device)
        for table, optimizer in zip(tables, steps, strict=True):
            table.zero_grad()
            (table(at) * factor).sum().backward()
            optimizer.step()
        # Duplicates of a row are added in another order: compare where each row came once.
        once = (torch.bincount(at, minlength=40) <= 1).nonzero()[:, 0]
        assert torch.equal(tables[0].weight[once], tables[1].weight[once])
        tables[1].load_state_dict(tables[0].state_dict())
        for name in ("sum", "master"):
            if name in steps[0].state[tables[0].weight]:
                steps[1].state[tables[1].weight][name].copy_(steps[0].state[tables[0].weight][name])


def test_adamw_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="RowwiseAdagrad"):
        AdamW(table).step()


# As an optimiser of torch's


@optimizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dict_round_trip(dtype: torch.dtype, make_optimizer: Callable, device: torch.device) -> None:
    model = network(device).to(dtype)

    def advance(m: nn.Module, o: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for p in m.parameters():
            p.grad = torch.randn_like(p)
        o.step()

    optimizer = make_optimizer(model, lr=0.01, master_weights=True)
    advance(model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network(device).to(dtype)
    other.load_state_dict(saved["model"])
    resumed = make_optimizer(other, lr=1.0)
    resumed.load_state_dict(saved["optimizer"])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(torch.equal(v, resumed.state[q][k]) for k, v in optimizer.state[p].items())
        assert all(v.dtype == torch.float32 for v in resumed.state[q].values())
    for seed in (1, 2):
        advance(model, optimizer, seed)
        advance(other, resumed, seed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_checkpoints_of_torchs_adamw_go_both_ways(device: torch.device) -> None:
    def advance(m: nn.Module, o: torch.optim.Optimizer) -> None:
        for p in m.parameters():
            p.grad = torch.full_like(p, 0.1)
        o.step()

    model = network(device)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    advance(model, theirs)
    ours = AdamW(copy.deepcopy(model))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.02
    back = torch.optim.AdamW(copy.deepcopy(model).parameters(), foreach=False)
    back.load_state_dict(ours.state_dict())
    p, q = theirs.param_groups[0]["params"][0], back.param_groups[0]["params"][0]
    assert torch.equal(theirs.state[p]["exp_avg_sq"], back.state[q]["exp_avg_sq"])
    assert int(back.state[q]["step"]) == 1
    with pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(torch.optim.AdamW(model.parameters(), amsgrad=True).state_dict())


def test_pickled_and_copied_optimisers_still_step(device: torch.device) -> None:
    p = nn.Parameter(torch.ones(4, device=device))
    optimizer = copy.deepcopy(AdamW([p]))
    (q,) = optimizer.param_groups[0]["params"]
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert (q < 1).all()


def test_closure_count_and_learning_rates(device: torch.device) -> None:
    """A closure runs with gradients on; a step counts once; a tensor and a scheduler set the rate."""
    results = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor(0.5, device=device)):
        p = nn.Parameter(torch.ones(40, 64, device=device))
        optimizer = AdamW([p], lr=lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = get_step()

        def closure(p: nn.Parameter = p, optimizer: AdamW = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 40 * 64
        assert get_step() == before + 1
        assert optimizer.step() is None
        results.append(p.detach())
    # The constants of the step are rounded in float64 from a number, in float32 from a tensor.
    bound = tolerances.adamw_error(2, 0.5, (0.9, 0.999), 1.0, 0.1)
    assert all((r - results[0]).abs().max() <= bound for r in results)
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_parameter_groups_have_their_own_options(device: torch.device) -> None:
    model = network(device)
    decayed, others = [model[0].weight, model[2].weight], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.0}]
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.0, model=model)
    backward(model, 0)
    before = [p.detach().clone() for p in others]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(others, before, strict=True))
    assert len(copies(model[2])) == 2
    assert model[3].weight not in optimizer.state  # in no group


def test_parameters_without_a_gradient_stay(device: torch.device) -> None:
    model = network(device)
    model[0].requires_grad_(False)
    optimizer = AdamW(model)
    backward(model, 0)
    held = copies(model[0])
    before = model[0].weight.clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert len(held) == 1
    assert_fresh(model[0])


@pytest.mark.parametrize(
    "make_optimizer, options, message",
    [
        (AdamW, {"lr": -1.0}, "lr is -1.0"),
        (AdamW, {"lr": torch.ones(2)}, "tensor of 2 elements"),
        (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        (AdamW, {"eps": -1e-8}, "eps is"),
        (AdamW, {"backend": "cuda"}, "unknown backend 'cuda'"),
        (RowwiseAdagrad, {"weight_decay": -0.1}, "weight_decay is"),
        (RowwiseAdagrad, {"initial_accumulator_value": -0.1}, "initial_accumulator_value is"),
    ],
)
def test_options_out_of_range_are_refused(make_optimizer: Callable, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer([nn.Parameter(torch.ones(2))], **options)


def test_a_named_backend_runs_or_raises() -> None:
    if dispatch.is_available("adamw", "triton", "cpu"):
        pytest.skip("kernels are interpreted in this process")
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="adamw: backend 'triton' cannot run on cpu"):
        AdamW([p], backend="triton").step()


@pytest.mark.gpu
def test_many_small_parameters_step_together_and_large_ones_alone() -> None:
    params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (3, 1000, 70_000, 65_536)]
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours, theirs = AdamW(params, lr=0.01), torch.optim.AdamW(others, lr=0.01, foreach=False)
    largest = max(p.abs().max().item() for p in params)
    for step in range(1, 6):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, q in zip(params, others, strict=True):
            assert (p - q).abs().max() <= tolerances.adamw_error(step, 0.01, (0.9, 0.999), largest, 1e-2)


def test_the_bounds_are_of_rounding_size() -> None:
    """A thousandth of one step's move would be seen."""
    assert tolerances.adamw_error(1, 0.01, (0.9, 0.999), 1.0, 0.01) < 0.01 / 1000
    assert tolerances.rowwise_adagrad_error(1, 0.1, 64, 1.0) < 0.1 / 1000
    assert math.isfinite(tolerances.adamw_error(20, 0.01, (0.4, 0.5), 1.0, 0.01))
