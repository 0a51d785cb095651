"""Does MXFP8 train the same GEM as BF16? Paired runs, a verdict, and everything needed to disbelieve it.

For every seed two runs start from the same weights and see the same samples in the same order (both are hashed, and
compared); only the precision differs. Two pairings come out of them for each task:

- *trained*: each run's own weights. What one wants to know, blurred by the chaos of training: any rounding at all sends
  two runs apart, BF16 against itself in another summation order too.
- *same weights*: the BF16 run's weights, evaluated in both precisions. Far sharper, and blind to training.

`mxfp8.drift` turns them into intervals (seeds, and a bootstrap over users) and a verdict. The headline figure is the
trained pairing of the schema's first task, the click: production models are judged task by task, and a mean over tasks
could hide one that is worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import mxfp8
from gem_model.config import GEMConfig
from gem_model.data import Dataset
from gem_model.jobs import BF16, MXFP8, DataSpec, Evaluation, Job, JobResult, OnProgress, load_data, run_jobs
from gem_model.train import TrainConfig
from mxfp8 import PrecisionPolicy
from mxfp8.drift import Departure, DriftConfig, DriftReport, LayerHealth, PairedLosses, PairingResult
from mxfp8.health import TYPICAL_CAST_DB, WORST_CAST_DB
from mxfp8.recipe import GEMMS


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """What to compare. Seeds are `train.seed`, `train.seed` + 1, ... ; `workers` as in `gem_model.jobs.run_jobs`."""

    data: DataSpec
    model: GEMConfig
    train: TrainConfig
    policy: PrecisionPolicy
    seeds: int = 3
    fault: str | None = None
    tolerance: float = 2e-4
    device: str = "cpu"
    workers: int = 0

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}; a pass needs at least 3")
        if self.workers < 0 or (self.workers and self.device != "cpu"):
            raise ValueError(f"workers is {self.workers}: use 0 or more on a CPU, 0 on {self.device!r}")
        DriftConfig(tolerance=self.tolerance)

    def jobs(self) -> list[Job]:
        """BF16 and MXFP8 of each seed, in this order."""
        return [
            Job(
                precision=precision,
                data=self.data,
                model=self.model,
                train=replace(self.train, seed=self.train.seed + seed),
                policy=self.policy,
                fault=self.fault,
                device=self.device,
            )
            for seed in range(self.seeds)
            for precision in (BF16, MXFP8)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The verdict and what it rests on. `bf16[i]` and `mxfp8[i]` are the two runs of seed i."""

    config: CompareConfig
    dataset: Dataset
    drift: DriftReport
    bf16: tuple[JobResult, ...]
    mxfp8: tuple[JobResult, ...]
    logistic: dict[str, float]

    @property
    def task(self) -> str:
        """The task of the headline figures."""
        return self.dataset.schema.tasks[0]

    def pairing(self, task: str, kind: str) -> PairingResult | None:
        """The result of one task, `kind` "trained" or "same_weights"; None when no pair of runs finished."""
        return next((r for r in self.drift.results if r.name.startswith(f"{task},") and r.kind == kind), None)

    def headline(self) -> dict[str, Any]:
        """The figures of the last line of `gem compare`; None where a run became non-finite."""
        main, same = self.pairing(self.task, "trained"), self.pairing(self.task, "same_weights")
        tasks = {
            result.name: {"rel_ne_diff": result.rel_ne_diff, "ci95": [result.ci_low, result.ci_high]}
            for result in self.drift.results
        }
        return {
            "ne_bf16": main and main.ne_baseline,
            "ne_mxfp8": main and main.ne_candidate,
            "rel_ne_diff": main and main.rel_ne_diff,
            "ci95": main and [main.ci_low, main.ci_high],
            "verdict": self.drift.verdict,
            "samples_per_s": _mean([run.samples_per_s for run in self.mxfp8]),
            "samples_per_s_bf16": _mean([run.samples_per_s for run in self.bf16]),
            "task": self.task,
            "ne_logistic": self.logistic[self.task],
            "tolerance": self.config.tolerance,
            "resolves": main.half_width if main and main.seed_half_width is not None else None,
            "rel_ne_diff_same_weights": same and same.rel_ne_diff,
            "ci95_same_weights": same and [same.ci_low, same.ci_high],
            "pairings": tasks,
            "seeds": self.config.seeds,
            "fault": self.config.fault,
            "unhealthy_casts": len(self.drift.unhealthy_layers()),
            "worst_layers": [str(row) for row in (self.drift.unhealthy_layers() or self.drift.worst_layers())[:3]],
        }


