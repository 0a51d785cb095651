"""Quantisation to 1x32 blocks along rows with scales in the tiled form, in one pass: nothing is rearranged later."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import element_codes, encode, to_float32
from ._launch import aligned, launch, triton_why_not
from .quantize_triton import hardware, readable, scaled_tile, three_dims
from .scale_layout import tiled_offset, tiled_size

__all__ = ["quantize_tiled", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def _quantize_tiled_kernel(
    x_ptr, q_ptr, s_ptr, R, C, TILES, x_b, x_r, x_c,
    BM: tl.constexpr, BK: tl.constexpr, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``BM`` rows by ``BK`` columns of whole scale tiles. Past the matrix blocks are zero, and so are their bytes."""
    tiles_k = tl.cdiv(C, BK)
    tiles_m = TILES * (128 // BM)
    pid = tl.program_id(0)
    b = (pid // (tiles_m * tiles_k)).to(tl.int64)
    pm, pk = (pid // tiles_k) % tiles_m, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    inside = (rows < R) & (cols < C)
    x = to_float32(tl.load(x_ptr + b * x_b + rows * x_r + cols * x_c, mask=inside, other=0.0))
    scaled, byte = scaled_tile(x, 1, 32, FMT, RULE, SATFINITE)
    tl.store(q_ptr + (b * R + rows) * C + cols, encode(scaled, FMT, HARDWARE), mask=inside)

    s_cols = (pk * (BK // 32) + tl.arange(0, BK // 32)).to(tl.int64)[None, :]
    across = tl.cdiv(C, 128)
    tile = (b * TILES + rows // 128) * across + s_cols // 4
    tl.store(s_ptr + tile * 512 + tiled_offset(rows, s_cols), byte.to(tl.uint8), mask=s_cols < across * 4)


def quantize_tiled(
    x: torch.Tensor, *, fmt: Any, scale_rule: Any, satfinite: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, tiled scales)`` of ``x[..., R, C]`` in 1x32 blocks along the last dimension, rounded to nearest.

    The bits of ``mxfp8.quantize`` followed by ``scale_layout.to_tiled``: ``qdata`` contiguous of ``fmt.dtype``, scales
    uint8 ``[..., tiles * 512]``.
    """
    if x.ndim < 2:
        raise ValueError(f"quantize_tiled takes at least two dimensions, not shape {tuple(x.shape)}")
    x = readable(x)
    r, c = x.shape[-2:]
    qdata = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    tiled = torch.empty((*x.shape[:-2], tiled_size(r, -(-c // 32))), dtype=torch.uint8, device=x.device)
    if x.numel() == 0:
        return qdata.view(fmt.dtype), tiled
    (b, r, c), strides = three_dims(x.shape, x.stride())
    FMT, RULE = element_codes(fmt, scale_rule)
    tiles, bm, bk = -(-r // 128), 32, 128
    constants = {
        "BM": bm, "BK": bk, "FMT": FMT, "RULE": RULE, "SATFINITE": satfinite, "HARDWARE": hardware(x.device),
    }  # fmt: skip
    launch(
        _quantize_tiled_kernel,
        (x.dtype, b, r, c, strides, tuple(constants.values()), aligned(x)),
        (b * tiles * (128 // bm) * -(-c // bk), 1, 1),
        (x, qdata, tiled, r, c, tiles, *strides),
        constants,
        x.device,
        num_warps=4,
    )
    return qdata.view(fmt.dtype), tiled
