"""The command line: last line JSON, exit codes, one-line errors that name the offender."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from gem_model.cli import app

SMALL = ["--data", "synthetic", "--option", "num_samples=640", "--history", "4", "--batch-size", "256"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["compare", "--data", "nope"], ["unknown dataset 'nope'", "ml-100k"]),
        (["compare", "--config", "huge"], ["unknown configuration 'huge'", "tiny"]),
        (["compare", "--recipe", "nope"], ["unknown recipe 'nope'", "mxfp8_rceil"]),
        (["compare", "--policy", "nope"], ["unknown policy 'nope'", "recsys"]),
        (["compare", "--policy", "missing.json"], ["missing.json"]),
        (["compare", "--plant", "nope"], ["unknown fault 'nope'", "e5m2_floor"]),
        (["compare", "--device", "tpu"], ["unknown device 'tpu'", "cuda"]),
        (["compare", "--seeds", "0"], ["seeds must be at least 1, got 0"]),
        (["compare", "--history", "1000"], ["history is 1000"]),
        (["compare", "--option", "holdout"], ["option 'holdout' is not KEY=VALUE"]),
        (["compare", "--data", "synthetic", "--option", "nope=1"], ["nope"]),
        (["compare", "--tolerance", "-1"], ["tolerance", "-1"]),
        (["compare", "--data", "ml-100k", "--path", "nowhere"], ["nowhere"]),
        (["train", "--precision", "fp4"], ["unknown precision 'fp4'", "bf16"]),
        (["train", *SMALL, "--resume", "missing.pt"], ["no checkpoint at missing.pt"]),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_compare_ends_with_one_json_line(tmp_path: Path) -> None:
    result = _run("compare", *SMALL, "--seeds", "1", "--workers", "0", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout.strip().splitlines()[-1])
    assert {"ne_bf16", "ne_mxfp8", "rel_ne_diff", "ci95", "verdict", "samples_per_s", "ne_logistic"} <= set(figures)
    assert figures["verdict"] == "inconclusive"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"report.html", "report.json"}
    assert "mxfp8 seed 0: step 2/2" in result.stderr


def test_train_stops_resumes_and_scores_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    command = ["train", *SMALL, "--precision", "mxfp8", "--recipe", "mxfp8_robust", "--epochs", "2"]
    whole = _run(*command, "--out", str(tmp_path / "whole"))
    assert whole.exit_code == 0, whole.stderr
    first = _run(*command, "--out", str(tmp_path / "parts"), "--stop-after", "1")
    assert json.loads(first.stdout.strip().splitlines()[-1])["step"] == 1
    checkpoint = str(tmp_path / "parts" / "checkpoint.pt")
    second = _run(*command, "--out", str(tmp_path / "parts"), "--resume", checkpoint)
    ends = [json.loads(result.stdout.strip().splitlines()[-1]) for result in (whole, second)]
    assert ends[0]["step"] == ends[1]["step"] == 4
    assert ends[0]["ne"] == ends[1]["ne"]
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")]
    assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items())
