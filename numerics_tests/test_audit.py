"""The audit's numbers against values worked out by hand from public ops, and that watching changes nothing."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import PrecisionPolicy, metrics
from mxfp8.drift import LayerHealth
from mxfp8.recipe import HP, CastSpec, LinearRecipe

K, N, M = 64, 96, 40


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, 32, bias=False))


def batch(scale: float = 1.0, seed: int = 1) -> torch.Tensor:
    return scale * torch.randn(M, K, generator=torch.Generator().manual_seed(seed))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def fprop_energies(linear: nn.Linear, x: torch.Tensor) -> tuple[float, float]:
    """Signal and noise of the first layer's output, from the public ops alone."""
    y = mxfp8.gemm(mxfp8.quantize(x), mxfp8.quantize(linear.weight.detach()), linear.bias.detach(), torch.float32)
    exact = x.double() @ linear.weight.detach().double().T
    return exact.square().sum().item(), (y.double() - linear.bias.detach().double() - exact).square().sum().item()


def test_fprop_numbers_are_those_of_the_public_ops() -> None:
    model, x = net(), batch()
    row = mxfp8.audit(model, [x], loss_fn).row("0", "fprop")
    signal, noise = fprop_energies(model[0], x)
    assert row.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)
    q = mxfp8.quantize(x)
    cast = row.casts["input"]
    assert cast.sqnr_db == pytest.approx(metrics.sqnr_db(x, q.dequantize()), abs=1e-9)
    assert (cast.underflow_frac, cast.saturated_frac, cast.amax) == (
        metrics.underflow_frac(x, q.qdata),
        metrics.saturated_frac(q.qdata),
        x.abs().max().item(),
    )
    assert set(row.casts) == {"input", "weight"}
    assert row.calls == 1


def test_gradient_gemms_are_held_against_the_exact_products() -> None:
    """One linear layer whose loss is chosen so that grad_output is known."""
    layer, x, dy = nn.Linear(K, N), batch(), torch.randn(M, N)
    report = mxfp8.audit(nn.Sequential(layer), [x.requires_grad_()], lambda m, b: (m(b) * dy).sum())
    x, w = x.detach(), layer.weight.detach()
    q = mxfp8.quantize
    cases = {
        "dgrad": (mxfp8.gemm(q(dy), q(w, axis=-2).mT, out_dtype=torch.float32), dy.double() @ w.double()),
        "wgrad": (
            mxfp8.gemm(q(dy, axis=-2).mT, q(x, axis=-2).mT, out_dtype=torch.float32),
            dy.double().T @ x.double(),
        ),
    }
    for gemm, (got, exact) in cases.items():
        assert report.row("0", gemm).sqnr_db == pytest.approx(metrics.sqnr_db(exact, got), abs=1e-6)
    assert set(report.row("0", "dgrad").casts) == {"grad_output", "weight"}
    assert set(report.row("0", "wgrad").casts) == {"grad_output", "input"}


def test_batches_add_energies_and_not_decibels() -> None:
    model = net()
    loud, quiet = batch(scale=100.0), batch(seed=2) * torch.logspace(-6, 0, K)  # another SQNR
    (s1, n1), (s2, n2) = fprop_energies(model[0], loud), fprop_energies(model[0], quiet)
    got = mxfp8.audit(model, [loud, quiet], loss_fn).row("0", "fprop")
    assert got.sqnr_db == pytest.approx(10 * math.log10((s1 + s2) / (n1 + n2)), abs=1e-9)
    mean_db = 5 * (math.log10(s1 / n1) + math.log10(s2 / n2))
    assert abs(got.sqnr_db - mean_db) > 0.01
    assert got.calls == 2


