"""Where groups of rows start and end, found on the device.

Group ends come as ``offs`` (int32 or int64 ``[G]``), which the host does not read, so that one launch serves any
distribution of rows and a CUDA graph replays with new ones. Whatever ``offs`` holds, ends are taken to lie within the M
rows, each no less than the one before: nothing outside memory is addressed, and every row is in one group or in none.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED
from ._launch import launch

__all__ = ["check_offsets", "find_group", "find_step", "group_bounds", "lanes"]


@functools.cache
def lanes(groups: int) -> int:
    """The least power of two that is no smaller: Triton's own function takes microseconds."""
    power: int = triton.next_power_of_2(groups)
    return power


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def group_bounds(offs_ptr, M, G, GROUPS: tl.constexpr):
    """``(g, starts, ends)``, int32 ``[GROUPS]``: where the rows of each group start and end. The rows after the last
    group are group ``G``, and further ones are empty. ``GROUPS`` > G: a power of two."""
    g = tl.arange(0, GROUPS)
    # Brought within bounds before they are narrowed: an int64 beyond int32 must not become a small number.
    ends = tl.load(offs_ptr + g, mask=g < G, other=M)
    ends = tl.maximum(tl.minimum(ends, M), 0).to(tl.int32)
    starts = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= G), other=0)
    starts = tl.maximum(tl.minimum(starts, M), 0).to(tl.int32)
    starts = tl.where(g > G, M, starts)
    return g, tl.associative_scan(starts, 0, _later), tl.associative_scan(ends, 0, _later)


@triton.jit
def find_group(offs_ptr, index, M, G, BM: tl.constexpr, GROUPS: tl.constexpr):
    """``(group, first row, end of the group's rows)`` of row tile ``index``, where tiles of ``BM`` rows are counted
    through groups 0 to G - 1 and then through the rows after the last one, as group ``G``. Past the last tile the group
    is greater than G."""
    g, starts, ends = group_bounds(offs_ptr, M, G, GROUPS)
    tiles = tl.cdiv(ends - starts, BM)
    after = tl.cumsum(tiles, 0)
    group = tl.sum((after <= index).to(tl.int32))
    here = (g == group).to(tl.int32)
    row = tl.sum(here * (starts + (index - after + tiles) * BM))
    return tl.where(group < GROUPS, group, G + 1), row, tl.sum(here * ends)


@triton.jit
def find_step(offs_ptr, index, M, G, STEP: tl.constexpr, GROUPS: tl.constexpr, TRAILING: tl.constexpr = 0):
    """``(first row, end of the group's rows, g, starts)`` of the ``index``-th piece of ``STEP`` rows, where groups are
    padded to whole pieces; 0 and 0 past the last group, or with ``TRAILING`` = 1 past the rows that follow it.
    ``starts`` (int32 ``[GROUPS]``): where each group starts among padded rows, and for ``g`` = G where the last one
    ends."""
    g, starts, ends = group_bounds(offs_ptr, M, G, GROUPS)
    pieces = tl.where(g < G + TRAILING, tl.cdiv(ends - starts, STEP), 0)
    after = tl.cumsum(pieces, 0)
    before = after - pieces
    here = ((before <= index) & (index < after)).to(tl.int32)
    return tl.sum(here * (starts + (index - before) * STEP)), tl.sum(here * ends), g, before * STEP


@triton.jit(do_not_specialize=["M", "G"])
def _check_kernel(offs_ptr, M, G, GROUPS: tl.constexpr):
    g = tl.arange(0, GROUPS)
    end = tl.load(offs_ptr + g, mask=g < G, other=0)
    before = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    good = (before >= 0) & (before <= end) & (end <= M)
    tl.device_assert(good | (g >= G), "offs: group ends must not decrease and must stay within the rows")


def check_offsets(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """``offs``. Stops the device with an assertion, as torch does for an index out of bounds, unless it holds group
    ends that do not decrease, within 0..``rows``. The host does not wait for it."""
    G = len(offs)
    if G == 0:
        return offs
    ends = offs.contiguous()
    # Triton leaves assertions out of all kernels but those that are launched for debugging.
    options = {} if INTERPRETED else {"debug": True, "sanitize_overflow": False}
    key = (G, rows, ends.dtype, ends.data_ptr() % 16)
    constants = {"GROUPS": lanes(G)}
    launch(_check_kernel, key, (1, 1, 1), (ends, rows, G), constants, ends.device, num_warps=1, **options)
    return offs
