"""Formats, scale rules and block shapes: the vocabulary of microscaling (MX) floating point. A leaf module.

An MX tensor stores 8-bit elements and one power-of-two scale byte for every block of elements (OCP Microscaling
Formats (MX) v1.0): ``x ~ element * 2**(byte - 127)``. Formats are data, not code paths: everything the library needs to
know about an element type is a field of :class:`ElementFormat`.

======  ========  =====================================  =========================
name    bits      largest / smallest normal / subnormal  specials
======  ========  =====================================  =========================
E4M3    1-4-3     448 / 2**-6 / 2**-9                    NaN, no Inf
E5M2    1-5-2     57344 / 2**-14 / 2**-16                NaN, Inf (never produced)
E8M0    0-8-0     2**127 / 2**-127 / none                255 is NaN, no zero, no sign
======  ========  =====================================  =========================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

__all__ = [
    "BLOCK_SHAPES",
    "E4M3",
    "E5M2",
    "E8M0_BIAS",
    "E8M0_MAX_BYTE",
    "E8M0_NAN",
    "ELEMENT_FORMATS",
    "SCALE_DTYPE",
    "BlockShape",
    "ElementFormat",
    "Rounding",
    "ScaleRule",
    "get_block",
    "get_format",
    "get_rounding",
    "get_scale_rule",
]

BlockShape = tuple[int, int]

E8M0_BIAS = 127
E8M0_MAX_BYTE = 254  # 2**127
E8M0_NAN = 255
SCALE_DTYPE = torch.float8_e8m0fnu


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementFormat:
    """An 8-bit floating-point element type, described by its parameters.

    Attributes:
        name: lower-case name used in public arguments, e.g. ``"e4m3"``.
        dtype: the torch dtype that stores it.
        exponent_bits, mantissa_bits, bias: the encoding.
        max: largest finite magnitude.
        emax: exponent of the largest power of two that is representable.
        nan_code: canonical NaN byte; every NaN this library writes has this code.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    emax: int
    nan_code: int = 0x7F

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def min_normal(self) -> float:
        return float(2.0**self.emin)

    @property
    def min_subnormal(self) -> float:
        return float(2.0 ** (self.emin - self.mantissa_bits))

    @property
    def max_code(self) -> int:
        """Byte of the largest finite magnitude (sign bit clear)."""
        mantissa = round((self.max / 2.0**self.emax - 1.0) * (1 << self.mantissa_bits))
        return ((self.emax + self.bias) << self.mantissa_bits) | mantissa

    def __str__(self) -> str:
        return self.name


E4M3 = ElementFormat(
    name="e4m3", dtype=torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, emax=8
)
E5M2 = ElementFormat(
    name="e5m2", dtype=torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, emax=15
)
ELEMENT_FORMATS: dict[str, ElementFormat] = {f.name: f for f in (E4M3, E5M2)}


class ScaleRule(StrEnum):
    """How a block's absolute maximum becomes a scale exponent (``M`` = largest element, ``emax`` its exponent).

    ``RCEIL``: smallest power of two >= amax / M; never clips (the default, and what Blackwell hardware computes).
    ``FLOOR``: 2**(floor(log2 amax) - emax); OCP MX v1.0 section 6.3; clips up to 12.5 % of the block maximum.
    ``CEIL``: 2**(ceil(log2 amax) - emax); never clips, loses a binade at the bottom.
    ``EVEN``: round amax to the element's mantissa bits (half up), then ``FLOOR``.
    """

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"


class Rounding(StrEnum):
    """Element rounding: round to nearest, ties to even; or stochastic (unbiased between the two neighbours)."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


BLOCK_SHAPES: tuple[BlockShape, ...] = ((1, 32), (1, 128), (1, 256), (32, 32), (128, 128))
"""Allowed ``(across, along)`` block shapes; *along* is the scaled (contraction) axis. All are multiples of 32 along it,
so that any of them is also a valid 1x32 MX tensor (see :meth:`mxfp8.MXTensor.expanded_scale`)."""

# Looked up, not searched: torch.compile on torch 2.11 cannot iterate over an enum.
_SCALE_RULES: dict[str, ScaleRule] = {rule.value: rule for rule in ScaleRule}
_ROUNDINGS: dict[str, Rounding] = {rounding.value: rounding for rounding in Rounding}


def get_format(fmt: str | ElementFormat) -> ElementFormat:
    """Return the format named ``fmt`` (``"e4m3"`` or ``"e5m2"``), or ``fmt`` itself. ValueError if unknown."""
    if isinstance(fmt, ElementFormat):
        return fmt
    if not isinstance(fmt, str) or fmt not in ELEMENT_FORMATS:
        raise ValueError(f"unknown element format {fmt!r}: use one of {', '.join(map(repr, ELEMENT_FORMATS))}")
    return ELEMENT_FORMATS[fmt]


def get_scale_rule(rule: str | ScaleRule) -> ScaleRule:
    """Return the :class:`ScaleRule` named ``rule``. ValueError if unknown."""
    if not isinstance(rule, str) or rule not in _SCALE_RULES:
        raise ValueError(f"unknown scale rule {rule!r}: use one of {', '.join(map(repr, _SCALE_RULES))}")
    return _SCALE_RULES[rule]


def get_rounding(rounding: str | Rounding) -> Rounding:
    """Return the :class:`Rounding` named ``rounding``. ValueError if unknown."""
    if not isinstance(rounding, str) or rounding not in _ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}: use one of {', '.join(map(repr, _ROUNDINGS))}")
    return _ROUNDINGS[rounding]


def get_block(block: BlockShape) -> BlockShape:
    """Return ``block`` as a tuple of two ints if it is one of :data:`BLOCK_SHAPES`. ValueError otherwise."""
    shape = tuple(block) if isinstance(block, list) else block
    if type(shape) is tuple and shape in BLOCK_SHAPES and type(shape[0]) is int and type(shape[1]) is int:
        return shape
    raise ValueError(f"unknown block shape {shape!r}: use one of {', '.join(map(str, BLOCK_SHAPES))}")
