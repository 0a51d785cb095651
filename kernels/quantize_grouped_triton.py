"""Quantisation along columns with blocks that start anew in every group of rows: any block, rounding and strides.

A group is padded to whole blocks with zeros in the result, so that a product over its rows reads whole blocks and no
block has rows of two groups. Group ends stay on the device: each program finds by a prefix sum which rows its piece of
the padded result comes from. A random Hadamard transform along the rows can go first, in registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._device import element_codes, encode, rounded_by_chance, to_float32
from ._groups import find_step, lanes
from ._launch import aligned, launch, triton_why_not
from .hadamard_triton import rotated
from .quantize_triton import hardware, quantize, random_of, readable, scaled_tile

__all__ = ["quantize_both_grouped", "quantize_grouped", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why this kernel cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit(do_not_specialize=["M", "G", "seed_lo", "seed_hi", "step", "stream", "row_offset", "col_offset", "signs_lo",
                               "signs_hi"])  # fmt: skip
def _kernel(
    x_ptr, offs_ptr, q_ptr, s_ptr, starts_ptr, step_ptr, M, C, G, PADDED, x_r, x_c,
    seed_lo: tl.int64, seed_hi: tl.int64, step: tl.int64, stream: tl.int64, row_offset: tl.int64, col_offset: tl.int64,
    signs_lo: tl.int64, signs_hi: tl.int64,
    BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr,
    SATFINITE: tl.constexpr, ROUNDING: tl.constexpr, HADAMARD: tl.constexpr, FACTOR: tl.constexpr,
    HARDWARE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``BM`` padded rows, of one group, by ``BK`` columns: ``q[PADDED, C]`` contiguous along rows, ``s`` along columns.

    ``ROUNDING``: of ``random_of``. ``HADAMARD``: 0 or a size.
    """
    tiles_k = tl.maximum(tl.cdiv(C, BK), 1)  # without columns the groups start somewhere all the same
    pid = tl.program_id(0)
    piece = pid // tiles_k
    row0, end, g, starts = find_step(offs_ptr, piece, M, G, BM, GROUPS)
    if pid == 0:
        tl.store(starts_ptr + g, starts, mask=g <= G)
    rows = (row0 + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pid % tiles_k * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    x = to_float32(tl.load(x_ptr + rows * x_r + cols * x_c, mask=(rows < end) & (cols < C), other=0.0))
    filled = end  # rows that hold something: a transform spreads the last ones over their whole run
    if HADAMARD > 0:
        x = tl.trans(rotated(tl.trans(x), signs_lo, signs_hi, HADAMARD, FACTOR))
        filled = row0 + tl.cdiv(end - row0, HADAMARD) * HADAMARD
    scaled, byte = scaled_tile(x, RB, CB, FMT, RULE, SATFINITE)
    if ROUNDING > 0:
        scaled = rounded_by_chance(
            scaled, step_ptr, seed_lo, seed_hi, step, stream, row_offset + rows, col_offset + pid % tiles_k * BK, FMT,
            ROUNDING,
        )  # fmt: skip
    codes = tl.where(rows < filled, encode(scaled, FMT, HARDWARE), 0)
    to_rows = (piece * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    tl.store(q_ptr + cols * PADDED + to_rows, codes, mask=cols < C)
    s_rows = (piece * (BM // RB) + tl.arange(0, BM // RB)).to(tl.int64)[:, None]
    s_cols = (pid % tiles_k * (BK // CB) + tl.arange(0, BK // CB)).to(tl.int64)[None, :]
    across = tl.cdiv(C, CB)
    tl.store(s_ptr + s_rows * across + s_cols, byte.to(tl.uint8), mask=s_cols < across)


def step_of(block: tuple[int, int], hadamard: int | None) -> int:
    """What the rows of a group are padded to a multiple of: whole blocks, and whole runs of the transform."""
    return max(block[1], hadamard or 1)


def padded_rows(rows: int, groups: int, step: int) -> int:
    """The most rows that ``groups`` of ``rows`` take when each is padded to a multiple of ``step``."""
    return (rows + min(groups, rows) * (step - 1)) // step * step


class Outputs(NamedTuple):
    """Uninitialised bytes of elements ``[P, C]`` (contiguous along rows) and scales, and the groups' starts."""

    qdata: torch.Tensor
    scale: torch.Tensor
    starts: torch.Tensor


def allocate(x: torch.Tensor, groups: int, block: tuple[int, int], step: int) -> Outputs:
    """What a cast of ``x`` in ``groups`` writes, every byte of it."""
    rows, cols = padded_rows(x.shape[0], groups, step), x.shape[1]
    return Outputs(
        torch.empty((cols, rows), dtype=torch.uint8, device=x.device).t(),
        torch.empty((rows // block[1], -(-cols // block[0])), dtype=torch.uint8, device=x.device),
        torch.empty(groups + 1, dtype=torch.int32, device=x.device),
    )


def quantize_grouped(
    x: torch.Tensor, offs: torch.Tensor, *, fmt: Any, block: tuple[int, int], scale_rule: Any, rounding: Any, key: Any,
    satfinite: bool, hadamard: int | None, hadamard_seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale bytes as uint8, starts)`` of ``x[M, C]``: the bits of ``mxfp8.reference.quantize_grouped``.

    Args:
        offs: int32 or int64 ``[G]`` on the same device, end of each group's rows; not read on the host, not checked.

    Returns:
        ``qdata`` ``[P, C]``, contiguous along rows, P a bound that the host knows; ``scale`` ``[P / block, ...]``
        contiguous along columns; ``starts`` int32 ``[G + 1]``. What is past the last group is zero.
    """
    x = readable(x)
    step = step_of(block, hadamard)
    (M, C), G = x.shape, len(offs)
    out = allocate(x, G, block, step)
    if len(out.qdata) == 0:
        return out.qdata.view(fmt.dtype), out.scale.zero_(), out.starts.zero_()
    mode, step_at, random = random_of(key if rounding == "stochastic" else None, x)
    FMT, RULE = element_codes(fmt, scale_rule)
    bk, warps = tile(step, block, mode > 0)
    constants = {
        "BM": step, "BK": bk, "RB": block[1], "CB": block[0], "FMT": FMT, "RULE": RULE, "SATFINITE": satfinite,
        "ROUNDING": mode, "HADAMARD": hadamard or 0, "FACTOR": 1.0 / math.sqrt(hadamard or 1),
        "HARDWARE": hardware(x.device), "GROUPS": lanes(G + 1),
    }  # fmt: skip
    padded, offs = out.qdata.shape[0], offs.contiguous()
    ints = (M, C, G, padded, *x.stride())
    launch(
        _kernel,
        (*constants.values(), ints, x.dtype, offs.dtype, aligned(x, offs)),
        (padded // step * max(-(-C // bk), 1), 1, 1),
        (x, offs, *out, step_at, *ints, *random, hadamard_seed & 0xFFFFFFFF, hadamard_seed >> 32),
        constants,
        x.device,
        num_warps=warps,
    )
    return out.qdata.view(fmt.dtype), out.scale, out.starts


@functools.cache
def tile(step: int, block: tuple[int, int], noisy: bool) -> tuple[int, int]:
    """``(BK, warps)`` of a tile of ``step`` rows: 4096 elements where whole blocks allow, 32 of them a thread, or 16
    where random words leave registers for no more."""
    bk = max(block[0], 4096 // step, 32)
    warps = step * bk // 1024
    return bk, 2 * warps if noisy and block == (128, 128) else warps


def quantize_both_grouped(
    x: torch.Tensor, offs: torch.Tensor, *, fmt: Any, block: tuple[int, int], column_block: tuple[int, int],
    scale_rule: Any, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale)`` of all rows along -1 in ``block``, then what :func:`quantize_grouped` gives in
    ``column_block``."""
    return in_two_passes(
        quantize_grouped, x, offs, fmt=fmt, block=block, column_block=column_block, scale_rule=scale_rule,
        satfinite=satfinite,
    )  # fmt: skip


def in_two_passes(
    columns: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]], x: torch.Tensor, offs: torch.Tensor, *,
    fmt: Any, block: tuple[int, int], column_block: tuple[int, int], scale_rule: Any, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`quantize_both_grouped`, by the plain cast and ``columns``."""
    rest: dict[str, Any] = {
        "fmt": fmt, "scale_rule": scale_rule, "rounding": "nearest", "key": None, "satfinite": satfinite
    }  # fmt: skip
    rows = quantize(x, axis=-1, block=block, **rest)
    return *rows, *columns(x, offs, block=column_block, hadamard=None, hadamard_seed=0, **rest)
