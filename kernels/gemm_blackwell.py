"""MXFP8 matrix products on Blackwell, whose tensor cores take MX operands as they are. Compiled only: not run yet.

Two ways, and which one a product goes depends on its operands alone:

* torch's own scaled product (cuBLAS) with a scale for each 32 of K in tiles of 128x4. Every block shape of this library
  is also a 1x32 one with repeated bytes, so all of them can go there.
* where cuBLAS refuses (:func:`refused` says why), a plain Triton kernel around ``tl.dot_scaled``: persistent, elements
  through TMA, scales as they are stored, any shape and pair of formats.

A product with one operand in high precision goes through bfloat16, as on Hopper: see :mod:`_gemm_exact`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import activation_quantize_triton as activate_and_cast
from . import quantize_triton as cast
from ._device import FORMATS, INTERPRETED, decode, scale_value, to_float32
from ._gemm_epilogue import Maybe, product_and_casts
from ._gemm_exact import Block, exact, finish
from ._launch import aligned, launch, triton_why_not
from .dequantize_triton import narrow
from .gemm_hopper import small, tma_ready
from .gemm_triton import output_for
from .scale_layout import tiled_offset, tiled_size

__all__ = ["gemm", "gemm_quantize", "refused", "tiled_scales", "why_not"]

_INTERPRETED = tl.constexpr(INTERPRETED)
_CODES = {torch.float8_e4m3fn: FORMATS["e4m3"], torch.float8_e5m2: FORMATS["e5m2"]}
_OUT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def why_not(kind: str) -> str | None:
    """The reason why this backend cannot run on a device type, or None."""
    reason = triton_why_not(kind, least=(10, 0))
    if reason is None and kind == "cuda" and torch.cuda.get_device_capability()[0] not in TILES:
        have = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"made for compute capabilities {' and '.join(f'{major}.x' for major in TILES)}; this GPU has {have}"
    return reason


def gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: Block | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: Block | None,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """``activation(a[M, K] @ b[N, K].T + bias)``; contract in :func:`mxfp8.gemm`.

    Args:
        a, b: float8_e4m3fn or float8_e5m2 with uint8 scales ``[ceil(rows/r), ceil(K/c)]`` and their block ``(r, c)``,
            in any strides; or float32, bfloat16, float16 with None for both.
        activation: a name of :data:`activation_quantize_triton.ACTIVATIONS` but swiglu.
        out: where to write, contiguous ``[M, N]`` of ``out_dtype``; a new tensor by default.
        accumulate: add to ``out``, which must then be float32; without an activation.

    **Numerics.** The tensor core multiplies elements and scales exactly and sums in float32; how many bits of a running
    sum it keeps was not measured. Scale byte 0 is 2**-127 and 255 NaN. The bias is added and the activation computed in
    float32 before the one rounding. With an operand in high precision, the numerics of :func:`_gemm_exact.exact`.
    """
    (M, K), N = a.shape, b.shape[0]
    if a_scale is None or b_scale is None or a_block is None or b_block is None or 0 in (M, N, K):
        out = output_for(out, accumulate, (M, N), out_dtype, a.device)
        if 0 in (M, N):
            return out
        if K == 0:
            finish(out.new_zeros((1, M, N), dtype=torch.float32), bias, out, accumulate, activation)
        else:
            exact((a, a_scale, a_block), (b, b_scale, b_block), bias, out, accumulate, activation)
        return out
    if out is not None or accumulate:
        out = output_for(out, accumulate, (M, N), out_dtype, a.device)
    a, b = tma_ready(a), tma_ready(b)
    if refused(a, b) is None:
        return _by_torch(a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, out, accumulate, activation)
    target = out if out is not None else torch.empty((M, N), dtype=out_dtype, device=a.device)
    later = accumulate or activation is not None
    sums = torch.empty((1, M, N), dtype=torch.float32, device=a.device) if later else None
    _by_dot_scaled(
        a, small(a_scale), a_block, b, small(b_scale), b_block, None if later else bias,
        target if sums is None else sums[0],
    )  # fmt: skip
    if sums is not None:
        finish(sums, bias, target, accumulate, activation)
    return target


def gemm_quantize(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: Block | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: Block | None,
    *,
    bias: torch.Tensor | None,
    activation: str | None,
    hp_dtype: torch.dtype,
    casts: Any,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """``(q, s)`` along rows, ``(t, u)`` along columns and ``h``; contract in :func:`mxfp8.gemm_quantize`.

    **Numerics.** The bits of :func:`gemm` followed by the casts, which is what it is.
    """
    return product_and_casts(
        lambda dtype: gemm(a, a_scale, a_block, b, b_scale, b_block, bias=bias, out_dtype=dtype),
        activation, hp_dtype, casts, cast, activate_and_cast,
    )  # fmt: skip


# By torch


def refused(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why torch's scaled product does not take ``a[M, K]`` and ``b[N, K]``, or None."""
    (_, K), N = a.shape, b.shape[0]
    if INTERPRETED:
        return "on a CPU it has no 1x32 blocks"
    if K % 32:
        return f"K = {K} is no multiple of 32"
    if N % 16:
        return f"N = {N} is no multiple of 16"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "cuBLAS does not multiply E5M2 by E5M2"
    return None


