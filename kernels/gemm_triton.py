"""Matrix products of MX operands in plain Triton: any block, format, strides and shape, from compute capability 8.0 on.

A tile of K ends where a scale block does, so that one scale holds for a row of it. Elements go to the tensor cores in
bfloat16 (beside a float16 operand in float16), where they are exact, and the sums of each tile are scaled in float32. A
float32 operand goes there as three bfloat16 parts: what Triton makes of a float32 ``dot`` is TF32 on some GPUs,
whatever precision is asked for. Triton's interpreter multiplies right in float32 only: there all of it is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import activation_quantize_triton as activate_and_cast
from . import quantize_triton as cast
from ._device import FORMATS, INTERPRETED, to_float32
from ._gemm_epilogue import Maybe, activate_alike, product_and_casts
from ._launch import aligned, launch, triton_why_not
from .activation_quantize_triton import ACTIVATIONS
from .dequantize_triton import decoded, narrow
from .quantize_triton import hardware

__all__ = ["gemm", "gemm_quantize", "output_for", "why_not"]

Block = tuple[int, int]

_CODES = {torch.float8_e4m3fn: FORMATS["e4m3"], torch.float8_e5m2: FORMATS["e5m2"]}
_HIGH_PRECISION = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
HP, FLOAT32 = 2, 3
"""In place of an element format: an operand in high precision, which the tensor cores take as it is or in parts."""


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def halves(byte, SPLIT: tl.constexpr):
    """Two exact factors whose product is the scale ``2**(byte - 127)``: the first for elements, the second for sums.

    With ``SPLIT`` both are near its square root, so that neither the elements nor the sums overflow or lose bits where
    the result does not; without it the first is one. Byte 255 makes the second NaN.
    """
    exponent = byte - 127
    if SPLIT:
        rest = exponent >> 1  # -64 to 63: the product of two such is a float32
    else:
        rest = exponent
    first = ((exponent - rest + 127) << 23).to(tl.float32, bitcast=True)
    bits = tl.where(rest == -127, 0x00400000, (rest + 127) << 23)
    return first, tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def operand(at, scale_at, k, left, FMT: tl.constexpr, DOT: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
            HARDWARE: tl.constexpr):  # fmt: skip
    """A tile ``[rows, BK]`` of one operand in dtype ``DOT`` (float32 stays so) and the factors ``[rows]`` that its sums
    still lack.

    Args:
        at: pointers ``[rows, BK]`` to elements; all rows exist.
        scale_at: pointers ``[rows]`` to the scale bytes of this tile.
        k: columns ``[BK]``; those from ``left`` on count as zeros.
    """
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(k < left)[None, :], other=0)
    if FMT >= 2:
        if FMT == 2 and x.dtype != DOT:
            x = to_float32(x).to(DOT)
        return x, tl.full((at.shape[0],), 1.0, tl.float32)
    else:
        first, second = halves(tl.load(scale_at).to(tl.int32), SPLIT)
        values = decoded(x, FMT, HARDWARE)
        if SPLIT:
            values *= first[:, None]
        return values.to(DOT), second


@triton.jit
def parts(x, DOT: tl.constexpr):
    """Three tiles in bfloat16's range and precision whose sum is float32 ``x``: its 24 bits, 8 in each. Inf and NaN are
    all in the first."""
    finite = tl.abs(x) < float("inf")
    first = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    first = tl.where(finite, first, x)
    rest = tl.where(finite, x - first, 0.0)
    second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return first.to(DOT), second.to(DOT), (rest - second).to(DOT)


@triton.jit
def dot(a, b, FMT_A: tl.constexpr, FMT_B: tl.constexpr, DOT: tl.constexpr):
    """``a @ b`` of tiles in dtype ``DOT``, or one of them in float32: the small parts of that one first."""
    if FMT_A == 3:
        first, second, third = parts(a, DOT)
        return tl.dot(first, b, tl.dot(second, b, tl.dot(third, b)))
    elif FMT_B == 3:
        first, second, third = parts(b, DOT)
        return tl.dot(a, first, tl.dot(a, second, tl.dot(a, third)))
    else:
        return tl.dot(a, b)


@triton.jit
def product(
    a_ptr, a_rows, sa_ptr, a_k, sa_k, b_ptr, b_rows, sb_ptr, b_k, sb_k, K, a_r, sa_r, b_r, sb_r,
    BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr, B_K: tl.constexpr,
    FMT_A: tl.constexpr, FMT_B: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """``a[a_rows] @ b[b_rows].T`` in float32 for rows (int64) that exist.

    ``a_r, a_k``: strides of ``a``; ``sa_r, sa_k`` of its scales, one byte for ``A_R`` rows by ``A_K`` columns; the same
    for ``b``. ``BK`` divides ``A_K`` and ``B_K``. ``STEPS``: the number of tiles of K where it has to be a constant
    (Triton's interpreter takes no other with numpy 2.4 and later), or -1.
    """
    SPLIT: tl.constexpr = FMT_A < 2 and FMT_B < 2
    columns = tl.arange(0, BK)
    k64 = columns.to(tl.int64)[None, :]
    a_at = a_ptr + a_rows[:, None] * a_r + k64 * a_k
    b_at = b_ptr + b_rows[:, None] * b_r + k64 * b_k
    sa_at = sa_ptr + (a_rows // A_R) * sa_r
    sb_at = sb_ptr + (b_rows // B_R) * sb_r
    acc = tl.zeros((a_rows.shape[0], b_rows.shape[0]), tl.float32)
    for step in range(STEPS if STEPS >= 0 else tl.cdiv(K, BK)):
        k0 = step * BK
        left = K - k0
        sa_now, sb_now = sa_at + tl.cast(k0 // A_K, tl.int64) * sa_k, sb_at + tl.cast(k0 // B_K, tl.int64) * sb_k
        a, fa = operand(a_at, sa_now, columns, left, FMT_A, DOT, SPLIT, EVEN, HARDWARE)
        b, fb = operand(b_at, sb_now, columns, left, FMT_B, DOT, SPLIT, EVEN, HARDWARE)
        sums = dot(a, tl.trans(b), FMT_A, FMT_B, DOT)
        acc += sums * (fa[:, None] * fb[None, :])
        a_at += tl.cast(BK, tl.int64) * a_k
        b_at += tl.cast(BK, tl.int64) * b_k
    return acc


@triton.jit(do_not_specialize=["M", "K", "sa_r", "sa_k", "sb_r", "sb_k"])
def _gemm_kernel(
    a_ptr, sa_ptr, b_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, a_r, a_k, sa_r, sa_k, b_r, b_k, sb_r, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr,
    B_K: tl.constexpr, FMT_A: tl.constexpr, FMT_B: tl.constexpr, DOT: tl.constexpr, OUT: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BN]`` of ``out[M, N]``, contiguous: of the product, with ``BIAS`` a bias, with ``ACT`` >= 0 an
    activation; with ``ADD`` added to what is there. 8 rows of tiles go together, so that ``b`` stays in cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (8 * tiles_n) * 8
    height = tl.minimum(tiles_m - first, 8)
    pm = first + pid % (8 * tiles_n) % height
    pn = pid % (8 * tiles_n) // height
    rows = pm * BM + tl.arange(0, BM)
    cols = pn * BN + tl.arange(0, BN)
    # A row past the end is computed from the last one and not stored.
    a_rows, b_rows = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
    acc = product(
        a_ptr, a_rows, sa_ptr, a_k, sa_k, b_ptr, b_rows, sb_ptr, b_k, sb_k, K, a_r, sa_r, b_r, sb_r,
        BK, A_R, A_K, B_R, B_K, FMT_A, FMT_B, DOT, EVEN, HARDWARE, STEPS,
    )  # fmt: skip
    if BIAS:
        acc += to_float32(tl.load(bias_ptr + cols, mask=cols < N, other=0))[None, :]
    if ACT >= 0:
        acc = activate_alike(acc, ACT, HARDWARE)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if ADD:
        acc += tl.load(out_at, mask=inside, other=0.0)
    tl.store(out_at, narrow(acc, OUT), mask=inside)


class Side(NamedTuple):
    """One operand as kernels take it: bytes, scale bytes, their strides (matrix, row, column), rows and columns of a
    block, element format or ``HP`` or ``FLOAT32``."""

    data: torch.Tensor
    scale: torch.Tensor
    data_strides: tuple[int, int, int]
    scale_strides: tuple[int, int, int]
    block: Block
    fmt: int


def side(name: str, x: torch.Tensor, scale: torch.Tensor | None, block: Block | None) -> Side:
    """An operand ``[rows, K]`` or ``[G, rows, K]``.

    Raises:
        TypeError: neither float8 with scales nor bfloat16, float16 or float32 without.
        ValueError: a scale without a block or the other way round.
    """
    if (scale is None) != (block is None):
        raise ValueError(
            f"{name} has a {'block' if scale is None else 'scale'} alone: pass scale and block, or neither"
        )
    strides = (x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1))
    if scale is None or block is None:
        if x.dtype not in _HIGH_PRECISION:
            raise TypeError(f"{name} is {x.dtype} without scales: use bfloat16, float16 or float32, or pass its scales")
        fmt = FLOAT32 if x.dtype is torch.float32 else HP
        return Side(x, x, strides, (0, 0, 0), (1, 1 << 20), fmt)
    if x.dtype not in _CODES:
        raise TypeError(f"{name} is {x.dtype} with scales: use float8_e4m3fn or float8_e5m2")
    scales = scale.view(torch.uint8)
    scale_strides = (scales.stride(0) if x.ndim == 3 else 0, scales.stride(-2), scales.stride(-1))
    return Side(x.view(torch.uint8), scales, strides, scale_strides, block, _CODES[x.dtype])


def constants_of(a: Side, b: Side, K: int, out_dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The compile-time parameters of both kernels that do not depend on the tile's rows and columns.

    Raises:
        TypeError: no operand is MX, and one is float32.
    """
    if a.fmt >= HP and b.fmt >= HP and FLOAT32 in (a.fmt, b.fmt):
        raise TypeError("a float32 operand is multiplied with one that has scales: for others use torch.matmul")
    dtypes = (a.data.dtype, b.data.dtype)
    dot = tl.float16 if torch.float16 in dtypes else tl.bfloat16
    # As far along K as every scale reaches, and at most 128 bytes.
    bk = min(a.block[1], b.block[1], 32 if torch.float32 in dtypes else 64)
    return {
        "BK": bk, "A_R": a.block[0], "A_K": a.block[1], "B_R": b.block[0], "B_K": b.block[1],
        "FMT_A": a.fmt, "FMT_B": b.fmt, "DOT": tl.float32 if INTERPRETED else dot,
        "OUT": _HIGH_PRECISION[out_dtype], "EVEN": K % bk == 0, "HARDWARE": hardware(device),
        "STEPS": -(-K // bk) if INTERPRETED else -1,
    }  # fmt: skip


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
            or float32, bfloat16, float16 with None for both; any strides. Fastest contiguous along K.
        activation: a name of :data:`ACTIVATIONS` but swiglu.
        out: where to write, contiguous ``[M, N]`` of ``out_dtype``; a new tensor by default.
        accumulate: add to ``out``, which must then be float32; without an activation.

    **Numerics.** Products of elements are exact and summed in float32, and the bias is added and the activation
    computed before the one rounding. Scales multiply sums over at most 64 of K, in two steps of half the exponent each,
    so that any two scale bytes give what exact arithmetic would, where float32 can hold it. A high-precision operand
    beyond 2**114 may overflow where its product with a small scale would not. The same operands give the same bits
    every time.
    """
    (M, K), N = a.shape, b.shape[0]
    out = output_for(out, accumulate, (M, N), out_dtype, a.device)
    if out.numel() == 0:
        return out
    left, right = side("a", a, a_scale, a_block), side("b", b, b_scale, b_block)
    bm, bn, warps = tile(M, N, left, right)
    constants = {"BM": bm, "BN": bn, **constants_of(left, right, K, out_dtype, a.device)}
    act = -1 if activation is None else ACTIVATIONS[activation]
    constants |= {"BIAS": bias is not None, "ACT": act, "ADD": accumulate}
    bias = left.data if bias is None else bias.contiguous()
    args = (
        left.data, left.scale, right.data, right.scale, bias, out, M, N, K,
        *left.data_strides[1:], *left.scale_strides[1:], *right.data_strides[1:], *right.scale_strides[1:],
    )  # fmt: skip
    launch(
        _gemm_kernel,
        (*constants.values(), *args[6:], *(x.dtype for x in args[:6]), aligned(*args[:6])),
        (-(-M // bm) * -(-N // bn), 1, 1),
        args,
        constants,
        a.device,
        num_warps=warps,
        num_stages=3,
    )
    return out


def output_for(
    out: torch.Tensor | None, accumulate: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``out``, or a new tensor.

    Raises:
        ValueError: one that kernels cannot write to, or add to.
    """
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs the tensor to add to: pass out=")
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: needs contiguous {dtype} {shape}")
    if accumulate and dtype != torch.float32:
        raise ValueError(f"accumulate=True adds in float32, but out is {dtype}")
    return out


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


def tile(M: int, N: int, a: Side, b: Side) -> tuple[int, int, int]:
    """``(BM, BN, warps)``: as large as registers allow, smaller where the output has few tiles."""
    if FLOAT32 in (a.fmt, b.fmt) or N <= 64 or M * N <= 512 * 512:
        return 64, 64, 4
    return 64, 128, 4
