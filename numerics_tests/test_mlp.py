"""``MXFP8MLP``: the bits of a composition from public ops, each stage against float64, and a module like any other."""

import copy
import dataclasses
import itertools
import math
import pickle
import zlib
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxfp8
from mxfp8 import MXFP8MLP, MXFP8Linear, fused, observe
from mxfp8.recipe import CastSpec, GemmSpec, LinearRecipe, get_recipe
from mxfp8.reference.fused import ACTIVATIONS
from mxfp8.rng import RngKey, get_step
from mxfp8.tensor import MXTensor
from numerics_tests import tolerances
from numerics_tests.composition import ALL_RECIPES, STREAMS
from numerics_tests.test_fused import EXACT, exact_activation, gradient_bounds, value_error
from numerics_tests.test_saved_activations import saved_bytes

NORMS = ("rmsnorm", "layernorm", None)
KINDS = {"rmsnorm": "rms", "layernorm": "layer"}
IN, HIDDEN, OUT = 64, 96, 40
recipes = pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
norms = pytest.mark.parametrize("norm", NORMS, ids=str)


def make(recipe: str | LinearRecipe = "mxfp8_rceil", norm: str | None = "rmsnorm", activation: str = "gelu", **kw: Any):
    """An MLP whose norm and biases do something."""
    mlp = MXFP8MLP(IN, HIDDEN, OUT, norm=norm, activation=activation, recipe=recipe, **kw)
    with torch.no_grad():
        for name, p in mlp.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn(p.shape) * 0.3 + (1.0 if name == "norm.weight" else 0.0))
    return mlp


