"""The properties of ``mxfp8 validate``: our reference has them all, peers differ as agreed, broken casts are found."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mxfp8.cli import app
from mxfp8.dispatch import BACKENDS, why_not
from numerics_tests.validation.__main__ import main
from numerics_tests.validation.agreed import AGREED, agreed_for
from numerics_tests.validation.case import DIFFERS, FAIL, NOT_APPLICABLE, PASS, Agreed, Property, judge
from numerics_tests.validation.certificate import PROPERTIES, certify, document
from numerics_tests.validation.implementation import NAMES, Capabilities, UnavailableError, load
from numerics_tests.validation.own import Backend

CPU = torch.device("cpu")

BY_NAME = {prop.name: prop for prop in PROPERTIES}
PEERS = ("torchao", "ml_dtypes", "gfloat")
each_property = pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)


def smallest(implementation: object, name: str) -> str:
    """The smallest failing input of a property that must fail."""
    (outcome,) = judge(BY_NAME[name], implementation, ())  # type: ignore[arg-type]
    assert outcome.result == FAIL, outcome
    return outcome.smallest


@each_property
def test_reference_has_every_property(prop: Property, device: torch.device) -> None:
    (outcome,) = judge(prop, load("reference", device), ())
    assert outcome.result == PASS, outcome


@each_property
@pytest.mark.parametrize("peer", PEERS)
def test_peer_differs_as_agreed_and_no_further(peer: str, prop: Property) -> None:
    """An agreed difference that no longer shows fails too, so the table follows the installed release."""
    pytest.importorskip(peer, reason=f"{peer} is not installed")
    entries = agreed_for(peer, prop.name, CPU)
    outcomes = judge(prop, load(peer), entries)
    if entries:
        assert [(o.result, o.reason) for o in outcomes] == [(DIFFERS, entry.reason) for entry in entries]
        assert all(o.smallest for o in outcomes)
    else:
        assert [o.result for o in outcomes] in ([PASS], [NOT_APPLICABLE]), outcomes


def test_what_torchao_does_is_printed_minimally() -> None:
    """The known differences of release 0.18, each by one block of one or two values."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    peer = load("torchao")
    assert smallest(peer, "scale_rceil_limits").endswith(": scale byte 0x76, expected 0x77")
    (clips,) = judge(BY_NAME["rceil_never_clips"], peer, agreed_for("torchao", "rceil_never_clips", CPU))
    assert clips.smallest.endswith(" 0x3fe00001 (1.75000012): maximum 1.75000012 above M times the scale, 1.75")
    half, flushed = (
        o.smallest for o in reversed(judge(BY_NAME["byte_zero"], peer, agreed_for("torchao", "byte_zero", CPU)))
    )
    assert half.endswith("element 0x76 with scale byte 0x00, expected 0x7e with 0x00")
    assert flushed.endswith("element 0x00 with scale byte 0x00, expected 0x7e with 0x00")
    infinities = [o.smallest for o in judge(BY_NAME["inf_block"], peer, agreed_for("torchao", "inf_block", CPU))]
    assert [f"scale byte 0x{byte:02x}" in text for byte, text in zip((254, 247), infinities, strict=True)] == [True] * 2


def test_why_ml_dtypes_has_no_scale_rule() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    assert np.array(1 / 448, np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8) == 0x76
    assert "0x76 where rceil has 0x77" in load("ml_dtypes").capabilities.lacks["scale"]