@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp8_square",
        "mxfp8_coalesced",
        "mxfp8_robust",
        "mxfp8_rceil_wgrad_with_hp",
        LinearRecipe.from_operands(name="all_square", input=CastSpec(block=(32, 32)), weight=CastSpec(block=(32, 32))),
        LinearRecipe.from_operands(name="late", save_activations="high_precision"),
    ],
)
def test_every_recipe_finds_its_operands(recipe: str | LinearRecipe) -> None:
    """Shared weights, shared activations, Hadamard, high-precision operands, square shapes (where a transposed operand
    cannot be told by its shape): a wrong operand would give an SQNR near or below 0 dB."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(32, 32)
    report = mxfp8.audit(model, [x, 2 * x], lambda m, b: m(b).pow(3).sum(), PrecisionPolicy(default=recipe))
    assert len(report.rows) == 5  # the first layer needs no dgrad
    for row in report.rows:
        # E4M3 with a scale per block keeps three bits after the leading one: relative error at most 2**-4 an operand,
        # 24 dB; the stochastic rounding of mxfp8_robust doubles it, 18 dB; two operands take 3 dB more.
        assert row.sqnr_db > 15, (row.layer, row.gemm)
        assert row.sqnr_db < (100 if row.casts else math.inf)


def test_wgrad_in_high_precision_is_shown_without_casts() -> None:
    recipe = LinearRecipe.from_operands(name="hp_wgrad", wgrad=HP)
    row = mxfp8.audit(net(), [batch()], loss_fn, recipe).row("0", "wgrad")
    assert row.casts == {}
    assert row.sqnr_db > 100  # float32 against float64


def test_grouped_linear() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = mxfp8.MXFP8GroupedLinear(3, K, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.experts(x, torch.tensor([25, 25, 38]))  # the second is empty, two rows are left
            return out

    model, x = Experts(), batch().requires_grad_()
    report = mxfp8.audit(model, [x], lambda m, b: m(b).square().sum())
    w, x = model.experts.weight.detach(), x.detach()
    exact = torch.cat([x[:25].double() @ w[0].double().T, x[25:38].double() @ w[2].double().T, x.new_zeros(2, N)])
    got = mxfp8.grouped_gemm(mxfp8.quantize(x), mxfp8.quantize(w), torch.tensor([25, 25, 38]), torch.float32)
    assert report.row("experts", "fprop").sqnr_db == pytest.approx(metrics.sqnr_db(exact, got), abs=1e-9)
    assert report.row("experts", "wgrad").calls == 3
    assert report.row("experts", "dgrad").sqnr_db > 18
    assert report.row("experts", "wgrad").sqnr_db > 18


def test_a_layer_used_twice_and_checkpointing_pair_the_right_tensors() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            out: torch.Tensor = self.layer(x)
            return out

    report = mxfp8.audit(Twice(), [batch()], loss_fn)
    assert [(r.gemm, r.calls) for r in report.rows] == [("fprop", 3), ("dgrad", 1), ("wgrad", 2)]
    assert min(r.sqnr_db for r in report.rows) > 18


def test_the_user_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(K, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32))
    model[2].eval()
    model(batch()).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    modules, rng = {n: id(m) for n, m in model.named_modules()}, torch.get_rng_state()
    mxfp8.audit(model, [batch(), batch()], lambda m, b: m(b + torch.randn(M, K)).square().mean())
    assert torch.equal(torch.get_rng_state(), rng)
    assert {n: id(m) for n, m in model.named_modules()} == modules
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == [True, True, True, False, True]


def test_a_converted_model_is_audited_as_it_is() -> None:
    model = mxfp8.convert(net(), PrecisionPolicy(rules=[("2", "bf16")], default="mxfp8_floor"))
    assert {(r.layer, r.recipe) for r in mxfp8.audit(model, [batch()], loss_fn).rows} == {("0", "mxfp8_floor")}
    other = mxfp8.audit(model, [batch()], loss_fn, "mxfp8_square")
    assert {(r.layer, r.recipe) for r in other.rows} == {("0", "mxfp8_square"), ("2", "mxfp8_square")}
    assert model[0].recipe.name == "mxfp8_floor"


def test_a_compiled_model_gives_the_same_numbers() -> None:
    model = mxfp8.convert(net())
    eager = mxfp8.audit(model, [batch()], loss_fn)
    compiled = mxfp8.audit(torch.compile(model, backend="eager"), [batch()], loss_fn)
    assert [(r.layer.removeprefix("_orig_mod."), r.gemm, r.sqnr_db, r.casts) for r in compiled.rows] == [
        (r.layer, r.gemm, r.sqnr_db, r.casts) for r in eager.rows
    ]


def test_planted_underflow_saturation_and_outlier_are_found() -> None:
    """A row with one value of 2**30 among ones: the ones fall below the smallest E4M3 of their block."""
    x = torch.ones(M, K)
    x[:, 0] = 2.0**30
    cast = mxfp8.audit(net(), [x], loss_fn).row("0", "fprop").casts["input"]
    assert cast.underflow_frac == 31 / 64  # the 31 neighbours in its block; the other block is exact
    assert cast.amax == 2.0**30
    # Scale rule floor clips (448, 512): 500 becomes 448 and counts as saturated.
    x = torch.full((M, K), 500.0)
    cast = mxfp8.audit(net(), [x], loss_fn, "mxfp8_floor").row("0", "fprop").casts["input"]
    assert cast.saturated_frac == 1.0
    assert cast.sqnr_db == pytest.approx(20 * math.log10(500 / 52), abs=1e-9)


def test_non_finite_rows_come_first_and_are_never_dropped(tmp_path) -> None:
    x = batch()
    x[3, 7] = math.nan
    report = mxfp8.audit(net(), [batch(), x, batch()], loss_fn)
    assert math.isnan(report.row("0", "fprop").sqnr_db)
    assert math.isnan(report.row("0", "fprop").amax)
    assert math.isnan(report.worst(1)[0].sqnr_db)
    assert [math.isnan(loss) for loss in report.losses] == [False, True, False]
    text = str(report)
    assert "nan" in text
    assert "loss not finite in batch 1" in text
    written = json.loads(report.write_json(tmp_path / "a.json").read_text())
    assert written["rows"][0]["sqnr_db"] == "NaN"
    assert "nan" in report.write_html(tmp_path / "a.html").read_text()


def test_worst_orders_by_sqnr() -> None:
    report = mxfp8.audit(net(), [batch()], loss_fn)
    ordered = [row.sqnr_db for row in report.worst(100)]
    assert ordered == sorted(row.sqnr_db for row in report.rows)
    assert {row.gemm for row in report.worst(2, gemm="wgrad")} == {"wgrad"}
    rows = [LayerHealth(**row) for row in report.flat()]
    assert {(r.layer, r.gemm, r.operand) for r in rows} >= {("0", "wgrad", "output"), ("2", "dgrad", "grad_output")}


@pytest.mark.parametrize(
    ("batches", "loss", "error", "message"),
    [
        ([], loss_fn, ValueError, "no batches"),
        ([0, 1], lambda m, b: 1.0, TypeError, "batch 0: loss_fn returned a float"),
        ([0], lambda m, b: m(torch.randn(2, K)), ValueError, r"batch 0: .*shape \(2, 32\)"),
        ([0], lambda m, b: torch.zeros(()), ValueError, "requires_grad=False"),
        ([0], lambda m, b: m[2].weight.sum(), ValueError, "none of the 2 converted layers ran"),
    ],
)
def test_bad_use_names_the_batch(batches, loss, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mxfp8.audit(net(), batches, loss)


def test_unseen_layers_are_named() -> None:
    model = net()
    report = mxfp8.audit(model, [batch()], lambda m, b: m[0](b).sum())
    assert report.unseen == ("2",)
    assert "did not run: 2" in str(report)


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = loss_fn(model, batch(seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_robust"])
def test_watch_reports_every_nth_step_and_changes_nothing(recipe: str) -> None:
    model = mxfp8.convert(net(), recipe)
    twin, step = copy.deepcopy(model), mxfp8.get_step()
    with mxfp8.watch(model, every=3) as log:
        watched = train(model, 7)
    mxfp8.set_step(step)
    assert train(twin, 7) == watched
    assert list(log.reports) == [0, 3, 6]
    assert [(r.layer, r.gemm, r.calls) for r in log.reports[3].rows] == [
        ("0", "fprop", 1),
        ("0", "wgrad", 1),
        *(("2", gemm, 1) for gemm in ("fprop", "dgrad", "wgrad")),
    ]
    assert log.reports[3].row("2", "wgrad").casts["input"] != log.reports[6].row("2", "wgrad").casts["input"]


def test_watch_refuses_what_it_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match="no MXFP8 layer"), mxfp8.watch(net()):
        pass
    by_hand = nn.Sequential(mxfp8.MXFP8Linear(K, N))
    with pytest.raises(ValueError, match="layer '0' does not know its name"), mxfp8.watch(by_hand):
        pass
    with pytest.raises(ValueError, match="every is 0"), mxfp8.watch(mxfp8.convert(net()), every=0):
        pass
