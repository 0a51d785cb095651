"""Block quantisation in plain Triton: any float dtype, strides, block, scale rule and rounding.

One kernel reads a tile, finds the scale byte of each block in it and writes elements and bytes. Elements are laid out
so that the scaled axis is contiguous, as a GEMM that contracts over it wants them; scales so that the other one is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import (
    INTERPRETED,
    abs_bits,
    compiles_float8,
    element_codes,
    encode,
    inverse_scale,
    rounded_by_chance,
    scale_byte,
    to_float32,
)
from ._launch import Versions, empty, launch_version, triton_why_not

__all__ = ["quantize", "quantize_both", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def scaled_tile(x, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr):
    """``(x * 2**(127 - byte), byte)`` of a float32 tile ``[BM, BK]`` in blocks of ``RB`` rows by ``CB`` columns."""
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    if RB == 1:
        blocks = tl.reshape(x, (BM, BK // CB, CB))
        byte = scale_byte(tl.max(abs_bits(blocks), axis=2), FMT, RULE, SATFINITE)
        scaled = blocks * inverse_scale(byte)[:, :, None]
    elif CB == 1:
        blocks = tl.reshape(x, (BM // RB, RB, BK))
        byte = scale_byte(tl.max(abs_bits(blocks), axis=1), FMT, RULE, SATFINITE)
        scaled = blocks * inverse_scale(byte)[:, None, :]
    else:
        blocks = tl.reshape(x, (BM // RB, RB, BK // CB, CB))
        byte = scale_byte(tl.max(tl.max(abs_bits(blocks), axis=3), axis=1), FMT, RULE, SATFINITE)
        scaled = blocks * inverse_scale(byte)[:, None, :, None]
    return tl.reshape(scaled, (BM, BK)), byte


@triton.jit
def _store_scales(
    s_ptr, byte, b, pm, pk, R, C, s_b, s_r, s_c, BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr
):
    rows = (pm * (BM // RB) + tl.arange(0, BM // RB)).to(tl.int64)[:, None]
    cols = (pk * (BK // CB) + tl.arange(0, BK // CB)).to(tl.int64)[None, :]
    inside = (rows < tl.cdiv(R, RB)) & (cols < tl.cdiv(C, CB))
    tl.store(s_ptr + b * s_b + rows * s_r + cols * s_c, byte.to(tl.uint8), mask=inside)


@triton.jit
def _load(x_ptr, b, rows, cols, R, C, x_b, x_r, x_c, WHOLE: tl.constexpr):
    where = x_ptr + b * x_b + rows * x_r + cols * x_c
    # Arithmetic on bfloat16 is wrong in the interpreter, and float16 is too narrow to scale: float32 from here on.
    if WHOLE:
        return to_float32(tl.load(where))
    return to_float32(tl.load(where, mask=(rows < R) & (cols < C), other=0.0))


@triton.jit
def _store_codes(
    scaled, q_ptr, step_ptr, b, rows, col, cols, R, C, R_PAD, q_b, q_r, q_c, seed_lo, seed_hi, step, stream,
    row_offset, col_offset, FMT: tl.constexpr, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Round scaled values (float32) at these rows and columns (``col``: the first), and store their codes."""
    if ROUNDING > 0:
        scaled = rounded_by_chance(
            scaled, step_ptr, seed_lo, seed_hi, step, stream, row_offset + b * R + rows, col_offset + col, FMT, ROUNDING
        )
    codes = encode(scaled, FMT, HARDWARE)
    where = q_ptr + b * q_b + rows * q_r + cols * q_c
    if WHOLE:
        tl.store(where, codes)
    else:
        # Padding rows are zero, in the last block of a column that is NaN as well.
        tl.store(where, tl.where(rows < R, codes, 0), mask=(rows < R_PAD) & (cols < C))


