"""Activations that end in MX casts, and their gradients, in plain Triton: one pass over memory.

A tile is loaded once, its value computed in float32 and cast along rows, along columns, to the input's dtype, or all of
these. Floating-point contraction is off, so that every operation is the reference's.

:class:`Copies` and :func:`store_copies` are what the kernels of ``norm_quantize`` share with these.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED, element_codes, encode, to_float32
from ._launch import Versions, aligned, launch_version, triton_why_not
from ._parts import in_parts
from .dequantize_triton import narrow
from .quantize_triton import Layout, hardware, layout, readable, scaled_tile, three_dims

__all__ = ["activation_quantize", "activation_quantize_backward", "why_not"]

ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "hardswish": 4, "swiglu": 5}
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_TANH_1 = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_TANH_3 = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
_TANH_9 = tl.constexpr(3.0 * (2.0 * math.sqrt(2.0 / math.pi) * 0.044715))
_MINUS_LOG2E = tl.constexpr(-1.0 / math.log(2.0))
_SIXTH = tl.constexpr(1.0 / 6.0)
_THIRD = tl.constexpr(1.0 / 3.0)

Maybe = torch.Tensor | None


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def logistic_denominator(z, HARDWARE: tl.constexpr):
    """``1 + exp(-z)``. The hardware's power of two without care for subnormals costs one instruction instead of four,
    and they vanish beside 1."""
    if HARDWARE:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * _MINUS_LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp(-z)
    return 1.0 + power


@triton.jit
def over(x, denominator, HARDWARE: tl.constexpr):
    """``x / denominator`` for a denominator of at least 1; the hardware's reciprocal is 0 from 2**126 on."""
    if HARDWARE:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x / denominator


@triton.jit
def activate(x, ACT: tl.constexpr, HARDWARE: tl.constexpr):
    """The activation of float32 ``x``, in the reference's order of operations. 5 (swiglu) is made of two tiles."""
    if ACT == 0:
        return tl.where(x <= 0.0, 0.0, x)
    elif ACT == 1:
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACT == 2:
        return over(x, logistic_denominator(x * (_TANH_1 + _TANH_3 * (x * x)), HARDWARE), HARDWARE)
    elif ACT == 3:
        return over(x, logistic_denominator(x, HARDWARE), HARDWARE)
    else:
        return tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, x, x * ((x + 3.0) * _SIXTH)))


@triton.jit
def gradient(x, dy, ACT: tl.constexpr, HARDWARE: tl.constexpr):
    """``act'(x) * dy`` in float32."""
    if ACT == 0:
        return tl.where(x <= 0.0, 0.0, dy)
    elif ACT == 1:
        density = tl.exp(-0.5 * (x * x)) * _DENSITY
        return dy * (0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * density)
    elif ACT == 2:
        s = over(1.0, logistic_denominator(x * (_TANH_1 + _TANH_3 * (x * x)), HARDWARE), HARDWARE)
        return dy * (s + x * (s * (1.0 - s)) * (_TANH_1 + _TANH_9 * (x * x)))
    elif ACT == 3:
        s = over(1.0, logistic_denominator(x, HARDWARE), HARDWARE)
        return dy * (s * (1.0 + x * (1.0 - s)))
    else:
        return tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, dy, dy * (x * _THIRD + 0.5)))


@triton.jit
def _store_scales(s_ptr, byte, pm, pk, height, width, s_r, s_c):
    rows = (tl.arange(0, byte.shape[0]) + pm * byte.shape[0]).to(tl.int64)[:, None]
    cols = (tl.arange(0, byte.shape[1]) + pk * byte.shape[1]).to(tl.int64)[None, :]
    tl.store(s_ptr + rows * s_r + cols * s_c, byte.to(tl.uint8), mask=(rows < height) & (cols < width))


