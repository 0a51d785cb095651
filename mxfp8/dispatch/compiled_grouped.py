"""Ops on groups of rows as torch operators: one node each for ``torch.compile``, whatever the groups are.

As :mod:`mxfp8.dispatch.compiled`, but on every backend: the reference reads the ends of groups on the host, which a
compiler cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mxfp8.dispatch.compiled import as_bytes, kernel, key_of, layout, operand_of, words_of
from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule, get_format
from mxfp8.reference.grouped import padded_rows, step_of
from mxfp8.rng import RngKey
from mxfp8.tensor import scale_shape

__all__ = ["OPERATORS"]

Maybe = torch.Tensor | None

_CHECK = "(Tensor offs, SymInt rows, str backend) -> Tensor"
_CAST = (
    "(Tensor x, Tensor offs, str fmt, int[] block, str scale_rule, str rounding, int[] key, Tensor? step, "
    "bool satfinite, int? hadamard, int[] signs, str backend) -> (Tensor, Tensor, Tensor)"
)
_BOTH = (
    "(Tensor x, Tensor offs, str fmt, int[] block, int[] column_block, str scale_rule, bool satfinite, str backend) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_GEMM = (
    "(Tensor a, Tensor? a_scale, int[]? a_block, str? a_fmt, Tensor b, Tensor? b_scale, int[]? b_block, str? b_fmt, "
    "Tensor offs, ScalarType out_dtype, str backend) -> Tensor"
)
_WGRAD = (
    "(Tensor a, Tensor? a_scale, int[]? a_block, str? a_fmt, Tensor a_starts, Tensor b, Tensor? b_scale, "
    "int[]? b_block, str? b_fmt, Tensor b_starts, ScalarType out_dtype, str backend) -> Tensor"
)


@torch.library.custom_op("mxfp8::check_offsets", mutates_args=(), schema=_CHECK)
def _check_offsets(offs: torch.Tensor, rows: int, backend: str) -> torch.Tensor:
    """A copy, which an operator must give: a compiler drops a node whose result nobody reads."""
    kernel("check_offsets", backend, offs.device)(offs, rows)
    return offs.clone()


@_check_offsets.register_fake
def _(offs, rows, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(offs)


@torch.library.custom_op("mxfp8::quantize_grouped", mutates_args=(), schema=_CAST)
def _quantize_grouped(
    x: torch.Tensor, offs: torch.Tensor, fmt: str, block: list[int], scale_rule: str, rounding: str, key: list[int],
    step: torch.Tensor | None, satfinite: bool, hadamard: int | None, signs: list[int], backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s, starts = kernel("quantize_grouped", backend, x.device)(
        x, offs, fmt=get_format(fmt), block=(block[0], block[1]), scale_rule=ScaleRule(scale_rule),
        rounding=Rounding(rounding), key=key_of(key, step), satfinite=satfinite, hadamard=hadamard,
        hadamard_seed=signs[1] << 32 | signs[0],
    )  # fmt: skip
    return q.view(torch.uint8), s, starts


@_quantize_grouped.register_fake
def _(x, offs, fmt, block, scale_rule, rounding, key, step, satfinite, hadamard, signs, backend):  # type: ignore[no-untyped-def]
    return _columns(x, offs, (block[0], block[1]), hadamard, backend)


def _columns(
    x: torch.Tensor, offs: torch.Tensor, block: BlockShape, hadamard: int | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty elements, scales and starts with the strides that a backend gives them."""
    rows, cols = padded_rows(x.shape[0], len(offs), step_of(block, hadamard)), x.shape[1]
    if backend == "reference":
        qdata = x.new_empty((rows, cols), dtype=torch.uint8)
    else:  # contiguous along the axis that a product sums over
        qdata = x.new_empty((cols, rows), dtype=torch.uint8).t()
    scale = x.new_empty(scale_shape((rows, cols), block, -2), dtype=torch.uint8)
    return qdata, scale, x.new_empty(len(offs) + 1, dtype=torch.int32)


