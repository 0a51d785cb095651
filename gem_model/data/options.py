"""Keyword options of a dataset loader, checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Options = TypeVar("Options")


def make_options(kind: type[Options], dataset: str, given: Mapping[str, Any]) -> Options:
    """`kind(**given)` for a dataclass `kind`. TypeError naming an unknown option and the known ones."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"dataset {dataset!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    return kind(**given)
