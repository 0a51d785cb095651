"""Groups of rows (those of an expert, say), each with a matrix of its own: a linear layer whose three products run in
MXFP8.

=== fprop   Y[s:e]  = X[s:e]  @ W[g]^T       X, W cast along K
=== dgrad   dX[s:e] = dY[s:e] @ W[g]         dY, W cast along N
=== wgrad   dW[g]   = dY[s:e]^T @ X[s:e]     dY, X cast along M, blocks anew in every group

On a GPU the ends of the groups are never read on the host: a step waits for nothing, and a CUDA graph replays with new
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from mxfp8 import dispatch, observe, ops
from mxfp8.dispatch import replays
from mxfp8.formats import get_format, get_rounding, get_scale_rule
from mxfp8.grouped_ops import MXGroups, columns_of, groups_of
from mxfp8.linear import (
    Operand,
    Plan,
    differentiable_once,
    fusible,
    layer_plan,
    pack_weights,
    prepare,
    restore,
    unpack_weights,
)
from mxfp8.recipe import LinearRecipe, get_recipe
from mxfp8.tensor import MXTensor
from mxfp8.weight_cache import WeightCache

__all__ = ["MXFP8GroupedLinear"]


class _GroupedFunction(torch.autograd.Function):
    """``y[s:e] = x[s:e] @ weight[g].T``. Blocks along M start anew with every group.

    On a GPU each pass is replayed as a whole once it has been seen twice, as a linear layer's; groups may differ.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, plan: Plan, *weights: torch.Tensor
    ) -> torch.Tensor:
        w_fprop, w_dgrad = unpack_weights(plan, weight, weights)
        read = (x, offs, *_parts(w_fprop))
        known = plan.key("grouped forward", read)
        made = replays.again(known, *read)
        if made is None:
            made = replays.run(known, lambda: _forward(plan, x, w_fprop, offs), read)
        y, *x_wgrad = made
        saved: list[torch.Tensor] = [*_parts(w_dgrad)] if plan.needs_dgrad else []
        if x_wgrad[0] is not None:
            saved += x_wgrad
        elif plan.needs_wgrad:
            saved += [x]
        ctx.save_for_backward(offs, *saved)
        ctx.plan, ctx.dtypes = plan, (x.dtype, weight.dtype)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        read = (dy, *ctx.saved_tensors)
        known = plan.key("grouped backward", read, *ctx.dtypes)
        made = replays.again(known, *read)
        if made is None:
            made = replays.run(known, lambda: _backward(plan, *read, dtypes=ctx.dtypes), read)
        return *made, *(None,) * (len(ctx.needs_input_grad) - 2)


