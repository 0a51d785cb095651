"""The dequantisation in front of a BF16 product, one launch for both operands, and the sum of parts after a split along
K: values of every block, format, stride and ragged shape. Runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _gemm_exact
from mxfp8.kernels._device import INTERPRETED

from mxfp8.formats import BLOCK_SHAPES
from mxfp8.tensor import dequantize

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts")

ELEMENTS = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((1, 1), (16, 256), (33, 300), (130, 70), (256, 512))


def operand(rows: int, cols: int, block: tuple[int, int], dtype: torch.dtype) -> _gemm_exact.Operand:
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    scale = torch.randint(0, 256, (-(-rows // block[0]), -(-cols // block[1])), dtype=torch.uint8)
    return codes.view(dtype), scale, block


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, all NaN alike."""
    return torch.where(x.isnan(), torch.tensor(torch.nan, dtype=x.dtype), x).view(
        torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    )


@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_operands_have_the_bits_of_the_reference(block: tuple[int, int], dtype: torch.dtype) -> None:
    """All codes and all scale bytes, on both sides, each with another block and format."""
    other = BLOCK_SHAPES[(BLOCK_SHAPES.index(block) + 1) % len(BLOCK_SHAPES)]
    for i, ((m, k), (n, _)) in enumerate(itertools.product(SHAPES, SHAPES[:3])):
        a, b = operand(m, k, block, ELEMENTS[i % 2]), operand(n, k, other, ELEMENTS[(i // 2) % 2])
        for got, (x, scale, rc) in zip(_gemm_exact.expanded((a, b), dtype), (a, b), strict=True):
            assert scale is not None
            assert rc is not None
            assert torch.equal(bits(got), bits(dequantize(x, scale, rc).to(dtype))), (m, n, k)


def test_strides_and_an_operand_in_high_precision() -> None:
    x, scale, block = operand(70, 96, (1, 32), torch.float8_e4m3fn)
    assert scale is not None
    want = bits(dequantize(x, scale, (1, 32)).bfloat16())
    turned = x.view(torch.uint8).t().contiguous().t().view(x.dtype)
    steps = torch.zeros(3, 140, dtype=torch.uint8).t()[::2]
    steps.copy_(scale)
    high = torch.randn(5, 96)
    for a in ((turned, scale, block), (x, steps, block)):
        got, same = _gemm_exact.expanded((a, (high, None, None)), torch.bfloat16)
        assert torch.equal(bits(got), want)
        assert torch.equal(same, high.bfloat16())
        same, got = _gemm_exact.expanded(((high, None, None), a), torch.bfloat16)
        assert torch.equal(bits(got), want)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_are_added_in_order_and_rounded_once(parts: int) -> None:
    sums, bias = torch.randn(parts, 37, 45), torch.randn(45)
    want = sums[0]
    for part in sums[1:]:
        want = want + part
    out = torch.full((37, 45), torch.nan)
    _gemm_exact.finish(sums, None, out, accumulate=False)
    assert torch.equal(out, want)
    before = torch.randn(37, 45)
    out = before.clone()
    _gemm_exact.finish(sums, bias, out, accumulate=True)
    assert torch.equal(out, want + bias + before)
