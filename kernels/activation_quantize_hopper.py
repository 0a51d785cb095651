"""Activations that end in MX casts along rows, along columns or both ways, at copy speed on Hopper (Gluon).

As in ``quantize_hopper``, a tile is loaded along rows and changes its layout once, so that every thread ends up with 16
consecutive rows of two columns. What changes layout is the least that can: codes where blocks along columns are as wide
as high, the input where nothing is made along rows, else the value, rounded where that is what is cast. The activation
is computed once in any case. Rows alone stay as they were loaded.

Results in the input's dtype alone, and inputs whose rows are not 16-byte aligned, go to ``activation_quantize_triton``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import activation_quantize_triton as portable
from ._device import scale_byte
from ._gluon import gl, gluon
from ._pairs_hopper import pair_layouts, store_pairs
from .activation_quantize_triton import (
    ACTIVATIONS,
    Copies,
    Maybe,
    Plan,
    activate,
    as_elements,
    gradient,
    halves_apart,
    run,
)
from .quantize_hopper import (
    block_amax,
    codes_of,
    column_layout,
    outer_amax,
    place,
    row_layout,
    store_bytes,
    store_columns,
    tiled_grid,
    why_not,
    widen,
)
from .quantize_triton import readable, three_dims

__all__ = ["activation_quantize", "activation_quantize_backward", "why_not"]


@gluon.jit
def store_rows(
    y, q_ptr, s_ptr, b, pm, pk, R, C, FIRST, PITCH, RB: gl.constexpr, CB: gl.constexpr, FMT: gl.constexpr,
    RULE: gl.constexpr, SATFINITE: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Cast a tile (layout ``L``) along rows and store it; the maxima of its blocks, as bits of float32."""
    BM: gl.constexpr = y.shape[0]
    BK: gl.constexpr = y.shape[1]
    amax = block_amax(y, RB, CB)
    byte = scale_byte(amax, FMT, RULE, SATFINITE)
    store_tile(codes_of(y, byte, RB, CB, FMT, L), q_ptr, b, pm, pk, R, C, FIRST, PITCH, WHOLE, L)
    height = gl.cdiv(R, RB)
    s_at = s_ptr + (b * gl.cdiv(PITCH, CB) + FIRST // CB) * height
    store_bytes(s_at, byte, pm, pk, R, C, 1, height, BM, BK, RB, CB, WHOLE)
    return amax


@gluon.jit
def store_copies(
    y, z, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH, ROWS: gl.constexpr, RB: gl.constexpr,
    CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr,
    SATFINITE: gl.constexpr, WHOLE: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Cast tile ``(pm, pk)`` of float32 values, zero where it sticks out, and store it: with ``ROWS`` along rows from
    ``y`` (layout ``LA``), and along columns from ``z``, the same values in layout ``LB`` (rows in registers).

    ``FIRST`` and ``PITCH`` as in :func:`activation_quantize_triton.store_copies`.
    """
    BM: gl.constexpr = y.shape[0]
    BK: gl.constexpr = y.shape[1]
    NESTED: gl.constexpr = ROWS and TRB % RB == 0 and TCB % CB == 0
    if ROWS:
        amax = store_rows(y, q_ptr, s_ptr, b, pm, pk, R, C, FIRST, PITCH, RB, CB, FMT, RULE, SATFINITE, WHOLE, LA)
    if NESTED:
        outer = outer_amax(amax, TRB // RB, TCB // CB)
    else:
        outer = block_amax(z, TRB, TCB, True)
    byte = scale_byte(outer, FMT, RULE, SATFINITE)
    codes = codes_of(z, byte, TRB, TCB, FMT, LB)
    store_columns(t_ptr + (b * PITCH + FIRST) * R_PAD, codes, pm, pk, R, R_PAD, C, R_PAD, BM, BK, WHOLE, LB)
    width = gl.cdiv(PITCH, TCB)
    u_at = u_ptr + b * gl.cdiv(R, TRB) * width + FIRST // TCB
    store_bytes(u_at, byte, pm, pk, R, C, width, 1, BM, BK, TRB, TCB, WHOLE)


@gluon.jit
def store_all(
    y, y_ptr, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH, HP: gl.constexpr, ROUND: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr,
    TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, WHOLE: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Make everything that is asked for of a tile of float32 values, zero where it sticks out. They are in layout
    ``LA``; or in ``LB`` where they are cast along columns in blocks of one column, and nothing else is asked for."""
    if HP or ROUND:
        low = y.to(y_ptr.dtype.element_ty)
        if HP:
            store_tile(low, y_ptr, b, pm, pk, R, C, FIRST, PITCH, WHOLE, LA)
        if ROUND:
            y = low.to(gl.float32)
    if COLUMNS and TCB == 1:
        if ROUND:
            z = widen(gl.convert_layout(low, LB))
        else:
            z = gl.convert_layout(y, LB)
        store_copies(
            y, z, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH, ROWS, RB, CB, TRB, TCB, FMT, RULE,
            SATFINITE, WHOLE, LA, LB,
        )  # fmt: skip
    else:
        amax = 0
        if ROWS:
            amax = store_rows(y, q_ptr, s_ptr, b, pm, pk, R, C, FIRST, PITCH, RB, CB, FMT, RULE, SATFINITE, WHOLE, LA)
        if COLUMNS:
            store_pairs(
                y, amax, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH, ROWS, RB, CB, TRB, TCB, FMT, RULE,
                SATFINITE, WHOLE, LB,
            )  # fmt: skip


@gluon.jit
def load_tile(
    x_ptr, pm, pk, R, C, x_r, FIRST, BM: gl.constexpr, BK: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr,
    HINT: gl.constexpr,
):  # fmt: skip
    """Tile ``(pm, pk)`` of the ``C`` columns from ``FIRST`` on, in its own dtype; zero outside."""
    row = pm * BM
    col = pk * BK
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    where = x_ptr + row.to(gl.int64) * x_r + FIRST + col + (rows[:, None] * x_r + cols[None, :])
    if WHOLE:
        return gl.load(where, eviction_policy=HINT)
    else:
        inside = (row + rows < R)[:, None] & (col + cols < C)[None, :]
        return gl.load(where, mask=inside, other=0.0, eviction_policy=HINT)


@gluon.jit
def load_row(w_ptr, pk, C, FIRST, BK: gl.constexpr, L: gl.constexpr):
    """``[1, BK]`` of a vector's ``C`` entries from ``FIRST`` on, as float32 in the columns of layout ``L``."""
    cols = pk * BK + gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    return gl.expand_dims(widen(gl.load(w_ptr + FIRST + cols, mask=cols < C, other=0.0)), 0)


@gluon.jit
def inside_only(y, pm, pk, R, C, WHOLE: gl.constexpr, L: gl.constexpr):
    """``y`` with zeros where the tile sticks out."""
    if WHOLE:
        return y
    else:
        rows = pm * y.shape[0] + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, L))
        cols = pk * y.shape[1] + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, L))
        return gl.where((rows < R)[:, None] & (cols < C)[None, :], y, 0.0)


