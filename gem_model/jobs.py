"""The runs behind a comparison: one job trains and evaluates one (seed, precision), in any process, with the same bits.

A job knows nothing of the others. On a CPU each runs on one thread, in as many worker processes as there are cores, so
its result does not depend on how many there are. On a GPU jobs run one after the other in this process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing as mp
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from queue import Empty
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

import mxfp8
from gem_model.baseline import fit_baseline
from gem_model.config import GEMConfig
from gem_model.data import Batch, Dataset, load
from gem_model.faults import plant, planted_policy
from gem_model.metrics import AUC, Calibration, NormalizedEntropy
from gem_model.model import GEM
from gem_model.train import CurvePoint, NonFiniteError, Progress, TrainConfig, Trainer, predict
from mxfp8 import PrecisionPolicy
from mxfp8.audit import watch
from mxfp8.description import Description

BF16, MXFP8 = "bf16", "mxfp8"
Losses = npt.NDArray[np.float64]
OnProgress = Callable[[str, Progress], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Which data: a name of `gem_model.data.load`, its options, and the latest `limit` training samples (None: all)."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 training sample, got {self.limit}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: `config.seed` gives the initial weights and the order of the data, whatever the precision."""

    precision: str
    data: DataSpec
    model: GEMConfig
    train: TrainConfig
    policy: PrecisionPolicy
    fault: str | None = None
    device: str = "cpu"
    watched_steps: int = 3
    """MXFP8 runs only: training steps, evenly spread, whose casts and GEMMs are measured."""

    @property
    def name(self) -> str:
        return f"{self.precision} seed {self.train.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Test log losses float64 [N, n_tasks] (nats), and NE, AUC and calibration per task."""

    losses: Losses
    ne: dict[str, float]
    auc: dict[str, float]
    calibration: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What one run gave. `weights_hash` and `order_hash` are SHA-256 of the initial weights and of the sample order.

    `test` is None, and `failure` set, when the run became non-finite. BF16 runs also have `same_weights`: their final
    weights evaluated in MXFP8. MXFP8 runs have `health` (rows of `AuditReport.flat` by training step) and `layers`.
    """

    precision: str
    seed: int
    weights_hash: str
    order_hash: str
    losses: tuple[float, ...]
    curve: tuple[CurvePoint, ...]
    samples_per_s: float
    test: Evaluation | None
    same_weights: Evaluation | None = None
    health: dict[int, list[dict[str, Any]]] | None = None
    layers: Description | None = None
    failure: tuple[int, str, str] | None = None
    """(step, layer, message)."""


@functools.lru_cache(maxsize=2)
def load_data(spec: DataSpec) -> Dataset:
    """The dataset with standardised dense features, kept for the next job of this process."""
    dataset = load(spec.name, **dict(spec.options))
    count = len(dataset.train)
    if spec.limit is not None and spec.limit < count:
        dataset = replace(dataset, train=dataset.train.select(np.arange(count - spec.limit, count)))
    return standardize(dataset)


def standardize(dataset: Dataset) -> Dataset:
    """Dense features shifted and scaled to mean 0 and spread 1 over the training split; a constant one becomes 0."""
    mean, spread = dataset.train.dense.mean(axis=0), dataset.train.dense.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0).astype(np.float32)
    train, test = (replace(s, dense=(s.dense - mean) / spread) for s in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test)


def build_model(config: GEMConfig, dataset: Dataset, seed: int) -> GEM:
    """A new GEM on the CPU whose weights depend on (config, schema, seed) alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GEM(config, dataset.schema)


def evaluate(model: GEM, dataset: Dataset, *, autocast: bool = True) -> Evaluation:
    """Score the test split. Raises ValueError naming the sample when a logit is not finite."""
    logits = torch.from_numpy(predict(model, dataset.test, autocast=autocast))
    labels = torch.from_numpy(dataset.test.labels)
    tasks = dataset.schema.tasks
    metrics = [kind(tasks) for kind in (NormalizedEntropy, AUC, Calibration)]
    for metric in metrics:
        metric.update(logits, labels)
    ne, auc, calibration = (metric.compute() for metric in metrics)
    losses = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
    return Evaluation(losses=losses.numpy(), ne=ne, auc=auc, calibration=calibration)


