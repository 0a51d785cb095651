"""What a model is fed: jagged batches and the schema they obey.

The names mirror TorchRec (`JaggedTensor`, `KeyedJaggedTensor`, `values` / `lengths`), so that its sharded modules can
take over later; nothing here needs TorchRec. Nothing is padded: a list feature is its concatenated values and one
length per sample, and a sample without values has length 0.

| part of a `Batch`   | dtype   | shape         | meaning                                                             |
|---------------------|---------|---------------|---------------------------------------------------------------------|
| `dense`             | float32 | [B, n_dense]  | columns in the order of `Schema.dense`, all finite                  |
| `sparse.values`     | int64   | [total]       | row ids of embedding tables, key-major, then by sample              |
| `sparse.lengths`    | int64   | [n_keys * B]  | ids per (key, sample); keys in the order of `Schema.sparse`         |
| `streams[s].*_ids`  | int64   | [T]           | events of all samples, oldest first inside a sample                 |
| `streams[s].seconds_ago` | float32 | [T]      | request time minus event time, seconds, >= 0                        |
| `streams[s].lengths`| int64   | [B]           | events per sample; 0 is legal                                       |
| `labels`            | float32 | [B, n_tasks]  | 0 or 1, columns in the order of `Schema.tasks`                      |
| `sample_ids`        | int64   | [B]           | row of the sample in its source; identifies it across paired runs   |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Device = torch.device | str


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFeature:
    """One categorical feature (single or multi-hot); ids lie in [0, num_embeddings)."""

    name: str
    num_embeddings: int

    def __post_init__(self) -> None:
        _require_positive(f"sparse feature {self.name!r}: num_embeddings", self.num_embeddings)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSpec:
    """One event stream: item ids in [0, num_items), action ids in [0, num_actions).

    `item_feature` names the sparse feature that shares the item id space (the candidate), so that a model may use one
    table for both; None when no such feature exists.
    """

    name: str
    num_items: int
    num_actions: int
    item_feature: str | None = None

    def __post_init__(self) -> None:
        _require_positive(f"stream {self.name!r}: num_items", self.num_items)
        _require_positive(f"stream {self.name!r}: num_actions", self.num_actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Names and id ranges of everything a `Batch` carries. Raises ValueError on repeated or dangling names."""

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    streams: tuple[StreamSpec, ...] = ()
    tasks: tuple[str, ...] = ("click", "conversion")

    def __post_init__(self) -> None:
        for part, names in (
            ("dense", self.dense),
            ("sparse", self.sparse_names),
            ("streams", self.stream_names),
            ("tasks", self.tasks),
        ):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(f"Schema.{part}: names must be unique, {repeated} appear more than once")
        if not self.tasks:
            raise ValueError("Schema.tasks is empty: name at least one binary label")
        sizes = {feature.name: feature.num_embeddings for feature in self.sparse}
        for stream in self.streams:
            if stream.item_feature is not None and sizes.get(stream.item_feature) != stream.num_items:
                raise ValueError(
                    f"stream {stream.name!r}: item_feature {stream.item_feature!r} must be a sparse feature with "
                    f"num_embeddings == num_items == {stream.num_items}; sparse features are {sizes}"
                )

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """Sparse feature names, the key order of a `KeyedJaggedTensor`."""
        return tuple(feature.name for feature in self.sparse)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """Names of the event streams."""
        return tuple(stream.name for stream in self.streams)


