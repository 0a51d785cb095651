"""Grouped MXFP8 matrix products on Hopper (sm_90a): the rows of each group times that group's matrix, and for weight
gradients products that sum over the rows of each group; by the kernel of :mod:`gemm_hopper` where scales are coalesced.

Group ends stay on the device. A first, tiny kernel turns them into a table of tiles, none of which spans two groups;
the product's programs take their places from it, so that a CUDA graph replays with new groups. Other blocks go through
bfloat16, :mod:`_grouped_exact`, or where that cannot hold them or the result to :mod:`grouped_gemm_triton`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import _grouped_exact, grouped_gemm_triton
from ._gemm_exact import Block
from ._gemm_hopper_epilogue import Epilogue
from ._groups import check_offsets, find_group, lanes
from ._launch import launch
from .gemm_hopper import Plan, make_plan, run, small, tma_ready, tma_stores, why_not

__all__ = ["check_offsets", "grouped_gemm", "grouped_wgrad", "why_not"]


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
        a: as in :func:`gemm_hopper.gemm`.
        b: ``[G, N, K]``, with scales ``[G, ceil(N/r), ceil(K/c)]`` if float8; any strides.
        offs: int32 or int64 ``[G]`` on the same device, end of each group's rows; not read on the host, not checked.
            See :mod:`_groups` for what bad ones do.

    Returns:
        ``[M, N]`` of ``out_dtype``; rows past ``offs[-1]`` are zero and what ``a`` holds there is not used.

    **Numerics.** As :func:`gemm_hopper.gemm` for coalesced scales. Others, and all 32x32 blocks: exact products summed
    in float32, as there or as :func:`grouped_gemm_triton.grouped_gemm` forms them.
    """
    (M, K), (G, N) = a.shape, b.shape[:2]
    coarse = a_block is not None and b_block is not None and min(a_block[1], b_block[1]) >= 128
    if not coarse or 0 in (M, N, K, G):
        sides = (a, a_scale, a_block), (b, b_scale, b_block)
        if _grouped_exact.takes(sides, out_dtype):
            return _grouped_exact.grouped_gemm(*sides, offs)
        return grouped_gemm_triton.grouped_gemm(
            a, a_scale, a_block, b, b_scale, b_block, offs=offs, out_dtype=out_dtype
        )
    assert a_scale is not None
    assert b_scale is not None
    assert a_block is not None
    assert b_block is not None
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    a, rows = tma_ready(a), _rows_of_matrices(b)
    a_scale, b_scale = small(a_scale), small(b_scale)
    plan = _plan(
        (M, N, K), G, (*a_scale.stride(), *b_scale.stride()), a_block, b_block, tma_stores(out), out.device.index
    )
    table = _table(offs, M, G, plan.tile.height)
    run(plan, a, a_scale, rows, b_scale, b_scale.stride(), None, out, table)
    return out


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int, int], groups: int, scale_strides: tuple[int, ...], a_block: Block, b_block: Block, tma: bool,
    device: int, divided: bool = False,
) -> Plan:  # fmt: skip
    """One plan for each set of integers that Triton specialises on."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return make_plan(shape, a_block, b_block, Epilogue(), tma, sms, groups=groups, divided=divided)


def _rows_of_matrices(b: torch.Tensor) -> torch.Tensor:
    """``b[G, N, K]`` as ``[G * N, K]``, which one TMA descriptor covers; a copy where strides do not allow that."""
    G, N, K = b.shape
    if b.stride(0) != N * b.stride(1):
        b = b.contiguous()
    return tma_ready(b.as_strided((G * N, K), (b.stride(1), b.stride(2))))


def _table(offs: torch.Tensor, M: int, G: int, height: int) -> torch.Tensor:
    """For each row of tiles its first row, where its rows end, and its group (-1: none, the output is zero)."""
    tiles = M // height + G + 1
    table = torch.empty((tiles, 3), dtype=torch.int32, device=offs.device)
    offs = offs.contiguous()
    constants = {"BM": height, "GROUPS": lanes(G + 1)}
    key = (*constants.values(), M, G, offs.dtype, offs.data_ptr() % 16)
    launch(_table_kernel, key, (tiles, 1, 1), (offs, table, M, G), constants, offs.device, num_warps=1)
    return table


@triton.jit(do_not_specialize=["M", "G"])
def _table_kernel(offs_ptr, table_ptr, M, G, BM: tl.constexpr, GROUPS: tl.constexpr):
    """One entry of the table. After the last tile, entries are empty."""
    at = tl.program_id(0)
    group, row, end = find_group(offs_ptr, at, M, G, BM, GROUPS)
    past = group > G
    tl.store(table_ptr + 3 * at, tl.where(past, 0, row))
    tl.store(table_ptr + 3 * at + 1, tl.where(past, 0, end))
    tl.store(table_ptr + 3 * at + 2, tl.where(group >= G, -1, group))


# Sums over the rows of groups


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
        a, b, a_starts, b_starts: as in :func:`grouped_gemm_triton.grouped_wgrad`. FP8 tensor cores take blocks of 128,
            or on both sides 256, along the rows: groups then start at multiples of that, and at the same in both.

    **Numerics.** As :func:`gemm_hopper.gemm` for coalesced scales without a split of the sum, as :func:`grouped_gemm`
    here for others.
    """
    (P, N), K, G = a.shape, b.shape[1], len(a_starts) - 1
    along = (0 if a_block is None else a_block[0], 0 if b_block is None else b_block[0])
    alike = along[0] == along[1] > 0 and len(b) == P  # then groups start at the same rows
    if not alike or along[0] < 128 or P % along[0] or 0 in (P, N, K, G):
        sides = (a, a_scale, a_block), (b, b_scale, b_block)
        if alike and P % 8 == 0 and _grouped_exact.takes(sides, out_dtype):
            return _grouped_exact.grouped_wgrad(*sides, a_starts)
        return grouped_gemm_triton.grouped_wgrad(
            a, a_scale, a_block, a_starts, b, b_scale, b_block, b_starts, out_dtype=out_dtype
        )
    assert a_scale is not None
    assert b_scale is not None
    assert a_block is not None
    assert b_block is not None
    out = torch.empty((G, N, K), dtype=out_dtype, device=a.device)
    target = out.view(G * N, K)
    left, right = tma_ready(a.mT), tma_ready(b.mT)
    a_scale, b_scale = small(a_scale.mT), small(b_scale.mT)
    plan = _plan(
        (N, K, P), G, (*a_scale.stride(), *b_scale.stride()), (a_block[1], a_block[0]), (b_block[1], b_block[0]),
        tma_stores(target), out.device.index, True,
    )  # fmt: skip
    table = _divided_table(a_starts, N, P, G, plan.tile.height, along[0])
    run(plan, left, a_scale, right, b_scale, (0, *b_scale.stride()), None, target, table)
    return out