def compare(config: CompareConfig, on_progress: OnProgress) -> Comparison:
    """Run everything and judge it. Raises RuntimeError when a BF16 run became non-finite: no baseline."""
    dataset = load_data(config.data)
    results, logistic = run_jobs(config.jobs(), config.data, config.workers, on_progress)
    bf16, mx = results[0::2], results[1::2]
    for base, candidate in zip(bf16, mx, strict=True):
        if base.failure is not None:
            raise RuntimeError(f"the BF16 run of seed {base.seed} failed, so there is no baseline: {base.failure[2]}")
        _require_pair(base, candidate)
    drift = DriftReport.from_losses(
        _pairings(dataset, bf16, mx),
        layers=worst_health(mx),
        departures=[_departure(run) for run in mx if run.failure is not None],
        config=drift_config(config),
    )
    return Comparison(config=config, dataset=dataset, drift=drift, bf16=tuple(bf16), mxfp8=tuple(mx), logistic=logistic)


def drift_config(config: CompareConfig) -> DriftConfig:
    """Tolerance, and floors of the casts: lower where the policy has a recipe that rounds stochastically."""
    recipes = [config.policy.default, *(rule.recipe for rule in config.policy.ordered)]
    chosen = [mxfp8.get_recipe(recipe) for recipe in recipes if recipe != "bf16"]
    specs = [
        spec for recipe in chosen for gemm in GEMMS for spec in (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs)
    ]
    if any(spec is not None and spec.rounding == "stochastic" for spec in specs):
        double = 10 * math.log10(2)  # up to one whole unit in the last place instead of half, twice the error energy
        worst, typical = WORST_CAST_DB - 2 * double, TYPICAL_CAST_DB - double
        return DriftConfig(tolerance=config.tolerance, worst_cast_db=worst, typical_cast_db=typical)
    return DriftConfig(tolerance=config.tolerance)


def _require_pair(base: JobResult, candidate: JobResult) -> None:
    assert base.seed == candidate.seed
    if base.weights_hash != candidate.weights_hash:
        raise RuntimeError(f"seed {base.seed}: the two runs started from different weights; the pairing would be void")
    if candidate.failure is None and base.order_hash != candidate.order_hash:
        raise RuntimeError(f"seed {base.seed}: the two runs saw different data; the pairing would be void")


def _pairings(dataset: Dataset, bf16: Sequence[JobResult], mx: Sequence[JobResult]) -> list[PairedLosses]:
    finished = [(b, c) for b, c in zip(bf16, mx, strict=True) if c.failure is None]
    pairings = []
    for column, task in enumerate(dataset.schema.tasks):
        columns = {
            "trained": [(b.test, c.test) for b, c in finished],
            "same_weights": [(b.test, b.same_weights) for b in bf16],
        }
        for kind, pairs in columns.items():
            if not pairs:
                continue
            base, candidate = (np.stack([_losses(pair[i], column) for pair in pairs]) for i in (0, 1))
            pairings.append(
                PairedLosses(
                    name=f"{task}, {kind.replace('_', ' ')}",
                    baseline=base,
                    candidate=candidate,
                    labels=dataset.test.labels[:, column],
                    groups=dataset.test.groups,
                    kind="trained" if kind == "trained" else "same_weights",
                )
            )
    return pairings


def _losses(evaluation: Evaluation | None, column: int) -> Any:
    assert evaluation is not None
    return evaluation.losses[:, column]


def worst_health(runs: Sequence[JobResult]) -> list[LayerHealth]:
    """One row per layer, GEMM and operand: the lowest SQNR over the runs' watched steps, NaN lowest of all."""
    worst: dict[tuple[str, str, str], LayerHealth] = {}
    for run in runs:
        for rows in (run.health or {}).values():
            for row in rows:
                health = LayerHealth(**row)
                key = (health.layer, health.gemm, health.operand)
                if key not in worst or health.rank < worst[key].rank:
                    worst[key] = health
    return list(worst.values())


def _departure(run: JobResult) -> Departure:
    assert run.failure is not None
    step, layer, _ = run.failure
    return Departure(
        step=step, layer=layer, quantity=f"seed {run.seed}", baseline=None, candidate=math.nan, kind="nonfinite"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def settings(config: CompareConfig) -> dict[str, Any]:
    """The configuration as plain values, for the report."""
    return {
        "data": asdict(config.data),
        "model": asdict(config.model),
        "train": asdict(config.train),
        "seeds": config.seeds,
        "fault": config.fault,
        "tolerance": config.tolerance,
        "device": config.device,
        "workers": config.workers,
    }
