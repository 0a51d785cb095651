"""The bound on FP8 tensor cores against a model of them: it holds, it is not far off, and a coarser core breaks it."""

import pytest
import torch

from numerics_tests import tolerances


def exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|), far below everything for zero."""
    return torch.where(x == 0, -1000, x.abs().frexp().exponent - 1)


def cut(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    unit = torch.ldexp(torch.ones_like(x), exponents)
    return (x / unit).trunc() * unit


def fp8_product(a: torch.Tensor, b: torch.Tensor, bits: int, chain: int = tolerances.FP8_CHAIN) -> torch.Tensor:
    """``a @ b.T`` as a tensor core does it that aligns the products of an instruction and the running sum to the
    largest exponent and keeps ``bits`` after its leading one, in the sum as well; float32 after each chain."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    for first in range(0, a.shape[1], chain):
        sums = torch.zeros_like(total, dtype=torch.float64)
        for at in range(first, min(first + chain, a.shape[1]), tolerances.FP8_STEP):
            part = slice(at, min(at + tolerances.FP8_STEP, first + chain))
            left, right = a[:, None, part], b[None, :, part]
            largest = torch.maximum((exponent(left) + exponent(right)).amax(-1), exponent(sums))
            aligned = cut(left * right, (largest - bits)[..., None].expand(*largest.shape, left.shape[-1]))
            sums = aligned.sum(-1) + cut(sums, largest - bits)
            sums = cut(sums, exponent(sums) - bits)
        total += sums.float()
    return total


def operand(rows: int, k: int, data: str, fmt: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, k) if data == "normal" else torch.rand(rows, k)
    return (100 * x).clamp(-448, 448).to(fmt).double()


@pytest.mark.parametrize("data", ["normal", "positive"])
@pytest.mark.parametrize("shape", [(64, 64, 31), (33, 17, 160), (5, 40, 1000)], ids=str)
def test_a_core_with_13_bits_stays_within_the_bound(data: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operand(m, k, data, torch.float8_e4m3fn), operand(n, k, data, torch.float8_e5m2)
    share = (fp8_product(a, b, 13) - a @ b.mT).abs() / tolerances.fp8_gemm_error(a, b, torch.float32)
    assert share.max() <= 1
    if data == "positive":
        assert share.max() > 0.3  # all cuts have one sign: a bound three times as large would be idle


def test_a_core_with_9_bits_does_not() -> None:
    a, b = (operand(64, 160, "positive", torch.float8_e4m3fn) for _ in range(2))
    error = (fp8_product(a, b, 9) - a @ b.mT).abs()
    assert (error > tolerances.fp8_gemm_error(a, b, torch.float32)).all()


@pytest.mark.parametrize("chain", [128, 256])
@pytest.mark.parametrize("data", ["normal", "positive"])
def test_the_bound_of_pairs_covers_both_lengths_of_a_chain(data: str, chain: int) -> None:
    a, b = operand(8, 1000, data, torch.float8_e4m3fn), operand(40, 1000, data, torch.float8_e4m3fn)
    error = (fp8_product(a, b, 13, chain) - a @ b.mT).abs()
    assert (error <= tolerances.fp8_pair_error(a, b, torch.float32)).all()


@pytest.mark.parametrize("data", ["normal", "positive"])
@pytest.mark.parametrize("ends", range(8))
def test_the_bound_of_squares_covers_every_division_of_a_slot(data: str, ends: int) -> None:
    """128 of K in one chain, in four, or in any way between: bit i of ``ends`` ends one after step i."""
    a, b = operand(8, 1000, data, torch.float8_e4m3fn), operand(40, 1000, data, torch.float8_e5m2)
    steps = [s for s in range(0, 1000, tolerances.FP8_STEP) if s % 128 == 0 or ends >> (s // 32 % 4 - 1) & 1]
    total = torch.zeros(8, 40)
    for first, last in zip(steps, [*steps[1:], 1000], strict=True):
        total += fp8_product(a[:, first:last], b[:, first:last], 13).float()
    assert len(steps) >= 8 * (1 + ends.bit_count()) - 2
    share = (total - a @ b.mT).abs() / tolerances.fp8_square_error(a, b, torch.float32)
    assert share.max() <= 1
    if data == "positive" and ends == 0:
        assert share.max() > 0.3
