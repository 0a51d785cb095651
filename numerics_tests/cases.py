"""Named inputs with the bytes they must give, and why. Every backend is held to all of them."""

from __future__ import annotations

from dataclasses import dataclass

INF, NAN = float("inf"), float("nan")
FLT_MAX = 3.4028234663852886e38
BELOW_2_100 = 1.2676505244914222e30  # the float32 before 2**100


@dataclass(frozen=True, kw_only=True)
class QuantizeCase:
    """One 1x32 block: ``x`` followed by zeros. ``data`` are the first bytes; the others must be zero (or NaN)."""

    name: str
    x: tuple[float, ...]
    byte: int
    data: tuple[int, ...]
    why: str
    fmt: str = "e4m3"
    rule: str = "rceil"
    dtype: str = "float32"
    satfinite: bool = False

    def __str__(self) -> str:
        return self.name


def _case(name: str, x: tuple[float, ...], byte: int, data: tuple[int, ...], why: str, **kw: object) -> QuantizeCase:
    return QuantizeCase(name=name, x=x, byte=byte, data=data, why=why, **kw)  # type: ignore[arg-type]


QUANTIZE_CASES: tuple[QuantizeCase, ...] = (
    # The scale byte
    _case("one", (1.0,), 119, (0x78,), "1 = 256 * 2^-8; a cast of 1/448 to E8M0 would give 118 and saturate"),
    _case("max", (448.0,), 127, (0x7E,), "448 is M: scale 1"),
    _case("max_plus_ulp", (448.00003,), 128, (0x76,), "over M by an ulp: the next scale, 224 * 2"),
    _case("max_plus_ulp_floor", (448.00003,), 127, (0x7E,), "floor keeps 2^0 and clips", rule="floor"),
    _case("floor_clips_511", (511.0,), 127, (0x7E,), "floor: 448, 12.5 % low", rule="floor"),
    _case("rceil_keeps_511", (511.0,), 128, (0x78,), "511/2 = 255.5 rounds to 256"),
    _case("floor_511_9", (511.9,), 127, (0x7E,), "saturates, never NaN", rule="floor"),
    _case("ceil_power", (256.0,), 127, (0x78,), "an exact power is its own ceiling", rule="ceil"),
    _case("ceil_above_power", (256.00003,), 128, (0x70,), "ceil moves on one ulp above", rule="ceil"),
    _case("even_below", (495.99997,), 127, (0x7E,), "rounds down to 1.875 * 2^8: saturates", rule="even"),
    _case("even_half_up", (496.0,), 128, (0x78,), "1.9375 is half a step: up, carry; 248 to 256", rule="even"),
    _case("even_e5m2_below", (61439.996,), 127, (0x7B,), "rounds down to 1.75 * 2^15", fmt="e5m2", rule="even"),
    _case("even_e5m2_half", (61440.0,), 128, (0x78,), "up, carry; 30720 to even", fmt="e5m2", rule="even"),
    _case("log2_trap_floor", (BELOW_2_100,), 218, (0x7E,), "log2 in float32 says 100: byte 219", rule="floor"),
    _case("log2_trap_ceil", (BELOW_2_100,), 219, (0x78,), "2^100 / 2^8", rule="ceil"),
    # Byte 0 and subnormals
    _case("zeros", (0.0, -0.0), 0, (0x00, 0x80), "amax 0: byte 0, signs of zero kept"),
    _case("byte_0", (2.0**-119,), 0, (0x78,), "256 * 2^-127: byte 0 is a scale, not zero"),
    _case("byte_1", (2.8e-36, -1e-37), 1, (0x77, 0xD1), "240 and -9 times 2^-126; a lost reciprocal gives 448, NaN"),
    _case("subnormal", (2.0**-149,), 0, (0x00,), "2^-22 of a unit: under half of 2^-9, zero"),
    _case("subnormal_kept", (2.0**-136, -(2.0**-136)), 0, (0x01, 0x81), "smallest element times 2^-127"),
    _case("subnormal_tie", (2.0**-137, 3 * 2.0**-137), 0, (0x00, 0x02), "ties at half and 1.5 units: to even"),
    _case("gradient_2e-10", (2e-10,), 86, (0x7E,), "no epsilon: 439.8 * 2^-41, to 448"),
    # The top
    _case("flt_max", (FLT_MAX,), 247, (0x78,), "rounds to 256 * 2^120 = 2^128: Inf when dequantised to float32"),
    _case("flt_max_floor", (FLT_MAX,), 246, (0x7E,), "448 * 2^119", rule="floor"),
    _case("flt_max_even", (FLT_MAX,), 247, (0x78,), "the carry must not make the block NaN", rule="even"),
    _case("flt_max_ceil", (FLT_MAX,), 247, (0x78,), "2^128 / 2^8", rule="ceil"),
    _case("flt_max_e5m2", (FLT_MAX,), 240, (0x78,), "32768 * 2^113", fmt="e5m2"),
    _case("flt_max_even_e5m2", (FLT_MAX,), 240, (0x78,), "the carry again", fmt="e5m2", rule="even"),
    _case("huge_and_tiny", (FLT_MAX, 1.0, -1.0), 247, (0x78, 0x00, 0x80), "2^-120 of a unit, sign kept"),
    # Overflow of the element cast
    _case("e4m3_464", (464.0,), 127, (0x7E,), "the tie above M saturates", rule="floor"),
    _case("e4m3_480", (480.0,), 127, (0x7E,), "NaN without a clamp before torch 2.13", rule="floor"),
    _case("e5m2_61440", (61440.0,), 127, (0x7B,), "Inf without a clamp in every torch", fmt="e5m2", rule="floor"),
    _case("e5m2_65535", (65535.0,), 127, (0x7B,), "the last value under this scale", fmt="e5m2", rule="floor"),
    # Specials
    _case("nan", (1.0, NAN), 255, (0x7F, 0x7F), "a NaN is not dropped by the maximum"),
    _case("minus_nan", (-NAN, 1.0), 255, (0x7F, 0x7F), "one NaN code, whatever NaN came in"),
    _case("inf", (1.0, INF), 255, (0x7F, 0x7F), "Inf makes the block NaN"),
    _case("minus_inf", (-INF, 1.0), 255, (0x7F, 0x7F), "so does -Inf"),
    _case("nan_e5m2", (NAN, 1.0), 255, (0x7F, 0x7F), "0x7F here too, not 0x7C (Inf) or 0x7E", fmt="e5m2"),
    _case("inf_satfinite", (INF, 1.0), 247, (0x7E, 0x00), "Inf counts as FLT_MAX and saturates", satfinite=True),
    _case("minus_inf_satfinite", (-INF,), 247, (0xFE,), "sign kept", satfinite=True),
    _case("nan_satfinite", (NAN, INF, 1.0), 255, (0x7F, 0x7F, 0x7F), "NaN stays NaN", satfinite=True),
    _case("inf_satfinite_e5m2", (INF,), 240, (0x7B,), "57344, never the code of Inf", fmt="e5m2", satfinite=True),
    _case("inf_satfinite_even", (INF,), 247, (0x7E,), "the carry of FLT_MAX", rule="even", satfinite=True),
    # Round to nearest even at scale 1
    _case("ties", (256.0, 17.0, 19.0, -17.0), 127, (0x78, 0x58, 0x5A, 0xD8), "16, 20, -16", rule="floor"),
    # Narrow and wide inputs
    _case("bf16", (1.0, -0.0078125), 119, (0x78, 0xC0), "-2 * 2^-8, exact", dtype="bfloat16"),
    _case("bf16_max", (3.3895313892515355e38,), 247, (0x78,), "255/256 * 2^128 rounds to 256", dtype="bfloat16"),
    _case("bf16_subnormal", (9.183549615799121e-41,), 0, (0x08,), "2^-133 = 2^-6 * 2^-127", dtype="bfloat16"),
    _case("fp16_max", (65504.0,), 135, (0x78,), "float16 would overflow in the scale", dtype="float16"),
    _case("fp16_subnormal", (2.0**-24,), 95, (0x78,), "float16 subnormals are normal in float32", dtype="float16"),
    _case("fp64_over", (1e300, 1.0), 255, (0x7F, 0x7F), "rounded to float32 first: Inf", dtype="float64"),
    _case("fp64_tie", (448.0 + 2.0**-40,), 127, (0x7E,), "rounded to float32 first: 448", dtype="float64"),
)