_RANKED = 64
"""Up to so many groups are taken longest first, so that the last tiles are short ones."""


def _divided_table(starts: torch.Tensor, N: int, P: int, G: int, height: int, step: int) -> torch.Tensor:
    """For each row of tiles of ``out[G * N, K]`` its first row, where its group's rows end, its first row in the group,
    and of the rows that are summed over the first slot of 128 and the one after the last."""
    tiles = -(-N // height)
    table = torch.empty((G * tiles, 5), dtype=torch.int32, device=starts.device)
    constants = {"BM": height, "STEP": step, "GROUPS": lanes(G), "RANKED": G <= _RANKED}
    key = (*constants.values(), N, P, G, starts.data_ptr() % 16)
    args = (starts, table, N, P, G)
    launch(_divided_table_kernel, key, (tiles, G, 1), args, constants, starts.device, num_warps=4)
    return table


@triton.jit(do_not_specialize=["N", "P", "G"])
def _divided_table_kernel(
    starts_ptr, table_ptr, N, P, G, BM: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, RANKED: tl.constexpr
):
    """One entry of the table: row of tiles ``program_id(0)`` of the group that as many are longer than as
    ``program_id(1)`` says."""
    i, at = tl.program_id(0), tl.program_id(1)
    group = at
    if RANKED:
        g = tl.arange(0, GROUPS)
        size = tl.load(starts_ptr + g + 1, mask=g < G, other=0) - tl.load(starts_ptr + g, mask=g < G, other=0)
        size = tl.where(g < G, size, -1)
        longer = (size[None, :] > size[:, None]) | ((size[None, :] == size[:, None]) & (g[None, :] < g[:, None]))
        group = tl.sum(tl.where(tl.sum(longer.to(tl.int32), axis=1) == at, g, 0))
    # Whole steps within the P rows, whatever the starts are.
    start = tl.minimum(tl.maximum(tl.load(starts_ptr + group), 0), P) // STEP * (STEP // 128)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + group + 1), 0), P) // STEP * (STEP // 128)
    some = start < end
    entry = table_ptr + 5 * (at * tl.num_programs(0) + i)
    tl.store(entry, group * N + i * BM)
    tl.store(entry + 1, (group + 1) * N)
    tl.store(entry + 2, i * BM)
    tl.store(entry + 3, tl.where(some, start, 0))
    tl.store(entry + 4, tl.where(some, end, 0))
