"""Normalised entropy of probabilities, in plain numpy and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CLAMP = 1e-12  # keeps log finite; the value torchrec's NE metric uses


def normalized_entropy(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean logloss of `probabilities` [N] over the entropy of the base rate of `labels` [N] in {0, 1}.

    1.0 is what predicting the base rate of these very labels scores; lower is better. Formula: He et al., "Practical
    Lessons from Predicting Clicks on Ads at Facebook", 2014. ValueError when the labels are all equal (no entropy) or
    the shapes differ. NaN probabilities give NaN.
    """
    p = np.clip(np.asarray(probabilities, dtype=np.float64), CLAMP, 1 - CLAMP)
    y = np.asarray(labels, dtype=np.float64)
    if p.shape != y.shape or p.ndim != 1:
        raise ValueError(f"probabilities and labels must be 1-D and equally long, got {p.shape} and {y.shape}")
    rate = y.mean() if len(y) else 0.0
    if not 0.0 < rate < 1.0:
        raise ValueError(f"normalised entropy needs both labels, the base rate of these {len(y)} is {rate}")
    return float(_cross_entropy(y, p).mean() / _cross_entropy(rate, rate))


def _cross_entropy(
    labels: npt.NDArray[np.float64] | float, p: npt.NDArray[np.float64] | float
) -> npt.NDArray[np.float64]:
    return np.asarray(-(labels * np.log(p) + (1 - np.asarray(labels)) * np.log1p(-np.asarray(p))))