def _forward(
    plan: Plan, x: torch.Tensor, weight: Operand, offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``y``, then the input as wgrad will multiply it (starts, elements, scales) if it is kept so."""
    offs, groups = ops.check_offsets(offs, weight.shape[0], x), None
    if plan.needs_wgrad and plan.recipe.saves_mx_activations:
        x_fprop, groups = _cast_both(plan, x, offs, "fprop", "input")
    else:
        x_fprop = plan.cast(x, "fprop", "input", axis=-1)
    y = _grouped(plan, "fprop", x_fprop, weight, offs, x.dtype)
    if not isinstance(groups, MXGroups):
        return y, None, None, None
    return y, groups.starts, groups.q.qdata, groups.q.scale_bytes


def _backward(
    plan: Plan, dy: torch.Tensor, offs: torch.Tensor, *kept: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x`` and of the weight, each None if it is not needed."""
    recipe, saved = plan.recipe, list(kept)
    dx = dw = None
    dy_dgrad: Operand = dy
    dy_wgrad: MXGroups | torch.Tensor = dy
    if plan.needs_dgrad and plan.needs_wgrad:
        dy_dgrad, dy_wgrad = _cast_both(plan, dy, offs, "dgrad", "grad_output")
    elif plan.needs_dgrad:
        dy_dgrad = plan.cast(dy, "dgrad", "grad_output", -1)
    elif plan.needs_wgrad:
        dy_wgrad = _cast(plan, dy, offs, "grad_output")
    if plan.needs_dgrad:
        w_dgrad = restore(saved, recipe.dgrad.rhs, -2)
        dx = _grouped(plan, "dgrad", dy_dgrad, w_dgrad.mT, offs, dtypes[0])
    if plan.needs_wgrad:
        x_wgrad: MXGroups | torch.Tensor
        if recipe.saves_mx_activations:
            starts = saved.pop(0)
            q = restore(saved, recipe.wgrad.rhs, -2)
            assert isinstance(q, MXTensor)
            x_wgrad = MXGroups(q, starts)
        else:
            x_wgrad = _cast(plan, saved[0], offs, "input")
        dw = _wgrad(plan, dy_wgrad, x_wgrad, offs, dtypes[1])
    return dx, dw


def _parts(x: Operand) -> tuple[torch.Tensor, ...]:
    """What :func:`mxfp8.linear.restore` takes."""
    return (x.qdata, x.scale_bytes) if isinstance(x, MXTensor) else (x,)


# On a layer's offsets, which its forward has checked: nothing here checks them again.


def _grouped(plan: Plan, gemm: str, a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """fprop or dgrad: the rows of each group of ``a`` times its matrix, by the MX contract if either operand is MX,
    else in the operands' dtype."""
    if isinstance(a, MXTensor) or isinstance(b, MXTensor) or _by_kernel(a):
        b = b if isinstance(b, MXTensor) or isinstance(a, MXTensor) else b.to(a.dtype)
        out = dispatch.resolve("grouped_gemm", "auto", a.device)(
            *ops.parts_of(a), *ops.parts_of(b), offs=offs, out_dtype=out_dtype
        )
    else:
        out = _rows_of_groups(a, b, offs, out_dtype)
    if observe.active():
        observe.emit(observe.GemmEvent(layer=plan.layer, gemm=gemm, a=a, b=b, out=out, offs=offs))
    return out  # type: ignore[no-any-return]


def _cast(plan: Plan, x: torch.Tensor, offs: torch.Tensor, operand: str) -> MXGroups | torch.Tensor:
    """``x`` as wgrad multiplies it; as it is if it stays in high precision."""
    spec = plan.spec("wgrad", operand)
    if spec is None:
        return x
    fmt = get_format(spec.fmt)
    parts = dispatch.resolve("quantize_grouped", "auto", x.device)(
        x, offs, fmt=fmt, block=spec.block, scale_rule=get_scale_rule(spec.scale_rule),
        rounding=get_rounding(spec.rounding), satfinite=False, hadamard=spec.hadamard, hadamard_seed=plan.recipe.seed,
        key=plan.random_key("wgrad", operand) if spec.rounding == "stochastic" else None,
    )  # fmt: skip
    groups = groups_of(parts, fmt, spec.block)
    _watch_casts(plan, x, offs, operand, groups, spec.hadamard)
    return groups


def _cast_both(
    plan: Plan, x: torch.Tensor, offs: torch.Tensor, gemm: str, operand: str
) -> tuple[Operand, MXGroups | torch.Tensor]:
    """``x`` as ``gemm`` multiplies it, along its rows, and as wgrad does; in one pass if the two casts differ only in
    their blocks."""
    first, second = plan.spec(gemm, operand), plan.spec("wgrad", operand)
    if first is None or second is None or not fusible(first, second):
        return plan.cast(x, gemm, operand, axis=-1), _cast(plan, x, offs, operand)
    fmt = get_format(first.fmt)
    qdata, scale, *columns = dispatch.resolve("quantize_both_grouped", "auto", x.device)(
        x, offs, fmt=fmt, block=first.block, column_block=second.block, scale_rule=get_scale_rule(first.scale_rule),
        satfinite=False,
    )  # fmt: skip
    q, groups = MXTensor.trusted(qdata, scale, fmt, -1, first.block), groups_of(columns, fmt, second.block)
    plan.watch_cast(gemm, operand, x, q)
    _watch_casts(plan, x, offs, operand, groups, None)
    return q, groups


def _watch_casts(
    plan: Plan, x: torch.Tensor, offs: torch.Tensor, operand: str, groups: MXGroups, hadamard: int | None
) -> None:
    """Tell observers of a cast for wgrad, group by group."""
    if not observe.active():
        return
    for (start, stop), q in zip(_ranges(offs), _each_cast(groups, offs, hadamard), strict=True):
        rows = x[start:stop]
        if hadamard is not None:
            rows = ops.hadamard(rows, -2, hadamard, plan.recipe.seed)
        plan.watch_cast("wgrad", operand, rows, q)


def _wgrad(
    plan: Plan, dy: MXGroups | torch.Tensor, x: MXGroups | torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(dy, MXGroups) or isinstance(x, MXGroups) or _by_kernel(dy):
        x = x if isinstance(x, MXGroups) or isinstance(dy, MXGroups) else x.to(dy.dtype)
        dw: torch.Tensor = dispatch.resolve("grouped_wgrad", "auto", offs.device)(
            *columns_of(dy, offs), *columns_of(x, offs), out_dtype=out_dtype
        )
    else:
        dw = _sums_of_groups(dy, x, offs, out_dtype)
    if observe.active():
        spec = plan.recipe.wgrad.lhs  # both sides are transformed or none is
        hadamard = None if spec is None else spec.hadamard
        sides = zip(_each(dy, offs, hadamard), _each(x, offs, hadamard), strict=True)
        for g, (a, b) in enumerate(sides):
            observe.emit(observe.GemmEvent(layer=plan.layer, gemm="wgrad", a=a.mT, b=b.mT, out=dw[g]))
    return dw


# In high precision, as operators: a compiler cannot follow ends that are read on the host.


@torch.library.custom_op("mxfp8::rows_of_groups", mutates_args=())
def _rows_of_groups(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    out = a.new_zeros(a.shape[0], b.shape[1])
    for g, (start, stop) in enumerate(_ranges(offs)):
        out[start:stop] = F.linear(a[start:stop], b[g].to(a.dtype))
    return out.to(out_dtype)


@_rows_of_groups.register_fake
def _(a, b, offs, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


@torch.library.custom_op("mxfp8::sums_of_groups", mutates_args=())
def _sums_of_groups(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    out = dy.new_zeros(len(offs), dy.shape[1], x.shape[1], dtype=out_dtype)
    for g, (start, stop) in enumerate(_ranges(offs)):
        out[g] = F.linear(dy[start:stop].mT, x[start:stop].mT.to(dy.dtype))
    return out


@_sums_of_groups.register_fake
def _(dy, x, offs, out_dtype):  # type: ignore[no-untyped-def]
    return dy.new_empty(len(offs), dy.shape[1], x.shape[1], dtype=out_dtype)


def _by_kernel(x: torch.Tensor | MXTensor | MXGroups) -> bool:
    """Whether a product of two tensors in high precision goes to a kernel, which does not read offsets on the host."""
    return isinstance(x, torch.Tensor) and x.is_cuda and x.dtype != torch.float32


# For those who watch: group by group, with ends that are read on the host.


def _each(x: MXGroups | torch.Tensor, offs: torch.Tensor, hadamard: int | None) -> Sequence[Operand]:
    if isinstance(x, MXGroups):
        return _each_cast(x, offs, hadamard)
    return [x[start:stop] for start, stop in _ranges(offs)]


def _each_cast(x: MXGroups, offs: torch.Tensor, hadamard: int | None) -> list[MXTensor]:
    """The rows of each group as far as they hold something."""
    q, step, tall = x.q, hadamard or 1, x.q.block[1]
    out = []
    for at, (start, stop) in zip(x.starts.tolist(), _ranges(offs), strict=False):
        rows = -(-(stop - start) // step) * step
        scale = q.scale_bytes[at // tall : -(-(at + rows) // tall)]
        out.append(MXTensor.trusted(q.qdata[at : at + rows], scale, q.fmt, -2, q.block))
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

    On a GPU nothing reads ``offs`` on the host, except where someone watches (an audit) and where a recipe leaves both
    operands of a product in float32. Bad offsets stop the device with an assertion, as an index out of bounds does.

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

    def forward(self, input: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        x = prepare(input, self.weight, self.in_features, self.fqn)
        if x.ndim != 2:
            raise ValueError(f"grouped linear takes input [M, {self.in_features}], not {tuple(x.shape)}")
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
