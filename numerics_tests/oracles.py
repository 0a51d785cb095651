"""Second opinions, written from the format's definition and not from the library, which this module must not import.

Exact arithmetic only: float64 holds every float32, every product with a power of two used here, and every midpoint
between neighbouring elements; Philox and stochastic rounding are done on Python integers and fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

RULES = ("rceil", "floor", "ceil", "even")


@dataclass(frozen=True, kw_only=True)
class Element:
    """An 8-bit float by its encoding; ``first_special`` is the smallest positive code that is not a finite number."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    first_special: int

    def value(self, code: int) -> float:
        """Value of a byte: the textbook formula."""
        sign, body = -1.0 if code & 0x80 else 1.0, code & 0x7F
        if body >= self.first_special:
            is_inf = self.name == "e5m2" and body == 0x7C
            return sign * float("inf") if is_inf else float("nan")
        exponent, mantissa = body >> self.mantissa_bits, body & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return float(sign * fraction * 2.0 ** (1 - self.bias))
        return float(sign * (1.0 + fraction) * 2.0 ** (exponent - self.bias))

    @property
    def table(self) -> F64:
        """Values of all 256 bytes."""
        return np.array([self.value(c) for c in range(256)])

    @property
    def finite(self) -> F64:
        """Non-negative finite values in increasing order; the index is the code."""
        return self.table[: self.first_special]

    @property
    def max(self) -> float:
        return float(self.finite[-1])


E4M3 = Element(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, first_special=0x7F)
E5M2 = Element(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, first_special=0x7C)
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}


def scale_values() -> F64:
    """Values of all 256 E8M0 bytes."""
    return np.concatenate([np.ldexp(1.0, np.arange(255) - 127), [np.nan]])


def scale_byte(amax: F64, fmt: str, rule: str) -> NDArray[np.int64]:
    """Scale byte of finite maxima, each rule as its definition reads (zero gives byte 0)."""
    element = ELEMENTS[fmt]
    a = np.asarray(amax, dtype=np.float64)
    _, exponent = np.frexp(a)  # a = m * 2**exponent with m in [0.5, 1)
    if rule == "rceil":  # smallest k with a <= M * 2**k
        k = exponent - 20
        while np.any(above := a > np.ldexp(element.max, k)):
            k = k + above
    elif rule == "floor":
        k = _floor_log2(a) - _floor_log2(element.max)
    elif rule == "ceil":
        k = _floor_log2(a) + (a > np.ldexp(1.0, _floor_log2(a))) - _floor_log2(element.max)
    else:  # even: round to the element's mantissa bits, halves up, then floor
        unit = np.ldexp(1.0, _floor_log2(a) - element.mantissa_bits)
        k = _floor_log2(np.floor(a / unit + 0.5) * unit) - _floor_log2(element.max)
    return np.where(a == 0, 0, np.clip(k, -127, 127) + 127)


def _floor_log2(a: F64 | float) -> NDArray[np.int64]:
    return np.asarray(np.frexp(a)[1] - 1)


def encode(scaled: F64, fmt: str) -> U8:
    """Bytes of finite values: nearest element, ties to the even code, saturating, sign kept (also of zero)."""
    finite = ELEMENTS[fmt].finite
    middle = (finite[1:] + finite[:-1]) / 2
    magnitude = np.abs(scaled)
    below, above = np.searchsorted(middle, magnitude, "left"), np.searchsorted(middle, magnitude, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ at a tie only
    return (code | (np.signbit(scaled).astype(np.int64) << 7)).astype(np.uint8)


def quantize(x: F64, rows: int, cols: int, fmt: str, rule: str) -> tuple[U8, U8]:
    """``(elements, scale bytes)`` of a 2-D array in blocks of ``rows`` x ``cols``; a NaN or Inf makes its block NaN."""
    height, width = x.shape
    padded = np.pad(x, ((0, -height % rows), (0, -width % cols)))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    bad = ~np.isfinite(blocks).all(axis=(1, 3))
    good = np.where(bad[:, None, :, None], 0.0, blocks)
    byte = scale_byte(np.abs(good).max(axis=(1, 3)), fmt, rule)
    codes = encode(np.ldexp(good, (127 - byte)[:, None, :, None]), fmt)
    codes = np.where(bad[:, None, :, None], np.uint8(0x7F), codes)
    return codes.reshape(padded.shape)[:height, :width], np.where(bad, 255, byte).astype(np.uint8)


def philox4x32_10(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Salmon et al., SC 2011, on Python integers."""
    (k0, k1), (c0, c1, c2, c3), mask = key, counter, 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def random_word(seed: int, step: int, stream: int, row: int, col: int) -> int:
    """The 32 random bits of one element, as docs/numerics.md defines them."""
    mask = 0xFFFFFFFF
    counter = ((col // 4) & mask, row & mask, step & mask, stream & mask)
    return philox4x32_10((seed & mask, seed >> 32), counter)[col % 4]


def round_stochastic(scaled: float, word: int, fmt: str) -> int:
    """Byte of a value in range: up with probability floor(2**32 * distance) / 2**32 of the gap between neighbours."""
    finite = [Fraction(v) for v in ELEMENTS[fmt].finite]
    magnitude = Fraction(abs(scaled))
    below = max(i for i, v in enumerate(finite) if v <= magnitude)
    code = below
    if below + 1 < len(finite):
        distance = (magnitude - finite[below]) / (finite[below + 1] - finite[below])
        code += word < int(distance * 2**32)
    return code | (0x80 if np.signbit(scaled) else 0)


def hadamard_run(run: list[float], signs: list[float]) -> list[float]:
    """``(run * signs) @ H / sqrt(n)`` by float32 butterflies of distance 1, 2, 4, ..., one scalar at a time."""
    n = len(run)
    y = [np.float32(v) * np.float32(s) for v, s in zip(run, signs, strict=True)]
    h = 1
    while h < n:
        for start in range(0, n, 2 * h):
            for i in range(start, start + h):
                y[i], y[i + h] = np.float32(y[i] + y[i + h]), np.float32(y[i] - y[i + h])
        h *= 2
    factor = np.float32(1.0 / np.sqrt(float(n)))
    return [float(np.float32(v * factor)) for v in y]
