"""Casts along columns in blocks as wide as high on Hopper: what changes its layout is the codes (Gluon).

A block's scale is known to every thread that holds a part of it, so that values are cast where they are, along rows.
Codes of two rows make one int16, and a tile of those is turned by the instructions that turn bfloat16.
"""

from __future__ import annotations

from ._device import inverse_scale, scale_byte
from ._gluon import gl, gluon
from .quantize_hopper import KEEP, block_amax, outer_amax, row_layout, store_bytes

__all__ = ["pair_layouts", "store_pairs"]


def pair_layouts(bm: int, bk: int, warps: int) -> tuple[gl.BlockedLayout, gl.BlockedLayout]:
    """Of values, pairs of rows in a thread; and of pairs: 8 of them are 16 bytes of a column, and 8 of those a line."""
    along = row_layout(bk, 2, warps)
    down, each = min(8, bm // 16), 2 if bm * bk >= 1024 * warps else 1
    wide = min(warps, bk // (32 // down * each))
    return (
        gl.BlockedLayout([2, 16], along.threads_per_warp, along.warps_per_cta, along.order),
        gl.BlockedLayout([8, each], [down, 32 // down], [warps // wide, wide], [0, 1]),
    )


@gluon.jit
def code_pairs(y, byte, RB: gl.constexpr, CB: gl.constexpr, FMT: gl.constexpr):
    """Codes of a float32 tile ``[BM, BK]`` under the scale bytes of its blocks, two rows in one int16 (the upper one in
    its lower byte): ``[BM / 2, BK]``. A thread must hold both rows."""
    BM: gl.constexpr = y.shape[0]
    BK: gl.constexpr = y.shape[1]
    blocks = y.reshape([BM // RB, RB, BK // CB, CB])
    factor = gl.convert_layout(inverse_scale(byte), gl.SliceLayout(1, gl.SliceLayout(3, blocks.type.layout)))
    scaled = blocks * gl.expand_dims(gl.expand_dims(factor, 1), 3)
    upper, lower = gl.split(scaled.reshape([BM // 2, 2, BK]).permute([0, 2, 1]))
    NAME: gl.constexpr = "e4m3" if FMT == 0 else "e5m2"
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite." + NAME + "x2.f32 $0, $2, $1;", "=h,f,f", [upper, lower], dtype=gl.int16, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def store_pairs(
    y, amax, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH, ROWS: gl.constexpr, RB: gl.constexpr,
    CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr,
    SATFINITE: gl.constexpr, WHOLE: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Cast tile ``(pm, pk)`` of float32 values, zero where it sticks out, in blocks of ``TRB`` rows by ``TCB`` columns
    and store it along columns, as :func:`activation_quantize_triton.store_copies`. ``LB`` is the layout of pairs.
    With ``ROWS``, ``amax`` holds the maxima of blocks of ``RB`` by ``CB``, as bits of float32.

    **Numerics.** The bits of ``mxfp8.reference.quantize`` of the tile.
    """
    BM: gl.constexpr = y.shape[0]
    BK: gl.constexpr = y.shape[1]
    if ROWS and TRB % RB == 0 and TCB % CB == 0:
        outer = outer_amax(amax, TRB // RB, TCB // CB)
    else:
        outer = block_amax(y, TRB, TCB)
    byte = scale_byte(outer, FMT, RULE, SATFINITE)
    pairs = gl.convert_layout(code_pairs(y, byte, TRB, TCB, FMT), LB)
    half = (R_PAD // 16) * 8  # R_PAD is a multiple of 32: says so to whom looks for 16-byte stores
    t_at = t_ptr.to(gl.pointer_type(gl.int16)) + (b * PITCH + FIRST) * half
    rows = gl.arange(0, BM // 2, layout=gl.SliceLayout(1, LB))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LB))
    where = t_at + (pk * BK).to(gl.int64) * half + pm * (BM // 2) + (cols[None, :] * half + rows[:, None])
    if WHOLE:
        gl.store(where, pairs, eviction_policy=KEEP)
    else:
        row = 2 * (pm * (BM // 2) + rows)  # padding rows are zero, in a block that is NaN as well
        known = gl.where(row + 1 < R, 0xFFFF, gl.where(row < R, 0xFF, 0)).to(gl.int16)
        inside = (pm * (BM // 2) + rows < half)[:, None] & (pk * BK + cols < C)[None, :]
        gl.store(where, pairs & known[:, None], mask=inside, eviction_policy=KEEP)
    width = gl.cdiv(PITCH, TCB)
    u_at = u_ptr + b * gl.cdiv(R, TRB) * width + FIRST // TCB
    store_bytes(u_at, byte, pm, pk, R, C, width, 1, BM, BK, TRB, TCB, WHOLE)
