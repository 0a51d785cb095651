"""Kernels as operators of torch: compiled regions see one node each, with the right shapes, strides and bits."""

import pytest
import torch

import mxfp8

pytest.importorskip("triton")
from mxfp8.kernels._device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py with TRITON_INTERPRET=1")


def casts(x: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = mxfp8.quantize_both(x, backend="triton")
    noisy = mxfp8.quantize(x, rounding="stochastic", seed=5, backend="triton")
    square = mxfp8.quantize(x, axis=-2, block=(32, 32), fmt="e5m2", backend="triton")
    return [t for q in (rows, columns, noisy, square) for t in (q.qdata.view(torch.uint8), q.scale_bytes)]


def test_a_compiled_region_has_the_bits_and_strides_of_eager() -> None:
    x = torch.randn(70, 96)
    for got, want in zip(torch.compile(casts, fullgraph=True, backend="aot_eager")(x), casts(x), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_each_cast_is_one_node() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nodes.extend(str(n.target) for n in graph.graph.nodes if "mxfp8" in str(n.target))
        return graph

    torch.compile(casts, fullgraph=True, backend=backend)(torch.randn(70, 96))
    assert nodes == ["mxfp8.quantize_both", "mxfp8.quantize", "mxfp8.quantize"]


def test_a_product_is_one_node_too() -> None:
    a, b = mxfp8.quantize(torch.randn(33, 64), backend="reference"), torch.randn(17, 64)

    def product(b: torch.Tensor) -> torch.Tensor:
        return mxfp8.gemm(a, mxfp8.quantize(b, backend="triton"), out_dtype=torch.float32, backend="triton")

    got = torch.compile(product, fullgraph=True, backend="aot_eager")(b)
    assert torch.equal(got, product(b))


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_operators_obey_the_rules_of_torch(rows: int) -> None:
    x = torch.randn(rows, 96)
    torch.library.opcheck(torch.ops.mxfp8.quantize_both, (x, "e4m3", [1, 32], [1, 32], "rceil", False, "triton"))
    rest = ("e4m3", [1, 32], "rceil", "nearest", [], None, False, "triton")
    torch.library.opcheck(torch.ops.mxfp8.quantize, (x, -2, *rest))
