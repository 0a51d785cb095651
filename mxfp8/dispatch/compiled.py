"""Kernels as torch operators: what ``torch.compile`` sees of them is one node, with a shape but no body.

Eager calls do not come this way, since an operator costs more host time than a small kernel. Elements travel as bytes,
because compilers handle float8 on some backends only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule, get_format
from mxfp8.rng import RngKey

__all__ = ["OPERATORS", "as_bytes", "kernel", "key_of", "layout", "operand_of", "words_of"]

# Written as one schema each: the annotations of custom_op know neither enums nor dataclasses.
_QUANTIZE = (
    "(Tensor x, int axis, str fmt, int[] block, str scale_rule, str rounding, int[] key, Tensor? step, bool satfinite, "
    "str backend) -> (Tensor, Tensor)"
)
_BOTH = (
    "(Tensor x, str fmt, int[] block, int[] column_block, str scale_rule, bool satfinite, str backend) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_HADAMARD = "(Tensor x, int axis, int size, int[] seed, str backend) -> Tensor"
_HADAMARD_QUANTIZE = (
    "(Tensor x, int axis, int size, int[] signs, str fmt, int[] block, str scale_rule, str rounding, int[] key, "
    "Tensor? step, bool satfinite, str backend) -> (Tensor, Tensor)"
)
_GEMM = (
    "(Tensor a, Tensor? a_scale, int[]? a_block, str? a_fmt, Tensor b, Tensor? b_scale, int[]? b_block, str? b_fmt, "
    "Tensor? bias, ScalarType out_dtype, str? activation, str backend) -> Tensor"
)


def kernel(op: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """What an operator runs."""
    from mxfp8 import dispatch

    return dispatch.resolve(op, backend, device)


def layout(
    shape: Sequence[int], device: torch.device, axis: int, block: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty elements and scales with the strides that the kernels give them; sizes may be symbols."""
    known = importlib.import_module("mxfp8.kernels.quantize_triton").layout.__wrapped__
    out = known(tuple(shape), axis, (block[0], block[1]))
    qdata = torch.empty_strided(out.qdata_size, out.qdata_stride, dtype=torch.uint8, device=device)
    scale = torch.empty_strided(out.scale_size, out.scale_stride, dtype=torch.uint8, device=device)
    return qdata if len(shape) < 2 else qdata.narrow(-2, 0, out.rows), scale


