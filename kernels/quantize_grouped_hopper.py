"""Quantisation along columns with blocks that start anew in every group of rows, alone or with the cast along rows in
one pass, at copy speed on Hopper (Gluon).

As :mod:`quantize_hopper`, whose functions this uses, with rows that come from where a small table says: for each piece
of whole blocks of the padded result its first row and how many there are. Stochastic rounding, Hadamard transforms and
tensors whose rows are not 16-byte aligned go to :mod:`quantize_grouped_triton`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import quantize_grouped_triton
from ._device import element_codes, scale_byte
from ._gluon import gl, gluon, hopper_why_not
from ._groups import find_step, lanes
from ._launch import Versions, launch, launch_version
from .quantize_hopper import (
    block_amax,
    codes_of,
    column_layout,
    outer_amax,
    place,
    row_layout,
    store_bytes,
    store_columns,
    tile,
    tiled_grid,
    widen,
)
from .quantize_triton import layout, readable

__all__ = ["quantize_both_grouped", "quantize_grouped", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why this kernel cannot run on a device type, or None."""
    return hopper_why_not(kind)


@triton.jit(do_not_specialize=["M", "G"])
def _pieces_kernel(
    offs_ptr, table_ptr, starts_ptr, M, G, STEP: tl.constexpr, GROUPS: tl.constexpr, TRAILING: tl.constexpr
):
    """One piece of ``STEP`` padded rows: the row of ``x`` that it starts with, how many it has, and how many of them
    belong to a group."""
    at = tl.program_id(0)
    row, end, g, starts = find_step(offs_ptr, at, M, G, STEP, GROUPS, TRAILING)
    count = tl.minimum(tl.maximum(end - row, 0), STEP)
    past = at * STEP >= tl.sum(tl.where(g == G, starts, 0))
    tl.store(table_ptr + 3 * at, row)
    tl.store(table_ptr + 3 * at + 1, count)
    tl.store(table_ptr + 3 * at + 2, tl.where(past, 0, count))
    if at == 0:
        tl.store(starts_ptr + g, starts, mask=g <= G)


