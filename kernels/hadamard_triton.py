"""The randomised Hadamard transform in plain Triton, alone or in front of a cast along the same axis: one pass, any
strides, the bits of the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED, element_codes, encode, random_words, rounded_by_chance, to_float32
from ._launch import aligned, launch, triton_why_not
from .quantize_triton import hardware, layout, quantize, random_of, readable, scaled_tile, three, three_dims

__all__ = ["hadamard", "hadamard_quantize", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why this kernel cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def _butterfly(v, SIZE: tl.constexpr, H: tl.constexpr):
    """Sums and differences of entries that lie ``H`` apart, in runs of ``SIZE``: ``v`` is ``[N, SIZE]``."""
    N: tl.constexpr = v.shape[0]
    pairs = tl.permute(tl.reshape(v, (N, SIZE // (2 * H), 2, H)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (N, SIZE))


@triton.jit
def butterflies(v, SIZE: tl.constexpr):
    """Each row of ``v[N, SIZE]`` times the Hadamard matrix, by sums in a fixed order."""
    v = _butterfly(v, SIZE, 1)
    v = _butterfly(v, SIZE, 2)
    v = _butterfly(v, SIZE, 4)
    v = _butterfly(v, SIZE, 8)
    if SIZE > 16:
        v = _butterfly(v, SIZE, 16)
    if SIZE > 32:
        v = _butterfly(v, SIZE, 32)
    if SIZE > 64:
        v = _butterfly(v, SIZE, 64)
    return v


@triton.jit
def rotated(x, seed_lo, seed_hi, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """The transform of runs of ``SIZE`` in the rows of ``x[N, L]``."""
    N: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    column = tl.arange(0, SIZE)[None, :].to(tl.uint32)
    zero = tl.zeros((1, SIZE), tl.uint32)
    words = random_words(seed_lo, seed_hi, zero, zero, zero, column)
    v = tl.reshape(x, (N * L // SIZE, SIZE)) * (1.0 - 2.0 * (words >> 31).to(tl.float32))
    return tl.reshape(butterflies(v, SIZE) * FACTOR, (N, L))


@triton.jit
def _place(ACROSS, PADDED, BN: tl.constexpr, BL: tl.constexpr):
    """``(batch, tile across, tile along)`` of a program."""
    tiles_n = tl.cdiv(ACROSS, BN)
    tiles = tiles_n * tl.cdiv(PADDED, BL)
    pid = tl.program_id(0)
    return (pid // tiles).to(tl.int64), (pid % tiles) % tiles_n, (pid % tiles) // tiles_n


@triton.jit(do_not_specialize=["seed_lo", "seed_hi"])
def _kernel(
    x_ptr, y_ptr, ACROSS, ALONG, PADDED, x_b, x_n, x_l, y_b, y_n, y_l, seed_lo: tl.int64, seed_hi: tl.int64,
    BN: tl.constexpr, BL: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One tile of ``BN`` entries across and ``BL`` along the axis, whole runs of ``SIZE``; ``_n`` and ``_l`` are
    strides across and along."""
    b, pn, pl = _place(ACROSS, PADDED, BN, BL)
    n = (pn * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    at = (pl * BL + tl.arange(0, BL)).to(tl.int64)[None, :]
    x = to_float32(tl.load(x_ptr + b * x_b + n * x_n + at * x_l, mask=(n < ACROSS) & (at < ALONG), other=0.0))
    y = rotated(x, seed_lo, seed_hi, SIZE, FACTOR)
    tl.store(y_ptr + b * y_b + n * y_n + at * y_l, y, mask=(n < ACROSS) & (at < PADDED))


def tile(axis: int, size: int) -> tuple[int, int]:
    """``(BN, BL)``: 4096 elements, at least 64 of them side by side in memory; one run along columns."""
    if INTERPRETED:  # a program costs more than its elements
        return 128, 128
    return (32, 128) if axis == -1 else (max(32, 4096 // size), size)


def hadamard(x: torch.Tensor, *, axis: int, size: int, seed: int) -> torch.Tensor:
    """Runs of ``size`` along ``axis`` of ``x``, any shape and strides, times signs and the Hadamard matrix: contiguous
    float32 with the extent along ``axis`` padded to a multiple of ``size``.

    **Numerics.** The bits of ``mxfp8.reference.hadamard``: butterflies of distance 1, 2, 4, ... in float32, then one
    multiplication by float32(1/sqrt(size)). Multiplying by a sign is exact, so that contraction changes nothing.
    """
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // size) * size
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    x = readable(x)
    (b, r, c), (x_b, x_r, x_c) = three_dims(x.shape, x.stride())
    _, (y_b, y_r, y_c) = three_dims(y.shape, y.stride())
    bn, bl = tile(axis, size)
    ints: tuple[int, ...]
    if axis == -1:
        across, ints = r, (r, c, y.shape[-1], x_b, x_r, x_c, y_b, y_r, y_c)
    else:
        across, ints = c, (c, r, y.shape[-2], x_b, x_c, x_r, y_b, y_c, y_r)
    constants: dict[str, Any] = {"BN": bn, "BL": bl, "SIZE": size, "FACTOR": 1.0 / math.sqrt(size)}
    key = (x.dtype, aligned(x, y), ints, axis, size)
    grid = (b * -(-across // bn) * -(-ints[2] // bl), 1, 1)
    launch(_kernel, key, grid, (x, y, *ints, seed & 0xFFFFFFFF, seed >> 32), constants, x.device, num_warps=4)
    return y


# In front of a cast


@triton.jit(do_not_specialize=["signs_lo", "signs_hi", "seed_lo", "seed_hi", "step", "stream", "row_offset",
                               "col_offset"])  # fmt: skip
def _cast_kernel(
    x_ptr, q_ptr, s_ptr, step_ptr, ACROSS, ALONG, PADDED, x_b, x_n, x_l, q_b, q_n, q_l, s_b, s_n, s_l,
    signs_lo: tl.int64, signs_hi: tl.int64,
    seed_lo: tl.int64, seed_hi: tl.int64, step: tl.int64, stream: tl.int64, row_offset: tl.int64, col_offset: tl.int64,
    BN: tl.constexpr, BL: tl.constexpr, NB: tl.constexpr, LB: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
    FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr, ROUNDING: tl.constexpr, DOWN: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """As ``_kernel``, and the cast of the tile in blocks of ``NB`` across by ``LB`` along: whole ones, and whole runs.
    ``DOWN``: whether the axis runs over rows. ``ROUNDING``: of ``random_of``."""
    b, pn, pl = _place(ACROSS, PADDED, BN, BL)
    n = (pn * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    at = (pl * BL + tl.arange(0, BL)).to(tl.int64)[None, :]
    x = to_float32(tl.load(x_ptr + b * x_b + n * x_n + at * x_l, mask=(n < ACROSS) & (at < ALONG), other=0.0))
    scaled, byte = scaled_tile(rotated(x, signs_lo, signs_hi, SIZE, FACTOR), NB, LB, FMT, RULE, SATFINITE)
    if ROUNDING > 0:
        if DOWN:
            rows, col = row_offset + b * PADDED + at, pn * BN
        else:
            rows, col = row_offset + b * ACROSS + n, pl * BL
        scaled = rounded_by_chance(
            scaled, step_ptr, seed_lo, seed_hi, step, stream, rows, col_offset + col, FMT, ROUNDING, DOWN
        )
    codes = encode(scaled, FMT, HARDWARE)
    tl.store(q_ptr + b * q_b + n * q_n + at * q_l, codes, mask=(n < ACROSS) & (at < PADDED))
    n = (pn * (BN // NB) + tl.arange(0, BN // NB)).to(tl.int64)[:, None]
    at = (pl * (BL // LB) + tl.arange(0, BL // LB)).to(tl.int64)[None, :]
    inside = (n < tl.cdiv(ACROSS, NB)) & (at < tl.cdiv(PADDED, LB))
    tl.store(s_ptr + b * s_b + n * s_n + at * s_l, byte.to(tl.uint8), mask=inside)


def cast_tile(block: tuple[int, int], size: int, axis: int, noisy: bool) -> tuple[int, int, int]:
    """``(BN, BL, warps)``: whole blocks (across, along) and runs, of the extent that was fastest on an H200. A thread
    has 32 elements, or 16 where a block reaches over rows and columns or random words take the registers that a long
    block along columns needs."""
    few = size < 128 if noisy and axis == -1 else block[1] >= 128
    bl = max(block[1], size, 64 if axis == -2 and not few else 128)
    bn = max(block[0], (2048 if few else 4096) // bl, 16)
    each = 16 if block[0] > 1 or (noisy and axis == -2 and few) else 32
    return bn, bl, bn * bl // (32 * each)


def hadamard_quantize(
    x: torch.Tensor, *, axis: int, size: int, signs: int, fmt: Any, block: tuple[int, int], scale_rule: Any,
    rounding: Any, key: Any, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(qdata, scale bytes as uint8)`` of the transform of ``x``, in the layout of ``quantize_triton.quantize``. Of
    128x128 blocks with random bits, for which a tile has no registers, in two passes.

    **Numerics.** The bits of :func:`hadamard` with seed ``signs``, then of the cast.
    """
    if block == (128, 128) and rounding == "stochastic":
        return quantize(
            hadamard(x, axis=axis, size=size, seed=signs), axis=axis, fmt=fmt, block=block, scale_rule=scale_rule,
            rounding=rounding, key=key, satfinite=satfinite,
        )  # fmt: skip
    x = readable(x)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // size) * size
    out = layout(tuple(shape), axis, block)
    qdata, scale = out.allocate(x.device)
    if qdata.numel() == 0:
        return qdata.view(fmt.dtype), scale.zero_()
    FMT, RULE = element_codes(fmt, scale_rule)
    mode, step_at, random = random_of(key if rounding == "stochastic" else None, x)
    (b, r, c), (x_b, x_r, x_c) = three_dims(x.shape, x.stride())
    (q_b, q_r, q_c), (s_b, s_r, s_c) = three(out.qdata_stride), three(out.scale_stride)
    ints: tuple[int, ...]
    if axis == -1:
        across, ints = r, (r, c, shape[-1], x_b, x_r, x_c, q_b, q_r, q_c, s_b, s_r, s_c)
    else:
        across, ints = c, (c, r, shape[-2], x_b, x_c, x_r, q_b, q_c, q_r, s_b, s_c, s_r)
    bn, bl, warps = cast_tile(block, size, axis, mode > 0)
    constants: dict[str, Any] = {
        "BN": bn, "BL": bl, "NB": block[0], "LB": block[1], "SIZE": size, "FACTOR": 1.0 / math.sqrt(size), "FMT": FMT,
        "RULE": RULE, "SATFINITE": satfinite, "ROUNDING": mode, "DOWN": axis == -2, "HARDWARE": hardware(x.device),
    }  # fmt: skip
    version = (*constants.values(), x.dtype, aligned(x), ints)
    grid = (b * -(-across // bn) * -(-ints[2] // bl), 1, 1)
    args = (x, qdata, scale, step_at, *ints, signs & 0xFFFFFFFF, signs >> 32, *random)
    launch(_cast_kernel, version, grid, args, constants, x.device, num_warps=warps)
    return qdata.view(fmt.dtype), scale
