"""Has the change of precision moved the loss? A paired comparison of two runs, with a verdict.

The statistic is the relative difference in normalised entropy, ``(NE_candidate - NE_baseline) / NE_baseline``, positive
when the candidate is worse. NE divides the mean log loss by the entropy of the test set's base rate; both runs see the
same labels, so the entropy cancels and the statistic is a ratio of sums of *paired* differences, ``sum d / sum b``.

Two kinds of noise, one interval. With R_s the statistic of seed s:

- *seeds*: ``t_{n-1} s / sqrt(n)`` over the R_s: initialisation, data order and the chaos of training;
- *samples*: a paired bootstrap of the test samples, drawn by group (user) when groups are given, since the samples of
  one user are not independent. The statistic resampled is the mean over seeds of R_s, each seed on the same draw.
  Half-width: the longer side of the percentile interval, times ``sqrt(G/(G-1)) t_{G-1}/z`` for few groups G (the
  expanded percentile interval of Hesterberg, The American Statistician 69:4, 2015, as a factor).

They are combined as ``sqrt(seeds^2 + samples^2)`` (square-and-add of half-widths: Howe 1974; Zou and Donner 2008).
Split R_s into truth + seed effect (variance S) + test-set effect (E, the same for every seed) + their interaction (I):
the mean over n seeds has variance (S + I)/n + E; the seed term estimates (S + I)/n, the bootstrap E + I/n. So I/n is
counted twice, and the seed term uses t where the sum would need less: the interval errs on the wide side.

``docs/drift.md`` says what a run of a given size can resolve.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.table import Table
from scipy import stats

from mxfp8 import report
from mxfp8.health import TYPICAL_CAST_DB, WORST_CAST_DB, LayerHealth, unhealthy
from mxfp8.report import percent, percent_number
from mxfp8.traces import Departure, StepTrace, first_departure, first_nonfinite

__all__ = [
    "Departure",
    "DriftConfig",
    "DriftReport",
    "LayerHealth",
    "PairedLosses",
    "PairingResult",
    "StepTrace",
    "compare",
    "first_departure",
    "first_nonfinite",
    "normalized_entropy",
]

Verdict = Literal["pass", "fail", "inconclusive"]
Kind = Literal["trained", "same_weights"]
Floats = NDArray[np.float64]

# Bounds the memory of one chunk of bootstrap counts to about 4M x (8 + 8 + 8) bytes.
_CHUNK_ELEMENTS = 4_000_000
# More groups than this are resampled in bundles: independent groups make independent bundles, whose sums have the same
# variance, and a million samples cost a second instead of half a minute.
_MAX_BUNDLES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftConfig:
    """How strict the verdict is."""

    #: Largest relative NE difference that still passes (0.0002 = 0.02 %).
    tolerance: float = 2e-4
    #: Two-sided confidence of the interval.
    confidence: float = 0.95
    n_resamples: int = 2000
    #: Seed of the bootstrap draws: the same inputs give the same interval.
    seed: int = 0
    #: A cast below this SQNR fails, whatever the losses say. Stochastic rounding may err by twice that: 6.02 dB less.
    worst_cast_db: float = WORST_CAST_DB
    #: So does a median over all casts below this one; stochastic rounding doubles the error energy, 3.01 dB less.
    typical_cast_db: float = TYPICAL_CAST_DB

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"tolerance must be a positive relative difference such as 2e-4, got {self.tolerance}")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence must be in [0.5, 1) such as 0.95, got {self.confidence}")
        if self.n_resamples < 200:
            raise ValueError(f"n_resamples must be at least 200 to give tail percentiles, got {self.n_resamples}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairedLosses:
    """Per-sample log losses of two runs on the same test samples.

    Args:
        name: names the row in tables, e.g. ``"click, trained"``; unique in a report.
        baseline, candidate: natural-log losses, >= 0, float64 [n_seeds, n_samples]. Row s of both comes from
            the same seed (same initial weights, same data order), column i is the same test sample everywhere.
        labels: {0, 1} [n_samples], not all equal (the entropy of the base rate would be 0).
        groups: id of the user (or any cluster of dependent samples) of each sample, ints or strings [n_samples]; None
            when samples are independent.
        kind: ``"trained"``: each run trained its own weights. ``"same_weights"``: the weights of each baseline run,
            evaluated in both precisions. No training chaos in it, so it resolves far smaller differences, but it says
            nothing of how training itself was changed.

    Raises:
        ValueError: shapes differ, a loss is NaN, infinite or negative (names the run, seed and sample), a label is not
            0 or 1 (names the sample), all labels equal, fewer than two samples or groups, an unknown kind.
    """

    name: str
    baseline: ArrayLike
    candidate: ArrayLike
    labels: ArrayLike
    groups: ArrayLike | None = None
    kind: Kind = "trained"

    def __post_init__(self) -> None:
        if self.kind not in ("trained", "same_weights"):
            raise ValueError(f"{self.name}: kind must be 'trained' or 'same_weights', got {self.kind!r}")
        shape = np.shape(self.baseline)
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise ValueError(
                f"{self.name}: baseline must be [n_seeds >= 1, n_samples >= 2], got shape {shape}; "
                "for a single seed pass losses[None, :]"
            )
        for name, value, expected in (
            ("candidate", self.candidate, shape),
            ("labels", self.labels, shape[1:]),
            ("groups", self.groups, shape[1:]),
        ):
            if value is not None and np.shape(value) != expected:
                raise ValueError(
                    f"{self.name}: {name} must have shape {expected} to pair with baseline {shape}, "
                    f"got {np.shape(value)}"
                )
        _check_losses(f"{self.name}: baseline", self.baseline)
        _check_losses(f"{self.name}: candidate", self.candidate)
        _check_labels(self.name, np.asarray(self.labels))
        if self.groups is not None and np.unique(np.asarray(self.groups)).size < 2:
            raise ValueError(f"{self.name}: all samples are in one group; the noise over groups needs at least two")


def _check_losses(who: str, losses: ArrayLike) -> None:
    values = np.asarray(losses, dtype=np.float64)
    bad = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        seed, sample = bad[0]
        raise ValueError(
            f"{who} loss is {values[seed, sample]} at seed {seed}, sample {sample} ({len(bad)} such entries); "
            "log losses must be finite and >= 0. A run that diverged has no loss to compare: pass the Departure that "
            "first_nonfinite() finds to DriftReport instead"
        )
    silent = np.flatnonzero(values.sum(axis=1) == 0)
    if silent.size and who.endswith("baseline"):
        raise ValueError(f"{who} losses are all 0 at seed {silent[0]}: a relative difference is undefined")


def _check_labels(who: str, labels: NDArray[Any]) -> None:
    bad = np.flatnonzero((labels != 0) & (labels != 1))
    if bad.size:
        raise ValueError(f"{who}: label of sample {bad[0]} is {labels[bad[0]]}; labels must be 0 or 1")
    if (labels == labels[0]).all():
        raise ValueError(f"{who}: all labels are {labels[0]}: their entropy is 0, so normalised entropy is undefined")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairingResult:
    """What one pairing says. Differences and half-widths are relative NE; positive differences mean candidate worse."""

    name: str
    kind: Kind
    verdict: Verdict
    #: One sentence: why this verdict.
    reason: str
    ne_baseline: float
    ne_candidate: float
    rel_ne_diff: float
    ci_low: float
    ci_high: float
    #: Half of the interval: the smallest difference this run can resolve.
    half_width: float
    #: None with one seed: its share of the noise is unknown and is missing from ``half_width``.
    seed_half_width: float | None
    sample_half_width: float
    per_seed: tuple[float, ...]
    n_seeds: int
    n_samples: int
    n_groups: int
    tolerance: float
    confidence: float
    #: Run size that would bring the half-width down to the tolerance. None: one seed gives no basis to say.
    seeds_needed: int | None
    samples_needed: int

    def explain(self) -> str:
        """Name, size, reason and, when the run cannot resolve the tolerance, about how large one would have to be."""
        size = f"{self.n_seeds} seed{'s' if self.n_seeds > 1 else ''}, {self.n_samples:,} samples"
        if self.n_groups != self.n_samples:
            size += f" of {self.n_groups:,} groups"
        wanted = []
        if self.seeds_needed is not None and self.seeds_needed > self.n_seeds:
            wanted.append(f"{_two_digits(self.seeds_needed)} seeds")
        if self.samples_needed > self.n_samples:
            wanted.append(f"{_two_digits(self.samples_needed)} samples")
        needs = f"; needs about {' and '.join(wanted)}" if wanted and self.verdict == "inconclusive" else ""
        return f"{self.name} ({size}): {self.reason}{needs}"


def _two_digits(n: int) -> str:
    return f"{float(f'{n:.2g}'):,.0f}" if n >= 100 else str(n)


def normalized_entropy(losses: ArrayLike, labels: ArrayLike) -> float:
    """Mean log loss over the entropy of the base rate of ``labels``; natural logs; 1.0 is what predicting it scores.

    ``losses`` [..., n_samples], ``labels`` {0, 1} [n_samples]. ValueError when labels are not 0/1 or all equal.
    """
    values = np.asarray(labels)
    _check_labels("labels", values)
    rate = float(values.mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    return float(np.asarray(losses, dtype=np.float64).mean()) / entropy


def compare(losses: PairedLosses, config: DriftConfig | None = None) -> PairingResult:
    """Interval and verdict of one pairing.

    ``"fail"`` when the whole interval lies above the tolerance; ``"pass"`` when it lies below *and* its half-width is
    no larger than the tolerance; else ``"inconclusive"``. One seed never passes: the noise between seeds is unknown.
    One *trained* seed never fails either, as training chaos alone may exceed any tolerance.
    """
    config = config or DriftConfig()
    baseline = np.asarray(losses.baseline, dtype=np.float64)
    difference = np.asarray(losses.candidate, dtype=np.float64) - baseline
    per_seed = difference.sum(axis=1) / baseline.sum(axis=1)
    estimate = float(per_seed.mean())
    group_baseline = _sum_by_group(baseline, losses.groups)
    seeds = _seed_half_width(per_seed, config.confidence)
    samples = _sample_half_width(group_baseline, _sum_by_group(difference, losses.groups), estimate, config)
    half_width = math.hypot(seeds or 0.0, samples)
    verdict, reason = _judge(estimate, half_width, len(per_seed), losses.kind, config)
    seeds_needed, samples_needed = _needed(per_seed, seeds, samples, baseline.shape[1], config)
    return PairingResult(
        name=losses.name,
        kind=losses.kind,
        verdict=verdict,
        reason=reason,
        ne_baseline=normalized_entropy(baseline, losses.labels),
        ne_candidate=normalized_entropy(losses.candidate, losses.labels),
        rel_ne_diff=estimate,
        ci_low=estimate - half_width,
        ci_high=estimate + half_width,
        half_width=half_width,
        seed_half_width=seeds,
        sample_half_width=samples,
        per_seed=tuple(per_seed.tolist()),
        n_seeds=len(per_seed),
        n_samples=baseline.shape[1],
        n_groups=group_baseline.shape[1],
        tolerance=config.tolerance,
        confidence=config.confidence,
        seeds_needed=seeds_needed,
        samples_needed=samples_needed,
    )


def _sum_by_group(values: Floats, groups: ArrayLike | None) -> Floats:
    """[n_seeds, n_samples] -> [n_seeds, n_groups]; groups in sorted order of their id."""
    if groups is None:
        return values
    ids, index = np.unique(np.asarray(groups), return_inverse=True)
    return np.stack([np.bincount(index, weights=row, minlength=ids.size) for row in values])


def _t(confidence: float, dof: int) -> float:
    return float(stats.t.ppf((1 + confidence) / 2, dof))


def _seed_half_width(per_seed: Floats, confidence: float) -> float | None:
    n = len(per_seed)
    return None if n == 1 else _t(confidence, n - 1) * float(per_seed.std(ddof=1)) / math.sqrt(n)


def _sample_half_width(baseline: Floats, difference: Floats, estimate: float, config: DriftConfig) -> float:
    """Bootstrap over groups of the mean over seeds of sum d / sum b; arrays are group sums [n_seeds, n_groups]."""
    baseline, difference = _bundle(baseline), _bundle(difference)
    n_groups = baseline.shape[1]
    rng = np.random.default_rng(config.seed)
    chunk = max(1, _CHUNK_ELEMENTS // n_groups)
    resampled = []
    for start in range(0, config.n_resamples, chunk):
        rows = min(chunk, config.n_resamples - start)
        draws = rng.integers(0, n_groups, size=(rows, n_groups)) + n_groups * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=rows * n_groups).reshape(rows, n_groups).astype(np.float64)
        denominator = counts @ baseline.T
        if not denominator.all():
            raise ValueError(
                "a bootstrap draw has no baseline loss at all: too few samples or groups have a non-zero loss; use more"
            )
        resampled.append(((counts @ difference.T) / denominator).mean(axis=1))
    low, high = np.quantile(np.concatenate(resampled), [(1 - config.confidence) / 2, (1 + config.confidence) / 2])
    few_groups = math.sqrt(n_groups / (n_groups - 1)) * _t(config.confidence, n_groups - 1)
    few_groups /= float(stats.norm.ppf((1 + config.confidence) / 2))
    return few_groups * max(abs(float(low) - estimate), abs(float(high) - estimate))


def _bundle(sums: Floats) -> Floats:
    """[n_seeds, n_groups] -> [n_seeds, at most _MAX_BUNDLES]: group g joins bundle g mod _MAX_BUNDLES."""
    n_seeds, n_groups = sums.shape
    if n_groups <= _MAX_BUNDLES:
        return sums
    padded = np.pad(sums, ((0, 0), (0, -n_groups % _MAX_BUNDLES)))
    bundled: Floats = padded.reshape(n_seeds, -1, _MAX_BUNDLES).sum(axis=1)
    return bundled


def _judge(estimate: float, half_width: float, n_seeds: int, kind: Kind, config: DriftConfig) -> tuple[Verdict, str]:
    tolerance = config.tolerance
    low, high = estimate - half_width, estimate + half_width
    if n_seeds == 1 and kind == "trained":
        return "inconclusive", "one seed: the noise between seeds is unknown; run at least 3 seeds"
    if low > tolerance:
        return "fail", f"worse by at least {percent(low)}, above the tolerance {percent(tolerance)}"
    if n_seeds == 1:
        return "inconclusive", "one seed: the noise between seeds is unknown, so this cannot pass; run at least 3 seeds"
    if half_width > tolerance:
        return "inconclusive", f"resolves {percent(half_width)} at best, the tolerance is {percent(tolerance)}"
    if high >= tolerance:
        return "inconclusive", f"interval reaches {percent(high)}, across the tolerance {percent(tolerance)}"
    if high < -tolerance:
        return "pass", f"not worse: better by at least {percent(-high)}, which is itself a change worth a look"
    return "pass", f"at most {percent(high)} worse, below the tolerance {percent(tolerance)}"


def _needed(
    per_seed: Floats, seeds: float | None, samples: float, n_samples: int, config: DriftConfig
) -> tuple[int | None, int]:
    """(seeds, samples) that bring hypot(seeds, samples) down to the tolerance, if the noise stays as measured.

    A part already below tolerance / sqrt(2) keeps its size and leaves the rest of the budget to the other; when both
    are above, they share it equally. Half-widths shrink as 1/sqrt(size); the t quantile of the seeds is accounted for.
    """
    share = config.tolerance / math.sqrt(2)
    n_seeds = len(per_seed)
    sample_budget = share if seeds is None or seeds > share else math.sqrt(config.tolerance**2 - seeds**2)
    samples_needed = max(n_samples, math.ceil(n_samples * (samples / sample_budget) ** 2))
    if seeds is None:
        return None, samples_needed
    seed_budget = share if samples > share else math.sqrt(config.tolerance**2 - samples**2)
    spread = float(per_seed.std(ddof=1)) / seed_budget
    z = float(stats.norm.ppf((1 + config.confidence) / 2))
    # z < t: start from the normal answer, then step up to the first n whose own t quantile fits.
    n = max(n_seeds, math.ceil((z * spread) ** 2))
    while _t(config.confidence, n - 1) * spread > math.sqrt(n):
        n += 1
    return n, samples_needed


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """Every pairing with its verdict, the health of the layers, and where the runs part."""

    config: DriftConfig
    results: tuple[PairingResult, ...]
    layers: tuple[LayerHealth, ...] = ()
    departures: tuple[Departure, ...] = ()

    def __post_init__(self) -> None:
        names = [r.name for r in self.results]
        if len(set(names)) != len(names):
            raise ValueError(f"pairings need unique names, got {names}")
        if not self.results and not self.departures:
            raise ValueError("nothing to report: give at least one PairedLosses, or the Departure that prevented it")

    @classmethod
    def from_losses(
        cls,
        pairings: Sequence[PairedLosses],
        *,
        layers: Sequence[LayerHealth] = (),
        departures: Sequence[Departure] = (),
        config: DriftConfig | None = None,
    ) -> "DriftReport":
        """Compare every pairing. A candidate that went non-finite has no losses: pass its ``Departure`` alone."""
        config = config or DriftConfig()
        results = tuple(compare(p, config) for p in pairings)
        return cls(config=config, results=results, layers=tuple(layers), departures=tuple(departures))

    @property
    def verdict(self) -> Verdict:
        """``"fail"`` if a pairing fails, layers are unhealthy or only the candidate went non-finite; ``"pass"`` if all
        pairings pass and nothing went non-finite."""
        if self.unhealthy_layers():
            return "fail"
        broken = [d for d in self.departures if d.kind == "nonfinite"]
        candidate_only = [d for d in broken if d.baseline is None or math.isfinite(d.baseline)]
        if candidate_only or any(r.verdict == "fail" for r in self.results):
            return "fail"
        all_pass = bool(self.results) and all(r.verdict == "pass" for r in self.results)
        return "pass" if all_pass and not broken else "inconclusive"

    def unhealthy_layers(self) -> list[LayerHealth]:
        """Casts that lost more than rounding can explain, worst first (``mxfp8.health``); empty when all is well."""
        return unhealthy(self.layers, self.config.worst_cast_db, self.config.typical_cast_db)

    def health_note(self) -> str | None:
        """One sentence on the unhealthy layers; None when there are none."""
        bad = self.unhealthy_layers()
        if not bad:
            return None
        casts = sum(row.operand != "output" for row in self.layers)
        lowest, typical = self.config.worst_cast_db, self.config.typical_cast_db
        floors = f"no cast below {lowest:.1f} dB, the median not below {typical:.1f} dB"
        worst = ", ".join(str(row) for row in bad[:3])
        return f"{len(bad)} of {casts} casts lose more than rounding to E4M3 can explain ({floors}); worst: {worst}"

    def worst_layers(self, k: int = 5) -> list[LayerHealth]:
        """The ``k`` rows of lowest SQNR, worst first; NaN is worse than any number."""
        return sorted(self.layers, key=lambda row: row.rank)[:k]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; write them with ``report.write_json``, which spells NaN and Inf."""
        return {
            "verdict": self.verdict,
            **asdict(self),
            "worst_layers": [asdict(row) for row in self.worst_layers()],
            "unhealthy_layers": [asdict(row) for row in self.unhealthy_layers()],
        }

    def summary(self) -> str:
        """One sentence for the overall verdict: what decided it."""
        broken = [str(d) for d in self.departures if d.kind == "nonfinite"]
        decisive = [r.explain() for r in self.results if r.verdict == self.verdict]
        if self.verdict == "inconclusive" and len(decisive) > 1:
            names = "; ".join(r.name for r in self.results if r.verdict == self.verdict)
            decisive = [f"too much noise to tell at {percent(self.config.tolerance)}: {names}"]
        health = [note for note in (self.health_note(),) if note]
        return "; ".join([*broken, *health, *decisive]) or "; ".join(str(d) for d in self.departures)

    def rows(self) -> tuple[list[str], list[list[report.Cell]]]:
        """(columns, one row per pairing): what both the terminal and the HTML table show."""
        interval = f"{self.config.confidence:.0%} interval, %"
        return ["pairing", "NE base", "NE cand", "rel. diff, %", interval, "resolves, %", "verdict"], [
            [
                r.name,
                f"{r.ne_baseline:.5f}",
                f"{r.ne_candidate:.5f}",
                percent_number(r.rel_ne_diff, signed=True),
                f"{percent_number(r.ci_low, signed=True)} .. {percent_number(r.ci_high, signed=True)}",
                "unknown" if r.seed_half_width is None else percent_number(r.half_width),
                r.verdict,
            ]
            for r in self.results
        ]

    def table(self) -> Table:
        """The verdict per pairing, for the terminal, with the reason of each below."""
        title = f"Drift: {self.verdict} (tolerance {percent(self.config.tolerance)})"
        notes = [*(r.explain() for r in self.results), *(f"first departure: {d}" for d in self.departures)]
        notes += [f"layer health: {note}" for note in (self.health_note(),) if note]
        return report.table(title, *self.rows(), caption="\n".join(notes))

    def add_to(self, page: report.HtmlReport, *, floor_db: float | None = None, worst: int = 12) -> report.HtmlReport:
        """Adds banner, table, forest plot, worst layers and departures to an HTML page; returns the page.

        ``floor_db`` marks casts below it in red; ``worst`` is how many rows each layer figure shows.
        """
        page.heading("Verdict").verdict(self.verdict, self.summary()).table(*self.rows())
        if self.results:
            intervals = [(r.name, r.rel_ne_diff, r.ci_low, r.ci_high, r.verdict) for r in self.results]
            page.figure(report.plot_forest(intervals, tolerance=self.config.tolerance))
        for note in [*(r.explain() for r in self.results), *(f"First departure: {d}" for d in self.departures)]:
            page.text(note)
        if self.layers:
            self._add_layers(page.heading("Worst layers"), floor_db, worst)
        return page

    def _add_layers(self, page: report.HtmlReport, floor_db: float | None, worst: int) -> None:
        ranked = sorted(self.layers, key=lambda row: row.rank)
        casts = [row for row in ranked if row.operand != "output"]
        for what, rows, floor in (
            ("GEMM outputs", [row for row in ranked if row.operand == "output"][:worst], None),
            ("casts", casts[:worst], floor_db),
        ):
            if rows:
                sqnr = [(_short(row), row.sqnr_db) for row in rows]
                title = f"SQNR of {what}, the {len(rows)} lowest"
                page.figure(report.plot_layer_sqnr(sqnr, floor_db=floor, title=title))
        casts.sort(key=lambda row: -max(row.underflow_frac, row.saturated_frac))
        if casts:
            page.figure(report.plot_health([(_short(r), r.underflow_frac, r.saturated_frac) for r in casts[:worst]]))


def _short(row: LayerHealth) -> str:
    return f"{row.layer} · {row.gemm} {row.operand}"