@gluon.jit
def _sources(table_ptr, pm, rows, pieces, BM: gl.constexpr, STEP: gl.constexpr, WHICH: gl.constexpr):
    """Of ``rows`` of tile row ``pm``: the first row of ``x``, how far behind it they are, and whether there are any: in
    a group (``WHICH`` = 2), or anywhere (1). A tile has one piece or two, whose rows follow each other in ``x``."""
    first = pm * (BM // STEP)
    row = gl.load(table_ptr + 3 * first)
    count = gl.load(table_ptr + 3 * first + WHICH)
    if BM == STEP:
        return row.to(gl.int64), rows, rows < count
    else:
        second = gl.minimum(first + 1, pieces - 1)
        others = gl.where(first + 1 < pieces, gl.load(table_ptr + 3 * second + WHICH), 0)
        here = rows < STEP
        behind = gl.where(here, 0, gl.load(table_ptr + 3 * second) - row - STEP) + rows
        return row.to(gl.int64), behind, rows < gl.where(here, count, others + STEP)


@gluon.jit
def _kernel(
    x_ptr, table_ptr, q_ptr, s_ptr, t_ptr, u_ptr, PADDED, C, x_r, pieces, across, s_r, s_c,
    BM: gl.constexpr, BK: gl.constexpr, STEP: gl.constexpr, CB: gl.constexpr, ALONG: gl.constexpr, FMT: gl.constexpr,
    RULE: gl.constexpr, SATFINITE: gl.constexpr, WHOLE: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of ``t[PADDED, C]``, contiguous along rows, and its bytes ``u``, contiguous along columns,
    in blocks of (``STEP``, ``CB``). If ``ALONG`` is not 0 also, of the same rows of ``x`` and of those in no group,
    ``q, s`` in blocks of that extent along rows. ``x`` is read in layout ``LA`` and cast along columns in ``LB``."""
    _, pm, pk = place(PADDED, BM, False)
    if pm * BM >= pieces * STEP:
        return
    col = pk * BK
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LA))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LA))
    row, behind, some = _sources(table_ptr, pm, rows, pieces, BM, STEP, 1)
    inside = some[:, None] & (col + cols < C)[None, :]
    x = gl.load(x_ptr + row * x_r + col + (behind[:, None] * x_r + cols[None, :]), mask=inside, other=0.0)
    NESTED: gl.constexpr = ALONG > 0 and CB >= ALONG  # extents are powers of two
    if ALONG:
        xf = widen(x)
        amax = block_amax(xf, 1, ALONG)
        byte = scale_byte(amax, FMT, RULE, SATFINITE)
        codes = codes_of(xf, byte, 1, ALONG, FMT, LA)
        gl.store(q_ptr + row * C + col + (behind[:, None] * C + cols[None, :]), codes, mask=inside)
        L: gl.constexpr = byte.type.layout
        _, behind, some = _sources(table_ptr, pm, gl.arange(0, BM, layout=gl.SliceLayout(1, L)), pieces, BM, STEP, 1)
        blocks = pk * (BK // ALONG) + gl.arange(0, BK // ALONG, layout=gl.SliceLayout(0, L))
        s_at = s_ptr + row * s_r + (behind.to(gl.int64) * s_r)[:, None] + (blocks.to(gl.int64) * s_c)[None, :]
        gl.store(s_at, byte.to(gl.uint8), mask=some[:, None] & (blocks < gl.cdiv(C, ALONG))[None, :])
    if pm * BM >= PADDED:
        return
    y = widen(gl.convert_layout(x, LB))
    if NESTED:
        outer = outer_amax(amax, STEP, CB // ALONG)
    else:
        outer = block_amax(y, STEP, CB, True)
    byte = scale_byte(outer, FMT, RULE, SATFINITE)
    codes = codes_of(y, byte, STEP, CB, FMT, LB)
    # Rows of no group are zero, and those of padding in a block that is NaN as well.
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LB))
    _, _, some = _sources(table_ptr, pm, rows, pieces, BM, STEP, 2)
    codes = gl.where(some[:, None], codes, 0)
    store_columns(t_ptr, codes, pm, pk, PADDED, PADDED, C, PADDED, BM, BK, WHOLE, LB)
    if ALONG:
        rows = gl.arange(0, BM // STEP, layout=gl.SliceLayout(1, byte.type.layout)) * STEP
        _, _, some = _sources(table_ptr, pm, rows, pieces, BM, STEP, 2)
        byte = gl.where(some[:, None], byte, 0)
    store_bytes(u_ptr, byte, pm, pk, PADDED, C, across, 1, BM, BK, STEP, CB, WHOLE)


def quantize_grouped(
    x: torch.Tensor, offs: torch.Tensor, *, fmt: Any, block: tuple[int, int], scale_rule: Any, rounding: Any, key: Any,
    satfinite: bool, hadamard: int | None, hadamard_seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale bytes as uint8, starts)``: the bits of ``mxfp8.reference.quantize_grouped``; as
    :func:`quantize_grouped_triton.quantize_grouped`."""
    x = readable(x)
    plan = None
    if rounding != "stochastic" and hadamard is None and x.data_ptr() % 16 == 0:
        codes = element_codes(fmt, scale_rule)
        plan = _plan(x.shape, x.stride(), x.itemsize, len(offs), None, block, *codes, satfinite)
    if plan is None:
        return quantize_grouped_triton.quantize_grouped(
            x, offs, fmt=fmt, block=block, scale_rule=scale_rule, rounding=rounding, key=key, satfinite=satfinite,
            hadamard=hadamard, hadamard_seed=hadamard_seed,
        )  # fmt: skip
    out = quantize_grouped_triton.allocate(x, len(offs), block, block[1])
    _run(x, offs, (out.qdata, out.scale), out, plan)
    return out.qdata.view(fmt.dtype), out.scale, out.starts


def quantize_both_grouped(
    x: torch.Tensor, offs: torch.Tensor, *, fmt: Any, block: tuple[int, int], column_block: tuple[int, int],
    scale_rule: Any, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale)`` of all rows along -1 in ``block``, then what :func:`quantize_grouped` gives in
    ``column_block``, reading ``x`` once."""
    x = readable(x)
    plan = None
    if x.data_ptr() % 16 == 0:
        codes = element_codes(fmt, scale_rule)
        plan = _plan(x.shape, x.stride(), x.itemsize, len(offs), block, column_block, *codes, satfinite)
    if plan is None:
        return quantize_grouped_triton.in_two_passes(
            quantize_grouped, x, offs, fmt=fmt, block=block, column_block=column_block, scale_rule=scale_rule,
            satfinite=satfinite,
        )  # fmt: skip
    rows = layout(x.shape, -1, block).allocate(x.device)
    out = quantize_grouped_triton.allocate(x, len(offs), column_block, column_block[1])
    _run(x, offs, rows, out, plan)
    return rows[0].view(fmt.dtype), rows[1], out.qdata.view(fmt.dtype), out.scale, out.starts


def _run(
    x: torch.Tensor, offs: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor],
    out: quantize_grouped_triton.Outputs, plan: _Plan,
) -> None:  # fmt: skip
    table = torch.empty((plan.pieces, 3), dtype=torch.int32, device=x.device)
    offs, G = offs.contiguous(), len(offs)
    constants = {"STEP": plan.constants["STEP"], "GROUPS": lanes(G + 1), "TRAILING": int(plan.constants["ALONG"] > 0)}
    args = (offs, table, out.starts, x.shape[0], G)
    key = (*constants.values(), *args[3:], offs.dtype, offs.data_ptr() % 16)
    launch(_pieces_kernel, key, (plan.pieces, 1, 1), args, constants, x.device, num_warps=1)
    launch_version(
        _kernel, plan.versions, x.dtype, plan.grid, (x, table, *rows, out.qdata, out.scale, *plan.ints), plan.constants,
        x.device, **plan.options,
    )  # fmt: skip


class _Plan(NamedTuple):
    """Of a cast: everything but the tensors."""

    pieces: int
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]
    versions: Versions


def _tile(along: int, column_rc: tuple[int, int], itemsize: int) -> tuple[int, int, dict[str, int]]:
    """``(BM, BK, options)`` as :func:`quantize_hopper.tile`, ``along`` 0 for columns alone. 1x128 blocks along
    columns take four warps and no limit: with masks that was faster than what casts without groups take (docs/log.md).
    """
    bm, bk, options = tile((1, along) if along else column_rc, column_rc, itemsize)
    if along and itemsize <= 2 and column_rc == (128, 1) and bk == 128:
        options = {"num_warps": 4}
    return bm, bk, options


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int], strides: tuple[int, int], itemsize: int, groups: int, block: tuple[int, int] | None,
    column_block: tuple[int, int], FMT: int, RULE: int, satfinite: bool,
) -> _Plan | None:  # fmt: skip
    """A plan for columns alone (``block`` None) or for both. None where rows cannot be read 16 bytes at a time (Triton
    knows of divisibility by 16 alone), offsets inside a tile need 64 bits, there are too many tiles or none, blocks
    along rows reach over several, or no tile holds a block of each."""
    (M, C), (pitch, stride), (across, step) = shape, strides, column_block
    high, along = (1, 0) if block is None else block
    padded = quantize_grouped_triton.padded_rows(M, groups, step)
    if 0 in (M, C, groups) or stride != 1 or pitch % 16 or C % 16 or max(padded, C, pitch) >= 2**22:
        return None
    if high > 1 or along * step > 128 * 128:
        return None
    # Rows after the last group count as one more, whose pieces come last.
    pieces = quantize_grouped_triton.padded_rows(M, groups + (block is not None), step) // step
    bm, bk, options = _tile(along, (step, across), itemsize)
    grid = tiled_grid(1, -(-pieces * step // bm), -(-C // bk), 8 if along else 2**14)
    if grid is None:
        return None
    warps = options["num_warps"]
    constants = {
        "BM": bm, "BK": bk, "STEP": step, "CB": across, "ALONG": along, "FMT": FMT, "RULE": RULE,
        "SATFINITE": satfinite, "WHOLE": padded % bm == 0 and C % bk == 0, "LA": row_layout(bk, itemsize, warps),
        "LB": column_layout(bm, bk, warps),
    }  # fmt: skip
    s_r, s_c = layout(shape, -1, block).scale_stride if block is not None else (0, 0)
    return _Plan(pieces, grid, (padded, C, pitch, pieces, -(-C // across), s_r, s_c), constants, options, {})
