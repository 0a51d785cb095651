"""The portable Hadamard kernel against the reference, bit for bit, and as an operator of torch."""

import itertools

import pytest
import torch

import mxfp8

pytest.importorskip("triton")
from mxfp8.kernels._device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py with TRITON_INTERPRET=1")

LAYOUTS = {
    "whole": lambda: torch.randn(64, 256),
    "tails": lambda: torch.randn(70, 145),
    "transposed": lambda: torch.randn(96, 40).t(),
    "slice": lambda: torch.randn(40, 160)[:, 1:100],
    "batch": lambda: torch.randn(2, 3, 33, 65),
    "merged": lambda: torch.randn(3, 2, 33, 40).transpose(0, 1),
    "one": lambda: torch.randn(1, 1),
    "no_rows": lambda: torch.randn(0, 64),
}


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_the_reference(name: str, axis: int) -> None:
    for size, dtype, seed in ((16, torch.float32, 3), (32, torch.bfloat16, 2**64 - 1), (128, torch.float16, 0)):
        x = LAYOUTS[name]().to(dtype)
        got = mxfp8.hadamard(x, axis, size, seed, backend="triton")
        want = mxfp8.hadamard(x, axis, size, seed, backend="reference")
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.int32), want.contiguous().view(torch.int32))


def test_size_64_vectors_and_float64() -> None:
    for x in (torch.randn(200), torch.randn(5, 100, dtype=torch.float64)):
        want = mxfp8.hadamard(x, size=64, seed=5, backend="reference")
        assert torch.equal(mxfp8.hadamard(x, size=64, seed=5, backend="triton"), want)


def test_nothing_but_its_own_run_becomes_nan() -> None:
    x = torch.randn(4, 96)
    x[1, 40] = torch.nan
    bad = mxfp8.hadamard(x, backend="triton").isnan()
    assert bad[1, 32:64].all()
    assert int(bad.sum()) == 32


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_the_transform_and_then_the_cast(name: str, axis: int) -> None:
    """Every block, size and rounding in turn, with the step of random bits from the host and in a tensor."""
    turns = itertools.product(((1, 32), (1, 128), (1, 256), (32, 32), (128, 128)), (16, 32, 64, 128))
    for i, (block, size) in enumerate(turns):
        if (i + len(name)) % 3:
            continue
        x = LAYOUTS[name]().to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
        rest = {"fmt": ("e4m3", "e5m2")[i % 2], "block": block, "scale_rule": ("rceil", "even")[i // 2 % 2]}
        if i % 4 < 2:
            step = torch.tensor(7) if i % 2 else 7
            key = mxfp8.RngKey(seed=2**63 + 5, step=step, row_offset=3, col_offset=(0, 5, 2**32 - 8)[i // 4 % 3])
            rest |= {"rounding": "stochastic", "seed": key}
        rotated = mxfp8.hadamard(x, axis, size, 2**64 - 9, backend="reference")
        want = mxfp8.quantize(rotated, axis, **rest, backend="reference")
        for backend in ("triton", "reference"):
            got = mxfp8.quantize(x, axis, **rest, hadamard=size, hadamard_seed=2**64 - 9, backend=backend)
            assert (got.shape, got.block, got.axis) == (want.shape, block, axis)
            assert torch.equal(got.scale_bytes, want.scale_bytes), (backend, block, size)
            assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8)), (backend, block, size)


def test_special_values_reach_their_runs_and_blocks() -> None:
    x = torch.randn(40, 192)
    x[1, 40], x[7, 100], x[9, 150] = torch.nan, torch.inf, 3e38
    for satfinite in (False, True):
        for block, axis in itertools.product(((1, 32), (32, 32)), (-1, -2)):
            rest = {"axis": axis, "block": block, "satfinite": satfinite, "hadamard": 64}
            got, want = (mxfp8.quantize(x, **rest, backend=name) for name in ("triton", "reference"))
            assert torch.equal(got.scale_bytes, want.scale_bytes)
            assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))


@pytest.mark.parametrize("name", ["hadamard", "hadamard_quantize"])
def test_one_node_in_a_graph(name: str) -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        nodes.extend(str(n.target) for n in graph.graph.nodes if "mxfp8" in str(n.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def net(x: torch.Tensor) -> torch.Tensor:
        if name == "hadamard":
            return mxfp8.hadamard(x, -2, seed=2**63 + 1, backend="triton")
        key = mxfp8.RngKey(seed=3, step=torch.tensor(5))
        rest = {"rounding": "stochastic", "seed": key, "backend": "triton"}
        return mxfp8.quantize(x, -2, **rest, hadamard=32, hadamard_seed=2**63 + 1).qdata.view(torch.uint8)

    x = torch.randn(40, 48)
    got = torch.compile(net, backend=backend, fullgraph=True)(x)
    assert nodes == [f"mxfp8.{name}"]
    assert torch.equal(got, net(x))
    torch.library.opcheck(torch.ops.mxfp8.hadamard, (x, -1, 32, [1, 0], "triton"))
    cast = ("e4m3", [1, 32], "rceil", "nearest", [], None, False, "triton")
    torch.library.opcheck(torch.ops.mxfp8.hadamard_quantize, (x, -2, 32, [1, 0], *cast))
