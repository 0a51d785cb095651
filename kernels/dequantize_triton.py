"""Dequantisation in plain Triton: ``qdata * scale`` for any strides, block and number of dimensions, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._device import _INTERPRETED, decode, scale_value
from ._launch import aligned, launch, triton_why_not
from .quantize_triton import hardware, readable, three_dims

__all__ = ["dequantize", "why_not"]

FORMAT_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """``x`` (float32 or float64) in ``DTYPE``, rounded to nearest even. The interpreter truncates when it casts to
    bfloat16, and loses subnormals: there the bits are rounded and taken as they are."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        up = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, up)
        return up.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def decoded(code, FMT: tl.constexpr, HARDWARE: tl.constexpr):
    """Exact float32 values of element codes (uint8): by the hardware's conversion, or by integer arithmetic."""
    if HARDWARE:
        if FMT == 0:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        return decode(code, FMT)


@triton.jit
def _dequantize_kernel(
    q_ptr, s_ptr, o_ptr, R, C, q_b, q_r, q_c, s_b, s_r, s_c,
    BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr,
    LIMIT: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of blocks of ``RB`` rows by ``CB`` columns; the output is contiguous ``[batch, R, C]``."""
    tiles_k = tl.cdiv(C, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    # A tile may hold many blocks along a dimension, or lie inside one.
    RS: tl.constexpr = RB if RB < BM else BM
    CS: tl.constexpr = CB if CB < BK else BK
    s_rows = ((pm * BM + RS * tl.arange(0, BM // RS)) // RB).to(tl.int64)[:, None]
    s_cols = ((pk * BK + CS * tl.arange(0, BK // CS)) // CB).to(tl.int64)[None, :]
    q_at = q_ptr + b * q_b + rows * q_r + cols * q_c
    s_at = s_ptr + b * s_b + s_rows * s_r + s_cols * s_c
    if WHOLE:
        code, byte = tl.load(q_at), tl.load(s_at)
    else:
        code = tl.load(q_at, mask=(rows < R) & (cols < C), other=0)
        byte = tl.load(s_at, mask=(s_rows < tl.cdiv(R, RB)) & (s_cols < tl.cdiv(C, CB)), other=0)
    values, factors = decoded(code, FMT, HARDWARE), scale_value(byte.to(tl.int32))
    if tl.float64 == DTYPE:
        values, factors = values.to(tl.float64), factors.to(tl.float64)
    blocks = tl.reshape(values, (BM // RS, RS, BK // CS, CS)) * factors[:, None, :, None]
    x = tl.reshape(blocks, (BM, BK))
    if LIMIT > 0:
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))  # comparisons let NaN through
    x = narrow(x, DTYPE)
    o_at = o_ptr + (b * R + rows) * C + cols
    if WHOLE:
        tl.store(o_at, x)
    else:
        tl.store(o_at, x, mask=(rows < R) & (cols < C))


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    saturate: bool = False,
) -> torch.Tensor:
    """``qdata * scale`` as a tensor of ``dtype``: the bits of ``mxfp8.tensor.dequantize``, one pass over memory.

    Args:
        qdata: ``[..., R, C]`` or ``[C]`` in float8_e4m3fn or float8_e5m2, any strides.
        scale: E8M0 bytes (uint8 or float8_e8m0fnu), one for each block, any strides.
        block: (rows, columns) of a block.
        dtype: float32, bfloat16, float16 or float64.
        saturate: values beyond ``dtype`` become its largest finite number instead of Inf.

    Returns:
        The values, dense and in the memory order of ``qdata``: a transposed view gives a transposed view.

    Raises:
        TypeError: another dtype.

    **Numerics.** The product of an element and a power of two is exact in float32 (float64 for that output), subnormal
    results included, and is rounded once, to nearest even. Scale byte 255 and NaN codes give NaN, byte 0 is 2**-127.
    """
    if qdata.dtype not in FORMAT_CODES:
        raise TypeError(f"dequantize takes float8_e4m3fn or float8_e5m2, not {qdata.dtype}")
    if dtype not in DTYPES:
        raise TypeError(f"dequantize to {dtype}: use float32, bfloat16, float16 or float64")
    if qdata.ndim >= 2 and qdata.stride(-1) != 1 and qdata.stride(-2) == 1:
        return dequantize(qdata.mT, scale.mT, (block[1], block[0]), dtype, saturate).mT
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    if qdata.numel() == 0:
        return out
    fmt = FORMAT_CODES[qdata.dtype]
    codes, scales = readable(qdata.view(torch.uint8)), readable(scale.view(torch.uint8))
    (b, r, c), q_strides = three_dims(codes.shape, codes.stride())
    _, s_strides = three_dims(scales.shape, scales.stride())
    bm, bk = _tile(block, r, c)
    whole = r % max(bm, block[0]) == 0 and c % max(bk, block[1]) == 0
    constants = {
        "BM": bm, "BK": bk, "RB": block[0], "CB": block[1], "FMT": fmt, "DTYPE": DTYPES[dtype],
        "LIMIT": torch.finfo(dtype).max if saturate else 0.0,
        "HARDWARE": hardware(qdata.device), "WHOLE": whole,
    }  # fmt: skip
    launch(
        _dequantize_kernel,
        (b, r, c, q_strides, s_strides, tuple(constants.values()), aligned(codes, scales, out)),
        (b * -(-r // bm) * -(-c // bk), 1, 1),
        (codes, scales, out, r, c, *q_strides, *s_strides),
        constants,
        qdata.device,
        num_warps=4,
    )
    return out


def _tile(block: tuple[int, int], r: int, c: int) -> tuple[int, int]:
    """``(BM, BK)`` of about 4096 elements, 32 for each thread: long rows, so that many bytes are in flight."""
    bk = min(256, triton.next_power_of_2(c))
    return max(1, min(4096 // bk, triton.next_power_of_2(r))), bk
