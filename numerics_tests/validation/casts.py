"""The bits of a cast against the exact oracle, over lists made to meet every limit of the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from numerics_tests import oracles
from numerics_tests.oracles import ELEMENTS
from numerics_tests.validation.case import Case, Property
from numerics_tests.validation.implementation import Implementation

F32 = NDArray[np.float32]
ULPS = 40
ANY_NAN = {fmt: np.isnan(e.table) for fmt, e in ELEMENTS.items()}


def as_blocks(values: F32) -> F32:
    """One value a block of 32, the others zero."""
    x = np.zeros((len(values), 32), dtype=np.float32)
    x[:, 0] = values
    return x


def cast(implementation: Implementation, x: F32, fmt: str, rule: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """``(scale bytes [n], element bytes [n, 32])`` of ``x [n, 32]``."""
    scales, codes = implementation.quantize(torch.from_numpy(x.copy()), fmt, rule)
    return scales.cpu().numpy().reshape(len(x)), codes.cpu().numpy().reshape(x.shape)


def wrong_scales(implementation: Implementation, amax: F32, fmt: str, rule: str) -> Iterator[Case]:
    """Finite maxima whose scale byte is not the exact one, those next to 1 first."""
    got, _ = cast(implementation, as_blocks(amax), fmt, rule)
    want = oracles.scale_byte(amax.astype(np.float64), fmt, rule)
    for i in _simplest_first(np.flatnonzero(got != want), amax):
        said = f"scale byte 0x{got[i]:02x}, expected 0x{want[i]:02x}"
        yield Case(said=said, values=(float(amax[i]),), fmt=fmt, rule=rule)


def wrong_elements(implementation: Implementation, x: F32, fmt: str, rule: str) -> Iterator[Case]:
    """Elements that are not the exact ones under the exact scale: the value, with the block's maximum before it.

    NaN codes count as equal; which of them is written is a property of its own.
    """
    got_scale, got = cast(implementation, x, fmt, rule)
    want, scale = oracles.quantize(x.astype(np.float64), 1, 32, fmt, rule)
    wrong = (got != want) & ~(ANY_NAN[fmt][got] & ANY_NAN[fmt][want])
    amax = np.abs(x).max(1)
    for i in _simplest_first(np.flatnonzero(wrong.any(1)), amax):
        at = int(np.flatnonzero(wrong[i])[0])
        top = int(np.abs(x[i]).argmax())
        values = tuple(float(x[i, k]) for k in dict.fromkeys((top, at)))
        said = (
            f"element 0x{got[i, at]:02x} with scale byte 0x{got_scale[i]:02x}, "
            f"expected 0x{want[i, at]:02x} with 0x{scale[i, 0]:02x}"
        )
        yield Case(said=said, values=values, fmt=fmt, rule=rule)


def _simplest_first(rows: NDArray[np.int64], amax: F32) -> NDArray[np.int64]:
    """Nearest to 1 first: the shortest to read. Zeros, infinities and NaN come last."""
    with np.errstate(all="ignore"):
        distance = np.abs(np.log2(np.abs(amax[rows].astype(np.float64))))
    return rows[np.argsort(np.nan_to_num(distance, nan=1e6, posinf=1e6), kind="stable")]


def around(centres: NDArray[np.float64], ulps: int = ULPS) -> F32:
    """The float32 numbers within ``ulps`` of each centre, positive and finite."""
    with np.errstate(over="ignore"):
        bits = centres.astype(np.float32).view(np.int32)[:, None] + np.arange(-ulps, ulps + 1, dtype=np.int32)
    return np.unique(bits.clip(1, 0x7F7FFFFF)).astype(np.int32).view(np.float32)


def every_bf16(fmt: str) -> F32:
    return (np.arange(1, 0x7F80, dtype=np.uint32) << 16).view(np.float32)


def limits(fmt: str) -> F32:
    """Where a rule changes its mind: M 2^k, 2^k, and half a step of the element below 2^k."""
    element = ELEMENTS[fmt]
    mantissas = (element.max / 2.0 ** np.floor(np.log2(element.max)), 1.0, 2.0 - 2.0 ** -(element.mantissa_bits + 1))
    return around(np.concatenate([np.ldexp(m, np.arange(-126, 128)) for m in mantissas]))


def subnormals(fmt: str) -> F32:
    """Float32 subnormals: every power of two, its neighbours, and random ones."""
    some = np.random.default_rng(0).integers(1, 0x800000, 4000).astype(np.int32).view(np.float32)
    return np.unique(np.concatenate([around(np.ldexp(1.0, np.arange(-149, -125)), 3), some]))


def tops(fmt: str) -> F32:
    """Up to the largest finite float32."""
    return np.arange(0x7F000000, 0x7F800000, 997, dtype=np.int64).astype(np.int32).view(np.float32)


def _scales(corpus: Callable[[str], F32], rule: str) -> Callable[[Implementation], Iterator[Case]]:
    def directed(implementation: Implementation) -> Iterator[Case]:
        for fmt in implementation.capabilities.formats:
            yield from wrong_scales(implementation, corpus(fmt), fmt, rule)

    return directed


def midpoints(implementation: Implementation) -> Iterator[Case]:
    """Every midpoint between elements and an ulp to either side, both signs, under scale 1 (and 2^-60, 2^60)."""
    for fmt in implementation.capabilities.formats:
        finite = ELEMENTS[fmt].finite
        middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        near = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
        x = np.zeros((2 * len(near), 32), dtype=np.float32)
        # The anchor keeps the scale at 1 under every rule: 1.5 times the largest power of two.
        x[:, 0] = 1.5 * 2.0 ** np.floor(np.log2(ELEMENTS[fmt].max))
        x[:, 1] = np.concatenate([near, -near])
        x = x[np.abs(x[:, 1]) <= x[:, 0]]
        for rule in implementation.capabilities.rules:
            for k in (0, -60, 60):
                yield from wrong_elements(implementation, np.ldexp(x, k).astype(np.float32), fmt, rule)


def over_the_top(implementation: Implementation) -> Iterator[Case]:
    """Maxima between M and the next power of two, which floor and even clip."""
    for fmt in implementation.capabilities.formats:
        top = np.linspace(ELEMENTS[fmt].max, 2.0 ** np.ceil(np.log2(ELEMENTS[fmt].max)), 200, endpoint=False)
        values = np.concatenate([top, -top]).astype(np.float32)
        for rule in implementation.capabilities.rules:
            yield from wrong_elements(implementation, as_blocks(values), fmt, rule)


def byte_zero(implementation: Implementation) -> Iterator[Case]:
    """Blocks whose scale byte is 0: 2^-127 is a scale like any other."""
    for fmt in implementation.capabilities.formats:
        values = np.ldexp(ELEMENTS[fmt].finite[1:], -127).astype(np.float32)
        for rule in implementation.capabilities.rules:
            exact = oracles.scale_byte(values.astype(np.float64), fmt, rule) == 0
            yield from wrong_elements(implementation, as_blocks(values[exact]), fmt, rule)


def top_bytes(implementation: Implementation) -> Iterator[Case]:
    """The largest scales that float32 input can reach: the reciprocal is small, the elements are exact."""
    for fmt in implementation.capabilities.formats:
        for rule in implementation.capabilities.rules:
            yield from wrong_elements(implementation, as_blocks(np.concatenate([tops(fmt), -tops(fmt)])), fmt, rule)


def tiny_blocks(implementation: Implementation) -> Iterator[Case]:
    """Maxima far below any epsilon, of normal scale: 2^-100 is cast as 1 is."""
    for fmt in implementation.capabilities.formats:
        values = np.ldexp(np.array([1.0, 1.25, 1.7]), np.arange(-100, -5)[:, None]).astype(np.float32).ravel()
        x = as_blocks(values)
        x[:, 1] = -values / 3
        for rule in implementation.capabilities.rules:
            yield from wrong_elements(implementation, x, fmt, rule)


def many_blocks(implementation: Implementation) -> Iterator[Case]:
    """Random blocks of every magnitude and spread; the maximum of each is normal."""
    rng = np.random.default_rng(1)
    spread, centre = rng.integers(0, 30, (4096, 1)), rng.integers(-100, 97, (4096, 1))
    x = np.ldexp(rng.standard_normal((4096, 32)), centre - rng.integers(0, spread + 1, (4096, 32))).astype(np.float32)
    for fmt in implementation.capabilities.formats:
        for rule in implementation.capabilities.rules:
            yield from wrong_elements(implementation, x, fmt, rule)


def _special(value: float) -> Callable[[Implementation], Iterator[Case]]:
    def directed(implementation: Implementation) -> Iterator[Case]:
        for fmt in implementation.capabilities.formats:
            for rule in implementation.capabilities.rules:
                for others in ((), (1.0,), (-3e38,), (2.0**-130,)):
                    values = (*others, value)
                    x = np.zeros((1, 32), dtype=np.float32)
                    x[0, : len(values)] = values
                    scale, codes = cast(implementation, x, fmt, rule)
                    if scale[0] != 255 or not ANY_NAN[fmt][codes].all():
                        said = f"scale byte 0x{scale[0]:02x}, elements 0x{codes[0, 0]:02x}.., expected 0xff and NaN"
                        yield Case(said=said, values=values, fmt=fmt, rule=rule)

    return directed


def nan_code(implementation: Implementation) -> Iterator[Case]:
    """One NaN is written whatever NaN came in: 0x7F."""
    for fmt in implementation.capabilities.formats:
        for rule in implementation.capabilities.rules:
            for bits in (0x7FC00000, 0xFFC00000, 0x7F800001):
                x = np.zeros((1, 32), dtype=np.uint32)
                x[0, 0] = bits
                _, codes = cast(implementation, x.view(np.float32), fmt, rule)
                if (codes != 0x7F).any():
                    said = f"NaN block stored as 0x{codes[0, 0]:02x}, 0x{codes[0, 1]:02x}.., expected 0x7f throughout"
                    yield Case(said=said, fmt=fmt, rule=rule, note=f"NaN 0x{bits:08x}")


def zeros(implementation: Implementation) -> Iterator[Case]:
    """A block of zeros has byte 0 and keeps the sign of each."""
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, 1::2] = -0.0
    for fmt in implementation.capabilities.formats:
        for rule in implementation.capabilities.rules:
            scale, codes = cast(implementation, x, fmt, rule)
            if scale[0] != 0 or (codes[0, ::2] != 0).any() or (codes[0, 1::2] != 0x80).any():
                said = (
                    f"scale byte 0x{scale[0]:02x}, elements 0x{codes[0, 0]:02x} 0x{codes[0, 1]:02x}, expected 00, 00 80"
                )
                yield Case(said=said, values=(0.0, -0.0), fmt=fmt, rule=rule)


_CORPORA = {
    "bf16": (every_bf16, "of every bfloat16 maximum"),
    "limits": (limits, f"within {ULPS} ulps of M 2^k, 2^k and half a step below 2^k"),
    "subnormal": (subnormals, "of subnormal maxima"),
    "top": (tops, "of maxima up to the largest float32"),
}

CASTS: tuple[Property, ...] = (
    *(
        Property(
            name=f"scale_{rule}_{name}",
            statement=f"{rule}: the scale byte {words} is exact",
            needs=("quantize", "scale"),
            rule=rule,
            directed=_scales(corpus, rule),
        )
        for rule in oracles.RULES
        for name, (corpus, words) in _CORPORA.items()
    ),
    *(
        Property(name=name, statement=words, needs=("quantize", *needs), directed=directed)
        for name, words, needs, directed in (
            (
                "elements_ties",
                "elements round to nearest, ties to even, at every midpoint and an ulp beside",
                (),
                midpoints,
            ),
            ("elements_saturate", "elements above the largest finite one saturate, never NaN or Inf", (), over_the_top),
            ("elements_random", "elements of random blocks of all magnitudes are exact", (), many_blocks),
            ("byte_zero", "blocks under scale byte 0 are exact", (), byte_zero),
            ("byte_top", "blocks under the largest reachable scale bytes are exact", (), top_bytes),
            ("no_epsilon", "no epsilon: small blocks are cast like large ones", (), tiny_blocks),
            ("nan_block", "a NaN makes its block NaN: byte 255, all elements NaN", ("scale",), _special(float("nan"))),
            ("inf_block", "an Inf makes its block NaN", ("scale",), _special(float("inf"))),
            ("minus_inf_block", "a -Inf makes its block NaN", ("scale",), _special(float("-inf"))),
            ("nan_code", "every NaN is written as 0x7F", ("scale",), nan_code),
            ("zero_block", "a block of zeros has byte 0 and keeps their signs", ("scale",), zeros),
        )
    ),
)
