"""Drop-in linear layers whose three GEMMs run in MXFP8.

=== fprop   Y[M,N]  = X[M,K]  @ W[N,K]^T     X, W cast along K
=== dgrad   dX[M,K] = dY[M,N] @ W[N,K]       dY, W cast along N
=== wgrad   dW[N,K] = dY[M,N]^T @ X[M,K]     dY, X cast along M

An MX tensor and its transpose have different scales, so each operand is cast once per direction, always from high
precision (square blocks excepted, where one copy serves both). Master weights, bias and every reduction keep their
precision. Between forward and backward the input lives as the bytes that wgrad multiplies: 8.25 bit an element instead
of 16, with the same gradients bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxfp8 import observe, ops
from mxfp8.dispatch import replays
from mxfp8.formats import get_format
from mxfp8.recipe import CastSpec, LinearRecipe, get_recipe
from mxfp8.rng import RngKey, get_step, step_tensor
from mxfp8.tensor import MXTensor, rounded
from mxfp8.weight_cache import Key, WeightCache, quantize_weights

__all__ = ["MXFP8Linear"]

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STREAMS = {("dgrad", "grad_output"): 0, ("wgrad", "grad_output"): 1, ("fprop", "input"): 2, ("wgrad", "input"): 3}

Operand = MXTensor | torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What one call of a layer needs besides tensors. (Without an underscore: what :mod:`mxfp8.mlp` shares.)

    ``weights``: the copies of the weight that it multiplies. ``number``: the same for all plans whose calls do the same
    to tensors of the same kind; None if they draw random bits or leave operands in high precision.
    """

    recipe: LinearRecipe
    layer: str
    needs_dgrad: bool
    needs_wgrad: bool
    weights: tuple[Key, ...]
    number: int | None

    def key(self, op: str, tensors: tuple[torch.Tensor, ...], *rest: Hashable) -> Hashable:
        """The key of a whole forward or backward on ``tensors``, see :mod:`mxfp8.dispatch.replays`. None if someone
        watches what it consists of."""
        if self.number is None or observe.active():
            return None
        return replays.key(op, tensors, self.number, *rest)

    def cast(self, x: torch.Tensor, gemm: str, operand: str, axis: int, row_offset: int = 0) -> Operand:
        """Cast ``x`` as the recipe says for this operand of this GEMM; unchanged if it stays in high precision."""
        spec = self.spec(gemm, operand)
        if spec is None:
            return x
        key = self.random_key(gemm, operand, row_offset) if spec.rounding == "stochastic" else None
        q = ops.quantize(
            x, axis, spec.fmt, spec.block, spec.scale_rule, spec.rounding, key, hadamard=spec.hadamard,
            hadamard_seed=self.recipe.seed,
        )  # fmt: skip
        if observe.active() and spec.hadamard is not None:
            x = ops.hadamard(x, axis, spec.hadamard, self.recipe.seed)
        self.watch_cast(gemm, operand, x, q)
        return q

    def random_key(self, gemm: str, operand: str, row_offset: int = 0) -> RngKey:
        """Of the random bits that round this operand of this GEMM in this step."""
        stream = _stream(self.layer, _STREAMS[gemm, operand])
        step = step_tensor() if torch.compiler.is_compiling() else get_step()
        return RngKey(seed=self.recipe.seed, step=step, stream=stream, row_offset=row_offset)

    def cast_both(self, x: torch.Tensor, rows: tuple[str, str], columns: tuple[str, str]) -> tuple[Operand, Operand]:
        """``x`` cast along its rows for one GEMM's operand and along its columns for another's, in one pass if the two
        casts differ in nothing but their blocks."""
        first, second = self.spec(*rows), self.spec(*columns)
        if first is None or second is None or not fusible(first, second):
            return self.cast(x, *rows, axis=-1), self.cast(x, *columns, axis=-2)
        q, t = ops.quantize_both(x, first.fmt, first.block, second.block, first.scale_rule)
        self.watch_cast(*rows, x, q)
        if columns != ("wgrad", "input") or not self.recipe.shares_input:  # else one copy, used twice
            self.watch_cast(*columns, x, t)
        return q, t

    def cast_gradient(self, dy: torch.Tensor) -> tuple[Operand, Operand]:
        """``dy`` as dgrad and as wgrad multiply it; as it is where that GEMM does not run."""
        if self.needs_dgrad and self.needs_wgrad:
            return self.cast_both(dy, ("dgrad", "grad_output"), ("wgrad", "grad_output"))
        if self.needs_dgrad:
            return self.cast(dy, "dgrad", "grad_output", axis=-1), dy
        return dy, self.cast(dy, "wgrad", "grad_output", axis=-2) if self.needs_wgrad else dy

    def spec(self, gemm: str, operand: str) -> CastSpec | None:
        """The cast of an operand of a GEMM, None if it stays in high precision."""
        found: CastSpec | None = getattr(getattr(self.recipe, gemm), "rhs" if _is_rhs(gemm, operand) else "lhs")
        return found

    def watch_cast(self, gemm: str, operand: str, x: torch.Tensor, q: MXTensor) -> None:
        if observe.active():
            observe.emit(observe.CastEvent(layer=self.layer, gemm=gemm, operand=operand, x=x, q=q))

    def gemm(
        self, gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``a @ b.T + bias``, by the MX contract if either operand is MX, else by torch in the operands' dtype."""
        if isinstance(a, MXTensor) or isinstance(b, MXTensor):
            out = ops.gemm(a, b, bias, out_dtype)
        else:
            out = rounded(F.linear(a, b.to(a.dtype), None if bias is None else bias.to(a.dtype)), out_dtype)
        if observe.active():
            observe.emit(observe.GemmEvent(layer=self.layer, gemm=gemm, a=a, b=b, out=out, bias=bias))
        return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _stream(layer: str, operand: int) -> int:
    """Tells apart the random bits of layers and operands that are rounded in the same step."""
    return (zlib.crc32(layer.encode()) + operand) % 2**32


def fusible(first: CastSpec, second: CastSpec) -> bool:
    """Whether one pass can make both casts of a tensor: they round to nearest and differ in their blocks alone."""
    plain = (first.fmt, first.scale_rule, "nearest", None)
    return all((spec.fmt, spec.scale_rule, spec.rounding, spec.hadamard) == plain for spec in (first, second))


def _is_rhs(gemm: str, operand: str) -> bool:
    return operand == "weight" or (gemm, operand) == ("wgrad", "input")


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's ``once_differentiable``, which costs as much as a launch, but free where no graph is made."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def chosen(ctx: Any, *grads: torch.Tensor) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return chosen


class _LinearFunction(torch.autograd.Function):
    """``y = x @ weight.T + bias`` on 2-D ``x``. ``*weights`` are the two quantised weights, flattened: a custom
    function sees plain tensors only.

    On a GPU each pass is replayed as a whole once it has been seen twice: a handful of allocations and launches.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan, *weights: torch.Tensor
    ) -> torch.Tensor:
        read = (x, *weights[:2]) if bias is None else (x, *weights[:2], bias)
        known = plan.key("linear forward", read)
        made = replays.again(known, *read)
        if made is None:
            made = replays.run(known, lambda: _forward(plan, x, weight, bias, weights), read)
        y, x_wgrad, x_wgrad_scale = made

        saved: list[torch.Tensor] = []
        if plan.needs_dgrad:
            saved += [weight] if plan.recipe.dgrad.rhs is None else weights[-2:]
        if x_wgrad is not None:
            saved += [x_wgrad, x_wgrad_scale]
        elif plan.needs_wgrad:
            saved += [x]
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.dtypes = plan, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        read = (dy, *saved)
        known = plan.key("linear backward", read, x_dtype, w_dtype)
        made = replays.again(known, *read)
        if made is None:
            made = replays.run(known, lambda: _backward(plan, dy, saved, x_dtype, w_dtype), read)
        dx, dw = made
        db = None
        if bias_dtype is not None and needed[2]:
            db = dy.contiguous().sum(0, dtype=torch.float32).to(bias_dtype)  # strides change the order
        return dx, dw, db, *(None,) * (len(needed) - 3)


def _forward(
    plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weights: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``y``, then the input as wgrad will multiply it, elements and scales, if it is kept so.

    === fprop: Y[M,N] = X[M,K] @ W[N,K]^T + bias
    """
    w_fprop = weight if plan.recipe.fprop.rhs is None else restore(list(weights[:2]), plan.recipe.fprop.rhs, -1)
    x_wgrad: Operand | None = None
    if plan.needs_wgrad and plan.recipe.saves_mx_activations:
        x_fprop, x_wgrad = plan.cast_both(x, ("fprop", "input"), ("wgrad", "input"))
    else:
        x_fprop = plan.cast(x, "fprop", "input", axis=-1)
    y = plan.gemm("fprop", x_fprop, w_fprop, x.dtype, bias)
    return (y, x_wgrad.qdata, x_wgrad.scale_bytes) if isinstance(x_wgrad, MXTensor) else (y, None, None)


def _backward(
    plan: Plan, dy: torch.Tensor, saved: tuple[torch.Tensor, ...], x_dtype: torch.dtype, w_dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x`` and of the weight, each None if it is not needed."""
    recipe, left = plan.recipe, list(saved)
    dx = dw = None
    dy_dgrad, dy_wgrad = plan.cast_gradient(dy)

    # === dgrad: dX[M,K] = dY[M,N] @ W[N,K]
    if plan.needs_dgrad:
        w_dgrad = restore(left, recipe.dgrad.rhs, -2)
        dx = plan.gemm("dgrad", dy_dgrad, w_dgrad.mT, x_dtype)

    # === wgrad: dW[N,K] = dY[M,N]^T @ X[M,K]
    if plan.needs_wgrad:
        x_wgrad = restore(left, recipe.wgrad.rhs if recipe.saves_mx_activations else None, -2)
        if isinstance(x_wgrad, torch.Tensor):
            x_wgrad = plan.cast(x_wgrad, "wgrad", "input", axis=-2)
        dw = plan.gemm("wgrad", dy_wgrad.mT, x_wgrad.mT, w_dtype)
    return dx, dw


def restore(saved: list[torch.Tensor], spec: CastSpec | None, axis: int) -> Operand:
    """Take the next operand off ``saved``: two tensors if it was cast by ``spec``, one if it is in high precision."""
    if spec is None:
        return saved.pop(0)
    return MXTensor.trusted(saved.pop(0), saved.pop(0), get_format(spec.fmt), axis, spec.block)


def pack_weights(plan: Plan, weight: torch.Tensor, cache: WeightCache) -> list[torch.Tensor]:
    """Quantise the weight for fprop, and for dgrad if a gradient will be asked for; flattened to tensors."""
    if not plan.weights:
        return []
    if observe.active():
        copies = [quantize_weights(weight, (key,))[0] for key in plan.weights]
        for (_, axis), q in zip(plan.weights, copies, strict=True):
            plan.watch_cast("fprop" if axis == -1 else "dgrad", "weight", weight.detach(), q)
    else:
        copies = cache.get(weight, plan.weights)
    tensors = []
    for q in copies:
        tensors += [q.qdata, q.scale_bytes]
    return tensors


def _one_copy(recipe: LinearRecipe, weight: torch.Tensor) -> bool:
    """Whether fprop and dgrad read the same bytes. A GPU's tensor cores want their operands contiguous along the axis
    that is summed over, so there a square weight is kept in both orders all the same."""
    return recipe.shares_weight and not weight.is_cuda


def unpack_weights(plan: Plan, weight: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> tuple[Operand, Operand]:
    """The weight operands of fprop and dgrad, both ``[N, K]``."""
    recipe, left = plan.recipe, list(tensors)
    w_fprop = restore(left, recipe.fprop.rhs, -1) if recipe.fprop.rhs is not None else weight
    if _one_copy(recipe, weight) and isinstance(w_fprop, MXTensor):
        return w_fprop, w_fprop
    if not left:
        return w_fprop, weight
    return w_fprop, restore(left, recipe.dgrad.rhs, -2)


class MXFP8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in MXFP8 as its recipe says. Same parameters, same ``state_dict`` keys.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        recipe: a name from :data:`mxfp8.RECIPES` or a :class:`~mxfp8.LinearRecipe`.

    Shape: input ``[..., in_features]`` with any number of rows (zero, or not a multiple of 32, too), output
    ``[..., out_features]`` in the autocast dtype if autocast is on, else in the input's dtype. Weights may be wider
    than inputs (float32 master weights, bfloat16 inputs); gradients have the dtype of what they belong to.

    Raises:
        TypeError: input or weight not float32, bfloat16 or float16.
        ValueError: wrong number of features, or weights still on the meta device.

    **Numerics.** Casts as in :mod:`mxfp8.recipe`, GEMMs as in :func:`mxfp8.gemm`: float32 accumulation, bias added in
    float32, one rounding. The bias gradient is summed in float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | LinearRecipe = "mxfp8_rceil",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._adopt(recipe, "")

    def _adopt(self, recipe: str | LinearRecipe, fqn: str) -> None:
        self.recipe = get_recipe(recipe)
        self.fqn = fqn
        self._cache = WeightCache()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: str | LinearRecipe = "mxfp8_rceil", *, fqn: str = ""
    ) -> MXFP8Linear:
        """A layer that shares ``linear``'s parameters (the same objects: ties and optimiser state survive), hooks and
        mode. ``fqn`` is its dotted name in reports and the source of its stochastic-rounding stream.

        TypeError for subclasses of ``nn.Linear``: their own forward would be lost.
        """
        if type(linear) not in (nn.Linear, MXFP8Linear):
            name = type(linear).__name__
            raise TypeError(f"from_linear takes an nn.Linear, not {name}: its own forward would be lost")
        out: MXFP8Linear = _rewrap(linear, cls)
        out._adopt(recipe, fqn)
        return out

    from_float = from_linear  # torchao's name

    def to_linear(self) -> nn.Linear:
        """The plain ``nn.Linear`` with the same parameters."""
        out: nn.Linear = _rewrap(self, nn.Linear)
        for name in ("recipe", "fqn", "_cache"):
            out.__dict__.pop(name)
        return out

    def clear_cache(self) -> None:
        """Forget quantised weights. Needed only after writing through ``weight.data`` on CUDA outside an optimiser."""
        self._cache.clear()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        x = prepare(input, weight, self.in_features, self.fqn)
        plan = layer_plan(self.recipe, self.fqn, weight, x)
        weights = pack_weights(plan, weight, self._cache)
        # -1 is ambiguous without features; a view is a node of the graph and costs as much as a launch.
        rows = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), self.in_features)
        y: torch.Tensor = _LinearFunction.apply(rows, weight, self.bias, plan, *weights)  # type: ignore[no-untyped-call]
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._cache.clear()  # to(), half(), to_empty() ... exchange the storage, and may land on the same address
        out: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": WeightCache()}


def _rewrap(linear: nn.Linear, cls: type[nn.Linear]) -> Any:
    """An object of ``cls`` with everything that ``linear`` holds: the same parameters, copies of its dictionaries."""
    out = object.__new__(cls)
    for name, value in linear.__dict__.items():
        out.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    return out


def layer_plan(recipe: LinearRecipe, fqn: str, weight: torch.Tensor, x: torch.Tensor) -> Plan:
    """The plan of a layer for this input: which gradients will be asked for."""
    grad = torch.is_grad_enabled()
    return plan_of(recipe, fqn, weight, grad and x.requires_grad, grad and weight.requires_grad)


def plan_of(recipe: LinearRecipe, fqn: str, weight: torch.Tensor, needs_dgrad: bool, weight_grad: bool) -> Plan:
    """The plan of a layer whose gradients are asked for so; the same object for the same arguments."""
    if torch.compiler.is_compiling():
        return _new_plan(recipe, fqn, weight, needs_dgrad, weight_grad, None)
    key = (id(recipe), fqn, weight.is_cuda, needs_dgrad, weight_grad)  # a plan keeps its recipe alive
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        number = _number(recipe, needs_dgrad, weight_grad) if _repeatable(recipe) else None
        plan = _plans[key] = _new_plan(recipe, fqn, weight, needs_dgrad, weight_grad, number)
    return plan


_plans: dict[Hashable, Plan] = {}
_MAX_PLANS = 8192
_numbers = itertools.count()


@functools.lru_cache(maxsize=_MAX_PLANS)
def _number(recipe: LinearRecipe, needs_dgrad: bool, weight_grad: bool) -> int:
    return next(_numbers)


def _repeatable(recipe: LinearRecipe) -> bool:
    """Whether every call casts all operands, without random bits."""
    specs = [side for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for side in (gemm.lhs, gemm.rhs)]
    return all(spec is not None and spec.rounding == "nearest" for spec in specs)


def _new_plan(
    recipe: LinearRecipe, fqn: str, weight: torch.Tensor, needs_dgrad: bool, weight_grad: bool, number: int | None
) -> Plan:
    needs_wgrad = weight_grad and not recipe.wgrad.skip
    weights: tuple[Key, ...] = () if recipe.fprop.rhs is None else ((recipe.fprop.rhs, -1),)
    if recipe.dgrad.rhs is not None and needs_dgrad and not _one_copy(recipe, weight):
        weights += ((recipe.dgrad.rhs, -2),)
    return Plan(recipe, fqn, needs_dgrad, needs_wgrad, weights, number)


def prepare(x: torch.Tensor, weight: torch.Tensor, features: int, fqn: str) -> torch.Tensor:
    """Check the input and bring it to the autocast dtype, if autocast is on."""
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"{_named(fqn)}: input has shape {tuple(x.shape)}, its last dimension must be {features}")
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{_named(fqn)}: input is {x.dtype}, use float32, bfloat16 or float16")
    if weight.dtype not in _INPUT_DTYPES or weight.is_meta:
        check_weight(weight, x, _named(fqn))
    return x


def _named(fqn: str) -> str:
    return f"layer {fqn!r}" if fqn else "MXFP8Linear"


def check_weight(weight: torch.Tensor, x: torch.Tensor, where: str) -> None:
    """ValueError or TypeError for a weight that cannot be multiplied with ``x``."""
    if weight.is_meta and not x.is_meta:
        raise ValueError(f"{where}: weights are on the meta device: call to_empty(), then initialise or load them")
    if weight.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{where}: weight is {weight.dtype}, use float32, bfloat16 or float16 master weights")
