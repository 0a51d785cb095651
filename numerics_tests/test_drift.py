"""Drift verdicts: the interval by hand, its coverage by simulation, and what every verdict needs."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from mxfp8 import drift, report
from mxfp8.drift import DriftConfig, DriftReport, LayerHealth, PairedLosses, StepTrace

# Two-sided 95 % quantiles of Student's t for 2 and 4 degrees of freedom, from the printed tables.
T_2, T_4 = 4.302652729911275, 2.7764451051977987
# One test in 1e4 may miss by chance; seeds are fixed, so it either always passes or never does.
MISS = 1e-4
N_SIMULATIONS = 300
# Few resamples keep the simulations fast; the percentile's own noise only widens the spread of half-widths.
FAST = DriftConfig(n_resamples=300)


def labels_for(n: int) -> NDArray[np.bool_]:
    labels: NDArray[np.bool_] = np.arange(n) % 4 == 0
    return labels


def make(
    baseline: Any, candidate: Any, *, kind: drift.Kind = "trained", groups: Any = None, name: str = "click"
) -> PairedLosses:
    labels = labels_for(np.shape(baseline)[1])
    return PairedLosses(name=name, baseline=baseline, candidate=candidate, labels=labels, groups=groups, kind=kind)


def base_losses(n_seeds: int, n_samples: int, seed: int = 0) -> drift.Floats:
    return np.random.default_rng(seed).gamma(2.0, 0.3, size=(n_seeds, n_samples))


# --- the numbers, by hand ----------------------------------------------------------------------------------------


def test_normalized_entropy_by_hand() -> None:
    # Base rate 1/2: entropy ln 2. A model that predicts 1/2 loses ln 2 on every sample: exactly 1.
    assert drift.normalized_entropy(np.full((3, 4), math.log(2)), [0, 1, 1, 0]) == pytest.approx(1.0, rel=1e-15)
    # Base rate 1/4: entropy of the definition, in nats.
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert drift.normalized_entropy([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 0]) == pytest.approx(0.25 / entropy, rel=1e-14)


def test_seed_interval_by_hand() -> None:
    # d = r_s b: every resample of the samples gives r_s again, so only the seeds speak. s = 0.001, n = 3.
    base = base_losses(3, 50)
    result = drift.compare(make(base, base * np.array([[1.001], [1.002], [1.003]])))
    # d is a difference of numbers near 1 rounded to 2^-53: good to a few 1e-16.
    assert result.rel_ne_diff == pytest.approx(0.002, abs=1e-14)
    assert result.per_seed == pytest.approx((0.001, 0.002, 0.003), abs=1e-14)
    assert result.sample_half_width < 1e-14
    assert result.seed_half_width == pytest.approx(T_2 * 0.001 / math.sqrt(3), rel=1e-9)
    assert result.half_width == pytest.approx(T_2 * 0.001 / math.sqrt(3), rel=1e-9)
    assert (result.ci_low + result.ci_high) / 2 == pytest.approx(result.rel_ne_diff, abs=1e-15)
    assert result.ne_candidate / result.ne_baseline - 1 == pytest.approx(0.002, abs=1e-3)


def test_seeds_needed_is_the_first_that_fits() -> None:
    base = base_losses(3, 50)
    config = DriftConfig(tolerance=5e-4)
    result = drift.compare(make(base, base * np.array([[1.001], [1.002], [1.003]])), config)

    def half_width(n: int) -> float:
        return float(stats.t.ppf(0.975, n - 1)) * 0.001 / math.sqrt(n)

    n = result.seeds_needed
    assert n is not None
    assert half_width(n) <= config.tolerance < half_width(n - 1)
    assert result.samples_needed == 50


@pytest.mark.parametrize("n", [4000, 50_001])  # the second is resampled in bundles, one of them larger
def test_sample_interval_matches_the_delta_method(n: int) -> None:
    base = base_losses(1, n)
    candidate = base * (1 + 0.01 * np.random.default_rng(1).standard_normal(n))
    result = drift.compare(make(base, candidate, kind="same_weights"))
    residual = candidate - base - result.rel_ne_diff * base
    delta = 1.959964 * math.sqrt(n / (n - 1) * float((residual**2).sum())) / float(base.sum())
    # A 2.5 % percentile of 2000 draws has standard error sqrt(.025 x .975 / 2000) / phi(1.96) = 0.060 sd, which is
    # 3.1 % of the half-width; 4 of them: 12 %. The longer of two sides only moves it up.
    assert result.sample_half_width == pytest.approx(delta, rel=0.12)


def test_both_noises_add_in_quadrature() -> None:
    base = base_losses(3, 100)
    candidate = base * (1 + 0.02 * np.random.default_rng(1).standard_normal(base.shape))
    result = drift.compare(make(base, candidate))
    assert result.seed_half_width is not None
    assert min(result.seed_half_width, result.sample_half_width) > 1e-4
    both = math.sqrt(result.seed_half_width**2 + result.sample_half_width**2)
    assert result.half_width == pytest.approx(both, rel=1e-12)


def test_samples_needed_scales_with_the_square() -> None:
    base = base_losses(2, 400)
    noise = 0.01 * np.random.default_rng(1).standard_normal(400)  # same in both seeds: no seed noise from it
    base[1] = base[0]
    config = DriftConfig(tolerance=1e-4)
    result = drift.compare(make(base, base * (1 + noise)), config)
    assert result.seed_half_width == pytest.approx(0.0, abs=1e-15)
    assert result.samples_needed == pytest.approx(400 * (result.sample_half_width / 1e-4) ** 2, rel=1e-3)
    assert result.seeds_needed == 2


def test_groups_are_what_is_resampled() -> None:
    # Ten copies of each sample carry no more information than one: the interval must not shrink by sqrt(10).
    base = base_losses(2, 200)
    candidate = base * (1 + 0.01 * np.random.default_rng(1).standard_normal(200))
    once = drift.compare(make(base, candidate))
    copies = make(np.repeat(base, 10, axis=1), np.repeat(candidate, 10, axis=1), groups=np.repeat(np.arange(200), 10))
    tenfold = drift.compare(copies)
    assert tenfold.n_groups == 200
    assert tenfold.half_width == pytest.approx(once.half_width, rel=1e-9)
    blind = drift.compare(dataclasses.replace(copies, groups=None))
    assert blind.sample_half_width < tenfold.sample_half_width / 2


def test_group_names_and_order_do_not_matter() -> None:
    base, groups = base_losses(3, 60), np.arange(60) // 4
    candidate = base * (1 + 0.01 * np.random.default_rng(1).standard_normal(base.shape))
    order = np.random.default_rng(2).permutation(60)
    a = drift.compare(make(base, candidate, groups=groups))
    named = np.array([f"user-{g:02d}" for g in groups])
    labels = labels_for(60)[order]
    b = drift.compare(
        PairedLosses(
            name="click", baseline=base[:, order], candidate=candidate[:, order], labels=labels, groups=named[order]
        )
    )
    assert (a.ci_low, a.ci_high) == pytest.approx((b.ci_low, b.ci_high), rel=1e-9)


def test_same_inputs_same_interval_and_torch_inputs() -> None:
    base = base_losses(2, 100)
    candidate = base * (1 + 0.01 * np.random.default_rng(1).standard_normal(base.shape))
    a = drift.compare(make(base, candidate))
    b = drift.compare(make(torch.from_numpy(base), torch.from_numpy(candidate)))
    assert a == b


# --- coverage, by simulation -------------------------------------------------------------------------------------


def simulate(
    rng: np.random.Generator, *, truth: float, seed_sd: float, user_sd: float, mixed_sd: float, n_users: int = 60
) -> PairedLosses:
    """4 seeds, users of 5 samples, losses with a known true relative difference E[d] / E[b] = truth.

    The noise multiplies a loss it is independent of, so it does not move the true ratio.
    """
    n_seeds, per_user = 4, 5
    users = np.repeat(np.arange(n_users), per_user)
    base = np.tile(rng.gamma(2.0, 0.3, size=users.size), (n_seeds, 1))
    seed_effect = seed_sd * rng.standard_normal((n_seeds, 1))
    user_effect = user_sd * rng.standard_normal(n_users)[users]
    mixed = mixed_sd * rng.standard_normal(base.shape)
    return make(base, base * (1 + truth + seed_effect + user_effect + mixed), groups=users)


SCENARIOS: dict[str, dict[str, Any]] = {
    "seeds": {"seed_sd": 1e-3, "user_sd": 0.0, "mixed_sd": 0.0},
    "users": {"seed_sd": 0.0, "user_sd": 1e-2, "mixed_sd": 0.0},
    "few users": {"seed_sd": 0.0, "user_sd": 1e-2, "mixed_sd": 0.0, "n_users": 6},
    "interaction": {"seed_sd": 0.0, "user_sd": 0.0, "mixed_sd": 2e-2},
    "all": {"seed_sd": 1e-3, "user_sd": 1e-2, "mixed_sd": 2e-2},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_interval_covers_the_truth(scenario: str) -> None:
    rng = np.random.default_rng(7)
    results = [drift.compare(simulate(rng, truth=1e-3, **SCENARIOS[scenario]), FAST) for _ in range(N_SIMULATIONS)]
    covered = sum(r.ci_low <= 1e-3 <= r.ci_high for r in results)
    # A true coverage of 95 % falls below this count once in 1 / MISS.
    assert covered >= stats.binom.ppf(MISS, N_SIMULATIONS, 0.95)


def test_ignoring_users_would_not_cover() -> None:
    # Shows that the simulation can fail: the same data, treated as independent samples, covers far less.
    rng = np.random.default_rng(7)
    pairs = (simulate(rng, truth=0.0, **SCENARIOS["users"]) for _ in range(N_SIMULATIONS))
    results = [drift.compare(dataclasses.replace(p, groups=None), FAST) for p in pairs]
    covered = sum(r.ci_low <= 0 <= r.ci_high for r in results)
    assert covered < stats.binom.ppf(MISS, N_SIMULATIONS, 0.95)


def test_a_difference_at_the_tolerance_seldom_gets_a_wrong_verdict() -> None:
    # At truth = tolerance either clear verdict is an error, of at most 2.5 % each (one side of a 95 % interval).
    rng, config = np.random.default_rng(9), DriftConfig(tolerance=5e-3, n_resamples=300)
    verdicts = [
        drift.compare(simulate(rng, truth=5e-3, **SCENARIOS["all"]), config).verdict for _ in range(N_SIMULATIONS)
    ]
    most = stats.binom.ppf(1 - MISS, N_SIMULATIONS, 0.025)
    assert verdicts.count("pass") <= most
    assert verdicts.count("fail") <= most
    assert "inconclusive" in verdicts


# --- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["trained", "same_weights"])
def test_identical_runs_pass_with_zero_width(kind: drift.Kind) -> None:
    base = base_losses(2, 40)
    result = drift.compare(make(base, base.copy(), kind=kind))
    assert (result.rel_ne_diff, result.half_width, result.verdict) == (0.0, 0.0, "pass")


@pytest.mark.parametrize("kind", ["trained", "same_weights"])
def test_a_planted_one_percent_fails(kind: drift.Kind) -> None:
    rng, base = np.random.default_rng(3), base_losses(3, 2000)
    candidate = base * (1.01 + 0.01 * rng.standard_normal(base.shape))
    result = drift.compare(make(base, candidate, kind=kind))
    assert result.verdict == "fail"
    assert result.ci_low <= 0.01 <= result.ci_high
    assert "worse by at least" in result.reason


def test_noise_above_the_tolerance_is_inconclusive_whatever_the_estimate() -> None:
    rng, base = np.random.default_rng(3), base_losses(3, 2000)
    noise = 0.05 * rng.standard_normal(base.shape)
    for shift in (-0.05, 0.0):  # far on the good side, interval and all, or centred on no difference: not resolved
        centred = noise - (base * noise).sum(axis=1, keepdims=True) / base.sum(axis=1, keepdims=True)
        result = drift.compare(make(base, base * (1 + centred + shift)))
        assert result.half_width > 2e-4
        assert (result.ci_high < 2e-4) == (shift < 0)
        assert result.verdict == "inconclusive"
        assert result.samples_needed > 2000
        assert "needs about" in result.explain()


def test_an_interval_across_the_tolerance_is_inconclusive_though_narrow() -> None:
    base = base_losses(3, 50)
    result = drift.compare(make(base, base * np.array([[1.00018], [1.0002], [1.00022]])))
    assert result.half_width < 2e-4
    assert result.ci_low < 2e-4 < result.ci_high
    assert result.verdict == "inconclusive"
    assert "across the tolerance" in result.reason


def test_better_passes_and_says_so() -> None:
    base = base_losses(3, 50)
    result = drift.compare(make(base, base * 0.99))
    assert result.verdict == "pass"
    assert "better by at least" in result.reason


def test_one_seed_never_passes() -> None:
    base = base_losses(1, 50)
    for kind in ("trained", "same_weights"):
        result = drift.compare(make(base, base.copy(), kind=kind))
        assert result.verdict == "inconclusive"
        assert result.seed_half_width is None
        assert result.seeds_needed is None
        assert "one seed" in result.reason


def test_one_seed_fails_only_without_training_chaos() -> None:
    base = base_losses(1, 50)
    assert drift.compare(make(base, base * 1.01, kind="trained")).verdict == "inconclusive"
    assert drift.compare(make(base, base * 1.01, kind="same_weights")).verdict == "fail"


# --- the report --------------------------------------------------------------------------------------------------

GOOD = LayerHealth(layer="a", gemm="fprop", sqnr_db=31.5)
BAD = LayerHealth(layer="b", gemm="dgrad", operand="grad_output", sqnr_db=12.0, underflow_frac=0.2)
BROKEN = LayerHealth(layer="c", gemm="wgrad", sqnr_db=math.nan, saturated_frac=1.0)
EXACT = LayerHealth(layer="d", gemm="fprop", sqnr_db=math.inf)
LOST = LayerHealth(layer="e", gemm="fprop", sqnr_db=-math.inf)


def pairing(verdict: str) -> PairedLosses:
    base = base_losses(3, 50)
    factor: Any = {"pass": 1.0, "fail": 1.01, "inconclusive": np.array([[0.99], [1.0], [1.01]])}[verdict]
    return make(base, base * factor, name=verdict)


@pytest.mark.parametrize(
    ("parts", "overall"),
    [
        (["pass"], "pass"),
        (["fail"], "fail"),
        (["inconclusive"], "inconclusive"),
        (["pass", "inconclusive"], "inconclusive"),
        (["pass", "inconclusive", "fail"], "fail"),
    ],
)
def test_overall_verdict(parts: list[str], overall: str) -> None:
    result = DriftReport.from_losses([pairing(p) for p in parts])
    assert [r.verdict for r in result.results] == parts
    assert result.verdict == overall
    assert overall in result.summary()  # the pairings here are named after their verdict


def test_departures_in_the_verdict() -> None:
    candidate = drift.first_nonfinite([StepTrace(step=4, loss=math.nan)])
    baseline = drift.first_nonfinite([StepTrace(step=4, loss=math.nan)], run="baseline")
    apart = drift.first_departure([StepTrace(step=0, loss=1.0)], [StepTrace(step=0, loss=2.0)])
    assert candidate
    assert baseline
    assert apart
    assert DriftReport.from_losses([], departures=[candidate]).verdict == "fail"
    assert "step 4: loss is not finite (candidate nan)" in DriftReport.from_losses([], departures=[candidate]).summary()
    assert DriftReport.from_losses([pairing("pass")], departures=[baseline]).verdict == "inconclusive"
    assert DriftReport.from_losses([pairing("pass")], departures=[apart]).verdict == "pass"
    alone = DriftReport.from_losses([], departures=[apart])
    assert alone.verdict == "inconclusive"
    assert alone.summary() == "step 0: loss departs (baseline 1, candidate 2)"


def test_worst_layers_puts_nan_first_and_exact_last() -> None:
    result = DriftReport.from_losses([pairing("pass")], layers=[GOOD, EXACT, BAD, LOST, BROKEN])
    assert {row.layer for row in result.worst_layers(2)} == {"c", "e"}
    assert [row.layer for row in result.worst_layers(9)][2:] == ["b", "a", "d"]


def test_report_is_json(tmp_path: Any) -> None:
    result = DriftReport.from_losses([pairing("fail")], layers=[BROKEN, GOOD])
    path = report.write_json(tmp_path / "report.json", result.to_dict())
    data = json.loads(path.read_text())
    assert data["verdict"] == "fail"
    assert data["results"][0]["ci_low"] == result.results[0].ci_low
    assert data["worst_layers"][0]["layer"] == "c"
    assert math.isnan(float(data["worst_layers"][0]["sqnr_db"]))


def test_report_shows_every_pairing_and_layer() -> None:
    result = DriftReport.from_losses([pairing("pass"), pairing("fail")], layers=[BAD, BROKEN])
    page = result.add_to(report.HtmlReport("t"), floor_db=28.0).render()
    for words in ("at most", "worse by at least 1 %", 'class="verdict fail"'):
        assert words in page
    assert result.table().row_count == 2


def test_the_example_in_the_guide_runs(repo_root: Path) -> None:
    guide = (repo_root / "docs" / "drift.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/drift.md", "exec"), {})


# --- where runs part ---------------------------------------------------------------------------------------------


def traced_training(inject_at: int | None) -> list[StepTrace]:
    """Six steps of SGD on a two-layer model; an Inf in the gradient of layer ``0.weight`` at step ``inject_at``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    trace = []
    for step in range(6):
        norms: dict[str, float] = {}
        loss = (model(x) - y).square().mean()
        model.zero_grad()
        loss.backward()
        for name, parameter in reversed(list(model.named_parameters())):
            assert parameter.grad is not None
            if step == inject_at and name == "0.weight":
                parameter.grad[1, 2] = math.inf
            norms[name] = float(parameter.grad.norm())
            parameter.data -= 0.01 * parameter.grad
        trace.append(StepTrace(step=step, loss=loss.item(), grad_norm=norms))
    return trace


