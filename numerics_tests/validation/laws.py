"""Laws that relate casts of related inputs. Hypothesis draws one block and shrinks what breaks the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from numerics_tests.oracles import ELEMENTS, scale_values
from numerics_tests.validation.case import Case, Property
from numerics_tests.validation.casts import cast
from numerics_tests.validation.implementation import Implementation

SCALES = scale_values()
JUST_ABOVE = float(np.nextafter(np.float32(1.75), np.float32(2)))  # M is 1.75 times a power of two in either format


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of 32 by its first values, and how to cast it."""

    values: tuple[float, ...]
    fmt: str
    rule: str

    @property
    def x(self) -> NDArray[np.float32]:
        x = np.zeros((1, 32), dtype=np.float32)
        x[0, : len(self.values)] = self.values
        return x

    def case(self, said: str) -> Case:
        return Case(said=said, values=self.values, fmt=self.fmt, rule=self.rule)


_SPECIAL = (1.0, 1.5, 1.75, JUST_ABOVE, 1.9375, 0.0)


@st.composite
def _values(draw: st.DrawFn, low: int, high: int) -> tuple[float, ...]:
    """A peak with an exponent in low..high, and up to 31 numbers below it or zero."""
    exponent = draw(st.integers(low, high))
    significand = st.one_of(st.sampled_from(_SPECIAL), st.floats(1.0, 2.0, width=32, exclude_max=True))
    below = st.tuples(significand, st.integers(1, 24), st.booleans())
    numbers = [(draw(significand), 0, draw(st.booleans())), *draw(st.lists(below, max_size=31))]
    values = [float(np.ldexp(m, exponent - down)) * (-1 if minus else 1) for m, down, minus in numbers]
    return tuple(float(np.float32(v)) for v in values)


def blocks(low: int, high: int, rules: tuple[str, ...] = ()) -> Callable[[Implementation], st.SearchStrategy[Block]]:
    """A strategy for blocks whose maximum has an exponent in low..high, in what the implementation can do."""

    def strategy(implementation: Implementation) -> st.SearchStrategy[Block]:
        can = implementation.capabilities
        chosen = [r for r in can.rules if not rules or r in rules]
        return st.builds(
            Block, values=_values(low, high), fmt=st.sampled_from(can.formats), rule=st.sampled_from(chosen)
        )

    return strategy


def values_of(scale: NDArray[np.uint8], codes: NDArray[np.uint8], fmt: str) -> NDArray[np.float64]:
    """What the bytes mean, in float64 and by the textbook: not by the library under test."""
    return np.asarray(ELEMENTS[fmt].table[codes] * SCALES[scale][:, None])


def bits_equal(implementation: Implementation, block: Block, other: NDArray[np.float32], change: int = 0) -> str | None:
    """None if ``other`` has the elements of ``block`` and its scale byte plus ``change``; else what differs."""
    (scale, codes), (scale2, codes2) = (cast(implementation, x, block.fmt, block.rule) for x in (block.x, other))
    if int(scale2[0]) != int(scale[0]) + change:
        return f"scale byte 0x{scale[0]:02x} became 0x{scale2[0]:02x}, expected 0x{int(scale[0]) + change:02x}"
    wrong = np.flatnonzero(codes[0] != codes2[0])
    return f"element 0x{codes[0, wrong[0]]:02x} became 0x{codes2[0, wrong[0]]:02x}" if len(wrong) else None


def _idempotent(implementation: Implementation, block: Block) -> Case | None:
    once = values_of(*cast(implementation, block.x, block.fmt, block.rule), block.fmt)
    twice = values_of(*cast(implementation, once.astype(np.float32), block.fmt, block.rule), block.fmt)
    wrong = np.flatnonzero(~(once == twice)[0])
    return block.case(f"cast to {once[0, wrong[0]]:g}, again to {twice[0, wrong[0]]:g}") if len(wrong) else None


def _equivariant(implementation: Implementation, block: Block) -> Case | None:
    """Times 2, 2^-7, 2^20, and the power that brings the maximum to the top of the elements, under scale 1."""
    amax, top = (int(np.frexp(v)[1]) for v in (np.abs(block.x).max(), ELEMENTS[block.fmt].max))
    for k in (top - amax, 1, -7, 20) if block.x.any() else ():
        said = bits_equal(implementation, block, np.ldexp(block.x, k).astype(np.float32), k)
        if said is not None:
            return block.case(f"times 2^{k}: {said}")
    return None


def _sign_symmetric(implementation: Implementation, block: Block) -> Case | None:
    (scale, codes), (scale2, codes2) = (cast(implementation, x, block.fmt, block.rule) for x in (block.x, -block.x))
    if scale[0] != scale2[0] or (codes ^ 0x80 != codes2).any():
        return block.case(f"scale byte 0x{scale[0]:02x} and 0x{scale2[0]:02x} for the negated block, or other codes")
    return None


