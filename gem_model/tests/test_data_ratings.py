"""Features of a ratings log: against a naive oracle, and free of leakage bit for bit (with planted leaks detected)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gem_model.data import Dataset, ratings
from gem_model.data.ratings import DAY_SECONDS, Earlier, RatingsLog, RatingsOptions, build_ratings_dataset
from gem_model.data.source import EventColumn, IdColumn, IntArray, SampleSource

OPTIONS = RatingsOptions(max_history=4, holdout_days=3, min_user_events=3, min_item_events=2)
STREAM_FIELDS = ("item_ids", "action_ids", "seconds_ago", "lengths")
START = 10_957 * DAY_SECONDS  # Saturday 2000-01-01, 00:00 UTC


def random_log(seed: int = 0, count: int = 400) -> RatingsLog:
    """Few users and items over ten days, with many ratings in the same second."""
    rng = np.random.default_rng(seed)
    return RatingsLog(
        user=rng.integers(0, 7, count),
        item=rng.integers(0, 9, count),
        level=rng.integers(1, 6, count),
        seconds=START + rng.integers(0, 100, count) * (DAY_SECONDS // 10),
        step=1.0,
        levels=5,
        num_users=7,
        genres=IdColumn(values=rng.integers(0, 3, 18), offsets=2 * np.arange(10)),
        num_genres=3,
        release_year=np.array([0, 1950, 1999, 2000, 1980, 1995, 1970, 2003, 1998]),
        user_sparse={"gender": (rng.integers(0, 2, 7), 2)},
        user_dense={"age": rng.standard_normal(7).astype(np.float32)},
    )


def whole(dataset: Dataset) -> list[SampleSource]:
    return [dataset.train, dataset.test]


def column(dataset: Dataset, name: str) -> np.ndarray:
    at = dataset.schema.dense.index(name)
    return np.concatenate([source.dense[:, at] for source in whole(dataset)])


def ids(dataset: Dataset, name: str) -> np.ndarray:
    return np.concatenate([source.sparse[name].values for source in whole(dataset)])


def log_odds(hits: float, count: float, rate: float) -> float:
    return np.log((hits + 4 * rate) / (count - hits + 4 * (1 - rate)))


def test_dense_features_against_a_naive_oracle() -> None:
    log = random_log().in_time_order()
    dataset = build_ratings_dataset("toy", log, OPTIONS)
    genre_sets = log.genres.values.reshape(-1, 2)
    n = len(log.user)

    def seen(i: int, of: IntArray) -> IntArray:
        return np.flatnonzero((of == of[i]) & (log.seconds < log.seconds[i]))

    def mean_then(i: int, of: IntArray) -> float:
        rows = seen(i, of)
        return (log.level[rows].sum() + 5 * 3.5) / (len(rows) + 5)

    expected: dict[str, list[float]] = {name: [] for name in dataset.schema.dense if name != "age"}
    for i in range(n):
        mine, its = seen(i, log.user), seen(i, log.item)
        levels, item_levels = log.level[mine], log.level[its]
        pairs = [(r, g) for r in mine for g in genre_sets[log.item[r]]]
        hits = sum(log.level[r] >= 4 for g in genre_sets[log.item[i]] for r, h in pairs if h == g)
        count = sum(h == g for g in genre_sets[log.item[i]] for _, h in pairs)
        year = log.release_year[log.item[i]]
        idle = log.seconds[i] - log.seconds[mine].max() if len(mine) else 0
        values = {
            "user_count": np.log1p(len(mine)) / 4,
            "item_count": np.log1p(len(its)) / 4,
            "user_click": log_odds((levels >= 4).sum(), len(mine), 0.5),
            "item_click": log_odds((item_levels >= 4).sum(), len(its), 0.5),
            "user_conversion": log_odds((levels == 5).sum(), len(mine), 0.2),
            "item_conversion": log_odds((item_levels == 5).sum(), len(its), 0.2),
            "user_genre_click": log_odds(hits, count, 0.5),
            "user_bias": sum(log.level[r] - mean_then(r, log.item) for r in mine) / (len(mine) + 5),
            "item_quality": sum(log.level[r] - mean_then(r, log.user) for r in its) / (len(its) + 5),
            "since_last": np.log1p(idle) / 8,
            "item_years": np.log1p(max(2000 - year, 0) if year else 0) / 4,
        }
        for name, value in values.items():
            expected[name].append(value)
    # One float32 rounding (2^-24 relative); residuals are rounded to 2^-17 each, and n of them divided by n + 5.
    for name, values_of in expected.items():
        np.testing.assert_allclose(column(dataset, name), values_of, rtol=2**-23, atol=2**-17, err_msg=name)


def test_history_and_ids_against_a_naive_oracle() -> None:
    log = random_log().in_time_order()
    dataset = build_ratings_dataset("toy", log, OPTIONS)
    cutoff = log.seconds.max() - 3 * DAY_SECONDS
    assert len(dataset.train) == (log.seconds < cutoff).sum()

    def row_of(i: int, of: IntArray, needed: int) -> int:
        earlier = (of == of[i]) & (log.seconds < log.seconds[i]) & (log.seconds < cutoff)
        return of[i] + 1 if earlier.sum() >= needed else 0

    n = len(log.user)
    item_rows = np.array([row_of(i, log.item, 2) for i in range(n)])
    np.testing.assert_array_equal(ids(dataset, "item_id"), item_rows)
    np.testing.assert_array_equal(ids(dataset, "user_id"), [row_of(i, log.user, 3) for i in range(n)])
    assert (item_rows == 0).any()
    assert (item_rows > 0).any()
    for source in whole(dataset):
        stream = source.take(np.arange(len(source))).streams["ratings"]
        offsets = stream.offsets().tolist()
        for k, i in enumerate(source.sample_ids):
            past = np.flatnonzero((log.user == log.user[i]) & (log.seconds < log.seconds[i]))[-4:]
            events = slice(offsets[k], offsets[k + 1])
            np.testing.assert_array_equal(stream.item_ids[events], item_rows[past])
            np.testing.assert_array_equal(stream.action_ids[events], log.level[past])
            np.testing.assert_array_equal(stream.seconds_ago[events], log.seconds[i] - log.seconds[past])


def test_labels_and_context_features() -> None:
    log = random_log().in_time_order()
    dataset = build_ratings_dataset("toy", log, OPTIONS)
    labels = np.concatenate([source.labels for source in whole(dataset)])
    np.testing.assert_array_equal(labels[:, 0], log.level >= 4)
    np.testing.assert_array_equal(labels[:, 1], log.level == 5)
    first, last = dataset.train.sparse, dataset.test.sparse
    assert first["weekday"].values[0] == 5  # Saturday
    assert first["hour"].values[0] == log.seconds[0] % DAY_SECONDS // 3600
    assert set(last["release_period"].values) <= {0, 11, 15, 17, 20, 21}  # 1900 + 5 * (period - 1)
    np.testing.assert_array_equal(ids(dataset, "gender"), log.user_sparse["gender"][0][log.user])


def rows_that_change(one: Dataset, other: Dataset) -> IntArray:
    """Ids of the samples whose features (not labels) differ in any bit between two builds of one log."""
    changed: set[int] = set()
    for left, right in zip(whole(one), whole(other), strict=True):
        assert np.array_equal(left.sample_ids, right.sample_ids)
        for k, sample in enumerate(left.sample_ids):
            a, b = left.take(np.array([k])), right.take(np.array([k]))
            tensors = [
                (a.dense.view(torch.int32), b.dense.view(torch.int32)),
                (a.sparse.values, b.sparse.values),
                (a.sparse.lengths, b.sparse.lengths),
                *((getattr(a.streams["ratings"], f), getattr(b.streams["ratings"], f)) for f in STREAM_FIELDS),
            ]
            if any(x.tolist() != y.tolist() for x, y in tensors):
                changed.add(int(sample))
    return np.array(sorted(changed), dtype=np.int64)


def leaked_rows(log: RatingsLog, second: int) -> IntArray:
    """Samples up to and including `second` whose features depend on a rating given at that second or later."""
    log = log.in_time_order()
    rng = np.random.default_rng(1)
    late = log.seconds >= second
    level = np.where(late, 1 + (log.level + rng.integers(0, 4, len(late))) % 5, log.level)
    user = np.where(log.seconds > second, rng.permutation(log.user), log.user)
    item = np.where(log.seconds > second, rng.permutation(log.item), log.item)
    honest = build_ratings_dataset("toy", log, OPTIONS)
    scrambled = build_ratings_dataset("toy", replace(log, user=user, item=item, level=level), OPTIONS)
    changed = rows_that_change(honest, scrambled)
    assert len(changed), "the scrambled ratings must at least change their own features"
    return changed[log.seconds[changed] <= second]


@pytest.mark.parametrize("day", [2.0, 6.9, 8.5], ids=["in train", "just before the split", "in test"])
def test_no_feature_depends_on_the_same_or_a_later_second(day: float) -> None:
    log = random_log()
    second = int(log.seconds[log.seconds <= START + day * DAY_SECONDS].max())
    assert (log.seconds == second).sum() > 1, "the test needs ratings that share their second"
    assert leaked_rows(log, second).tolist() == []


class SameSecondLeaks(Earlier):
    """Planted: sees the ratings that come before in the file, also within one second."""

    def __init__(self, group: IntArray, seconds: IntArray) -> None:
        super().__init__(group, seconds)
        self.stop = np.argsort(self.order)


class OwnRatingLeaks(Earlier):
    """Planted: sees one rating too many, its own or one of its second."""

    def __init__(self, group: IntArray, seconds: IntArray) -> None:
        super().__init__(group, seconds)
        self.stop = self.stop + 1


class WholeLogLeaks(Earlier):
    """Planted: sums run over the group's whole log (at most one per rating seen, so that rates stay rates)."""

    def sum(self, values: IntArray) -> IntArray:
        group = np.unique(self.start, return_inverse=True)[1]
        return np.minimum(np.bincount(group, values).astype(np.int64)[group], self.count)


