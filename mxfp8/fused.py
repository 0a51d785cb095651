"""Activations and norms that hand their result to MXFP8 GEMMs without a round trip through memory.

A linear that follows an activation or a norm quantises what that wrote a moment before. These ops compute the value in
float32 and cast it in the same pass: along rows for the forward GEMM, along columns for the weight gradient, and to the
input's dtype only if somebody else needs it. Each has its backward, which casts the input's gradient the same way.

They take plain tensors, and record nothing for autograd: call them inside an autograd function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mxfp8 import dispatch, ops
from mxfp8.formats import BlockShape, ElementFormat, ScaleRule, get_block, get_format, get_scale_rule
from mxfp8.reference.fused import ACTIVATIONS, Casts
from mxfp8.reference.hadamard import HADAMARD_SIZES
from mxfp8.tensor import MXTensor

__all__ = [
    "ActivationGradient",
    "NormGradient",
    "Normalized",
    "Quantized",
    "activation_quantize",
    "activation_quantize_backward",
    "make_casts",
    "norm_quantize",
    "norm_quantize_backward",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = ("rms", "layer", "block")
OUTPUTS = ("rows", "columns", "hp")
NORM_BLOCKS = (32, 64, 128, 256, 512, 1024)


class Quantized(NamedTuple):
    """What was asked for of a result, the rest None: MX along -1, MX along -2, the input's dtype."""

    rows: MXTensor | None
    columns: MXTensor | None
    hp: torch.Tensor | None


class ActivationGradient(NamedTuple):
    """The gradient of the input as :class:`Quantized`, and float32 ``[C]`` of the bias (None without one)."""

    rows: MXTensor | None
    columns: MXTensor | None
    hp: torch.Tensor | None
    bias: torch.Tensor | None


class Normalized(NamedTuple):
    """The normalised value as :class:`Quantized`, and what the backward pass needs: the sum that was normalised (the
    input itself without a residual), and float32 ``[..., groups]`` statistics (``mean`` of LayerNorm only)."""

    rows: MXTensor | None
    columns: MXTensor | None
    hp: torch.Tensor | None
    h: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor


