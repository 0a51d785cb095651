"""The GPU cases of ``bench.linear``, run on a CPU with tiny shapes: what they print, check and refuse."""

import json

import pytest
import torch
from torch import nn

import mxfp8

cuda_cases = pytest.importorskip("bench._linear_cuda", reason="bench/ is not installed: run the suite from a checkout")
linear = pytest.importorskip("bench.linear", reason="bench/ is not installed: run the suite from a checkout")

SIZES = cuda_cases.Sizes(rows=512, widths=(128, 256), small=128, mlp=(128, 256), depth=2, groups=3)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flush of the cache, no compiler, and bytes that autograd keeps in place of an allocator's statistics."""
    monkeypatch.setattr(cuda_cases._harness, "_FLUSH_BYTES", 1)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(
        cuda_cases, "peak_bytes", lambda build, x: cuda_cases.kept_bytes(build(), x.detach().requires_grad_())
    )


def test_every_case_gives_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = cuda_cases.cases(CPU, 0.0, False, sizes=SIZES)
    found = {(row.case, row.shape, row.baseline, row.unit) for row in rows}
    squares = [f"512x{width}x{width}" for width in SIZES.widths]
    expected = {(case, shape, "bf16", "us") for case in cuda_cases.RECIPES for shape in squares}
    expected |= {(case, shape, "graphed", "us") for case in ("eager", "grouped_eager") for shape in squares}
    expected |= {("grouped", shape, "bf16", "us") for shape in squares}
    expected |= {("small", "512x128x128", "bf16", "us"), ("mlp_eager", "512x128x256", "graphed", "us")}
    expected |= {(case, "512x128x256", "bf16", "us") for case in ("mlp_fused", "mlp_fused_kept")}
    expected |= {("memory_kept", "512x128x128", "bf16", "MiB"), ("memory_peak_mlp6", "512x128x256", "bf16", "MiB")}
    assert found == expected
    assert {row.case for row in rows} == set(cuda_cases.CASES)
    assert all(row.value > 0 and row.ratio and row.ratio > 0 for row in rows)
    shown = capsys.readouterr().err
    assert all(f"{row.case} {row.shape}" in shown for row in rows), "a row is shown as soon as it is measured"


def test_memory_rows_say_how_much_less_is_kept() -> None:
    kept, peak = cuda_cases.cases(CPU, 0.0, False, ("memory_kept", "memory_peak_mlp6"), cuda_cases.Sizes(
        rows=4096, widths=(128,), mlp=(128, 512), depth=3))  # fmt: skip
    assert (kept.metric, peak.metric) == ("kept", "peak")
    # 2 bytes an element against 1 + 1/128^2, and a weight of 128 x 128 in FP8
    assert kept.ratio == pytest.approx(2 * 4096 / (4096 * (1 + 2**-14) + 128 * (1 + 2**-14)), rel=2e-3)
    assert peak.ratio > 1.75  # x and H against x, N, H and A


def test_chosen_cases_only() -> None:
    rows = cuda_cases.cases(CPU, 0.0, False, ("eager", "mlp_fused"), SIZES)
    assert [row.case for row in rows] == ["mlp_fused", "eager", "eager"]
    with pytest.raises(ValueError, match="unknown case 'mlp': use some of coalesced, square"):
        cuda_cases.cases(CPU, 0.0, False, ("mlp",), SIZES)


def test_a_peer_that_fails_says_why_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> nn.Module:
        raise ImportError("no such kernel")

    def peers(weight: torch.Tensor) -> dict[str, object]:
        n, k = weight.shape
        return {"bad": broken, "good": lambda: nn.Linear(k, n, bias=False, dtype=weight.dtype)}

    monkeypatch.setattr(cuda_cases, "peer_layers", peers)
    sizes = cuda_cases.Sizes(rows=64, widths=(64,))
    rows = cuda_cases.cases(CPU, 0.0, True, ("coalesced", "exact"), sizes)
    assert [(row.case, row.baseline) for row in rows] == [
        ("coalesced", "bf16"), ("exact", "bf16"), ("coalesced", "good"), ("exact", "good"),
    ]  # fmt: skip
    assert "bad at 64x64x64 left out: ImportError: no such kernel" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["coalesced", "grouped", "mlp_fused"])
def test_a_wrong_result_is_not_timed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cuda_cases.fwd_bwd

    def wrong(module: nn.Module, *args: object) -> list[torch.Tensor]:
        found = right(module, *args)
        ours = isinstance(module, mxfp8.MXFP8Linear | mxfp8.MXFP8GroupedLinear | mxfp8.MXFP8MLP)
        return [*found[:-1], found[-1] * 1.1] if ours else found

    monkeypatch.setattr(cuda_cases, "fwd_bwd", wrong)
    with pytest.raises(RuntimeError, match=rf"{case}.*: result \d has SQNR"):
        cuda_cases.cases(CPU, 0.0, False, (case,), SIZES)


def test_the_command_passes_on_what_it_was_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = cuda_cases.cases
    seen: list[object] = []

    def small(device: torch.device, seconds: float, peers: bool, chosen: tuple[str, ...]) -> list[object]:
        seen.extend([device.type, peers, chosen])
        return cases(CPU, 0.0, False, ("memory_kept",), SIZES)

    monkeypatch.setattr(cuda_cases, "cases", small)
    monkeypatch.setattr(linear._harness, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(linear._harness, "device_name", lambda device: "NVIDIA H200")
    linear.main(device="cuda", save=False, seconds=0.0, peers=True, cases="eager, mlp_fused")
    assert seen == ["cuda", True, ("eager", "mlp_fused")]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["unit"] == "MiB"
