"""The grouped GEMM kernels: each group is as if it were alone, exactly or within the derived bound, whatever its size,
its strides and what is in memory.

Where they run: as ``test_gemm_kernels.py``.
"""

from __future__ import annotations

import pytest
import torch

from mxfp8 import dispatch
from numerics_tests import tolerances
from numerics_tests.operands import HIGH, OUT, Backend, Operand, available, ends, integers, operand, spread_out

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

GROUPS = {
    "ragged": ([5, 0, 27, 64], 96),
    "trailing_rows": ([32, 0, 64, 1], 160),
    "all_empty": ([0, 0, 0], 7),
    "one": ([33], 33),
    "first_and_last_empty": ([0, 31, 1, 0], 70),
    "each_less_than_a_tile": ([1, 2, 3], 7),
}


@pytest.fixture(params=["triton", "hopper"])
def grouped(request: pytest.FixtureRequest) -> Backend:
    """A backend of ``grouped_gemm`` and the device where it runs; skips with dispatch's reason where it cannot."""
    return available(request, "grouped_gemm")


def check_groups(
    backend: Backend, a: Operand, b: Operand, sizes: list[int], offs: torch.Tensor, dtype: torch.dtype
) -> None:
    """Integers: each group as if it were alone, exactly; zeros after the last, where NaN was in memory before."""
    poison = torch.full((a.x.shape[0], b.x.shape[1]), torch.nan, dtype=dtype, device=backend[1])
    del poison
    out = dispatch.resolve("grouped_gemm", *backend)(*a.parts, *b.parts, offs=offs, out_dtype=dtype)
    want = torch.zeros(a.x.shape[0], b.x.shape[1], dtype=torch.float64, device=backend[1])
    start = 0
    for matrix, size in zip(b.exact, sizes, strict=True):
        want[start : start + size] = a.exact[start : start + size] @ matrix.mT
        start += size
    assert out.dtype == dtype
    assert torch.equal(out, want.float().to(dtype))


@pytest.mark.parametrize("sizes, rows", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "1x256-128x128", "1x256-1x32", "32x32-bf16",
                                  "fp16-1x32", "fp32-32x32"])  # fmt: skip
def test_groups_are_exact(grouped: Backend, pair: str, sizes: list[int], rows: int) -> None:
    kinds = pair.split("-")
    for i, (n, k) in enumerate(((24, 80), (130, 33))):
        values = integers(rows, k, device=grouped[1])
        if kinds[0] in HIGH:
            values[sum(sizes) :] = torch.nan  # rows of no group must not show
        a = operand(values, kinds[0])
        b = operand(integers(len(sizes), n, k, device=grouped[1]), kinds[1], "e5m2")
        check_groups(grouped, a, b, sizes, ends(sizes, grouped[1], (torch.int32, torch.int64)[i]), OUT[i])


def test_groups_are_within_the_derived_bound(grouped: Backend) -> None:
    sizes, offs = [17, 0, 63, 9], ends([17, 0, 63, 9], grouped[1])
    a = operand(torch.randn(100, 260, device=grouped[1]) * 100, "1x32", "e4m3", 119, 136)
    b = operand(torch.randn(4, 40, 260, device=grouped[1]) * 100, "32x32", "e4m3", 119, 136)
    out = dispatch.resolve("grouped_gemm", *grouped)(*a.parts, *b.parts, offs=offs, out_dtype=torch.float32)
    start = 0
    for matrix, size in zip(b.exact, sizes, strict=True):
        rows = a.exact[start : start + size]
        got = out[start : start + size].double()
        assert ((got - rows @ matrix.mT).abs() <= tolerances.gemm_error(rows, matrix, torch.float32)).all()
        start += size


@pytest.mark.parametrize("G, N, K", [(3, 0, 64), (3, 24, 0), (0, 24, 64)])
def test_empty_dimensions_of_groups(grouped: Backend, G: int, N: int, K: int) -> None:
    a, b = (operand(integers(*s, device=grouped[1]), "1x32") for s in ((7, K), (G, N, K)))
    offs = torch.full((G,), 7, dtype=torch.int32, device=grouped[1])
    check_groups(grouped, a, b, [7, 0, 0][:G], offs, torch.bfloat16)


def test_strides_of_groups_never_matter(grouped: Backend) -> None:
    sizes = [40, 3, 60]
    a, b = (operand(integers(*s, device=grouped[1]), "1x32") for s in ((110, 96), (3, 70, 96)))
    for x in (b.x, b.x.mT.contiguous().mT, b.x.transpose(0, 1).contiguous().transpose(0, 1)):
        scale = b.scale.mT.contiguous().mT  # type: ignore[union-attr]
        offs = torch.stack([ends(sizes, grouped[1])] * 2, 1)[:, 1]
        check_groups(grouped, Operand(spread_out(a.x, "steps"), a.scale, a.block), Operand(x, scale, b.block), sizes,
                     offs, torch.float32)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["1x128-128x128", "1x256-128x128", "1x128-1x128"])
def test_groups_of_many_tiles(grouped: Backend, pair: str) -> None:
    """More tiles than programs, groups that end inside of a tile, empty ones, and rows of no group at the end."""
    kinds, sizes = pair.split("-"), [3000, 1, 0, 4100, 700, 0, 2049]
    for rows, n, k in ((sum(sizes), 520, 640), (sum(sizes) + 9000, 384, 272)):
        a = operand(integers(rows, k, device=grouped[1]), kinds[0])
        b = operand(integers(len(sizes), n, k, device=grouped[1]), kinds[1])
        for dtype in (torch.bfloat16, torch.float32):
            check_groups(grouped, a, b, sizes, ends(sizes, grouped[1]), dtype)


@pytest.mark.gpu
def test_a_graph_replays_with_other_groups(grouped: Backend) -> None:
    """Offsets stay on the device: capture would fail on a read by the host, and a replay takes the new ones."""
    a, b = (operand(integers(*s, device=grouped[1]), "1x32") for s in ((1000, 256), (3, 200, 256)))
    run = dispatch.resolve("grouped_gemm", *grouped)
    offs = ends([100, 200, 300], grouped[1])
    run(*a.parts, *b.parts, offs=offs, out_dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*a.parts, *b.parts, offs=offs, out_dtype=torch.float32)
    offs.copy_(ends([0, 999, 1], grouped[1]))
    graph.replay()
    assert torch.equal(out, run(*a.parts, *b.parts, offs=offs, out_dtype=torch.float32))
    check_groups(grouped, a, b, [0, 999, 1], offs, torch.float32)


@pytest.mark.gpu
def test_many_groups(grouped: Backend) -> None:
    sizes = torch.randint(0, 200, (100,)).tolist()
    a, b = (operand(integers(*s, device=grouped[1]), "1x32") for s in ((sum(sizes) + 77, 256), (100, 96, 256)))
    check_groups(grouped, a, b, sizes, ends(sizes, grouped[1]), torch.bfloat16)
