"""Norm, linear, activation, linear as one function: what feeds a GEMM is cast while it is computed.

=== forward    N  = norm(X)                  cast along K and along M while it is made
               H  = N[M,K] @ W1[H,K]^T       kept as it is, without its bias; not written where no gradient needs it
               A  = act(H + b1)              cast along H and along M while it is made
               Y  = A[M,H] @ W2[N,H]^T + b2
=== backward   dW2 = dY^T @ A,   dA = dY @ W2
               dH = act'(H + b1) * dA        cast along H and along M while it is made, and summed to db1
               dW1 = dH^T @ N,   dN = dH @ W1
               dX = norm'(X) * dN

As four modules, N, A and dH would be written in bfloat16 and read again by the casts. Here a GEMM's operand is the
quantised float32 value itself. Everything else (recipes, weight caches, random bits, what is watched) is that of
:class:`~mxfp8.MXFP8Linear`, layer by layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from mxfp8 import observe
from mxfp8.epilogue import gemm_quantize
from mxfp8.linear import (
    MXFP8Linear,
    Operand,
    Plan,
    check_weight,
    differentiable_once,
    fusible,
    pack_weights,
    plan_of,
    prepare,
    unpack_weights,
)
from mxfp8.producers import Names, as_mx, operands, run_op
from mxfp8.recipe import HP, CastSpec, LinearRecipe, get_recipe
from mxfp8.reference.fused import ACTIVATIONS
from mxfp8.tensor import MXTensor, rounded
from mxfp8.weight_cache import WeightCache

__all__ = ["MXFP8MLP"]

NORMS = ("rmsnorm", "layernorm")

_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}
_PLAIN = LinearRecipe(name="bf16", fprop=HP, dgrad=HP, wgrad=HP)  # of a part that a policy left an nn.Linear
_NO_CACHE = WeightCache()


@dataclass(frozen=True, eq=False, slots=True)
class _MLPPlan:
    """What one call needs besides tensors. ``keeps_input`` and ``keeps_hidden``: whether wgrad's operand is kept
    between forward and backward, or made again there."""

    fc1: Plan
    fc2: Plan
    norm: str | None
    eps: float
    activation: str
    keeps_input: bool
    keeps_hidden: bool

    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, rows: bool, columns: bool
    ) -> tuple[Any, Any, torch.Tensor | None, torch.Tensor | None]:
        """The operands of fc1 in fprop and in wgrad, as far as asked for, then mean and rstd (None without a norm)."""
        along: Names = ("fprop", "input") if rows else None
        down: Names = ("wgrad", "input") if columns else None
        if self.norm is None:
            if along and down:
                return *self.fc1.cast_both(x, along, down), None, None
            return (
                self.fc1.cast(x, *along, -1) if along else None,
                self.fc1.cast(x, *down, -2) if down else None,
                None,
                None,
            )
        options = {"norm": self.norm, "norm_block": 256, "eps": self.eps}
        tensors = (x, weight, bias, None)
        n, t, (_, mean, rstd) = operands(self.fc1, "norm_quantize", tensors, options, along, down)
        return n, t, mean, rstd

    def activate(self, h: torch.Tensor, bias: torch.Tensor | None, rows: bool, columns: bool) -> tuple[Any, Any]:
        """The operands of fc2 in fprop and in wgrad, as far as asked for."""
        along: Names = ("fprop", "input") if rows else None
        down: Names = ("wgrad", "input") if columns else None
        options = {"activation": self.activation}
        return operands(self.fc2, "activation_quantize", (h, bias), options, along, down)[:2]

    def multiply_and_activate(self, n: Operand, w1: Operand, dtype: torch.dtype, bias: torch.Tensor | None) -> Operand:
        """The operand of fc2 in fprop where nobody needs ``H``: by one op that does not write it, where there is one.
        Not with a bias, which it would add before ``H`` is rounded, not with other casts, nor while somebody watches.
        The same bits either way."""
        spec = self.fc2.spec("fprop", "input")
        products = isinstance(n, MXTensor) or isinstance(w1, MXTensor)
        if bias is not None or spec is None or not fusible(spec, spec) or observe.active() or not products:
            return cast(Operand, self.activate(self.fc1.gemm("fprop", n, w1, dtype), bias, True, False)[0])
        made = gemm_quantize(
            n, w1, activation=self.activation, fmt=spec.fmt, block=spec.block, scale_rule=spec.scale_rule,
            hp_dtype=dtype, round_first=True,
        )  # fmt: skip
        assert made.rows is not None
        return made.rows

    def activate_backward(
        self, da: torch.Tensor, h: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """The gradient of ``h`` as the two backward GEMMs of fc1 multiply it, and the float32 gradient of ``bias``."""
        along: Names = ("dgrad", "grad_output") if self.fc1.needs_dgrad else None
        down: Names = ("wgrad", "grad_output") if self.fc1.needs_wgrad else None
        options, op = {"activation": self.activation}, "activation_quantize_backward"
        dh, t, (dbias,) = operands(self.fc1, op, (da, h, bias), options, along, down)
        return dh, t, dbias


class _Saved(NamedTuple):
    """What is kept between forward and backward, each only if the latter needs it. An operand is elements and scale
    bytes, or a tensor in high precision and None."""

    w1: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    n: torch.Tensor | None = None
    n_scale: torch.Tensor | None = None
    a: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    h: torch.Tensor | None = None
    b1: torch.Tensor | None = None
    x: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None


def _parts(operand: Operand | None, needed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not needed or operand is None:
        return None, None
    return (operand.qdata, operand.scale_bytes) if isinstance(operand, MXTensor) else (operand, None)


def _whole(value: torch.Tensor | None, scale: torch.Tensor | None, spec: CastSpec | None) -> Operand:
    """Inverse of :func:`_parts`, for an operand whose blocks run along -2."""
    assert value is not None
    if scale is None:
        return value
    assert spec is not None
    return as_mx(value, scale, spec, -2)


class _MLPFunction(torch.autograd.Function):
    """The equations at the top of this module on 2-D ``x``. ``*weights`` are the quantised weights of fc1 (the first
    ``split`` tensors) and of fc2, flattened: a custom function sees plain tensors only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None, w1: torch.Tensor,
        b1: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None, plan: _MLPPlan, split: int,
        *weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        fc1, fc2 = plan.fc1, plan.fc2
        w1_fprop, w1_dgrad = unpack_weights(fc1, w1, weights[:split])
        w2_fprop, w2_dgrad = unpack_weights(fc2, w2, weights[split:])
        keep_n, keep_a = fc1.needs_wgrad and plan.keeps_input, fc2.needs_wgrad and plan.keeps_hidden
        keep_h = fc2.needs_dgrad or (fc2.needs_wgrad and not keep_a)

        # === H[M,hidden] = norm(X)[M,in] @ W1^T
        n_fprop, n_wgrad, mean, rstd = plan.normalise(x, norm_weight, norm_bias, True, keep_n)
        h = a_wgrad = None
        if keep_h or keep_a:
            h = fc1.gemm("fprop", n_fprop, w1_fprop, x.dtype)
            a_fprop, a_wgrad = plan.activate(h, b1, True, keep_a)
        else:
            a_fprop = plan.multiply_and_activate(n_fprop, w1_fprop, x.dtype, b1)
        del n_fprop

        # === Y[M,out] = act(H + b1)[M,hidden] @ W2^T + b2
        y = fc2.gemm("fprop", a_fprop, w2_fprop, x.dtype, b2)

        again, differentiate = fc1.needs_wgrad and not keep_n, fc1.needs_dgrad and plan.norm is not None
        keep_x = again or differentiate
        ctx.save_for_backward(
            *_parts(w1_dgrad, fc1.needs_dgrad),
            *_parts(w2_dgrad, fc2.needs_dgrad),
            *_parts(n_wgrad, keep_n),
            *_parts(a_wgrad, keep_a),
            *((h, b1) if keep_h else (None, None)),
            *((x, norm_weight, norm_bias) if keep_x else (None, None, None)),
            *((mean, rstd) if differentiate else (None, None)),
        )
        ctx.plan, ctx.x_dtype = plan, x.dtype
        ctx.dtypes = [None if p is None else p.dtype for p in (norm_weight, norm_bias, w1, b1, w2, b2)]
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: _MLPPlan = ctx.plan
        fc1, fc2, saved = plan.fc1, plan.fc2, _Saved(*ctx.saved_tensors)
        grads: list[torch.Tensor | None] = [None] * 7
        dy_dgrad, dy_wgrad = fc2.cast_gradient(dy)

        # === dW2[out,hidden] = dY^T @ A
        if fc2.needs_wgrad:
            if plan.keeps_hidden:
                a = _whole(saved.a, saved.a_scale, fc2.recipe.wgrad.rhs)
            else:
                assert saved.h is not None
                a = plan.activate(saved.h, saved.b1, False, True)[1]
            grads[5] = fc2.gemm("wgrad", dy_wgrad.mT, a.mT, ctx.dtypes[4])
            del a, dy_wgrad
        if ctx.dtypes[5] is not None and ctx.needs_input_grad[6]:
            grads[6] = dy.contiguous().sum(0, dtype=torch.float32).to(ctx.dtypes[5])  # strides change the order

        # === dA[M,hidden] = dY @ W2, dH = act'(H + b1) * dA
        if fc2.needs_dgrad:
            w2 = _whole(saved.w2, saved.w2_scale, fc2.recipe.dgrad.rhs)
            da = fc2.gemm("dgrad", dy_dgrad, w2.mT, ctx.x_dtype)
            assert saved.h is not None
            dh_dgrad, dh_wgrad, db1 = plan.activate_backward(da, saved.h, saved.b1)
            del da, dy_dgrad
            grads[4] = None if db1 is None else rounded(db1, ctx.dtypes[3])
            if fc1.needs_wgrad:
                grads[3] = _first_wgrad(plan, saved, dh_wgrad, ctx.dtypes[2])
            del dh_wgrad
            if fc1.needs_dgrad:
                grads[:3] = _first_dgrad(plan, saved, dh_dgrad, ctx.x_dtype, ctx.dtypes[:2])
        wanted = zip(grads, ctx.needs_input_grad[:7], strict=True)
        return *(g if needed else None for g, needed in wanted), *(None for _ in ctx.needs_input_grad[7:])


