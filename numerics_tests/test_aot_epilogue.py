"""Epilogues of the products, compiled ahead of time: what :mod:`test_aot` asks of every version of a kernel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="tests of Triton kernels")
import triton
import triton.language as tl
from mxfp8.kernels import gemm_hopper, gemm_triton
from mxfp8.kernels._gemm_epilogue import activate_alike
from mxfp8.kernels._gluon import HAVE_GLUON
from mxfp8.kernels.activation_quantize_triton import ACTIVATIONS, activate

from numerics_tests import test_aot
from numerics_tests.test_aot import HOPPER, Make, Version, coalesced, counted, portable_gemm

pytestmark = test_aot.pytestmark

ROWS = {"block": 128, "before": True, "bias": True}
NARROW = {"block": 32, "before": True, "bias": True}
BOTH, PAIRS = ((1, 128), (1, 128)), ((1, 256), (1, 256))


def versions() -> list[Any]:
    table: list[tuple[str, Make]] = []
    act = {name: {"activation": number} for name, number in ACTIVATIONS.items()}
    for tile in ("TALL", "WIDE", "SMALL"):
        make = partial(coalesced, tile)
        table += [
            (f"{tile} silu rows h", partial(make, **ROWS, **act["silu"])),
            (f"{tile} gelu narrow rows h", partial(make, **NARROW, **act["gelu"])),
            (f"{tile} gelu_tanh narrow rows h fp32", partial(make, out="fp32", **NARROW, **act["gelu_tanh"])),
            (f"{tile} rows", partial(make, block=32, rule=3, satfinite=True, fmt=1)),
            (f"{tile} silu rows through bf16", partial(make, block=128, through=1, **act["silu"])),
            (f"{tile} gelu bias", partial(make, bias=True, **act["gelu"])),
            (f"{tile} add", partial(make, out="fp32", add=True)),
            (f"{tile} add bias", partial(make, out="fp32", add=True, bias=True)),
        ]
    for tile in ("TALL", "SMALL"):
        for name, make in (
            (f"{tile} both sides", partial(coalesced, tile, *BOTH)),
            (f"{tile}_PAIRS", partial(coalesced, f"{tile}_PAIRS", (1, 256))),
            (f"{tile}_PAIRS both sides", partial(coalesced, f"{tile}_PAIRS", *PAIRS)),
            (f"{tile} 32x32", partial(coalesced, tile, (32, 32), (32, 32))),
        ):
            table += [
                (f"{name} silu rows", partial(make, block=128, **act["silu"])),
                (f"{name} gelu narrow rows through fp16", partial(make, block=32, through=2, bias=True, **act["gelu"])),
                (f"{name} gelu narrow rows h", partial(make, **NARROW, **act["gelu"])),
                (f"{name} add bias", partial(make, out="fp32", add=True, bias=True)),
            ]
    rows = [(f"gemm_hopper {name}", make) for name, make in table] if HAVE_GLUON else []
    portable = partial(portable_gemm, gemm_triton._gemm_kernel, (64, 128, 4), BIAS=True)
    rows += [(f"gemm_triton {name}", partial(portable, ACT=n)) for name, n in ACTIVATIONS.items() if name != "swiglu"]
    rows.append(("gemm_triton add", partial(portable, ADD=True, out=tl.float32)))
    return [pytest.param(make, id=name) for name, make in rows]


@pytest.mark.parametrize("make", versions())
def test_machine_code(make: Make, tmp_path: Path) -> None:
    test_aot.test_machine_code(make, HOPPER, tmp_path)


@triton.jit
def _activate_kernel(x_ptr, ACT: tl.constexpr, ALIKE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x_ptr + tl.arange(0, 32)
    if ALIKE:
        tl.store(at, activate_alike(tl.load(at), ACT, True))
    else:
        tl.store(at, activate(tl.load(at), ACT, True))


@counted
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "swiglu"])
def test_contraction_does_not_reach_activations(activation: str, tmp_path: Path) -> None:
    """As many fused multiply-adds in a kernel that is compiled with them as in one without."""
    counts = []
    for alike in (False, True):
        version = Version(
            kernel=_activate_kernel, constants={"ACT": ACTIVATIONS[activation], "ALIKE": alike}, instruction={},
            types={"x_ptr": "*fp32"}, options={"num_warps": 1, "enable_fp_fusion": alike},
        )  # fmt: skip
        counts.append(test_aot.build(version, HOPPER, tmp_path).sass.count("FFMA"))
    assert counts[0] == counts[1]


def test_what_an_epilogue_leaves_to_a_second_kernel() -> None:
    """With a split K the kernel writes plain parts. The value before an activation goes by TMA, copies do not."""
    tile = gemm_hopper.SMALL
    for split, before in ((1, True), (1, False), (4, True)):
        wanted = gemm_hopper.Epilogue(bias=True, activation=0, block=32, before=before)
        plan = gemm_hopper.make_plan((512, 512, 8192), (1, 128), (128, 128), wanted, True, 132, (tile, split))
        assert plan.constants["HOW"] == (wanted if split == 1 else gemm_hopper.Epilogue())
        assert plan.staged == (split == 1 and before)
        assert plan.constants["STAGES"] == tile.stages + (not plan.staged)