def float_sum(self: Earlier, values: IntArray) -> IntArray:
    """Planted: running float32 sums over all groups, whose rounding depends on other groups' later ratings."""
    running = np.concatenate([[0], np.cumsum(values[self.order] / 3, dtype=np.float32)])
    return running[self.stop] - running[self.start]


@pytest.mark.parametrize("planted", [SameSecondLeaks, OwnRatingLeaks, WholeLogLeaks])
def test_a_planted_leak_is_detected(planted: type[Earlier], monkeypatch: pytest.MonkeyPatch) -> None:
    log = random_log()
    second = int(log.seconds[log.seconds <= START + 6 * DAY_SECONDS].max())
    monkeypatch.setattr(ratings, "Earlier", planted)
    assert len(leaked_rows(log, second)) > 0


def test_a_leak_through_float_rounding_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    log = random_log()
    second = int(log.seconds[log.seconds <= START + 6 * DAY_SECONDS].max())
    monkeypatch.setattr(Earlier, "sum", float_sum)
    assert len(leaked_rows(log, second)) > 0


def test_an_event_after_its_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that reaches into the future cannot even be built: its seconds_ago would be negative."""
    log = random_log()
    honest = ratings._history

    def leaky(*args: Any) -> EventColumn:
        column = honest(*args)
        return replace(column, stop=np.minimum(column.stop + 20, len(column.item_ids)))

    monkeypatch.setattr(ratings, "_history", leaky)
    with pytest.raises(ValueError, match=r"stream 'ratings'\.seconds_ago.*leak the future"):
        build_ratings_dataset("toy", log, OPTIONS)


BAD_OPTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "history": (lambda: RatingsOptions(max_history=-1), "max_history must be >= 0, got -1"),
    "holdout": (lambda: RatingsOptions(holdout_days=0), "holdout_days must be > 0, got 0"),
    "admission": (lambda: RatingsOptions(min_user_events=0), "min_user_events must be at least 1"),
    "all test": (
        lambda: build_ratings_dataset("toy", random_log(), replace(OPTIONS, holdout_days=99)),
        "toy: the split leaves 0 train and 400 test samples",
    ),
}


@pytest.mark.parametrize("make, message", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_history_can_be_switched_off() -> None:
    dataset = build_ratings_dataset("toy", random_log(), replace(OPTIONS, max_history=0))
    batch = dataset.test.take(np.arange(5))
    assert batch.streams["ratings"].lengths.tolist() == [0] * 5
    assert batch.streams["ratings"].item_ids.numel() == 0
