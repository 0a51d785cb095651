"""Reading text data so that a corrupt line is an error naming file, line number, text and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

SHOWN_CHARACTERS = 80


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without its line end) of a UTF-8 file. FileNotFoundError when it is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                corrupt_line(path, number, repr(raw), "UTF-8 text")
            yield number, text.rstrip("\r\n")


def lines_after_header(path: Path, header: str) -> Iterator[tuple[int, str]]:
    """The lines after the first, which must be exactly `header`."""
    lines = numbered_lines(path)
    number, first = next(lines, (1, ""))
    if first != header:
        corrupt_line(path, number, first, f"the header {header!r}")
    yield from lines


def corrupt_line(path: Path, number: int, text: str, expected: str) -> NoReturn:
    """Raise ValueError for one bad line; nothing read so far is returned to the caller."""
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    raise ValueError(f"{path}, line {number}: {shown!r} is corrupt; expected {expected}") from None
