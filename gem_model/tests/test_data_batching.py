"""Batch types: TorchRec's layout by value, and every kind of bad value named with feature, row and range."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gem_model.data import Batch, EventStream, JaggedTensor, KeyedJaggedTensor, Schema, SparseFeature, StreamSpec

SCHEMA = Schema(
    dense=("age", "price"),
    sparse=(SparseFeature(name="user", num_embeddings=10), SparseFeature(name="tags", num_embeddings=4)),
    streams=(StreamSpec(name="views", num_items=6, num_actions=3),),
)


def make_batch() -> Batch:
    """Three samples; the second has no tags, the first no events."""
    return Batch(
        dense=torch.tensor([[0.5, 1.0], [0.0, -2.0], [3.0, 4.0]]),
        sparse=KeyedJaggedTensor(
            ("user", "tags"), torch.tensor([7, 8, 9, 0, 1, 3]), torch.tensor([1, 1, 1, 2, 0, 1], dtype=torch.int64)
        ),
        streams={
            "views": EventStream(
                item_ids=torch.tensor([5, 4, 0]),
                action_ids=torch.tensor([0, 2, 1]),
                seconds_ago=torch.tensor([9.0, 1.0, 0.0]),
                lengths=torch.tensor([0, 1, 2]),
            )
        },
        labels=torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
        sample_ids=torch.tensor([100, 101, 102]),
    )


def test_keyed_jagged_tensor_is_key_major() -> None:
    sparse = make_batch().sparse
    assert sparse.stride() == 3
    assert sparse.length_per_key == (3, 3)
    assert sparse["user"].values.tolist() == [7, 8, 9]
    assert sparse["tags"].values.tolist() == [0, 1, 3]
    assert sparse["tags"].lengths.tolist() == [2, 0, 1]
    assert sparse["tags"].offsets().tolist() == [0, 2, 2, 3]
    with pytest.raises(KeyError, match=r"'colour'.*user.*tags"):
        sparse["colour"]


def test_to_moves_every_tensor_and_keeps_values() -> None:
    batch = make_batch()
    moved = batch.to("meta")
    tensors = [moved.dense, moved.labels, moved.sample_ids, moved.sparse.values, moved.sparse.lengths]
    tensors += [getattr(moved.streams["views"], name) for name in EventStream.__slots__]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    same = batch.to("cpu")
    assert torch.equal(same.streams["views"].seconds_ago, batch.streams["views"].seconds_ago)
    assert same.sparse.length_per_key == batch.sparse.length_per_key


def test_a_good_batch_and_an_empty_history_pass() -> None:
    batch = make_batch()
    assert batch.validate(SCHEMA) is batch
    nothing = EventStream(
        item_ids=torch.empty(0, dtype=torch.int64),
        action_ids=torch.empty(0, dtype=torch.int64),
        seconds_ago=torch.empty(0),
        lengths=torch.zeros(3, dtype=torch.int64),
    )
    replace(batch, streams={"views": nothing}).validate(SCHEMA)
    assert nothing.offsets().tolist() == [0, 0, 0, 0]


def _poison(part: str, at: tuple[int, ...], value: float) -> Callable[[Batch], object]:
    def change(batch: Batch) -> None:
        tensor = {
            "dense": batch.dense,
            "labels": batch.labels,
            "sparse.values": batch.sparse.values,
            "sparse.lengths": batch.sparse.lengths,
        }.get(part)
        if tensor is None:
            tensor = getattr(batch.streams["views"], part)
        tensor[at] = value

    return change


BAD_VALUES = {
    "NaN in dense": (_poison("dense", (1, 1), float("nan")), r"'price', row 1 \(sample_id 101\): nan"),
    "Inf in dense": (_poison("dense", (2, 0), float("inf")), r"'age', row 2 .*inf"),
    "label 2": (_poison("labels", (2, 1), 2.0), r"'conversion', row 2 .*2\.0 must be 0 or 1"),
    "label NaN": (_poison("labels", (0, 0), float("nan")), r"'click', row 0 .*nan must be 0 or 1"),
    "id = rows": (_poison("sparse.values", (5,), 4), r"'tags', row 2 .*id 4 is outside \[0, 4\)"),
    "id < 0": (_poison("sparse.values", (1,), -1), r"'user', row 1 .*id -1 is outside \[0, 10\)"),
    "sparse length < 0": (_poison("sparse.lengths", (4,), -1), r"'tags', row 1 .*negative length -1"),
    "lengths moved across keys": (_poison("sparse.lengths", (0,), 2), r"lengths sum to \(4, 3\).*says \(3, 3\)"),
    "item id": (_poison("item_ids", (1,), 6), r"'views'\.item_ids, row 2 .*id 6 is outside \[0, 6\)"),
    "action id": (_poison("action_ids", (0,), 3), r"'views'\.action_ids, row 1 .*id 3 is outside \[0, 3\)"),
    "event in the future": (_poison("seconds_ago", (2,), -1.0), r"'views'\.seconds_ago, row 2 .*-1\.0.*leak"),
    "NaN time": (_poison("seconds_ago", (0,), float("nan")), r"'views'\.seconds_ago, row 1 .*nan"),
    "stream length < 0": (_poison("lengths", (0,), -2), r"'views', row 0 .*negative length -2"),
    "stream sum": (_poison("lengths", (0,), 1), r"'views': lengths sum to 4 but there are 3 events"),
}


@pytest.mark.parametrize("change, message", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_value_is_named(change: Callable[[Batch], object], message: str) -> None:
    batch = make_batch()
    change(batch)
    with pytest.raises(ValueError, match=message):
        batch.validate(SCHEMA)


def test_a_batch_of_another_schema_is_refused() -> None:
    other = replace(SCHEMA, dense=("age",))
    with pytest.raises(ValueError, match="dense columns are 2, the schema has 1"):
        make_batch().validate(other)
    with pytest.raises(ValueError, match="streams are"):
        make_batch().validate(replace(SCHEMA, streams=()))


def test_wrong_types_and_sizes_are_refused_at_construction() -> None:
    batch = make_batch()
    with pytest.raises(TypeError, match=r"Batch\.dense must be torch\.float32, got torch\.float64"):
        replace(batch, dense=batch.dense.double())
    with pytest.raises(TypeError, match=r"KeyedJaggedTensor\.values must be torch\.int64, got torch\.int32"):
        KeyedJaggedTensor(("a",), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="lengths sum to 2 but there are 3 values"):
        KeyedJaggedTensor(("a",), torch.zeros(3, dtype=torch.int64), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="3 entries, expected batch size x 2 keys"):
        KeyedJaggedTensor(("a", "b"), torch.zeros(3, dtype=torch.int64), torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match=r"sample_ids has 2 rows but \{'dense': 3"):
        replace(batch, sample_ids=batch.sample_ids[:2])
    with pytest.raises(ValueError, match="one entry per event, got 3, 2 and 3"):
        replace(batch.streams["views"], action_ids=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"JaggedTensor\.lengths must be torch\.int64"):
        JaggedTensor(torch.zeros(2), torch.ones(2))


def test_a_schema_checks_its_names() -> None:
    with pytest.raises(ValueError, match=r"Schema\.dense: names must be unique, \['age'\]"):
        replace(SCHEMA, dense=("age", "age"))
    with pytest.raises(ValueError, match="'user': num_embeddings must be at least 1, got 0"):
        SparseFeature(name="user", num_embeddings=0)
    tied = StreamSpec(name="views", num_items=6, num_actions=3, item_feature="user")
    with pytest.raises(ValueError, match=r"item_feature 'user'.*num_items == 6"):
        replace(SCHEMA, streams=(tied,))
