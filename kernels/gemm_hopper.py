"""MXFP8 matrix products on Hopper (sm_90a): FP8 tensor cores where scales are coalesced, BF16 ones elsewhere.

Which way a product goes depends on the blocks of its operands alone (rows x columns, columns along K):

* ``a`` in 1x128, 1x256 or 128x128 and ``b`` in 128x128, 1x128 or 1x256: FP8 wgmma with one promotion to float32 for
  every 128 of K, see :mod:`_gemm_hopper_kernel`; for every 256 where ``a`` is 1x256 and ``b`` is 1x256, or 128x128 with
  the same byte in both halves. Fastest with ``b`` in 128x128.
* both in 32x32: FP8 wgmma with a promotion for every 32 of K, or up to 128 where neighbouring blocks have the same
  scales, see :mod:`_gemm_square_kernel`.
* anything else: both operands are written out in bfloat16, where an element times a power of two is exact, and
  multiplied by cuBLAS with float32 accumulation. Operands that bfloat16 cannot hold (float16, float32) make it float32.

1x32 blocks stay with BF16: a promotion every 32 of K, with a factor for each row and column, takes longer than the BF16
product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from . import activation_quantize_hopper as activate_and_cast
from . import quantize_hopper as cast
from ._device import element_codes
from ._gemm_epilogue import Maybe, product_and_casts
from ._gemm_exact import Block, Operand, exact, finish
from ._gemm_hopper_epilogue import Epilogue
from ._gemm_hopper_kernel import coalesced_kernel
from ._gemm_square_kernel import square_kernel
from ._gemm_tiles import SMALL, SMALL_PAIRS, WIDE, Tile, choose, factors, measured, span
from ._gluon import Descriptor, hopper_why_not, swizzled
from ._launch import Versions, aligned, launch_version
from .activation_quantize_triton import ACTIVATIONS
from .gemm_triton import output_for
from .quantize_triton import layout

__all__ = ["gemm", "gemm_quantize", "why_not"]


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
    activation: str | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """``activation(a[M, K] @ b[N, K].T + bias)``; contract in :func:`mxfp8.gemm`.

    Args:
        a, b: float8_e4m3fn or float8_e5m2 with uint8 scales ``[ceil(rows/r), ceil(K/c)]`` and their block ``(r, c)``,
            in any strides; or float32, bfloat16, float16 with None for both.
        out: where to write, contiguous ``[M, N]`` of ``out_dtype``; a new tensor by default.
        activation: a name of :data:`ACTIVATIONS` but swiglu.
        accumulate: add to ``out``, which must then be float32; without an activation.

    **Numerics.** Coalesced scales: exact products, summed by the FP8 tensor core over 128 of K (at most 256 where ``a``
    is 1x256), where about 14 bits of the running sum are kept, and from there on in float32; with 32x32 blocks over 32
    to 128, as scales agree. Two scales whose product
    is above 2**127 make it Inf, below 2**-149 zero. All other blocks: exact products summed in float32; an element
    times its scale below 2**-126 is first rounded to bfloat16's subnormals, whose distance is 2**-133. The bias is
    added and the activation computed in float32 before the one rounding. The same operands give the same bits every
    time.
    """
    (M, K), N = a.shape, b.shape[0]
    out = output_for(out, accumulate, (M, N), out_dtype, a.device)
    if M == 0 or N == 0:
        return out
    if K == 0:
        finish(out.new_zeros((1, M, N), dtype=torch.float32), bias, out, accumulate, activation)
    elif _fast(a_block, b_block):
        how = Epilogue(bias is not None, -1 if activation is None else ACTIVATIONS[activation], accumulate)
        coalesced((a, a_scale, a_block), (b, b_scale, b_block), bias, out, how, activation)
    else:
        exact((a, a_scale, a_block), (b, b_scale, b_block), bias, out, accumulate, activation)
    return out


def _fast(a_block: Block | None, b_block: Block | None) -> bool:
    """Whether FP8 tensor cores take operands in these blocks."""
    if a_block is None or b_block is None:
        return False
    return _square(a_block, b_block) or min(a_block[1], b_block[1]) >= 128


def _square(a_block: Block, b_block: Block) -> bool:
    return a_block == b_block == (32, 32)


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

    Where rows alone are asked for, the FP8 kernel casts them from its accumulators, in blocks of 1x32 or 1x128, if N is
    a multiple of 128 and K is not split. All else is a product followed by casts: one pass for both directions, which
    is faster than rows from the kernel and a pass for columns.

    **Numerics.** The bits of :func:`gemm` followed by the casts.
    """
    rest = {"bias": bias, "activation": activation, "hp_dtype": hp_dtype, "casts": casts}
    made = _rows_from_registers((a, a_scale, a_block), (b, b_scale, b_block), **rest)
    if made is None:
        product = functools.partial(gemm, a, a_scale, a_block, b, b_scale, b_block, bias=bias)
        return product_and_casts(
            lambda dtype: product(out_dtype=dtype), activation, hp_dtype, casts, cast, activate_and_cast
        )
    q, s, h = made
    return q, s, None, None, h if "hp" in casts.outputs else None


