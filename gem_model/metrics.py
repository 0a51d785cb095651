"""Streaming quality metrics per task: normalised entropy, AUC and calibration.

Each metric takes `update(logits, labels)` with [B, n_tasks] tensors, adds in float64 on the CPU, and gives one value
per task from `compute()`. Two metrics over disjoint samples can be merged, and `state_dict()` resumes one. A logit that
is NaN or infinite, or a label outside {0, 1}, raises ValueError naming the first sample and the task; nothing is added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class Metric(ABC):
    """What the three metrics share: checks, merging of sums, and state. `sums` maps a name to float64 [n_tasks]."""

    def __init__(self, tasks: Sequence[str]) -> None:
        if not tasks:
            raise ValueError("a metric needs at least one task")
        self.tasks = tuple(tasks)
        self.samples = 0
        self.sums: dict[str, Tensor] = {}

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add samples: logits and labels [B, n_tasks] (or [B] for one task), on any device."""
        logits, labels = self._checked(logits, labels)
        self._add(logits, labels)
        self.samples += logits.shape[0]

    def compute(self) -> dict[str, float]:
        """Value per task. Raises ValueError when no sample was added or the value is undefined."""
        if self.samples == 0:
            raise ValueError(f"{type(self).__name__} has no samples: call update() first")
        return {task: self._value(at) for at, task in enumerate(self.tasks)}

    def merge(self, others: Iterable[Self]) -> Self:
        """Add the samples of `others` to this metric and return it."""
        for other in others:
            if type(other) is not type(self) or other.tasks != self.tasks:
                raise ValueError(
                    f"cannot merge {type(other).__name__}{other.tasks} into {type(self).__name__}{self.tasks}"
                )
            self.samples += other.samples
            self._merge(other)
        return self

    def state_dict(self) -> dict[str, object]:
        """Everything `load_state_dict` needs: plain tensors, an int and the task names."""
        return {"tasks": self.tasks, "samples": self.samples, **{name: x.clone() for name, x in self.sums.items()}}

    def check_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise ValueError unless `load_state_dict` would take `state`: that of these tasks and this metric."""
        expected = {"tasks", "samples", *self.sums}
        if set(state) != expected or tuple(state["tasks"]) != self.tasks:  # type: ignore[arg-type]
            raise ValueError(
                f"the state has keys {sorted(state)} and tasks {state.get('tasks')}; "
                f"{type(self).__name__} needs {sorted(expected)} and tasks {self.tasks}"
            )

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict()`. Raises ValueError when it belongs to other tasks or another metric."""
        self.check_state_dict(state)
        self.samples = int(state["samples"])  # type: ignore[call-overload]
        for name in self.sums:
            value = state[name]
            assert isinstance(value, Tensor)
            self.sums[name] = value.clone()

    def _merge(self, other: Metric) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value

    @abstractmethod
    def _add(self, logits: Tensor, labels: Tensor) -> None:
        """Add checked float64 [B, n_tasks]."""

    @abstractmethod
    def _value(self, task: int) -> float:
        """The metric of one task."""

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.tasks), dtype=torch.float64)

    def _checked(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.tasks) == 1 and logits.ndim == 1:
            logits, labels = logits[:, None], labels.reshape(-1, 1)
        if logits.ndim != 2 or logits.shape[1] != len(self.tasks) or logits.shape != labels.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must both be [B, {len(self.tasks)}]"
            )
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu().double()
        self._refuse(~torch.isfinite(logits), logits, "logit", "must be finite")
        self._refuse((labels != 0) & (labels != 1), labels, "label", "must be 0 or 1")
        return logits, labels

    def _refuse(self, bad: Tensor, values: Tensor, what: str, rule: str) -> None:
        if bad.any():
            row, task = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{what} of sample {row} of this update ({self.samples + row} in all), task {self.tasks[task]!r}, "
                f"is {values[row, task].item()}: it {rule}"
            )


class NormalizedEntropy(Metric):
    """NE = mean log loss / entropy of the mean label (TorchRec's definition, equal weights); 1 is a base-rate model.

    Log losses are computed from the logits, which has no need of TorchRec's clamp of probabilities at 1e-12 and equals
    it wherever the clamp is not active.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__(tasks)
        self.sums = {"cross_entropy": self._zeros(), "positives": self._zeros()}

    def _add(self, logits: Tensor, labels: Tensor) -> None:
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        self.sums["cross_entropy"] += losses.sum(0)
        self.sums["positives"] += labels.sum(0)

    def _value(self, task: int) -> float:
        base_rate = self.sums["positives"][task] / self.samples
        if base_rate in (0, 1):
            raise ValueError(
                f"NE of task {self.tasks[task]!r} is undefined: all {self.samples} labels are {int(base_rate)}"
            )
        entropy = -torch.xlogy(base_rate, base_rate) - torch.xlogy(1 - base_rate, 1 - base_rate)
        return float(self.sums["cross_entropy"][task] / self.samples / entropy)


class Calibration(Metric):
    """Sum of predicted probabilities / sum of labels; 1 is calibrated, above 1 over-predicts."""

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__(tasks)
        self.sums = {"predicted": self._zeros(), "positives": self._zeros()}

    def _add(self, logits: Tensor, labels: Tensor) -> None:
        self.sums["predicted"] += logits.sigmoid().sum(0)
        self.sums["positives"] += labels.sum(0)

    def _value(self, task: int) -> float:
        if self.sums["positives"][task] == 0:
            raise ValueError(f"calibration of task {self.tasks[task]!r} is undefined: no label is 1")
        return float(self.sums["predicted"][task] / self.sums["positives"][task])


class AUC(Metric):
    """Area under the ROC curve, exact, ties counted one half (Mann-Whitney). Keeps every score: 9 bytes per label."""

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__(tasks)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self.sums = {"logits": self._no_rows(torch.float64), "labels": self._no_rows(torch.bool)}

    def _no_rows(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, len(self.tasks), dtype=dtype)

    def _add(self, logits: Tensor, labels: Tensor) -> None:
        self._parts.append((logits, labels.bool()))

    def _merge(self, other: Metric) -> None:
        state = other.state_dict()
        assert isinstance(state["logits"], Tensor)
        assert isinstance(state["labels"], Tensor)
        self._parts.append((state["logits"], state["labels"]))

    def state_dict(self) -> dict[str, object]:
        """All scores and labels so far, joined."""
        self._join()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict()`."""
        super().load_state_dict(state)
        self._parts = []

    def _join(self) -> None:
        if self._parts:
            for at, name in enumerate(("logits", "labels")):
                self.sums[name] = torch.cat([self.sums[name], *(part[at] for part in self._parts)])
            self._parts = []

    def _value(self, task: int) -> float:
        self._join()
        return _exact_auc(self.sums["logits"][:, task], self.sums["labels"][:, task], self.tasks[task])


def _exact_auc(scores: Tensor, positive: Tensor, task: str) -> float:
    positives = int(positive.sum())
    negatives = positive.numel() - positives
    if positives == 0 or negatives == 0:
        raise ValueError(f"AUC of task {task!r} is undefined: {positives} positive and {negatives} negative labels")
    _, group, count = scores.unique(return_inverse=True, return_counts=True)
    # Ranks from 1; tied scores share the mean rank of their group.
    last = count.cumsum(0)
    rank = (last - (count - 1) / 2.0)[group].double()
    return float((rank[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
