"""Criteo click logs: 13 counts and 26 hashed categories per impression, one task, no event stream.

| input column | becomes                                                                                              |
|--------------|------------------------------------------------------------------------------------------------------|
| label        | task `click`, 0 or 1                                                                                 |
| I1..I13      | dense `I1`..`I13`: sign(x) log1p(abs(x)); a missing count is 0 and sets dense `I1_missing`.. to 1    |
| C1..C26      | sparse `C1`..`C26`: 1 + hash(column, value) mod (num_embeddings - 1); missing is row 0               |

Two layouts are read, told apart by the first line: tab-separated without header (40 columns, as published), and
comma-separated with the header `label,I1,..,I13,C1,..,C26`. The file is parsed in chunks, straight into columns. Rows
stay in file order, which is time order in the published logs; the last `holdout_frac` of them are the test split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gem_model.data.batching import Schema, SparseFeature
from gem_model.data.options import make_options
from gem_model.data.source import Dataset, FloatArray, IdColumn, IntArray, SampleSource, split_by_time
from gem_model.data.textfile import corrupt_line, numbered_lines

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = 1 + len(COUNTS) + len(CATEGORIES)
CSV_HEADER = ",".join(("label", *COUNTS, *CATEGORIES))
EXPECTED = (
    f"{COLUMNS} columns: a label 0 or 1, {len(COUNTS)} decimal numbers or blanks, {len(CATEGORIES)} hexadecimal values "
    f"of at most 16 digits or blanks"
)
Chunk = tuple[FloatArray, IntArray, FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class CriteoOptions:
    """`num_embeddings` rows per category, `max_rows` first rows only (None: all), `chunk_rows` parsed at a time.

    The default hold-out is the last day of the seven that the published training file covers.
    """

    num_embeddings: int = 1 << 16
    holdout_frac: float = 1 / 7
    max_rows: int | None = None
    chunk_rows: int = 65_536

    def __post_init__(self) -> None:
        if self.num_embeddings < 2:
            raise ValueError(
                f"num_embeddings must be at least 2 (row 0 is for missing values), got {self.num_embeddings}"
            )
        if not 0 < self.holdout_frac < 1:
            raise ValueError(f"holdout_frac must be inside (0, 1), got {self.holdout_frac}")
        if self.chunk_rows < 1 or (self.max_rows is not None and self.max_rows < 2):
            raise ValueError(f"chunk_rows must be >= 1 and max_rows >= 2, got {self.chunk_rows} and {self.max_rows}")


def load_criteo(*, path: str | Path | None = None, **keywords: Any) -> Dataset:
    """Read one Criteo file; `keywords` are the fields of `CriteoOptions`.

    Raises ValueError for bad options, and naming file and line for a corrupt line; FileNotFoundError for a missing
    file.
    """
    options = make_options(CriteoOptions, "criteo", keywords)
    if path is None:
        raise ValueError("criteo needs path=FILE, a tab-separated log without header or a CSV with one")
    chunks = list(read_criteo(Path(path).expanduser(), options))
    if not chunks:
        raise ValueError(f"{path} holds no rows")
    dense, ids, labels = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    source = SampleSource(
        schema=_schema(options.num_embeddings),
        dense=dense,
        sparse={name: IdColumn.single(np.ascontiguousarray(ids[:, i])) for i, name in enumerate(CATEGORIES)},
        streams={},
        labels=labels[:, None],
        sample_ids=np.arange(len(labels), dtype=np.int64),
    )
    test_rows = np.arange(len(labels)) >= len(labels) - round(len(labels) * options.holdout_frac)
    return split_by_time("criteo", source, test_rows, {})


def read_criteo(path: Path, options: CriteoOptions) -> Iterator[Chunk]:
    """Yield (dense float32 [n, 26], ids int64 [n, 26], labels float32 [n]), n <= `chunk_rows`, in file order."""
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        return
    separator = "\t"
    if "\t" not in first[1]:
        separator = ","
        if first[1] != CSV_HEADER:
            corrupt_line(path, first[0], first[1], f"tab-separated columns, or the header {CSV_HEADER!r}")
    else:
        lines = chain([first], lines)
    rows = _checked_fields(path, islice(lines, options.max_rows), separator)
    while chunk := list(islice(rows, options.chunk_rows)):
        yield _columns(chunk, options.num_embeddings)


def hash_categories(values: npt.NDArray[np.uint64], present: npt.NDArray[np.bool_], num_embeddings: int) -> IntArray:
    """Embedding rows of raw category values, both [n, columns]: 0 where not present, else in [1, num_embeddings).

    The hash is splitmix64's finaliser over the value plus a per-column offset (Steele et al., "Fast splittable
    pseudorandom number generators", 2014): the same on every platform, and different for each column.
    """
    column = np.arange(1, values.shape[1] + 1, dtype=np.uint64)
    z = values + column * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    rows = (z % np.uint64(num_embeddings - 1)).astype(np.int64) + 1
    return np.where(present, rows, 0)


def _columns(rows: list[list[str]], num_embeddings: int) -> Chunk:
    """Columns of checked rows of `COLUMNS` fields each; only a blank field is missing."""
    first = 1 + len(COUNTS)
    labels = np.array([fields[0] for fields in rows], dtype=np.float32)
    counts = np.array([[float(field or "nan") for field in fields[1:first]] for fields in rows], dtype=np.float64)
    values = np.array([[int(field or "0", 16) for field in fields[first:]] for fields in rows], dtype=np.uint64)
    present = np.array([list(map(bool, fields[first:])) for fields in rows], dtype=bool)
    missing = np.isnan(counts)
    known = np.where(missing, 0.0, counts)
    dense = np.concatenate([np.sign(known) * np.log1p(np.abs(known)), missing], axis=1).astype(np.float32)
    return dense, hash_categories(values, present, num_embeddings), labels


def _line_pattern(separator: str) -> re.Pattern[str]:
    """What a whole line must match, so that converting its fields afterwards cannot fail."""
    count, category = r"(?:-?[0-9]{1,18}(?:\.[0-9]*)?)?", r"[0-9a-fA-F]{0,16}"
    return re.compile(f"[01](?:{separator}{count}){{{len(COUNTS)}}}(?:{separator}{category}){{{len(CATEGORIES)}}}")


def _checked_fields(path: Path, lines: Iterable[tuple[int, str]], separator: str) -> Iterator[list[str]]:
    pattern = _line_pattern(separator)
    for number, text in lines:
        if not pattern.fullmatch(text):
            corrupt_line(path, number, text, EXPECTED)
        yield text.split(separator)


def _schema(num_embeddings: int) -> Schema:
    return Schema(
        dense=COUNTS + tuple(f"{name}_missing" for name in COUNTS),
        sparse=tuple(SparseFeature(name=name, num_embeddings=num_embeddings) for name in CATEGORIES),
        streams=(),
        tasks=("click",),
    )