class JaggedTensor:
    """Rows of different lengths: `values` [sum(lengths), ...] and `lengths` int64 [B] (TorchRec's layout)."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        _require_tensor("JaggedTensor.lengths", lengths, torch.int64, 1)
        self.values = values
        self.lengths = lengths

    def offsets(self) -> Tensor:
        """Cumulative lengths, int64 [B + 1]; row i is `values[offsets[i]:offsets[i + 1]]`."""
        return lengths_to_offsets(self.lengths)

    def to(self, device: Device, non_blocking: bool = False) -> JaggedTensor:
        """The same rows on `device`."""
        return JaggedTensor(
            self.values.to(device, non_blocking=non_blocking), self.lengths.to(device, non_blocking=non_blocking)
        )

    def __repr__(self) -> str:
        return f"JaggedTensor(rows={self.lengths.numel()}, values={tuple(self.values.shape)})"


class KeyedJaggedTensor:
    """Several jagged features over one batch, key-major as in TorchRec.

    `lengths[k * B + i]` ids belong to key k of sample i, and `values` follow in that order. `length_per_key` (host
    integers) is computed when not given; passing it along spares a device synchronisation.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, lengths: Tensor, length_per_key: Sequence[int] | None = None
    ) -> None:
        if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):
            raise TypeError(f"KeyedJaggedTensor.keys must be a sequence of names, got {keys!r}")
        self.keys = tuple(keys)
        _require_tensor("KeyedJaggedTensor.values", values, torch.int64, 1)
        _require_tensor("KeyedJaggedTensor.lengths", lengths, torch.int64, 1)
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"KeyedJaggedTensor.keys must be unique, got {self.keys}")
        if not self.keys or lengths.numel() % len(self.keys):
            raise ValueError(
                f"KeyedJaggedTensor.lengths has {lengths.numel()} entries, expected batch size x {len(self.keys)} keys"
            )
        self.values = values
        self.lengths = lengths
        if length_per_key is None:
            length_per_key = lengths.reshape(len(self.keys), self.stride()).sum(dim=1).tolist()
        if len(length_per_key) != len(self.keys) or not all(isinstance(n, int) for n in length_per_key):
            raise ValueError(
                f"KeyedJaggedTensor.length_per_key must be one integer for each of {self.keys}, got {length_per_key!r}"
            )
        self.length_per_key = tuple(length_per_key)
        if sum(self.length_per_key) != values.numel():
            raise ValueError(
                f"KeyedJaggedTensor: lengths sum to {sum(self.length_per_key)} but there are {values.numel()} values"
            )

    def stride(self) -> int:
        """Batch size."""
        return self.lengths.numel() // len(self.keys)

    def __getitem__(self, key: str) -> JaggedTensor:
        """The feature named `key`; views, no copy. Raises KeyError naming the known keys."""
        if key not in self.keys:
            raise KeyError(f"no sparse feature {key!r}; keys are {list(self.keys)}")
        at, batch = self.keys.index(key), self.stride()
        start = sum(self.length_per_key[:at])
        values = self.values[start : start + self.length_per_key[at]]
        return JaggedTensor(values, self.lengths[at * batch : (at + 1) * batch])

    def to(self, device: Device, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same features on `device`."""
        return KeyedJaggedTensor(
            self.keys,
            self.values.to(device, non_blocking=non_blocking),
            self.lengths.to(device, non_blocking=non_blocking),
            self.length_per_key,
        )

    def __repr__(self) -> str:
        sizes = dict(zip(self.keys, self.length_per_key, strict=True))
        return f"KeyedJaggedTensor(stride={self.stride()}, length_per_key={sizes})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventStream:
    """What each sample's user did before the request: [T] events over B samples, oldest first inside a sample."""

    item_ids: Tensor
    action_ids: Tensor
    seconds_ago: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        _require_tensor("EventStream.item_ids", self.item_ids, torch.int64, 1)
        _require_tensor("EventStream.action_ids", self.action_ids, torch.int64, 1)
        _require_tensor("EventStream.seconds_ago", self.seconds_ago, torch.float32, 1)
        _require_tensor("EventStream.lengths", self.lengths, torch.int64, 1)
        sizes = {self.item_ids.numel(), self.action_ids.numel(), self.seconds_ago.numel()}
        if len(sizes) != 1:
            raise ValueError(
                f"EventStream: item_ids, action_ids and seconds_ago must have one entry per event, got "
                f"{self.item_ids.numel()}, {self.action_ids.numel()} and {self.seconds_ago.numel()}"
            )

    def offsets(self) -> Tensor:
        """Cumulative lengths, int64 [B + 1]."""
        return lengths_to_offsets(self.lengths)

    def to(self, device: Device, non_blocking: bool = False) -> EventStream:
        """The same events on `device`."""
        return EventStream(
            item_ids=self.item_ids.to(device, non_blocking=non_blocking),
            action_ids=self.action_ids.to(device, non_blocking=non_blocking),
            seconds_ago=self.seconds_ago.to(device, non_blocking=non_blocking),
            lengths=self.lengths.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """B samples; the module's table gives dtypes and shapes. `validate` checks values, construction checks types."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    streams: dict[str, EventStream]
    labels: Tensor
    sample_ids: Tensor

    def __post_init__(self) -> None:
        _require_tensor("Batch.dense", self.dense, torch.float32, 2)
        _require_tensor("Batch.labels", self.labels, torch.float32, 2)
        _require_tensor("Batch.sample_ids", self.sample_ids, torch.int64, 1)
        rows = {"dense": self.dense.shape[0], "labels": self.labels.shape[0], "sparse": self.sparse.stride()}
        rows |= {f"streams[{name!r}]": stream.lengths.numel() for name, stream in self.streams.items()}
        wrong = {part: count for part, count in rows.items() if count != self.batch_size}
        if wrong:
            raise ValueError(f"Batch: sample_ids has {self.batch_size} rows but {wrong}; all must agree")

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.sample_ids.numel()

    def to(self, device: Device, non_blocking: bool = False) -> Batch:
        """The same samples on `device`."""
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            streams={name: stream.to(device, non_blocking) for name, stream in self.streams.items()},
            labels=self.labels.to(device, non_blocking=non_blocking),
            sample_ids=self.sample_ids.to(device, non_blocking=non_blocking),
        )

    def validate(self, schema: Schema) -> Batch:
        """Check every value against `schema` and return self.

        Raises ValueError naming the feature, row, value and allowed range of the first offender.
        """
        from gem_model.data.validation import validate_batch  # it imports this module

        validate_batch(self, schema)
        return self


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """int64 [B] -> int64 [B + 1], starting at 0."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _require_positive(what: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}")


def _require_tensor(what: str, tensor: Tensor, dtype: torch.dtype, ndim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, got {tensor.dtype}; convert it with .to({dtype})")
    if tensor.ndim != ndim:
        raise ValueError(f"{what} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
