"""The Hadamard kernel compiled for Hopper and Blackwell without a GPU: nothing spills, butterflies stay in registers
and shuffles or go through little shared memory, and contiguous rows are read 16 bytes at a time."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import hadamard_triton
from mxfp8.kernels._device import INTERPRETED

from numerics_tests.test_aot_optim import compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted process cannot compile")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("axis", [-1, -2])
def test_machine_code(axis: int, size: int, capability: int, tmp_path: Path) -> None:
    bn, bl = hadamard_triton.tile(axis, size)
    ones = {"x_l": 1, "y_l": 1} if axis == -1 else {"x_n": 1, "y_n": 1}
    constants = {"BN": bn, "BL": bl, "SIZE": size, "FACTOR": size**-0.5, **ones}
    types = {"x_ptr": "*bf16", "y_ptr": "*fp32", "seed_lo": "i64", "seed_hi": "i64"}
    built = compiled(hadamard_triton._kernel, types, constants, capability, 4, tmp_path)
    assert built["spilled"] == 0
    assert built["registers"] <= 128
    assert built["shared"] <= 64 * 1024
    if axis == -1:
        assert built["wide_loads"] > 0
    assert built["wide_stores"] > 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block, size", [((1, 32), 32), ((1, 32), 128), ((1, 128), 16), ((1, 256), 32), ((32, 32), 32),
                                         ((128, 128), 128)])  # fmt: skip
def test_machine_code_before_a_cast(block, size: int, axis: int, noisy: bool, capability: int, tmp_path: Path) -> None:
    if noisy and block == (128, 128):
        pytest.skip("goes in two passes")
    bn, bl, warps = hadamard_triton.cast_tile(block, size, axis, noisy)
    ones = {"x_l": 1, "q_l": 1, "s_n": 1} if axis == -1 else {"x_n": 1, "q_l": 1, "s_n": 1}
    constants = {
        "BN": bn, "BL": bl, "NB": block[0], "LB": block[1], "SIZE": size, "FACTOR": size**-0.5, "FMT": 0, "RULE": 0,
        "SATFINITE": False, "ROUNDING": 2 if noisy else 0, "DOWN": axis == -2, "HARDWARE": True, **ones,
    }  # fmt: skip
    words = ("signs_lo", "signs_hi", "seed_lo", "seed_hi", "step", "stream", "row_offset", "col_offset")
    types = {"x_ptr": "*bf16", "q_ptr": "*u8", "s_ptr": "*u8", "step_ptr": "*i64", **dict.fromkeys(words, "i64")}
    built = compiled(hadamard_triton._cast_kernel, types, constants, capability, warps, tmp_path)
    assert built["spilled"] == 0
    assert built["registers"] * warps * 32 <= 64 * 1024
    assert built["shared"] <= 128 * 1024
