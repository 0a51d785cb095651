"""RMSNorm, LayerNorm and BlockNorm that end in MX casts on Hopper (Gluon).

RMSNorm and LayerNorm: see :mod:`_norm_hopper_kernel`. BlockNorm finds its statistics inside a tile: a program owns a
strip of as few rows as a block of a column needs, and loads each tile while the one before it is cast. In the backward
pass of all three a first walk over the strip sums over rows, and a second one goes back, so that what was read last is
read again while it is still in the first-level cache, and the rest comes from the second level.

``norm_quantize_triton`` takes inputs whose rows are not 16-byte aligned, results in the input's dtype alone, and
without columns also BlockNorm and the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import norm_quantize_triton as portable
from ._gluon import gl, gluon
from ._norm_hopper_kernel import forward_kernel, room, zeros
from .activation_quantize_hopper import (
    aligned_rows,
    inside_only,
    load_row,
    load_tile,
    one_tile,
    store_copies,
    store_tile,
)
from .activation_quantize_triton import Copies, Maybe, Plan, as_elements, run
from .norm_quantize_triton import contiguous, group_of, inverse_root, statistics
from .quantize_hopper import column_layout, row_layout, why_not, widen
from .quantize_triton import readable, three_dims

__all__ = ["norm_quantize", "norm_quantize_backward", "why_not"]

HINT = "evict_last"
"""How the first pass marks a strip that is too wide for the first-level caches, so that outputs do not displace it."""


@gluon.jit
def _load_sum(
    x_ptr, r_ptr, pm, k, R, C, x_r, r_r, RESIDUAL: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """A tile of ``h`` in the dtype of ``x``: ``x``, or ``x + residual``."""
    x = load_tile(x_ptr, pm, k, R, C, x_r, 0, BM, BK, WHOLE, L, "")
    if RESIDUAL:
        r = load_tile(r_ptr, pm, k, R, C, r_r, 0, BM, BK, WHOLE, L, "")
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
def _block_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, h_ptr, y_ptr, rstd_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, x_b, x_r, r_b, r_r, eps,
    BM: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, RESIDUAL: gl.constexpr,
    WEIGHT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr, TCB: gl.constexpr,
    FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr, WHOLE: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """BlockNorm of a strip of ``BM`` rows. ``GROUP``: columns that share a root mean square."""
    strips = gl.cdiv(R, BM)
    b = (gl.program_id(0) // strips).to(gl.int64)
    pm = gl.program_id(0) % strips
    x_ptr += b * x_b
    r_ptr += b * r_b
    steps = gl.cdiv(C, BK)
    later = _load_sum(x_ptr, r_ptr, pm, 0, R, C, x_r, r_r, RESIDUAL, BM, BK, WHOLE, LA)
    for k in range(steps):
        low = later
        later = _load_sum(x_ptr, r_ptr, pm, gl.minimum(k + 1, steps - 1), R, C, x_r, r_r, RESIDUAL, BM, BK, WHOLE, LA)
        if RESIDUAL:
            store_tile(low, h_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
        groups = low.to(gl.float32).reshape([BM, BK // GROUP, GROUP])
        factor = _group_factor(groups * groups, k, C, eps, GROUP)
        at, exists = _group_at(factor, rstd_ptr, b, pm, k, R, C, BM, GROUP)
        gl.store(at, factor, mask=exists)
        y = gl.convert_layout((groups * gl.expand_dims(factor, 2)).reshape([BM, BK]), LA)
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
    dy_ptr, h_ptr, pm, k, R, C, dy_r, h_r, BM: gl.constexpr, BK: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr,
    HINT: gl.constexpr,
):  # fmt: skip
    """Tiles of ``dy`` and ``h``, as float32."""
    dy = widen(load_tile(dy_ptr, pm, k, R, C, dy_r, 0, BM, BK, WHOLE, L, HINT))
    return dy, widen(load_tile(h_ptr, pm, k, R, C, h_r, 0, BM, BK, WHOLE, L, HINT))


@gluon.jit
def _weighted(dy, w_ptr, k, C, WEIGHT: gl.constexpr, BK: gl.constexpr, L: gl.constexpr):
    if WEIGHT:
        return dy * load_row(w_ptr, k, C, 0, BK, L)
    else:
        return dy


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
        along = gl.zeros([BM], gl.float32, gl.SliceLayout(1, LA))
        constant = gl.zeros([BM], gl.float32, gl.SliceLayout(1, LA))
        for first in range(0, steps, UNROLL):
            for j in gl.static_range(UNROLL):
                dy, h = _load_gradient(dy_ptr, h_ptr, pm, first + j, R, C, dy_r, h_r, BM, BK, WHOLE, LA, KEEP)
                g = _weighted(dy, w_ptr, first + j, C, WEIGHT, BK, LA)
                if LAYER:
                    h -= mean
                    constant += gl.sum(g, axis=1)
                along += gl.sum(g * (h * rstd), axis=1)
        mean_along = gl.expand_dims(along / C, 1)
        if LAYER:
            mean_g = gl.expand_dims(constant / C, 1)
    for i in range(steps):
        k = steps - 1 - i
        dy, h = _load_gradient(dy_ptr, h_ptr, pm, k, R, C, dy_r, h_r, BM, BK, WHOLE, LA, "")
        if GROUP > 0:
            groups = h.reshape([BM, BK // GROUP, GROUP])
            zero = gl.sum(groups, axis=2)
            at, exists = _group_at(zero, rstd_ptr, b, pm, k, R, C, BM, GROUP)
            factor = gl.load(at, mask=exists, other=0.0)
            normed = gl.convert_layout((groups * gl.expand_dims(factor, 2)).reshape([BM, BK]), LA)
        elif LAYER:
            normed = (h - mean) * rstd
        else:
            normed = h * rstd
        # Sums over columns before anything else: what follows no longer needs dy.
        if WEIGHT:
            _store_sums(dy * normed, dw_ptr, gl.program_id(0), k, C, BK)
        if BIAS:
            _store_sums(dy, db_ptr, gl.program_id(0), k, C, BK)
        g = _weighted(dy, w_ptr, k, C, WEIGHT, BK, LA)
        if GROUP > 0:
            g3 = g.reshape([BM, BK // GROUP, GROUP])
            n3 = normed.reshape([BM, BK // GROUP, GROUP])
            group = k * (BK // GROUP) + gl.arange(0, BK // GROUP, layout=gl.SliceLayout(0, zero.type.layout))
            size = gl.minimum(gl.maximum(C - group * GROUP, 1), GROUP).to(gl.float32)
            mean3 = gl.sum(g3 * n3, axis=2) / gl.expand_dims(size, 0)
            dx3 = gl.expand_dims(factor, 2) * (g3 - n3 * gl.expand_dims(mean3, 2))
            dx = gl.convert_layout(dx3.reshape([BM, BK]), LA)
        elif LAYER:
            dx = rstd * (g - normed * mean_along - mean_g)
        else:
            dx = rstd * (g - normed * mean_along)
        if RESIDUAL:
            dx += load_tile(dh_ptr + b * dh_b, pm, k, R, C, dh_r, 0, BM, BK, WHOLE, LA, "").to(gl.float32)
        dx = inside_only(dx, pm, k, R, C, WHOLE, LA)
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
    """``(BM, BK, warps)``: the fewest rows that hold a block of a column, 32 elements a thread; more than 16 warps, and
    such a tile does not fit registers."""
    rows, cols = max((b[0] for b in copies.blocks), default=1), max((b[1] for b in copies.blocks), default=1)
    bm = max(32, rows)
    bk = max(256 if bm == 32 else 128 if bm <= 128 else 64, cols, group)
    return bm, bk, max(4, bm * bk // 1024)


def unroll(steps: int, most: int) -> int:
    """How many tiles of the first pass are in flight: a power of two that divides ``steps``."""
    return next(n for n in (4, 2, 1) if n <= most and steps % n == 0)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], itemsize: int, norm: str, norm_block: int,
    flags: tuple[bool, ...], backward: bool, casts: Any,
) -> Plan | None:  # fmt: skip
    """As the portable ``_plan``; None where these kernels cannot run, or have nothing to gain."""
    if "columns" not in casts.outputs or 0 in shape or max(shape[-2:]) >= 2**22 or not one_tile(casts):
        return None
    if not all(aligned_rows(s, shape[-1]) for s in strides):
        return None
    copies, group = Copies.of(shape, casts, True), group_of(norm, norm_block, shape[-1])
    b, r, c = three_dims(shape, strides[0])[0]
    bm, bk, warps = tile(copies, group)
    wide = not backward and flags[0] and copies.along is not None and copies.along.rc[1] > 128
    if warps > 16 or (warps == 16 and (norm == "layer" or flags[0])) or wide:
        return None  # registers would not do
    constants = {
        "BM": bm, "BK": bk, "GROUP": group, "RESIDUAL": flags[0], "WEIGHT": flags[1], "BIAS": flags[2],
        "HP": "hp" in casts.outputs, "ROUND": casts.round_first, **copies.constants,
        "WHOLE": r % bm == 0 and c % bk == 0, "LA": row_layout(bk, itemsize, warps),
        "LB": strip_layout(bm, bk, warps),
    }  # fmt: skip
    if backward:
        most = 1 if bm * bk > 1024 * warps else 2  # what registers allow
        constants |= {
            "LAYER": norm == "layer", "UNROLL": unroll(-(-c // bk), most), "KEEP": HINT if c > 2048 else "",
        }  # fmt: skip
    ints = (r, c, copies.across.rows_padded, *(n for s in strides for n in three_dims(shape, s)[1][:2]))
    strips = b * -(-r // bm)
    return Plan(copies, shape, strips, (strips, 1, 1), ints, constants, {"num_warps": warps})


_WARP_BYTES = 8 * 1024
"""What a program keeps in shared memory for each of its warps: three programs of 8 warps share a multiprocessor."""

_MAX_PARTS = 32
"""Programs of one strip of rows: all of them must run at once, on a small slice of a GPU too."""


def rows_tile(
    copies: Copies, width: int, itemsize: int, layer: bool, residual: bool, hp: bool
) -> tuple[int, int, dict[str, int]]:
    """``(BM, BK, options)`` for statistics over rows of ``width``: the fastest of those that were timed on an H200."""
    rows, cols = max(b[0] for b in copies.blocks), max(b[1] for b in copies.blocks)
    if rows == 1:
        return (8, 512, {"num_warps": 4}) if width > 256 else (16, 256, {"num_warps": 4})
    if max(rows, cols) > 64:
        bm, bk = (256, 64) if rows > 128 else (64, 256) if cols > 128 else (128, 128)
        return bm, bk, {"num_warps": 8}
    # With 80 registers three programs share a multiprocessor, not two. Where these are too few, none are saved.
    thin = copies.along is not None and all(min(b) == 1 for b in copies.blocks)
    few = itemsize == 2 and (not (layer or residual) or (thin and not hp))
    whole = 32 * width * itemsize <= 8 * _WARP_BYTES  # then a strip has but one part, which waits for nobody
    bm, bk = (32, 256) if whole and rows <= 32 and not layer else (64, 128)
    return bm, bk, {"num_warps": 8, "maxnreg": 80} if few else {"num_warps": 8}


@functools.lru_cache(maxsize=4096)
def _rows_plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], itemsize: int, layer: bool, flags: tuple[bool, ...],
    casts: Any,
) -> Plan | None:  # fmt: skip
    """As :func:`_plan`, for statistics over whole rows."""
    if not {"rows", "columns"} & set(casts.outputs) or 0 in shape or max(shape[-2:]) >= 2**22 or not one_tile(casts):
        return None
    if not all(aligned_rows(s, shape[-1]) for s in strides):
        return None
    copies = Copies.of(shape, casts, True)
    b, r, c = three_dims(shape, strides[0])[0]
    bm, bk, options = rows_tile(copies, c, itemsize, layer, flags[0], "hp" in casts.outputs)
    warps, all_strips, wide = options["num_warps"], b * -(-r // bm), -(-c // bk)
    lanes = min(32, bk * itemsize // 16)
    parts = -(-wide // max(1, warps * _WARP_BYTES // (bm * bk * itemsize)))
    tiles = -(-wide // parts)
    if parts > _MAX_PARTS or all_strips * parts >= 2**31:
        return None
    constants = {
        "BM": bm, "BK": bk, "TILES": tiles, "PARTS": parts, "LAYER": layer, "RESIDUAL": flags[0], "WEIGHT": flags[1],
        "BIAS": flags[2], "HP": "hp" in casts.outputs, "ROUND": casts.round_first, **copies.constants,
        "WHOLE": r % bm == 0 and c == bk * tiles * parts, "BATCHED": b > 1,
        "LS": gl.BlockedLayout([1, 16 // itemsize], [32 // lanes, lanes], [warps, 1], [1, 0]),
        "L1": gl.BlockedLayout([1], [32], [warps], [0]),
        "LA": row_layout(bk, itemsize, warps),
        # A warp on all rows: the fewest statistics a thread. Swizzled so that the threads of a column meet other banks.
        "LB": gl.BlockedLayout([16, 2], [max(1, bm // 16), 32 // max(1, bm // 16)], [1, warps], [0, 1]),
        "HELD": gl.SwizzledSharedLayout(16 // itemsize, max(1, bm // 8), 8, [1, 0]),
    }  # fmt: skip
    padded = 0 if copies.across is None else copies.across.rows_padded
    ints = (r, c, padded, room(all_strips) // 2, *(n for s in strides for n in three_dims(shape, s)[1][:2]))
    return Plan(copies, shape, all_strips, (all_strips * parts, 1, 1), ints, constants, options)


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
    x, r = readable(x), None if residual is None else readable(residual)
    group, plan = group_of(norm, norm_block, x.shape[-1]), None
    if r is None or (r.dtype == x.dtype and r.data_ptr() % 16 == 0):
        flags = (r is not None, weight is not None, bias is not None)
        strides = (x.stride(), x.stride() if r is None else r.stride())
        if group:
            plan = _plan(x.shape, strides, x.itemsize, norm, norm_block, flags, False, casts)
        else:
            plan = _rows_plan(x.shape, strides, x.itemsize, norm == "layer", flags, casts)
    if plan is None or x.data_ptr() % 16:
        return portable.norm_quantize(x, weight, bias, residual, norm=norm, norm_block=norm_block, eps=eps, casts=casts)
    copies = plan.copies.allocate(x.device)
    h = x if r is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if "hp" in casts.outputs else None
    mean, rstd = statistics(x, norm, norm_block)
    inputs = (x, r, contiguous(weight), contiguous(bias))
    if group:
        run(_block_kernel, plan, inputs, (h, y, rstd, *copies), eps)
    else:
        parts = plan.constants["PARTS"]
        if parts == 1:
            run(forward_kernel, plan, inputs, (h, y, mean, rstd, None, None, None, *copies), eps)
        else:
            shared = torch.empty(plan.strips * parts * 2 * plan.constants["BM"], dtype=torch.float32, device=x.device)
            with zeros(plan.strips, x.device) as (counts, after):
                run(forward_kernel, plan, inputs, (h, y, mean, rstd, shared, counts, after, *copies), eps)
    return *as_elements(copies, casts.fmt, False), y, h, mean, rstd


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
    dw, db = (h.new_empty((plan.strips, h.shape[-1]), dtype=torch.float32) if f else None for f in flags[1:])
    inputs = (dy, h, contiguous(weight), contiguous(mean), rstd.contiguous(), dh)
    run(_backward_kernel, plan, inputs, (dx, dw, db, *copies))
    sums = (None if part is None else part.sum(0) for part in (dw, db))
    return *as_elements(copies, casts.fmt, False), dx, *sums
