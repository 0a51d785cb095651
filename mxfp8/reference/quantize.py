"""Block quantisation, exact and in plain torch. Every other backend must produce these bits.

The scale byte is computed on the integer representation of the block's absolute maximum (never through log2, never
from data rounded to a narrower type), and elements are scaled by an exact power of two, so the only rounding is the
element's.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from mxfp8.formats import E8M0_MAX_BYTE, E8M0_NAN, BlockShape, ElementFormat, Rounding, ScaleRule
from mxfp8.reference.random import random_bits
from mxfp8.rng import RngKey
from mxfp8.tensor import block_rc, scale_shape

__all__ = ["quantize", "quantize_both", "scale_byte"]

_INF_BITS = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF


def quantize(
    x: torch.Tensor,
    *,
    axis: int,
    fmt: ElementFormat,
    block: BlockShape,
    scale_rule: ScaleRule,
    rounding: Rounding,
    key: RngKey | None,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, scale bytes as uint8)`` of ``x``; contract in :func:`mxfp8.quantize`."""
    rows, cols = block_rc(block, axis)
    if x.numel() == 0:
        scale = torch.zeros(scale_shape(x.shape, block, axis), dtype=torch.uint8, device=x.device)
        return torch.empty(x.shape, dtype=fmt.dtype, device=x.device), scale
    if x.ndim == 1:
        q, s = _quantize_blocks(x[None], rows, cols, fmt, scale_rule, rounding, key, satfinite)
        return q[0], s[0]
    return _quantize_blocks(x, rows, cols, fmt, scale_rule, rounding, key, satfinite)


def quantize_both(
    x: torch.Tensor,
    *,
    fmt: ElementFormat,
    block: BlockShape,
    column_block: BlockShape,
    scale_rule: ScaleRule,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(qdata, scale)`` along -1 and ``(qdata, scale)`` along -2; contract in :func:`mxfp8.quantize_both`."""
    rows = quantize(
        x, axis=-1, fmt=fmt, block=block, scale_rule=scale_rule, rounding=Rounding.NEAREST, key=None,
        satfinite=satfinite,
    )  # fmt: skip
    if block == column_block and block[0] == block[1]:
        return *rows, *rows
    columns = quantize(
        x, axis=-2, fmt=fmt, block=column_block, scale_rule=scale_rule, rounding=Rounding.NEAREST, key=None,
        satfinite=satfinite,
    )  # fmt: skip
    return *rows, *columns


def _quantize_blocks(
    x: torch.Tensor,
    rows: int,
    cols: int,
    fmt: ElementFormat,
    rule: ScaleRule,
    rounding: Rounding,
    key: RngKey | None,
    satfinite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Scaling by a power of two is exact in bfloat16 as in float32 (same exponent range); float16 is too narrow.
    x = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.float32)
    height, width = x.shape[-2:]
    if height % rows or width % cols:
        x = pad(x, (0, -width % cols, 0, -height % rows))
    byte = scale_byte(_amax_bits(x, rows, cols), fmt, rule, satfinite)
    blocks = _blocks(x, rows, cols)
    scaled = (blocks * _per_block(_inverse(byte, x.dtype))).clamp(-fmt.max, fmt.max)
    if rounding is Rounding.STOCHASTIC:
        assert key is not None
        whole = _round_stochastic(_whole(scaled)[..., :height, :width], fmt, key)
        scaled = _blocks(pad(whole, (0, -width % cols, 0, -height % rows)), rows, cols)
    q = scaled.to(fmt.dtype).view(torch.uint8)
    # One NaN code, whatever NaN came in; two bitwise passes cost a third of a masked fill.
    nan = (byte == E8M0_NAN).to(torch.uint8)
    q.bitwise_or_(_per_block(nan * fmt.nan_code)).bitwise_and_(_per_block(0xFF - nan * (0xFF - fmt.nan_code)))
    q = _whole(q)[..., :height, :width]
    return q.view(fmt.dtype), byte.to(torch.uint8)


def scale_byte(amax_bits: torch.Tensor, fmt: ElementFormat, rule: ScaleRule, satfinite: bool = False) -> torch.Tensor:
    """E8M0 byte (int32) for block maxima given as float32 bit patterns (int32, sign bit clear).

    Exponent arithmetic on the bits; float32 subnormals have exponent field 0 and end at byte 0 under every rule.
    """
    bits = torch.where(amax_bits == _INF_BITS, _INF_BITS - 1, amax_bits) if satfinite else amax_bits
    if rule is ScaleRule.EVEN:
        bits = bits + (1 << (22 - fmt.mantissa_bits))  # half a unit of the element; a carry moves the exponent
    exponent, mantissa = bits >> 23, bits & _MANTISSA_MASK
    byte = exponent - fmt.emax
    if rule is ScaleRule.RCEIL:
        byte = byte + (mantissa > round((fmt.max / 2.0**fmt.emax - 1.0) * 2**23))
    elif rule is ScaleRule.CEIL:
        byte = byte + (mantissa > 0)
    byte = byte.clamp(0, E8M0_MAX_BYTE)
    nonfinite = amax_bits > _INF_BITS if satfinite else amax_bits >= _INF_BITS
    return byte.masked_fill(nonfinite, E8M0_NAN)


def _amax_bits(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Float32 bits of each block's absolute maximum. Magnitudes order like their bits, NaN above Inf, so an integer
    maximum finds NaN as well."""
    if x.dtype == torch.bfloat16:
        bits = x.view(torch.int16) & 0x7FFF
        return _blocks(bits, rows, cols).amax(dim=(-3, -1)).to(torch.int32) << 16
    return _blocks(x.view(torch.int32) & 0x7FFFFFFF, rows, cols).amax(dim=(-3, -1))


def _inverse(byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exact ``2**(127 - byte)`` in ``dtype``: byte 254 gives the subnormal 2**-127, 255 gives NaN."""
    bits = torch.where(byte == E8M0_MAX_BYTE, 0x00400000, (E8M0_MAX_BYTE - byte) << 23)
    bits = bits.masked_fill(byte == E8M0_NAN, 0x7FC00000)
    if dtype == torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return bits.view(torch.float32)


def _round_stochastic(v: torch.Tensor, fmt: ElementFormat, key: RngKey) -> torch.Tensor:
    """Round ``v`` (already within the format's range) to one of its two neighbours, up with probability
    floor(2**32 * distance) / 2**32 of the gap: unbiased to 2**-32."""
    v = v.to(torch.float32)
    magnitude = v.abs()
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    quantum = exponent.clamp(min=fmt.emin) - fmt.mantissa_bits  # exponent of the gap between the neighbours
    steps = magnitude * _power_of_two(-quantum)
    below = steps.floor()
    threshold = ((steps - below) * 2.0**32).to(torch.int64)
    rows = v.numel() // v.shape[-1]
    up = random_bits(key, rows, v.shape[-1], v.device).view(v.shape) < threshold
    return torch.copysign((below + up) * _power_of_two(quantum), v)


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    """Exact float32 ``2**n`` for int32 ``n`` in -126..127 (a device's ``pow`` need not be exact)."""
    return ((n + 127) << 23).view(torch.float32)


def _blocks(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """View ``[..., R, C]`` as ``[..., R/rows, rows, C/cols, cols]``."""
    split: torch.Tensor = x.unflatten(-1, (x.shape[-1] // cols, cols)).unflatten(-3, (x.shape[-2] // rows, rows))
    return split


def _whole(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(-2, -1).flatten(-3, -2)


def _per_block(values: torch.Tensor) -> torch.Tensor:
    return values[..., :, None, :, None]
