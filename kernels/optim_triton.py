"""Optimiser steps that leave the updated weight quantised, in plain Triton.

A kernel reads a tile of parameter, gradient and state, writes the new ones, and casts the tile while it is still in
registers. Next to a step followed by a cast of its own this saves reading the weight again: 4 of 34 bytes an element
for AdamW in float32 with copies in both directions, and a launch for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import element_codes, encode, to_float32
from ._launch import aligned, launch, triton_why_not
from .dequantize_triton import narrow
from .quantize_triton import hardware, layout, quantize, readable, scaled_tile, three, three_dims

__all__ = ["adamw", "rowwise_adagrad", "why_not"]

Copies = list[tuple[torch.Tensor, torch.Tensor]]
_LARGEST_TILE = 128 * 128


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def _store_copy(
    x, q_ptr, s_ptr, b, pm, pk, R, C, PAD, q_b, q_r, q_c, s_b, s_r, s_c,
    RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, FLIP: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast a tile of float32 values (zero outside the weight) in blocks of ``RB`` by ``CB`` and store it; ``FLIP``
    where columns lie contiguous in memory."""
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    scaled, byte = scaled_tile(x, RB, CB, FMT, RULE, False)
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    if FLIP:
        # Turned before it is encoded: Triton 3.6 writes wrong bytes if one tensor of codes is stored in two layouts.
        scaled, rows, cols = tl.trans(scaled), tl.trans(rows), tl.trans(cols)
    # Padding rows are zero, in the last block of a column that is NaN as well.
    codes = tl.where(rows < R, encode(scaled, FMT, HARDWARE), 0)
    tl.store(q_ptr + b * q_b + rows * q_r + cols * q_c, codes, mask=(rows < PAD) & (cols < C))
    rows = (pm * (BM // RB) + tl.arange(0, BM // RB)).to(tl.int64)[:, None]
    cols = (pk * (BK // CB) + tl.arange(0, BK // CB)).to(tl.int64)[None, :]
    inside = (rows < tl.cdiv(R, RB)) & (cols < tl.cdiv(C, CB))
    tl.store(s_ptr + b * s_b + rows * s_r + cols * s_c, byte.to(tl.uint8), mask=inside)


@triton.jit
def _store_copies(
    x, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, Q_PAD, T_PAD, q_b, q_r, q_c, s_b, s_r, s_c,
    t_b, t_r, t_c, u_b, u_r, u_c, COPIES: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr,
    RULE: tl.constexpr, FLIP: tl.constexpr, TRB: tl.constexpr, TCB: tl.constexpr, TFMT: tl.constexpr,
    TRULE: tl.constexpr, TFLIP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """No copy, one (``q, s``), or two (``t, u`` in blocks of ``TRB`` by ``TCB``)."""
    if COPIES > 0:
        _store_copy(
            x, q_ptr, s_ptr, b, pm, pk, R, C, Q_PAD, q_b, q_r, q_c, s_b, s_r, s_c,
            RB, CB, FMT, RULE, FLIP, HARDWARE,
        )  # fmt: skip
    if COPIES > 1:
        _store_copy(
            x, t_ptr, u_ptr, b, pm, pk, R, C, T_PAD, t_b, t_r, t_c, u_b, u_r, u_c,
            TRB, TCB, TFMT, TRULE, TFLIP, HARDWARE,
        )  # fmt: skip


@triton.jit
def _load(ptr, at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return to_float32(tl.load(ptr + at))
    else:
        return to_float32(tl.load(ptr + at, mask=inside, other=0.0))


@triton.jit
def _store(ptr, at, x, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + at, x)
    else:
        tl.store(ptr + at, x, mask=inside)


@triton.jit
def _store_weight(p_ptr, w_ptr, at, p, inside, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Store the new weight, and return the values that a reader of it gets: zero outside."""
    low = narrow(p, p_ptr.dtype.element_ty)
    _store(p_ptr, at, low, inside, WHOLE)
    if MASTER:
        _store(w_ptr, at, p, inside, WHOLE)
    if WHOLE:
        return to_float32(low)
    else:
        return tl.where(inside, to_float32(low), 0.0)


@triton.jit
def _adamw_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, b, rows, cols, R, C, g_b, g_r, g_c, decay, rate, fresh, beta2, square, root, eps,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update the tile ``rows`` by ``cols``, and return the new weights as stored."""
    inside = (rows < R) & (cols < C)
    at = (b * R + rows) * C + cols
    g = _load(g_ptr, b * g_b + rows * g_r + cols * g_c, inside, WHOLE)
    if MAXIMIZE:
        g = -g
    m = _load(m_ptr, at, inside, WHOLE)
    # torch's lerp: of two forms the one that is exact at the nearer end.
    m = tl.where(fresh < 0.5, m + fresh * (g - m), g - (g - m) * (1.0 - fresh))
    _store(m_ptr, at, m, inside, WHOLE)
    v = _load(v_ptr, at, inside, WHOLE) * beta2 + square * g * g
    _store(v_ptr, at, v, inside, WHOLE)
    p = _load(w_ptr if MASTER else p_ptr, at, inside, WHOLE)
    p = p * decay - tl.div_rn(rate * m, tl.sqrt_rn(v) * root + eps)
    return _store_weight(p_ptr, w_ptr, at, p, inside, MASTER, WHOLE)


@triton.jit
def _adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, lr_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, g_b, g_r, g_c, Q_PAD, q_b, q_r, q_c, s_b, s_r, s_c, T_PAD, t_b, t_r, t_c, u_b, u_r, u_c,
    decay, rate, fresh, beta2, square, root, eps,
    BM: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr,
    RULE: tl.constexpr, FLIP: tl.constexpr, TRB: tl.constexpr, TCB: tl.constexpr, TFMT: tl.constexpr,
    TRULE: tl.constexpr, TFLIP: tl.constexpr,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, LR_TENSOR: tl.constexpr, HARDWARE: tl.constexpr, STRIP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of a contiguous ``[batch, R, C]`` weight, ``STRIP`` rows at a time; see :func:`adamw`."""
    if LR_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
        decay, rate = 1.0 - lr * decay, tl.div_rn(lr, rate)
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    if STRIP == BM:
        rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        x = _adamw_tile(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, b, rows, cols, R, C, g_b, g_r, g_c, decay, rate, fresh, beta2, square,
            root, eps, MASTER, MAXIMIZE, WHOLE,
        )  # fmt: skip
    else:
        # Four tensors of a large tile do not fit into registers. The new weight does, once it is all written: it is
        # read back from cache, by other threads than those that wrote it, hence the barrier.
        for i in range(BM // STRIP):
            rows = (pm * BM + i * STRIP + tl.arange(0, STRIP)).to(tl.int64)[:, None]
            _adamw_tile(
                p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, b, rows, cols, R, C, g_b, g_r, g_c, decay, rate, fresh, beta2,
                square, root, eps, MASTER, MAXIMIZE, WHOLE,
            )  # fmt: skip
        tl.debug_barrier()
        rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        x = _load(p_ptr, (b * R + rows) * C + cols, (rows < R) & (cols < C), WHOLE)
    _store_copies(
        x, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, Q_PAD, T_PAD, q_b, q_r, q_c, s_b, s_r, s_c,
        t_b, t_r, t_c, u_b, u_r, u_c, COPIES, RB, CB, FMT, RULE, FLIP, TRB, TCB, TFMT, TRULE, TFLIP, HARDWARE,
    )  # fmt: skip


@triton.jit
def _rowwise_adagrad_kernel(
    p_ptr, g_ptr, a_ptr, w_ptr, lr_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, g_b, g_r, g_c, Q_PAD, q_b, q_r, q_c, s_b, s_r, s_c, T_PAD, t_b, t_r, t_c, u_b, u_r, u_c,
    lr, eps, weight_decay,
    BM: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr,
    RULE: tl.constexpr, FLIP: tl.constexpr, TRB: tl.constexpr, TCB: tl.constexpr, TFMT: tl.constexpr,
    TRULE: tl.constexpr, TFLIP: tl.constexpr,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, LR_TENSOR: tl.constexpr, HARDWARE: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """``BM`` whole rows, ``BK`` columns at a time: their mean square, then the update (of what is still in cache)."""
    if LR_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    tiles_m = tl.cdiv(R, BM)
    pid = tl.program_id(0)
    b, pm = (pid // tiles_m).to(tl.int64), pid % tiles_m
    row = (pm * BM + tl.arange(0, BM)).to(tl.int64)
    rows, cols = row[:, None], tl.arange(0, BK).to(tl.int64)[None, :]
    at, g_at = (b * R + rows) * C + cols, b * g_b + rows * g_r
    old_ptr = w_ptr if MASTER else p_ptr
    sums = tl.zeros((BM,), tl.float32)
    for k in range(0, C, BK):
        inside = (rows < R) & (cols + k < C)
        g = _load(g_ptr, g_at + (cols + k) * g_c, inside, False)
        if MAXIMIZE:
            g = -g
        if DECAY:
            g += weight_decay * _load(old_ptr, at + k, inside, False)
        sums += tl.sum(g * g, axis=1)
    a_at = a_ptr + b * R + row
    total = tl.load(a_at, mask=row < R, other=0.0) + tl.div_rn(sums, tl.zeros((BM,), tl.float32) + C)
    tl.store(a_at, total, mask=row < R)
    rate = tl.div_rn(tl.zeros((BM,), tl.float32) + lr, tl.sqrt_rn(total) + eps)[:, None]
    for k in range(0, C, BK):
        inside = (rows < R) & (cols + k < C)
        g = _load(g_ptr, g_at + (cols + k) * g_c, inside, False)
        p = _load(old_ptr, at + k, inside, False)
        if MAXIMIZE:
            g = -g
        if DECAY:
            g += weight_decay * p
        x = _store_weight(p_ptr, w_ptr, at + k, p - g * rate, inside, MASTER, False)
        _store_copies(
            x, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pm * 0 + k // BK, R, C, Q_PAD, T_PAD, q_b, q_r, q_c, s_b, s_r, s_c,
            t_b, t_r, t_c, u_b, u_r, u_c, COPIES, RB, CB, FMT, RULE, FLIP, TRB, TCB, TFMT, TRULE, TFLIP, HARDWARE,
        )  # fmt: skip


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    *,
    step: int,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    casts: Sequence[Any],
) -> Copies:
    """AdamW on ``param``, in place; returns ``(qdata, scale bytes)`` of the updated parameter for each of ``casts``.

    Args as in ``mxfp8.reference.optim.adamw``; ``param`` and its states are contiguous, ``grad`` has any strides. A
    learning rate on the device stays there, so that a CUDA graph sees it change.

    **Numerics.** Float32, each operation rounded by itself: the bits depend neither on the GPU nor on the tile. They
    are not those of torch's kernels, which fuse a multiplication and an addition here and there. Copies are the bits of
    quantising ``param`` as it is stored.
    """
    _check("adamw", param, grad, exp_avg, exp_avg_sq, *([] if master is None else [master]))
    if param.numel() == 0:
        return _separate(param, casts)
    plan = _plan(param, casts)
    g, (bm, bk) = readable(grad), plan.tile
    (b, r, c), g_strides = three_dims(g.shape, g.stride())
    if not plan.fused:  # one long row
        (b, r, c), g_strides, g, (bm, bk) = (1, 1, param.numel()), (0, 0, 1), grad.contiguous(), (1, 4096)
    correction, root = 1 - beta1**step, (1 - beta2**step) ** 0.5
    on_device = isinstance(lr, torch.Tensor) and lr.is_cuda
    decay, rate = (weight_decay, correction) if on_device else (1 - float(lr) * weight_decay, float(lr) / correction)
    constants = {
        "BM": bm, "BK": bk, **plan.constants, "MASTER": master is not None, "MAXIMIZE": maximize,
        "LR_TENSOR": on_device, "HARDWARE": hardware(param.device),
        "STRIP": min(bm, max(1, 4096 // bk)), "WHOLE": r % bm == 0 and c % bk == 0,
    }  # fmt: skip
    tensors = (param, g, exp_avg, exp_avg_sq, param if master is None else master, lr if on_device else param)
    launch(
        _adamw_kernel,
        (*_key(tensors), b, r, c, g_strides, plan.strides, tuple(constants.values())),
        (b * -(-r // bm) * -(-c // bk), 1, 1),
        (
            *tensors, *plan.pointers, r, c, *g_strides, *plan.strides,
            decay, rate, 1 - beta1, beta2, 1 - beta2, 1 / root, eps,
        ),
        constants,
        param.device,
        num_warps=16 if bm * bk > 8192 and plan.fused > 1 else 8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return plan.copies + _separate(param, casts[plan.fused :])


def rowwise_adagrad(
    param: torch.Tensor,
    grad: torch.Tensor,
    accumulator: torch.Tensor,
    master: torch.Tensor | None,
    *,
    lr: float | torch.Tensor,
    eps: float,
    weight_decay: float,
    maximize: bool,
    casts: Sequence[Any],
) -> Copies:
    """Row-wise Adagrad on ``param[..., D]``, in place; returns copies as :func:`adamw`.

    Args as in ``mxfp8.reference.optim.rowwise_adagrad``, contiguous as for :func:`adamw`. A row is summed by one
    program, 128 columns at a time: the order, and so the bits, do not depend on the GPU.
    """
    _check("rowwise_adagrad", param, grad, accumulator, *([] if master is None else [master]))
    if param.numel() == 0:
        return _separate(param, casts)
    plan = _plan(param, casts, _LARGEST_TILE // 2)  # it holds weights and gradients at once: half as many fit
    g = readable(grad)
    (b, r, c), g_strides = three_dims(g.shape, g.stride())
    bm, bk = plan.tile if plan.fused else _rows_tile(r, c)
    on_device = isinstance(lr, torch.Tensor) and lr.is_cuda
    constants = {
        "BM": bm, "BK": bk, **plan.constants, "MASTER": master is not None, "MAXIMIZE": maximize,
        "LR_TENSOR": on_device, "HARDWARE": hardware(param.device),
        "DECAY": weight_decay != 0,
    }  # fmt: skip
    tensors = (param, g, accumulator, param if master is None else master, lr if on_device else param)
    launch(
        _rowwise_adagrad_kernel,
        (*_key(tensors), b, r, c, g_strides, plan.strides, tuple(constants.values())),
        (b * -(-r // bm), 1, 1),
        (
            *tensors, *plan.pointers, r, c, *g_strides, *plan.strides,
            0.0 if on_device else float(lr), eps, weight_decay,
        ),
        constants,
        param.device,
        num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return plan.copies + _separate(param, casts[plan.fused :])


@dataclass(frozen=True, slots=True)
class _Plan:
    """The first ``fused`` casts, which the step's kernel does: where they go, and what the kernel is told."""

    fused: int
    copies: Copies
    pointers: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    constants: dict[str, int]
    tile: tuple[int, int]


def _plan(param: torch.Tensor, casts: Sequence[Any], largest: int = _LARGEST_TILE) -> _Plan:
    """At most two casts, of which one tile of the weight, of ``largest`` elements, holds whole blocks."""
    layouts = [layout(tuple(param.shape), cast.axis, tuple(cast.block)) for cast in casts[:2]]
    tile = _tile([lay.rc for lay in layouts], param)
    # One square block both ways would be one tensor of codes stored in two layouts, which Triton 3.6 compiles wrongly.
    same = len(layouts) > 1 and layouts[0].rc == layouts[1].rc
    if len(layouts) > 1 and (same or tile[0] * tile[1] > largest):
        layouts = layouts[:1]
        tile = _tile([layouts[0].rc], param)
    copies, pointers, strides, constants = [], [param] * 4, [0] * 14, [1, 1, 0, 0, False] * 2
    for i, lay in enumerate(layouts):
        qdata, scale = lay.allocate(param.device)
        pointers[2 * i : 2 * i + 2] = qdata, scale
        strides[7 * i : 7 * i + 7] = lay.rows_padded, *three(lay.qdata_stride), *three(lay.scale_stride)
        kind = element_codes(casts[i].fmt, casts[i].scale_rule)
        constants[5 * i : 5 * i + 5] = *lay.rc, *kind, casts[i].axis == -2
        copies.append((qdata.view(casts[i].fmt.dtype), scale))
    names = ("RB", "CB", "FMT", "RULE", "FLIP", "TRB", "TCB", "TFMT", "TRULE", "TFLIP")
    named = {"COPIES": len(layouts), **dict(zip(names, constants, strict=True))}
    return _Plan(len(layouts), copies, tuple(pointers), tuple(strides), named, tile)


def _tile(blocks: list[tuple[int, int]], param: torch.Tensor) -> tuple[int, int]:
    """``(BM, BK)`` of whole blocks, about 4096 elements, and not much more than a small weight has."""
    r, c = (1, *param.shape)[-2:]
    bk = max([min(64, triton.next_power_of_2(c)), *(cols for _, cols in blocks)])
    return max([min(max(1, 4096 // bk), triton.next_power_of_2(r)), *(rows for rows, _ in blocks)]), bk


def _rows_tile(r: int, c: int) -> tuple[int, int]:
    bk = min(128, triton.next_power_of_2(c))
    return min(max(1, 2048 // bk), triton.next_power_of_2(r)), bk


def _separate(param: torch.Tensor, casts: Sequence[Any]) -> Copies:
    """Copies that did not fit into the step."""
    return [
        quantize(
            param, axis=c.axis, fmt=c.fmt, block=c.block, scale_rule=c.scale_rule, rounding="nearest", key=None,
            satfinite=False,
        )
        for c in casts
    ]  # fmt: skip


def _key(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return (*(t.dtype for t in tensors), aligned(*tensors))


def _check(op: str, param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor) -> None:
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{op} takes a float32, bfloat16 or float16 parameter, not {param.dtype}")
    if grad.shape != param.shape or grad.layout != torch.strided or grad.dtype == torch.float64:
        raise ValueError(
            f"{op}: grad is {grad.layout}, {grad.dtype} of shape {tuple(grad.shape)}; needed is a dense float32, "
            f"bfloat16 or float16 tensor of shape {tuple(param.shape)}"
        )
    if not all(t.is_contiguous() for t in (param, *states)) or any(s.dtype != torch.float32 for s in states):
        raise ValueError(f"{op} needs a contiguous parameter and contiguous float32 states")
