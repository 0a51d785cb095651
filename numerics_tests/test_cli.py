"""The ``mxfp8`` command: what it prints and writes, and that wrong input is one line and exit code 2."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import mxfp8
from mxfp8 import PrecisionPolicy, Rule, policies
from mxfp8.cli import _load_policy, app
from mxfp8.modes import LAYER_RATIOS

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    return model, (torch.randn(16, 64) for _ in range(9)), lambda m, x: m(x).square().mean()

def pair():
    return make()[:2]

def broken():
    model, _, loss_fn = make()
    return model, [], loss_fn

number = 3
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in a folder that holds ``factories.py``."""
    (tmp_path / "factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "factories", raising=False)

    def invoke(*argv: str) -> Result:
        return CliRunner().invoke(app, argv)

    return invoke


def test_info_shows_versions_and_every_cell_of_the_dispatch_table(run) -> None:
    done = run("info")
    assert done.exit_code == 0, done.output
    assert mxfp8.__version__ in done.output
    for cell in mxfp8.explain():
        assert any(cell.op in line and cell.backend in line for line in done.output.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it tunes")
def test_tune_says_why_it_cannot(run) -> None:
    done = run("tune", "64", "128", "128")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: nothing to tune: ")
    assert len(done.stderr.splitlines()) == 1


def test_info_says_how_each_recipe_multiplies(run) -> None:
    done = run("info", "--backend", "hopper")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    last = json.loads(lines[-1])
    assert last["gemm_backend"] == "hopper"
    assert last["recipes"]["mxfp8_coalesced"] == {"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8"}
    assert last["recipes"]["mxfp8_rceil_wgrad_with_hp"]["wgrad"] == "not cast"
    row = next(line.split() for line in lines if "mxfp8_coalesced" in line)
    assert row == ["mxfp8_coalesced", "fp8", "fp8", "fp8", *(f"{r:.2f}" for r in LAYER_RATIOS["hopper", row[0]])]
    assert any(line.startswith("fp8 ") and "every 128 of K" in line and "gemm.csv" in line for line in lines)


def test_info_ends_in_json_and_shows_no_speed_that_was_not_measured(run) -> None:
    done = run("info")
    last = json.loads(done.output.splitlines()[-1])
    assert last["versions"]["mxfp8"] == mxfp8.__version__
    assert "gemm/reference" in last["runs"]
    if last["gemm_backend"] == "reference":
        assert "relative to BF16" not in done.output
    wrong = run("info", "--backend", "cuda")
    assert wrong.exit_code == 2
    assert "unknown backend 'cuda'" in wrong.output


def test_audit_prints_writes_and_ends_in_json(run, tmp_path: Path) -> None:
    done = run("audit", "factories:make", "--batches", "2", "--json", "out/a.json", "--html", "out/a.html")
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "out" / "a.json").read_text())
    assert [(r["layer"], r["gemm"], r["calls"]) for r in written["rows"]] == [
        ("0", "fprop", 2),
        ("0", "wgrad", 2),
        *(("2", gemm, 2) for gemm in ("fprop", "dgrad", "wgrad")),
    ]
    lowest = min(written["rows"], key=lambda r: r["sqnr_db"])
    last = json.loads(done.output.splitlines()[-1])
    assert last == {
        "gemms": 5,
        "worst": f"{lowest['layer']}.{lowest['gemm']}",
        "worst_sqnr_db": lowest["sqnr_db"],
    }
    html = (tmp_path / "out" / "a.html").read_text()
    assert html.startswith("<!doctype html>")
    assert 'src="http' not in html


def test_worst_limits_what_is_printed_and_not_what_is_written(run, tmp_path: Path) -> None:
    done = run("audit", "factories:make", "--worst", "1", "--json", "a.json")
    assert sum("mxfp8_rceil" in line for line in done.output.splitlines()) == 1
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 5


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_policy_from_a_file(run, tmp_path: Path, suffix: str) -> None:
    policy = PrecisionPolicy(rules=[Rule("2", "bf16", reason="kept by file")], default="mxfp8_square")
    (tmp_path / f"p.{suffix}").write_text(policy.to_json() if suffix == "json" else policy.to_yaml())
    done = run("describe", "factories:make", "--policy", f"p.{suffix}")
    assert done.exit_code == 0, done.output
    assert "kept by file" in done.output
    assert "mxfp8_square" in done.output


def test_describe_with_the_recsys_policy_says_why(run) -> None:
    done = run("describe", "factories:make")
    assert done.exit_code == 0, done.output
    assert "smaller_than=1024: its casts" in done.output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("audit", "factories"), "write module:function"),
        (("audit", "nowhere:make"), "No module named 'nowhere'"),
        (("audit", "factories:maek"), "has no function 'maek'"),
        (("audit", "factories:number"), "has no function 'number'"),
        (("audit", "factories:pair"), "a tuple of 2: a factory returns (model, batches, loss_fn)"),
        (("audit", "factories:broken"), "there are no batches to audit"),
        (("audit", "factories:make", "--policy", "mxfp9"), "unknown policy 'mxfp9': use recsys, bf16, mxfp8_rceil"),
        (("audit", "factories:make", "--policy", "missing.yaml"), "No such file"),
        (("audit", "factories:make", "--policy", "recsys"), "no layer would be converted"),
        (("describe", "factories:make", "--policy", "bad.json"), "bad.json: "),
        (("describe", "factories:make", "--policy", "typo.yaml"), "rule 0 ('hed' -> bf16) covers nothing"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run, tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "typo.yaml").write_text("rules: [{target: hed, recipe: bf16}]")
    done = run(*argv)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_debug_shows_where_it_arose(run) -> None:
    done = run("audit", "factories:broken", "--debug")
    assert isinstance(done.exception, ValueError)


def test_recsys_is_the_built_in_policy() -> None:
    assert _load_policy("recsys") == policies.recsys()
    assert _load_policy(None) is None