def _first_wgrad(plan: _MLPPlan, saved: _Saved, dh: Operand, dtype: torch.dtype) -> torch.Tensor:
    """=== dW1[hidden,in] = dH^T @ N"""
    if plan.keeps_input:
        n = _whole(saved.n, saved.n_scale, plan.fc1.recipe.wgrad.rhs)
    else:
        assert saved.x is not None
        n = plan.normalise(saved.x, saved.norm_weight, saved.norm_bias, False, True)[1]
    return plan.fc1.gemm("wgrad", dh.mT, n.mT, dtype)


def _first_dgrad(
    plan: _MLPPlan, saved: _Saved, dh: Operand, dtype: torch.dtype, dtypes: list[torch.dtype | None]
) -> list[torch.Tensor | None]:
    """=== dN[M,in] = dH @ W1, and through the norm: the gradients of x and of the norm's weight and bias"""
    w1 = _whole(saved.w1, saved.w1_scale, plan.fc1.recipe.dgrad.rhs)
    dn = plan.fc1.gemm("dgrad", dh, w1.mT, dtype)
    if plan.norm is None:
        return [dn, None, None]
    assert saved.x is not None
    tensors = (dn, saved.x, saved.norm_weight, saved.mean, saved.rstd, None)
    options = {"norm": plan.norm, "norm_block": 256, "with_bias": saved.norm_bias is not None}
    *_, dx, dweight, dbias = run_op("norm_quantize_backward", tensors, (None, None, True), options)
    sums = zip((dweight, dbias), dtypes, strict=True)
    return [dx, *(None if g is None or kind is None else rounded(g, kind) for g, kind in sums)]


