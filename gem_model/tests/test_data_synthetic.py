"""Synthetic log: its teacher is recoverable by the stated formula, its optimum is known, its laws hold."""

import numpy as np
import pytest
import torch

from gem_model.data import Dataset, load
from gem_model.data.entropy import normalized_entropy
from gem_model.data.synthetic import (
    SyntheticOptions,
    _draw_impressions,
    _teacher_probabilities,
)

OPTIONS = SyntheticOptions(num_samples=20_000)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load("synthetic", num_samples=20_000)


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    """P(click), P(conversion | click) of every sample."""
    impressions = _draw_impressions(OPTIONS, np.random.default_rng([0, 0]))
    return _teacher_probabilities(impressions, OPTIONS, np.random.default_rng([0, 1]))


def test_teacher_follows_the_documented_formula(dataset: Dataset, truth: np.ndarray) -> None:
    rng = np.random.default_rng([0, 1])
    users, ads = rng.standard_normal((OPTIONS.num_users, 8)), rng.standard_normal((OPTIONS.num_ads, 8))
    bias, weights = 0.5 * rng.standard_normal(OPTIONS.num_ads), 0.25 * rng.standard_normal((2, 8))
    batch = dataset.train.take(np.arange(200))
    stream, offsets = batch.streams["events"], batch.streams["events"].offsets().tolist()
    for i in range(200):
        events = slice(offsets[i], offsets[i + 1])
        value = np.array([-0.3, 1.0, 1.5])[stream.action_ids[events].numpy()]
        decay = np.exp(-stream.seconds_ago[events].numpy().astype(np.float64) / 86_400)
        history = (value * decay) @ ads[stream.item_ids[events].numpy()] / np.sqrt(1 + offsets[i + 1] - offsets[i])
        user, ad = users[batch.sparse["user_id"].values[i]], ads[batch.sparse["ad_id"].values[i]]
        dense = batch.dense[i].numpy().astype(np.float64)
        click = -1.2 + bias[batch.sparse["ad_id"].values[i]] + (user + 2 * history) @ ad / np.sqrt(8)
        conversion = -0.7 + history @ ad / np.sqrt(8) + dense @ weights[1]
        expected = 1 / (1 + np.exp([-(click + dense @ weights[0]), -conversion]))
        np.testing.assert_allclose(truth[i], expected, rtol=1e-5)  # dense @ weights runs in float32 or float64


def test_labels_are_draws_from_the_teacher(dataset: Dataset, truth: np.ndarray) -> None:
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    marginal = np.stack([truth[:, 0], truth.prod(axis=1)], axis=1)
    for task in range(2):
        p = marginal[:, task]
        # The sum of independent Bernoullis has variance sum p (1 - p); five sigma in each decile of p.
        for rows in np.array_split(np.argsort(p), 10):
            sigma = np.sqrt((p[rows] * (1 - p[rows])).sum())
            assert abs(labels[rows, task].sum() - p[rows].sum()) < 5 * sigma
    assert (labels[:, 1] <= labels[:, 0]).all(), "a conversion needs a click"


def test_best_ne_is_the_score_of_the_true_probabilities(dataset: Dataset, truth: np.ndarray) -> None:
    test = dataset.test.sample_ids
    marginal = np.stack([truth[:, 0], truth.prod(axis=1)], axis=1)[test]
    for column, task in enumerate(dataset.schema.tasks):
        labels = dataset.test.labels[:, column]
        assert dataset.best_ne[task] == normalized_entropy(marginal[:, column], labels)
        for worse in (marginal[:, column] ** 1.2, 0.9 * marginal[:, column] + 0.05, np.full(len(test), labels.mean())):
            assert normalized_entropy(worse, labels) > dataset.best_ne[task]
        assert 0.5 < dataset.best_ne[task] < 0.9, "there is something to learn, and noise that cannot be"


def test_ids_are_zipf_and_lengths_log_normal(dataset: Dataset) -> None:
    counts = np.bincount(dataset.train.sparse["ad_id"].values, minlength=OPTIONS.num_ads)
    weights = np.arange(1, OPTIONS.num_ads + 1) ** -OPTIONS.zipf
    expected = counts.sum() * weights / weights.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()  # five Poisson sigma, and 5 for the rare tail
    events = dataset.train.streams["events"]
    lengths = events.stop - events.start
    assert (lengths == 0).any()
    assert lengths.max() == OPTIONS.max_history
    # length + 1 = floor(X) with log X ~ N(2, 1): the median of floor(X) - 1 is floor(e^2) - 1 = 6.
    assert abs(np.median(lengths) - 6) <= 1
    batch = dataset.train.take(np.arange(500))
    owner = torch.repeat_interleave(torch.arange(500), batch.streams["events"].lengths)
    ages = batch.streams["events"].seconds_ago
    assert (ages[1:] <= ages[:-1])[owner[1:] == owner[:-1]].all(), "oldest first"
    assert (ages > 0).all()


def test_same_seed_same_bits_other_seed_other_log() -> None:
    one, two, other = (load("synthetic", num_samples=300, seed=seed) for seed in (1, 1, 2))
    assert one.best_ne == two.best_ne != other.best_ne
    np.testing.assert_array_equal(one.train.dense, two.train.dense)
    np.testing.assert_array_equal(one.train.streams["events"].item_ids, two.train.streams["events"].item_ids)
    assert not np.array_equal(one.train.labels, other.train.labels)


def test_normalized_entropy_values() -> None:
    labels = np.array([1, 0, 0, 0])
    assert normalized_entropy(np.full(4, 0.25), labels) == pytest.approx(1.0, rel=1e-15)
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    loss = -(np.log(0.7) + 2 * np.log(0.9) + np.log(0.8)) / 4
    assert normalized_entropy([0.7, 0.1, 0.1, 0.2], labels) == pytest.approx(loss / entropy, rel=1e-14)
    assert np.isnan(normalized_entropy([np.nan, 0.1, 0.1, 0.2], labels))
    with pytest.raises(ValueError, match=r"base rate of these 2 is 1\.0"):
        normalized_entropy([0.5, 0.5], [1, 1])
    with pytest.raises(ValueError, match="equally long"):
        normalized_entropy([0.5], labels)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_samples": 1}, "num_samples must be at least 2, got 1"),
        ({"num_tags": 2}, "num_tags must be at least 3, got 2"),
        ({"holdout_frac": 1.0}, r"holdout_frac must be inside \(0, 1\), got 1\.0"),
        ({"zipf": -1.0}, "must be >= 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("synthetic", **options)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown dataset 'ml-1m'; choose one of \['criteo', 'ml-100k'"):
        load("ml-1m")
    with pytest.raises(TypeError, match="'synthetic' has no option colour; its options are num_samples"):
        load("synthetic", colour="red")
