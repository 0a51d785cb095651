"""Columns in memory, rows on demand: `SampleSource` turns any set of rows into a `Batch` by numpy slicing.

A source keeps each feature as one flat array plus where every sample's part starts and stops. An event stream is kept
once, as a log, and samples point into it; `seconds_ago` is derived when a batch is made. Building a batch is a handful
of `repeat`/`arange` gathers, with no Python loop over samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gem_model.data.batching import Batch, EventStream, KeyedJaggedTensor, Schema
from gem_model.data.validation import validate_batch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

VALIDATION_ROWS = 65_536  # rows per validation chunk: bounds the temporary memory of a large source


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IdColumn:
    """A categorical feature of N samples: sample i owns `values[offsets[i]:offsets[i + 1]]`, offsets int64 [N + 1]."""

    values: IntArray
    offsets: IntArray

    @classmethod
    def single(cls, values: IntArray) -> IdColumn:
        """One id per sample."""
        return cls(values=values, offsets=np.arange(len(values) + 1, dtype=np.int64))

    def take(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """(values, lengths) of the given samples, in their order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        return self.values[jagged_indices(starts, lengths)], lengths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventColumn:
    """An event stream of N samples that point into one log of E events.

    `item_ids`, `action_ids`, `event_seconds`: int64 [E]. Sample i, asked at `request_seconds[i]`, sees the events
    `start[i]:stop[i]` of the log (int64 [N] each), which must be oldest first.
    """

    item_ids: IntArray
    action_ids: IntArray
    event_seconds: IntArray
    start: IntArray
    stop: IntArray
    request_seconds: IntArray

    def take(self, rows: IntArray) -> EventStream:
        """The events of the given samples, in their order."""
        starts = self.start[rows]
        lengths = self.stop[rows] - starts
        events = jagged_indices(starts, lengths)
        seconds_ago = np.repeat(self.request_seconds[rows], lengths) - self.event_seconds[events]
        return EventStream(
            item_ids=torch.from_numpy(self.item_ids[events]),
            action_ids=torch.from_numpy(self.action_ids[events]),
            seconds_ago=torch.from_numpy(seconds_ago.astype(np.float32)),
            lengths=torch.from_numpy(lengths),
        )

    def select(self, rows: IntArray) -> EventColumn:
        """The same log seen by a subset of the samples."""
        return EventColumn(
            item_ids=self.item_ids,
            action_ids=self.action_ids,
            event_seconds=self.event_seconds,
            start=self.start[rows],
            stop=self.stop[rows],
            request_seconds=self.request_seconds[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleSource:
    """N samples as columns. Construction checks every value against the schema (ValueError naming the offender).

    dense float32 [N, n_dense]; labels float32 [N, n_tasks]; sample_ids int64 [N]; `sparse` and `streams` hold one
    column per schema entry. `groups` int64 [N] is the user behind each sample, known to statistics and not to models:
    samples of one user are not independent. None where users are unknown.
    """

    schema: Schema
    dense: FloatArray
    sparse: Mapping[str, IdColumn]
    streams: Mapping[str, EventColumn]
    labels: FloatArray
    sample_ids: IntArray
    groups: IntArray | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups.shape != self.sample_ids.shape:
            raise ValueError(f"groups has shape {self.groups.shape}, it must be {self.sample_ids.shape}")
        for name, column in self.sparse.items():
            _check_offsets(name, column, len(self))
        for name, stream in self.streams.items():
            _check_spans(name, stream, self.sample_ids)
        for start in range(0, len(self), VALIDATION_ROWS):
            rows = np.arange(start, min(start + VALIDATION_ROWS, len(self)))
            validate_batch(self.take(rows), self.schema)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def take(self, rows: IntArray) -> Batch:
        """The given rows (int64 [B], each in [0, N)) as a `Batch`, in their order."""
        parts = [self.sparse[name].take(rows) for name in self.schema.sparse_names]
        return Batch(
            dense=torch.from_numpy(self.dense[rows]),
            sparse=KeyedJaggedTensor(
                self.schema.sparse_names,
                torch.from_numpy(np.concatenate([values for values, _ in parts])),
                torch.from_numpy(np.concatenate([lengths for _, lengths in parts])),
                [len(values) for values, _ in parts],
            ),
            streams={name: self.streams[name].take(rows) for name in self.schema.stream_names},
            labels=torch.from_numpy(self.labels[rows]),
            sample_ids=torch.from_numpy(self.sample_ids[rows]),
        )

    def select(self, rows: IntArray) -> SampleSource:
        """The given rows as a source of their own; `sample_ids` stay as they are."""
        return SampleSource(
            schema=self.schema,
            dense=self.dense[rows],
            sparse={name: _select_ids(column, rows) for name, column in self.sparse.items()},
            streams={name: column.select(rows) for name, column in self.streams.items()},
            labels=self.labels[rows],
            sample_ids=self.sample_ids[rows],
            groups=None if self.groups is None else self.groups[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """A train and a test source under one schema.

    `best_ne` maps each task to the normalised entropy that the true probabilities reach on the test split; it is empty
    where they are unknown, that is for every real log.
    """

    name: str
    schema: Schema
    train: SampleSource
    test: SampleSource
    best_ne: Mapping[str, float]


def jagged_indices(starts: IntArray, lengths: IntArray) -> IntArray:
    """Flat indices of the spans [start, start + length), one after the other: int64 [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shifts: IntArray = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total, dtype=np.int64) + shifts


def split_by_time(
    name: str, source: SampleSource, test_rows: npt.NDArray[np.bool_], best_ne: Mapping[str, float]
) -> Dataset:
    """Dataset whose test split is the rows where `test_rows` (bool [N]) holds. ValueError when a split is empty."""
    train, test = np.flatnonzero(~test_rows), np.flatnonzero(test_rows)
    if not len(train) or not len(test):
        raise ValueError(
            f"{name}: the split leaves {len(train)} train and {len(test)} test samples; both must be non-empty: "
            f"change the hold-out option"
        )
    return Dataset(
        name=name, schema=source.schema, train=source.select(train), test=source.select(test), best_ne=best_ne
    )


def _select_ids(column: IdColumn, rows: IntArray) -> IdColumn:
    values, lengths = column.take(rows)
    return IdColumn(values=values, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _check_offsets(name: str, column: IdColumn, samples: int) -> None:
    offsets = column.offsets
    if len(offsets) != samples + 1 or offsets[0] != 0 or offsets[-1] != len(column.values):
        raise ValueError(
            f"sparse feature {name!r}: offsets must have {samples + 1} entries from 0 to {len(column.values)}, got "
            f"{len(offsets)} entries from {offsets[:1]} to {offsets[-1:]}"
        )
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if len(falling):
        row = int(falling[0])
        raise ValueError(f"sparse feature {name!r}, row {row}: offsets fall from {offsets[row]} to {offsets[row + 1]}")


def _check_spans(name: str, stream: EventColumn, sample_ids: IntArray) -> None:
    bad = np.flatnonzero((stream.start < 0) | (stream.stop < stream.start) | (stream.stop > len(stream.item_ids)))
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"stream {name!r}, row {row} (sample_id {sample_ids[row]}): events {stream.start[row]}:{stream.stop[row]} "
            f"are no span of the {len(stream.item_ids)} events in the log"
        )