@triton.jit(do_not_specialize=["seed_lo", "seed_hi", "step", "stream", "row_offset", "col_offset"])
def _quantize_kernel(
    x_ptr, q_ptr, s_ptr, step_ptr, R, C, R_PAD, x_b, x_r, x_c, q_b, q_r, q_c, s_b, s_r, s_c,
    seed_lo: tl.int64, seed_hi: tl.int64, step: tl.int64, stream: tl.int64, row_offset: tl.int64, col_offset: tl.int64,
    BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr,
    SATFINITE: tl.constexpr, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]``. ``ROUNDING``: of :func:`random_of`. With ``STRIP`` below ``BM`` = ``RB`` it is read twice,
    that many rows at a time: for maxima, then to be cast."""
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    if STRIP == BM:
        rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        x = _load(x_ptr, b, rows, cols, R, C, x_b, x_r, x_c, WHOLE)
        scaled, byte = scaled_tile(x, RB, CB, FMT, RULE, SATFINITE)
        _store_codes(
            scaled, q_ptr, step_ptr, b, rows, pk * BK, cols, R, C, R_PAD, q_b, q_r, q_c, seed_lo, seed_hi, step,
            stream, row_offset, col_offset, FMT, ROUNDING, HARDWARE, WHOLE,
        )  # fmt: skip
    else:
        largest = tl.zeros((1, BK // CB), tl.int32)
        for i in range(BM // STRIP):
            rows = (pm * BM + i * STRIP + tl.arange(0, STRIP)).to(tl.int64)[:, None]
            x = _load(x_ptr, b, rows, cols, R, C, x_b, x_r, x_c, WHOLE)
            bits = tl.reshape(abs_bits(x), (1, STRIP, BK // CB, CB))
            largest = tl.maximum(largest, tl.max(tl.max(bits, axis=3), axis=1))
        byte = scale_byte(largest, FMT, RULE, SATFINITE)
        inverse = inverse_scale(byte)[:, :, None]
        for i in range(BM // STRIP):
            rows = (pm * BM + i * STRIP + tl.arange(0, STRIP)).to(tl.int64)[:, None]
            x = _load(x_ptr, b, rows, cols, R, C, x_b, x_r, x_c, WHOLE)
            scaled = tl.reshape(tl.reshape(x, (STRIP, BK // CB, CB)) * inverse, (STRIP, BK))
            _store_codes(
                scaled, q_ptr, step_ptr, b, rows, pk * BK, cols, R, C, R_PAD, q_b, q_r, q_c, seed_lo, seed_hi, step,
                stream, row_offset, col_offset, FMT, ROUNDING, HARDWARE, WHOLE,
            )  # fmt: skip
    _store_scales(s_ptr, byte, b, pm, pk, R, C, s_b, s_r, s_c, BM, BK, RB, CB)


@triton.jit
def _both_kernel(
    x_ptr, q_ptr, s_ptr, t_ptr, u_ptr, R, C, R_PAD, x_b, x_r, x_c, q_b, q_r, q_c, s_b, s_r, s_c,
    t_b, t_r, t_c, u_b, u_r, u_c,
    BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TRB: tl.constexpr, TCB: tl.constexpr,
    FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile in both orientations: ``q, s`` in blocks of (RB, CB), ``t, u`` in blocks of (TRB, TCB)."""
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    x = _load(x_ptr, b, rows, cols, R, C, x_b, x_r, x_c, WHOLE)
    scaled, byte = scaled_tile(x, RB, CB, FMT, RULE, SATFINITE)
    codes = encode(scaled, FMT, HARDWARE)
    q_at = q_ptr + b * q_b + rows * q_r + cols * q_c
    if WHOLE:
        tl.store(q_at, codes)
    else:
        tl.store(q_at, codes, mask=(rows < R) & (cols < C))
    _store_scales(s_ptr, byte, b, pm, pk, R, C, s_b, s_r, s_c, BM, BK, RB, CB)
    scaled, byte = scaled_tile(x, TRB, TCB, FMT, RULE, SATFINITE)
    codes = encode(scaled, FMT, HARDWARE)
    t_at = t_ptr + b * t_b + rows * t_r + cols * t_c
    if WHOLE:
        tl.store(t_at, codes)
    else:
        tl.store(t_at, tl.where(rows < R, codes, 0), mask=(rows < R_PAD) & (cols < C))
    _store_scales(u_ptr, byte, b, pm, pk, R, C, u_b, u_r, u_c, BM, BK, TRB, TCB)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one orientation of a quantised tensor lies in memory: what to allocate and how to view it."""

    qdata_size: tuple[int, ...]
    qdata_stride: tuple[int, ...]
    scale_size: tuple[int, ...]
    scale_stride: tuple[int, ...]
    rows: int
    rows_padded: int
    rc: tuple[int, int]

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised bytes of elements and scales; a kernel writes every one, padding included."""
        qdata = empty(self.qdata_size, self.qdata_stride, device)
        scale = empty(self.scale_size, self.scale_stride, device)
        return qdata if self.rows == self.rows_padded else qdata.narrow(-2, 0, self.rows), scale