@gluon.jit
def store_tile(y, y_ptr, b, pm, pk, R, C, FIRST, PITCH, WHOLE: gl.constexpr, L: gl.constexpr):
    """Store a tile of any dtype into a contiguous ``[batch, R, PITCH]``."""
    BM: gl.constexpr = y.shape[0]
    BK: gl.constexpr = y.shape[1]
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    where = y_ptr + (b * R + pm * BM) * PITCH + FIRST + pk * BK + (rows[:, None] * PITCH + cols[None, :])
    if WHOLE:
        gl.store(where, y)
    else:
        gl.store(where, y, mask=(pm * BM + rows < R)[:, None] & (pk * BK + cols < C)[None, :])


@gluon.jit
def operand(
    x_ptr, bias_ptr, pm, pk, R, C, x_r, FIRST, BM: gl.constexpr, BK: gl.constexpr, BIAS: gl.constexpr,
    WHOLE: gl.constexpr, LA: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Tile ``(pm, pk)`` of the ``C`` columns from ``FIRST`` on, plus their bias, as float32. It is loaded in layout
    ``LA`` and changes to ``L`` before it is widened."""
    x = widen(gl.convert_layout(load_tile(x_ptr, pm, pk, R, C, x_r, FIRST, BM, BK, WHOLE, LA, ""), L))
    if BIAS:
        x += load_row(bias_ptr, pk, C, FIRST, BK, L)
    return x


@gluon.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r,
    BM: gl.constexpr, BK: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr,
    TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr,
    WHOLE: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr, BATCHED: gl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of the result."""
    b, pm, pk = place(R, BM, BATCHED)
    if pm * BM >= R:
        return
    # One input of 16 bits changes its layout at half the cost of the value.
    ONE: gl.constexpr = ACT != 5 and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    L: gl.constexpr = LB if ONE and COLUMNS and TCB == 1 and not ROWS and not HP else LA
    x = operand(x_ptr + b * x_b, bias_ptr, pm, pk, R, C, x_r, 0, BM, BK, BIAS, WHOLE, LA, L)
    if ACT == 5:
        up = operand(x_ptr + b * x_b, bias_ptr, pm, pk, R, C, x_r, C, BM, BK, BIAS, WHOLE, LA, L)
        y = activate(x, 3, HARDWARE) * up
    else:
        y = activate(x, ACT, HARDWARE)
    if BIAS:
        y = inside_only(y, pm, pk, R, C, WHOLE, L)
    store_all(
        y, y_ptr, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, 0, C, HP, ROUND, ROWS, COLUMNS, RB, CB, TRB, TCB,
        FMT, RULE, SATFINITE, WHOLE, LA, LB,
    )  # fmt: skip


@gluon.jit
def store_sums(dx, sum_ptr, pk, C, L: gl.constexpr):
    """Store the column sums of a tile that is zero outside, added in layout ``L``."""
    total = gl.sum(gl.convert_layout(dx, L), axis=0)
    cols = pk * dx.shape[1] + gl.arange(0, dx.shape[1], layout=gl.SliceLayout(0, L))
    gl.store(sum_ptr + cols, total, mask=cols < C)


@gluon.jit
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, sum_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r, dy_b, dy_r,
    BM: gl.constexpr, BK: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr,
    TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr,
    WHOLE: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr, BATCHED: gl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of ``dy``: the tile of ``dx``, or for swiglu two tiles ``C`` columns apart. With ``BIAS``
    the column sums of the tile go to row ``b * tiles + pm`` of ``sum``."""
    b, pm, pk = place(R, BM, BATCHED)
    if pm * BM >= R:
        return
    HALVES: gl.constexpr = 2 if ACT == 5 else 1
    for half in gl.static_range(HALVES):  # each reads its inputs: kept for the other, they would not fit registers
        x = operand(x_ptr + b * x_b, bias_ptr, pm, pk, R, C, x_r, 0, BM, BK, BIAS, WHOLE, LA, LA)
        dy = operand(dy_ptr + b * dy_b, bias_ptr, pm, pk, R, C, dy_r, 0, BM, BK, False, WHOLE, LA, LA)
        if ACT != 5:
            dx = gradient(x, dy, ACT, HARDWARE)
        elif half == 0:
            up = operand(x_ptr + b * x_b, bias_ptr, pm, pk, R, C, x_r, C, BM, BK, BIAS, WHOLE, LA, LA)
            dx = gradient(x, dy * up, 3, HARDWARE)
        else:
            dx = dy * activate(x, 3, HARDWARE)
        first = half * C
        pitch = HALVES * C
        if BIAS:
            sum_at = sum_ptr + (b * gl.cdiv(R, BM) + pm) * pitch + first
            store_sums(dx, sum_at, pk, C, LB if COLUMNS and TCB == 1 else LA)
        store_all(
            dx, dx_ptr, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, first, pitch, HP, ROUND, ROWS, COLUMNS, RB,
            CB, TRB, TCB, FMT, RULE, SATFINITE, WHOLE, LA, LB,
        )  # fmt: skip


def tile(copies: Copies) -> tuple[int, int, dict[str, int]]:
    """``(BM, BK, options)``: 32 elements a thread."""
    rows, cols = max((b[0] for b in copies.blocks), default=1), max((b[1] for b in copies.blocks), default=1)
    if max(rows, cols) <= 64:
        return 64, 128, {"num_warps": 8}
    bm, bk = (256, 64) if rows > 128 else (64, 256) if cols > 128 else (128, 128)
    return bm, bk, {"num_warps": 16}


_LIGHT = ("relu", "gelu_tanh", "silu")
"""Activations that leave registers for 64 elements a thread, of 16 bits each. More than fit, ptxas saves to memory."""


def tile_of(copies: Copies, light: bool, backward: bool, hp: bool) -> tuple[int, int, dict[str, int]]:
    """``(BM, BK, options)`` for an activation. Addresses and scales cost half with 64 elements a thread, and fewer
    warps wait for each other; limits on registers are those of two and of three programs a multiprocessor."""
    rows, cols = max(b[0] for b in copies.blocks), max(b[1] for b in copies.blocks)
    if copies.across is None:
        if rows > 1:
            return tile(copies)
        if cols > 128:
            return 16, 256, {"num_warps": 4}
        return 64 if light and not backward else 32, 128, {"num_warps": 4}  # no thread waits for another
    alone, square = copies.along is None, copies.across.rc[1] > 1
    if max(rows, cols) <= 64:
        return 64, 128, {"num_warps": 4 if light and square else 8}
    if alone and light and (rows, cols) == (128, 1):
        return 128, 64, {"num_warps": 4}
    if max(rows, cols) == 128 and light and (square or not backward):
        return 128, 128, {"num_warps": 8, "maxnreg": 80 if alone and not backward else 128}
    bm, bk, options = tile(copies)
    return bm, bk, {**options, "maxnreg": 128} if hp else options  # unasked, the compiler stops at 64 and spills


def layouts(bm: int, bk: int, warps: int, copies: Copies) -> dict[str, Any]:
    """``LA`` to load and to cast along rows; ``LB`` to cast along columns, or for what is to be stored along them."""
    if copies.across is not None and copies.across.rc[1] > 1:
        return dict(zip(("LA", "LB"), pair_layouts(bm, bk, warps), strict=True))
    along = row_layout(bk, 2, warps)
    return {"LA": along, "LB": along if copies.across is None else column_layout(bm, bk, warps)}


def one_tile(casts: Any) -> bool:
    """Whether a tile holds whole blocks of all directions asked for."""
    both = "rows" in casts.outputs and "columns" in casts.outputs
    return not both or casts.block[1] * casts.column_block[1] <= 128 * 128


def aligned_rows(strides: tuple[int, ...], width: int) -> bool:
    """Whether rows of ``width`` columns can be read 16 bytes at a time with 32-bit offsets inside a tile. Triton looks
    for multiples of 16 elements, whatever their size."""
    return strides[-1] == 1 and all(n % 16 == 0 for n in (width, *strides[:-1])) and strides[-2] < 2**22


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], dy_strides: tuple[int, ...] | None, itemsize: int, bias: bool,
    activation: str, casts: Any,
) -> Plan | None:  # fmt: skip
    """As the portable ``_plan``; None where these kernels cannot run, or have nothing to gain."""
    width = shape[-1] // (2 if activation == "swiglu" else 1)
    if casts.outputs == ("hp",) or 0 in shape or not aligned_rows(strides, width):
        return None
    if (
        max(shape[-2:]) >= 2**22
        or not one_tile(casts)
        or (dy_strides is not None and not aligned_rows(dy_strides, width))
    ):
        return None
    result = (*shape[:-1], width) if dy_strides is None else shape
    copies = Copies.of(result, casts, True)
    (b, r, _), x_strides = three_dims(shape, strides)
    more = () if dy_strides is None else three_dims((*shape[:-1], width), dy_strides)[1]
    backward, hp = dy_strides is not None, "hp" in casts.outputs
    light = activation in _LIGHT and itemsize == 2 and not hp
    bm, bk, options = tile_of(copies, light, backward, hp)
    if (grid := tiled_grid(b, -(-r // bm), -(-width // bk), 8)) is None:
        return None
    warps = options["num_warps"]
    constants = {
        "BM": bm, "BK": bk, "ACT": ACTIVATIONS[activation], "BIAS": bias, "HP": hp,
        "ROUND": casts.round_first, **copies.constants,
        "WHOLE": r % bm == 0 and width % bk == 0,
        **layouts(bm, bk, warps, copies), "BATCHED": b > 1,
    }  # fmt: skip
    ints = (r, width, copies.across.rows_padded if copies.across else 0, *x_strides[:2], *more[:2])
    return Plan(copies, result, b * -(-r // bm), grid, ints, constants, options)


def activation_quantize(
    x: torch.Tensor, bias: torch.Tensor | None, *, activation: str, casts: Any
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """Contract in ``mxfp8.reference.fused.activation_quantize``."""
    x, bias = readable(x), None if bias is None else bias.contiguous()
    plan = _plan(x.shape, x.stride(), None, x.itemsize, bias is not None, activation, casts)
    if plan is None or x.data_ptr() % 16:
        return portable.activation_quantize(x, bias, activation=activation, casts=casts)
    copies = plan.copies.allocate(x.device)
    y = torch.empty(plan.shape, dtype=x.dtype, device=x.device) if "hp" in casts.outputs else None
    run(_forward_kernel, plan, (x, bias), (y, *copies))
    return *as_elements(copies, casts.fmt, False), y


def activation_quantize_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, *, activation: str, casts: Any
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]:
    """Contract in ``mxfp8.reference.fused.activation_quantize_backward``."""
    x, dy, bias = readable(x), readable(dy), None if bias is None else bias.contiguous()
    plan = None
    if activation != "swiglu" or halves_apart(dy.shape[-1], casts):
        plan = _plan(x.shape, x.stride(), dy.stride(), x.itemsize, bias is not None, activation, casts)
    if plan is None or x.data_ptr() % 16 or dy.data_ptr() % 16 or dy.dtype != x.dtype:
        return portable.activation_quantize_backward(dy, x, bias, activation=activation, casts=casts)
    copies = plan.copies.allocate(x.device)
    dx = torch.empty(plan.shape, dtype=x.dtype, device=x.device) if "hp" in casts.outputs else None
    sums = None if bias is None else x.new_empty((plan.strips, x.shape[-1]), dtype=torch.float32)
    run(_backward_kernel, plan, (dy, x, bias), (dx, sums, *copies))
    return *as_elements(copies, casts.fmt, False), dx, None if sums is None else sums.sum(0)
