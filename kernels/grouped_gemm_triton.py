"""Grouped matrix products of MX operands in plain Triton: the rows of each group times that group's matrix.

Group ends stay on the device. Each program finds its group by a prefix sum over all of them, so that one launch serves
any distribution of rows, and a CUDA graph replays with new ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import aligned, launch, triton_why_not
from .dequantize_triton import narrow
from .gemm_triton import Block, constants_of, product, side, tile

__all__ = ["grouped_gemm", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def find_group(offs_ptr, index, M, G, BM: tl.constexpr, GROUPS: tl.constexpr):
    """``(group, first row, end of the group's rows)`` of row tile ``index``, where tiles of ``BM`` rows are counted
    through groups 0 to G - 1 and then through the rows after the last one, as group ``G``. ``GROUPS`` > G: a power of
    two. Past the last tile the group is greater than G."""
    g = tl.arange(0, GROUPS)
    # Ends beyond M would be the caller's error; they must not lead outside of memory all the same.
    ends = tl.minimum(tl.load(offs_ptr + g, mask=g < G, other=M).to(tl.int32), M)
    starts = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= G), other=0).to(tl.int32)
    starts = tl.maximum(tl.minimum(tl.where(g > G, M, starts), ends), 0)
    after = tl.cumsum(tl.cdiv(ends - starts, BM), 0)
    before = after - tl.cdiv(ends - starts, BM)
    group = tl.sum((after <= index).to(tl.int32))
    here = (g == group).to(tl.int32)
    row = tl.sum(here * (starts + (index - before) * BM))
    return tl.where(group < GROUPS, group, G + 1), row, tl.sum(here * ends)


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
        offs: int32 or int64 ``[G]`` on the same device, end of each group's rows, not decreasing; it is not read on the
            host, and not checked.

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
    constants["GROUPS"] = triton.next_power_of_2(G + 1)
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
