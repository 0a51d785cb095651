"""The table of tiles of the Hopper grouped product: every row of the output in exactly one tile, none in two groups.
Runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import grouped_gemm_hopper
from mxfp8.kernels._device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts")


CASES = {
    "ragged": ([5, 0, 27, 640], 700),
    "trailing_rows": ([32, 0, 64, 1], 1600),
    "all_empty": ([0, 0, 0], 7),
    "one": ([333], 333),
    "whole_tiles": ([128, 256, 384, 192], 960),
    "many": ([3] * 70, 256),
}


@pytest.mark.parametrize("sizes, rows", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("height", [128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_every_row_is_in_one_tile_of_its_group(sizes: list[int], rows: int, height: int, dtype: torch.dtype) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(dtype)
    owner = [g for g, size in enumerate(sizes) for _ in range(size)]
    owner += [-1] * (rows - len(owner))
    found: list[int | None] = [None] * rows
    for row, end, group in grouped_gemm_hopper._table(offs, rows, len(sizes), height).tolist():
        for r in range(row, min(row + height, end)):
            assert found[r] is None
            found[r] = group
    assert found == owner
