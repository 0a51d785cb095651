"""A synthetic ad log drawn from a known teacher, so that the best possible normalised entropy is known.

Ids are Zipf distributed, history lengths log-normal (some histories are empty), and both labels are Bernoulli draws
from the teacher's probabilities. With unit-variance latent vectors u, a, h of user, ad and history:

    h          = sum over events of value[action] * exp(-seconds_ago / day) * a[item], divided by sqrt(1 + n events)
    click      ~ Bernoulli(sigmoid(-1.2 + bias[ad] + (u . a + 2 h . a) / sqrt(d) + w_click . dense))
    conversion ~ click * Bernoulli(sigmoid(-0.7 + h . a / sqrt(d) + w_conversion . dense))

| part of the schema | content                                                                         |
|--------------------|---------------------------------------------------------------------------------|
| dense              | `x0`..`x7`, standard normal                                                     |
| sparse             | `user_id`, `ad_id` (one id each), `tags` (multi-hot, a function of the ad)      |
| stream `events`    | ad, action (0 impression, 1 click, 2 conversion), seconds ago                   |
| tasks              | `click`, `conversion`                                                           |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from gem_model.data.batching import Schema, SparseFeature, StreamSpec
from gem_model.data.entropy import normalized_entropy
from gem_model.data.options import make_options
from gem_model.data.source import Dataset, EventColumn, IdColumn, IntArray, SampleSource, split_by_time

DAY_SECONDS = 86_400
LATENT = 8
NUM_DENSE = 8
TAGS_PER_AD = 3
ACTION_VALUE = np.array([-0.3, 1.0, 1.5])  # what an event with each action says about the user's taste
TASKS = ("click", "conversion")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticOptions:
    """Sizes and skew of the log. `zipf` is the exponent s in P(rank) ~ rank^-s."""

    num_samples: int = 50_000
    num_users: int = 2_000
    num_ads: int = 500
    num_tags: int = 40
    zipf: float = 1.1
    mean_log_history: float = 2.0
    sigma_log_history: float = 1.0
    max_history: int = 64
    holdout_frac: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_users", "num_ads"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        if self.num_tags < TAGS_PER_AD:
            raise ValueError(f"num_tags must be at least {TAGS_PER_AD}, got {self.num_tags}")
        if self.max_history < 0 or self.seed < 0 or self.sigma_log_history < 0 or self.zipf < 0:
            raise ValueError(f"max_history, seed, sigma_log_history and zipf must be >= 0, got {self}")
        if not 0 < self.holdout_frac < 1:
            raise ValueError(f"holdout_frac must be inside (0, 1), got {self.holdout_frac}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Impressions:
    """N impressions: user, ad int64 [N]; dense float64 [N, 8]; events of all samples with `lengths` int64 [N]."""

    user: IntArray
    ad: IntArray
    dense: Floats
    lengths: IntArray
    event_ads: IntArray
    event_actions: IntArray
    event_seconds_ago: IntArray

    @property
    def offsets(self) -> IntArray:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])


def load_synthetic(**keywords: Any) -> Dataset:
    """Draw the log; the last `holdout_frac` of the samples are the test split. Same options, same bits.

    `keywords` are the fields of `SyntheticOptions`.

    `Dataset.best_ne` is what the true probabilities score on the test labels: no model beats it but by luck, whose
    size is the sampling error of a mean over the test split.
    """
    options = make_options(SyntheticOptions, "synthetic", keywords)
    impressions = _draw_impressions(options, np.random.default_rng([options.seed, 0]))
    probabilities = _teacher_probabilities(impressions, options, np.random.default_rng([options.seed, 1]))
    rng = np.random.default_rng([options.seed, 2])
    click = rng.random(options.num_samples) < probabilities[:, 0]
    conversion = click & (rng.random(options.num_samples) < probabilities[:, 1])
    labels = np.stack([click, conversion], axis=1).astype(np.float32)
    marginal = np.stack([probabilities[:, 0], probabilities.prod(axis=1)], axis=1)
    test_rows = np.arange(options.num_samples) >= round(options.num_samples * (1 - options.holdout_frac))
    best_ne = {task: normalized_entropy(marginal[test_rows, i], labels[test_rows, i]) for i, task in enumerate(TASKS)}
    source = _source(impressions, labels, options, np.random.default_rng([options.seed, 3]))
    return split_by_time("synthetic", source, test_rows, best_ne)


def _draw_impressions(options: SyntheticOptions, rng: np.random.Generator) -> _Impressions:
    count = options.num_samples
    lengths = np.floor(rng.lognormal(options.mean_log_history, options.sigma_log_history, count)) - 1
    lengths = np.clip(lengths, 0, options.max_history).astype(np.int64)
    events = int(lengths.sum())
    sample = np.repeat(np.arange(count), lengths)
    ages = np.floor(rng.exponential(DAY_SECONDS, events)).astype(np.int64) + 1
    oldest_first = np.lexsort((-ages, sample))
    return _Impressions(
        user=_zipf(rng, options.num_users, options.zipf, count),
        ad=_zipf(rng, options.num_ads, options.zipf, count),
        dense=rng.standard_normal((count, NUM_DENSE)),
        lengths=lengths,
        event_ads=_zipf(rng, options.num_ads, options.zipf, events),
        event_actions=rng.choice(len(ACTION_VALUE), size=events, p=[0.5, 0.35, 0.15]).astype(np.int64),
        event_seconds_ago=ages[oldest_first],
    )


def _teacher_probabilities(log: _Impressions, options: SyntheticOptions, rng: np.random.Generator) -> Floats:
    """P(click) and P(conversion | click), float64 [N, 2]."""
    users = rng.standard_normal((options.num_users, LATENT))
    ads = rng.standard_normal((options.num_ads, LATENT))
    ad_bias = 0.5 * rng.standard_normal(options.num_ads)
    click_weights, conversion_weights = 0.25 * rng.standard_normal((2, NUM_DENSE))
    value = ACTION_VALUE[log.event_actions] * np.exp(-log.event_seconds_ago / DAY_SECONDS)
    affinity = (ads @ ads.T / np.sqrt(LATENT))[np.repeat(log.ad, log.lengths), log.event_ads]
    sample = np.repeat(np.arange(len(log.ad)), log.lengths)
    history = np.bincount(sample, value * affinity, minlength=len(log.ad)) / np.sqrt(1 + log.lengths)
    taste = (users[log.user] * ads[log.ad]).sum(axis=1) / np.sqrt(LATENT)
    dense = log.dense.astype(np.float32)  # the model sees float32: the teacher must know no more
    click = expit(-1.2 + ad_bias[log.ad] + taste + 2 * history + dense @ click_weights)
    conversion = expit(-0.7 + history + dense @ conversion_weights)
    return np.stack([click, conversion], axis=1)


def _source(
    log: _Impressions, labels: npt.NDArray[np.float32], options: SyntheticOptions, rng: np.random.Generator
) -> SampleSource:
    count = len(log.ad)
    tags = rng.random((options.num_ads, options.num_tags)).argsort(axis=1)[:, :TAGS_PER_AD].astype(np.int64)
    offsets = log.offsets
    return SampleSource(
        schema=_schema(options),
        dense=log.dense.astype(np.float32),
        sparse={
            "user_id": IdColumn.single(log.user),
            "ad_id": IdColumn.single(log.ad),
            "tags": IdColumn(values=tags[log.ad].reshape(-1), offsets=TAGS_PER_AD * np.arange(count + 1)),
        },
        streams={
            "events": EventColumn(
                item_ids=log.event_ads,
                action_ids=log.event_actions,
                event_seconds=-log.event_seconds_ago,
                start=offsets[:-1],
                stop=offsets[1:],
                request_seconds=np.zeros(count, dtype=np.int64),
            )
        },
        labels=labels,
        sample_ids=np.arange(count, dtype=np.int64),
        groups=log.user,
    )


def _schema(options: SyntheticOptions) -> Schema:
    return Schema(
        dense=tuple(f"x{i}" for i in range(NUM_DENSE)),
        sparse=(
            SparseFeature(name="user_id", num_embeddings=options.num_users),
            SparseFeature(name="ad_id", num_embeddings=options.num_ads),
            SparseFeature(name="tags", num_embeddings=options.num_tags),
        ),
        streams=(
            StreamSpec(name="events", num_items=options.num_ads, num_actions=len(ACTION_VALUE), item_feature="ad_id"),
        ),
        tasks=TASKS,
    )


def _zipf(rng: np.random.Generator, size: int, exponent: float, count: int) -> IntArray:
    """`count` ids in [0, size) with P(id) ~ (id + 1)^-exponent."""
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative / cumulative[-1], rng.random(count), side="right").clip(max=size - 1)
