"""RMSNorm, LayerNorm and BlockNorm that end in MX casts, and their gradients, in plain Triton.

A program owns a strip of rows. It reads the strip once to sum over each row and again, from the cache, tile by tile, to
normalise and cast; memory sees the input once. Statistics of blocks of columns that fit a tile need no first pass.
Floating-point contraction is off: given the statistics that are returned, values are the reference's bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED, to_float32
from ._launch import triton_why_not
from ._parts import in_parts
from .activation_quantize_triton import Copies, Maybe, Plan, as_elements, run, store_copies, store_hp
from .dequantize_triton import narrow
from .quantize_triton import hardware, readable, three_dims

__all__ = ["norm_quantize", "norm_quantize_backward", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def load_sum(x_ptr, r_ptr, rows, cols, inside, x_r, x_c, r_r, r_c, RESIDUAL: tl.constexpr):
    """A tile of ``h`` as float32: ``x``, or ``x + residual`` rounded to the dtype of ``x``."""
    h = to_float32(tl.load(x_ptr + rows * x_r + cols * x_c, mask=inside, other=0.0))
    if RESIDUAL:
        h += to_float32(tl.load(r_ptr + rows * r_r + cols * r_c, mask=inside, other=0.0))
        h = to_float32(narrow(h, x_ptr.dtype.element_ty))
    return h


@triton.jit
def group_sums(x, G: tl.constexpr):
    """Sums of a tile ``[BM, BK]`` over groups of ``G`` columns, one to a group: ``[BM, BK // G]``."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // G, G)), axis=2)


@triton.jit
def spread(values, BK: tl.constexpr):
    """``[BM, groups]`` repeated over their columns: ``[BM, BK]``."""
    BM: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (BM, N, BK // N)), (BM, BK))


@triton.jit
def inverse_root(mean_square, eps):
    """``1 / sqrt(mean_square + eps)``, both operations correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))


@triton.jit
def add_moments(mean, squares, seen, x, inside, n):
    """Join the ``n`` columns of a tile to the mean and the sum of squared deviations of the ``seen`` ones before it
    (Chan, Golub, LeVeque 1979): no cancellation, whatever the mean."""
    its_mean = tl.sum(x, axis=1) / n
    deviation = tl.where(inside, x - its_mean[:, None], 0.0)
    delta = its_mean - mean
    share = n / (seen + n)
    squares += tl.sum(deviation * deviation, axis=1) + delta * delta * (seen * share)
    return mean + delta * share, squares


@triton.jit
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, x_b, x_r, x_c, r_b, r_r, r_c, eps,
    BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ONE: tl.constexpr, LAYER: tl.constexpr,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr, HP: tl.constexpr,
    ROUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr,
    TRB: tl.constexpr, TCB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """A strip of ``BM`` rows. ``GROUP``: columns that share a root mean square, 0 for all of a row. ``ONE``: a tile is
    as wide as a row, and stays in registers. ``GIVEN``: statistics are read, not found and written."""
    strips = tl.cdiv(R, BM)
    b = (tl.program_id(0) // strips).to(tl.int64)
    pm = tl.program_id(0) % strips
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    at_row = b * R + rows
    x_ptr += b * x_b
    r_ptr += b * r_b
    steps = tl.cdiv(C, BK)
    mean = tl.zeros((BM,), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    if ONE:
        cols = tl.arange(0, BK).to(tl.int64)[None, :]
        whole = load_sum(x_ptr, r_ptr, rows, cols, (rows < R) & (cols < C), x_r, x_c, r_r, r_c, RESIDUAL)
    if GROUP == 0 and GIVEN:
        rstd = tl.load(rstd_ptr + at_row, mask=rows < R, other=0.0)
        mean = mean[:, None]
        if LAYER:
            mean = tl.load(mean_ptr + at_row, mask=rows < R, other=0.0)
    elif GROUP == 0:
        for k in range(steps):
            cols = (k * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
            inside = (rows < R) & (cols < C)
            if ONE:
                h = whole
            else:
                h = load_sum(x_ptr, r_ptr, rows, cols, inside, x_r, x_c, r_r, r_c, RESIDUAL)
            if LAYER:
                n = tl.minimum(C - k * BK, BK) * 1.0
                mean, squares = add_moments(mean, squares, k * BK * 1.0, h, inside, n)
            else:
                squares += tl.sum(h * h, axis=1)
        rstd = inverse_root(squares / C, eps)[:, None]
        mean = mean[:, None]
        tl.store(rstd_ptr + at_row, rstd, mask=rows < R)
        if LAYER:
            tl.store(mean_ptr + at_row, mean, mask=rows < R)
    for k in range(steps):
        cols = (k * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
        inside = (rows < R) & (cols < C)
        if ONE:
            h = whole
        else:
            h = load_sum(x_ptr, r_ptr, rows, cols, inside, x_r, x_c, r_r, r_c, RESIDUAL)
        if RESIDUAL:
            tl.store(h_ptr + at_row * C + cols, narrow(h, x_ptr.dtype.element_ty), mask=inside)
        if GROUP > 0:
            group = k * (BK // GROUP) + tl.arange(0, BK // GROUP)[None, :]
            groups = tl.cdiv(C, GROUP)
            at, exists = rstd_ptr + at_row * groups + group, (rows < R) & (group < groups)
            if GIVEN:
                factor = tl.load(at, mask=exists, other=0.0)
            else:
                size = tl.minimum(tl.maximum(C - group * GROUP, 1), GROUP).to(tl.float32)
                factor = inverse_root(group_sums(h * h, GROUP) / size, eps)
                tl.store(at, factor, mask=exists)
            y = h * spread(factor, BK)
        elif LAYER:
            y = (h - mean) * rstd
        else:
            y = h * rstd
        if WEIGHT:
            y *= to_float32(tl.load(w_ptr + cols, mask=cols < C, other=0.0))
        if BIAS:
            y += to_float32(tl.load(bias_ptr + cols, mask=cols < C, other=0.0))
        y = tl.where(inside, y, 0.0)
        y = store_hp(y, y_ptr, at_row * C + cols, inside, HP, ROUND)
        store_copies(
            y, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, k, R, C, R_PAD, 0, C, ROWS, COLUMNS, RB, CB, TRB, TCB, FMT, RULE,
            SATFINITE, HARDWARE,
        )  # fmt: skip


@triton.jit
def load_gradient(dy_ptr, h_ptr, w_ptr, rows, cols, inside, known, dy_r, dy_c, h_r, h_c, WEIGHT: tl.constexpr):
    """Tiles of ``dy``, ``dy * weight`` and ``h``, as float32."""
    dy = to_float32(tl.load(dy_ptr + rows * dy_r + cols * dy_c, mask=inside, other=0.0))
    h = to_float32(tl.load(h_ptr + rows * h_r + cols * h_c, mask=inside, other=0.0))
    if WEIGHT:
        return dy, dy * to_float32(tl.load(w_ptr + cols, mask=known, other=0.0)), h
    else:
        return dy, dy, h


@triton.jit
def _backward_kernel(
    dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dh_ptr, dx_ptr, dw_ptr, db_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, h_b, h_r, h_c, dy_b, dy_r, dy_c, dh_b, dh_r, dh_c,
    BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ONE: tl.constexpr, LAYER: tl.constexpr,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, HP: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TRB: tl.constexpr,
    TCB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A strip of ``BM`` rows. ``RESIDUAL``: ``dh`` is added to the result. ``WEIGHT`` and ``BIAS``: the strip's column
    sums of ``dy * normalised`` and of ``dy`` go to its row of ``dw`` and ``db``."""
    strips = tl.cdiv(R, BM)
    strip = tl.program_id(0).to(tl.int64)
    b = strip // strips
    pm = tl.program_id(0) % strips
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    at_row = b * R + rows
    dy_ptr += b * dy_b
    h_ptr += b * h_b
    steps = tl.cdiv(C, BK)
    mean = tl.zeros((BM, 1), tl.float32)
    along = tl.zeros((BM,), tl.float32)
    constant = tl.zeros((BM,), tl.float32)
    if GROUP == 0:
        rstd = tl.load(rstd_ptr + at_row, mask=rows < R, other=0.0)
        if LAYER:
            mean = tl.load(mean_ptr + at_row, mask=rows < R, other=0.0)
        for k in range(steps):
            cols = (k * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
            inside = (rows < R) & (cols < C)
            _, g, h = load_gradient(dy_ptr, h_ptr, w_ptr, rows, cols, inside, cols < C, dy_r, dy_c, h_r, h_c, WEIGHT)
            along += tl.sum(g * ((h - mean) * rstd), axis=1)
            if LAYER:
                constant += tl.sum(g, axis=1)
        along /= C
        constant /= C
    for k in range(steps):
        cols = (k * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
        inside = (rows < R) & (cols < C)
        dy, g, h = load_gradient(dy_ptr, h_ptr, w_ptr, rows, cols, inside, cols < C, dy_r, dy_c, h_r, h_c, WEIGHT)
        if GROUP > 0:
            group = k * (BK // GROUP) + tl.arange(0, BK // GROUP)[None, :]
            size = tl.minimum(tl.maximum(C - group * GROUP, 1), GROUP).to(tl.float32)
            groups = tl.cdiv(C, GROUP)
            known = (rows < R) & (group < groups)
            factor = spread(tl.load(rstd_ptr + at_row * groups + group, mask=known, other=0.0), BK)
            normed = h * factor
            dx = factor * (g - normed * spread(group_sums(g * normed, GROUP) / size, BK))
        else:
            normed = (h - mean) * rstd
            dx = g - normed * along[:, None]
            if LAYER:
                dx -= constant[:, None]
            dx = rstd * dx
        if RESIDUAL:
            dx += to_float32(tl.load(dh_ptr + b * dh_b + rows * dh_r + cols * dh_c, mask=inside, other=0.0))
        dx = tl.where(inside, dx, 0.0)
        if WEIGHT:
            tl.store(dw_ptr + strip * C + cols, tl.sum(dy * normed, axis=0)[None, :], mask=cols < C)
        if BIAS:
            tl.store(db_ptr + strip * C + cols, tl.sum(dy, axis=0)[None, :], mask=cols < C)
        dx = store_hp(dx, dx_ptr, at_row * C + cols, inside, HP, ROUND)
        store_copies(
            dx, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, k, R, C, R_PAD, 0, C, ROWS, COLUMNS, RB, CB, TRB, TCB, FMT, RULE,
            SATFINITE, HARDWARE,
        )  # fmt: skip


def group_of(norm: str, norm_block: int, width: int) -> int:
    """``GROUP``: the columns that share statistics where they are fewer than all, else 0."""
    return norm_block if norm == "block" and norm_block < width else 0


def tile(copies: Copies, width: int, group: int) -> tuple[int, int, int]:
    """``(BM, BK, warps)``: with columns the fewest rows that hold their blocks, else few rows and wide tiles."""
    rows, cols = max((b[0] for b in copies.blocks), default=1), max((b[1] for b in copies.blocks), default=1)
    if INTERPRETED:  # a program costs more than its elements
        return max(rows, 64), max(cols, 128, group), 4
    if copies.across is None:
        bk = max(cols, group, min(4096 // rows, triton.next_power_of_2(width)))
        bm = max(rows, min(16, 4096 // bk), 1)
    else:
        bm = max(32, rows)
        bk = max(min(128, 8192 // bm), cols, group)
    few = copies.across is None and rows == 1  # a sum over rows in few threads takes fewer steps
    return bm, bk, max(4, min(16, bm * bk // (1024 if few else 512)))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], norm: str, norm_block: int, flags: tuple[bool, ...],
    casts: Any, hardware: bool,
) -> Plan:  # fmt: skip
    """``strides`` of each input with rows; ``flags``: has a residual, a weight, a bias; forward also statistics."""
    copies, group = Copies.of(shape, casts, hardware), group_of(norm, norm_block, shape[-1])
    b, r, c = three_dims(shape, strides[0])[0]
    bm, bk, warps = tile(copies, c, group)
    constants = {
        "BM": bm, "BK": bk, "GROUP": group, "ONE": c <= bk, "LAYER": norm == "layer",
        **dict(zip(("RESIDUAL", "WEIGHT", "BIAS", "GIVEN"), flags, strict=False)), "HP": "hp" in casts.outputs,
        "ROUND": casts.round_first, **copies.constants,
    }  # fmt: skip
    ints = (
        r,
        c,
        copies.across.rows_padded if copies.across else 0,
        *(n for s in strides for n in three_dims(shape, s)[1]),
    )
    strips = b * -(-r // bm)
    return Plan(copies, shape, strips, (strips, 1, 1), ints, constants, {"num_warps": warps})


def statistics(x: torch.Tensor, norm: str, norm_block: int) -> tuple[Maybe, torch.Tensor]:
    """Memory for ``mean`` (None unless needed) and ``rstd``: ``[..., groups]`` in float32."""
    group = group_of(norm, norm_block, x.shape[-1]) or max(1, x.shape[-1])
    rstd = torch.empty((*x.shape[:-1], -(-x.shape[-1] // group)), dtype=torch.float32, device=x.device)
    return (torch.empty_like(rstd) if norm == "layer" else None), rstd


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
    compute = functools.partial(_forward, x, weight, bias, residual, norm, norm_block, eps)
    return in_parts(compute, casts, x.dtype, group_of(norm, norm_block, x.shape[-1]))


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
    compute = functools.partial(_backward, dy, h, weight, mean, rstd, dh, norm, norm_block, with_bias)
    return in_parts(compute, casts, h.dtype, group_of(norm, norm_block, h.shape[-1]))


def _forward(
    x: torch.Tensor, weight: Maybe, bias: Maybe, residual: Maybe, norm: str, norm_block: int, eps: float, casts: Any,
    first: tuple[Any, ...] | None = None, dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """With the result of a ``first`` launch its sum and its statistics are used, so that copies agree to the bit."""
    if first is not None:
        x, residual = first[5], None
    x, r = readable(x), None if residual is None else readable(residual)
    weight, bias = contiguous(weight), contiguous(bias)
    flags = (r is not None, weight is not None, bias is not None, first is not None)
    strides = (x.stride(), x.stride() if r is None else r.stride())
    plan = _plan(x.shape, strides, norm, norm_block, flags, casts, hardware(x.device))
    copies = plan.copies.allocate(x.device)
    h = x if r is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) if "hp" in casts.outputs else None
    mean, rstd = statistics(x, norm, norm_block) if first is None else first[6:8]
    if x.numel():
        run(_forward_kernel, plan, (x, r, weight, bias), (h, y, mean, rstd, *copies), eps)
    return *as_elements(copies, casts.fmt, x.numel() == 0), y, h, mean, rstd


def _backward(
    dy: torch.Tensor, h: torch.Tensor, weight: Maybe, mean: Maybe, rstd: torch.Tensor, dh: Maybe, norm: str,
    norm_block: int, with_bias: bool, casts: Any, first: object = None, dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    dy, h, dh = readable(dy), readable(h), None if dh is None else readable(dh)
    weight, mean, rstd = contiguous(weight), contiguous(mean), rstd.contiguous()
    strides = (h.stride(), dy.stride(), h.stride() if dh is None else dh.stride())
    flags = (dh is not None, weight is not None, with_bias)
    plan = _plan(h.shape, strides, norm, norm_block, flags, casts, hardware(h.device))
    copies = plan.copies.allocate(h.device)
    dx = torch.empty(h.shape, dtype=dtype or h.dtype, device=h.device) if "hp" in casts.outputs else None
    dw, db = (h.new_empty((plan.strips, h.shape[-1]), dtype=torch.float32) if f else None for f in flags[1:])
    if h.numel():
        run(_backward_kernel, plan, (dy, h, weight, mean, rstd, dh), (dx, dw, db, *copies))
    sums = (None if part is None else part.sum(0) for part in (dw, db))
    return *as_elements(copies, casts.fmt, h.numel() == 0), dx, *sums


def contiguous(x: Maybe) -> Maybe:
    return None if x is None else x.contiguous()
