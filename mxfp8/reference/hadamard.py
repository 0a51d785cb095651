"""Randomised Hadamard transform along one axis, in plain torch."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule
from mxfp8.reference.quantize import quantize
from mxfp8.reference.random import random_signs
from mxfp8.rng import RngKey

__all__ = ["HADAMARD_SIZES", "hadamard", "hadamard_quantize"]

HADAMARD_SIZES = (16, 32, 64, 128)


def hadamard(x: torch.Tensor, *, axis: int, size: int, seed: int) -> torch.Tensor:
    """Replace every run of ``size`` entries along ``axis`` by ``(run * signs) @ H / sqrt(size)``, in float32.

    ``H`` is the Sylvester Hadamard matrix, ``signs`` come from ``seed``. A ragged tail is padded with zeros, so the
    result's extent along ``axis`` is a multiple of ``size``. Applied to both operands of a product over that axis it
    leaves the exact product unchanged, because the transform is orthogonal.

    **Numerics.** Sums are formed by butterflies of distance 1, 2, 4, ... in float32, then multiplied once by
    float32(1/sqrt(size)): every backend has the same bits.
    """
    y = x.to(torch.float32)
    y = y.movedim(axis, -1)
    if tail := -y.shape[-1] % size:
        y = pad(y, (0, tail))
    shape = y.shape
    y = y.reshape(*shape[:-1], shape[-1] // size, size) * random_signs(seed, size, x.device)
    h = 1
    while h < size:
        y = y.unflatten(-1, (-1, 2, h))
        a, b = y.unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        h *= 2
    return (y * (1.0 / math.sqrt(size))).reshape(shape).movedim(-1, axis)


def hadamard_quantize(
    x: torch.Tensor, *, axis: int, size: int, signs: int, fmt: ElementFormat, block: BlockShape,
    scale_rule: ScaleRule, rounding: Rounding, key: RngKey | None, satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`hadamard` with seed ``signs``, then ``mxfp8.reference.quantize`` along the same axis."""
    return quantize(
        hadamard(x, axis=axis, size=size, seed=signs), axis=axis, fmt=fmt, block=block, scale_rule=scale_rule,
        rounding=rounding, key=key, satfinite=satfinite,
    )  # fmt: skip
