"""Logistic regression on the features GEM sees: the score that a deep model must at least match.

One column per dense feature (standardised with the training split), one per sparse id (multi-hot ids share weight 1),
and per event stream the mean one-hot of the events' items and of their actions. One L2-regularised model per task,
fitted by L-BFGS on the mean negative log-likelihood

    f(w, b) = 1/N sum_i [log(1 + exp(z_i)) - y_i z_i] + l2 / (2 N) |w|^2,   z = X w + b,

which is convex, so the result depends on the data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse
from scipy.special import expit

from gem_model.data.batching import Batch, Schema
from gem_model.data.entropy import normalized_entropy
from gem_model.data.source import Dataset, SampleSource

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaselineResult:
    """Test probabilities float64 [N_test, n_tasks], columns as `Schema.tasks`; NE and L-BFGS convergence per task."""

    probabilities: Floats
    ne: Mapping[str, float]
    converged: Mapping[str, bool]


def fit_baseline(dataset: Dataset, *, l2: float = 30.0, max_iterations: int = 200) -> BaselineResult:
    """Fit every task on `dataset.train` and score `dataset.test`.

    Raises ValueError when `l2` is not positive or a training label never changes (there is nothing to fit).
    """
    if not l2 > 0:
        raise ValueError(f"l2 must be > 0, got {l2}; without it rare ids have no finite optimum")
    batches = [source.take(np.arange(len(source))) for source in (dataset.train, dataset.test)]
    _require_both_labels(dataset.train)
    train, test = (_design_matrix(batch, dataset.schema, reference=batches[0]) for batch in batches)
    probabilities = np.empty((len(dataset.test), len(dataset.schema.tasks)))
    converged = {}
    for column, task in enumerate(dataset.schema.tasks):
        weights, bias, converged[task] = _fit(
            train, dataset.train.labels[:, column].astype(np.float64), l2, max_iterations
        )
        probabilities[:, column] = expit(test @ weights + bias)
    ne = {
        task: normalized_entropy(probabilities[:, column], dataset.test.labels[:, column])
        for column, task in enumerate(dataset.schema.tasks)
    }
    return BaselineResult(probabilities=probabilities, ne=ne, converged=converged)


def _fit(features: sparse.csr_array, labels: Floats, l2: float, max_iterations: int) -> tuple[Floats, float, bool]:
    count = len(labels)
    transposed = features.T.tocsr()

    def loss_and_gradient(parameters: Floats) -> tuple[float, Floats]:
        weights = parameters[:-1]
        scores = features @ weights + parameters[-1]
        residual = expit(scores) - labels
        loss = (np.logaddexp(0.0, scores) - labels * scores).mean() + l2 / (2 * count) * (weights @ weights)
        gradient = (transposed @ residual + l2 * weights) / count
        return float(loss), np.append(gradient, residual.mean())

    rate = labels.mean()
    start = np.zeros(features.shape[1] + 1)
    start[-1] = np.log(rate / (1 - rate))
    options = {"maxiter": max_iterations, "ftol": 1e-9, "gtol": 1e-6}
    result = optimize.minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return result.x[:-1], float(result.x[-1]), bool(result.success)


def _design_matrix(batch: Batch, schema: Schema, reference: Batch) -> sparse.csr_array:
    """CSR float64 [B, columns]; `reference` (the training batch) gives mean and spread of the dense columns."""
    dense, known = batch.dense.numpy().astype(np.float64), reference.dense.numpy().astype(np.float64)
    spread = known.std(axis=0)
    blocks = [sparse.csr_array((dense - known.mean(axis=0)) / np.where(spread > 0, spread, 1.0))]
    for feature in schema.sparse:
        jagged = batch.sparse[feature.name]
        blocks.append(_mean_one_hot(jagged.values.numpy(), jagged.lengths.numpy(), feature.num_embeddings))
    for spec in schema.streams:
        stream = batch.streams[spec.name]
        lengths = stream.lengths.numpy()
        blocks.append(_mean_one_hot(stream.item_ids.numpy(), lengths, spec.num_items))
        blocks.append(_mean_one_hot(stream.action_ids.numpy(), lengths, spec.num_actions))
    return sparse.csr_array(sparse.hstack(blocks, format="csr"))


def _mean_one_hot(ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], columns: int) -> sparse.csr_array:
    """Row i holds 1 / lengths[i] per id of sample i (repeated ids add up); empty rows stay zero."""
    weights = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    matrix = sparse.csr_array((weights, ids, offsets), shape=(len(lengths), columns))
    matrix.sum_duplicates()
    return matrix


def _require_both_labels(source: SampleSource) -> None:
    for column, task in enumerate(source.schema.tasks):
        found = np.unique(source.labels[:, column])
        if len(found) < 2:
            raise ValueError(f"task {task!r}: every training label is {found[0]:g}; a model needs both 0 and 1")
