"""Block quantisation along columns, and along both axes in one pass, at copy speed on Hopper (Gluon).

A transposed store of single bytes is what makes these slow in plain Triton: it goes through shared memory byte by byte.
Here a tile is loaded along rows, changes its layout once while it is still two (or four) bytes an element, and then
every thread holds 16 consecutive rows of two columns: their maximum is found in registers and their codes leave as one
16-byte store of the transposed result.

Rows alone, stochastic rounding, and tensors whose rows are not 16-byte aligned go to ``quantize_triton``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import quantize_triton
from ._device import amax_bits, element_codes, encode, inverse_scale, scale_byte
from ._gluon import hopper_why_not
from ._launch import launch_version
from .quantize_triton import Plan, layout, readable, three, three_dims

__all__ = ["quantize", "quantize_both", "why_not"]

KEEP = gl.constexpr("evict_last")
"""What the second-level cache does with codes along columns: it gives them up last. A next kernel reads codes, and the
input no more; it takes 2 to 4 % less time then, and the casts themselves 1 to 5 % (docs/log.md)."""


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return hopper_why_not(kind)


@gluon.jit
def place(R, BM: gl.constexpr, BATCHED: gl.constexpr):
    """``(batch, tile row, tile column)`` of a program of a :func:`tiled_grid`; tile rows may lie past the last."""
    down = gl.program_id(2)
    b = gl.program_id(2) * 0
    if BATCHED:
        groups = gl.cdiv(gl.cdiv(R, BM), gl.num_programs(0))
        b = down // groups
        down = down % groups
    return b.to(gl.int64), down * gl.num_programs(0) + gl.program_id(0), gl.program_id(1)


def tiled_grid(batch: int, tiles_m: int, tiles_k: int, down: int) -> tuple[int, int, int] | None:
    """Programs that go ``down`` rows of tiles, then right: pieces of columns that lie side by side in memory are
    written together. None if there are too many."""
    down = min(down, tiles_m)
    grid = (down, tiles_k, batch * -(-tiles_m // down))
    return grid if max(grid[1:]) < 2**16 else None


@gluon.jit
def widen(x):
    """Exact float32 of a tile. Of two bfloat16 in a register each takes one instruction; a conversion takes three."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def block_amax(x, RB: gl.constexpr, CB: gl.constexpr, DOWN: gl.constexpr = False):
    """Absolute maxima, as bits of float32, of a tile's blocks of ``RB`` rows by ``CB`` columns: ``[BM/RB, BK/CB]``.
    ``DOWN``: over rows first, for a layout in which a thread holds many of them."""
    BM: gl.constexpr = x.shape[0]
    BK: gl.constexpr = x.shape[1]
    if RB == 1:
        return amax_bits(x.reshape([BM, BK // CB, CB]), 2)
    elif CB == 1:
        return amax_bits(x.reshape([BM // RB, RB, BK]), 1)
    elif DOWN:
        return gl.max(amax_bits(x.reshape([BM // RB, RB, BK // CB, CB]), 1), axis=2)
    else:
        # Bits of magnitudes order like them: the second maximum may be one of integers.
        return gl.max(amax_bits(x.reshape([BM // RB, RB, BK // CB, CB]), 3), axis=1)


@gluon.jit
def outer_amax(amax, RB: gl.constexpr, CB: gl.constexpr):
    """Maxima of blocks that consist of ``RB`` by ``CB`` smaller ones, from theirs."""
    BM: gl.constexpr = amax.shape[0]
    BK: gl.constexpr = amax.shape[1]
    if RB * CB == 1:
        return amax
    else:
        return gl.max(gl.max(amax.reshape([BM // RB, RB, BK // CB, CB]), axis=3), axis=1)


@gluon.jit
def codes_of(x, byte, RB: gl.constexpr, CB: gl.constexpr, FMT: gl.constexpr, L: gl.constexpr):
    """Element codes (uint8, in layout ``L``) of a float32 tile under the scale bytes of its blocks."""
    BM: gl.constexpr = x.shape[0]
    BK: gl.constexpr = x.shape[1]
    inverse = inverse_scale(byte)
    if RB == 1:
        blocks = x.reshape([BM, BK // CB, CB])
        factor = gl.convert_layout(inverse, gl.SliceLayout(2, blocks.type.layout))
        scaled = blocks * gl.expand_dims(factor, 2)
    elif CB == 1:
        blocks = x.reshape([BM // RB, RB, BK])
        factor = gl.convert_layout(inverse, gl.SliceLayout(1, blocks.type.layout))
        scaled = blocks * gl.expand_dims(factor, 1)
    else:
        blocks = x.reshape([BM // RB, RB, BK // CB, CB])
        factor = gl.convert_layout(inverse, gl.SliceLayout(1, gl.SliceLayout(3, blocks.type.layout)))
        scaled = blocks * gl.expand_dims(gl.expand_dims(factor, 1), 3)
    return gl.convert_layout(encode(scaled.reshape([BM, BK]), FMT, True), L)


@gluon.jit
def store_bytes(
    s_ptr, byte, pm, pk, R, C, s_r, s_c, BM: gl.constexpr, BK: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Store the scale bytes of a tile, in the layout they were computed in."""
    L: gl.constexpr = byte.type.layout
    row = pm * (BM // RB)
    col = pk * (BK // CB)
    rows = gl.arange(0, BM // RB, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BK // CB, layout=gl.SliceLayout(0, L))
    where = s_ptr + row.to(gl.int64) * s_r + col.to(gl.int64) * s_c + (rows[:, None] * s_r + cols[None, :] * s_c)
    if WHOLE:
        gl.store(where, byte.to(gl.uint8))
    else:
        inside = (row + rows < gl.cdiv(R, RB))[:, None] & (col + cols < gl.cdiv(C, CB))[None, :]
        gl.store(where, byte.to(gl.uint8), mask=inside)


@gluon.jit
def store_columns(
    t_ptr, codes, pm, pk, R, R_PAD, C, t_c, BM: gl.constexpr, BK: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr
):
    """Store codes ``[BM, BK]`` with consecutive rows at consecutive addresses; padding rows are zero."""
    row = pm * BM
    col = pk * BK
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    where = t_ptr + col.to(gl.int64) * t_c + row + (cols[None, :] * t_c + rows[:, None])
    if WHOLE:
        gl.store(where, codes, eviction_policy=KEEP)
    else:
        codes = gl.where((row + rows < R)[:, None], codes, 0)
        inside = (row + rows < R_PAD)[:, None] & (col + cols < C)[None, :]
        gl.store(where, codes, mask=inside, eviction_policy=KEEP)


@gluon.jit
def _kernel(
    x_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r, q_b, s_b, s_r, s_c, t_b, t_c, u_b, u_r, u_c,
    BM: gl.constexpr, BK: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr,
    FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, ROWS: gl.constexpr, WHOLE: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr, BATCHED: gl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]``: ``t, u`` along columns in blocks of (TRB, TCB), and with ``ROWS`` also ``q, s`` along rows
    in blocks of (RB, CB). ``LA`` is the layout for rows, ``LB`` the one for columns. Offsets inside a tile fit 32 bits.
    """
    b, pm, pk = place(R, BM, BATCHED)
    if pm * BM >= R:
        return
    row = pm * BM
    col = pk * BK
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LA))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LA))
    x_at = x_ptr + b * x_b + row.to(gl.int64) * x_r + col + (rows[:, None] * x_r + cols[None, :])
    if WHOLE:
        x = gl.load(x_at)
    else:
        inside = (row + rows < R)[:, None] & (col + cols < C)[None, :]
        x = gl.load(x_at, mask=inside, other=0.0)
    NESTED: gl.constexpr = ROWS and TRB % RB == 0 and TCB % CB == 0
    if ROWS:
        xf = widen(x)
        amax = block_amax(xf, RB, CB)
        byte = scale_byte(amax, FMT, RULE, SATFINITE)
        codes = codes_of(xf, byte, RB, CB, FMT, LA)
        q_at = q_ptr + b * q_b + row.to(gl.int64) * C + col + (rows[:, None] * C + cols[None, :])
        if WHOLE:
            gl.store(q_at, codes)
        else:
            gl.store(q_at, codes, mask=inside)
        store_bytes(s_ptr + b * s_b, byte, pm, pk, R, C, s_r, s_c, BM, BK, RB, CB, WHOLE)
    yf = widen(gl.convert_layout(x, LB))
    if NESTED:
        outer = outer_amax(amax, TRB // RB, TCB // CB)
    else:
        outer = block_amax(yf, TRB, TCB, True)
    byte = scale_byte(outer, FMT, RULE, SATFINITE)
    codes = codes_of(yf, byte, TRB, TCB, FMT, LB)
    store_columns(t_ptr + b * t_b, codes, pm, pk, R, R_PAD, C, t_c, BM, BK, WHOLE, LB)
    store_bytes(u_ptr + b * u_b, byte, pm, pk, R, C, u_r, u_c, BM, BK, TRB, TCB, WHOLE)


def row_layout(bk: int, itemsize: int, warps: int) -> gl.BlockedLayout:
    """Threads along rows: 16 elements each, so that two threads share the scale of a block of 32."""
    lanes = min(32, bk // 16)
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [warps, 1], [1, 0])


def column_layout(bm: int, bk: int, warps: int) -> gl.BlockedLayout:
    """Threads along columns: 16 consecutive rows of two columns each, a warp on 64 rows of 16 columns; or of one column
    where there are so many threads."""
    each = 2 if bm * bk >= 1024 * warps else 1
    wide = min(warps, bk // (8 * each))
    return gl.BlockedLayout([16, each], [4, 8], [warps // wide, wide], [0, 1])


def tile(rc: tuple[int, int], column_rc: tuple[int, int], itemsize: int) -> tuple[int, int, dict[str, int]]:
    """``(BM, BK, options)`` for blocks (rows, columns) of either direction, the same for columns alone: the fastest of
    those that were timed on an H200. A limit on registers changes ptxas's schedule even where it is not reached; those
    here are for two bytes an element, four need more."""

    def limited(warps: int, registers: int) -> dict[str, int]:
        return {"num_warps": warps} | ({"maxnreg": registers} if itemsize <= 2 else {})

    rows, cols = max(rc[0], column_rc[0]), max(rc[1], column_rc[1])
    if rows > 128:
        return 256, 64, {"num_warps": 8}
    if cols > 128:
        return 64, 256, {"num_warps": 8}
    if rows == 128:
        if column_rc[1] > 1:  # tiles of 128x128 along the columns
            return 128, 128, {"num_warps": 16}
        return (128, 64, {"num_warps": 4}) if rc == column_rc else (128, 128, limited(8, 128))
    return 64, 128, {"num_warps": 8} if rc == column_rc else limited(4, 96)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block: tuple[int, int] | None,
    column_block: tuple[int, int], FMT: int, RULE: int, satfinite: bool,
) -> Plan | None:  # fmt: skip
    """A plan for columns alone (``block`` None) or for both; None if the rows cannot be read 16 bytes at a time (Triton
    knows of divisibility by 16 alone), if a tile's offsets need 64 bits, or if no tile holds a block of each."""
    if len(shape) < 2 or 0 in shape or strides[-1] != 1 or any(n % 16 for n in (shape[-1], *strides[:-1])):
        return None
    across = layout(shape, -2, column_block)
    along = across if block is None else layout(shape, -1, block)
    if along.rc[1] * across.rc[0] > 128 * 128 or max(strides[-2], across.rows_padded) >= 2**22:
        return None
    (b, r, c), (x_b, x_r, _) = three_dims(shape, strides)
    bm, bk, options = tile(along.rc, across.rc, itemsize)
    if (grid := tiled_grid(b, -(-r // bm), -(-c // bk), 2**14 if block is None else 8)) is None:
        return None
    warps = options["num_warps"]
    constants = {
        "BM": bm, "BK": bk, "RB": along.rc[0], "CB": along.rc[1], "TRB": across.rc[0], "TCB": across.rc[1], "FMT": FMT,
        "RULE": RULE, "SATFINITE": satfinite, "ROWS": block is not None, "WHOLE": r % bm == 0 and c % bk == 0,
        "LA": row_layout(bk, itemsize, warps), "LB": column_layout(bm, bk, warps),
        "BATCHED": b > 1,
    }  # fmt: skip
    q_b, (s_b, s_r, s_c) = three(along.qdata_stride)[0], three(along.scale_stride)
    (t_b, _, t_c), u = three(across.qdata_stride), three(across.scale_stride)
    ints = (r, c, across.rows_padded, x_b, x_r, q_b, s_b, s_r, s_c, t_b, t_c, *u)
    outputs = (across,) if block is None else (along, across)
    return Plan(outputs, grid, ints, constants, options)


def _run(x: torch.Tensor, outputs: tuple[torch.Tensor, ...], plan: Plan) -> None:
    launch_version(
        _kernel,
        plan.versions,
        x.dtype,
        plan.grid,
        (x, *outputs, *plan.ints),
        plan.constants,
        x.device,
        **plan.options,
    )


def quantize(
    x: torch.Tensor,
    *,
    axis: int,
    fmt: Any,
    block: tuple[int, int],
    scale_rule: Any,
    rounding: Any,
    key: Any,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, scale bytes as uint8)`` of ``x``: the bits of ``mxfp8.reference.quantize``."""
    plan = None
    if axis == -2 and rounding != "stochastic" and x.data_ptr() % 16 == 0:
        x = readable(x)
        FMT, RULE = element_codes(fmt, scale_rule)
        plan = _plan(x.shape, x.stride(), x.itemsize, None, block, FMT, RULE, satfinite)
    if plan is None:
        return quantize_triton.quantize(
            x, axis=axis, fmt=fmt, block=block, scale_rule=scale_rule, rounding=rounding, key=key, satfinite=satfinite
        )
    t, u = plan.outputs[0].allocate(x.device)
    _run(x, (t, u, t, u), plan)
    return t.view(fmt.dtype), u


def quantize_both(
    x: torch.Tensor,
    *,
    fmt: Any,
    block: tuple[int, int],
    column_block: tuple[int, int],
    scale_rule: Any,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(qdata, scale)`` along -1 in ``block`` and along -2 in ``column_block``, reading ``x`` once."""
    x = readable(x)
    FMT, RULE = element_codes(fmt, scale_rule)
    plan = _plan(x.shape, x.stride(), x.itemsize, block, column_block, FMT, RULE, satfinite)
    if plan is None or x.data_ptr() % 16:
        return quantize_triton.quantize_both(
            x, fmt=fmt, block=block, column_block=column_block, scale_rule=scale_rule, satfinite=satfinite
        )
    (q, s), (t, u) = (out.allocate(x.device) for out in plan.outputs)
    _run(x, (q, s, t, u), plan)
    return q.view(fmt.dtype), s, t.view(fmt.dtype), u
