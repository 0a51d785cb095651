"""The tables of tiles of the Hopper grouped products: every row of the output in exactly one tile, none in two groups.
Runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import grouped_gemm_hopper, quantize_grouped_hopper
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


@pytest.mark.parametrize("sizes", [[5, 0, 27, 640], [0, 0], [333], [128] * 5, [3, 200] * 40], ids=str)
@pytest.mark.parametrize("height, step", [(128, 128), (192, 256)])
def test_every_row_of_a_weight_gradient_sums_over_its_group(sizes: list[int], height: int, step: int) -> None:
    steps = [-(-size // step) for size in sizes]
    starts = pad(torch.tensor(steps).cumsum(0), (1, 0)).to(torch.int32) * step
    table = grouped_gemm_hopper._divided_table(starts, 300, 128 * 1024, len(sizes), height, step).tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for row, end, within, first, last in table:
        group = row // 300
        assert (end, within) == (300 * (group + 1), row % 300)
        for r in range(row, min(row + height, end)):
            assert (group, r - 300 * group) not in found
            found[group, r - 300 * group] = [first, last]
    assert len(found) == 300 * len(sizes)
    for (group, _), (first, last) in found.items():
        assert (last - first) * 128 == steps[group] * step
        assert first * 128 == starts[group] or (not steps[group] and first == 0)
    if len(sizes) <= grouped_gemm_hopper._RANKED:
        lengths = [last - first for *_, first, last in table]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("starts", [[-7, 900, 2**31 - 1, 3], [500, 400, 300, 200], [0, 2**30, -(2**31), 64]], ids=str)
def test_bad_starts_stay_within_the_rows(starts: list[int]) -> None:
    for *_, first, last in grouped_gemm_hopper._divided_table(
        torch.tensor(starts, dtype=torch.int32), 300, 1024, 3, 128, 128
    ).tolist():
        assert 0 <= first <= last <= 8


@pytest.mark.parametrize("sizes, rows", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("step", [32, 128])
@pytest.mark.parametrize("trailing", [0, 1])
def test_pieces_of_a_cast_are_the_rows_of_the_groups_in_order(
    sizes: list[int], rows: int, trailing: int, step: int
) -> None:
    """What the Hopper cast reads its rows by; the rows after the last group come last, if they are cast at all."""
    offs, G = torch.tensor(sizes).cumsum(0).to(torch.int32), len(sizes)
    pieces = (rows + min(G + trailing, rows) * (step - 1)) // step
    table, starts = torch.full((pieces, 3), -9, dtype=torch.int32), torch.empty(G + 1, dtype=torch.int32)
    groups = 1 << G.bit_length()
    quantize_grouped_hopper._pieces_kernel[(pieces,)](
        offs, table, starts, rows, G, STEP=step, GROUPS=groups, TRAILING=trailing
    )
    want, start, at = [], 0, [0]
    for size in sizes:
        want += [[r, *[min(step, start + size - r)] * 2] for r in range(start, start + size, step)]
        start += size
        at.append(len(want) * step)
    want += [[r, min(step, rows - r), 0] for r in range(start, rows if trailing else start, step)]
    assert table.tolist()[: len(want)] == want
    assert all(counts == [0, 0] for _, *counts in table.tolist()[len(want) :])
    assert starts.tolist() == at
