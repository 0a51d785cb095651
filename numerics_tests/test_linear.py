"""``MXFP8Linear``: its three GEMMs against a composition of its own, and that it behaves as ``nn.Linear`` otherwise."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxfp8
from mxfp8 import MXFP8Linear, observe
from mxfp8.recipe import GemmSpec, LinearRecipe
from mxfp8.rng import get_step, set_step
from numerics_tests import tolerances
from numerics_tests.composition import ALL_RECIPES, LinearReference

recipes = pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)


def make(
    recipe: LinearRecipe | str = "mxfp8_rceil", K: int = 64, N: int = 96, fqn: str = "net.fc", **kw
) -> MXFP8Linear:
    return MXFP8Linear.from_linear(nn.Linear(K, N, **kw), recipe, fqn=fqn)


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Output and all gradients of one pass; ``x`` gets its gradient afresh, parameters too."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(g.dtype == h.dtype and torch.equal(g, h) for g, h in zip(a, b, strict=True))


# The three GEMMs


@recipes
@pytest.mark.parametrize("M", [0, 1, 31, 33, 48, 64])
def test_gemms_against_the_composition(M: int, recipe: LinearRecipe, device: torch.device) -> None:
    for K, N in ((64, 96), (40, 24)):
        layer = make(recipe, K, N, device=device)
        x, dy = torch.randn(M, K, device=device), torch.randn(M, N, device=device)
        y, dx, dw, db = run(layer, x, dy)
        want = LinearReference(recipe=recipe, weight=layer.weight.detach(), bias=layer.bias, name="net.fc")
        want.fprop(x, torch.float32).assert_equals(y)
        want.dgrad(dy, torch.float32).assert_equals(dx)
        want.wgrad(dy, x, torch.float32).assert_equals(dw)
        assert ((db.double() - dy.double().sum(0)).abs() <= tolerances.sum_error(dy.double(), torch.float32)).all()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs(dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> None:
    """Weights are cast from their own precision, gradients come in the dtype of what they belong to."""
    layer = make(device=device, dtype=weight_dtype)
    x, dy = torch.randn(33, 64, device=device).to(dtype), torch.randn(33, 96, device=device).to(dtype)
    y, dx, dw, db = run(layer, x, dy)
    assert [t.dtype for t in (y, dx, dw, db)] == [dtype, dtype, weight_dtype, weight_dtype]
    want = LinearReference(recipe=layer.recipe, weight=layer.weight.detach(), bias=layer.bias)
    want.fprop(x, dtype).assert_equals(y)
    want.dgrad(dy, dtype).assert_equals(dx)
    want.wgrad(dy, x, weight_dtype).assert_equals(dw)
    assert ((db.double() - dy.double().sum(0)).abs() <= tolerances.sum_error(dy.double(), weight_dtype)).all()


@recipes
def test_a_forward_without_gradients_has_the_same_bits(recipe: LinearRecipe, device: torch.device) -> None:
    """One pass casts the input for two GEMMs in training, and for one in evaluation."""
    layer = make(recipe, device=device)
    x = torch.randn(33, 64, device=device) * torch.exp2(torch.randint(-9, 9, (33, 64), device=device))
    trained = layer(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(layer(x), trained)


@recipes
def test_every_cast_is_from_high_precision_by_its_own_spec(recipe: LinearRecipe, device: torch.device) -> None:
    layer = make(recipe, device=device)
    x, dy = torch.randn(48, 64, device=device), torch.randn(48, 96, device=device)
    hp = {"input": x, "weight": layer.weight.detach(), "grad_output": dy}
    table = {  # docs/numerics.md, "What a linear layer casts"
        ("fprop", "input"): (recipe.fprop.lhs, -1),
        ("fprop", "weight"): (recipe.fprop.rhs, -1),
        ("dgrad", "grad_output"): (recipe.dgrad.lhs, -1),
        ("dgrad", "weight"): (recipe.dgrad.rhs, -2),
        ("wgrad", "grad_output"): (recipe.wgrad.lhs, -2),
        ("wgrad", "input"): (recipe.wgrad.rhs, -2),
    }
    if recipe.shares_weight and device.type == "cpu":  # a GPU keeps both orders
        del table["dgrad", "weight"]
    if recipe.shares_input and recipe.saves_mx_activations:
        del table["wgrad", "input"]
    casts: list[observe.CastEvent] = []
    with observe.subscribe(lambda e: casts.append(e) if isinstance(e, observe.CastEvent) else None):
        run(layer, x, dy)
    assert len(casts) == len({(e.gemm, e.operand) for e in casts})
    assert {(e.gemm, e.operand) for e in casts} == {key for key, (spec, _) in table.items() if spec is not None}
    for e in casts:
        spec, axis = table[e.gemm, e.operand]
        source = (
            hp[e.operand] if spec.hadamard is None else mxfp8.hadamard(hp[e.operand], axis, spec.hadamard, recipe.seed)
        )
        assert torch.equal(e.x, source)
        assert (e.layer, e.q.fmt.name, e.q.axis, e.q.block) == ("net.fc", spec.fmt, axis, spec.block)
        want = mxfp8.quantize(source, axis, spec.fmt, spec.block, spec.scale_rule)
        assert torch.equal(e.q.scale_bytes, want.scale_bytes)
        equal = torch.equal(e.q.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert equal == (spec.rounding == "nearest")


@recipes
def test_observers_change_nothing_and_see_three_gemms(recipe: LinearRecipe, device: torch.device) -> None:
    layer, x = make(recipe, device=device), torch.randn(33, 64, device=device)
    unseen, events = run(layer, x), []
    with observe.subscribe(events.append):
        seen = run(layer, x)
    assert same(seen, unseen)
    assert same(run(layer, x), unseen)
    gemms = [e for e in events if isinstance(e, observe.GemmEvent)]
    assert [e.gemm for e in gemms] == ["fprop", "dgrad", "wgrad"]
    assert [torch.equal(e.out, r) for e, r in zip(gemms, seen, strict=False)] == [True] * 3


@recipes
@pytest.mark.parametrize("M, K, N", [(0, 64, 96), (33, 0, 96), (33, 64, 0), (0, 0, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_dimensions(M: int, K: int, N: int, recipe: LinearRecipe, device: torch.device) -> None:
    layer, plain = make(recipe, K, N, device=device), nn.Linear(K, N, device=device)
    plain.load_state_dict(layer.state_dict())
    for got, want in zip(
        run(layer, torch.randn(M, K, device=device)), run(plain, torch.randn(M, K, device=device)), strict=True
    ):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 0, 64), (2, 3, 5, 64)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], device: torch.device) -> None:
    layer, x = make(device=device), torch.randn(shape, device=device)
    got, flat = run(layer, x), run(layer, x.reshape(-1, 64))
    assert got[0].shape == (*shape[:-1], 96)
    assert got[1].shape == shape
    assert same([g.reshape(f.shape) for g, f in zip(got, flat, strict=True)], flat)


# Autograd


@recipes
def test_strides_of_inputs_and_gradients_never_matter(recipe: LinearRecipe, device: torch.device) -> None:
    """The same bytes from every layout; BLAS may add up in another order, within the bound."""
    layer = make(recipe, device=device)
    want = LinearReference(recipe=recipe, weight=layer.weight.detach(), bias=layer.bias, name="net.fc")
    for x, dy in (
        (torch.randn(48, 64, device=device), torch.ones(1, 1, device=device).expand(48, 96)),
        (torch.randn(64, 48, device=device).mT, torch.randn(96, 48, device=device).mT),
        (torch.randn(96, 130, device=device)[::2, 1:65], torch.randn(1, 96, device=device).expand(48, 96)),
    ):
        strided, plain = [], []
        with observe.subscribe(strided.append):
            y, dx, dw, db = run(layer, x, dy)
        with observe.subscribe(plain.append):
            run(layer, x.contiguous(), dy.contiguous())
        for s, p in zip(strided, plain, strict=True):
            if isinstance(s, observe.CastEvent):
                assert torch.equal(s.q.qdata.view(torch.uint8), p.q.qdata.view(torch.uint8))
                assert torch.equal(s.q.scale_bytes, p.q.scale_bytes)
        want.fprop(x, torch.float32).assert_equals(y)
        want.dgrad(dy, torch.float32).assert_equals(dx)
        want.wgrad(dy, x, torch.float32).assert_equals(dw)
        assert ((db.double() - dy.double().sum(0)).abs() <= tolerances.sum_error(dy.double(), torch.float32)).all()
    layer(torch.randn(48, 64, device=device, requires_grad=True)).sum().backward()  # an expanded gradient


def test_only_what_is_asked_for_is_computed(device: torch.device) -> None:
    x, dy = torch.randn(33, 64, device=device), torch.randn(33, 96, device=device)
    full = run(make(device=device), x, dy)
    state = make(device=device).state_dict()
    for frozen, gemms in (("input", ["fprop", "wgrad"]), ("weight", ["fprop", "dgrad"]), ("all", ["fprop"])):
        layer, events = make(device=device), []
        layer.load_state_dict(state)
        full = run(layer, x, dy)
        layer.zero_grad()
        layer.weight.requires_grad_(frozen == "input")
        layer.bias.requires_grad_(frozen != "all")
        leaf = x.clone().requires_grad_(frozen == "weight")
        with observe.subscribe(events.append):
            y = layer(leaf)
            if y.requires_grad:
                y.backward(dy)
        assert [e.gemm for e in events if isinstance(e, observe.GemmEvent)] == gemms
        got = (y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad)
        for g, f in zip(got, full, strict=True):
            assert g is None or torch.equal(g, f)
        assert (leaf.grad is None, layer.weight.grad is None) == (frozen != "weight", frozen != "input")
        assert (layer.bias.grad is None) == (frozen == "all")


def test_nothing_is_kept_without_gradients(device: torch.device) -> None:
    layer, x = make(device=device), torch.randn(33, 64, device=device)
    want = run(layer, x)[0]
    with torch.no_grad():
        assert torch.equal(layer(x), want)
    with torch.inference_mode():
        assert torch.equal(layer(x), want)


def test_skipped_wgrad_leaves_no_gradient(device: torch.device) -> None:
    layer = make(LinearRecipe(name="skip", wgrad=GemmSpec(skip=True)), device=device)
    x = torch.randn(33, 64, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad.tolist() == [33.0] * 96
    assert x.grad is not None


def test_bias_gradient_is_the_same_every_time(device: torch.device) -> None:
    layer, x, dy = make(device=device), torch.randn(333, 64, device=device), torch.randn(333, 96, device=device)
    first = run(layer, x, dy)
    assert all(same(run(layer, x, dy), first) for _ in range(20))
    assert len(run(make(bias=False, device=device), x, dy)) == 3


@recipes
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(
    reentrant: bool, recipe: LinearRecipe, device: torch.device
) -> None:
    net = nn.Sequential(make(recipe, fqn="a", device=device), nn.GELU(), make(recipe, 96, 64, fqn="b", device=device))
    x = torch.randn(33, 64, device=device)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=reentrant)

    assert same(run(Checkpointed(), x), run(net, x))


def test_one_layer_used_twice_equals_two_layers_with_tied_weights(device: torch.device) -> None:
    layer = make("mxfp8_robust", 64, 64, device=device)
    twin = MXFP8Linear.from_linear(layer, layer.recipe, fqn=layer.fqn)
    assert twin.weight is layer.weight
    x = torch.randn(33, 64, device=device)
    assert same(run(nn.Sequential(layer, layer), x), run(nn.Sequential(layer, twin), x))


def test_stochastic_bits_depend_on_step_and_name_and_on_nothing_else(device: torch.device) -> None:
    layer, x, before = make("mxfp8_robust", device=device), torch.randn(33, 64, device=device), get_step()
    dy = torch.randn(33, 96, device=device)
    other = MXFP8Linear.from_linear(layer, "mxfp8_robust", fqn="net.other")
    try:
        set_step(10)
        first = run(layer, x, dy)
        torch.rand(1)
        assert same(run(layer, x, dy), first)
        assert not torch.equal(run(other, x, dy)[1], first[1])
        set_step(11)
        assert not torch.equal(run(layer, x, dy)[1], first[1])
        set_step(10)
        assert same(run(layer, x, dy), first)
    finally:
        set_step(before)


def test_differentiating_twice_is_an_error_and_not_a_zero() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(make()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# Dtypes


@recipes
def test_autocast_gives_the_dtypes_of_nn_linear(recipe: LinearRecipe, device: torch.device) -> None:
    for x in (torch.randn(5, 64, device=device), torch.randn(5, 64, device=device).bfloat16()):
        layer, plain = make(recipe, device=device), nn.Linear(64, 96, device=device)
        results = []
        for module in (layer, plain):
            leaf = x.clone().requires_grad_()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                y = module(leaf)
            y.float().square().sum().backward()
            results.append([t.dtype for t in (y, leaf.grad, module.weight.grad, module.bias.grad)])
        assert results[0] == results[1]
        assert results[0][0] == torch.bfloat16


def test_autocast_casts_the_input_and_not_the_weight(device: torch.device) -> None:
    layer, x = make(device=device), torch.randn(33, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = layer(x)
    assert torch.equal(inside, layer(x.bfloat16()))


# Being an nn.Linear


def test_conversion_shares_parameters_and_goes_back() -> None:
    plain = nn.Linear(64, 96)
    layer = MXFP8Linear.from_linear(plain, "mxfp8_square", fqn="a.b")
    back = layer.to_linear()
    assert isinstance(layer, nn.Linear)
    assert type(back) is nn.Linear
    for other in (layer, back):
        assert other.weight is plain.weight
        assert other.bias is plain.bias
    x = torch.randn(3, 64)
    assert torch.equal(back(x), plain(x))
    assert (layer.fqn, layer.recipe.name, layer.recipe.name in repr(layer)) == ("a.b", "mxfp8_square", True)
    assert not {"recipe", "fqn", "_cache"} & set(vars(back))


def test_mode_and_hooks_survive_conversion_both_ways() -> None:
    calls: list[str] = []
    plain = nn.Linear(64, 96).eval()
    plain.register_forward_pre_hook(lambda *a: calls.append("before"))
    plain.register_forward_hook(lambda *a: calls.append("after"))
    plain.register_full_backward_hook(lambda *a: calls.append("backward"))
    plain.weight.register_hook(lambda g: calls.append("weight"))
    layer = MXFP8Linear.from_linear(plain)
    for module in (layer, layer.to_linear()):
        calls.clear()
        assert not module.training
        module(torch.randn(3, 64, requires_grad=True)).sum().backward()
        assert sorted(calls) == ["after", "backward", "before", "weight"]
    layer.register_forward_hook(lambda *a: calls.append("new"))
    calls.clear()
    plain(torch.randn(3, 64))
    assert "new" not in calls


def test_state_dicts_are_those_of_nn_linear(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    layer, plain = make("mxfp8_robust"), nn.Linear(64, 96)
    layer(torch.randn(3, 64))
    state = layer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {type(v) for v in state.values()} == {torch.Tensor}
    plain.load_state_dict(state, strict=True)
    make().load_state_dict(plain.state_dict(), strict=True)
    save_file(state, tmp_path / "layer.safetensors")
    assert torch.equal(load_file(tmp_path / "layer.safetensors")["weight"], layer.weight)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], layer.weight)


@recipes
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_share_nothing(copied, recipe: LinearRecipe) -> None:
    layer, x = make(recipe), torch.randn(33, 64)
    want = run(layer, x)
    twin = copied(layer)
    assert same(run(twin, x), want)
    with torch.no_grad():
        twin.weight.mul_(2)
    assert same(run(layer, x), want)
    assert not torch.equal(run(twin, x)[0], want[0])


@recipes
def test_meta_and_fake_layers_give_shapes(recipe: LinearRecipe) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = make(recipe, device="meta")
    assert layer(torch.empty(33, 64, device="meta")).shape == (33, 96)
    with FakeTensorMode():
        y, dx, dw, db = run(make(recipe), torch.randn(33, 64))
        assert [tuple(t.shape) for t in (y, dx, dw, db)] == [(33, 96), (33, 64), (96, 64), (96,)]


def test_from_meta_to_training() -> None:
    layer = make(device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert torch.isfinite(run(layer, torch.randn(3, 64))[2]).all()


@pytest.mark.parametrize(
    "error, match, call",
    [
        (
            ValueError,
            r"layer 'net.fc': input has shape \(3, 65\), its last dimension must be 64",
            lambda f: f(torch.ones(3, 65)),
        ),
        (ValueError, r"layer 'net.fc': input has shape \(\)", lambda f: f(torch.tensor(1.0))),
        (TypeError, "layer 'net.fc': input is torch.int64", lambda f: f(torch.ones(3, 64).long())),
        (TypeError, "layer 'net.fc': input is torch.float64", lambda f: f(torch.ones(3, 64).double())),
        (TypeError, "layer 'net.fc': weight is torch.float64", lambda f: f.double()(torch.ones(3, 64))),
        (ValueError, "layer 'net.fc': weights are on the meta device", lambda f: f.to("meta")(torch.ones(3, 64))),
        (ValueError, "unknown recipe 'fp4'", lambda f: MXFP8Linear.from_linear(f, "fp4")),
        (TypeError, "not Bilinear", lambda f: MXFP8Linear.from_linear(nn.Bilinear(2, 2, 2))),
        (TypeError, "not LazyLinear", lambda f: MXFP8Linear.from_linear(nn.LazyLinear(2))),
    ],
)
def test_bad_inputs_are_named(error, match: str, call) -> None:
    with pytest.raises(error, match=match):
        call(make())


def test_non_finite_values_are_not_hidden(device: torch.device) -> None:
    layer, x = make(device=device), torch.randn(4, 64, device=device)
    x[1, 5] = torch.inf
    y, dx, dw, _ = run(layer, x)
    assert y.isnan().all(1).tolist() == [False, True, False, False]
    assert torch.isfinite(dx).all()
    assert dw.isnan().any(0).nonzero().flatten().tolist() == [5]
