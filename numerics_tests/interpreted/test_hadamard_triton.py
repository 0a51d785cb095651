"""The portable Hadamard kernel against the reference, bit for bit, and as an operator of torch."""

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


def test_one_node_in_a_graph() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        nodes.extend(str(n.target) for n in graph.graph.nodes if "mxfp8" in str(n.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def net(x: torch.Tensor) -> torch.Tensor:
        return mxfp8.hadamard(x, -2, seed=2**63 + 1, backend="triton")

    x = torch.randn(40, 48)
    got = torch.compile(net, backend=backend, fullgraph=True)(x)
    assert nodes == ["mxfp8.hadamard"]
    assert torch.equal(got, net(x))
    torch.library.opcheck(torch.ops.mxfp8.hadamard, (x, -1, 32, [1, 0], "triton"))