def run_job(job: Job, on_progress: OnProgress | None = None) -> JobResult:
    """Train and evaluate. A non-finite run is a result with `failure`, not an exception: the comparison reports it."""
    dataset = load_data(job.data)
    model = build_model(job.model, dataset, job.train.seed)
    weights_hash = _hash_weights(model)
    order = hashlib.sha256()
    layers = None
    if job.precision == MXFP8:
        model = mxfp8.convert(model, _policy(job))
        layers = mxfp8.describe(model)
    trainer = Trainer(model, dataset.train, job.train, job.device)

    def see(batch: Batch) -> None:
        order.update(batch.sample_ids.numpy().tobytes())

    def report(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(job.name, progress)

    failure, health, test, same = None, None, None, None
    with plant(job.fault), _watched(trainer, job) as log:
        try:
            trainer.run(on_step=report, on_batch=see)
        except NonFiniteError as error:
            failure = (error.step, error.layer, str(error))
    if log is not None:
        per_step = len(trainer.optimizers)
        health = {step // per_step: audit.flat() for step, audit in log.reports.items()}
    if failure is None:
        with plant(job.fault):
            test = evaluate(model, dataset, autocast=job.train.autocast)
            if job.precision == BF16:
                same = evaluate(mxfp8.convert(model, _policy(job)), dataset, autocast=job.train.autocast)
    return JobResult(
        precision=job.precision,
        seed=job.train.seed,
        weights_hash=weights_hash,
        order_hash=order.hexdigest(),
        losses=tuple(trainer.losses),
        curve=tuple(trainer.curve),
        samples_per_s=trainer.progress().samples_per_s,
        test=test,
        same_weights=same,
        health=health,
        layers=layers,
        failure=failure,
    )


def _policy(job: Job) -> PrecisionPolicy:
    return job.policy if job.fault is None else planted_policy(job.fault, job.policy)


@contextlib.contextmanager
def _watched(trainer: Trainer, job: Job) -> Iterator[Any]:
    if job.precision != MXFP8 or job.watched_steps < 1:
        yield None
        return
    # mxfp8 counts optimiser steps, of which a training step takes one per optimiser.
    stride = max(1, -(-trainer.total // job.watched_steps))
    mxfp8.set_step(trainer.mxfp8_step)
    with watch(trainer.model, every=stride * len(trainer.optimizers)) as log:
        yield log


def _hash_weights(model: GEM) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


# === many jobs ===


def logistic_ne(spec: DataSpec) -> dict[str, float]:
    """NE per task of the logistic regression on the same split and features."""
    return dict(fit_baseline(load_data(spec)).ne)


def run_jobs(
    jobs: Sequence[Job], data: DataSpec, workers: int, on_progress: OnProgress
) -> tuple[list[JobResult], dict[str, float]]:
    """Results in the order of `jobs`, and NE of the logistic regression. `workers=0` runs all in this process."""
    if workers == 0:
        with _one_thread(jobs[0].device):
            return [run_job(job, on_progress) for job in jobs], logistic_ne(data)
    context = mp.get_context("spawn")
    queue = context.Queue()
    # MXFP8 runs take longest: first come, so that no worker idles at the end.
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].precision == BF16)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker, initargs=(queue,))
    try:
        futures: dict[int, Future[JobResult]] = {i: pool.submit(_work, jobs[i]) for i in order}
        baseline = pool.submit(logistic_ne, data)
        pending: set[Future[Any]] = {*futures.values(), baseline}
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            with contextlib.suppress(Empty):
                while True:
                    on_progress(*queue.get_nowait())
            for future in done:
                future.result()  # raise here what a worker raised
        return [futures[i].result() for i in range(len(jobs))], baseline.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers(device: str, jobs: int) -> int:
    """Worker processes for `jobs`: one per usable core on a CPU; none (this process) on a GPU."""
    if device != "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs))


_queue: Any = None


def _init_worker(queue: Any) -> None:
    global _queue
    _queue = queue
    torch.set_num_threads(1)


def _work(job: Job) -> JobResult:
    return run_job(job, lambda name, progress: _queue.put((name, progress)))


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
