"""RMSNorm, LayerNorm and BlockNorm that end in MX casts along columns, or both ways, on Hopper (Gluon).

A program owns a strip of as few rows as a block of a column needs. Its first pass streams the strip and sums over rows;
its second walks back through it, so that what was read last is read again while it is still in the first-level cache,
and the rest comes from the second level: memory sees the input once. Each tile of the second pass is loaded while the
one before it is cast, as in ``activation_quantize_hopper``.

Results without columns, and inputs whose rows are not 16-byte aligned, go to ``norm_quantize_triton``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import norm_quantize_triton as portable
from ._gluon import gl, gluon
from .activation_quantize_hopper import (
    aligned_rows,
    inside_only,
    load_row,
    load_tile,
    store_copies,
    store_tile,
)
from .activation_quantize_triton import Copies, Maybe, Plan, as_elements, in_turn, run
from .norm_quantize_triton import add_moments, contiguous, group_of, inverse_root, statistics
from .quantize_hopper import column_layout, row_layout, why_not
from .quantize_triton import readable, three_dims

__all__ = ["norm_quantize", "norm_quantize_backward", "why_not"]

HINT = "evict_last"
"""How the first pass marks a strip that is too wide for the first-level caches, so that outputs do not displace it."""


@gluon.jit
def _load_sum(
    x_ptr, r_ptr, pm, k, R, C, x_r, r_r, RESIDUAL: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    """A tile of ``h`` in the dtype of ``x``: ``x``, or ``x + residual``."""
    x = load_tile(x_ptr, pm, k, R, C, x_r, 0, BM, BK, WHOLE, L, HINT)
    if RESIDUAL:
        r = load_tile(r_ptr, pm, k, R, C, r_r, 0, BM, BK, WHOLE, L, HINT)
        return (x.to(gl.float32) + r.to(gl.float32)).to(x.dtype)
    else:
        return x


@gluon.jit
def _group_factor(squares, k, C, eps, GROUP: gl.constexpr):
    """``1 / rms`` of each group of columns of tile ``k``, from ``[BM, groups, GROUP]`` squares."""
    total = gl.sum(squares, axis=2)
    N: gl.constexpr = total.shape[1]
    group = k * N + gl.arange(0, N, layout=gl.SliceLayout(0, total.type.layout))
    size = gl.minimum(gl.maximum(C - group * GROUP, 1), GROUP).to(gl.float32)
    return inverse_root(total / gl.expand_dims(size, 0), eps)


@gluon.jit
def _group_at(values, rstd_ptr, b, pm, k, R, C, BM: gl.constexpr, GROUP: gl.constexpr):
    """Where the statistics of the groups of tile ``(pm, k)`` lie, for the layout of ``values``; and which exist."""
    L: gl.constexpr = values.type.layout
    N: gl.constexpr = values.shape[1]
    rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    group = k * N + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    groups = gl.cdiv(C, GROUP)
    at = rstd_ptr + (b * R + rows.to(gl.int64))[:, None] * groups + group[None, :]
    return at, (rows < R)[:, None] & (group < groups)[None, :]


@gluon.jit
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, x_b, x_r, r_b, r_r, eps,
    BM: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, LAYER: gl.constexpr, RESIDUAL: gl.constexpr,
    WEIGHT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr,
    FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr, WHOLE: gl.constexpr,
    UNROLL: gl.constexpr, KEEP: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """A strip of ``BM`` rows. ``GROUP``: columns that share a root mean square, 0 for all of a row."""
    strips = gl.cdiv(R, BM)
    b = (gl.program_id(0) // strips).to(gl.int64)
    pm = gl.program_id(0) % strips
    x_ptr += b * x_b
    r_ptr += b * r_b
    steps = gl.cdiv(C, BK)
    rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, LA))
    mean = gl.zeros([BM], gl.float32, gl.SliceLayout(1, LA))
    squares = gl.zeros([BM], gl.float32, gl.SliceLayout(1, LA))
    if GROUP == 0:
        each = gl.zeros([BM, BK], gl.float32, LA)
        for first in range(0, steps, UNROLL):
            for j in gl.static_range(UNROLL):
                k = first + j
                low = _load_sum(x_ptr, r_ptr, pm, k, R, C, x_r, r_r, RESIDUAL, BM, BK, WHOLE, LA, KEEP)
                if RESIDUAL:  # a thread reads back what it wrote itself
                    store_tile(low, h_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
                h = low.to(gl.float32)
                if LAYER:
                    cols = k * BK + gl.arange(0, BK, layout=gl.SliceLayout(0, LA))
                    inside = (rows < R)[:, None] & (cols < C)[None, :]
                    n = gl.minimum(C - k * BK, BK).to(gl.float32)
                    mean, squares = add_moments(mean, squares, (k * BK).to(gl.float32), h, inside, n)
                else:
                    each = gl.fma(h, h, each)
        if not LAYER:
            squares = gl.sum(each, axis=1)
        rstd = inverse_root(squares / C, eps)
        at_row = b * R + rows.to(gl.int64)
        gl.store(rstd_ptr + at_row, rstd, mask=rows < R)
        if LAYER:
            gl.store(mean_ptr + at_row, mean, mask=rows < R)
        if RESIDUAL:
            x_ptr = h_ptr + b * R * C
            x_r = C
    ADD: gl.constexpr = RESIDUAL and GROUP > 0
    later = _load_sum(x_ptr, r_ptr, pm, steps - 1, R, C, x_r, r_r, ADD, BM, BK, WHOLE, LA, "")
    for i in range(steps):
        k = steps - 1 - i
        low = later
        later = _load_sum(x_ptr, r_ptr, pm, gl.maximum(k - 1, 0), R, C, x_r, r_r, ADD, BM, BK, WHOLE, LA, "")
        if ADD:
            store_tile(low, h_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
        h = low.to(gl.float32)
        if GROUP > 0:
            groups = h.reshape([BM, BK // GROUP, GROUP])
            factor = _group_factor(groups * groups, k, C, eps, GROUP)
            at, exists = _group_at(factor, rstd_ptr, b, pm, k, R, C, BM, GROUP)
            gl.store(at, factor, mask=exists)
            y = gl.convert_layout((groups * gl.expand_dims(factor, 2)).reshape([BM, BK]), LA)
        elif LAYER:
            y = (h - gl.expand_dims(mean, 1)) * gl.expand_dims(rstd, 1)
        else:
            y = h * gl.expand_dims(rstd, 1)
        if WEIGHT:
            y *= load_row(w_ptr, k, C, 0, BK, LA)
        if BIAS:
            y += load_row(bias_ptr, k, C, 0, BK, LA)
        y = inside_only(y, pm, k, R, C, WHOLE, LA)
        if HP or ROUND:
            low = y.to(y_ptr.dtype.element_ty)
            if HP:
                store_tile(low, y_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
            if ROUND:
                y = low.to(gl.float32)
        if ROUND:
            z = gl.convert_layout(low, LB).to(gl.float32)
        else:
            z = gl.convert_layout(y, LB)
        store_copies(
            y, z, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, k, R, C, R_PAD, 0, C, ROWS, RB, CB, TRB, TCB, FMT, RULE, SATFINITE,
            WHOLE, LA, LB,
        )  # fmt: skip


@gluon.jit
def _load_gradient(
    dy_ptr, h_ptr, w_ptr, pm, k, R, C, dy_r, h_r, WEIGHT: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    """Tiles of ``dy``, ``dy * weight`` and ``h``, as float32."""
    dy = load_tile(dy_ptr, pm, k, R, C, dy_r, 0, BM, BK, WHOLE, L, HINT).to(gl.float32)
    h = load_tile(h_ptr, pm, k, R, C, h_r, 0, BM, BK, WHOLE, L, HINT).to(gl.float32)
    if WEIGHT:
        return dy, dy * load_row(w_ptr, k, C, 0, BK, L), h
    else:
        return dy, dy, h


@gluon.jit
def _store_sums(values, sum_ptr, strip, k, C, BK: gl.constexpr):
    """Column sums of a tile into row ``strip`` of ``[strips, C]``."""
    total = gl.sum(values, axis=0)
    cols = k * BK + gl.arange(0, BK, layout=total.type.layout)
    gl.store(sum_ptr + strip.to(gl.int64) * C + cols, total, mask=cols < C)


@gluon.jit
def _backward_kernel(
    dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dh_ptr, dx_ptr, dw_ptr, db_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, h_b, h_r, dy_b, dy_r, dh_b, dh_r,
    BM: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, LAYER: gl.constexpr, RESIDUAL: gl.constexpr,
    WEIGHT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr,
    FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr, WHOLE: gl.constexpr,
    UNROLL: gl.constexpr, KEEP: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """A strip of ``BM`` rows; constants as in ``norm_quantize_triton._backward_kernel``."""
    strips = gl.cdiv(R, BM)
    b = (gl.program_id(0) // strips).to(gl.int64)
    pm = gl.program_id(0) % strips
    dy_ptr += b * dy_b
    h_ptr += b * h_b
    steps = gl.cdiv(C, BK)
    if GROUP == 0:
        rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, LA))
        at_row = b * R + rows.to(gl.int64)
        rstd = gl.expand_dims(gl.load(rstd_ptr + at_row, mask=rows < R, other=0.0), 1)
        if LAYER:
            mean = gl.expand_dims(gl.load(mean_ptr + at_row, mask=rows < R, other=0.0), 1)
        along = gl.zeros([BM, BK], gl.float32, LA)
        constant = gl.zeros([BM, BK], gl.float32, LA)
        for first in range(0, steps, UNROLL):
            for j in gl.static_range(UNROLL):
                _, g, h = _load_gradient(
                    dy_ptr, h_ptr, w_ptr, pm, first + j, R, C, dy_r, h_r, WEIGHT, BM, BK, WHOLE, LA, KEEP
                )
                if LAYER:
                    h -= mean
                    constant += g
                along = gl.fma(g, h * rstd, along)
        mean_along = gl.expand_dims(gl.sum(along, axis=1) / C, 1)
        if LAYER:
            mean_g = gl.expand_dims(gl.sum(constant, axis=1) / C, 1)
    for i in range(steps):
        k = steps - 1 - i
        dy, g, h = _load_gradient(dy_ptr, h_ptr, w_ptr, pm, k, R, C, dy_r, h_r, WEIGHT, BM, BK, WHOLE, LA, "")
        if GROUP > 0:
            h3 = h.reshape([BM, BK // GROUP, GROUP])
            g3 = g.reshape([BM, BK // GROUP, GROUP])
            zero = gl.sum(h3, axis=2)
            at, exists = _group_at(zero, rstd_ptr, b, pm, k, R, C, BM, GROUP)
            factor = gl.load(at, mask=exists, other=0.0)
            n3 = h3 * gl.expand_dims(factor, 2)
            group = k * (BK // GROUP) + gl.arange(0, BK // GROUP, layout=gl.SliceLayout(0, zero.type.layout))
            size = gl.minimum(gl.maximum(C - group * GROUP, 1), GROUP).to(gl.float32)
            mean3 = gl.sum(g3 * n3, axis=2) / gl.expand_dims(size, 0)
            dx3 = gl.expand_dims(factor, 2) * (g3 - n3 * gl.expand_dims(mean3, 2))
            dx = gl.convert_layout(dx3.reshape([BM, BK]), LA)
            normed = gl.convert_layout(n3.reshape([BM, BK]), LA)
        elif LAYER:
            normed = (h - mean) * rstd
            dx = rstd * (g - normed * mean_along - mean_g)
        else:
            normed = h * rstd
            dx = rstd * (g - normed * mean_along)
        if RESIDUAL:
            dx += load_tile(dh_ptr + b * dh_b, pm, k, R, C, dh_r, 0, BM, BK, WHOLE, LA, "").to(gl.float32)
        dx = inside_only(dx, pm, k, R, C, WHOLE, LA)
        if WEIGHT:
            _store_sums(dy * normed, dw_ptr, gl.program_id(0), k, C, BK)
        if BIAS:
            _store_sums(dy, db_ptr, gl.program_id(0), k, C, BK)
        if HP or ROUND:
            low = dx.to(dx_ptr.dtype.element_ty)
            if HP:
                store_tile(low, dx_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
            if ROUND:
                dx = low.to(gl.float32)
        if ROUND:
            z = gl.convert_layout(low, LB).to(gl.float32)
        else:
            z = gl.convert_layout(dx, LB)
        store_copies(
            dx, z, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, k, R, C, R_PAD, 0, C, ROWS, RB, CB, TRB, TCB, FMT, RULE,
            SATFINITE, WHOLE, LA, LB,
        )  # fmt: skip


def strip_layout(bm: int, bk: int, warps: int) -> Any:
    """Threads along columns, as ``column_layout``, also for strips of 32 rows: a warp on 32 rows of 32 columns."""
    if bm >= 64:
        return column_layout(bm, bk, warps)
    return gl.BlockedLayout([16, 2], [2, 16], [1, warps], [0, 1])


def tile(copies: Copies, group: int) -> tuple[int, int, int]:
    """``(BM, BK, warps)``: the fewest rows that hold a block of a column, 32 elements a thread."""
    rows, cols = max((b[0] for b in copies.blocks), default=1), max((b[1] for b in copies.blocks), default=1)
    bm = max(32, rows)
    bk = max(256 if bm == 32 else 128 if bm <= 128 else 64, cols, group)
    return bm, bk, max(4, min(16, bm * bk // 1024))


def unroll(steps: int, most: int) -> int:
    """How many tiles of the first pass are in flight: a power of two that divides ``steps``."""
    return next(n for n in (4, 2, 1) if n <= most and steps % n == 0)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], itemsize: int, norm: str, norm_block: int,
    flags: tuple[bool, ...], backward: bool, casts: Any,
) -> Plan | None:  # fmt: skip
    """As the portable ``_plan``; None where these kernels cannot run, or have nothing to gain."""
    if "columns" not in casts.outputs or 0 in shape or max(shape[-2:]) >= 2**22:
        return None
    if not all(aligned_rows(s, shape[-1]) for s in strides):
        return None
    copies, group = Copies.of(shape, casts, True), group_of(norm, norm_block, shape[-1])
    b, r, c = three_dims(shape, strides[0])[0]
    bm, bk, warps = tile(copies, group)
    most = 1 if bm * bk > 1024 * warps else 2 if backward or flags[0] else 4  # what registers allow
    constants = {
        "BM": bm, "BK": bk, "GROUP": group, "LAYER": norm == "layer",
        "RESIDUAL": flags[0], "WEIGHT": flags[1], "BIAS": flags[2], "HP": "hp" in casts.outputs,
        "ROUND": casts.round_first, **copies.constants, "WHOLE": r % bm == 0 and c % bk == 0,
        "UNROLL": unroll(-(-c // bk), most), "KEEP": HINT if c > 2048 else "",
        "LA": row_layout(bk, itemsize, warps), "LB": strip_layout(bm, bk, warps),
    }  # fmt: skip
    ints = (r, c, copies.across.rows_padded, *(n for s in strides for n in three_dims(shape, s)[1][:2]))
    return Plan(copies, shape, (b * -(-r // bm), 1, 1), ints, constants, {"num_warps": warps})


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    norm: str,
    norm_block: int,
    eps: float,
    casts: Any,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, torch.Tensor, Maybe, torch.Tensor]:
    """Contract in ``mxfp8.reference.fused.norm_quantize``."""
    return in_turn(lambda c: _forward(x, weight, bias, residual, norm, norm_block, eps, c), casts, squares=True)


def norm_quantize_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dh: torch.Tensor | None,
    *,
    norm: str,
    norm_block: int,
    with_bias: bool,
    casts: Any,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]:
    """Contract in ``mxfp8.reference.fused.norm_quantize_backward``."""
    return in_turn(
        lambda c: _backward(dy, h, weight, mean, rstd, dh, norm, norm_block, with_bias, c), casts, squares=True
    )


def _forward(
    x: torch.Tensor, weight: Maybe, bias: Maybe, residual: Maybe, norm: str, norm_block: int, eps: float, casts: Any
) -> tuple[Any, ...]:
    x, r = readable(x), None if residual is None else readable(residual)
    plan = None
    if r is None or (r.dtype == x.dtype and r.data_ptr() % 16 == 0):
        flags = (r is not None, weight is not None, bias is not None)
        strides = (x.stride(), x.stride() if r is None else r.stride())
        plan = _plan(x.shape, strides, x.itemsize, norm, norm_block, flags, False, casts)
    if plan is None or x.data_ptr() % 16:
        return portable.norm_quantize(x, weight, bias, residual, norm=norm, norm_block=norm_block, eps=eps, casts=casts)
    copies = plan.copies.allocate(x.device)
    h = x if r is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if "hp" in casts.outputs else None
    mean, rstd = statistics(x, norm, norm_block)
    inputs = (x, r, contiguous(weight), contiguous(bias))
    run(_forward_kernel, plan, inputs, (h, y, mean, rstd, *copies), eps)
    return *as_elements(copies, casts.fmt, False), y, h, mean, rstd


def _backward(
    dy: torch.Tensor, h: torch.Tensor, weight: Maybe, mean: Maybe, rstd: torch.Tensor, dh: Maybe, norm: str,
    norm_block: int, with_bias: bool, casts: Any,
) -> tuple[Any, ...]:  # fmt: skip
    dy, h, dh = readable(dy), readable(h), None if dh is None else readable(dh)
    plan, flags = None, (dh is not None, weight is not None, with_bias)
    if all(t is None or (t.dtype == h.dtype and t.data_ptr() % 16 == 0) for t in (dy, h, dh)):
        strides = (h.stride(), dy.stride(), h.stride() if dh is None else dh.stride())
        plan = _plan(h.shape, strides, h.itemsize, norm, norm_block, flags, True, casts)
    if plan is None:
        return portable.norm_quantize_backward(
            dy, h, weight, mean, rstd, dh, norm=norm, norm_block=norm_block, with_bias=with_bias, casts=casts
        )
    copies = plan.copies.allocate(h.device)
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device) if "hp" in casts.outputs else None
    dw, db = (h.new_empty((plan.grid[0], h.shape[-1]), dtype=torch.float32) if f else None for f in flags[1:])
    inputs = (dy, h, contiguous(weight), contiguous(mean), rstd.contiguous(), dh)
    run(_backward_kernel, plan, inputs, (dx, dw, db, *copies))
    sums = (None if part is None else part.sum(0) for part in (dw, db))
    return *as_elements(copies, casts.fmt, False), dx, *sums
