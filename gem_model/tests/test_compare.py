"""Comparisons end to end on a small synthetic log: pairing, verdict, report, and faults that must come out as fail."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mxfp8
from gem_model.compare import CompareConfig, Comparison, _require_pair, compare, drift_config
from gem_model.compare_report import write_report
from gem_model.config import get_config
from gem_model.data import load
from gem_model.faults import FAULTS, check_fault, plant
from gem_model.jobs import DataSpec, Job, load_data, run_job, run_jobs, standardize
from gem_model.train import Progress, TrainConfig
from mxfp8.health import TYPICAL_CAST_DB, WORST_CAST_DB, LayerHealth, unhealthy

CONFIG = get_config("tiny", dim=32, heads=1, layers=1, fm_hidden=(32,), head_hidden=(32,), max_history=6)
DATA = DataSpec(
    name="synthetic", options=(("max_history", 6), ("num_ads", 40), ("num_samples", 800), ("num_users", 60))
)
SETTINGS = CompareConfig(
    data=DATA,
    model=CONFIG,
    train=TrainConfig(batch_size=64, window=2),
    policy=mxfp8.policies.recsys(min_dim=32),
    seeds=2,
)


def _silent(name: str, progress: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def healthy() -> Comparison:
    return compare(SETTINGS, _silent)


def test_the_two_runs_of_a_seed_are_a_pair_and_seeds_differ(healthy: Comparison) -> None:
    for base, candidate in zip(healthy.bf16, healthy.mxfp8, strict=True):
        assert base.weights_hash == candidate.weights_hash
        assert base.order_hash == candidate.order_hash
        assert base.losses != candidate.losses, "the precision must make a difference"
    assert healthy.bf16[0].weights_hash != healthy.bf16[1].weights_hash
    assert healthy.bf16[0].order_hash != healthy.bf16[1].order_hash


def test_runs_that_are_no_pair_are_refused(healthy: Comparison) -> None:
    base, candidate = healthy.bf16[0], healthy.mxfp8[0]
    with pytest.raises(RuntimeError, match="different weights"):
        _require_pair(base, replace(candidate, weights_hash="0"))
    with pytest.raises(RuntimeError, match="different data"):
        _require_pair(base, replace(candidate, order_hash="0"))


def test_headline_is_the_trained_pairing_of_the_first_task(healthy: Comparison) -> None:
    figures = healthy.headline()
    ne = [np.mean([run.test.ne["click"] for run in runs]) for runs in (healthy.bf16, healthy.mxfp8)]  # type: ignore[union-attr]
    assert figures["ne_bf16"] == pytest.approx(ne[0], rel=1e-6)
    assert figures["ne_mxfp8"] == pytest.approx(ne[1], rel=1e-6)
    ratios = [c.test.ne["click"] / b.test.ne["click"] - 1 for b, c in zip(healthy.bf16, healthy.mxfp8, strict=True)]  # type: ignore[union-attr]
    assert figures["rel_ne_diff"] == pytest.approx(np.mean(ratios), rel=1e-6)
    assert figures["ci95"][0] < figures["rel_ne_diff"] < figures["ci95"][1]
    assert figures["verdict"] == "inconclusive", "160 test samples cannot resolve 0.02 %"
    assert figures["unhealthy_casts"] == 0


def test_report_is_one_file_and_its_json_holds_the_same(healthy: Comparison, tmp_path: Path) -> None:
    html, data = write_report(healthy, tmp_path / "new", "gem compare --data synthetic")
    text = html.read_text()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    for words in ("Verdict", "click, same weights", "logistic regression", "gem compare --data synthetic", "layers.0"):
        assert words.lower() in text.lower()
    document = json.loads(data.read_text())
    assert {"ne_bf16", "ne_mxfp8", "rel_ne_diff", "ci95", "verdict", "samples_per_s"} <= set(document)
    assert document["verdict"] == healthy.drift.verdict
    assert document["environment"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    gemms = {(row["layer"], row["gemm"]) for row in document["drift"]["layers"]}
    converted = [row["name"] for row in document["policy"] if row["precision"] == "mxfp8_rceil"]
    assert {(layer, gemm) for layer in converted for gemm in ("fprop", "wgrad")} <= gemms


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_fails_and_names_layers(fault: str) -> None:
    result = compare(replace(SETTINGS, fault=fault, seeds=1), _silent)
    assert result.drift.verdict == "fail"
    worst = result.drift.unhealthy_layers()[0]
    assert worst.layer in dict(result.mxfp8[0].layers.rows and [(row.name, row) for row in result.mxfp8[0].layers.rows])  # type: ignore[union-attr]
    assert worst.layer in result.drift.summary()
    quantized = mxfp8.quantize(torch.ones(1, 32))
    assert float(quantized.dequantize()[0, 0]) == 1.0, "the fault is gone after the run"


def test_scale_faults_do_what_they_say() -> None:
    x = torch.linspace(-3, 3, 64).reshape(2, 32)
    right = mxfp8.quantize(x)
    with plant("scale_too_large"):
        doubled = mxfp8.ops.quantize(x)
    assert torch.equal(doubled.dequantize(), 2 * right.dequantize())
    with plant("scale_too_small"):
        clipped = mxfp8.ops.quantize(x)
    assert torch.equal(clipped.scale_bytes, right.scale_bytes - 1)
    limit = 448 * 2.0 ** (right.scale_bytes.float() - 128)
    assert torch.equal(
        clipped.dequantize().abs().amax(-1, keepdim=True), torch.minimum(limit, x.abs().amax(-1, keepdim=True))
    )
    with pytest.raises(ValueError, match=r"unknown fault 'nope'; choose one of .*scale_off_by_one"):
        check_fault("nope")


def test_health_floors_tell_formats_apart() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def rows(fmt: str, scale_rule: str) -> list[LayerHealth]:
        q = mxfp8.quantize(x, fmt=fmt, scale_rule=scale_rule)
        return [LayerHealth(layer="l", gemm="fprop", operand="input", sqnr_db=mxfp8.metrics.sqnr_db(x, q.dequantize()))]

    assert unhealthy(rows("e4m3", "rceil")) == []
    assert len(unhealthy(rows("e5m2", "rceil"))) == 1
    one_bad = [
        *rows("e4m3", "rceil") * 9,
        LayerHealth(layer="bad", gemm="dgrad", operand="weight", sqnr_db=float("nan")),
    ]
    assert [row.layer for row in unhealthy(one_bad)] == ["bad"]
    cancelled = LayerHealth(layer="l", gemm="wgrad", operand="output", sqnr_db=3.0)
    assert unhealthy([*rows("e4m3", "rceil"), cancelled]) == [], "a sum that cancels is no fault of a cast"


def test_no_rounding_to_e4m3_is_worse_than_the_floor() -> None:
    # The worst inputs there are: everything just short of a tie at the bottom of its binade.
    x = torch.full((4, 32), 1.0 + 2**-4 - 2**-12)
    x[:, 0] = 1.75  # sets the scale to a power of two that leaves the rest where it is
    q = mxfp8.quantize(x)
    sqnr = mxfp8.metrics.sqnr_db(x[:, 1:], q.dequantize()[:, 1:])
    assert WORST_CAST_DB < sqnr < WORST_CAST_DB + 1.0
    assert sqnr < TYPICAL_CAST_DB


def test_stochastic_recipes_have_lower_floors() -> None:
    robust = replace(SETTINGS, policy=mxfp8.policies.recsys("mxfp8_robust", min_dim=32))
    assert drift_config(robust).worst_cast_db == pytest.approx(WORST_CAST_DB - 6.0206, abs=1e-4)
    assert drift_config(SETTINGS).worst_cast_db == WORST_CAST_DB


def test_a_run_that_blows_up_fails_and_says_where() -> None:
    wild = replace(SETTINGS, seeds=1, train=replace(SETTINGS.train, dense_lr=1e30, weight_decay=0.0, warmup=0.0))
    with pytest.raises(RuntimeError, match=r"BF16 run of seed 0 failed.*step \d+: .*not finite"):
        compare(wild, _silent)


def test_results_do_not_depend_on_the_number_of_workers(healthy: Comparison) -> None:
    jobs = replace(SETTINGS, seeds=1).jobs()
    results, logistic = run_jobs(jobs, DATA, 2, _silent)
    assert results[0].losses == healthy.bf16[0].losses
    assert results[1].losses == healthy.mxfp8[0].losses
    assert np.array_equal(results[1].test.losses, healthy.mxfp8[0].test.losses)  # type: ignore[union-attr]
    assert logistic == healthy.logistic


def test_watching_changes_nothing(healthy: Comparison) -> None:
    job: Job = SETTINGS.jobs()[1]
    assert run_job(replace(job, watched_steps=0)).losses == healthy.mxfp8[0].losses


def test_limit_keeps_the_latest_and_dense_features_are_standardised() -> None:
    whole, part = load_data(DATA), load_data(replace(DATA, limit=100))
    assert part.train.sample_ids.tolist() == whole.train.sample_ids[-100:].tolist()
    assert part.test.sample_ids.tolist() == whole.test.sample_ids.tolist()
    raw = load("synthetic", **dict(DATA.options))
    np.testing.assert_allclose(whole.train.dense.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(whole.train.dense.std(0), 1, atol=1e-5)
    expected = (raw.test.dense - raw.train.dense.mean(0)) / raw.train.dense.std(0)
    np.testing.assert_allclose(standardize(raw).test.dense, expected, rtol=1e-5, atol=1e-6)
