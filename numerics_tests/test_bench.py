"""The bench harness: what it saves, what it refuses, and that the two benchmarks run and print what they promise."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

harness = pytest.importorskip("bench._harness", reason="bench/ is not installed: run the suite from a checkout")
check = pytest.importorskip("bench.check", reason="bench/ is not installed: run the suite from a checkout")

ROW = harness.Row(
    bench="quantize",
    case="e4m3 rceil 1x32",
    shape="64x64 bf16",
    metric="time",
    value=100.0,
    unit="us",
    p20=90.0,
    p80=120.5,
    baseline="torchao 0.18.0 to_mx",
    baseline_value=150.0,
    ratio=1.5,
    gpu="some CPU, torch threads: 1",
    torch="2.13.0",
    triton="none",
    commit="abc1234",
    date="2026-11-29",
)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    bare = dataclasses.replace(ROW, case="e4m3 floor 1x32", baseline="not installed", baseline_value=None, ratio=None)
    path = tmp_path / "cpu" / "quantize.csv"
    harness.save_rows(path, [ROW, bare])
    assert harness.read_rows(path) == [ROW, bare]
    assert path.read_text().splitlines()[0] == (
        "bench,case,shape,metric,value,unit,p20,p80,baseline,baseline_value,ratio,gpu,torch,triton,commit,date"
    )


def test_a_new_row_replaces_only_its_own_case(tmp_path: Path) -> None:
    path = tmp_path / "quantize.csv"
    other = dataclasses.replace(ROW, case="e4m3 even 1x32")
    harness.save_rows(path, [ROW, other])
    newer = dataclasses.replace(ROW, value=80.0, commit="def5678")
    harness.save_rows(path, [newer])
    assert harness.read_rows(path) == [other, newer]


def test_a_corrupt_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "quantize.csv"
    harness.save_rows(path, [ROW, ROW])
    path.write_text(path.read_text().replace("120.5", "12o.5"))
    with pytest.raises(ValueError, match=r"quantize\.csv:2.*12o\.5"):
        harness.read_rows(path)
    path.write_text("bench,case\nquantize,x\n")
    with pytest.raises(ValueError, match=r"quantize\.csv: columns must be bench,case,shape"):
        harness.read_rows(path)


def test_ratio_above_one_means_that_ours_is_faster() -> None:
    ours, theirs = (harness.Timing(median_us=m, p20_us=m, p80_us=m) for m in (200.0, 300.0))
    device = harness.resolve_device("cpu")
    case = {"bench": "b", "case": "c", "shape": "s", "baseline": "x", "device": device}
    row = harness.time_row(ours=ours, theirs=theirs, **case)
    assert (row.value, row.baseline_value, row.ratio) == (200.0, 300.0, 1.5)
    assert harness.time_row(ours=ours, theirs=None, **case).ratio is None


def test_variants_are_timed_in_turn_and_prepared_before_each_call() -> None:
    calls: list[str] = []
    variants = [
        harness.Variant(name=n, call=lambda n=n: calls.append(n), before=lambda n=n: calls.append(f"before {n}"))
        for n in ("a", "b")
    ]
    timings = harness.time_variants(variants, harness.resolve_device("cpu"), seconds=0.0)
    assert set(timings) == {"a", "b"}
    assert calls[::2] == [f"before {name}" for name in calls[1::2]]
    order = calls[1::2]
    assert order[:8] == ["a", "b", "a", "b", "a", "b", "b", "a"]  # two rounds of warm-up, then the start rotates
    assert order.count("a") == order.count("b") == harness._WARMUP_ROUNDS + harness._MIN_ROUNDS


def test_percentiles() -> None:
    timing = harness.summary([float(v) for v in range(11)])
    assert (timing.p20_us, timing.median_us, timing.p80_us) == (2.0, 5.0, 8.0)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu or cuda, got 'tpu'"):
        harness.resolve_device("tpu")


def target(**changes: object) -> object:
    fields = {"why": "w", "folder": "cpu", "bench": "quantize", "case": "*", "baseline": "torchao*", "min_ratio": 1.6}
    return check.Target(**fields | changes)


def test_check_finds_the_row_under_its_goal() -> None:
    rows = [("cpu", ROW), ("cpu", dataclasses.replace(ROW, case="other", ratio=1.6))]
    short, unmeasured, met = check.shortfalls([target(), target(bench="linear")], rows)
    assert met == 1
    assert len(short) == 1
    assert "e4m3 rceil 1x32" in short[0]
    assert "ratio 1.5, goal 1.6" in short[0]
    assert len(unmeasured) == 1
    assert "cpu/linear" in unmeasured[0]


def test_targets_with_a_wrong_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    path.write_text('[[target]]\nwhy = "x"\nratio = 1.0\n')
    with pytest.raises(ValueError, match=r"targets\.toml, target 1: keys must be"):
        check.read_targets(path)
    assert check.read_targets(check.TARGETS), "the committed goals can be read"


@pytest.mark.parametrize(
    ("name", "small"),
    [("quantize", {"rows": 64, "columns": 64}), ("linear", {"m": 64, "k": 64, "n": 96, "recipe": "mxfp8_rceil"})],
)
def test_benchmark_runs_and_ends_with_json(
    name: str, small: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module(f"bench.{name}").main(device="cpu", save=False, seconds=0.0, **small)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bench"] == name
    assert tuple(last["rows"][0]) == harness.COLUMNS
    assert all(row["value"] > 0 for row in last["rows"])


def test_a_wrong_cast_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The check before timing can fail: a cast of something else is caught, and nothing printed."""
    quantize = importlib.import_module("bench.quantize")
    right = quantize.mxfp8.quantize
    monkeypatch.setattr(quantize.mxfp8, "quantize", lambda x, scale_rule: right(x * 1.02, scale_rule=scale_rule))
    with pytest.raises(RuntimeError, match=r"rceil: SQNR .* dB, expected about 31\.53 dB|bytes differ"):
        quantize.main(device="cpu", save=False, seconds=0.0, rows=64, columns=64)
    assert capsys.readouterr().out == ""
