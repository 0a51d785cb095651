"""The Blackwell GEMM compiled ahead of time, without a GPU, for compute capabilities 10.0 and 12.0: the product is the
tensor core's own of MX operands, elements come by TMA, nothing spills, shared memory suffices."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import gemm_blackwell
from mxfp8.kernels._device import INTERPRETED

from mxfp8.formats import BLOCK_SHAPES
from numerics_tests.test_aot import POINTER, TOOLS, Version, build

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="an interpreted process cannot compile"),
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton brings no cuobjdump"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHARED_MEMORY = {10: 227 * 1024, 12: 99 * 1024}  # what one block may use
MAIN_LOOP = re.compile(r"kind::mxf8f6f4\.block_scale")
RELOADED = re.compile(r"\bLDL\b")

VERSIONS = {  # blocks of a and b, their dtypes, the output's, bias, columns a multiple of 16
    "1x32 1x32": ((1, 32), (1, 32), E4M3, E4M3, torch.bfloat16, False, True),
    "1x32 1x32 ragged": ((1, 32), (1, 32), E4M3, E4M3, torch.bfloat16, False, False),
    "1x128 128x128 bias": ((1, 128), (128, 128), E4M3, E4M3, torch.bfloat16, True, False),
    "32x32 32x32 e5m2 e4m3": ((32, 32), (32, 32), E5M2, E4M3, torch.float16, False, True),
    "1x256 1x32 fp32": ((1, 256), (1, 32), E5M2, E5M2, torch.float32, True, False),
}


def version(name: str, capability: int) -> Version:
    a_block, b_block, a, b, out, bias, even = VERSIONS[name]
    tile = gemm_blackwell.TILES[capability // 10]
    elements = {E4M3: "fp8e4nv", E5M2: "fp8e5"}
    constants = gemm_blackwell.constants_of(tile, a, a_block, b, b_block, out, bias)
    return Version(
        kernel=gemm_blackwell._dot_scaled_kernel,
        constants={**constants, "sa_r": 1, "sb_r": 1},  # as casts write their scales
        types={
            "a_desc": f"tensordesc<{elements[a]}[{tile.rows}, {tile.depth}]>",
            "b_desc": f"tensordesc<{elements[b]}[{tile.cols}, {tile.depth}]>",
            "bias_ptr": "*fp32", "out_ptr": POINTER[constants["OUT"]],
        },
        odd=("M", "K", "sa_k", "sb_k") if even else ("M", "N", "K", "sa_k", "sb_k"),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
        instruction={},
    )  # fmt: skip


@pytest.mark.parametrize("name, capability", list(itertools.product(VERSIONS, (100, 120))))
def test_machine_code_of_the_product(name: str, capability: int, tmp_path: Path) -> None:
    made = version(name, capability)
    built = build(made, capability, tmp_path)
    assert MAIN_LOOP.search(built.ptx), "the tensor core's own product of MX operands is missing"
    assert not re.search(r"mma\S*\.bf16|tf32", built.ptx)
    assert "cp.async.bulk.tensor.2d" in built.ptx
    assert not RELOADED.search(built.sass)
    if capability < 120:  # where ptxas also writes a zero to the stack, which nothing reads
        assert built.stack == 0
    assert built.shared <= SHARED_MEMORY[capability // 10]


@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_machine_code_of_the_scale_layout(block: tuple[int, int], tmp_path: Path) -> None:
    kernel = gemm_blackwell._tile_kernel
    constants = {"BLOCK_R": block[0], "BLOCK_C": block[1], "s_r": 1}
    built = build(Version(kernel=kernel, constants=constants, instruction={}), 100, tmp_path)
    assert built.stack == 0
    assert not RELOADED.search(built.sass)


def test_sizes_and_strides_of_one_compile(tmp_path: Path) -> None:
    """Triton hands them to a kernel as Python ints."""
    made = version("1x32 1x32 ragged", 100)
    ones = dict.fromkeys(("N", "sa_r", "sa_k", "sb_r", "sb_k"), 1)
    build(replace(made, constants=made.constants | ones), 100, tmp_path)
    ones = dict.fromkeys(("R", "C", "s_r", "s_c"), 1) | {"BLOCK_R": 1, "BLOCK_C": 32}
    build(Version(kernel=gemm_blackwell._tile_kernel, constants=ones, instruction={}), 100, tmp_path)


def test_a_spill_would_show(tmp_path: Path) -> None:
    """Half as many warps for the same tile, on purpose: what the test above reads does see it."""
    built = build(replace(version("1x128 128x128 bias", 120), options={"num_warps": 4}), 120, tmp_path)
    assert RELOADED.search(built.sass)