class Broken(Backend):
    """The reference with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__("reference", torch.device("cpu"))
        self.fault = fault

    def quantize(self, x, fmt, rule, block=(1, 32), axis=-1):
        if self.fault == "epsilon":
            x = torch.where(x == 0, x, x.sign() * x.abs().clamp(min=1e-20))
        if self.fault == "bf16_first":
            x = x.bfloat16()
        scales, codes = super().quantize(x, fmt, "floor" if self.fault == "floor" else rule, block, axis)
        if self.fault == "lost_sign":
            codes = torch.where(codes == 0x80, 0, codes)
        if self.fault == "raises":
            raise ValueError("no such luck")
        return scales, codes


@pytest.mark.parametrize(
    "fault, name, text",
    [
        ("floor", "rceil_never_clips", "0x3fe00001 (1.75000012): maximum 1.75000012 above"),
        ("floor", "scale_ceil_bf16", "0x3f7f0000 (0.99609375): scale byte 0x76, expected 0x77"),
        ("epsilon", "no_epsilon", "element 0xec with scale byte 0x36, expected 0xeb with 0x36"),
        ("bf16_first", "scale_rceil_limits", "scale byte 0x76, expected 0x77"),
        ("lost_sign", "zero_block", "elements 0x00 0x00, expected 00, 00 80"),
    ],
)
def test_a_planted_fault_is_found_and_shown_small(fault: str, name: str, text: str) -> None:
    found = smallest(Broken(fault), name)
    assert text in found
    assert found.count(" 0x") <= 6, f"not minimal: {found}"


def test_an_error_of_the_implementation_is_a_failure_with_its_words() -> None:
    (outcome,) = judge(BY_NAME["zero_block"], Broken("raises"), ())
    assert (outcome.result, outcome.reason) == (FAIL, "raised ValueError: no such luck")


def test_a_vanished_and_a_new_difference_both_fail() -> None:
    gone = Agreed(implementation="reference", property="zero_block", reason="made up")
    (outcome,) = judge(BY_NAME["zero_block"], load("reference"), (gone,))
    assert outcome.result == FAIL
    assert "take it off the list: made up" in outcome.reason
    narrow = Agreed(implementation="x", property="zero_block", reason="floor", covers=lambda case: case.rule == "floor")
    known, new = judge(BY_NAME["zero_block"], Broken("lost_sign"), (narrow,))
    assert (known.result, new.result) == (DIFFERS, FAIL)
    assert "rceil" in new.smallest


def test_agreed_entries_name_properties_and_implementations() -> None:
    assert {entry.property for entry in AGREED} <= set(BY_NAME)
    assert {entry.implementation for entry in AGREED} <= set(NAMES)
    assert len(BY_NAME) == len(PROPERTIES)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("dot_scaled", "needs a CUDA GPU of compute capability 8.0"),
        ("scaled_mm", "needs a CUDA GPU of compute capability 10.0"),
        ("transformer_engine", "needs a CUDA GPU of compute capability 10.0"),
    ],
)
def test_what_cannot_run_says_why(name: str, reason: str) -> None:
    with pytest.raises(UnavailableError, match=reason):
        load(name, "cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_runs_or_says_why(name: str, device: torch.device) -> None:
    """Its missing ops are those of the dispatch table, with the same reasons."""
    reasons = {op: why_not(op, name, device) for op in ("quantize", "gemm")}
    if all(reasons.values()):
        with pytest.raises(UnavailableError) as caught:
            load(name, device)
        assert all(reason in str(caught.value) for reason in reasons.values() if reason)
    else:
        lacks = load(name, device).capabilities.lacks
        assert {op: lacks.get(op) for op in reasons} == reasons


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown implementation 'torchoa': use one of reference, "):
        load("torchoa")
    with pytest.raises(ValueError, match="unknown feature 'speed'"):
        Capabilities(lacks={"speed": "none"})


def test_certificate_is_written_and_ends_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gfloat", reason="gfloat is not installed")
    monkeypatch.setattr("numerics_tests.validation.certificate.PROPERTIES", [BY_NAME["inf_block"], BY_NAME["tails"]])
    files = ["--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")]
    assert main(["--implementation", "gfloat", "--device", "cpu", *files]) == 0
    counts = {PASS: 0, DIFFERS: 1, NOT_APPLICABLE: 1, FAIL: 0}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"ok": True, "implementations": {"gfloat": counts}}
    (written,) = json.loads((tmp_path / "c.json").read_text())["implementations"]
    assert written["counts"] == counts
    assert "0x7f800000" in written["outcomes"][0]["smallest"]
    assert {"gfloat", "torch", "python"} <= set(written["versions"])
    assert "0x7f800000" in (tmp_path / "c.html").read_text()


def test_a_failure_shows_in_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numerics_tests.validation.certificate.PROPERTIES", [BY_NAME["zero_block"]])
    certificate = certify(Broken("lost_sign"))
    assert not certificate.ok
    assert document([certificate])["ok"] is False


def test_command_passes_its_options_and_the_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fake_run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=1)

    monkeypatch.setattr(subprocess, "run", fake_run)
    options = ["--implementation", "torchao", "--implementation", "reference", "--device", "cpu", "--json", "c.json"]
    assert CliRunner().invoke(app, ["validate", *options]).exit_code == 1
    assert commands == [[sys.executable, "-m", "numerics_tests.validation", "--seed", "0", *options]]


def test_what_is_not_available_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--implementation", "scaled_mm", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: not available here: scaled_mm on cpu")


def test_the_guide_lists_every_property_and_difference(repo_root: Path) -> None:
    text = (repo_root / "docs" / "validation.md").read_text()
    assert [
        p.name for p in PROPERTIES if f"| `{p.name}` | {p.statement.replace('|', chr(92) + '|')} |" not in text
    ] == []
    peers = tuple(f"| {name} | `" for name in {entry.implementation for entry in AGREED})
    rows = [line for line in text.splitlines() if line.startswith(peers)]
    assert len(rows) == len(AGREED)
    for entry, row in zip(AGREED, rows, strict=True):
        assert row.startswith(f"| {entry.implementation} | `{entry.property}` | ")
        assert row.endswith(f" | {entry.reason} |")
