"""Grouped matrix products of MX operands in plain Triton: the rows of each group times that group's matrix, and for
weight gradients products that sum over the rows of each group.

Group ends stay on the device, see :mod:`_groups`. Each program finds its group by a prefix sum over all of them, so
that one launch serves any distribution of rows, and a CUDA graph replays with new ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED
from ._groups import check_offsets, find_group, lanes
from ._launch import aligned, launch, triton_why_not
from .dequantize_triton import narrow
from .gemm_triton import Block, Side, constants_of, dot, operand, product, side, tile

__all__ = ["check_offsets", "grouped_gemm", "grouped_wgrad", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit(do_not_specialize=["M", "K", "G", "sa_r", "sa_k", "sb_g", "sb_r", "sb_k"])
def _grouped_kernel(
    a_ptr, sa_ptr, b_ptr, sb_ptr, offs_ptr, out_ptr, M, N, K, G,
    a_r, a_k, sa_r, sa_k, b_g, b_r, b_k, sb_g, sb_r, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr,
    B_K: tl.constexpr, FMT_A: tl.constexpr, FMT_B: tl.constexpr, DOT: tl.constexpr, OUT: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BN]`` of ``out[M, N]``, contiguous: rows of one group, or zeros after the last group."""
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    group, row0, end = find_group(offs_ptr, pid // tiles_n, M, G, BM, GROUPS)
    if group > G:
        return
    rows, cols = row0 + tl.arange(0, BM), pid % tiles_n * BN + tl.arange(0, BN)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < end)[:, None] & (cols < N)[None, :]
    if group == G:
        tl.store(out_at, tl.zeros((BM, BN), OUT), mask=inside)
    else:
        # A row past the end is computed from the last one and not stored.
        a_rows, b_rows = tl.minimum(rows, end - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
        g64 = group.to(tl.int64)
        acc = product(
            a_ptr, a_rows, sa_ptr, a_k, sa_k, b_ptr + g64 * b_g, b_rows, sb_ptr + g64 * sb_g, b_k, sb_k,
            K, a_r, sa_r, b_r, sb_r, BK, A_R, A_K, B_R, B_K, FMT_A, FMT_B, DOT, EVEN, HARDWARE, STEPS,
        )  # fmt: skip
        tl.store(out_at, narrow(acc, OUT), mask=inside)


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: Block | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: Block | None,
    *,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of group ``g`` of ``a[M, K]`` times ``b[g, N, K].T``; contract in :func:`mxfp8.grouped_gemm`.

    Args:
        a: as in :func:`gemm_triton.gemm`.
        b: ``[G, N, K]``, with scales ``[G, ceil(N/r), ceil(K/c)]`` if float8; any strides.
        offs: int32 or int64 ``[G]`` on the same device, end of each group's rows; not read on the host, not checked.
            See :mod:`_groups` for what bad ones do.

    Returns:
        ``[M, N]`` of ``out_dtype``; rows past ``offs[-1]`` are zero and what ``a`` holds there is not used.

    **Numerics.** As :func:`gemm_triton.gemm`.
    """
    (M, K), (G, N) = a.shape, b.shape[:2]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if G == 0:
        return out.zero_()
    left, right = side("a", a, a_scale, a_block), side("b", b, b_scale, b_block)
    bm, bn, warps = tile(M, N, left, right)
    constants = {"BM": bm, "BN": bn, **constants_of(left, right, K, out_dtype, a.device)}
    constants["GROUPS"] = lanes(G + 1)
    args = (
        left.data, left.scale, right.data, right.scale, offs.contiguous(), out, M, N, K, G,
        *left.data_strides[1:], *left.scale_strides[1:], *right.data_strides, *right.scale_strides,
    )  # fmt: skip
    # Each group, and the rows after the last, may end within a tile.
    tiles_m = M // bm + G + 1
    launch(
        _grouped_kernel,
        (*constants.values(), *args[6:], *(x.dtype for x in args[:6]), aligned(*args[:6])),
        (tiles_m * -(-N // bn), 1, 1),
        args,
        constants,
        a.device,
        num_warps=warps,
        num_stages=3,
    )
    return out


@triton.jit
def _range(starts_ptr, g, rows, FMT: tl.constexpr, BLOCK: tl.constexpr):
    """Start and end of group ``g`` within ``rows``, whatever ``starts`` holds. What is in blocks starts with one, and
    the compiler has to know that to read several elements at a time."""
    start = tl.minimum(tl.maximum(tl.load(starts_ptr + g), 0), rows)
    if FMT < 2:
        start = start // BLOCK * BLOCK
    return start, tl.minimum(tl.maximum(tl.load(starts_ptr + g + 1), start), rows)


@triton.jit(do_not_specialize=["P", "Q", "sa_r", "sa_k", "sb_r", "sb_k"])
def _wgrad_kernel(
    a_ptr, sa_ptr, a_starts_ptr, b_ptr, sb_ptr, b_starts_ptr, out_ptr, P, Q, N, K,
    a_r, a_k, sa_r, sa_k, b_r, b_k, sb_r, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_R: tl.constexpr, A_K: tl.constexpr, B_R: tl.constexpr,
    B_K: tl.constexpr, FMT_A: tl.constexpr, FMT_B: tl.constexpr, DOT: tl.constexpr, OUT: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BN]`` of ``out[g, N, K]``, contiguous, from ``a[N, P]`` and ``b[K, Q]``, summed over the
    columns of group ``g``. Strides and blocks are those of :func:`gemm_triton.product`."""
    SPLIT: tl.constexpr = FMT_A < 2 and FMT_B < 2
    tiles_n, tiles_k = tl.cdiv(N, BM), tl.cdiv(K, BN)
    pid = tl.program_id(0)
    g = pid // (tiles_n * tiles_k)
    rows = pid % (tiles_n * tiles_k) // tiles_k * BM + tl.arange(0, BM)
    cols = pid % tiles_k * BN + tl.arange(0, BN)
    a_start, a_end = _range(a_starts_ptr, g, P, FMT_A, A_K)
    b_start, b_end = _range(b_starts_ptr, g, Q, FMT_B, B_K)
    # Where one side has more columns, they are padding of the other's last block: zero.
    size = tl.minimum(a_end - a_start, b_end - b_start)
    # A row past the end is computed from the last one and not stored.
    a_rows, b_rows = tl.minimum(rows, N - 1).to(tl.int64), tl.minimum(cols, K - 1).to(tl.int64)
    columns = tl.arange(0, BK)
    a_k64, b_k64 = tl.cast(a_start, tl.int64) * a_k, tl.cast(b_start, tl.int64) * b_k
    a_at = a_ptr + a_k64 + a_rows[:, None] * a_r + columns.to(tl.int64)[None, :] * a_k
    b_at = b_ptr + b_k64 + b_rows[:, None] * b_r + columns.to(tl.int64)[None, :] * b_k
    sa_at, sb_at = sa_ptr + (a_rows // A_R) * sa_r, sb_ptr + (b_rows // B_R) * sb_r
    acc = tl.zeros((BM, BN), tl.float32)
    steps = size // BK if EVEN else tl.cdiv(size, BK)
    for step in range(STEPS if STEPS >= 0 else steps):
        k0 = step * BK
        a_tile, b_tile = (a_start + k0) // A_K, (b_start + k0) // B_K
        if STEPS >= 0:  # steps past the group's end add zeros, under scales that exist
            a_tile, b_tile = tl.minimum(a_tile, (P - 1) // A_K), tl.minimum(b_tile, (Q - 1) // B_K)
        left = size - k0
        sa_now, sb_now = sa_at + tl.cast(a_tile, tl.int64) * sa_k, sb_at + tl.cast(b_tile, tl.int64) * sb_k
        a, fa = operand(a_at, sa_now, columns, left, FMT_A, DOT, SPLIT, EVEN, HARDWARE)
        b, fb = operand(b_at, sb_now, columns, left, FMT_B, DOT, SPLIT, EVEN, HARDWARE)
        sums = dot(a, tl.trans(b), FMT_A, FMT_B, DOT) * (fa[:, None] * fb[None, :])
        if STEPS >= 0:
            sums = tl.where(left > 0, sums, 0.0)
        acc += sums
        a_at += tl.cast(BK, tl.int64) * a_k
        b_at += tl.cast(BK, tl.int64) * b_k
    out_at = out_ptr + (tl.cast(g, tl.int64) * N + rows.to(tl.int64))[:, None] * K + cols[None, :]
    tl.store(out_at, narrow(acc, OUT), mask=(rows < N)[:, None] & (cols < K)[None, :])


def grouped_wgrad(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: Block | None,
    a_starts: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: Block | None,
    b_starts: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``a[rows of g, N].T @ b[rows of g, K]`` for each group; contract in :func:`mxfp8.grouped_wgrad`.

    Args:
        a, b: ``[P, N]`` and ``[Q, K]``: float8 with uint8 scales and their block (rows, columns), as
            :func:`quantize_grouped_triton.quantize_grouped` makes them, or float32, bfloat16, float16 with None for
            both; any strides. Fastest contiguous along rows.
        a_starts, b_starts: int32 ``[G + 1]``, where each group starts in ``a`` and ``b``, at whole blocks; not read on
            the host. Where one has more rows than the other they must be zero, and are not taken.

    Returns:
        ``[G, N, K]`` of ``out_dtype``; zeros for a group without rows.

    **Numerics.** As :func:`gemm_triton.gemm`.
    """
    (P, N), (Q, K), G = a.shape, b.shape, len(a_starts) - 1
    out = torch.empty((G, N, K), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if 0 in (P, Q):
        return out.zero_()
    left, right = _across("a", a, a_scale, a_block), _across("b", b, b_scale, b_block)
    bm, bn, warps = tile(N, K, left, right)
    if a_block is None or b_block is None:
        bn = 64  # groups start anywhere in it: elements are read one by one, and take registers for their addresses
    constants = {"BM": bm, "BN": bn, **constants_of(left, right, 0, out_dtype, a.device)}
    # Groups that are padded on both sides have whole tiles only.
    constants["EVEN"] = a_block is not None and b_block is not None and not INTERPRETED
    constants["STEPS"] = -(-max(P, Q) // constants["BK"]) if INTERPRETED else -1
    args = (
        left.data, left.scale, a_starts, right.data, right.scale, b_starts, out, P, Q, N, K,
        *left.data_strides[1:], *left.scale_strides[1:], *right.data_strides[1:], *right.scale_strides[1:],
    )  # fmt: skip
    launch(
        _wgrad_kernel,
        (*constants.values(), *args[7:], *(x.dtype for x in args[:7]), aligned(*args[:7])),
        (G * -(-N // bm) * -(-K // bn), 1, 1),
        args,
        constants,
        a.device,
        num_warps=warps,
        num_stages=3,
    )
    return out


def _across(name: str, x: torch.Tensor, scale: torch.Tensor | None, block: Block | None) -> Side:
    """The transpose of an operand, which is what a product along its rows takes."""
    return side(name, x.mT, None if scale is None else scale.mT, None if block is None else (block[1], block[0]))