@triton.jit
def store_copies(
    y, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, FIRST, PITCH,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TRB: tl.constexpr,
    TCB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast tile ``(pm, pk)`` of float32 values, zero where it sticks out of ``[R, C]``, and store the copies asked for.

    The ``C`` columns are those from ``FIRST`` on of a result with ``PITCH`` columns; no block lies across ``FIRST``.
    Memory is as :class:`mxfp8.kernels.quantize_triton.Layout` allocates it.
    """
    rows = (tl.arange(0, y.shape[0]) + pm * y.shape[0]).to(tl.int64)[:, None]
    cols = (tl.arange(0, y.shape[1]) + pk * y.shape[1]).to(tl.int64)[None, :]
    if ROWS:
        scaled, byte = scaled_tile(y, RB, CB, FMT, RULE, SATFINITE)
        codes = encode(scaled, FMT, HARDWARE)
        tl.store(q_ptr + (b * R + rows) * PITCH + FIRST + cols, codes, mask=(rows < R) & (cols < C))
        height = tl.cdiv(R, RB)
        s_at = s_ptr + (b * tl.cdiv(PITCH, CB) + FIRST // CB) * height
        _store_scales(s_at, byte, pm, pk, height, tl.cdiv(C, CB), 1, height)
    if COLUMNS:
        scaled, byte = scaled_tile(y, TRB, TCB, FMT, RULE, SATFINITE)
        codes = encode(scaled, FMT, HARDWARE)
        codes = tl.where(rows < R, codes, 0).to(tl.uint8)  # padding is zero, in a NaN block as well
        tl.store(t_ptr + (b * PITCH + FIRST + cols) * R_PAD + rows, codes, mask=(rows < R_PAD) & (cols < C))
        height, width = tl.cdiv(R, TRB), tl.cdiv(PITCH, TCB)
        _store_scales(u_ptr + b * height * width + FIRST // TCB, byte, pm, pk, height, tl.cdiv(C, TCB), width, 1)


@triton.jit
def _load(x_ptr, bias_ptr, rows, cols, inside, known, x_r, x_c, BIAS: tl.constexpr):
    x = to_float32(tl.load(x_ptr + rows * x_r + cols * x_c, mask=inside, other=0.0))
    if BIAS:
        x += to_float32(tl.load(bias_ptr + cols, mask=known, other=0.0))
    return x


@triton.jit
def store_hp(y, y_ptr, where, inside, HP: tl.constexpr, ROUND: tl.constexpr):
    """Store ``y`` (float32) in its output's dtype if ``HP``; the value to cast, which is rounded to it if ``ROUND``."""
    if HP or ROUND:
        low = narrow(y, y_ptr.dtype.element_ty)
        if HP:
            tl.store(y_ptr + where, low, mask=inside)
        if ROUND:
            y = to_float32(low)
    return y


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r, x_c,
    BM: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, HP: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TRB: tl.constexpr,
    TCB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of the result; for swiglu the second operand lies ``C`` columns to the right."""
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    inside = (rows < R) & (cols < C)
    x_ptr += b * x_b
    x = _load(x_ptr, bias_ptr, rows, cols, inside, cols < C, x_r, x_c, BIAS)
    if ACT == 5:
        y = activate(x, 3, HARDWARE) * _load(x_ptr, bias_ptr, rows, cols + C, inside, cols < C, x_r, x_c, BIAS)
    else:
        y = activate(x, ACT, HARDWARE)
    y = tl.where(inside, y, 0.0)  # a bias makes something of nothing
    y = store_hp(y, y_ptr, (b * R + rows) * C + cols, inside, HP, ROUND)
    store_copies(
        y, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, 0, C, ROWS, COLUMNS, RB, CB, TRB, TCB, FMT, RULE,
        SATFINITE, HARDWARE,
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, sum_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r, x_c, dy_b, dy_r, dy_c,
    BM: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, HP: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TRB: tl.constexpr,
    TCB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of ``dy``: the tile of ``dx``, or for swiglu two tiles ``C`` columns apart. With ``BIAS``
    the column sums of the tile go to row ``b * tiles + pm`` of ``sum``."""
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    inside = (rows < R) & (cols < C)
    x_ptr += b * x_b
    x = _load(x_ptr, bias_ptr, rows, cols, inside, cols < C, x_r, x_c, BIAS)
    dy = to_float32(tl.load(dy_ptr + b * dy_b + rows * dy_r + cols * dy_c, mask=inside, other=0.0))
    HALVES: tl.constexpr = 2 if ACT == 5 else 1
    for half in tl.static_range(HALVES):
        if ACT != 5:
            dx = gradient(x, dy, ACT, HARDWARE)
        elif half == 0:
            dx = gradient(x, dy * _load(x_ptr, bias_ptr, rows, cols + C, inside, cols < C, x_r, x_c, BIAS), 3, HARDWARE)
        else:
            dx = dy * activate(x, 3, HARDWARE)
        dx = tl.where(inside, dx, 0.0)
        first, pitch = half * C, HALVES * C
        if BIAS:
            at = sum_ptr + (pid // tiles_k).to(tl.int64) * pitch + first + cols
            tl.store(at, tl.sum(dx, axis=0)[None, :], mask=cols < C)
        dx = store_hp(dx, dx_ptr, (b * R + rows) * pitch + first + cols, inside, HP, ROUND)
        store_copies(
            dx, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, pk, R, C, R_PAD, first, pitch, ROWS, COLUMNS, RB, CB, TRB, TCB, FMT,
            RULE, SATFINITE, HARDWARE,
        )  # fmt: skip


class Copies(NamedTuple):
    """The MX copies that a kernel makes of a result: their layouts (None: not asked for) and their constants."""

    along: Layout | None
    across: Layout | None
    constants: dict[str, Any]

    @staticmethod
    def of(shape: tuple[int, ...], casts: Any, hardware: bool) -> Copies:
        fmt, rule = element_codes(casts.fmt, casts.scale_rule)
        along = layout(shape, -1, casts.block) if "rows" in casts.outputs else None
        across = layout(shape, -2, casts.column_block) if "columns" in casts.outputs else None
        (rb, cb), (trb, tcb) = along.rc if along else (1, 32), across.rc if across else (32, 1)
        constants = {
            "ROWS": along is not None, "COLUMNS": across is not None, "RB": rb, "CB": cb, "TRB": trb, "TCB": tcb,
            "FMT": fmt, "RULE": rule, "SATFINITE": casts.satfinite, "HARDWARE": hardware,
        }  # fmt: skip
        return Copies(along, across, constants)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Blocks as (rows, columns) that have to lie inside a tile."""
        return [part.rc for part in (self.along, self.across) if part is not None]

    def allocate(self, device: torch.device) -> list[Maybe]:
        """``[q, s, t, u]``, uninitialised bytes; None where not asked for."""
        out: list[Maybe] = []
        for part in (self.along, self.across):
            out += part.allocate(device) if part is not None else (None, None)
        return out


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Everything about a launch but the tensors: a pure function of their shapes, strides and dtypes."""

    copies: Copies
    shape: tuple[int, ...]
    strips: int  # rows of tiles, of all matrices: each has its own sums over columns
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]
    versions: Versions = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], dy_strides: tuple[int, ...] | None, bias: bool, activation: str,
    casts: Any, hardware: bool,
) -> Plan:  # fmt: skip
    """For ``x`` of ``shape``; with ``dy_strides`` the plan of the backward pass, whose result has that shape too."""
    width = shape[-1] // (2 if activation == "swiglu" else 1)
    result = (*shape[:-1], width) if dy_strides is None else shape
    copies = Copies.of(result, casts, hardware)
    (b, r, _), x_strides = three_dims(shape, strides)
    bm, bk, warps = tile(copies)
    constants = {
        "BM": bm, "BK": bk, "ACT": ACTIVATIONS[activation], "BIAS": bias, "HP": "hp" in casts.outputs,
        "ROUND": casts.round_first, **copies.constants,
    }  # fmt: skip
    more = () if dy_strides is None else three_dims((*shape[:-1], width), dy_strides)[1]
    ints = (r, width, copies.across.rows_padded if copies.across else 0, *x_strides, *more)
    strips = b * -(-r // bm)
    return Plan(copies, result, strips, (strips * -(-width // bk), 1, 1), ints, constants, {"num_warps": warps})


def tile(copies: Copies) -> tuple[int, int, int]:
    """``(BM, BK, warps)``: about 4096 elements, more where a block asks for it."""
    rows, cols = max((b[0] for b in copies.blocks), default=1), max((b[1] for b in copies.blocks), default=1)
    if INTERPRETED:  # a program costs more than its elements
        return max(rows, 64), max(cols, 128), 4
    bm = max(rows, 32)
    bk = max(cols, min(64, 8192 // bm) if copies.across else 128)
    if copies.across is None:
        bm = max(rows, 4096 // bk)
    tall = copies.along is not None and copies.along.rc[0] > 1
    return bm, bk, 4 if copies.across is None and rows == 1 else max(8 if tall else 4, bm * bk // 512)


def run(
    kernel: Any, plan: Plan, inputs: tuple[Maybe, ...], outputs: tuple[Maybe, ...], *floats: float
) -> None:  # fmt: skip
    """Launch ``kernel`` on ``inputs``, ``outputs`` and the plan's numbers; a None is a pointer that it does not use."""
    some = next(x for x in inputs if x is not None)
    pointers = [some if x is None else x for x in (*inputs, *outputs)]
    launch_version(
        kernel,
        plan.versions,
        (*(x.dtype for x in pointers), aligned(*pointers)),
        plan.grid,
        (*pointers, *plan.ints, *floats),
        plan.constants,
        some.device,
        enable_fp_fusion=False,
        **plan.options,
    )


def as_elements(copies: list[Maybe], fmt: Any, clear: bool) -> tuple[Maybe, Maybe, Maybe, Maybe]:
    """``(q, s, t, u)`` with elements in their dtype; ``clear`` zeroes the scales of a result without elements."""
    q, s, t, u = copies
    for scale in (s, u) if clear else ():
        if scale is not None:
            scale.zero_()
    return None if q is None else q.view(fmt.dtype), s, None if t is None else t.view(fmt.dtype), u


def activation_quantize(
    x: torch.Tensor, bias: torch.Tensor | None, *, activation: str, casts: Any
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """Contract in ``mxfp8.reference.fused.activation_quantize``."""
    return in_parts(functools.partial(_forward, x, bias, activation), casts, x.dtype)


def activation_quantize_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, *, activation: str, casts: Any
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]:
    """Contract in ``mxfp8.reference.fused.activation_quantize_backward``."""
    apart = activation != "swiglu" or halves_apart(dy.shape[-1], casts)
    return in_parts(functools.partial(_backward, dy, x, bias, activation), casts, x.dtype, apart=apart)


def _forward(
    x: torch.Tensor, bias: Maybe, activation: str, casts: Any, first: object = None, dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    x, bias = readable(x), None if bias is None else bias.contiguous()
    plan = _plan(x.shape, x.stride(), None, bias is not None, activation, casts, hardware(x.device))
    copies = plan.copies.allocate(x.device)
    y = torch.empty(plan.shape, dtype=dtype or x.dtype, device=x.device) if "hp" in casts.outputs else None
    if x.numel():
        run(_forward_kernel, plan, (x, bias), (y, *copies))
    return *as_elements(copies, casts.fmt, x.numel() == 0), y


def _backward(
    dy: torch.Tensor, x: torch.Tensor, bias: Maybe, activation: str, casts: Any, first: object = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    x, dy, bias = readable(x), readable(dy), None if bias is None else bias.contiguous()
    plan = _plan(x.shape, x.stride(), dy.stride(), bias is not None, activation, casts, hardware(x.device))
    copies = plan.copies.allocate(x.device)
    dx = torch.empty(plan.shape, dtype=dtype or x.dtype, device=x.device) if "hp" in casts.outputs else None
    sums = None if bias is None else x.new_empty((plan.strips, x.shape[-1]), dtype=torch.float32)
    if x.numel():
        run(_backward_kernel, plan, (dy, x, bias), (dx, sums, *copies))
    return *as_elements(copies, casts.fmt, x.numel() == 0), dx, None if sums is None else sums.sum(0)


def halves_apart(width: int, casts: Any) -> bool:
    """Whether no block of the gradient of swiglu lies in ``gate`` and in ``up``."""
    extents = {"rows": casts.block[1], "columns": casts.column_block[0], "hp": 1}
    return all(width % extents[name] == 0 for name in casts.outputs)