class MXFP8MLP(nn.Module):
    """``fc2(activation(fc1(norm(x))))`` with GEMMs in MXFP8 and every cast made by what computes the value.

    Args:
        in_features, hidden_features, out_features: widths; ``out_features`` is ``in_features`` by default. For
            ``"swiglu"`` fc1 has ``2 * hidden_features`` outputs, ``[gate | up]``.
        norm: ``"rmsnorm"``, ``"layernorm"`` or None.
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"``, ``"hardswish"`` or ``"swiglu"``.
        bias: of both linear layers. (LayerNorm always has one of its own.)
        recipe: of both linear layers, as :class:`~mxfp8.MXFP8Linear`.
        eps: of the norm.
        recompute: make the operands of the two weight gradients again in backward, from the input and the hidden
            pre-activation, which are kept in any case. That is half of what an eager bfloat16 MLP keeps, for one more
            pass over each. With False they are kept, in MX if the recipe says so: three quarters. Same gradients.

    The linear layers are modules of their own, ``fc1`` and ``fc2``, and so is ``norm``: policies, audits and optimisers
    find them as in a model of separate layers, and ``norm.weight``, ``fc1.weight``, ``fc2.weight`` of such a model load
    strictly. A part that a policy leaves in bfloat16 is multiplied in bfloat16. A part with hooks makes this module
    call its parts one by one, as ``nn.Sequential`` does, so that every hook runs; values then pass through the input's
    dtype in between.

    Shape: ``[..., in_features]`` to ``[..., out_features]``, in the autocast dtype if autocast is on, else in the
    input's dtype.

    Raises:
        ValueError: unknown norm, activation or recipe; widths that do not fit; input with another last dimension.
        TypeError: parts or dtypes of another kind.

    **Numerics.** The float32 value of the norm and of the activation goes into the casts, as in
    :func:`mxfp8.fused.norm_quantize` and :func:`~mxfp8.fused.activation_quantize`, and so does the gradient of the
    pre-activation; fc1's bias is added in float32 there. Casts that those ops do not make (stochastic rounding,
    Hadamard, operands in high precision, two casts that differ in more than their blocks) take the value in the
    input's dtype. GEMMs are as in ``MXFP8Linear``; gradients of biases and of the norm are float32 sums.
    """

    norm: nn.Module | None
    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        norm: str | None = "rmsnorm",
        activation: str = "gelu",
        bias: bool = True,
        recipe: str | LinearRecipe = "mxfp8_rceil",
        eps: float = 1e-5,
        recompute: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        recipe, name = get_recipe(recipe), _activation_name(activation)
        wide = hidden_features * (2 if name == "swiglu" else 1)
        fc1 = MXFP8Linear(in_features, wide, bias, device, dtype, recipe=recipe)
        out = in_features if out_features is None else out_features
        fc2 = MXFP8Linear(hidden_features, out, bias, device, dtype, recipe=recipe)
        fc1.fqn, fc2.fqn = "fc1", "fc2"
        if norm is not None and norm not in NORMS:
            raise ValueError(f"norm is {norm!r}: use one of {', '.join(NORMS)}, or None")
        kind = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}.get(norm or "")
        made = None if kind is None else kind(in_features, eps=eps, device=device, dtype=dtype)
        self._adopt(made, fc1, name, fc2, recompute)

    @classmethod
    def from_modules(
        cls,
        norm: nn.Module | None,
        fc1: nn.Linear,
        activation: nn.Module | str,
        fc2: nn.Linear,
        recipe: str | LinearRecipe = "mxfp8_rceil",
        *,
        recompute: bool = True,
        fqn: str = "",
    ) -> MXFP8MLP:
        """The same function of modules that exist: parameters are shared, not copied. ``fqn`` is the dotted name of the
        MLP; its linear layers are called ``<fqn>.fc1`` and ``<fqn>.fc2`` in reports and in streams of random bits.

        Args:
            norm: ``nn.RMSNorm`` or ``nn.LayerNorm`` over the last dimension, or None.
            fc1, fc2: ``nn.Linear``; an ``MXFP8Linear`` gets ``recipe`` too.
            activation: a name as above, or ``nn.ReLU``, ``nn.GELU``, ``nn.SiLU`` or ``nn.Hardswish``.
        """
        out = cls.__new__(cls)
        nn.Module.__init__(out)
        prefix = f"{fqn}." if fqn else ""
        first = MXFP8Linear.from_linear(fc1, recipe, fqn=f"{prefix}fc1")
        second = MXFP8Linear.from_linear(fc2, recipe, fqn=f"{prefix}fc2")
        out._adopt(norm, first, _activation_name(activation), second, recompute)
        out.train(fc1.training)
        return out

    def _adopt(self, norm: nn.Module | None, fc1: nn.Linear, activation: str, fc2: nn.Linear, recompute: bool) -> None:
        if norm is not None and type(norm) not in (nn.RMSNorm, nn.LayerNorm):
            raise TypeError(f"norm is a {type(norm).__name__}: use nn.RMSNorm, nn.LayerNorm or None")
        if norm is not None and tuple(cast(nn.LayerNorm, norm).normalized_shape) != (fc1.in_features,):
            shape = tuple(cast(nn.LayerNorm, norm).normalized_shape)
            raise ValueError(f"norm is over {shape}: the input of fc1 needs ({fc1.in_features},)")
        hidden, rest = divmod(fc1.out_features, 2 if activation == "swiglu" else 1)
        if rest or fc2.in_features != hidden:
            raise ValueError(
                f"fc1 has {fc1.out_features} outputs, which {activation} makes {hidden}; fc2 takes {fc2.in_features}"
            )
        self.norm, self.fc1, self.fc2 = norm, fc1, fc2
        self.activation, self.recompute = activation, bool(recompute)

    @property
    def in_features(self) -> int:
        return self.fc1.in_features

    @property
    def out_features(self) -> int:
        return self.fc2.out_features

    def clear_cache(self) -> None:
        """Forget quantised weights, see :meth:`MXFP8Linear.clear_cache`."""
        for part in (self.fc1, self.fc2):
            if isinstance(part, MXFP8Linear):
                part.clear_cache()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        norm, fc1, fc2 = self.norm, self.fc1, self.fc2
        if any(_has_hooks(part) for part in (norm, fc1, fc2) if part is not None):
            return cast(torch.Tensor, fc2(_FUNCTIONS[self.activation](fc1(input if norm is None else norm(input)))))
        x = prepare(input, fc1.weight, fc1.in_features, getattr(fc1, "fqn", "fc1"))
        norm_weight = None if norm is None else cast(nn.LayerNorm, norm).weight
        norm_bias = getattr(norm, "bias", None)
        check_weight(fc2.weight, x, getattr(fc2, "fqn", "fc2"))
        if norm_weight is not None:
            check_weight(norm_weight, x, "norm")
        plan = self._plan(x, norm_weight, norm_bias)
        first = pack_weights(plan.fc1, fc1.weight, getattr(fc1, "_cache", _NO_CACHE))
        second = pack_weights(plan.fc2, fc2.weight, getattr(fc2, "_cache", _NO_CACHE))
        rows = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), fc1.in_features)
        y = _MLPFunction.apply(  # type: ignore[no-untyped-call]
            rows, norm_weight, norm_bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, plan, len(first), *first, *second
        )
        return cast(torch.Tensor, y if x.ndim == 2 else y.view(*x.shape[:-1], fc2.out_features))

    def _plan(self, x: torch.Tensor, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None) -> _MLPPlan:
        """What has to be computed, from what requires a gradient."""
        fc1, fc2, grad = self.fc1, self.fc2, torch.is_grad_enabled()
        recipe1, recipe2 = getattr(fc1, "recipe", _PLAIN), getattr(fc2, "recipe", _PLAIN)
        dgrad1 = grad and any(t is not None and t.requires_grad for t in (x, norm_weight, norm_bias))
        name1, name2 = getattr(fc1, "fqn", "fc1"), getattr(fc2, "fqn", "fc2")
        plan1 = plan_of(recipe1, name1, fc1.weight, dgrad1, grad and fc1.weight.requires_grad)
        dgrad2 = dgrad1 or plan1.needs_wgrad or (grad and fc1.bias is not None and fc1.bias.requires_grad)
        norm, eps = None, 0.0
        if self.norm is not None:
            norm = "layer" if isinstance(self.norm, nn.LayerNorm) else "rms"
            found = cast(nn.LayerNorm, self.norm).eps
            eps = torch.finfo(torch.float32).eps if found is None else found  # as nn.RMSNorm
        return _MLPPlan(
            fc1=plan1,
            fc2=plan_of(recipe2, name2, fc2.weight, dgrad2, grad and fc2.weight.requires_grad),
            norm=norm,
            eps=eps,
            activation=self.activation,
            keeps_input=recipe1.saves_mx_activations and not (self.recompute and norm is not None),
            keeps_hidden=recipe2.saves_mx_activations and not self.recompute,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}, recompute={self.recompute}"


def _activation_name(activation: nn.Module | str) -> str:
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    name = activation if isinstance(activation, str) else _MODULES.get(type(activation), type(activation).__name__)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation is {name!r}: use one of {', '.join(ACTIVATIONS)}, or nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish"
        )
    return name


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
