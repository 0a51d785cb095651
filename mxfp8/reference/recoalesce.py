"""Give neighbouring blocks of a quantised tensor one common scale: a 1x32 tensor becomes 1x128, or 32x32, and so on.

Meant for tensors of which only the quantised form is left (a checkpoint, another library's output). Where the
high-precision tensor is at hand, quantise that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from mxfp8.formats import E8M0_NAN, ElementFormat
from mxfp8.metrics import sqnr_db
from mxfp8.tensor import dequantize

__all__ = ["RecoalesceLoss", "recoalesce", "recoalesce_loss"]

_FARTHEST = 64  # so many binades down every element is zero; a float32 holds all powers up to there


def recoalesce(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    new_block: tuple[int, int],
    fmt: ElementFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, scale bytes as uint8)`` with one scale for each ``new_block`` instead of each ``block``.

    Args:
        qdata: ``[..., R, C]`` or ``[C]`` of ``fmt.dtype``.
        scale: E8M0 bytes, one for each block.
        block, new_block: (rows, columns); each extent of ``new_block`` is a multiple of that of ``block``.

    Returns:
        Elements in the memory order of ``qdata``, and their scales.

    Raises:
        ValueError: ``new_block`` is not made of whole blocks.

    **Numerics.** A new block's byte ``C`` is the maximum of the bytes ``c`` of its blocks that hold anything but zeros
    (0 if none does). Elements are ``value * 2**(c - C)``, exact, then rounded to nearest even: values only shrink, so
    none saturates, and a block whose byte is ``C`` keeps its codes. Zeros keep their signs. Byte 255 wins and makes
    all elements 0x7F. A NaN code under another byte becomes 0x7F by itself, an E5M2 Inf stays.
    """
    check_blocks(block, new_block)
    if qdata.ndim >= 2 and qdata.stride(-1) != 1 and qdata.stride(-2) == 1:
        q, s = recoalesce(qdata.mT, scale.mT, block[::-1], new_block[::-1], fmt)
        return q.mT, s.mT
    codes, byte = qdata.view(torch.uint8), scale.view(torch.uint8).to(torch.int32)
    if qdata.numel() == 0:
        shape = [-(-n // m) for n, m in zip(qdata.shape[-2:], new_block[-qdata.ndim :], strict=True)]
        return qdata.clone(), byte.new_zeros((*qdata.shape[:-2], *shape), dtype=torch.uint8)
    if qdata.ndim == 1:
        q, s = _recoalesce(codes[None], byte[None], block, new_block, fmt)
        return q[0].view(fmt.dtype), s[0]
    q, s = _recoalesce(codes, byte, block, new_block, fmt)
    return q.view(fmt.dtype), s


def check_blocks(block: tuple[int, int], new_block: tuple[int, int]) -> None:
    """ValueError unless ``new_block`` is made of whole blocks."""
    if new_block[0] % block[0] or new_block[1] % block[1]:
        raise ValueError(f"blocks of {block} do not fill blocks of {new_block}: both extents must be multiples")


def _recoalesce(
    codes: torch.Tensor, byte: torch.Tensor, block: tuple[int, int], new_block: tuple[int, int], fmt: ElementFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    height, width = codes.shape[-2:]
    codes = pad(codes, (0, -width % new_block[1], 0, -height % new_block[0]))
    blocks = _blocks(codes, *block)
    rows, cols = blocks.shape[-4], blocks.shape[-2]
    byte = pad(byte, (0, cols - byte.shape[-1], 0, rows - byte.shape[-2]))

    empty = (blocks & 0x7F).amax(dim=(-3, -1)) == 0
    counted = byte.masked_fill(empty & (byte != E8M0_NAN), 0)
    groups = _blocks(counted, new_block[0] // block[0], new_block[1] // block[1])
    highest = groups.amax(dim=(-3, -1))
    down = (highest[..., :, None, :, None] - _blocks(byte, *(groups.shape[-3], groups.shape[-1]))).clamp(0, _FARTHEST)
    factor = ((127 - _whole(down)) << 23).view(torch.float32)

    values = blocks.view(fmt.dtype).to(torch.float32) * factor[..., :, None, :, None]
    out = values.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    out = torch.where(values.isinf(), blocks, out)
    out = torch.where(values.isnan(), fmt.nan_code, out)
    out = _blocks(_whole(out), *new_block)
    out = torch.where((highest == E8M0_NAN)[..., :, None, :, None], fmt.nan_code, out)
    return _whole(out)[..., :height, :width].to(torch.uint8).contiguous(), highest.to(torch.uint8)


def _blocks(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """``[..., R, C]`` as ``[..., R / rows, rows, C / cols, cols]``."""
    split: torch.Tensor = x.unflatten(-1, (x.shape[-1] // cols, cols)).unflatten(-3, (x.shape[-2] // rows, rows))
    return split


def _whole(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(-2, -1).flatten(-3, -2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoalesceLoss:
    """What coarser blocks cost.

    Attributes:
        changed_frac: fraction of elements whose value changed.
        sqnr_db: signal to noise of the new values against the old ones; +inf when nothing changed.
    """

    changed_frac: float
    sqnr_db: float


def recoalesce_loss(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    new_block: tuple[int, int],
    fmt: ElementFormat,
) -> RecoalesceLoss:
    """The cost of :func:`recoalesce` for this tensor. Waits for the device: for audits, not for training steps."""
    before = dequantize(qdata, scale, block, torch.float64)
    after = dequantize(*recoalesce(qdata, scale, block, new_block, fmt), new_block, torch.float64)
    changed = ~((before == after) | (before.isnan() & after.isnan()))
    fraction = changed.to(torch.float64).mean().item() if changed.numel() else 0.0
    return RecoalesceLoss(changed_frac=fraction, sqnr_db=sqnr_db(before, after))
