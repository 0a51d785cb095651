"""Groups of rows along which a product sums: the cast whose blocks start anew with every group, and the product.

A group's rows are padded with zeros to whole blocks, so that groups lie one after the other without sharing a scale, in
a buffer whose size the host knows without knowing where groups end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule
from mxfp8.reference.gemm import full_precision, operand
from mxfp8.reference.hadamard import hadamard as transform
from mxfp8.reference.quantize import quantize
from mxfp8.rng import RngKey
from mxfp8.tensor import block_rc, rounded, scale_shape

__all__ = [
    "check_offsets",
    "grouped_wgrad",
    "padded_rows",
    "quantize_both_grouped",
    "quantize_grouped",
    "step_of",
    "true_ends",
]


def check_offsets(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """``offs``; ValueError unless it holds group ends that do not decrease, within 0..``rows``. Reads them on the
    host."""
    before = 0
    for g, end in enumerate(offs.tolist()):
        if not before <= end <= rows:
            raise ValueError(
                f"offs[{g}] is {end}, after {before}: group ends must not decrease and must stay in 0..{rows}"
            )
        before = end
    return offs


def true_ends(offs: torch.Tensor, rows: int) -> list[int]:
    """Group ends that address nothing outside ``rows`` whatever ``offs`` holds: each at least the one before."""
    return offs.clamp(0, rows).cummax(0).values.tolist() if len(offs) else []


def step_of(block: BlockShape, hadamard: int | None) -> int:
    """What the rows of a group are padded to a multiple of: whole blocks, and whole runs of the transform."""
    return max(block[1], hadamard or 1)


def padded_rows(rows: int, groups: int, step: int) -> int:
    """The most rows that ``groups`` of ``rows`` take when each is padded to a multiple of ``step``."""
    return (rows + min(groups, rows) * (step - 1)) // step * step


def quantize_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    fmt: ElementFormat,
    block: BlockShape,
    scale_rule: ScaleRule,
    rounding: Rounding,
    key: RngKey | None,
    satfinite: bool,
    hadamard: int | None,
    hadamard_seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(qdata, scale bytes as uint8, starts)`` of ``x``; contract in :func:`mxfp8.quantize_grouped`."""
    M, K = x.shape
    step = step_of(block, hadamard)
    padded = padded_rows(M, len(offs), step)
    codes = torch.zeros((padded, K), dtype=torch.uint8, device=x.device)
    scale = torch.zeros(scale_shape((padded, K), block, -2), dtype=torch.uint8, device=x.device)
    tall = block_rc(block, -2)[0]
    starts, start = [0], 0
    for end in true_ends(offs, M):
        rows = x[start:end]
        if hadamard is not None:
            rows = transform(rows, axis=-2, size=hadamard, seed=hadamard_seed)
        own = None if key is None else key.at(start)
        q, s = quantize(
            rows, axis=-2, fmt=fmt, block=block, scale_rule=scale_rule, rounding=rounding, key=own, satfinite=satfinite
        )
        to = starts[-1]
        codes[to : to + len(q)] = q.view(torch.uint8)
        scale[to // tall : to // tall + len(s)] = s
        starts.append(to + math.ceil(len(q) / step) * step)
        start = end
    return codes.view(fmt.dtype), scale, torch.tensor(starts, dtype=torch.int32, device=x.device)


def quantize_both_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    fmt: ElementFormat,
    block: BlockShape,
    column_block: BlockShape,
    scale_rule: ScaleRule,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(qdata, scale)`` of all rows along -1, then what :func:`quantize_grouped` gives; contract in
    :func:`mxfp8.quantize_both_grouped`."""
    how: dict[str, Any] = {"fmt": fmt, "scale_rule": scale_rule, "rounding": Rounding.NEAREST, "key": None}
    rows = quantize(x, axis=-1, block=block, satfinite=satfinite, **how)
    columns = quantize_grouped(x, offs, block=column_block, satfinite=satfinite, hadamard=None, hadamard_seed=0, **how)
    return *rows, *columns


def grouped_wgrad(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: tuple[int, int] | None,
    a_starts: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: tuple[int, int] | None,
    b_starts: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``a[rows of g, N].T @ b[rows of g, K]`` for each group; contract in :func:`mxfp8.grouped_wgrad`.

    ``a_starts``, ``b_starts``: integers ``[G + 1]``, where the rows of each group start and end in that operand. Where
    one has more rows than the other, padding, those are zero and not taken.
    """
    with full_precision(a.device):
        left, right = operand(a, a_scale, a_block), operand(b, b_scale, b_block)
        out = left.new_zeros(len(a_starts) - 1, left.shape[1], right.shape[1])
        ends = zip(true_ends(a_starts, len(a)), true_ends(b_starts, len(b)), strict=True)
        at: tuple[int, int] | None = None
        for g, (a_end, b_end) in enumerate(ends, -1):
            if at is not None:
                size = min(a_end - at[0], b_end - at[1])
                torch.matmul(left[at[0] : at[0] + size].mT, right[at[1] : at[1] + size], out=out[g])
            at = a_end, b_end
        return rounded(out, out_dtype)


def group_starts(offs: torch.Tensor) -> torch.Tensor:
    """Where the rows of each group start, and the last one ends, in a tensor that is not padded: int32 ``[G + 1]``."""
    return pad(offs.to(torch.int32), (1, 0))