@functools.lru_cache(maxsize=4096)
def layout(shape: tuple[int, ...], axis: int, block: tuple[int, int]) -> Layout:
    """The layout of a tensor of ``shape`` quantised along ``axis`` in ``block`` = (across, along).

    Elements are contiguous along ``axis``. Along -2 each column is padded to a multiple of 16 bytes, so that bulk
    copies can address any number of rows; the kernel fills the padding with zeros.
    """
    rc = block if axis == -1 else (block[1], block[0])
    if len(shape) == 1:
        (n,) = shape
        blocks = -(-n // rc[1])
        return Layout((n,), (1,), (blocks,), (1,), 1, 1, rc)
    *lead, r, c = shape
    pad = r if axis == -1 else -(-r // 16) * 16
    inner = (c, 1) if axis == -1 else (1, pad)
    sr, sc = -(-r // rc[0]), -(-c // rc[1])
    scale_inner = (1, sr) if axis == -1 else (sc, 1)
    return Layout(
        (*lead, pad, c), (*_strides(lead, pad * c), *inner),
        (*lead, sr, sc), (*_strides(lead, sr * sc), *scale_inner), r, pad, rc,
    )  # fmt: skip


def _strides(lead: list[int], inner: int) -> tuple[int, ...]:
    out, step = [], inner
    for n in reversed(lead):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a dtype that kernels load and in a shape that has at most one leading dimension's stride: a copy only
    where leading dimensions cannot be merged in place (float64 is rounded to float32)."""
    if x.dtype is torch.float64:
        x = x.to(torch.float32)
    if x.ndim <= 3:
        return x
    lead = x.shape[:-2]
    merged = x.flatten(0, -3)
    return x if merged.data_ptr() == x.data_ptr() or x.numel() == 0 else merged.view(*lead, *x.shape[-2:])


def three_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Sizes and strides as (batch, rows, columns) of a readable tensor."""
    if len(shape) == 1:
        return (1, 1, shape[0]), (0, 0, strides[0])
    batch, step = 1, 0
    for size, stride in zip(reversed(shape[:-2]), reversed(strides[:-2]), strict=True):
        if size > 1 and batch == 1:
            step = stride
        batch *= size
    return (batch, shape[-2], shape[-1]), (step, strides[-2], strides[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything about a launch but the tensors: a pure function of their shapes, strides and dtypes."""

    outputs: tuple[Layout, ...]
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]
    versions: Versions = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: int, block: tuple[int, int], FMT: int, RULE: int,
    satfinite: bool, mode: int, hardware: bool,
) -> Plan:  # fmt: skip
    out = layout(shape, axis, block)
    (b, r, c), x_strides = three_dims(shape, strides)
    bm, bk, warps = tile(*out.rc, r, c)
    strip, warps = bm, warps if aligned(shape, strides) else 8
    if mode and bm == out.rc[0] and bm * bk > 4096:  # random words take registers
        strip, warps = 4096 // bk, bk // 8 if aligned(shape, strides) else 16
    constants = {
        "BM": bm, "BK": bk, "RB": out.rc[0], "CB": out.rc[1], "FMT": FMT, "RULE": RULE, "SATFINITE": satfinite,
        "ROUNDING": mode, "HARDWARE": hardware, "WHOLE": r % bm == 0 and c % bk == 0, "STRIP": strip,
    }  # fmt: skip
    ints = (r, c, out.rows_padded, *x_strides, *three(out.qdata_stride), *three(out.scale_stride))
    return Plan((out,), (b * -(-r // bm) * -(-c // bk), 1, 1), ints, constants, {"num_warps": warps})


@functools.lru_cache(maxsize=4096)
def _plan_both(
    shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, int], column_block: tuple[int, int], FMT: int,
    RULE: int, satfinite: bool, hardware: bool,
) -> Plan:  # fmt: skip
    along, across = layout(shape, -1, block), layout(shape, -2, column_block)
    (b, r, c), x_strides = three_dims(shape, strides)
    least = (64, 128) if INTERPRETED else (32, 32)  # there a program costs more than its elements
    bm, bk = max(least[0], along.rc[0], across.rc[0]), max(least[1], along.rc[1], across.rc[1])
    constants = {
        "BM": bm, "BK": bk, "RB": along.rc[0], "CB": along.rc[1], "TRB": across.rc[0], "TCB": across.rc[1], "FMT": FMT,
        "RULE": RULE, "SATFINITE": satfinite, "HARDWARE": hardware, "WHOLE": r % bm == 0 and c % bk == 0,
    }  # fmt: skip
    strides_out = [three(s) for o in (along, across) for s in (o.qdata_stride, o.scale_stride)]
    ints = (r, c, across.rows_padded, *x_strides, *(n for s in strides_out for n in s))
    grid = (b * -(-r // bm) * -(-c // bk), 1, 1)
    return Plan((along, across), grid, ints, constants, {"num_warps": 8 if bm * bk > 4096 else 4})


def quantize(
    x: torch.Tensor, *, axis: int, fmt: Any, block: tuple[int, int], scale_rule: Any, rounding: Any, key: Any,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale bytes as uint8)`` of ``x``: the bits of ``mxfp8.reference.quantize``, one pass over memory.

    ``qdata`` is contiguous along ``axis``, ``scale`` across it. ``key.step`` may be a tensor on the device of ``x``:
    it is then read by the kernel, so that a CUDA graph draws new random bits at every replay.
    """
    x = readable(x)
    FMT, RULE = element_codes(fmt, scale_rule)
    mode, step_at, random = random_of(key if rounding == "stochastic" else None, x)
    plan = _plan(x.shape, x.stride(), axis, block, FMT, RULE, satfinite, mode, hardware(x.device))
    qdata, scale = plan.outputs[0].allocate(x.device)
    if x.numel() == 0:
        return qdata.view(fmt.dtype), scale.zero_()
    launch_version(
        _quantize_kernel, plan.versions, (x.dtype, x.data_ptr() % 16 == 0), plan.grid,
        (x, qdata, scale, step_at, *plan.ints, *random), plan.constants, x.device, **plan.options,
    )  # fmt: skip
    return qdata.view(fmt.dtype), scale


def quantize_both(
    x: torch.Tensor,
    *,
    fmt: Any,
    block: tuple[int, int],
    column_block: tuple[int, int],
    scale_rule: Any,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(qdata, scale)`` along -1 in ``block`` and ``(qdata, scale)`` along -2 in ``column_block``, reading ``x`` once.

    The bits are those of two calls of :func:`quantize`, to nearest.
    """
    # Two passes where no tile holds a block of both, or where elements one by one need registers for their addresses;
    # and for one square block: Triton 3.6 compiles two stores of its codes into wrong bytes (every fourth column).
    largest = (128 if aligned(x.shape, x.stride()) else 64) * 128
    if block[1] * column_block[1] > largest or (block == column_block and block[0] == block[1]):
        nearest = {"fmt": fmt, "scale_rule": scale_rule, "rounding": "nearest", "key": None, "satfinite": satfinite}
        return *quantize(x, axis=-1, block=block, **nearest), *quantize(x, axis=-2, block=column_block, **nearest)
    x = readable(x)
    FMT, RULE = element_codes(fmt, scale_rule)
    plan = _plan_both(x.shape, x.stride(), block, column_block, FMT, RULE, satfinite, hardware(x.device))
    (q, s), (t, u) = (out.allocate(x.device) for out in plan.outputs)
    if x.numel() == 0:
        return q.view(fmt.dtype), s.zero_(), t.view(fmt.dtype), u.zero_()
    launch_version(
        _both_kernel, plan.versions, (x.dtype, x.data_ptr() % 16 == 0), plan.grid, (x, q, s, t, u, *plan.ints),
        plan.constants, x.device, **plan.options,
    )  # fmt: skip
    return q.view(fmt.dtype), s, t.view(fmt.dtype), u


def aligned(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether Triton knows enough to read and write several elements at a time: it asks for multiples of 16."""
    return all(n % 16 == 0 for n in (shape[-1], *strides) if n != 1)


@functools.cache
def hardware(device: torch.device) -> bool:
    """Whether float8 conversion instructions can be used on ``device``."""
    return not INTERPRETED and compiles_float8(torch.cuda.get_device_capability(device))


def three(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides of an output, whose leading dimensions are contiguous, as (batch, row, column)."""
    if len(strides) == 1:
        return 0, 0, 1
    return (strides[-3] if len(strides) > 2 else 0), strides[-2], strides[-1]


def tile(rb: int, cb: int, r: int, c: int) -> tuple[int, int, int]:
    """``(BM, BK, warps)`` for blocks of ``rb`` by ``cb`` in a tensor of ``r`` by ``c``: whole blocks, a multiple of 16
    rows, 4096 elements for rows of blocks and 64x64 otherwise."""
    if INTERPRETED:  # a program costs more than its elements, of which a tile may have 2**20
        bm = max(rb, 2048 if r > 2048 else 64)
        return bm, max(cb, 2048 if c > 2048 >= 8 * bm else 128), 4
    if rb == 1:
        return max(16, 4096 // max(cb, 128)), max(cb, 128), 4
    bm, bk = max(rb, 64), max(cb, 64)
    return bm, bk, 8 if bm * bk > 4096 else 4


def random_of(key: Any, x: torch.Tensor) -> tuple[int, torch.Tensor, tuple[int, int, int, int, int, int]]:
    """``(ROUNDING, where the step lies, (seed low, high, step, stream, row and column offset))`` of a key or None.
    ``ROUNDING``: 0 nearest, 1 stochastic, 2 with the step read from memory, 3 and 4 the same where the column offset is
    not a multiple of four."""
    if key is None:
        return 0, x, (0, 0, 0, 0, 0, 0)
    step, mode, at = key.step, 1, x
    if isinstance(step, torch.Tensor):
        if step.device == x.device and x.is_cuda:
            step, mode, at = 0, 2, step
        else:
            step = int(step)
    words = (key.seed & 0xFFFFFFFF, key.seed >> 32, step & 0xFFFFFFFF, key.stream, key.row_offset, key.col_offset)
    return mode if key.col_offset % 4 == 0 else mode + 2, at, words
