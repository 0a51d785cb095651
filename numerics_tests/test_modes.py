"""What ``mxfp8 info`` says of a recipe's products is what the kernels do and what the saved rows hold."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mxfp8 import dispatch, modes
from mxfp8.formats import BLOCK_SHAPES
from mxfp8.modes import Mode
from mxfp8.recipe import RECIPES, CastSpec, GemmSpec

ROUNDED = 0.0051
"""Ratios are told with two decimals."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
def test_the_told_way_is_the_one_taken(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of blocks, and an operand in high precision on either side: which function the backend then calls."""
    module = importlib.import_module(f"mxfp8.kernels.gemm_{backend}")
    taken: list[str] = []
    for name in ("coalesced", "exact", "_by_torch", "_by_dot_scaled"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_, name=name: taken.append(name))
    ways = {"exact": {Mode.BF16}, "coalesced": {Mode.FP8, Mode.FP8_256, Mode.FP8_32}}
    ways["_by_torch"] = ways["_by_dot_scaled"] = {Mode.BLOCK_SCALED}
    sides: list[tuple[int, int] | None] = [*BLOCK_SHAPES, None]
    for a, b in ((a, b) for a in sides for b in sides if a or b):
        operands: list[Any] = []
        for block in (a, b):
            x = torch.zeros(64, 64, dtype=torch.bfloat16 if block is None else torch.float8_e4m3fn)
            scale = block and torch.zeros(-(-64 // block[0]), -(-64 // block[1]), dtype=torch.uint8)
            operands += [x, scale, block]
        module.gemm(*operands, bias=None, out_dtype=torch.bfloat16)
        spec = GemmSpec(lhs=a and CastSpec(block=a), rhs=b and CastSpec(block=b))
        mode = modes.gemm_mode(spec, backend)
        assert mode in ways[taken.pop()], (a, b)
        if mode is Mode.FP8_256:
            assert a is not None
            assert a[1] == 256


def test_modes_that_no_kernel_decides() -> None:
    for backend in dispatch.BACKENDS:
        assert modes.gemm_mode(GemmSpec(lhs=None, rhs=None), backend) is Mode.HIGH_PRECISION
        assert modes.gemm_mode(GemmSpec(skip=True), backend) is Mode.SKIPPED
    assert modes.gemm_mode(GemmSpec(), "reference") is Mode.FLOAT32
    assert modes.gemm_mode(GemmSpec(), "triton") is Mode.BF16
    with pytest.raises(ValueError, match="unknown backend 'cuda': use one of blackwell, "):
        modes.gemm_mode(GemmSpec(), "cuda")


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_every_recipe_has_a_row_and_every_mode_a_meaning(backend: str) -> None:
    rows = modes.recipe_modes(backend)
    assert [row.recipe for row in rows] == list(RECIPES)
    assert all(mode.meaning for row in rows for mode in (row.fprop, row.dgrad, row.wgrad))


def test_the_backend_is_the_one_that_auto_takes() -> None:
    assert modes.gemm_backend("cpu") == "reference"
    if torch.cuda.is_available():
        assert dispatch.why_not("gemm", modes.gemm_backend("cuda"), "cuda") is None


def saved(root: Path, bench: str) -> list[dict[str, str]]:
    with (root / "bench/results/h200" / f"{bench}.csv").open() as file:
        return list(csv.DictReader(file))


CASES = {Mode.FP8: "g128", Mode.FP8_256: "g256", Mode.FP8_32: "square", Mode.BF16: "exact"}


@pytest.mark.parametrize("mode", CASES)
def test_told_speeds_of_products_are_those_of_the_saved_rows(mode: Mode, repo_root: Path) -> None:
    case, told = CASES[mode], modes.MEASURED["hopper", mode]
    assert told.source.endswith(f"gemm.csv, case {case}")
    rows = [r for r in saved(repo_root, "gemm") if r["case"] == case and r["baseline"] == "cublas_bf16"]
    ratios = [float(r["ratio"]) for r in rows]
    assert told.low == pytest.approx(min(ratios), abs=ROUNDED)
    assert told.high == pytest.approx(max(ratios), abs=ROUNDED)


@pytest.mark.parametrize("recipe, case", [("mxfp8_coalesced", "coalesced"), ("mxfp8_rceil", "exact"),
                                          ("mxfp8_floor", "exact"), ("mxfp8_square", "square")])  # fmt: skip
def test_told_speeds_of_layers_are_those_of_the_saved_rows(recipe: str, case: str, repo_root: Path) -> None:
    rows = {r["shape"]: r for r in saved(repo_root, "linear") if r["case"] == case and r["baseline"] == "bf16"}
    found = [float(rows[f"65536x{size}x{size}"]["ratio"]) for size in modes.LAYER_SIZES]
    assert list(modes.LAYER_RATIOS["hopper", recipe]) == pytest.approx(found, abs=ROUNDED)
