"""Small random batches for the tests of the model: multi-hot features, empty lists, empty histories, two streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_model.config import GEMConfig
from gem_model.data import Batch, EventStream, KeyedJaggedTensor, Schema, SparseFeature, StreamSpec
from gem_model.data.batching import lengths_to_offsets

CONFIG = GEMConfig(
    name="test",
    dim=32,
    layers=2,
    heads=2,
    dense_hidden=32,
    max_history=9,
    window=(4, 4),
    summary_tokens=2,
    pma_tokens=2,
    recent_tokens=3,
    pffn_tokens=4,
    fm_rank=8,
    fm_hidden=(32,),
    fm_tokens=4,
    linear_tokens=4,
    head_hidden=(32,),
)

SCHEMA = Schema(
    dense=("age", "price"),
    sparse=(
        SparseFeature(name="item", num_embeddings=11),
        SparseFeature(name="user", num_embeddings=7),
        SparseFeature(name="genres", num_embeddings=5),
    ),
    streams=(
        StreamSpec(name="views", num_items=11, num_actions=3, item_feature="item"),
        StreamSpec(name="clicks", num_items=6, num_actions=2),
    ),
)
LENGTHS = {"views": (4, 0, 9, 1, 3, 0, 7, 4), "clicks": (0, 2, 5, 0, 9, 0, 2, 2)}


def make_batch(schema: Schema = SCHEMA, lengths: dict[str, Sequence[int]] = LENGTHS, seed: int = 0) -> Batch:
    """A batch with the given history lengths; every third list of a multi-hot feature is empty."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(next(iter(lengths.values())))
    values, counts = [], []
    for feature in schema.sparse:
        count = torch.arange(batch) % 3 if feature.name == "genres" else torch.ones(batch, dtype=torch.int64)
        counts.append(count)
        values.append(torch.randint(0, feature.num_embeddings, (int(count.sum()),), generator=generator))
    streams = {}
    for spec in schema.streams:
        length = torch.tensor(lengths[spec.name], dtype=torch.int64)
        events = int(length.sum())
        streams[spec.name] = EventStream(
            item_ids=torch.randint(0, spec.num_items, (events,), generator=generator),
            action_ids=torch.randint(0, spec.num_actions, (events,), generator=generator),
            seconds_ago=torch.rand(events, generator=generator) * 1e6,
            lengths=length,
        )
    return Batch(
        dense=torch.randn(batch, len(schema.dense), generator=generator),
        sparse=KeyedJaggedTensor(schema.sparse_names, torch.cat(values), torch.cat(counts)),
        streams=streams,
        labels=(torch.rand(batch, len(schema.tasks), generator=generator) < 0.4).float(),
        sample_ids=torch.arange(batch),
    )


def select(batch: Batch, rows: Sequence[int]) -> Batch:
    """The samples `rows` of `batch`, in that order, one Python slice at a time."""
    values, lengths = [], []
    for key in batch.sparse.keys:
        feature = batch.sparse[key]
        offsets = feature.offsets().tolist()
        values += [feature.values[offsets[row] : offsets[row + 1]] for row in rows]
        lengths.append(feature.lengths[list(rows)])
    streams = {}
    for name, events in batch.streams.items():
        offsets = lengths_to_offsets(events.lengths).tolist()
        at = torch.cat([torch.arange(0), *(torch.arange(offsets[row], offsets[row + 1]) for row in rows)])
        streams[name] = EventStream(
            item_ids=events.item_ids[at],
            action_ids=events.action_ids[at],
            seconds_ago=events.seconds_ago[at],
            lengths=events.lengths[list(rows)],
        )
    return Batch(
        dense=batch.dense[list(rows)],
        sparse=KeyedJaggedTensor(batch.sparse.keys, torch.cat(values), torch.cat(lengths)),
        streams=streams,
        labels=batch.labels[list(rows)],
        sample_ids=batch.sample_ids[list(rows)],
    )
