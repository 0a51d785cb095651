"""Logistic-regression baseline: gradient and optimum by value, features by hand, and its score on real data."""

import numpy as np
import pytest
from scipy import sparse

from gem_model.baseline import _design_matrix, _fit, _mean_one_hot, fit_baseline
from gem_model.data import Dataset, load

# Measured 0.834 (click) and 0.836 (conversion); the room is for other scipy and numpy releases.
ML_100K_NE = {"click": 0.838, "conversion": 0.840}


def test_one_column_matches_the_closed_form() -> None:
    """With a single binary feature and next to no penalty the fit is the empirical rate of each group."""
    x = np.repeat([0.0, 1.0], 50)
    y = np.concatenate([np.repeat([1.0, 0.0], [10, 40]), np.repeat([1.0, 0.0], [35, 15])])
    weights, bias, converged = _fit(sparse.csr_array(x[:, None]), y, 1e-6, 200)
    assert converged
    # L-BFGS stops at a gradient of 1e-6; the curvature here is above 0.05, so the parameters are within 1e-4.
    np.testing.assert_allclose(bias, np.log(10 / 40), atol=1e-4)
    np.testing.assert_allclose(bias + weights[0], np.log(35 / 15), atol=1e-4)


def test_the_optimum_satisfies_its_normal_equations() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300, 5)), (rng.random(300) < 0.4).astype(np.float64)
    weights, bias, converged = _fit(sparse.csr_array(x), y, 3.0, 500)
    residual = 1 / (1 + np.exp(-(x @ weights + bias))) - y
    assert converged
    np.testing.assert_allclose(x.T @ residual + 3.0 * weights, 0, atol=300 * 1e-4)
    np.testing.assert_allclose(residual.mean(), 0, atol=1e-4)


def test_mean_one_hot_averages_repeats_and_keeps_empty_rows() -> None:
    matrix = _mean_one_hot(np.array([2, 2, 0, 1]), np.array([3, 0, 1]), 4).toarray()
    np.testing.assert_allclose(matrix, [[1 / 3, 0, 2 / 3, 0], [0, 0, 0, 0], [0, 1, 0, 0]], rtol=1e-15)


def test_dense_columns_use_the_training_mean_and_spread() -> None:
    dataset = load("synthetic", num_samples=500)
    train = dataset.train.take(np.arange(len(dataset.train)))
    test = dataset.test.take(np.arange(len(dataset.test)))
    columns = _design_matrix(test, dataset.schema, reference=train).toarray()[:, :8]
    known = dataset.train.dense.astype(np.float64)
    np.testing.assert_allclose(columns, (dataset.test.dense - known.mean(0)) / known.std(0), rtol=1e-12, atol=1e-12)


def test_it_beats_the_base_rate_but_not_the_teacher() -> None:
    dataset = load("synthetic", num_samples=10_000)
    result = fit_baseline(dataset)
    assert result.probabilities.shape == (len(dataset.test), 2)
    for task in dataset.schema.tasks:
        assert dataset.best_ne[task] < result.ne[task] < 0.99


def test_ml_100k_score(ml_100k: Dataset) -> None:
    result = fit_baseline(ml_100k)
    assert all(result.converged.values())
    for task, bound in ML_100K_NE.items():
        assert result.ne[task] < bound


def test_bad_input_is_refused() -> None:
    dataset = load("synthetic", num_samples=200)
    with pytest.raises(ValueError, match="l2 must be > 0, got 0"):
        fit_baseline(dataset, l2=0.0)
    dataset.train.labels[:, 1] = 0
    with pytest.raises(ValueError, match="task 'conversion': every training label is 0"):
        fit_baseline(dataset)
