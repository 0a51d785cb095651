"""Device functions that kernels share: the scale byte, its reciprocal, the casts and random bits. All are exact.

Formats, scale rules and roundings reach a kernel as small integers (``FORMATS``, ``RULES``), so that each is a
compile-time constant. All functions work under Triton's interpreter as well, whose own float8 and bfloat16 casts round
wrongly: there ``HARDWARE`` is False and elements are encoded by integer arithmetic.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run in Triton's interpreter; decided when triton is imported."""

FORMATS = {"e4m3": 0, "e5m2": 1}
RULES = {"rceil": 0, "floor": 1, "ceil": 2, "even": 3}

_INF = tl.constexpr(0x7F800000)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def to_float32(x):
    """Exact float32 of a loaded tile. The interpreter loses bfloat16 subnormals, so there the bits are moved."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def abs_bits(x):
    """Float32 bit patterns of ``|x|`` as int32. They order like magnitudes, with Inf above and NaN above that, so that
    an integer maximum finds the absolute maximum and keeps NaN (a float maximum drops it)."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Bits (int32) of the absolute maximum along ``axis`` by a float maximum that keeps NaN: one instruction an element
    where ``abs_bits`` needs two."""
    return tl.reduce(tl.abs(x), axis, _larger).to(tl.int32, bitcast=True)


@triton.jit
def scale_byte(amax_bits, FMT: tl.constexpr, RULE: tl.constexpr, SATFINITE: tl.constexpr):
    """E8M0 byte (int32) of block maxima given as bits of float32. The rules of ``mxfp8.ScaleRule``."""
    EMAX: tl.constexpr = 8 if FMT == 0 else 15
    MANTISSA_BITS: tl.constexpr = 3 if FMT == 0 else 2
    bits = amax_bits
    if SATFINITE:
        bits = tl.where(bits == _INF, _INF - 1, bits)
    nonfinite = bits >= _INF
    if RULE == 3:
        bits += 1 << (22 - MANTISSA_BITS)
    byte = (bits >> 23) - EMAX
    if RULE == 0:
        byte += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 1.75 is the significand of the largest element
    if RULE == 2:
        byte += ((bits & 0x7FFFFF) > 0).to(tl.int32)
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    return tl.where(nonfinite, 255, byte)


@triton.jit
def scale_value(byte):
    """Exact float32 ``2**(byte - 127)`` of int32 bytes: 0 is the subnormal 2**-127, 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(byte):
    """Exact float32 ``2**(127 - byte)``: 254 gives the subnormal 2**-127, 255 gives NaN."""
    bits = tl.where(byte == 254, 0x00400000, (254 - byte) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(v, FMT: tl.constexpr, HARDWARE: tl.constexpr):
    """Element codes (uint8) of float32 values: to nearest, ties to even, saturated; every NaN becomes 0x7F.

    The hardware's conversion saturates and writes 0x7F for the NaN that arithmetic makes. Values must come out of an
    arithmetic instruction there: a NaN that was loaded may carry a sign.
    """
    if HARDWARE:
        if FMT == 0:
            return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return _encode_integer(v, FMT)


@triton.jit
def _encode_integer(v, FMT: tl.constexpr):
    """Adds half a unit and the parity of the last kept bit, then shifts; one float addition rounds subnormals."""
    SHIFT: tl.constexpr = 20 if FMT == 0 else 21
    BIAS: tl.constexpr = 7 if FMT == 0 else 15
    MAX_CODE: tl.constexpr = 0x7E if FMT == 0 else 0x7B
    MANTISSA_BITS: tl.constexpr = 23 - SHIFT
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((magnitude + HALF + ((magnitude >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    MAGIC: tl.constexpr = (127 - BIAS + 1 + SHIFT) << 23
    magic = tl.full(magnitude.shape, MAGIC, tl.int32)
    shifted = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - magic
    # A NaN or Inf may have wrapped around in `normal`; both are put right below.
    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal), MAX_CODE)
    code = tl.where(magnitude >= _INF, MAX_CODE, code) | sign
    return tl.where(magnitude > _INF, 0x7F, code).to(tl.uint8)


@triton.jit
def decode(code, FMT: tl.constexpr):
    """Exact float32 values of element codes (uint8), by integer arithmetic: NaN codes give NaN, on every backend."""
    SHIFT: tl.constexpr = 20 if FMT == 0 else 21
    BIAS: tl.constexpr = 7 if FMT == 0 else 15
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    # As a float32 subnormal the code counts units of 2**-149; one multiplication moves it to its place.
    FACTOR: tl.constexpr = (127 - BIAS + 127) << 23
    factor = tl.full(c.shape, FACTOR, tl.int32).to(tl.float32, bitcast=True)
    value = (magnitude << SHIFT).to(tl.float32, bitcast=True) * factor
    bits = value.to(tl.int32, bitcast=True)
    if FMT == 0:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    else:
        bits = tl.where(magnitude > 0x7C, 0x7FC00000, tl.where(magnitude == 0x7C, _INF, bits))
    return (bits | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def stochastic(v, random, FMT: tl.constexpr):
    """``v`` (float32) saturated and rounded to one of its two neighbours in the format: up where the 32 ``random`` bits
    (uint32) are below ``floor(2**32 * distance)``. The result is exact in the format; NaN stays NaN."""
    MAX: tl.constexpr = 448.0 if FMT == 0 else 57344.0
    EMIN: tl.constexpr = -6 if FMT == 0 else -14
    MANTISSA_BITS: tl.constexpr = 3 if FMT == 0 else 2
    bits = abs_bits(v)
    magnitude = bits.to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > MAX, MAX, magnitude)
    quantum = tl.maximum((abs_bits(magnitude) >> 23) - 127, EMIN) - MANTISSA_BITS
    steps = magnitude * ((127 - quantum) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(steps)
    threshold = ((steps - below) * 4294967296.0).to(tl.uint32)
    steps = below + (random < threshold).to(tl.float32)
    rounded = steps * ((127 + quantum) << 23).to(tl.float32, bitcast=True)
    rounded = tl.where(bits > _INF, float("nan"), rounded)
    sign = v.to(tl.int32, bitcast=True) & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _philox(seed_lo, seed_hi, step, stream, rows, quads):
    step, stream = step.to(tl.uint32) + rows * 0, stream.to(tl.uint32) + rows * 0
    return tl.random.philox_impl(quads, rows, step, stream, seed_lo.to(tl.uint32), seed_hi.to(tl.uint32))


@triton.jit
def random_words(seed_lo, seed_hi, step, stream, rows, cols):
    """32 random bits (uint32) for each global ``(row, column)``: word ``col % 4`` of the Philox4x32-10 counter
    ``(col // 4, row, step, stream)``, each modulo 2**32. ``rows`` (uint32) and ``cols`` must have the shape of the
    result."""
    c0, c1, c2, c3 = _philox(seed_lo, seed_hi, step, stream, rows, (cols >> 2).to(tl.uint32))
    word = cols & 3
    return tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3))


@triton.jit
def rounded_by_chance(
    scaled, step_ptr, seed_lo, seed_hi, step, stream, rows, col, FMT: tl.constexpr, ROUNDING: tl.constexpr,
    DOWN: tl.constexpr = False,
):  # fmt: skip
    """A tile ``[R, C]`` after :func:`stochastic` with the bits of :func:`random_words`. ``rows``: the global ones,
    ``[R, 1]``; ``col``: that of the first column. ``ROUNDING``: of ``quantize_triton.random_of``, not 0. ``DOWN``: the
    tile is ``[C, R]``, ``rows`` is ``[1, R]``."""
    if ROUNDING == 2 or ROUNDING == 4:
        step = tl.load(step_ptr)
    C: tl.constexpr = scaled.shape[0 if DOWN else 1]
    R: tl.constexpr = scaled.shape[1 if DOWN else 0]
    rows = rows.to(tl.uint32)
    if ROUNDING > 2:
        cols = tl.expand_dims(col + tl.arange(0, C), 1 if DOWN else 0)
        zero = tl.zeros(scaled.shape, tl.uint32)
        words = random_words(seed_lo, seed_hi, step, stream, rows + zero, cols + zero)
    else:  # all four words of a counter are used
        quads = tl.expand_dims((col >> 2) + tl.arange(0, C // 4), 1 if DOWN else 0).to(tl.uint32)
        quads, rows = quads + rows * 0, rows + quads * 0
        c0, c1, c2, c3 = _philox(seed_lo, seed_hi, step, stream, rows, quads)
        words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        if DOWN:
            words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (C, R))
        else:
            words = tl.reshape(words, (R, C))
    return stochastic(scaled, words, FMT)


def compiles_float8(capability: tuple[int, int]) -> bool:
    """Whether the hardware converts float32 to float8 with one correct rounding (compute capability 9.0 and later; 8.9
    goes through float16)."""
    return capability >= (9, 0)


def element_codes(fmt: Any, scale_rule: Any) -> tuple[int, int]:
    """``(FMT, RULE)`` constants of a format object and a scale rule."""
    return FORMATS[fmt.name], RULES[scale_rule]