@torch.library.custom_op("mxfp8::quantize", mutates_args=(), schema=_QUANTIZE)
def _quantize(
    x: torch.Tensor, axis: int, fmt: str, block: list[int], scale_rule: str, rounding: str, key: list[int],
    step: torch.Tensor | None, satfinite: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s = kernel("quantize", backend, x.device)(
        x, axis=axis, fmt=get_format(fmt), block=(block[0], block[1]), scale_rule=ScaleRule(scale_rule),
        rounding=Rounding(rounding), key=key_of(key, step), satfinite=satfinite,
    )  # fmt: skip
    return q.view(torch.uint8), s


def key_of(words: list[int], step: torch.Tensor | None) -> RngKey | None:
    """Inverse of :func:`words_of`."""
    if not words:
        return None
    low, high, stream, row_offset, col_offset = words
    assert step is not None
    return RngKey(seed=high << 32 | low, step=step, stream=stream, row_offset=row_offset, col_offset=col_offset)


@_quantize.register_fake
def _(x, axis, fmt, block, scale_rule, rounding, key, step, satfinite, backend):  # type: ignore[no-untyped-def]
    return layout(x.shape, x.device, axis, block)


@torch.library.custom_op("mxfp8::quantize_both", mutates_args=(), schema=_BOTH)
def _quantize_both(
    x: torch.Tensor, fmt: str, block: list[int], column_block: list[int], scale_rule: str, satfinite: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, s, t, u = kernel("quantize_both", backend, x.device)(
        x, fmt=get_format(fmt), block=(block[0], block[1]), column_block=(column_block[0], column_block[1]),
        scale_rule=ScaleRule(scale_rule), satfinite=satfinite,
    )  # fmt: skip
    return q.view(torch.uint8), s, t.view(torch.uint8), u


@_quantize_both.register_fake
def _(x, fmt, block, column_block, scale_rule, satfinite, backend):  # type: ignore[no-untyped-def]
    return *layout(x.shape, x.device, -1, block), *layout(x.shape, x.device, -2, column_block)


@torch.library.custom_op("mxfp8::hadamard", mutates_args=(), schema=_HADAMARD)
def _hadamard(x: torch.Tensor, axis: int, size: int, seed: list[int], backend: str) -> torch.Tensor:
    out: torch.Tensor = kernel("hadamard", backend, x.device)(x, axis=axis, size=size, seed=seed[1] << 32 | seed[0])
    return out


@_hadamard.register_fake
def _(x, axis, size, seed, backend):  # type: ignore[no-untyped-def]
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // size) * size
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("mxfp8::hadamard_quantize", mutates_args=(), schema=_HADAMARD_QUANTIZE)
def _hadamard_quantize(
    x: torch.Tensor, axis: int, size: int, signs: list[int], fmt: str, block: list[int], scale_rule: str, rounding: str,
    key: list[int], step: torch.Tensor | None, satfinite: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s = kernel("hadamard_quantize", backend, x.device)(
        x, axis=axis, size=size, signs=signs[1] << 32 | signs[0], fmt=get_format(fmt), block=(block[0], block[1]),
        scale_rule=ScaleRule(scale_rule), rounding=Rounding(rounding), key=key_of(key, step), satfinite=satfinite,
    )  # fmt: skip
    return q.view(torch.uint8), s


@_hadamard_quantize.register_fake
def _(x, axis, size, signs, fmt, block, scale_rule, rounding, key, step, satfinite, backend):  # type: ignore[no-untyped-def]
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // size) * size
    return layout(shape, x.device, axis, block)


def operand_of(
    x: torch.Tensor, scale: torch.Tensor | None, block: list[int] | None, fmt: str | None
) -> tuple[torch.Tensor, torch.Tensor | None, BlockShape | None]:
    """An operand as a backend takes it; inverse of :func:`as_bytes`."""
    return x if fmt is None else x.view(get_format(fmt).dtype), scale, None if block is None else (block[0], block[1])


@torch.library.custom_op("mxfp8::gemm", mutates_args=(), schema=_GEMM)
def _gemm(
    a: torch.Tensor, a_scale: torch.Tensor | None, a_block: list[int] | None, a_fmt: str | None,
    b: torch.Tensor, b_scale: torch.Tensor | None, b_block: list[int] | None, b_fmt: str | None,
    bias: torch.Tensor | None, out_dtype: torch.dtype, activation: str | None, backend: str,
) -> torch.Tensor:  # fmt: skip
    sides = *operand_of(a, a_scale, a_block, a_fmt), *operand_of(b, b_scale, b_block, b_fmt)
    out: torch.Tensor = kernel("gemm", backend, a.device)(*sides, bias=bias, out_dtype=out_dtype, activation=activation)
    return out


@_gemm.register_fake
def _(a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, bias, out_dtype, activation, backend):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


# The same signatures as the functions of the table, by way of the operators above.


def quantize(
    backend: str, x: torch.Tensor, *, axis: int, fmt: ElementFormat, block: BlockShape, scale_rule: ScaleRule,
    rounding: Rounding, key: RngKey | None, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s = torch.ops.mxfp8.quantize(
        x, axis, fmt.name, block, scale_rule.value, rounding.value, *words_of(key, rounding), satfinite, backend
    )
    return q.view(fmt.dtype), s


def words_of(key: RngKey | None, rounding: Rounding) -> tuple[list[int], torch.Tensor | None]:
    """A key as operators take it: integers, and the step as a tensor, which may change from call to call."""
    if key is None or rounding is not Rounding.STOCHASTIC:
        return [], None
    step = key.step if isinstance(key.step, torch.Tensor) else torch.tensor(key.step, dtype=torch.int64)
    return [key.seed & 0xFFFFFFFF, key.seed >> 32, key.stream, key.row_offset, key.col_offset], step


def quantize_both(
    backend: str, x: torch.Tensor, *, fmt: ElementFormat, block: BlockShape, column_block: BlockShape,
    scale_rule: ScaleRule, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s, t, u = torch.ops.mxfp8.quantize_both(x, fmt.name, block, column_block, scale_rule.value, satfinite, backend)
    return q.view(fmt.dtype), s, t.view(fmt.dtype), u


def hadamard(backend: str, x: torch.Tensor, *, axis: int, size: int, seed: int) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mxfp8.hadamard(x, axis, size, [seed & 0xFFFFFFFF, seed >> 32], backend)
    return out


def hadamard_quantize(
    backend: str, x: torch.Tensor, *, axis: int, size: int, signs: int, fmt: ElementFormat, block: BlockShape,
    scale_rule: ScaleRule, rounding: Rounding, key: RngKey | None, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s = torch.ops.mxfp8.hadamard_quantize(
        x, axis, size, [signs & 0xFFFFFFFF, signs >> 32], fmt.name, block, scale_rule.value, rounding.value,
        *words_of(key, rounding), satfinite, backend,
    )  # fmt: skip
    return q.view(fmt.dtype), s


def gemm(
    backend: str, a: torch.Tensor, a_scale: torch.Tensor | None, a_block: BlockShape | None, b: torch.Tensor,
    b_scale: torch.Tensor | None, b_block: BlockShape | None, *, bias: torch.Tensor | None, out_dtype: torch.dtype,
    activation: str | None = None, out: torch.Tensor | None = None, accumulate: bool = False,
) -> torch.Tensor:  # fmt: skip
    (a, a_fmt), (b, b_fmt) = as_bytes(a), as_bytes(b)
    product: torch.Tensor = torch.ops.mxfp8.gemm(
        a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, bias, out_dtype, activation, backend
    )
    if out is None:
        return product
    return out.add_(product) if accumulate else out.copy_(product)


def as_bytes(x: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """An operand as operators take it, and the name of its format (None in high precision)."""
    names = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    return (x.view(torch.uint8), names[x.dtype]) if x.dtype in names else (x, None)


OPERATORS: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "quantize_both": quantize_both,
    "hadamard": hadamard,
    "hadamard_quantize": hadamard_quantize,
    "gemm": gemm,
}
"""``op -> function(backend, ...)`` for use inside a compiled region."""