def _permutes(implementation: Implementation, block: Block) -> Case | None:
    order = np.random.default_rng(len(block.values)).permutation(32)
    scale, codes = cast(implementation, block.x, block.fmt, block.rule)
    scale2, codes2 = cast(implementation, block.x[:, order], block.fmt, block.rule)
    if scale[0] != scale2[0] or (codes[:, order] != codes2).any():
        return block.case("permuted input gives other bytes than permuted output")
    return None


def _independent(implementation: Implementation, block: Block) -> Case | None:
    """Between a NaN block, a huge one and a zero one, in the same row and in other rows."""
    x = np.zeros((3, 96), dtype=np.float32)
    x[0], x[2], x[1, :32], x[1, 64:] = 3e38, np.nan, np.nan, 1e-30
    x[1, 32:64] = block.x
    scale, codes = implementation.quantize(torch.from_numpy(x), block.fmt, block.rule)
    alone_scale, alone = cast(implementation, block.x, block.fmt, block.rule)
    if int(scale[1, 1]) != alone_scale[0] or (codes[1, 32:64].cpu().numpy() != alone[0]).any():
        return block.case(f"scale byte 0x{alone_scale[0]:02x} alone, 0x{int(scale[1, 1]):02x} among others")
    return None


def _monotonic(implementation: Implementation, block: Block) -> Case | None:
    x = block.x[0]
    got = values_of(*cast(implementation, block.x, block.fmt, block.rule), block.fmt)[0]
    order = np.argsort(x, kind="stable")
    falls = np.flatnonzero(~(got[order][1:] >= got[order][:-1]))  # also where one is NaN
    if len(falls):
        i, j = order[falls[0]], order[falls[0] + 1]
        return block.case(f"{x[i]:g} <= {x[j]:g}, but {got[i]:g} > {got[j]:g}")
    return None


def _bounded(implementation: Implementation, block: Block) -> Case | None:
    """Half a unit in the last place of a normal element, half a subnormal step of the true scale below that."""
    element = ELEMENTS[block.fmt]
    x = block.x.astype(np.float64)
    scale, codes = cast(implementation, block.x, block.fmt, block.rule)
    got = values_of(scale, codes, block.fmt)
    step = 2.0 ** (1 - element.bias - element.mantissa_bits) * SCALES[scale][:, None]
    bound = np.maximum(np.abs(x) * 2.0 ** -(element.mantissa_bits + 1), step / 2)
    wrong = np.flatnonzero(~(np.abs(got - x) <= bound)[0])
    if len(wrong):
        i = wrong[0]
        return block.case(f"{x[0, i]:g} became {got[0, i]:g}, more than {bound[0, i]:g} away")
    return None


def _never_clips(implementation: Implementation, block: Block) -> Case | None:
    scale, _ = cast(implementation, block.x, block.fmt, block.rule)
    limit = ELEMENTS[block.fmt].max * SCALES[scale[0]]
    amax = float(np.abs(block.x).max())
    return None if amax <= limit else block.case(f"maximum {amax:.9g} above M times the scale, {limit:.9g}")


def _law(
    name: str,
    statement: str,
    check: Callable[[Implementation, Any], Case | None],
    strategy: Callable[[Implementation], st.SearchStrategy[Any]],
    rule: str = "",
    **more: Any,
) -> Property:
    return Property(
        name=name, statement=statement, needs=("quantize",), rule=rule, check=check, strategy=strategy, **more
    )


# Exponents of the peak; where that is zero, the maximum lies up to 24 below. NORMAL keeps 2^-7 and 2^20 times it where
# neither scale byte nor float32 input leaves its range under the laws; WIDE is every float32 whose cast does not exceed
# float32.
NORMAL, WIDE = (-78, 100), (-149, 126)

LAWS: tuple[Property, ...] = (
    _law("idempotence", "casting what a cast gave changes no value", _idempotent, blocks(*NORMAL)),
    _law("power_of_two", "2^k times the input: scale byte + k, the same elements", _equivariant, blocks(*NORMAL)),
    _law("sign_symmetry", "the negated block: the same scale, elements negated", _sign_symmetric, blocks(*WIDE)),
    _law("permutation", "a permuted block: the elements permuted", _permutes, blocks(*WIDE)),
    _law("independence", "neighbouring blocks and rows change nothing", _independent, blocks(*WIDE)),
    _law("monotonicity", "in a block, a larger input has no smaller value", _monotonic, blocks(*WIDE)),
    _law("error_bound_rceil", "rceil: each value within half a step", _bounded, blocks(*NORMAL, ("rceil",)), "rceil"),
    _law("error_bound_ceil", "ceil: each value within half a step", _bounded, blocks(*NORMAL, ("ceil",)), "ceil"),
    _law("rceil_never_clips", "rceil: the maximum is at most M 2^k", _never_clips, blocks(*WIDE, ("rceil",)), "rceil"),
    _law("ceil_never_clips", "ceil: the maximum is at most M 2^k", _never_clips, blocks(*WIDE, ("ceil",)), "ceil"),
)