def test_an_injected_inf_is_located() -> None:
    clean, poisoned = traced_training(None), traced_training(3)
    for found in (drift.first_departure(clean, poisoned), drift.first_nonfinite(poisoned)):
        assert found is not None
        assert (found.step, found.layer, found.quantity, found.kind) == (3, "0.weight", "grad_norm", "nonfinite")
        assert found.candidate == math.inf
    assert drift.first_departure(clean, clean) is None
    assert drift.first_nonfinite(clean) is None


def traces(values: Mapping[int, Mapping[str, float]]) -> Iterator[StepTrace]:
    for step, layers in values.items():
        yield StepTrace(step=step, loss=1.0, activation_rms=layers)


def test_departure_respects_threshold_and_order_of_execution() -> None:
    a = list(traces({0: {"x": 1.0, "y": 1.0}, 5: {"x": 1.0, "y": 1.0}}))
    b = list(traces({0: {"x": 1.1, "y": 1.0}, 5: {"y": 2.0, "x": 0.8}}))
    found = drift.first_departure(a, b, threshold=0.15)
    assert found is not None
    assert (found.step, found.layer) == (5, "x")  # the baseline's order, whatever the candidate's
    assert drift.first_departure(a, b, threshold=0.05).step == 0  # type: ignore[union-attr]
    assert drift.first_departure(a, b, threshold=1.0) is None
    assert drift.first_departure(a, b[:1], threshold=0.15) is None  # compared as far as it went
    zero = list(traces({0: {"x": 0.0}}))
    assert drift.first_departure(zero, list(traces({0: {"x": 1e-30}}))) is not None  # no absolute floor


