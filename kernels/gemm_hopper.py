"""MXFP8 matrix products on Hopper (sm_90a): FP8 tensor cores where scales are coalesced, BF16 ones elsewhere.

Which way a product goes depends on the blocks of its operands alone (rows x columns, columns along K):

* ``a`` in 1x128, 1x256 or 128x128 and ``b`` in 128x128, 1x128 or 1x256: FP8 wgmma with one promotion to float32 for
  every 128 of K, see :mod:`_gemm_hopper_kernel`; for every 256 where ``a`` is 1x256 and ``b`` is 1x256, or 128x128 with
  the same byte in both halves. Fastest with ``b`` in 128x128.
* anything else: both operands are written out in bfloat16, where an element times a power of two is exact, and
  multiplied by cuBLAS with float32 accumulation. Operands that bfloat16 cannot hold (float16, float32) make it float32.

Blocks of 32 along K stay with BF16 because a promotion every 32 of K costs as many cycles as the FP8 product itself:
together that is the time of the BF16 product, with 32x32 blocks as with 1x32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ._gemm_exact import Block, exact, finish
from ._gemm_hopper_kernel import coalesced_kernel
from ._gluon import Descriptor, hopper_why_not, swizzled
from ._launch import Versions, aligned, launch_version

__all__ = ["gemm", "why_not"]

_TILE_BLOCK = (128, 128)


def why_not(kind: str) -> str | None:
    """The reason why this backend cannot run on a device type, or None."""
    return hopper_why_not(kind)


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
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias``; contract in :func:`mxfp8.gemm`.

    Args:
        a, b: float8_e4m3fn or float8_e5m2 with uint8 scales ``[ceil(rows/r), ceil(K/c)]`` and their block ``(r, c)``,
            in any strides; or float32, bfloat16, float16 with None for both.
        out: where to write, contiguous ``[M, N]`` of ``out_dtype``; a new tensor by default.
        accumulate: add to ``out``, which must then be float32.

    **Numerics.** Coalesced scales: exact products, summed by the FP8 tensor core over 128 of K (at most 256 where ``a``
    is 1x256), where about 14 bits of the running sum are kept, and from there on in float32. Two scales whose product
    is above 2**127 make it Inf, below 2**-149 zero. All other blocks: exact products summed in float32; an element
    times its scale below 2**-126 is first rounded to bfloat16's subnormals, whose distance is 2**-133. The bias is
    added in float32 before the one rounding. The same operands give the same bits every time.
    """
    (M, K), N = a.shape, b.shape[0]
    out = output_for(out, accumulate, (M, N), out_dtype, a.device)
    if M == 0 or N == 0:
        return out
    if K == 0:
        finish(out.new_zeros((1, M, N), dtype=torch.float32), bias, out, accumulate)
    elif a_block is not None and b_block is not None and min(a_block[1], b_block[1]) >= 128:
        _coalesced(a, a_scale, a_block, b, b_scale, b_block, bias, out, accumulate)
    else:
        exact((a, a_scale, a_block), (b, b_scale, b_block), bias, out, accumulate)
    return out


