"""Coarser blocks for a tensor of which only the quantised form is left: from a checkpoint, or from another library.

Products run on Hopper's FP8 tensor cores where scales reach over 128 of K or more. A tensor in the standard's 1x32
blocks gets there by one pass over memory. Where the high-precision tensor is at hand, quantise that in coarser blocks
instead.
"""

from __future__ import annotations

from mxfp8 import dispatch
from mxfp8.formats import BlockShape, get_block
from mxfp8.reference.recoalesce import RecoalesceLoss
from mxfp8.reference.recoalesce import recoalesce_loss as _loss
from mxfp8.tensor import MXTensor, block_rc

__all__ = ["RecoalesceLoss", "recoalesce", "recoalesce_loss"]


def recoalesce(x: MXTensor, block: BlockShape, backend: str = "auto") -> MXTensor:
    """``x`` with one scale for each ``block`` instead of each ``x.block``, scaled along the same axis.

    Args:
        block: (across, along), whole blocks of ``x``: (1, 128), (1, 256), (32, 32) or (128, 128) for a tensor in 1x32.

    Returns:
        Elements in the memory order of ``x.qdata``.

    Raises:
        ValueError: ``block`` is not made of whole blocks of ``x``.

    **Numerics.** A new block takes the largest scale of those of its blocks that hold anything but zeros. The elements
    of the others are divided by the power of two in between and rounded to nearest even: values only shrink, none
    saturates, and small ones next to large ones may lose bits or become zero. :func:`recoalesce_loss` says how much.
    """
    block = get_block(block)
    run = dispatch.resolve("recoalesce", backend, x.device)
    qdata, scale = run(x.qdata, x.scale_bytes, block_rc(x.block, x.axis), block_rc(block, x.axis), x.fmt)
    return MXTensor(qdata, scale, x.fmt, x.axis, block)


def recoalesce_loss(x: MXTensor, block: BlockShape) -> RecoalesceLoss:
    """What :func:`recoalesce` would cost: the share of elements that change their value, and the SQNR in dB of the new
    values against the old ones. Waits for the device, and works in float64: for an audit, not for a training step."""
    block = get_block(block)
    return _loss(x.qdata, x.scale_bytes, block_rc(x.block, x.axis), block_rc(block, x.axis), x.fmt)
