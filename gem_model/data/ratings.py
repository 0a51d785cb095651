"""From a log of ratings to an ads-like dataset: click, conversion, running statistics, one event stream.

Every rating is one sample ("an impression"); click = rating >= 4 stars, conversion = 5 stars. Samples are in time order
and all features see *strictly earlier* seconds only: ratings of the same second never see each other. Sums run over
integers, so a feature is bit-identical whatever happens later in the log.

| dense column          | meaning (all from strictly earlier ratings)                                             |
|-----------------------|-----------------------------------------------------------------------------------------|
| `user_count`, `item_count` | log1p(number of ratings) / 4                                                       |
| `user_click`, `item_click` | smoothed log-odds of a click                                                       |
| `user_conversion`, `item_conversion` | smoothed log-odds of a conversion                                        |
| `user_genre_click`    | the same for the user's ratings of the candidate's genres                               |
| `user_bias`           | smoothed mean of (user's rating - item's mean then), stars                              |
| `item_quality`        | smoothed mean of (item's rating - user's mean then), stars                              |
| `since_last`            | log1p(seconds since the user's latest earlier rating) / 8; 0 when there is none         |
| `item_years`          | log1p(request year - release year) / 4; 0 when the year is unknown                      |
| user columns          | as given by `RatingsLog.user_dense`                                                     |

| sparse feature   | ids                                                                                          |
|------------------|----------------------------------------------------------------------------------------------|
| `user_id`, `item_id` | 1 + index, or 0 while the id has too few earlier *training* ratings (see below)          |
| `genres`         | multi-hot                                                                                    |
| `release_period` | 0 unknown, else 1 + five-year period since 1900                                              |
| `hour`, `weekday`| of the request, UTC; Monday is 0                                                             |
| user columns     | as given by `RatingsLog.user_sparse`                                                         |

Stream `ratings`: item id (same id space as `item_id`), action = rating level (1-based), at most `max_history` latest.

Row 0 of the id tables: most users of the held-out month are new, so an id gets its own row only after
`min_user_events` / `min_item_events` strictly earlier ratings inside the training period. The same rule holds in both
splits, so that row 0 is trained on exactly what it stands for later: an id about which little is known yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_model.data.batching import Schema, SparseFeature, StreamSpec
from gem_model.data.source import Dataset, EventColumn, IdColumn, IntArray, SampleSource, jagged_indices, split_by_time

DAY_SECONDS = 86_400
CLICK_STARS, CONVERSION_STARS, MIDDLE_STARS = 4.0, 5.0, 3.5
FIXED_POINT = 1 << 16  # residuals are summed as integers: exact, hence independent of what else is in the log
FIRST_YEAR, PERIOD_YEARS, LAST_YEAR = 1900, 5, 2099
RELEASE_PERIODS = (LAST_YEAR - FIRST_YEAR) // PERIOD_YEARS + 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingsOptions:
    """How a ratings log becomes samples. Counts are ratings, `holdout_days` the length of the test period."""

    max_history: int = 32
    holdout_days: float = 30.0
    min_user_events: int = 20
    min_item_events: int = 5
    hide_user_ids: float = 0.0
    """Share of training samples, drawn once, whose user is row 0 although known: it trains the row of new users."""

    def __post_init__(self) -> None:
        if self.max_history < 0:
            raise ValueError(f"max_history must be >= 0, got {self.max_history}")
        if not self.holdout_days > 0:
            raise ValueError(f"holdout_days must be > 0, got {self.holdout_days}")
        if not 0 <= self.hide_user_ids <= 1:
            raise ValueError(f"hide_user_ids must be in [0, 1], got {self.hide_user_ids}")
        for name, value in (("min_user_events", self.min_user_events), ("min_item_events", self.min_item_events)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 (an id never seen in training has no row), got {value}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RatingsLog:
    """N ratings in any order, of U users and I items (indices from 0), with what is known about both.

    user, item, seconds (Unix time), level (rating / `step`, 1-based): int64 [N]. `release_year` int64 [I], 0 unknown.
    `genres`: one multi-hot entry per item. `user_sparse`: (ids int64 [U], number of rows); `user_dense`: float32 [U].
    """

    user: IntArray
    item: IntArray
    level: IntArray
    seconds: IntArray
    step: float
    levels: int
    num_users: int
    genres: IdColumn
    num_genres: int
    release_year: IntArray
    user_sparse: Mapping[str, tuple[IntArray, int]]
    user_dense: Mapping[str, npt.NDArray[np.float32]]

    @property
    def num_items(self) -> int:
        """Number of items I."""
        return len(self.release_year)

    @property
    def stars(self) -> Floats:
        """Ratings in stars, float64 [N]."""
        return self.level.astype(np.float64) * self.step

    def in_time_order(self) -> RatingsLog:
        """The same log sorted by time; ratings of one second keep their order."""
        order = np.argsort(self.seconds, kind="stable")
        columns = {name: getattr(self, name)[order] for name in ("user", "item", "level", "seconds")}
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in columns}
        return RatingsLog(**columns, **rest)


class Earlier:
    """For each row of a log: the rows of the same group with a strictly smaller time.

    `order` sorts the log by (group, time); row i's earlier rows are `order[start[i]:stop[i]]`, oldest first.
    """

    def __init__(self, group: IntArray, seconds: IntArray) -> None:
        self.order: IntArray = np.lexsort((seconds, group))
        sorted_group, sorted_seconds = group[self.order], seconds[self.order]
        new_group = np.ones(len(group), dtype=bool)
        new_group[1:] = sorted_group[1:] != sorted_group[:-1]
        new_second = new_group.copy()
        new_second[1:] |= sorted_seconds[1:] != sorted_seconds[:-1]
        self.start = self._latest(new_group)
        self.stop = self._latest(new_second)

    @property
    def count(self) -> IntArray:
        """Number of earlier rows, int64 [N]."""
        return self.stop - self.start

    def sum(self, values: IntArray) -> IntArray:
        """Sum of integer `values` [N] over the earlier rows, exact."""
        running: IntArray = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[self.order], dtype=np.int64)])
        totals: IntArray = running[self.stop] - running[self.start]
        return totals

    def last(self, values: IntArray, default: IntArray) -> IntArray:
        """Value of the latest earlier row, or `default` [N] where there is none."""
        latest: IntArray = values[self.order[np.maximum(self.stop - 1, 0)]]
        return np.where(self.count > 0, latest, default)

    def _latest(self, marks: npt.NDArray[np.bool_]) -> IntArray:
        positions = np.maximum.accumulate(np.where(marks, np.arange(len(marks)), 0))
        unsorted = np.empty_like(positions)
        unsorted[self.order] = positions
        return unsorted


def build_ratings_dataset(name: str, log: RatingsLog, options: RatingsOptions) -> Dataset:
    """Features, labels and the time split: test = the last `holdout_days` of the log, up to its last second.

    Raises ValueError when a split would be empty.
    """
    log = log.in_time_order()
    cutoff = int(log.seconds[-1]) - round(options.holdout_days * DAY_SECONDS)
    test_rows = log.seconds >= cutoff
    by_user, by_item = Earlier(log.user, log.seconds), Earlier(log.item, log.seconds)
    training = (~test_rows).astype(np.int64)
    user_ids = np.where(by_user.sum(training) >= options.min_user_events, log.user + 1, 0)
    hidden = ~test_rows & (np.random.default_rng(0).random(len(test_rows)) < options.hide_user_ids)
    user_ids = np.where(hidden, 0, user_ids)
    item_ids = np.where(by_item.sum(training) >= options.min_item_events, log.item + 1, 0)
    dense = _dense_columns(log, by_user, by_item)
    sparse = _sparse_columns(log, user_ids, item_ids)
    source = SampleSource(
        schema=_schema(log, tuple(dense)),
        dense=np.stack(list(dense.values()), axis=1).astype(np.float32),
        sparse=sparse,
        streams={"ratings": _history(log, by_user, item_ids, options.max_history)},
        labels=np.stack([log.stars >= CLICK_STARS, log.stars >= CONVERSION_STARS], axis=1).astype(np.float32),
        sample_ids=np.arange(len(log.user), dtype=np.int64),
        groups=log.user,
    )
    return split_by_time(name, source, test_rows, {})


def _schema(log: RatingsLog, dense: tuple[str, ...]) -> Schema:
    rows = {
        "user_id": log.num_users + 1,
        "item_id": log.num_items + 1,
        "genres": log.num_genres,
        "release_period": RELEASE_PERIODS,
        "hour": 24,
        "weekday": 7,
    } | {name: size for name, (_, size) in log.user_sparse.items()}
    return Schema(
        dense=dense,
        sparse=tuple(SparseFeature(name=name, num_embeddings=size) for name, size in rows.items()),
        streams=(
            StreamSpec(name="ratings", num_items=rows["item_id"], num_actions=log.levels + 1, item_feature="item_id"),
        ),
    )


def _sparse_columns(log: RatingsLog, user_ids: IntArray, item_ids: IntArray) -> dict[str, IdColumn]:
    genres, lengths = log.genres.take(log.item)
    period = np.where(log.release_year > 0, 1 + (log.release_year - FIRST_YEAR) // PERIOD_YEARS, 0)
    singles = {
        "user_id": user_ids,
        "item_id": item_ids,
        "release_period": period[log.item],
        "hour": log.seconds // 3600 % 24,
        "weekday": (log.seconds // DAY_SECONDS + 3) % 7,  # 1970-01-01 was a Thursday
    } | {name: ids[log.user] for name, (ids, _) in log.user_sparse.items()}
    columns = {name: IdColumn.single(ids) for name, ids in singles.items()}
    columns["genres"] = IdColumn(values=genres, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
    return columns


def _history(log: RatingsLog, by_user: Earlier, item_ids: IntArray, max_history: int) -> EventColumn:
    return EventColumn(
        item_ids=item_ids[by_user.order],
        action_ids=log.level[by_user.order],
        event_seconds=log.seconds[by_user.order],
        start=np.maximum(by_user.start, by_user.stop - max_history),
        stop=by_user.stop,
        request_seconds=log.seconds,
    )


def _dense_columns(log: RatingsLog, by_user: Earlier, by_item: Earlier) -> dict[str, npt.NDArray[np.floating]]:
    click = (log.stars >= CLICK_STARS).astype(np.int64)
    conversion = (log.stars >= CONVERSION_STARS).astype(np.int64)
    idle_seconds = log.seconds - by_user.last(log.seconds, log.seconds)
    request_year = log.seconds.astype("datetime64[s]").astype("datetime64[Y]").astype(np.int64) + 1970
    years = np.where(log.release_year[log.item] > 0, request_year - log.release_year[log.item], 0)
    return {
        "user_count": np.log1p(by_user.count) / 4,
        "item_count": np.log1p(by_item.count) / 4,
        "user_click": _log_odds(by_user.sum(click), by_user.count, rate=0.5),
        "item_click": _log_odds(by_item.sum(click), by_item.count, rate=0.5),
        "user_conversion": _log_odds(by_user.sum(conversion), by_user.count, rate=0.2),
        "item_conversion": _log_odds(by_item.sum(conversion), by_item.count, rate=0.2),
        "user_genre_click": _genre_log_odds(log, click),
        "user_bias": _mean_residual(log, by_user, by_item),
        "item_quality": _mean_residual(log, by_item, by_user),
        "since_last": np.log1p(idle_seconds) / 8,
        "item_years": np.log1p(np.maximum(years, 0)) / 4,
        **{name: values[log.user] for name, values in log.user_dense.items()},
    }


def _log_odds(hits: IntArray, count: IntArray, rate: float, strength: float = 4.0) -> Floats:
    """Log-odds of a rate with `strength` pseudo-observations at the constant prior `rate` (a fitted one would leak)."""
    return np.log((hits + strength * rate) / (count - hits + strength * (1 - rate)))


def _genre_log_odds(log: RatingsLog, click: IntArray) -> Floats:
    starts = log.genres.offsets[log.item]
    lengths = log.genres.offsets[log.item + 1] - starts
    row = np.repeat(np.arange(len(log.item)), lengths)
    genre = log.genres.values[jagged_indices(starts, lengths)]
    earlier = Earlier(log.user[row] * log.num_genres + genre, log.seconds[row])
    hits = np.bincount(row, earlier.sum(click[row]), minlength=len(log.item)).astype(np.int64)
    count = np.bincount(row, earlier.count, minlength=len(log.item)).astype(np.int64)
    return _log_odds(hits, count, rate=0.5)


def _mean_residual(log: RatingsLog, group: Earlier, other: Earlier, strength: float = 5.0) -> Floats:
    """Smoothed mean over `group`'s earlier ratings of (stars - what `other` averaged when each was given)."""
    expected = (other.sum(log.level) * log.step + strength * MIDDLE_STARS) / (other.count + strength)
    residual = np.rint((log.stars - expected) * FIXED_POINT).astype(np.int64)
    return group.sum(residual) / FIXED_POINT / (group.count + strength)