# --- bad input ---------------------------------------------------------------------------------------------------


def spoiled(values: drift.Floats, at: tuple[int, int], bad: float) -> drift.Floats:
    out = values.copy()
    out[at] = bad
    return out


OK = base_losses(2, 6)
LABELS = labels_for(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": OK[:, :5]}, r"candidate must have shape \(2, 6\) to pair with baseline \(2, 6\), got \(2, 5\)"),
        ({"candidate": OK[:1]}, r"candidate must have shape \(2, 6\)"),
        ({"labels": LABELS[:5]}, r"labels must have shape \(6,\)"),
        ({"groups": np.arange(5)}, r"groups must have shape \(6,\)"),
        ({"groups": np.zeros(6)}, r"all samples are in one group"),
        ({"baseline": OK[0]}, r"for a single seed pass losses\[None, :\]"),
        ({"candidate": spoiled(OK, (1, 3), math.nan)}, r"click: candidate loss is nan at seed 1, sample 3"),
        ({"baseline": spoiled(OK, (0, 2), math.inf)}, r"click: baseline loss is inf at seed 0, sample 2"),
        ({"candidate": spoiled(OK, (1, 0), -0.1)}, r"candidate loss is -0.1 at seed 1, sample 0"),
        ({"baseline": OK * [[1.0], [0.0]]}, r"baseline losses are all 0 at seed 1"),
        ({"labels": np.array([0, 1, 0, 2, 0, 1])}, r"label of sample 3 is 2; labels must be 0 or 1"),
        ({"labels": np.array([0, 1, math.nan, 0, 0, 1])}, r"label of sample 2 is nan"),
        ({"labels": np.ones(6)}, r"all labels are 1.0: their entropy is 0"),
        ({"labels": np.zeros(6)}, r"all labels are 0.0: their entropy is 0"),
        ({"kind": "both"}, r"kind must be 'trained' or 'same_weights', got 'both'"),
    ],
)
def test_bad_losses(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "click", "baseline": OK, "candidate": OK, "labels": LABELS}
    with pytest.raises(ValueError, match=message):
        PairedLosses(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be a positive"),
        ({"tolerance": math.nan}, "tolerance must be a positive"),
        ({"confidence": 1.0}, "confidence must be in"),
        ({"confidence": 95.0}, "confidence must be in"),
        ({"n_resamples": 10}, "n_resamples must be at least 200"),
    ],
)
def test_bad_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DriftConfig(**change)


def test_bad_reports_and_traces() -> None:
    with pytest.raises(ValueError, match="unique names"):
        DriftReport.from_losses([pairing("pass"), pairing("pass")])
    with pytest.raises(ValueError, match="nothing to report"):
        DriftReport.from_losses([])
    one, two = list(traces({0: {"x": 1.0}})), list(traces({1: {"x": 1.0}}))
    with pytest.raises(ValueError, match="baseline step 0 meets candidate step 1"):
        drift.first_departure(one, two)
    with pytest.raises(ValueError, match="only one trace has activation_rms of layer 'y'"):
        drift.first_departure(one, list(traces({0: {"x": 1.0, "y": 1.0}})))
    with pytest.raises(ValueError, match="at least one step, got 1 and 0"):
        drift.first_departure(one, [])
    with pytest.raises(ValueError, match="threshold must be a positive"):
        drift.first_departure(one, one, threshold=0.0)