def output_for(
    out: torch.Tensor | None, accumulate: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs the tensor to add to: pass out=")
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: needs contiguous {dtype} {shape}")
    if accumulate and dtype != torch.float32:
        raise ValueError(f"accumulate=True adds in float32, but out is {dtype}")
    return out


# Coalesced scales


class Tile(NamedTuple):
    """A way to compute a tile: ``consumers`` warpgroups with ``rows`` sub-tiles of 64 x 128 each, a ring of ``stages``
    slots (one more where the output is not staged in shared memory), registers of their threads and of the others',
    and how many slots of K a promotion may span."""

    consumers: int
    rows: int
    stages: int
    registers: int
    spare: int
    pair: int = 1

    @property
    def height(self) -> int:
        return 64 * self.consumers * self.rows


TALL = Tile(consumers=3, rows=1, stages=4, registers=160, spare=32)
WIDE = Tile(consumers=2, rows=2, stages=3, registers=224, spare=40)
SMALL = Tile(consumers=2, rows=1, stages=5, registers=216, spare=40)
TALL_PAIRS, SMALL_PAIRS = TALL._replace(pair=2), SMALL._replace(pair=2)

# Microseconds of a step of 128 along K, and of the rest of a tile, while all SMs of an H200 are at work: lines through
# the times at K = 1024 and 8192 (many tiles). By kind of factors (for rows; for rows and columns) and by whether they
# hold for 256 of K. TALL with factors for columns was timed at one K only.
_TIMES = {
    (1, False): {TALL: (0.584, 1.14), WIDE: (0.765, 1.84), SMALL: (0.436, 1.15)},
    (1, True): {TALL_PAIRS: (0.549, 1.01), WIDE: (0.76, 1.84), SMALL_PAIRS: (0.406, 0.50)},
    (2, False): {TALL: (0.80, 1.24), SMALL: (0.594, 0.88)},
    (2, True): {TALL_PAIRS: (0.631, 1.32), SMALL_PAIRS: (0.473, 0.76)},
}
_REDUCE = 4.0, 3.5e6  # of a split along K: microseconds to start the sum, bytes a microsecond
_MAX_SPLIT = 32


@functools.lru_cache(maxsize=4096)
def choose(M: int, N: int, K: int, sides: int, pairs: bool, sms: int, groups: int = 0) -> tuple[Tile, int]:
    """The tile and the number of parts of K with the least time, by a model of waves of tiles over the SMs. Of
    ``groups`` of rows, each leaves half a tile empty; their K is not split."""
    steps = -(-K // 128)
    best: tuple[float, Tile, int] | None = None
    for tile, (step, rest) in _TIMES[sides, pairs].items():
        tiles = (-(-M // tile.height) + groups // 2) * -(-N // 128)
        for split in range(1, min(_MAX_SPLIT, max(1, steps // 8)) + 1):
            if split > 1 and (groups or tiles * split > 4 * sms):
                break
            time = -(-tiles * split // sms) * (-(-steps // split) * step + rest)
            if split > 1:
                time += _REDUCE[0] + split * M * N * 8 / _REDUCE[1]
            if best is None or time < best[0]:
                best = time, tile, split
    assert best is not None
    return best[1:]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything about a launch but the tensors and their dtypes."""

    tile: Tile
    split: int
    direct: bool  # the kernel writes the output itself, not partial sums
    staged: bool  # and through TMA
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    versions: Versions = field(default_factory=dict)


def make_plan(
    shape: tuple[int, int, int], a_block: Block, b_block: Block, bias: bool, tma: bool, accumulate: bool, sms: int,
    forced: tuple[Tile, int] | None = None, span: int = 4, groups: int = 0,
) -> Plan:  # fmt: skip
    """The plan of a product of ``shape`` = (M, N, K), or of products of ``groups`` of the M rows. ``tma``: the output
    could be stored by TMA. ``span``: how many rows of tiles go together."""
    M, N, K = shape
    sides = 1 if b_block == _TILE_BLOCK else 2
    pairs = a_block[1] == 256 and (b_block == _TILE_BLOCK or b_block[1] == 256)
    tile, split = forced or choose(M, N, K, sides, pairs, sms, groups)
    direct = split == 1 and not accumulate
    staged = direct and tma
    constants = {
        "CONSUMERS": tile.consumers, "ROWS": tile.rows, "STAGES": tile.stages + (not staged),
        "REGISTERS": tile.registers, "SPARE": tile.spare, "SIDES": sides, "PAIR": tile.pair, "A_R": a_block[0],
        "A_K": a_block[1], "B_K": b_block[1], "MIXED": tile.pair == 2 and sides == 1, "BIAS": bias and direct,
        "TMA_STORE": staged, "PARTS": split > 1, "GROUPED": groups > 0,
    }  # fmt: skip
    tiles_m = M // tile.height + groups + 1 if groups else -(-M // tile.height)
    grid = (min(tiles_m * -(-N // 128) * split, sms), 1, 1)
    return Plan(tile, split, direct, staged, grid, (M, N, K, span, split, groups), constants)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int, int], scale_strides: tuple[int, ...], a_block: Block, b_block: Block, bias: bool, tma: bool,
    accumulate: bool, device: int,
) -> Plan:  # fmt: skip
    """As :func:`make_plan`; one for each set of integers that Triton specialises on."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return make_plan(shape, a_block, b_block, bias, tma, accumulate, sms)


def _coalesced(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: Block,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: Block,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    plan: Plan | None = None,
) -> None:
    """One scale for each row (or 128 of them) and 128 or 256 of K, on both sides."""
    assert a_scale is not None
    assert b_scale is not None
    a, b = tma_ready(a), tma_ready(b)
    a_scale, b_scale = small(a_scale), small(b_scale)
    (M, K), N = a.shape, b.shape[0]
    if plan is None:
        strides = (*a_scale.stride(), *b_scale.stride())
        plan = _plan(
            (M, N, K), strides, a_block, b_block, bias is not None, tma_stores(out), accumulate, out.device.index
        )
    target = out if plan.direct else torch.empty((plan.split, M, N), dtype=torch.float32, device=out.device)
    bias = None if bias is None else bias.contiguous()
    run(plan, a, a_scale, b, b_scale, (0, *b_scale.stride()), bias if plan.direct else None, target, None)
    if not plan.direct:
        finish(target, bias, out, accumulate)


def run(
    plan: Plan,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_scale_strides: tuple[int, ...],
    bias: torch.Tensor | None,
    target: torch.Tensor,
    table: torch.Tensor | None,
) -> None:
    """Launch the kernel on operands that are :func:`tma_ready` and scales that are :func:`small`."""
    bytes_, halves = _layouts()
    descriptors = (
        Descriptor(a, [64, 128], bytes_), Descriptor(b, [128, 128], bytes_),
        Descriptor(target, [64, 128], halves) if plan.staged else None,
    )  # fmt: skip
    alignment = aligned(a_scale, b_scale, target) if bias is None else aligned(a_scale, b_scale, target, bias)
    launch_version(
        coalesced_kernel,
        plan.versions,
        (a.dtype, b.dtype, target.dtype, None if bias is None else bias.dtype, alignment),
        plan.grid,
        (
            *descriptors, target, target.shape[-1], bias, a_scale, *a_scale.stride(), b_scale, *b_scale_strides,
            *plan.ints, table,
        ),
        plan.constants,
        target.device,
        num_warps=4,
    )  # fmt: skip


def tma_stores(out: torch.Tensor) -> bool:
    """Whether the kernel can store ``out[M, N]`` by TMA: float32 would leave no room for the ring."""
    return out.element_size() == 2 and out.shape[1] % 8 == 0 and out.data_ptr() % 16 == 0


@functools.cache
def _layouts() -> tuple[Any, Any]:
    """Of tiles in shared memory: elements of one byte, and of two."""
    return swizzled(8), swizzled(16)


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy, contiguous along K with base and row pitch at multiples of 16 bytes."""
    rows, cols = x.shape
    pitch, step = x.stride()
    if step == 1 and pitch % 16 == 0 and pitch >= cols and x.data_ptr() % 16 == 0:
        return x
    copy = torch.empty((rows, -(-cols // 16) * 16), dtype=torch.uint8, device=x.device)[:, :cols]
    copy.copy_(x.view(torch.uint8))
    return copy.view(x.dtype)


def small(scale: torch.Tensor) -> torch.Tensor:
    """``scale``, or a copy, whose offsets inside a matrix fit 32 bits."""
    rows, cols = scale.shape[-2:]
    return scale if (rows - 1) * scale.stride(-2) + (cols - 1) * scale.stride(-1) < 2**31 else scale.contiguous()
