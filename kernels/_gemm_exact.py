"""Matrix products through bfloat16 and cuBLAS, for operands whose scales reach over fewer than 128 of K.

Both operands are dequantised in one pass over memory and multiplied with float32 accumulation. ``finish`` also ends
products that other kernels left as partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import scale_value, to_float32
from ._launch import aligned, launch
from .activation_quantize_triton import ACTIVATIONS, activate
from .dequantize_triton import FORMAT_CODES, decoded, narrow
from .quantize_triton import hardware

__all__ = ["exact", "finish"]

Block = tuple[int, int]
Operand = tuple[torch.Tensor, torch.Tensor | None, Block | None]
"""Elements, scale bytes, (rows, columns) of a block; or a tensor in high precision and None twice."""


def exact(
    a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool,
    activation: str | None = None,
) -> None:  # fmt: skip
    """``out = (out +) activation(a[M, K] @ b[N, K].T + bias)`` with exact products, in bfloat16, or in float32 where an
    operand is float16 or float32, which bfloat16 does not hold.

    **Numerics.** An element times its scale is exact in bfloat16 from 2**-126 on and below in multiples of 2**-133, to
    which it is rounded. So a product may lose what one side has in bytes near 0, even if the other has bytes near 254.
    Tensor cores take subnormal bfloat16 as it is.
    """
    wide = any(x.dtype in (torch.float32, torch.float16) for x in (a[0], b[0]))
    dtype = torch.float32 if wide else torch.bfloat16
    left, right = expanded((a, b), dtype)
    matmul = torch.backends.cuda.matmul
    saved = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "ieee", False
    try:
        with torch.autocast(out.device.type, enabled=False):
            if bias is None and activation is None and not accumulate and out.dtype in (dtype, torch.float32):
                _mm(left, right, out)
                return
            sums = torch.empty((1, *out.shape), dtype=torch.float32, device=out.device)
            _mm(left, right, sums[0])
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = saved
    finish(sums, bias, out, accumulate, activation)


def _mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right.t(), out=out)
    else:
        torch.mm(left, right.t(), out_dtype=out.dtype, out=out)


_BM, _BK = 16, 256  # of a program's tile


def expanded(operands: tuple[Operand, Operand], dtype: torch.dtype) -> list[torch.Tensor]:
    """The operands in ``dtype``, dequantised by one launch for both, contiguous along K where they are made here."""
    results: list[torch.Tensor] = []
    sides: list[tuple[tuple[Any, ...], tuple[int, ...], int]] = []
    for x, scale, block in operands:
        if scale is None or block is None:
            results.append(x.to(dtype))
            continue
        (R, C), codes = x.shape, x.view(torch.uint8)
        y = torch.empty((R, C), dtype=dtype, device=x.device)
        results.append(y)
        whole = R % max(_BM, block[0]) == 0 and C % max(_BK, block[1]) == 0
        side = (codes, *codes.stride(), scale, *scale.stride(), y, R, C)
        sides.append((side, (FORMAT_CODES[x.dtype], *block, whole), -(-R // _BM) * -(-C // _BK)))
    if not sides:
        return results
    # With one side to do, its arguments stand in for the other's, which no program then works on.
    (a, a_constants, a_tiles), (b, b_constants, _) = sides[0], sides[-1]
    names = ("A_FMT", "A_RB", "A_CB", "A_WHOLE", "B_FMT", "B_RB", "B_CB", "B_WHOLE", "BM", "BK", "HARDWARE")
    constants = dict(zip(names, (*a_constants, *b_constants, _BM, _BK, hardware(a[0].device)), strict=True))
    args = (*a, *b, a_tiles)
    ints = tuple(v for v in args if isinstance(v, int))
    key = (a_constants, b_constants, dtype, ints, aligned(*(v for v in args if isinstance(v, torch.Tensor))))
    grid = (sum(tiles for *_, tiles in sides), 1, 1)
    launch(_expand_kernel, key, grid, args, constants, a[0].device, num_warps=4)
    return results


@triton.jit
def _expand(
    pid, side, FMT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of ``y[R, C]`` = elements times scales, exact in float32, in ``y``'s dtype (bfloat16 rounds only
    below 2**-126)."""
    x_ptr, x_r, x_c, s_ptr, s_r, s_c, y_ptr, R, C = side
    tiles_c = tl.cdiv(C, BK)
    pm, pk = pid // tiles_c, pid % tiles_c
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    RS: tl.constexpr = RB if RB < BM else BM  # rows and columns of the tile that share a scale
    CS: tl.constexpr = CB if CB < BK else BK
    s_rows = ((pm * BM + RS * tl.arange(0, BM // RS)) // RB).to(tl.int64)[:, None]
    s_cols = ((pk * BK + CS * tl.arange(0, BK // CS)) // CB).to(tl.int64)[None, :]
    x_at = x_ptr + rows * x_r + cols * x_c
    s_at = s_ptr + s_rows * s_r + s_cols * s_c
    inside = (rows < R) & (cols < C)
    if WHOLE:
        codes, bytes_ = tl.load(x_at), tl.load(s_at)
    else:
        codes = tl.load(x_at, mask=inside, other=0)
        bytes_ = tl.load(s_at, mask=(s_rows < tl.cdiv(R, RB)) & (s_cols < tl.cdiv(C, CB)), other=127)
    factors = scale_value(bytes_.to(tl.int32))[:, None, :, None]
    y = tl.reshape(tl.reshape(decoded(codes, FMT, HARDWARE), (BM // RS, RS, BK // CS, CS)) * factors, (BM, BK))
    y = narrow(y, y_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(y_ptr + rows * C + cols, y)
    else:
        tl.store(y_ptr + rows * C + cols, y, mask=inside)


@triton.jit
def _expand_kernel(
    a_ptr, a_r, a_c, sa_ptr, sa_r, sa_c, x_ptr, M, K, b_ptr, b_r, b_c, sb_ptr, sb_r, sb_c, y_ptr, N, L, tiles_a,
    A_FMT: tl.constexpr, A_RB: tl.constexpr, A_CB: tl.constexpr, A_WHOLE: tl.constexpr,
    B_FMT: tl.constexpr, B_RB: tl.constexpr, B_CB: tl.constexpr, B_WHOLE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Dequantises two operands: ``tiles_a`` programs for the first, the rest for the second."""
    pid = tl.program_id(0)
    if pid < tiles_a:
        side = (a_ptr, a_r, a_c, sa_ptr, sa_r, sa_c, x_ptr, M, K)
        _expand(pid, side, A_FMT, A_RB, A_CB, A_WHOLE, BM, BK, HARDWARE)
    else:
        side = (b_ptr, b_r, b_c, sb_ptr, sb_r, sb_c, y_ptr, N, L)
        _expand(pid - tiles_a, side, B_FMT, B_RB, B_CB, B_WHOLE, BM, BK, HARDWARE)


def finish(
    sums: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool, activation: str | None = None
) -> None:
    """``out = (out +) activation(sum(sums[parts, M, N]) + bias)``, parts in order, in float32, rounded once."""
    parts, M, N = sums.shape
    bias = None if bias is None else bias.contiguous()
    constants = {"PARTS": parts, "BIAS": bias is not None, "ADD": accumulate, "BLOCK": 1024}
    constants["ACT"] = -1 if activation is None else ACTIVATIONS[activation]
    constants["HARDWARE"] = hardware(out.device)
    key = (*constants.values(), M * N, N, out.dtype, aligned(sums, out))
    key += (None,) if bias is None else (bias.dtype, aligned(bias))
    args = (sums, bias, out, M * N, N)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    launch(_finish_kernel, key, (-(-M * N // 1024), 1, 1), args, constants, out.device, **options)


@triton.jit
def _finish_kernel(
    sums_ptr, bias_ptr, out_ptr, size, N,
    PARTS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Sum of ``PARTS`` float32 arrays of ``size`` = M * N entries; bias ``[N]``; ``ADD`` to what ``out`` holds."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.load(sums_ptr + at, mask=mask)
    for _ in tl.static_range(1, PARTS):
        sums_ptr += size
        total += tl.load(sums_ptr + at, mask=mask)
    if BIAS:
        total += to_float32(tl.load(bias_ptr + at % N, mask=mask))
    if ACT >= 0:
        total = activate(total, ACT, HARDWARE)
    if ADD:
        total += tl.load(out_ptr + at, mask=mask)
    tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=mask)
