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
