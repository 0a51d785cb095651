"""Quantisation along columns with blocks that start anew in every group of rows, at copy speed on Hopper (Gluon).

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
    place,
    row_layout,
    store_bytes,
    store_columns,
    tile,
    tiled_grid,
    widen,
)
from .quantize_triton import readable

__all__ = ["quantize_grouped", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why this kernel cannot run on a device type, or None."""
    return hopper_why_not(kind)


@triton.jit(do_not_specialize=["M", "G"])
def _pieces_kernel(offs_ptr, table_ptr, starts_ptr, M, G, STEP: tl.constexpr, GROUPS: tl.constexpr):
    """One piece of ``STEP`` padded rows: the row of ``x`` that it starts with, and how many it has."""
    at = tl.program_id(0)
    row, end, g, starts = find_step(offs_ptr, at, M, G, STEP, GROUPS)
    tl.store(table_ptr + 2 * at, row)
    tl.store(table_ptr + 2 * at + 1, tl.minimum(tl.maximum(end - row, 0), STEP))
    if at == 0:
        tl.store(starts_ptr + g, starts, mask=g <= G)


@gluon.jit
def _sources(table_ptr, pm, rows, pieces, BM: gl.constexpr, STEP: gl.constexpr):
    """Of ``rows`` of tile row ``pm``: the rows of ``x``, and whether there are any. A tile has one piece or two."""
    first = pm * (BM // STEP)
    row = gl.load(table_ptr + 2 * first)
    count = gl.load(table_ptr + 2 * first + 1)
    if BM == STEP:
        return row + rows, rows < count
    else:
        second = gl.minimum(first + 1, pieces - 1)  # past the last piece nothing is stored
        here = rows < STEP
        source = gl.where(here, row, gl.load(table_ptr + 2 * second) - STEP) + rows
        return source, rows < gl.where(here, count, gl.load(table_ptr + 2 * second + 1) + STEP)


@gluon.jit
def _kernel(
    x_ptr, table_ptr, t_ptr, u_ptr, PADDED, C, x_r, pieces, across,
    BM: gl.constexpr, BK: gl.constexpr, STEP: gl.constexpr, CB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr,
    SATFINITE: gl.constexpr, WHOLE: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of ``t[PADDED, C]``, contiguous along rows, and its bytes ``u``, contiguous along columns,
    in blocks of (``STEP``, ``CB``). ``x`` is read in layout ``LA`` and cast in ``LB``."""
    _, pm, pk = place(PADDED, BM, False)
    if pm * BM >= PADDED:
        return
    col = pk * BK
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LA))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LA))
    source, some = _sources(table_ptr, pm, rows, pieces, BM, STEP)
    x_at = x_ptr + col + (source.to(gl.int64) * x_r)[:, None] + cols[None, :]
    x = gl.load(x_at, mask=some[:, None] & (col + cols < C)[None, :], other=0.0)
    y = widen(gl.convert_layout(x, LB))
    byte = scale_byte(block_amax(y, STEP, CB, True), FMT, RULE, SATFINITE)
    codes = codes_of(y, byte, STEP, CB, FMT, LB)
    # Padding rows are zero, in a block that is NaN as well.
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LB))
    _, some = _sources(table_ptr, pm, rows, pieces, BM, STEP)
    codes = gl.where(some[:, None], codes, 0)
    store_columns(t_ptr, codes, pm, pk, PADDED, PADDED, C, PADDED, BM, BK, WHOLE, LB)
    store_bytes(u_ptr, byte, pm, pk, PADDED, C, across, 1, BM, BK, STEP, CB, WHOLE)


def quantize_grouped(
    x: torch.Tensor, offs: torch.Tensor, *, fmt: Any, block: tuple[int, int], scale_rule: Any, rounding: Any, key: Any,
    satfinite: bool, hadamard: int | None, hadamard_seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale bytes as uint8, starts)``: the bits of ``mxfp8.reference.quantize_grouped``; as
    :func:`quantize_grouped_triton.quantize_grouped`."""
    x = readable(x)
    plan, G = None, len(offs)
    if rounding != "stochastic" and hadamard is None and x.data_ptr() % 16 == 0:
        plan = _plan(x.shape, x.stride(), x.itemsize, G, block, *element_codes(fmt, scale_rule), satfinite)
    if plan is None:
        return quantize_grouped_triton.quantize_grouped(
            x, offs, fmt=fmt, block=block, scale_rule=scale_rule, rounding=rounding, key=key, satfinite=satfinite,
            hadamard=hadamard, hadamard_seed=hadamard_seed,
        )  # fmt: skip
    out = quantize_grouped_triton.allocate(x, G, block, block[1])
    table = torch.empty((plan.pieces, 2), dtype=torch.int32, device=x.device)
    offs = offs.contiguous()
    constants = {"STEP": block[1], "GROUPS": lanes(G + 1)}
    args = (offs, table, out.starts, x.shape[0], G)
    key = (*constants.values(), *args[3:], offs.dtype, offs.data_ptr() % 16)
    launch(_pieces_kernel, key, (plan.pieces, 1, 1), args, constants, x.device, num_warps=1)
    launch_version(
        _kernel, plan.versions, x.dtype, plan.grid, (x, table, out.qdata, out.scale, *plan.ints), plan.constants,
        x.device, **plan.options,
    )  # fmt: skip
    return out.qdata.view(fmt.dtype), out.scale, out.starts


class _Plan(NamedTuple):
    """Of a cast: everything but the tensors."""

    pieces: int
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]
    versions: Versions


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int], strides: tuple[int, int], itemsize: int, groups: int, block: tuple[int, int], FMT: int,
    RULE: int, satfinite: bool,
) -> _Plan | None:  # fmt: skip
    """None where rows cannot be read 16 bytes at a time (Triton knows of divisibility by 16 alone), or offsets inside a
    tile need 64 bits, or there are too many tiles."""
    (M, C), (pitch, stride), (across, step) = shape, strides, block
    padded = quantize_grouped_triton.padded_rows(M, groups, step)
    if 0 in shape or stride != 1 or pitch % 16 or C % 16 or max(padded, C) >= 2**22:
        return None
    bm, bk, options = tile((step, across), (step, across), False, C)
    grid = tiled_grid(1, -(-padded // bm), -(-C // bk), 2**14)
    assert grid is not None
    warps = options["num_warps"]
    constants = {
        "BM": bm, "BK": bk, "STEP": step, "CB": across, "FMT": FMT, "RULE": RULE, "SATFINITE": satfinite,
        "WHOLE": padded % bm == 0 and C % bk == 0, "LA": row_layout(bk, itemsize, warps),
        "LB": column_layout(bm, bk, warps),
    }  # fmt: skip
    pieces = padded // step
    return _Plan(pieces, grid, (padded, C, pitch, pieces, -(-C // across)), constants, options, {})
