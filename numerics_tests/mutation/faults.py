"""The faults, each a change of one place in one file, and the tests that are said to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fault"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planted fault.

    Attributes:
        name: short, unique.
        file: path in the checkout.
        old, new: text that stands exactly once in ``file``, and what replaces it.
        test: id of the test that must fail, without parameters: ``"folder/test_file.py::test_name"``.
        why: what goes wrong for a user.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    why: str

    def planted(self, root: Path) -> str:
        """The text of the faulty file. ValueError if ``old`` does not stand there exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"fault {self.name!r}: its text stands {count} times in {self.file}, it must be 1")
        return text.replace(self.old, self.new)
