"""Properties, the cases that break them, and the search for the smallest one.

A *directed* property walks over a list made for it, simplest first, and yields every case that fails. A *drawn* one
checks a single example; hypothesis draws, and shrinks what fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Verbosity, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from numerics_tests.validation.implementation import Implementation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input that breaks a property.

    ``values`` are the entries of a block that matter, the others being zero; ``byte`` and ``code`` a scale byte and an
    element, where the input is encoded already. ``said`` tells what came out and what should have.
    """

    said: str
    values: tuple[float, ...] = ()
    fmt: str = "e4m3"
    rule: str = ""
    byte: int | None = None
    code: int | None = None
    note: str = ""

    @property
    def amax(self) -> float:
        return float(np.abs(np.array(self.values)).max(initial=0.0))

    def hex(self) -> str:
        """The input: float32 bit patterns with their values, or scale byte and element code."""
        parts = [p for p in (self.fmt, self.rule, self.note) if p]
        parts += [f"{_bits(v)} ({v:.9g})" for v in self.values]
        parts += [f"scale byte 0x{self.byte:02x}"] if self.byte is not None else []
        parts += [f"element 0x{self.code:02x}"] if self.code is not None else []
        return " ".join(parts)

    def __str__(self) -> str:
        return f"{self.hex()}: {self.said}"


def _bits(value: float) -> str:
    with np.errstate(over="ignore"):
        return f"0x{int(np.array(value, dtype=np.float32).view(np.uint32)):08x}"


Directed = Callable[[Implementation], Iterator[Case]]
Check = Callable[[Implementation, Any], Case | None]


@dataclass(frozen=True, kw_only=True)
class Property:
    """A named statement about an implementation. ``needs`` are the features without which it does not apply."""

    name: str
    statement: str
    needs: tuple[str, ...]
    rule: str = ""
    directed: Directed | None = None
    check: Check | None = None
    strategy: Callable[[Implementation], SearchStrategy[Any]] | None = None
    examples: int = 150

    def why_not(self, implementation: Implementation) -> str | None:
        """The reason why it does not apply, or None."""
        can = implementation.capabilities
        for feature in self.needs:
            if feature in can.lacks:
                return can.lacks[feature]
        return f"no scale rule {self.rule}" if self.rule and self.rule not in can.rules else None


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """A difference of a peer that is known and has a reason. ``covers`` says of which cases, so that anything else that
    breaks the same property still counts as a failure; ``on``, on which devices it is expected to show."""

    implementation: str
    property: str
    reason: str
    covers: Callable[[Case], bool] = field(default=lambda case: True)
    on: Callable[[torch.device], bool] = field(default=lambda device: True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one property gave: pass, fail, differs (agreed), or not applicable."""

    name: str
    statement: str
    result: str
    reason: str = ""
    smallest: str = ""


PASS, FAIL, DIFFERS, NOT_APPLICABLE = "pass", "fail", "differs (agreed)", "not applicable"

# What libraries raise on input that they do not like. Anything else is a fault of the suite and is not hidden.
_THEIR_ERRORS = (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError, LookupError, NotImplementedError)


def judge(prop: Property, implementation: Implementation, agreed: tuple[Agreed, ...], seed: int = 0) -> list[Outcome]:
    """Outcomes of one property: one line each for an agreed difference, else a single line."""

    def outcome(result: str, reason: str = "", smallest: Case | None = None) -> Outcome:
        text = "" if smallest is None else str(smallest)
        return Outcome(name=prop.name, statement=prop.statement, result=result, reason=reason, smallest=text)

    if (reason := prop.why_not(implementation)) is not None:
        return [outcome(NOT_APPLICABLE, reason)]
    try:
        found, unexpected = _walk(prop, implementation, agreed, seed)
    except _THEIR_ERRORS as error:
        words = " ".join(str(error).split())[:300]
        return [outcome(FAIL, f"raised {type(error).__name__}: {words}")]
    out = [
        outcome(DIFFERS, entry.reason, case)
        if case is not None
        else outcome(FAIL, f"the agreed difference is gone, so take it off the list: {entry.reason}")
        for entry, case in zip(agreed, found, strict=True)
    ]
    return out + ([outcome(FAIL, "", unexpected)] if unexpected is not None else []) or [outcome(PASS)]


def _walk(
    prop: Property, implementation: Implementation, agreed: tuple[Agreed, ...], seed: int
) -> tuple[list[Case | None], Case | None]:
    """The first case that each agreed difference covers, and the first that none does."""
    found: list[Case | None] = [None] * len(agreed)
    unexpected: Case | None = None
    if prop.directed is not None:
        for case in prop.directed(implementation):
            covered = [i for i, entry in enumerate(agreed) if entry.covers(case)]
            for i in covered:
                found[i] = found[i] or case
            if not covered:
                unexpected = unexpected or case
        return found, unexpected
    unexpected = _search(
        prop, implementation, lambda case: not any(a.covers(case) for a in agreed), seed, prop.examples
    )
    # An agreed difference must show whatever the seed: it is looked for ten times as long, until found.
    shown = [_search(prop, implementation, entry.covers, seed, 10 * prop.examples) for entry in agreed]
    return shown, unexpected


def _search(
    prop: Property, implementation: Implementation, wanted: Callable[[Case], bool], seed: int, examples: int
) -> Case | None:
    """The smallest failing example that is wanted, by hypothesis."""
    check, strategy = prop.check, prop.strategy
    assert check is not None, f"{prop.name} is neither directed nor drawn"
    assert strategy is not None, f"{prop.name} has a check but nothing to draw from"

    def fails(example: Any) -> bool:
        case = check(implementation, example)
        return case is not None and wanted(case)

    options = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return check(
            implementation, find(strategy(implementation), fails, settings=options, random=random.Random(seed))
        )
    except NoSuchExample:
        return None