def run(mlp: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Output and all gradients of one pass, by name."""
    mlp.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = mlp(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    grads = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert list(got) == list(want)
    assert [g.dtype for g in got.values()] == [w.dtype for w in want.values()]
    return [name for name in got if not torch.equal(got[name], want[name])]


def data(M: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different sizes, and a gradient."""
    x = torch.randn(M, IN, device=device) * torch.exp2(torch.randint(-6, 6, (M, 1), device=device).float())
    return x.to(dtype), torch.randn(M, OUT, device=device).to(dtype)


# The composition


class Composition:
    """The MLP written once more from ``mxfp8.fused``, ``mxfp8.quantize`` and ``mxfp8.gemm``, as its docstring says."""

    def __init__(self, mlp: MXFP8MLP) -> None:
        self.mlp, self.fc1, self.fc2 = mlp, mlp.fc1, mlp.fc2
        self.terms: dict[str, torch.Tensor] = {}
        """Of the last call, in float64: what adds up over rows to the gradients of fc1's bias and of the norm."""

    def spec(self, layer: MXFP8Linear, gemm: str, side: str) -> CastSpec | None:
        return getattr(getattr(layer.recipe, gemm), side)

    def quantize(self, layer: MXFP8Linear, x: torch.Tensor, gemm: str, side: str, axis: int) -> Any:
        """From the value in its own dtype, by its own spec."""
        spec = self.spec(layer, gemm, side)
        if spec is None:
            return x
        if spec.hadamard is not None:
            x = mxfp8.hadamard(x, axis, spec.hadamard, layer.recipe.seed)
        key = None
        if spec.rounding == "stochastic":
            stream = (zlib.crc32(layer.fqn.encode()) + STREAMS[gemm, side]) % 2**32
            key = RngKey(seed=layer.recipe.seed, step=get_step(), stream=stream)
        return mxfp8.quantize(x, axis, spec.fmt, spec.block, spec.scale_rule, spec.rounding, key)

    def made(self, layer: MXFP8Linear, op: Any, args: tuple[Any, ...], rows: Any, columns: Any, **kw: Any) -> Any:
        """``op``'s result as operand of ``rows = (gemm, side)`` and of ``columns``, and everything it returns."""
        specs = [None if names is None else self.spec(layer, *names) for names in (rows, columns)]
        rounded = [s is not None and s.rounding == "nearest" and s.hadamard is None for s in specs]
        if all(rounded) and (specs[0].fmt, specs[0].scale_rule) != (specs[1].fmt, specs[1].scale_rule):
            rounded[1] = False  # one pass has one format and rule
        wanted = [name for name, itself in zip(("rows", "columns"), rounded, strict=True) if itself]
        if any(n is not None and not r for n, r in zip((rows, columns), rounded, strict=True)) or not wanted:
            wanted.append("hp")
        first = next((s for s, itself in zip(specs, rounded, strict=True) if itself), CastSpec())
        with torch.no_grad():
            out = op(
                *args, fmt=first.fmt, scale_rule=first.scale_rule, outputs=wanted,
                block=specs[0].block if rounded[0] else first.block,
                column_block=specs[1].block if rounded[1] else first.block, **kw,
            )  # fmt: skip
        operands = [
            None if names is None else made if itself else self.quantize(layer, out.hp, *names, axis)
            for names, made, itself, axis in zip((rows, columns), out[:2], rounded, (-1, -2), strict=True)
        ]
        return *operands, out

    def gemm(self, a: Any, b: Any, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
        bias = None if bias is None else bias.detach()
        if isinstance(a, MXTensor) or isinstance(b, MXTensor):
            return mxfp8.gemm(a, b, bias, dtype)
        return nn.functional.linear(a, b.to(a.dtype), None if bias is None else bias.to(a.dtype)).to(dtype)

    def normalise(self, x: torch.Tensor, rows: bool, columns: bool) -> Any:
        along, down = ("fprop", "lhs") if rows else None, ("wgrad", "rhs") if columns else None
        norm = self.mlp.norm
        if norm is None:
            return (
                self.quantize(self.fc1, x, "fprop", "lhs", -1) if rows else None,
                self.quantize(self.fc1, x, "wgrad", "rhs", -2) if columns else None,
                None,
            )
        args = (x, norm.weight.detach(), None if norm_bias(norm) is None else norm.bias.detach())
        kind = {"norm": "layer" if isinstance(norm, nn.LayerNorm) else "rms", "eps": norm.eps}
        return self.made(self.fc1, fused.norm_quantize, args, along, down, **kind)

    def activate(self, h: torch.Tensor, rows: bool, columns: bool) -> Any:
        along, down = ("fprop", "lhs") if rows else None, ("wgrad", "rhs") if columns else None
        args = (h, self.mlp.activation, None if self.fc1.bias is None else self.fc1.bias.detach())
        return self.made(self.fc2, fused.activation_quantize, args, along, down)

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        mlp, fc1, fc2, dtype = self.mlp, self.fc1, self.fc2, x.dtype
        w1, w2 = fc1.weight.detach(), fc2.weight.detach()
        keep_n = fc1.recipe.saves_mx_activations and not (mlp.recompute and mlp.norm is not None)
        keep_a = fc2.recipe.saves_mx_activations and not mlp.recompute
        n, n_wgrad, normed = self.normalise(x, True, keep_n)
        h = self.gemm(n, self.quantize(fc1, w1, "fprop", "rhs", -1), dtype)
        a, a_wgrad, _ = self.activate(h, True, keep_a)
        y = self.gemm(a, self.quantize(fc2, w2, "fprop", "rhs", -1), dtype, fc2.bias)
        n_wgrad = n_wgrad if keep_n else self.normalise(x, False, True)[1]
        a_wgrad = a_wgrad if keep_a else self.activate(h, False, True)[1]

        dw2 = self.gemm(self.quantize(fc2, dy, "wgrad", "lhs", -2).mT, a_wgrad.mT, w2.dtype)
        da = self.gemm(self.quantize(fc2, dy, "dgrad", "lhs", -1), self.quantize(fc2, w2, "dgrad", "rhs", -2).mT, dtype)
        args = (da, h, mlp.activation, None if fc1.bias is None else fc1.bias.detach())
        dh, dh_wgrad, through = self.made(
            fc1, fused.activation_quantize_backward, args, ("dgrad", "lhs"), ("wgrad", "lhs")
        )
        if fc1.bias is not None:
            wide = (da.float(), h.float(), mlp.activation, fc1.bias.detach().float())
            self.terms["fc1.bias"] = fused.activation_quantize_backward(*wide, outputs=["hp"]).hp.double()
        dw1 = self.gemm(dh_wgrad.mT, n_wgrad.mT, w1.dtype)
        dx = self.gemm(dh, self.quantize(fc1, w1, "dgrad", "rhs", -2).mT, dtype)
        out = {"y": y}
        if mlp.norm is not None:
            kind = "layer" if isinstance(mlp.norm, nn.LayerNorm) else "rms"
            with torch.no_grad():
                grads = fused.norm_quantize_backward(
                    dx, normed.h, normed.rstd, normed.mean, mlp.norm.weight.detach(), norm=kind, outputs=["hp"],
                    with_bias=norm_bias(mlp.norm) is not None,
                )  # fmt: skip
            mean = 0.0 if normed.mean is None else normed.mean.double()
            self.terms["norm.weight"] = dx.double() * ((normed.h.double() - mean) * normed.rstd.double())
            if norm_bias(mlp.norm) is not None:
                self.terms["norm.bias"] = dx.double()
            dx, out["norm.weight"] = grads.hp, grads.weight.to(mlp.norm.weight.dtype)
            if grads.bias is not None:
                out["norm.bias"] = grads.bias.to(mlp.norm.bias.dtype)
        out |= {"fc1.weight": dw1, "fc2.weight": dw2}
        if fc1.bias is not None:
            out["fc1.bias"] = through.bias.to(fc1.bias.dtype)
            out["fc2.bias"] = dy.sum(0, dtype=torch.float32).to(fc2.bias.dtype)
        out["x"] = dx
        return {name: out[name] for name in ("y", "x", *(n for n, _ in mlp.named_parameters()))}


def norm_bias(norm: nn.Module) -> torch.Tensor | None:
    return getattr(norm, "bias", None)


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


class Swiglu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


def sequential(mlp: MXFP8MLP, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Ordinary modules with copies of the same parameters under the same names."""
    kinds = {"relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "silu": nn.SiLU(),
             "hardswish": nn.Hardswish(), "swiglu": Swiglu()}  # fmt: skip
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if mlp.norm is not None:
        parts["norm"] = type(mlp.norm)(mlp.in_features, eps=mlp.norm.eps)
    parts["fc1"] = nn.Linear(mlp.in_features, mlp.fc1.out_features, mlp.fc1.bias is not None)
    parts["act"] = kinds[mlp.activation]
    parts["fc2"] = nn.Linear(mlp.fc2.in_features, mlp.out_features, mlp.fc2.bias is not None)
    out = nn.Sequential(parts).to(mlp.fc1.weight.device)
    out.load_state_dict(mlp.state_dict(), strict=True)
    return out.to(dtype)


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


# A module like any other


def test_from_modules_shares_parameters(device: torch.device) -> None:
    norm, fc1, fc2 = nn.LayerNorm(IN), nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT, bias=False)
    mlp = MXFP8MLP.from_modules(norm, fc1, nn.GELU(approximate="tanh"), fc2, "mxfp8_square", fqn="net.mlp").to(device)
    assert mlp.fc1.weight is fc1.weight
    assert mlp.fc2.weight is fc2.weight
    assert mlp.norm is norm
    assert (mlp.activation, mlp.fc1.fqn, mlp.fc2.fqn) == ("gelu_tanh", "net.mlp.fc1", "net.mlp.fc2")
    assert list(mlp.state_dict()) == ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight"]
    assert [p.name for p in (mlp.fc1.recipe, mlp.fc2.recipe)] == ["mxfp8_square"] * 2
    text = repr(mlp)
    assert all(word in text for word in ("gelu_tanh", "mxfp8_square", "LayerNorm", "recompute=True"))
    found = {type(m).__name__ for m in mlp.modules()}
    assert found == {"MXFP8MLP", "LayerNorm", "MXFP8Linear"}
    for module, name in ((nn.ReLU(), "relu"), (nn.SiLU(), "silu"), (nn.Hardswish(), "hardswish"), (nn.GELU(), "gelu")):
        assert MXFP8MLP.from_modules(None, fc1, module, fc2).activation == name


def test_eps_of_rms_norm_is_torchs_where_it_is_not_given(device: torch.device) -> None:
    tiny = torch.full((32, IN), 2.0**-10, device=device).bfloat16()  # its square is of the size of float32's epsilon
    norm = nn.RMSNorm(IN, device=device)
    hp = next(r for r in ALL_RECIPES if r.name == "hp_everywhere")
    mlp = MXFP8MLP.from_modules(norm, nn.Linear(IN, IN, bias=False), "relu", nn.Linear(IN, IN, bias=False), hp).to(
        device
    )
    with torch.no_grad():
        for part in (mlp.fc1, mlp.fc2):
            part.weight.copy_(torch.eye(IN))
    assert torch.allclose(mlp(tiny), norm(tiny.float()).bfloat16(), rtol=2.0**-7, atol=0)


def test_state_dicts_load_strictly_both_ways() -> None:
    mlp = make(norm="layernorm")
    plain = sequential(mlp)  # loads strictly
    make(norm="layernorm").load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_share_nothing(copied: Any) -> None:
    mlp, (x, dy) = make("mxfp8_square"), data(33, torch.bfloat16, torch.device("cpu"))
    want = run(mlp, x, dy)
    twin = copied(mlp)
    assert differing(run(twin, x, dy), want) == []
    with torch.no_grad():
        twin.fc2.weight.mul_(2)
    assert differing(run(mlp, x, dy), want) == []
    assert not torch.equal(run(twin, x, dy)["y"], want["y"])


@recipes
def test_meta_and_fake_inputs_give_shapes(recipe: LinearRecipe) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mlp = MXFP8MLP(IN, HIDDEN, OUT, recipe=recipe, device="meta")
    assert mlp(torch.empty(33, IN, device="meta")).shape == (33, OUT)
    with FakeTensorMode():
        fake = MXFP8MLP(IN, HIDDEN, OUT, recipe=recipe)
        grads = run(fake, torch.randn(33, IN))
        assert {n: g.shape for n, g in grads.items() if n != "y"} == {
            "x": (33, IN), **{n: p.shape for n, p in fake.named_parameters()}
        }  # fmt: skip


def test_policies_reach_its_layers(device: torch.device) -> None:
    model = nn.ModuleDict({"mlp": make(device=device)})
    mxfp8.convert(model, mxfp8.PrecisionPolicy(rules=[("mlp.fc1", "mxfp8_square")], default="mxfp8_coalesced"))
    mlp = model["mlp"]
    assert isinstance(mlp, MXFP8MLP)
    assert (mlp.fc1.recipe.name, mlp.fc2.recipe.name) == ("mxfp8_square", "mxfp8_coalesced")
    assert (mlp.fc1.fqn, mlp.fc2.fqn) == ("mlp.fc1", "mlp.fc2")
    x, dy = data(48, torch.bfloat16, device)
    assert differing(run(mlp, x, dy), Composition(mlp)(x, dy)) == []


def test_a_part_left_in_bf16_is_multiplied_in_bf16(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(48, torch.bfloat16, device)
    hp = next(r for r in ALL_RECIPES if r.name == "hp_everywhere")
    for part in ("fc1", "fc2"):
        expected = copy.deepcopy(mlp)
        expected.get_submodule(part).recipe = hp
        changed = copy.deepcopy(mlp)
        mxfp8.convert(nn.ModuleDict({"m": changed}), mxfp8.PrecisionPolicy(rules=[(f"m.{part}", "bf16")]))
        assert type(changed.get_submodule(part)) is nn.Linear
        assert differing(run(changed, x, dy), run(expected, x, dy)) == []


def test_hooks_of_parts_run(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(48, torch.bfloat16, device)
    fused_result, calls = run(mlp, x, dy), []
    handles = [part.register_forward_hook(lambda *a: calls.append(1)) for part in (mlp.norm, mlp.fc1, mlp.fc2)]
    unfused = run(mlp, x, dy)
    assert calls == [1, 1, 1]
    for name, value in unfused.items():
        assert mxfp8.metrics.sqnr_db(value, fused_result[name]) > 20, name  # roundings to bfloat16 in between
    for handle in handles:
        handle.remove()
    assert differing(run(mlp, x, dy), fused_result) == []
    seen = mxfp8.describe(nn.ModuleDict({"m": mlp})["m"], example_inputs=(x,))
    assert {row.name: row.rows for row in seen.rows if row.flops} == {"fc1": 48, "fc2": 48}


def test_audit_sees_all_six_products() -> None:
    model = nn.Sequential(make("mxfp8_rceil"), nn.Linear(OUT, 32))
    batches = [torch.randn(64, IN) for _ in range(2)]
    report = mxfp8.audit(model, batches, lambda m, b: m(b).square().mean(), policy="mxfp8_rceil")
    seen = {(row.layer, row.gemm) for row in report.rows}
    assert seen >= {(f"0.{part}", gemm) for part in ("fc1", "fc2") for gemm in ("fprop", "dgrad", "wgrad")}
    assert report.unseen == ()
    assert min(row.sqnr_db for row in report.rows) > 20


def test_it_trains_with_an_optimiser_that_fills_its_weight_caches(device: torch.device) -> None:
    from mxfp8.optim import AdamW

    mlp = make("mxfp8_rceil", activation="silu", device=device)
    twin = copy.deepcopy(mlp)
    x, target = torch.randn(128, IN, device=device), torch.randn(128, OUT, device=device)
    losses: list[list[float]] = []
    for module, optimizer in ((mlp, AdamW(mlp, lr=1e-2)), (twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))):
        losses.append([])
        for _ in range(12):
            loss = (module(x) - target).square().mean()
            losses[-1].append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert math.isclose(losses[0][-1], losses[1][-1], rel_tol=0.05)


def test_weights_are_cast_once_a_step(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(33, torch.bfloat16, device)
    run(mlp, x, dy)
    before = [dict(part._cache._copies) for part in (mlp.fc1, mlp.fc2)]
    assert [len(copies) for copies in before] == [2, 2]
    run(mlp, x, dy)
    after = [part._cache._copies for part in (mlp.fc1, mlp.fc2)]
    assert all(after[i][key] is q for i in (0, 1) for key, q in before[i].items())
    mlp.clear_cache()
    assert [part._cache._copies for part in (mlp.fc1, mlp.fc2)] == [{}, {}]


def test_a_skipped_wgrad_leaves_no_gradient() -> None:
    mlp = make(LinearRecipe(name="skip", wgrad=GemmSpec(skip=True)))
    grads = run(mlp, torch.randn(33, IN))
    assert sorted(grads) == ["fc1.bias", "fc2.bias", "norm.weight", "x", "y"]


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ValueError, r"layer 'fc1': input has shape \(3, 65\), its last", lambda: make()(torch.ones(3, 65))),
        (TypeError, "layer 'fc1': input is torch.float64", lambda: make()(torch.ones(3, IN).double())),
        (TypeError, "layer 'fc1': weight is torch.float64", lambda: make().double()(torch.ones(3, IN))),
        (ValueError, "weights are on the meta device", lambda: make().to("meta")(torch.ones(3, IN))),
        (ValueError, "unknown recipe 'fp4'", lambda: make("fp4")),
        (ValueError, "norm is 'batch': use one of rmsnorm, layernorm, or None", lambda: make(norm="batch")),
        (ValueError, "activation is 'tanh': use one of relu, gelu", lambda: make(activation="tanh")),
        (ValueError, "activation is 'Tanh': use one of", lambda: from_parts(activation=nn.Tanh())),
        (TypeError, "norm is a GroupNorm: use nn.RMSNorm, nn.LayerNorm", lambda: from_parts(norm=nn.GroupNorm(2, IN))),
        (ValueError, r"norm is over \(32,\): the input of fc1 needs \(64,\)", lambda: from_parts(norm=nn.RMSNorm(32))),
        (ValueError, "96 outputs, which swiglu makes 48; fc2 takes 96", lambda: from_parts(activation="swiglu")),
        (TypeError, "from_linear takes an nn.Linear, not Bilinear", lambda: from_parts(fc1=nn.Bilinear(2, 2, 2))),
    ],
)  # fmt: skip
def test_bad_inputs_are_named(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


def from_parts(**changes: Any) -> MXFP8MLP:
    parts = {"norm": None, "fc1": nn.Linear(IN, HIDDEN), "activation": "relu", "fc2": nn.Linear(HIDDEN, OUT)}
    return MXFP8MLP.from_modules(**parts | changes)


def test_non_finite_values_are_not_hidden(device: torch.device) -> None:
    mlp, x = make(norm="layernorm", device=device), torch.randn(4, IN, device=device)
    x[1, 5] = torch.inf
    found = run(mlp, x)
    assert found["y"].isnan().all(1).tolist() == [False, True, False, False]
    assert found["x"].isnan().any(1).tolist() == [False, True, False, False]


def test_save_activations_does_not_change_gradients() -> None:
    x, dy = data(33, torch.bfloat16, torch.device("cpu"))
    mlp = make("mxfp8_square", recompute=False)
    first = run(mlp, x, dy)
    for part in (mlp.fc1, mlp.fc2):
        part.recipe = dataclasses.replace(part.recipe, save_activations="high_precision")
    assert differing(run(mlp, x, dy), first) == []
