"""The randomised Hadamard transform in plain Triton: one pass, any strides, the bits of the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import INTERPRETED, random_words, to_float32
from ._launch import aligned, launch, triton_why_not
from .quantize_triton import readable, three_dims

__all__ = ["hadamard", "why_not"]


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


@triton.jit(do_not_specialize=["seed_lo", "seed_hi"])
def _kernel(
    x_ptr, y_ptr, ACROSS, ALONG, PADDED, x_b, x_n, x_l, y_b, y_n, y_l, seed_lo: tl.int64, seed_hi: tl.int64,
    BN: tl.constexpr, BL: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One tile of ``BN`` entries across and ``BL`` along the axis, whole runs of ``SIZE``; ``_n`` and ``_l`` are
    strides across and along."""
    tiles_n = tl.cdiv(ACROSS, BN)
    tiles = tiles_n * tl.cdiv(PADDED, BL)
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    n = ((pid % tiles) % tiles_n * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    at = ((pid % tiles) // tiles_n * BL + tl.arange(0, BL)).to(tl.int64)[None, :]
    x = to_float32(tl.load(x_ptr + b * x_b + n * x_n + at * x_l, mask=(n < ACROSS) & (at < ALONG), other=0.0))
    column = tl.arange(0, SIZE)[None, :].to(tl.uint32)
    zero = tl.zeros((1, SIZE), tl.uint32)
    words = random_words(seed_lo, seed_hi, zero, zero, zero, column)
    v = tl.reshape(x, (BN * BL // SIZE, SIZE)) * (1.0 - 2.0 * (words >> 31).to(tl.float32))
    v = butterflies(v, SIZE)
    y = tl.reshape(v * FACTOR, (BN, BL))
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
