"""``MXFP8MLP``: the bits of a composition from public ops, each stage against float64, what is kept, autograd."""

import copy
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxfp8
from mxfp8 import MXFP8MLP, fused, observe
from mxfp8.recipe import LinearRecipe, get_recipe
from mxfp8.reference.fused import ACTIVATIONS
from mxfp8.tensor import MXTensor
from numerics_tests import tolerances
from numerics_tests.composition import ALL_RECIPES
from numerics_tests.fused_oracle import EXACT, exact_activation, gradient_bounds, value_error
from numerics_tests.mlp_composition import (
    IN,
    OUT,
    Composition,
    data,
    differing,
    make,
    norms,
    recipes,
    run,
    sequential,
)
from numerics_tests.test_saved_activations import saved_bytes


@recipes
@pytest.mark.parametrize("recompute", [False, True])
@norms
def test_the_bits_of_the_composition(
    norm: str | None, recompute: bool, recipe: LinearRecipe, device: torch.device
) -> None:
    mlp = make(recipe, norm, "hardswish", recompute=recompute, device=device)
    for M, dtype in ((48, torch.bfloat16), (33, torch.float32)):
        x, dy = data(M, dtype, device)
        assert differing(run(mlp, x, dy), Composition(mlp)(x, dy)) == []


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_composition_for_every_activation(activation: str, bias: bool, device: torch.device) -> None:
    for recipe, weight_dtype in (("mxfp8_coalesced", torch.float32), ("mxfp8_rceil", torch.bfloat16)):
        mlp = make(recipe, "layernorm", activation, bias=bias, device=device, dtype=weight_dtype)
        for M, dtype in ((0, torch.bfloat16), (1, torch.float16), (130, torch.bfloat16)):
            x, dy = data(M, dtype, device)
            assert differing(run(mlp, x, dy), Composition(mlp)(x, dy)) == []


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_gradients_the_hidden_value_is_not_written_and_no_bits_change(
    activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = mock.Mock(wraps=mxfp8.gemm_quantize)
    monkeypatch.setattr("mxfp8.mlp.gemm_quantize", watched)
    for recipe, dtype in itertools.product(("mxfp8_coalesced", "mxfp8_square", "mxfp8_robust"), (torch.bfloat16, None)):
        for bias in (False, True):
            mlp = MXFP8MLP(128, 256, activation=activation, bias=bias, recipe=recipe, device=device)
            x = torch.randn(130, 128, device=device, dtype=dtype)
            watched.reset_mock()
            want = mlp(x)
            assert watched.call_count == 0
            with torch.no_grad():
                assert torch.equal(mlp(x), want)
            assert watched.call_count == (not bias)


def test_layers_of_different_recipes(device: torch.device) -> None:
    for first, second in itertools.permutations(("mxfp8_square", "mxfp8_robust", "mxfp8_coalesced"), 2):
        mlp = make(first, device=device)
        mlp.fc2.recipe = get_recipe(second)
        x, dy = data(65, torch.bfloat16, device)
        assert differing(run(mlp, x, dy), Composition(mlp)(x, dy)) == []


# Each stage against float64


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_coalesced", "mxfp8_robust"])
def test_every_stage_against_float64(recipe: str, activation: str, device: torch.device) -> None:
    """What is cast is the float32 value, what is multiplied is what was cast, and both within their bounds."""
    mlp = make(recipe, "layernorm", activation, device=device)
    x, dy = data(96, torch.bfloat16, device)
    events: list[observe.Event] = []
    with observe.subscribe(events.append):
        found = run(mlp, x, dy)
    casts = {(e.layer, e.gemm, e.operand): e for e in events if isinstance(e, observe.CastEvent)}
    gemms = {(e.layer, e.gemm): e for e in events if isinstance(e, observe.GemmEvent)}
    assert len(gemms) == 6
    for key, e in casts.items():
        layer = mlp.get_submodule(key[0])
        rhs = key[2] == "weight" or key[1:] == ("wgrad", "input")
        spec = getattr(getattr(layer.recipe, key[1]), "rhs" if rhs else "lhs")
        if spec.rounding == "nearest":
            want = mxfp8.quantize(e.x, e.q.axis, spec.fmt, spec.block, spec.scale_rule)
            assert torch.equal(e.q.qdata.view(torch.uint8), want.qdata.view(torch.uint8)), key
            assert torch.equal(e.q.scale_bytes, want.scale_bytes), key
    for key, e in gemms.items():
        a, b = (v.dequantize(torch.float64) if isinstance(v, MXTensor) else v.double() for v in (e.a, e.b))
        bias = None if e.bias is None else e.bias.double()
        error = tolerances.product_error(a, b, (e.a.block, e.b.block), e.out.dtype, bias)
        exact = a @ b.mT if bias is None else a @ b.mT + bias
        assert ((e.out.double() - exact).abs() <= error).all(), key

    # What the activation was taken of, and its gradient
    h = (gemms["fc1", "fprop"].out.float() + mlp.fc1.bias).detach().double()
    a = casts["fc2", "fprop", "input"].x.double()
    if activation in EXACT:
        assert torch.equal(a, fused.activation_quantize(h.float(), activation, outputs=["hp"]).hp.double())
    else:
        assert ((a - exact_activation(h, activation)).abs() <= value_error(h, activation)).all()
    if recipe != "mxfp8_robust":  # there the gradient is cast from bfloat16
        da = gemms["fc2", "dgrad"].out.double()
        dh = casts["fc1", "wgrad", "grad_output"].x.double()
        if activation in EXACT:
            want_dh = fused.activation_quantize_backward(da.float(), h.float(), activation, outputs=["hp"]).hp
            assert torch.equal(dh, want_dh.double())
        else:
            exact, error = gradient_bounds(h, da, activation)
            assert ((dh - exact).abs() <= error).all()
        db = dh.sum(0)
        assert ((found["fc1.bias"].double() - db).abs() <= 2 * tolerances.sum_error(dh, torch.float32)).all()

    # Through the norm
    dn, wide = gemms["fc1", "dgrad"].out.double(), x.double()
    rstd = 1 / (wide.var(-1, correction=0, keepdim=True) + mlp.norm.eps).sqrt()
    normed, g = (wide - wide.mean(-1, keepdim=True)) * rstd, dn * mlp.norm.weight.detach().double()
    exact = rstd * (g - normed * (g * normed).mean(-1, keepdim=True) - g.mean(-1, keepdim=True))
    offset = float((wide.mean(-1).abs() / wide.std(-1)).max())
    bound = tolerances.norm_gradient_error(g, normed, rstd, IN, True)
    bound = bound + 4 * tolerances.layer_error(IN, offset) * rstd * (g.abs() + normed.abs() * (g * normed).abs().mean())
    assert ((found["x"].double() - exact).abs() <= bound + tolerances.OUT_UNIT[torch.bfloat16] * exact.abs()).all()


@norms
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_casts_it_is_the_ordinary_mlp(activation: str, norm: str | None, device: torch.device) -> None:
    """Errors in float32 are at most twice those of torch's own modules, so the chain of gradients is the right one."""
    hp = next(r for r in ALL_RECIPES if r.name == "hp_everywhere")
    mlp = make(hp, norm, activation, device=device)
    plain = sequential(mlp)
    exact = copy.deepcopy(plain).double()
    x, dy = data(64, torch.float32, device)
    want = run(exact, x.double(), dy.double())
    ours, theirs = run(mlp, x, dy), run(plain, x, dy)
    for name, value in want.items():
        honest = (theirs[name].double() - value).abs().max()
        assert (ours[name].double() - value).abs().max() <= 2 * honest + tolerances.U32 * value.abs().max(), name


FLOORS_DB = {"y": 24.1, "x": 23.7, "fc1.weight": 23.5, "fc2.weight": 24.1}
"""Of N(0, 1) through initial weights: what the reference measures, less 1.5 dB."""


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_coalesced"])
def test_the_error_of_the_format(recipe: str, device: torch.device) -> None:
    mlp = MXFP8MLP(256, 512, activation="silu", recipe=recipe, device=device)
    x, dy = torch.randn(256, 256, device=device).bfloat16(), torch.randn(256, 256, device=device).bfloat16()
    want = run(sequential(mlp, torch.float64), x.double(), dy.double())
    found = {name: mxfp8.metrics.sqnr_db(want[name], got) for name, got in run(mlp, x, dy).items() if name in want}
    assert {name: found[name] for name, floor in FLOORS_DB.items() if not found[name] >= floor} == {}


# What is kept


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_coalesced", "mxfp8_rceil_wgrad_with_hp"])
def test_what_is_kept_between_forward_and_backward(recipe: str, device: torch.device) -> None:
    """The input and the hidden pre-activation; with ``recompute=False`` the operands of the weight gradients too."""
    M, wide, hidden = 256, 128, 512
    mlp = MXFP8MLP(wide, hidden, recipe=recipe, device=device, recompute=True)
    x = torch.randn(M, wide, device=device).bfloat16().requires_grad_()
    weights = sum(saved_bytes(part, torch.zeros(1, part.in_features, device=device, requires_grad=True)
                              .to(torch.bfloat16)) for part in frozen(mlp))  # fmt: skip
    base = 2 * M * (wide + hidden) + 4 * M + weights  # x, H; rstd; the weights as dgrad multiplies them
    assert saved_bytes(mlp, x) == base
    mlp.recompute = False
    bits = mlp.fc1.recipe.saved_bits_per_element(0)
    assert saved_bytes(mlp, x) == base + M * (wide + hidden) * bits / 8
    eager_bf16 = 2 * M * 2 * (wide + hidden)  # x, N, H, A
    assert 2 * M * (wide + hidden) / eager_bf16 == 0.5
    with torch.no_grad():
        assert saved_bytes(mlp, x) == 0


def frozen(mlp: MXFP8MLP) -> list[nn.Module]:
    """The linear layers with nothing to train: what they keep is the weight that dgrad multiplies."""
    return [copy.deepcopy(part).requires_grad_(False) for part in (mlp.fc1, mlp.fc2)]


@recipes
def test_recomputing_changes_no_bits(recipe: LinearRecipe) -> None:
    """On the reference. A kernel may sum a row in another order where it makes one copy instead of two."""
    x, dy = data(48, torch.bfloat16, torch.device("cpu"))
    mlp = make(recipe)
    first = run(mlp, x, dy)
    mlp.recompute = False
    assert differing(run(mlp, x, dy), first) == []


# Autograd


def same_sum(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> bool:
    """Whether both can be float32 column sums of ``terms``, each in an order of its own."""
    return bool(((got.double() - want.double()).abs() <= 2 * tolerances.sum_error(terms, got.dtype)).all())


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_square", "mxfp8_robust", "hp_everywhere"])
@pytest.mark.parametrize("recompute", [False, True])
def test_only_what_is_asked_for_is_computed(recompute: bool, recipe: str, device: torch.device) -> None:
    chosen = next(r for r in ALL_RECIPES if r.name == recipe)
    mlp = make(chosen, "layernorm", recompute=recompute, device=device)
    x, dy = data(33, torch.bfloat16, device)
    full = run(mlp, x, dy)
    composition = Composition(mlp)
    composition(x, dy)
    terms = composition.terms
    assert all(same_sum(full[n], full[n] + tolerances.sum_error(terms[n], full[n].dtype), terms[n]) for n in terms)
    assert not any(same_sum(full[n], full[n] + terms[n].abs().amax(0), terms[n]) for n in terms)
    names = ["x", *(n for n, _ in mlp.named_parameters())]
    through_fc1 = {"x", "norm.weight", "norm.bias"}
    for trained in (
        [],
        *([n] for n in names),
        ["x", "fc2.weight"],
        ["fc1.weight", "fc2.bias"],
        ["norm.bias", "fc1.bias"],
    ):
        mlp.zero_grad()
        for name, p in mlp.named_parameters():
            p.requires_grad_(name in trained)
        leaf = x.clone().requires_grad_("x" in trained)
        events: list[observe.Event] = []
        with observe.subscribe(events.append):
            y = mlp(leaf)
            assert y.requires_grad == bool(trained)
            if trained:
                y.backward(dy)
        seen = {(e.layer, e.gemm) for e in events if isinstance(e, observe.GemmEvent)} - {
            ("fc1", "fprop"),
            ("fc2", "fprop"),
        }
        want = {(n.split(".")[0], "wgrad") for n in trained if n in ("fc1.weight", "fc2.weight")}
        want |= {("fc1", "dgrad")} if through_fc1 & set(trained) else set()
        want |= {("fc2", "dgrad")} if (through_fc1 | {"fc1.weight", "fc1.bias"}) & set(trained) else set()
        assert seen == want
        got = {"x": leaf.grad, **{n: p.grad for n, p in mlp.named_parameters()}}
        assert torch.equal(y, full["y"])
        assert [n for n in names if got[n] is not None] == [n for n in names if n in trained]
        apart = differing({n: got[n] for n in trained}, {n: full[n] for n in trained})
        far = [n for n in apart if n not in terms or not same_sum(got[n], full[n], terms[n])]
        # A GPU's kernel for one copy may add rows in another order than its kernel for two.
        assert (far if device.type == "cuda" else apart) == []


@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_square", "mxfp8_robust"])
@norms
def test_calls_that_repeat_earlier_ones_have_their_bits(norm: str | None, recipe: str, device: torch.device) -> None:
    """From the second call of a shape on, a GPU may replay what the first one decided."""
    mlp = make(recipe, norm, "silu", device=device)
    batches = [data(48, torch.bfloat16, device) for _ in range(2)]
    first = [run(mlp, x, dy) for x, dy in batches]
    for _ in range(3):
        assert [differing(run(mlp, *batch), want) for batch, want in zip(batches, first, strict=True)] == [[], []]


@recipes
def test_without_gradients_it_has_the_same_bits(recipe: LinearRecipe, device: torch.device) -> None:
    mlp, (x, _) = make(recipe, recompute=True, device=device), data(33, torch.bfloat16, device)
    trained = mlp(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(mlp(x), trained)
    with torch.inference_mode():
        assert torch.equal(mlp(x), trained)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_robust", "mxfp8_coalesced"])
def test_activation_checkpointing_gives_the_same_bits(recipe: str, reentrant: bool, device: torch.device) -> None:
    mlp, (x, dy) = make(recipe, device=device), data(48, torch.bfloat16, device)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("inner", mlp)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(mlp, x, use_reentrant=reentrant)

    plain = run(mlp, x, dy)
    again = {name.removeprefix("inner."): value for name, value in run(Checkpointed(), x, dy).items()}
    assert differing(again, plain) == []


def test_observers_change_nothing(device: torch.device) -> None:
    for recipe in ("mxfp8_rceil", "mxfp8_robust"):
        mlp, (x, dy) = make(recipe, device=device), data(48, torch.bfloat16, device)
        unseen = run(mlp, x, dy)
        with observe.subscribe(lambda e: None):
            assert differing(run(mlp, x, dy), unseen) == []


def test_differentiating_twice_is_an_error_and_not_a_zero() -> None:
    x = torch.randn(4, IN, requires_grad=True)
    (grad,) = torch.autograd.grad(make()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_robust"])
def test_compiled_it_has_the_same_bits(recipe: str) -> None:
    mlp, (x, dy) = make(recipe), data(48, torch.bfloat16, torch.device("cpu"))
    torch._dynamo.reset()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    found = {name.removeprefix("_orig_mod."): value for name, value in run(compiled, x, dy).items()}
    assert differing(found, run(mlp, x, dy)) == []


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 0)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], device: torch.device) -> None:
    mlp, x = make(device=device), torch.randn(*shape, IN, device=device)
    got, flat = run(mlp, x), run(mlp, x.reshape(-1, IN))
    assert (got["y"].shape, got["x"].shape) == ((*shape, OUT), x.shape)
    assert all(torch.equal(got[n].reshape(flat[n].shape), flat[n]) for n in got)


def test_strides_of_inputs_and_gradients_never_matter(device: torch.device) -> None:
    """(Nor with a norm, but for the order in which a row is summed.)"""
    mlp = make(norm=None, device=device)
    x, dy = torch.randn(IN, 48, device=device).mT, torch.randn(1, OUT, device=device).expand(48, OUT)
    assert differing(run(mlp, x, dy), run(mlp, x.contiguous(), dy.contiguous())) == []


@norms
def test_autocast_gives_the_dtypes_of_ordinary_modules(norm: str | None, device: torch.device) -> None:
    mlp, (x, dy) = make(norm=norm, device=device), data(33, torch.float32, device)
    results = []
    for module in (mlp, sequential(mlp)):
        leaf = x.clone().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = module(leaf)
        y.backward(dy.to(y.dtype))
        results.append([y.dtype, leaf.grad.dtype, *(p.grad.dtype for p in module.parameters())])
    assert results[0] == results[1]
    assert results[0][0] == torch.bfloat16
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(mlp(x), mlp(x.bfloat16()))


def test_random_bits_differ_between_its_layers_and_depend_on_their_names(device: torch.device) -> None:
    square = MXFP8MLP(IN, IN, IN, recipe="mxfp8_robust", norm=None, device=device)
    assert square.fc1.fqn != square.fc2.fqn
    x, dy = data(48, torch.bfloat16, device)
    mlp = make("mxfp8_robust", device=device)
    first = run(mlp, x, dy)
    assert differing(run(mlp, x, dy), first) == []
    mlp.fc2.fqn = "other"
    assert not torch.equal(run(mlp, x, dy)["x"], first["x"])