class NormGradient(NamedTuple):
    """The gradient of the input (and of the residual) as :class:`Quantized`, and float32 ``[C]`` of weight and bias."""

    rows: MXTensor | None
    columns: MXTensor | None
    hp: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def activation_quantize(
    x: torch.Tensor,
    activation: str,
    bias: torch.Tensor | None = None,
    *,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    outputs: Sequence[str] = ("rows", "columns"),
    round_first: bool = False,
    satfinite: bool = False,
    hadamard: int | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Quantized:
    """``activation(x + bias)`` as MX copies, without writing the value itself unless asked.

    Args:
        x: ``[..., R, C]`` in float32, bfloat16 or float16, any strides. For ``"swiglu"`` the last dimension holds
            ``[gate | up]`` and the result, ``silu(gate) * up``, half as many columns.
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"``, ``"hardswish"`` or ``"swiglu"``.
        bias: ``[C]``, any of these dtypes, added before the activation.
        fmt, block, column_block, scale_rule, satfinite: of the casts, as :func:`mxfp8.ops.quantize_both`.
        outputs: which of ``"rows"``, ``"columns"`` and ``"hp"`` (the value in the dtype of ``x``) to make.
        round_first: cast what ``"hp"`` holds instead of the float32 value: the bits of the activation as a step of its
            own followed by :func:`mxfp8.quantize`.
        hadamard, seed: size and seed of a random Hadamard transform along the columns (wgrad contracts over them)
            before their cast; None for none. The columns then are ``quantize(hadamard(hp, -2, size, seed), -2, ...)``
            and have as many rows; what ``"hp"`` holds is written and read for it.

    Raises:
        TypeError: a tensor of another dtype, or one that needs a gradient.
        ValueError: unknown activation, output, format, rule, block or Hadamard size; shapes or devices that do not fit.

    **Numerics.** ``x`` and ``bias`` are widened to float32, added, and the activation computed there; the casts take
    that value as :func:`mxfp8.quantize` would. relu (every zero becomes +0) and hardswish are the same bits on every
    backend. The others agree with the exact function to a relative ``(|x| + 5) 2**-23`` (silu; gelu_tanh with its own
    argument of exp in the place of x; gelu to 2**-21 of ``|x|``, as ``1 + erf`` cancels) and ``|x| 2**-126``, so that a
    scale byte or an element may differ between backends where the exact value is that close to a rounding boundary: by
    one step, and in fewer than one element in 1000.
    NaN stays NaN; ``silu(-inf)`` and ``gelu(-inf)`` are NaN, as in torch.
    """
    op, casts = "activation_quantize", make_casts(fmt, block, column_block, scale_rule, outputs, round_first, satfinite)
    made, rotation = _made(casts, hadamard), (hadamard, seed, backend)
    _check_activation(op, x, activation, bias, casts)
    with torch.no_grad():
        parts = dispatch.resolve(op, backend, x.device)(x, bias, activation=activation, casts=made)
    return Quantized(*_wrap(parts, casts, *rotation))


def activation_quantize_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    activation: str,
    bias: torch.Tensor | None = None,
    *,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    outputs: Sequence[str] = ("rows", "columns"),
    round_first: bool = False,
    satfinite: bool = False,
    hadamard: int | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> ActivationGradient:
    """The gradient of ``x`` under :func:`activation_quantize`, as MX copies, and that of ``bias``.

    Args:
        dy: the gradient of the value, in the dtype of ``x`` and the shape of the value.
        x, activation, bias: as given to the forward pass.
        fmt and all others: as there; ``"hp"`` is the gradient in the dtype of ``x``.

    Raises:
        TypeError, ValueError: as :func:`activation_quantize`.

    **Numerics.** ``activation'(x + bias) * dy`` in float32, cast from there. The gradient of ``bias`` sums the float32
    values over all rows in float32, tile by tile in a fixed order: it is the same in every run.
    """
    op = "activation_quantize_backward"
    casts = make_casts(fmt, block, column_block, scale_rule, outputs, round_first, satfinite)
    made, rotation = _made(casts, hadamard), (hadamard, seed, backend)
    _check_activation(op, x, activation, bias, casts)
    width = x.shape[-1] // (2 if activation == "swiglu" else 1)
    _check_like(op, "dy", dy, x, (*x.shape[:-1], width))
    with torch.no_grad():
        *parts, dbias = dispatch.resolve(op, backend, x.device)(dy, x, bias, activation=activation, casts=made)
    return ActivationGradient(*_wrap(parts, casts, *rotation), dbias)


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: str = "rms",
    norm_block: int = 256,
    eps: float = 1e-5,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    outputs: Sequence[str] = ("rows", "columns"),
    round_first: bool = False,
    satfinite: bool = False,
    hadamard: int | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Normalized:
    """A norm over the last dimension of ``x + residual`` as MX copies, and what its backward pass needs.

    Args:
        x: ``[..., R, C]`` in float32, bfloat16 or float16, any strides.
        weight, bias: ``[C]``, any of these dtypes.
        residual: like ``x``; the sum is rounded to that dtype, normalised and returned as ``h``.
        norm: ``"rms"``, ``"layer"``, or ``"block"``: a root mean square for every ``norm_block`` columns.
        norm_block: 32, 64, 128, 256, 512 or 1024. The last block of a row may be shorter.
        eps: added to the mean square.
        fmt and all others: as :func:`activation_quantize`.

    Raises:
        TypeError, ValueError: as :func:`activation_quantize`; unknown norm or norm block; eps not positive.

    **Numerics.** ``((h - mean) * rstd) * weight + bias`` in float32, in this order and without contraction, so that the
    copies are exactly the quantised values of that expression for the returned ``mean`` and ``rstd``. Those are float32
    means of all columns in an order of the backend's own, ``|rstd - exact| <= (C / 2 + 6) 2**-24 rstd``; LayerNorm's
    sums squared deviations from the mean, so that a mean far from zero does not cancel.
    """
    op, casts = "norm_quantize", make_casts(fmt, block, column_block, scale_rule, outputs, round_first, satfinite)
    made, rotation = _made(casts, hadamard), (hadamard, seed, backend)
    _check_norm(op, x, norm, norm_block, casts)
    _check_vector(op, "weight", weight, x)
    _check_vector(op, "bias", bias, x)
    if residual is not None:
        _check_like(op, "residual", residual, x, tuple(x.shape))
    if not eps > 0:
        raise ValueError(f"{op}: eps is {eps}: a row of zeros needs a positive one")
    with torch.no_grad():
        *parts, h, mean, rstd = dispatch.resolve(op, backend, x.device)(
            x, weight, bias, residual, norm=norm, norm_block=norm_block, eps=float(eps), casts=made
        )
    return Normalized(*_wrap(parts, casts, *rotation), h, mean, rstd)


def norm_quantize_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dh: torch.Tensor | None = None,
    *,
    with_bias: bool = False,
    norm: str = "rms",
    norm_block: int = 256,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    outputs: Sequence[str] = ("rows", "columns"),
    round_first: bool = False,
    satfinite: bool = False,
    hadamard: int | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> NormGradient:
    """The gradient of ``h`` under :func:`norm_quantize` (so of ``x`` and of the residual), as MX copies, and those of
    weight and bias.

    Args:
        dy: the gradient of the normalised value, like ``h``.
        h, rstd, mean: as returned by the forward pass; ``mean`` for ``norm="layer"`` only.
        weight, norm, norm_block: as given to it.
        dh: a gradient that reaches ``h`` on another way, like ``h``; it is added.
        with_bias: whether there was a bias.
        fmt and all others: as :func:`activation_quantize`.

    Raises:
        TypeError, ValueError: as :func:`norm_quantize`; statistics of another shape.

    **Numerics.** With ``n = (h - mean) rstd`` and ``g = dy weight``: ``rstd (g - n mean(g n) - mean(g)) + dh`` in
    float32, the last mean for LayerNorm only. Gradients of weight and bias are float32 sums over all rows, strip by
    strip in a fixed order: the same in every run.
    """
    op = "norm_quantize_backward"
    casts = make_casts(fmt, block, column_block, scale_rule, outputs, round_first, satfinite)
    made, rotation = _made(casts, hadamard), (hadamard, seed, backend)
    _check_norm(op, h, norm, norm_block, casts)
    _check_like(op, "dy", dy, h, tuple(h.shape))
    _check_vector(op, "weight", weight, h)
    if dh is not None:
        _check_like(op, "dh", dh, h, tuple(h.shape))
    _check_statistics(op, h, rstd, mean, norm, norm_block)
    with torch.no_grad():
        *parts, dweight, dbias = dispatch.resolve(op, backend, h.device)(
            dy, h, weight, mean, rstd, dh, norm=norm, norm_block=norm_block, with_bias=with_bias, casts=made
        )
    return NormGradient(*_wrap(parts, casts, *rotation), dweight, dbias)


def make_casts(
    fmt: str | ElementFormat, block: BlockShape, column_block: BlockShape | None, scale_rule: str | ScaleRule,
    outputs: Sequence[str], round_first: bool, satfinite: bool,
) -> Casts:  # fmt: skip
    """The arguments of an op, checked."""
    if isinstance(outputs, str) or not outputs or not set(outputs) <= set(OUTPUTS):
        raise ValueError(f"outputs is {outputs!r}: name one or more of {', '.join(OUTPUTS)}")
    block = get_block(block)
    return Casts(
        outputs=tuple(name for name in OUTPUTS if name in outputs),
        round_first=bool(round_first),
        fmt=get_format(fmt),
        block=block,
        column_block=block if column_block is None else get_block(column_block),
        scale_rule=get_scale_rule(scale_rule),
        satfinite=bool(satfinite),
    )


def _made(casts: Casts, hadamard: int | None) -> Casts:
    """What the op is to make for ``casts``: the value itself where columns are to be rotated before their cast."""
    if hadamard is None:
        return casts
    if hadamard not in HADAMARD_SIZES:
        raise ValueError(f"hadamard is {hadamard!r}: use None or one of {', '.join(map(str, HADAMARD_SIZES))}")
    if "columns" not in casts.outputs:
        return casts
    return replace(casts, outputs=("rows", "hp") if "rows" in casts.outputs else ("hp",))


def _wrap(
    parts: Sequence[torch.Tensor | None], casts: Casts, hadamard: int | None, seed: int, backend: str
) -> tuple[MXTensor | None, MXTensor | None, torch.Tensor | None]:
    q, s, t, u, hp = parts
    rows = None if q is None or s is None else MXTensor.trusted(q, s, casts.fmt, -1, casts.block)
    columns = None if t is None or u is None else MXTensor.trusted(t, u, casts.fmt, -2, casts.column_block)
    if hadamard is not None and hp is not None and "columns" in casts.outputs:
        columns = ops.quantize(
            hp, -2, casts.fmt, casts.column_block, casts.scale_rule, satfinite=casts.satfinite, hadamard=hadamard,
            hadamard_seed=seed, backend=_there("hadamard_quantize", backend, hp.device.type),
        )  # fmt: skip
    return rows, columns, hp if "hp" in casts.outputs else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _there(op: str, backend: str, kind: str) -> str:
    """``backend`` if it has ``op``, else what ``"auto"`` takes."""
    return backend if backend != "auto" and dispatch.why_not(op, backend, kind) is None else "auto"


def _check_input(op: str, x: torch.Tensor, casts: Casts) -> None:
    _check_tensor(op, "the input", x)
    needs_two = "columns" in casts.outputs or casts.block[0] != 1
    if x.ndim < (2 if needs_two else 1):
        raise ValueError(f"{op}: the input has shape {tuple(x.shape)}: outputs {casts.outputs} need two dimensions")


def _check_activation(op: str, x: torch.Tensor, activation: str, bias: torch.Tensor | None, casts: Casts) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: unknown activation {activation!r}: use one of {', '.join(ACTIVATIONS)}")
    _check_input(op, x, casts)
    if activation == "swiglu" and x.shape[-1] % 2:
        raise ValueError(f"{op}: swiglu halves the last dimension, which is {x.shape[-1]}")
    _check_vector(op, "bias", bias, x)


def _check_norm(op: str, x: torch.Tensor, norm: str, norm_block: int, casts: Casts) -> None:
    if norm not in NORMS:
        raise ValueError(f"{op}: unknown norm {norm!r}: use one of {', '.join(NORMS)}")
    if norm == "block" and norm_block not in NORM_BLOCKS:
        raise ValueError(f"{op}: norm_block is {norm_block}: use one of {', '.join(map(str, NORM_BLOCKS))}")
    _check_input(op, x, casts)


def _check_statistics(
    op: str, h: torch.Tensor, rstd: torch.Tensor, mean: torch.Tensor | None, norm: str, norm_block: int
) -> None:
    group = norm_block if norm == "block" and norm_block < h.shape[-1] else max(1, h.shape[-1])
    want = (*h.shape[:-1], -(-h.shape[-1] // group))
    if (mean is None) == (norm == "layer"):
        raise ValueError(
            f"{op}: mean is {'missing' if mean is None else 'given'}: norm='layer' needs it, others do not"
        )
    for name, values in (("rstd", rstd), ("mean", mean)):
        if values is not None and (tuple(values.shape) != want or values.dtype != torch.float32):
            raise ValueError(f"{op}: {name} is {values.dtype} of shape {tuple(values.shape)}: needs float32 {want}")


def _check_tensor(op: str, name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{op}: {name} is {got}: use a float32, bfloat16 or float16 tensor")
    if torch.is_grad_enabled() and x.requires_grad:
        raise TypeError(f"{op} records no gradient, but {name} requires one: call it in an autograd function")


def _check_vector(op: str, name: str, v: torch.Tensor | None, x: torch.Tensor) -> None:
    if v is None:
        return
    _check_tensor(op, name, v)
    if tuple(v.shape) != (x.shape[-1],) or v.device != x.device:
        raise ValueError(
            f"{op}: {name} has shape {tuple(v.shape)} on {v.device}: an input of shape {tuple(x.shape)} on {x.device} "
            f"needs ({x.shape[-1]},) there"
        )


def _check_like(op: str, name: str, t: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor(op, name, t)
    if tuple(t.shape) != shape or t.dtype != x.dtype or t.device != x.device:
        raise ValueError(
            f"{op}: {name} is {t.dtype} of shape {tuple(t.shape)} on {t.device}: needs {x.dtype} {shape} on {x.device}"
        )
