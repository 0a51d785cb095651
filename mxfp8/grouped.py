"""Grouped linear layers (experts) whose three products run in MXFP8: each group of rows times its own matrix.

=== fprop   Y[s:e]  = X[s:e]  @ W[g]^T
=== dgrad   dX[s:e] = dY[s:e] @ W[g]
=== wgrad   dW[g]   = dY[s:e]^T @ X[s:e]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxfp8 import observe, ops
from mxfp8.linear import Operand, Plan, layer_plan, pack_weights, prepare, restore, unpack_weights
from mxfp8.recipe import LinearRecipe, get_recipe
from mxfp8.tensor import MXTensor
from mxfp8.weight_cache import WeightCache

__all__ = ["MXFP8GroupedLinear"]


class _GroupedFunction(torch.autograd.Function):
    """``y[s:e] = x[s:e] @ weight[g].T``. Blocks along M start anew with every group, so wgrad casts group by group."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, plan: Plan, *weights: torch.Tensor
    ) -> torch.Tensor:
        w_fprop, w_dgrad = unpack_weights(plan, weight, weights)
        y = _grouped(plan, "fprop", plan.cast(x, "fprop", "input", axis=-1), w_fprop, offs, x.dtype)
        saved: list[torch.Tensor] = []
        if plan.needs_dgrad:
            saved += [w_dgrad.qdata, w_dgrad.scale_bytes] if isinstance(w_dgrad, MXTensor) else [w_dgrad]
        if plan.needs_wgrad and plan.recipe.saves_mx_activations:
            for start, stop in _ranges(offs):
                q = plan.cast(x[start:stop], "wgrad", "input", -2, start)
                assert isinstance(q, MXTensor)
                saved += [q.qdata, q.scale_bytes]
        elif plan.needs_wgrad:
            saved += [x]
        ctx.save_for_backward(offs, *saved)
        ctx.plan, ctx.x_dtype, ctx.w_dtype, ctx.w_shape = plan, x.dtype, weight.dtype, weight.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        recipe = plan.recipe
        offs, *saved = ctx.saved_tensors
        dx = dw = None
        if plan.needs_dgrad:
            w_dgrad = restore(saved, recipe.dgrad.rhs, -2)
            dx = _grouped(plan, "dgrad", plan.cast(dy, "dgrad", "grad_output", -1), w_dgrad.mT, offs, ctx.x_dtype)
        if plan.needs_wgrad:
            dw = dy.new_zeros(ctx.w_shape, dtype=ctx.w_dtype)
            for g, (start, stop) in enumerate(_ranges(offs)):
                if recipe.saves_mx_activations:
                    x_g = restore(saved, recipe.wgrad.rhs, -2)
                else:
                    x_g = plan.cast(saved[0][start:stop], "wgrad", "input", -2, start)
                dy_g = plan.cast(dy[start:stop], "wgrad", "grad_output", -2, start)
                dw[g] = plan.gemm("wgrad", dy_g.mT, x_g.mT, ctx.w_dtype)
        return dx, dw, *(None for _ in ctx.needs_input_grad[2:])


def _grouped(plan: Plan, gemm: str, a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if isinstance(a, MXTensor) or isinstance(b, MXTensor):
        out = ops.grouped_gemm(a, b, offs, out_dtype)
    else:
        out = a.new_zeros(a.shape[0], b.shape[1])
        for g, (start, stop) in enumerate(_ranges(offs)):
            out[start:stop] = F.linear(a[start:stop], b[g].to(a.dtype))
        out = out.to(out_dtype)
    if observe.active():
        observe.emit(observe.GemmEvent(layer=plan.layer, gemm=gemm, a=a, b=b, out=out, offs=offs))
    return out


def _ranges(offs: torch.Tensor) -> list[tuple[int, int]]:
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


class MXFP8GroupedLinear(nn.Module):
    """A group of linear layers (experts), each applied to its own rows, with GEMMs in MXFP8.

    Args:
        num_groups, in_features, out_features: weight ``[num_groups, out_features, in_features]``, no bias.
        recipe: as :class:`~mxfp8.MXFP8Linear`; input and gradient blocks must be one row high, since rows of
            neighbouring groups must not share a scale.

    Shape: input ``[M, in_features]`` and ``offs`` (int32 or int64 ``[num_groups]``, ends of the groups' rows, torch's
    convention) to ``[M, out_features]``. Groups may be empty, their weight gradient is then zero; rows past
    ``offs[-1]`` give zeros and get zero gradients.

    **Numerics.** As :class:`~mxfp8.MXFP8Linear`, group by group: a group's result does not depend on its neighbours.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | LinearRecipe = "mxfp8_rceil",
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe, self.fqn = get_recipe(recipe), ""
        r = self.recipe
        for name, spec in (("input", r.fprop.lhs), ("grad_output", r.dgrad.lhs)):
            if spec is not None and spec.block[0] != 1:
                raise ValueError(f"{name} blocks of {spec.block} would straddle groups: use blocks of one row")
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        self._cache = WeightCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each group's weight is initialised as ``nn.Linear``'s."""
        if self.in_features:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.weight, -bound, bound)

    def clear_cache(self) -> None:
        """Forget quantised weights, see :meth:`mxfp8.MXFP8Linear.clear_cache`."""
        self._cache.clear()

    # Group ends are data: compiling them in would mean one graph per batch.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        x = prepare(input, self.weight, self.in_features, self.fqn)
        if x.ndim != 2:
            raise ValueError(f"grouped linear takes input [M, {self.in_features}], not {tuple(x.shape)}")
        ops.check_offsets(offs, self.num_groups, x.shape[0])
        plan = layer_plan(self.recipe, self.fqn, self.weight, x)
        weights = pack_weights(plan, self.weight, self._cache)
        y: torch.Tensor = _GroupedFunction.apply(x, self.weight, offs, plan, *weights)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"recipe={self.recipe.name}"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._cache.clear()  # to(), half(), to_empty() ... exchange the storage, and may land on the same address
        out: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": WeightCache()}