@torch.library.custom_op("mxfp8::quantize_both_grouped", mutates_args=(), schema=_BOTH)
def _quantize_both_grouped(
    x: torch.Tensor, offs: torch.Tensor, fmt: str, block: list[int], column_block: list[int], scale_rule: str,
    satfinite: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s, t, u, starts = kernel("quantize_both_grouped", backend, x.device)(
        x, offs, fmt=get_format(fmt), block=(block[0], block[1]), column_block=(column_block[0], column_block[1]),
        scale_rule=ScaleRule(scale_rule), satfinite=satfinite,
    )  # fmt: skip
    return q.view(torch.uint8), s, t.view(torch.uint8), u, starts


@_quantize_both_grouped.register_fake
def _(x, offs, fmt, block, column_block, scale_rule, satfinite, backend):  # type: ignore[no-untyped-def]
    if backend == "reference":
        rows = (
            x.new_empty(x.shape, dtype=torch.uint8),
            x.new_empty(scale_shape(x.shape, (block[0], block[1]), -1), dtype=torch.uint8),
        )
    else:
        rows = layout(x.shape, x.device, -1, block)
    return *rows, *_columns(x, offs, (column_block[0], column_block[1]), None, backend)


@torch.library.custom_op("mxfp8::grouped_gemm", mutates_args=(), schema=_GEMM)
def _grouped_gemm(
    a: torch.Tensor, a_scale: Maybe, a_block: list[int] | None, a_fmt: str | None,
    b: torch.Tensor, b_scale: Maybe, b_block: list[int] | None, b_fmt: str | None,
    offs: torch.Tensor, out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    sides = *operand_of(a, a_scale, a_block, a_fmt), *operand_of(b, b_scale, b_block, b_fmt)
    return kernel("grouped_gemm", backend, a.device)(*sides, offs=offs, out_dtype=out_dtype)  # type: ignore[no-any-return]


@_grouped_gemm.register_fake
def _(a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, offs, out_dtype, backend):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxfp8::grouped_wgrad", mutates_args=(), schema=_WGRAD)
def _grouped_wgrad(
    a: torch.Tensor, a_scale: Maybe, a_block: list[int] | None, a_fmt: str | None, a_starts: torch.Tensor,
    b: torch.Tensor, b_scale: Maybe, b_block: list[int] | None, b_fmt: str | None, b_starts: torch.Tensor,
    out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    sides = *operand_of(a, a_scale, a_block, a_fmt), a_starts, *operand_of(b, b_scale, b_block, b_fmt), b_starts
    return kernel("grouped_wgrad", backend, a.device)(*sides, out_dtype=out_dtype)  # type: ignore[no-any-return]


@_grouped_wgrad.register_fake
def _(a, a_scale, a_block, a_fmt, a_starts, b, b_scale, b_block, b_fmt, b_starts, out_dtype, backend):  # type: ignore[no-untyped-def]
    return a.new_empty((len(a_starts) - 1, a.shape[1], b.shape[1]), dtype=out_dtype)


# The same signatures as the functions of the table, by way of the operators above.


def check_offsets(backend: str, offs: torch.Tensor, rows: int) -> torch.Tensor:
    checked: torch.Tensor = torch.ops.mxfp8.check_offsets(offs, rows, backend)
    return checked


def quantize_grouped(
    backend: str, x: torch.Tensor, offs: torch.Tensor, *, fmt: ElementFormat, block: BlockShape, scale_rule: ScaleRule,
    rounding: Rounding, key: RngKey | None, satfinite: bool, hadamard: int | None, hadamard_seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s, starts = torch.ops.mxfp8.quantize_grouped(
        x, offs, fmt.name, block, scale_rule.value, rounding.value, *words_of(key, rounding), satfinite, hadamard,
        [hadamard_seed & 0xFFFFFFFF, hadamard_seed >> 32], backend,
    )  # fmt: skip
    return q.view(fmt.dtype), s, starts


def quantize_both_grouped(
    backend: str, x: torch.Tensor, offs: torch.Tensor, *, fmt: ElementFormat, block: BlockShape,
    column_block: BlockShape, scale_rule: ScaleRule, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, s, t, u, starts = torch.ops.mxfp8.quantize_both_grouped(
        x, offs, fmt.name, block, column_block, scale_rule.value, satfinite, backend
    )
    return q.view(fmt.dtype), s, t.view(fmt.dtype), u, starts


def grouped_gemm(
    backend: str, a: torch.Tensor, a_scale: Maybe, a_block: BlockShape | None, b: torch.Tensor, b_scale: Maybe,
    b_block: BlockShape | None, *, offs: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    (a, a_fmt), (b, b_fmt) = as_bytes(a), as_bytes(b)
    out: torch.Tensor = torch.ops.mxfp8.grouped_gemm(
        a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, offs, out_dtype, backend
    )
    return out


def grouped_wgrad(
    backend: str, a: torch.Tensor, a_scale: Maybe, a_block: BlockShape | None, a_starts: torch.Tensor,
    b: torch.Tensor, b_scale: Maybe, b_block: BlockShape | None, b_starts: torch.Tensor, *, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    (a, a_fmt), (b, b_fmt) = as_bytes(a), as_bytes(b)
    out: torch.Tensor = torch.ops.mxfp8.grouped_wgrad(
        a, a_scale, a_block, a_fmt, a_starts, b, b_scale, b_block, b_fmt, b_starts, out_dtype, backend
    )
    return out


OPERATORS: dict[str, Callable[..., Any]] = {
    "check_offsets": check_offsets,
    "quantize_grouped": quantize_grouped,
    "quantize_both_grouped": quantize_both_grouped,
    "grouped_gemm": grouped_gemm,
    "grouped_wgrad": grouped_wgrad,
}
"""``op -> function(backend, ...)`` for use inside a compiled region, on every backend."""