_THROUGH = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of an Epilogue


def _rows_from_registers(
    a: Operand, b: Operand, *, bias: torch.Tensor | None, activation: str | None, hp_dtype: torch.dtype, casts: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """``(q, s, h)`` by one launch (``h`` is ``q`` where it was not asked for); None where that cannot be."""
    (M, K), N, names = a[0].shape, b[0].shape[0], casts.outputs
    if "rows" not in names or "columns" in names or casts.block not in ((1, 32), (1, 128)):
        return None
    if not _fast(a[2], b[2]) or 0 in (M, N, K) or N % 128 or activation == "swiglu":
        return None
    fmt, rule = element_codes(casts.fmt, casts.scale_rule)
    how = Epilogue(
        bias=bias is not None, activation=-1 if activation is None else ACTIVATIONS[activation], block=casts.block[1],
        fmt=fmt, rule=rule, satfinite=casts.satfinite, before="hp" in names,
        through=_THROUGH[hp_dtype] if casts.round_first and "hp" not in names else 0,
    )  # fmt: skip
    if plan_for(a, b, how, hp_dtype.itemsize == 2).split > 1:
        return None
    q, s = layout((M, N), -1, casts.block).allocate(a[0].device)
    h = torch.empty((M, N), dtype=hp_dtype, device=q.device) if how.before else q
    coalesced(a, b, bias, h, how, copies=(q, s))
    return q.view(casts.fmt.dtype), s, h


# Coalesced scales


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything about a launch but the tensors and their dtypes."""

    tile: Tile
    split: int
    staged: bool  # the output is stored by TMA
    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]
    kernel: Any = coalesced_kernel
    versions: Versions = field(default_factory=dict)


def make_plan(
    shape: tuple[int, int, int], a_block: Block, b_block: Block, how: Epilogue, tma: bool, sms: int,
    forced: tuple[Tile, int] | None = None, groups: int = 0, divided: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a product of ``shape`` = (M, N, K), or of products of ``groups`` of the M rows, or with ``divided``
    of K. ``how``: what becomes of the sums, which is done later where K is split. ``tma``: the output could be stored
    by TMA."""
    M, N, K = shape
    sides, pairs = factors(a_block, b_block)
    if divided and forced is None:
        tile, split = choose(groups * M, N, -(-K // groups), sides, pairs, sms, groups)
        if tile.consumers == 3 and (pairs or not tma):  # three would spill registers
            tile = WIDE if sides == 1 else SMALL_PAIRS if pairs else SMALL
        forced = tile, split
    tile, split = forced or choose(M, N, K, sides, pairs, sms, groups)
    if how.before and how.block and sides == 2 and tile.consumers == 3:  # that, too; sums are the same
        tile = SMALL_PAIRS if tile.pair == 2 else SMALL
    staged = split == 1 and tma and (how.before or not how.block)
    constants = {
        "CONSUMERS": tile.consumers, "ROWS": tile.rows, "STAGES": tile.stages + (not staged),
        "REGISTERS": tile.registers, "SPARE": tile.spare, "SIDES": sides, "PAIR": tile.pair, "A_R": a_block[0],
        "A_K": a_block[1], "B_K": b_block[1], "MIXED": tile.pair == 2 and sides == 1, "TMA_STORE": staged,
        "PARTS": split > 1, "GROUPED": 2 if divided else int(groups > 0),
        "HOW": how if split == 1 else Epilogue(),
    }  # fmt: skip
    tiles_m = M // tile.height + groups + 1 if groups else -(-M // tile.height)
    if divided:
        tiles_m = groups * -(-M // tile.height)
    grid = (min(tiles_m * -(-N // 128) * split, sms), 1, 1)
    return Plan(tile, split, staged, grid, (M, N, K, span(M, N, K, groups), split, groups), constants)


def make_square_plan(
    shape: tuple[int, int, int], how: Epilogue, tma: bool, sms: int, forced: tuple[Tile, int] | None = None
) -> Plan:
    """As :func:`make_plan`, for 32x32 blocks on both sides. Their tiles cost what those with factors for rows and
    columns do."""
    M, N, K = shape
    tile, split = forced or choose(M, N, K, 2, False, sms)
    staged = split == 1 and tma and (how.before or not how.block)
    constants = {
        "CONSUMERS": tile.consumers, "STAGES": tile.stages + (not staged), "REGISTERS": tile.registers,
        "SPARE": tile.spare, "TMA_STORE": staged, "PARTS": split > 1, "HOW": how if split == 1 else Epilogue(),
    }  # fmt: skip
    grid = (min(-(-M // tile.height) * -(-N // 128) * split, sms), 1, 1)
    return Plan(tile, split, staged, grid, (M, N, K, span(M, N, K), split, 0), constants, square_kernel)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int, int], scale_strides: tuple[int, ...], a_block: Block, b_block: Block, how: Epilogue,
    tma: bool, device: int,
) -> Plan:  # fmt: skip
    """As :func:`make_plan`; one for each set of integers that Triton specialises on."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if _square(a_block, b_block):
        return make_square_plan(shape, how, tma, sms)
    return make_plan(shape, a_block, b_block, how, tma, sms, measured(*shape, *factors(a_block, b_block), device))


def plan_for(a: Operand, b: Operand, how: Epilogue, tma: bool) -> Plan:
    """The plan for two operands in MX, whose scales are :func:`small`."""
    (x, a_scale, a_block), (y, b_scale, b_block) = a, b
    assert a_scale is not None
    assert b_scale is not None
    assert a_block is not None
    assert b_block is not None
    strides = (*a_scale.stride(), *b_scale.stride())
    return _plan((x.shape[0], y.shape[0], x.shape[1]), strides, a_block, b_block, how, tma, x.device.index)


def coalesced(
    a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor, how: Epilogue, activation: str | None = None,
    copies: tuple[torch.Tensor, torch.Tensor] | None = None, plan: Plan | None = None,
) -> None:  # fmt: skip
    """One scale for each row (or 128 of them) and 128 or 256 of K, on both sides. ``copies``: the elements and scale
    bytes that a cast along rows goes to."""
    (x, a_scale, a_block), (y, b_scale, b_block) = a, b
    assert a_scale is not None
    assert b_scale is not None
    x, y, a_scale, b_scale = tma_ready(x), tma_ready(y), small(a_scale), small(b_scale)
    if plan is None:
        plan = plan_for((x, a_scale, a_block), (y, b_scale, b_block), how, tma_stores(out))
    bias = None if bias is None else bias.contiguous()
    if plan.split == 1:
        run(plan, x, a_scale, y, b_scale, (0, *b_scale.stride()), bias, out, None, copies)
        return
    sums = torch.empty((plan.split, *out.shape), dtype=torch.float32, device=out.device)
    run(plan, x, a_scale, y, b_scale, (0, *b_scale.stride()), None, sums, None)
    finish(sums, bias, out, how.add, activation)


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
    copies: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch the kernel on operands that are :func:`tma_ready` and scales that are :func:`small`."""
    bytes_, halves = _layouts()
    descriptors = (
        Descriptor(a, [64, 128], bytes_), Descriptor(b, [128, 128], bytes_),
        Descriptor(target, [64, 128], halves) if plan.staged else None,
    )  # fmt: skip
    alignment = aligned(*(x for x in (a_scale, b_scale, target, bias, *(copies or ())) if x is not None))
    launch_version(
        plan.kernel,
        plan.versions,
        (a.dtype, b.dtype, target.dtype, None if bias is None else bias.dtype, alignment),
        plan.grid,
        (
            *descriptors, target, target.shape[-1], bias, a_scale, *a_scale.stride(), b_scale, *b_scale_strides,
            *plan.ints, table, *(copies or (None, None)),
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