def _by_torch(
    a: torch.Tensor, a_scale: torch.Tensor, a_block: Block, b: torch.Tensor, b_scale: torch.Tensor, b_block: Block,
    bias: torch.Tensor | None, out_dtype: torch.dtype, out: torch.Tensor | None, accumulate: bool,
    activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product by cuBLAS, which adds a bias of the output's own 16-bit dtype; any other one is added to a float32
    product."""
    sa = tiled_scales(a_scale, a_block, *a.shape)
    sb = tiled_scales(b_scale, b_block, *b.shape)
    fused = bias is None or (bias.dtype == out_dtype != torch.float32 and bias.data_ptr() % 16 == 0)
    if fused and activation is None and not accumulate:
        product = scaled_mm(a, sa, b, sb, None if bias is None else bias.contiguous(), out_dtype)
        return product if out is None else out.copy_(product)
    sums = scaled_mm(a, sa, b, sb, None, torch.float32)
    if out is None:
        out = torch.empty(sums.shape, dtype=out_dtype, device=a.device)
    finish(sums[None], bias, out, accumulate, activation)
    return out


def scaled_mm(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias`` by torch, from scales in tiles of 128x4 (uint8)."""
    f = torch.nn.functional
    recipe, swizzle = f.ScalingType.BlockWise1x32, f.SwizzleType.SWIZZLE_32_4_4
    e8m0 = torch.float8_e8m0fnu
    out: torch.Tensor = f.scaled_mm(
        a, b.t(), sa.view(e8m0), recipe, sb.view(e8m0), recipe, swizzle, swizzle, bias=bias, output_dtype=dtype
    )
    return out


def tiled_scales(scale: torch.Tensor, block: Block, rows: int, columns: int) -> torch.Tensor:
    """Scales of a matrix ``[rows, columns]`` in ``block`` as cuBLAS reads them: one byte for each row and 32 columns,
    in the tiles of :mod:`scale_layout`. uint8, flat."""
    across = -(-columns // 32)
    out = torch.empty(tiled_size(rows, across), dtype=torch.uint8, device=scale.device)
    constants = {"BLOCK_R": block[0], "BLOCK_C": block[1]}
    args = (scale.view(torch.uint8), out, rows, across, *scale.stride())
    key = (*constants.values(), *args[2:], aligned(*args[:2]))
    grid = (-(-rows // 128) * -(-across // 16), 1, 1)
    launch(_tile_kernel, key, grid, args, constants, scale.device, num_warps=4)
    return out


@triton.jit
def _tile_kernel(scale_ptr, out_ptr, R, C, s_r, s_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Four tiles that follow each other in a row of tiles, of ``R`` rows and ``C`` groups of 32 columns. A scale is for
    ``BLOCK_R`` rows and ``BLOCK_C`` columns; bytes that stand for none are zero."""
    groups = tl.cdiv(C, 16)
    pid = tl.program_id(0)
    tile, group = (pid // groups).to(tl.int64), pid % groups
    down = tl.arange(0, 128)[:, None]
    rows, cols = tile * 128 + down, (group * 16 + tl.arange(0, 16))[None, :]
    inside = (rows < R) & (cols < C)
    at = scale_ptr + rows // BLOCK_R * s_r + (cols * 32 // BLOCK_C).to(tl.int64) * s_c
    byte = tl.load(at, mask=inside, other=0)
    tiles = tl.cdiv(C, 4)
    tl.store(out_ptr + (tile * tiles + cols // 4) * 512 + tiled_offset(down, cols), byte, mask=cols < tiles * 4)


# By tl.dot_scaled


class Tile(NamedTuple):
    """Rows of a and of b, bytes along K, stages of the pipeline, warps."""

    rows: int
    cols: int
    depth: int
    stages: int
    warps: int


TILES = {10: Tile(128, 128, 128, 4, 8), 12: Tile(128, 128, 64, 3, 8)}
"""By major compute capability: the largest that compile without spills. 12.x accumulates in registers and has less
than half the shared memory."""

_INTERPRETED_TILE = Tile(32, 32, 64, 1, 1)


@functools.cache
def _device(index: int) -> tuple[Tile, int]:
    """The tile for a GPU, and its number of multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return TILES[properties.major], properties.multi_processor_count


def _by_dot_scaled(
    a: torch.Tensor, a_scale: torch.Tensor, a_block: Block, b: torch.Tensor, b_scale: torch.Tensor, b_block: Block,
    bias: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    (M, K), N = a.shape, b.shape[0]
    tile, sms = (_INTERPRETED_TILE, 1 << 30) if INTERPRETED else _device(a.device.index)
    constants = constants_of(tile, a.dtype, a_block, b.dtype, b_block, out.dtype, bias is not None)
    if INTERPRETED:  # whose loops over run-time ranges do not work with numpy 2.4 and later
        constants["STEPS"], constants["PERSISTENT"] = -(-K // tile.depth), False
    bias = a_scale if bias is None else bias.contiguous()
    codes = a if not INTERPRETED else a.view(torch.uint8), b if not INTERPRETED else b.view(torch.uint8)
    ints = (M, N, K, *a_scale.stride(), *b_scale.stride())
    args = (
        TensorDescriptor.from_tensor(codes[0], [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(codes[1], [tile.cols, tile.depth]),
        a_scale, b_scale, bias, out, *ints,
    )  # fmt: skip
    key = (*constants.values(), ints, a.dtype, b.dtype, bias.dtype, aligned(a_scale, b_scale, bias, out))
    grid = (min(-(-M // tile.rows) * -(-N // tile.cols), sms), 1, 1)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(_dot_scaled_kernel, key, grid, args, constants, a.device, **options)


def constants_of(
    tile: Tile, a: torch.dtype, a_block: Block, b: torch.dtype, b_block: Block, out: torch.dtype, bias: bool
) -> dict[str, Any]:
    """The compile-time parameters of the kernel, in its order."""
    return {
        "BM": tile.rows, "BN": tile.cols, "BK": tile.depth, "A_R": a_block[0], "A_K": a_block[1], "B_R": b_block[0],
        "B_K": b_block[1], "FMT_A": _CODES[a], "FMT_B": _CODES[b], "OUT": _OUT[out], "BIAS": bias, "STEPS": -1,
        "PERSISTENT": True,
    }  # fmt: skip


@triton.jit
def _scaled_dot(a, sa, b, sb, acc, FMT_A: tl.constexpr, FMT_B: tl.constexpr):
    """``acc + (a * sa) @ (b * sb).T`` for ``a[BM, BK]``, ``b[BN, BK]`` and one scale byte for each row and 32 of K.
    Triton's interpreter lacks the instruction: there it is float64, which holds every product."""
    if _INTERPRETED:
        ROWS: tl.constexpr = a.shape[0]
        COLS: tl.constexpr = b.shape[0]
        BK: tl.constexpr = a.shape[1]
        fa = scale_value(sa.to(tl.int32)).to(tl.float64)[:, :, None]
        fb = scale_value(sb.to(tl.int32)).to(tl.float64)[:, :, None]
        x = tl.reshape(decode(a, FMT_A).to(tl.float64), (ROWS, BK // 32, 32)) * fa
        y = tl.reshape(decode(b, FMT_B).to(tl.float64), (COLS, BK // 32, 32)) * fb
        product = tl.dot(tl.reshape(x, (ROWS, BK)), tl.trans(tl.reshape(y, (COLS, BK))), out_dtype=tl.float64)
        return acc + product.to(tl.float32)
    else:
        NAME_A: tl.constexpr = "e4m3" if FMT_A == 0 else "e5m2"
        NAME_B: tl.constexpr = "e4m3" if FMT_B == 0 else "e5m2"
        return tl.dot_scaled(a, sa, NAME_A, tl.trans(b), sb, NAME_B, acc)


@triton.jit
def _write(acc, rows, col, bias_ptr, out_ptr, M, N, OUT: tl.constexpr, BIAS: tl.constexpr):
    """Bias, the one rounding and the store of a part of ``out[M, N]`` that starts at column ``col``."""
    cols = col + tl.arange(0, acc.shape[1])
    if BIAS:
        acc += to_float32(tl.load(bias_ptr + cols, mask=cols < N, other=0))[None, :]
    at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, narrow(acc, OUT), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _product(
    tile, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, sa_r, sa_k, sb_r, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr,
    B_K: tl.constexpr, FMT_A: tl.constexpr, FMT_B: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """One tile of the output; 8 rows of tiles go together, so that ``b`` stays in cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (8 * tiles_n) * 8
    height = tl.minimum(tiles_m - first, 8)
    row = (first + tile % (8 * tiles_n) % height) * BM
    col = tile % (8 * tiles_n) // height * BN
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    # TMA gives zeros past the last row, column and entry of K. Their scales must be numbers: past the last row that of
    # the last row (its products are not stored), past the end of K one.
    sa_at = sa_ptr + (tl.minimum(rows, M - 1) // A_R * sa_r)[:, None]
    sb_at = sb_ptr + (tl.minimum(cols, N - 1) // B_R * sb_r)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS if STEPS >= 0 else tl.cdiv(K, BK)):
        k = step * BK + 32 * tl.arange(0, BK // 32)[None, :]
        sa = tl.load(sa_at + k // A_K * sa_k, mask=k < K, other=127)
        sb = tl.load(sb_at + k // B_K * sb_k, mask=k < K, other=127)
        a, b = a_desc.load([row, step * BK]), b_desc.load([col, step * BK])
        acc = _scaled_dot(a, sa, b, sb, acc, FMT_A, FMT_B)
    # In two halves: the pointers of a whole tile would not fit beside it in the registers.
    left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
    _write(left, rows, col, bias_ptr, out_ptr, M, N, OUT, BIAS)
    _write(right, rows, col + BN // 2, bias_ptr, out_ptr, M, N, OUT, BIAS)


@triton.jit(do_not_specialize=["M", "K"])
def _dot_scaled_kernel(
    a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, sa_r, sa_k, sb_r, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr,
    B_K: tl.constexpr, FMT_A: tl.constexpr, FMT_B: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """``out[M, N] = a[M, K] @ b[N, K].T + bias[N]``, out contiguous.

    ``a_desc``, ``b_desc``: elements in tiles ``[BM, BK]`` and ``[BN, BK]``. ``sa_ptr``: bytes, one for ``A_R`` rows by
    ``A_K`` of K, at strides ``sa_r``, ``sa_k``; the same for b. ``STEPS``: the number of tiles of K where it must be a
    constant, or -1. Without ``PERSISTENT`` there is a program for each tile of the output.
    """
    if PERSISTENT:
        for tile in range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), tl.num_programs(0)):
            _product(
                tile, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, sa_r, sa_k, sb_r, sb_k,
                BM, BN, BK, A_R, A_K, B_R, B_K, FMT_A, FMT_B, OUT, BIAS, STEPS,
            )  # fmt: skip
    else:
        _product(
            tl.program_id(0), a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, sa_r, sa_k, sb_r, sb_k,
            BM, BN, BK, A_R, A_K, B_R, B_K, FMT_A, FMT_B, OUT, BIAS, STEPS,
        )  # fmt: skip
