"""Value checks of a `Batch` against its `Schema`: the first offender is named by feature, row and value.

Each check is one vectorised comparison, so that a loader can afford it on every batch; rows are looked up only once
something is wrong. Rows are given as position in the batch and as `sample_id`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_model.data.batching import Batch, EventStream, Schema, StreamSpec


def validate_batch(batch: Batch, schema: Schema) -> None:
    """Raise ValueError naming the first offender; return None when the batch obeys the schema.

    Checked: names and column counts, finite dense values, labels in {0, 1}, lengths >= 0 that sum to the number of
    values, ids inside [0, table rows), seconds_ago finite and >= 0. A NaN is an error here, never dropped.
    """
    _check_names(batch, schema)
    _check_dense(batch, schema)
    _check_labels(batch, schema)
    _check_sparse(batch, schema)
    for spec in schema.streams:
        _check_stream(batch, spec, batch.streams[spec.name])


def _check_names(batch: Batch, schema: Schema) -> None:
    for what, got, allowed in (
        ("sparse keys", batch.sparse.keys, schema.sparse_names),
        ("streams", tuple(sorted(batch.streams)), tuple(sorted(schema.stream_names))),
        ("dense columns", batch.dense.shape[1], len(schema.dense)),
        ("label columns", batch.labels.shape[1], len(schema.tasks)),
    ):
        if got != allowed:
            raise ValueError(f"Batch: {what} are {got}, the schema has {allowed}")


def _check_dense(batch: Batch, schema: Schema) -> None:
    bad = ~torch.isfinite(batch.dense)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"dense column {schema.dense[column]!r}, {_row(batch, row)}: {batch.dense[row, column].item()} is not "
            f"finite; clean or impute it before batching"
        )


def _check_labels(batch: Batch, schema: Schema) -> None:
    bad = (batch.labels != 0) & (batch.labels != 1)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"label {schema.tasks[column]!r}, {_row(batch, row)}: {batch.labels[row, column].item()} must be 0 or 1"
        )


def _check_sparse(batch: Batch, schema: Schema) -> None:
    sparse, size = batch.sparse, batch.batch_size
    negative = sparse.lengths < 0
    if bool(negative.any()):
        at = _first(negative)
        name = schema.sparse_names[at // size]
        raise ValueError(
            f"sparse feature {name!r}, {_row(batch, at % size)}: negative length {sparse.lengths[at].item()}"
        )
    summed = tuple(sparse.lengths.view(len(sparse.keys), size).sum(dim=1).tolist())
    if summed != sparse.length_per_key:
        raise ValueError(f"sparse: lengths sum to {summed} per key but length_per_key says {sparse.length_per_key}")
    per_key = torch.tensor(sparse.length_per_key)
    tables = torch.tensor([feature.num_embeddings for feature in schema.sparse])
    limit = torch.repeat_interleave(tables, per_key).to(sparse.values.device)
    bad = (sparse.values < 0) | (sparse.values >= limit)
    if bool(bad.any()):
        at = _first(bad)
        slot = _owner(sparse.lengths, at)
        feature = schema.sparse[slot // size]
        raise ValueError(
            f"sparse feature {feature.name!r}, {_row(batch, slot % size)}: id {sparse.values[at].item()} is outside "
            f"[0, {feature.num_embeddings})"
        )


def _check_stream(batch: Batch, spec: StreamSpec, stream: EventStream) -> None:
    where = f"stream {spec.name!r}"
    negative = stream.lengths < 0
    if bool(negative.any()):
        row = _first(negative)
        raise ValueError(f"{where}, {_row(batch, row)}: negative length {stream.lengths[row].item()}")
    total = int(stream.lengths.sum())
    if total != stream.item_ids.numel():
        raise ValueError(f"{where}: lengths sum to {total} but there are {stream.item_ids.numel()} events")
    for column, ids, rows in (
        ("item_ids", stream.item_ids, spec.num_items),
        ("action_ids", stream.action_ids, spec.num_actions),
    ):
        bad = (ids < 0) | (ids >= rows)
        if bool(bad.any()):
            at = _first(bad)
            row = _owner(stream.lengths, at)
            raise ValueError(f"{where}.{column}, {_row(batch, row)}: id {ids[at].item()} is outside [0, {rows})")
    bad = ~(torch.isfinite(stream.seconds_ago) & (stream.seconds_ago >= 0))
    if bool(bad.any()):
        at = _first(bad)
        row = _owner(stream.lengths, at)
        raise ValueError(
            f"{where}.seconds_ago, {_row(batch, row)}: {stream.seconds_ago[at].item()} must be finite and >= 0 "
            f"(an event after its request would leak the future)"
        )


def _first(bad: Tensor) -> int:
    return int(bad.nonzero()[0, 0])


def _owner(lengths: Tensor, position: int) -> int:
    """Index of the jagged row that holds flat value `position`."""
    return int(torch.searchsorted(lengths.cumsum(0), torch.tensor(position, device=lengths.device), right=True))


def _row(batch: Batch, row: int) -> str:
    return f"row {row} (sample_id {int(batch.sample_ids[row])})"
