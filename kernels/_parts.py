"""What one launch of a portable kernel cannot make in registers, in a few launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .quantize_triton import quantize, quantize_both

__all__ = ["in_parts"]

TOGETHER, ALONE = 4096, 8192
"""Elements of the largest tile that is cast both ways, and one way, without a register spilled."""


def in_parts(
    compute: Callable[..., tuple[Any, ...]], casts: Any, dtype: torch.dtype, group: int = 1, apart: bool = True
) -> tuple[Any, ...]:
    """``compute(casts)``, which is ``(q, s, t, u, hp, ...)``, by as few launches as hold whole blocks in registers.

    A kernel with tiles that are too large for casts both ways makes the columns in a second launch. Where one way is
    too large as well, values are written in float32 and cast by ``quantize``: the same values, so the same bits.

    Args:
        compute: takes casts; ``first``, the result of the first launch where this is the second; and ``dtype`` of
            ``hp``, by default that of the input.
        dtype: that of the input.
        group: columns that the kernel needs in a tile, whatever the blocks are.
        apart: False where a block reaches across parts of the result that the kernel makes one after the other.
    """
    (rb, cb), (cb_t, rb_t) = casts.block, casts.column_block
    both = {"rows", "columns"} <= set(casts.outputs)
    alone = [rb * max(cb, group)] if "rows" in casts.outputs else []
    alone += [max(32, rb_t) * max(32, cb_t, group)] if "columns" in casts.outputs else []
    if alone and (not apart or max(alone) > ALONE):
        result = compute(replace(casts, outputs=("hp",)), dtype=torch.float32)
        exact, hp = result[4], result[4].to(dtype)
        copies = _cast(hp if casts.round_first else exact, casts)
        return *copies, hp if "hp" in casts.outputs else None, *result[5:]
    # Triton 3.6 compiles two stores of one square block's tensor of codes into wrong bytes (every fourth column).
    square = casts.block == casts.column_block and rb == cb
    if not both or not (square or max(32, rb, rb_t) * max(32, cb, cb_t, group) > TOGETHER):
        return compute(casts)
    first = compute(replace(casts, outputs=tuple(o for o in casts.outputs if o != "columns")))
    return *first[:2], *compute(replace(casts, outputs=("columns",)), first=first)[2:4], *first[4:]


def _cast(value: torch.Tensor, casts: Any) -> tuple[Any, ...]:
    """``(q, s, t, u)`` of a tensor."""
    same = {"fmt": casts.fmt, "scale_rule": casts.scale_rule, "satfinite": casts.satfinite}
    if {"rows", "columns"} <= set(casts.outputs):
        return quantize_both(value, block=casts.block, column_block=casts.column_block, **same)
    none, one = (None, None), {**same, "rounding": "nearest", "key": None}
    if "rows" in casts.outputs:
        return *quantize(value, axis=-1, block=casts.block, **one), *none
    return *none, *quantize(value, axis=-2, block=casts.column_block, **one)
