"""``MXFP8MLP`` as a composition of public ops, and what its tests share: modules, data and one pass."""

import zlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import MXFP8MLP, MXFP8Linear, fused
from mxfp8.recipe import CastSpec, LinearRecipe
from mxfp8.rng import RngKey, get_step
from mxfp8.tensor import MXTensor
from numerics_tests.composition import ALL_RECIPES, STREAMS

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
