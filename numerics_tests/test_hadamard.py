"""The random Hadamard transform: its bits, and that it changes no product."""

import pytest
import torch

import mxfp8
from mxfp8.reference.hadamard import HADAMARD_SIZES
from mxfp8.reference.random import random_signs
from numerics_tests import oracles, tolerances

sizes = pytest.mark.parametrize("size", HADAMARD_SIZES)


def signs_of(seed: int, size: int) -> list[float]:
    return [1.0 - 2.0 * (oracles.random_word(seed, 0, 0, 0, i) >> 31) for i in range(size)]


@sizes
def test_signs_are_the_top_bits_of_the_words(size: int, device: torch.device) -> None:
    for seed in (0, 1, 2**64 - 1):
        assert random_signs(seed, size, device).tolist() == signs_of(seed, size)


@sizes
def test_bits_equal_a_scalar_float32_loop(size: int, device: torch.device) -> None:
    x = torch.randn(3, 2 * size) * torch.exp2(torch.randint(-20, 20, (3, 2 * size)))
    got = mxfp8.hadamard(x.to(device), size=size, seed=9).cpu()
    for row, out in zip(x, got, strict=True):
        for start in (0, size):
            run = slice(start, start + size)
            assert out[run].tolist() == oracles.hadamard_run(row[run].tolist(), signs_of(9, size))


@sizes
def test_equals_the_sylvester_matrix(size: int, device: torch.device) -> None:
    """The transform of the identity is diag(signs) H / sqrt(n), and H is Sylvester's by its recursion."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    want = (torch.tensor(signs_of(4, size))[:, None] * matrix) * torch.tensor(size**-0.5, dtype=torch.float32)
    got = mxfp8.hadamard(torch.eye(size, device=device), size=size, seed=4).cpu()
    assert torch.equal(got.double(), want)
    bound = tolerances.hadamard_error(size, 1.0)
    assert (got.double() @ got.double().mT - torch.eye(size)).abs().max() <= bound


@sizes
@pytest.mark.parametrize("axis", [-1, -2])
def test_products_are_preserved(size: int, axis: int, device: torch.device) -> None:
    """With a tail: both operands are padded with zeros, which add nothing to the product."""
    a, b = torch.randn(5, 2 * size + 7, device=device), torch.randn(6, 2 * size + 7, device=device)
    if axis == -2:
        a, b = a.mT, b.mT
    ha, hb = (mxfp8.hadamard(x, axis, size, seed=2).double() for x in (a, b))
    assert ha.shape[axis] == 3 * size
    if axis == -2:
        a, b, ha, hb = a.mT, b.mT, ha.mT, hb.mT
    entry = tolerances.hadamard_error(size, max(a.abs().max().item(), b.abs().max().item()))
    bound = entry * (ha.abs().sum(1)[:, None] + hb.abs().sum(1)[None] + 3 * size * entry)
    assert ((ha @ hb.mT - a.double() @ b.double().mT).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 70, 66, device=device).to(dtype)
    want = mxfp8.hadamard(x.float())
    assert want.dtype == torch.float32
    assert torch.equal(mxfp8.hadamard(x), want)
    assert torch.equal(mxfp8.hadamard(x.mT, -2).mT, want)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0), (2, 0, 40), (0,)], ids=str)
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    padded = (*shape[:-1], -(-shape[-1] // 32) * 32)
    assert mxfp8.hadamard(torch.empty(shape, device=device)).shape == padded
    if len(shape) > 1:
        padded = (*shape[:-2], -(-shape[-2] // 32) * 32, shape[-1])
        assert mxfp8.hadamard(torch.empty(shape, device=device), -2).shape == padded


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ValueError, "size is 8: use 16, 32, 64 or 128", lambda x: mxfp8.hadamard(x, size=8)),
        (ValueError, "axis is 0", lambda x: mxfp8.hadamard(x, 0)),
        (ValueError, "1-D", lambda x: mxfp8.hadamard(x[0], -2)),
        (ValueError, "seed is -1", lambda x: mxfp8.hadamard(x, seed=-1)),
        (TypeError, "not torch.int64", lambda x: mxfp8.hadamard(x.long())),
        (TypeError, "not list", lambda x: mxfp8.hadamard([1.0])),
    ],
)
def test_bad_arguments_are_named(error, match: str, call) -> None:
    with pytest.raises(error, match=match):
        call(torch.zeros(4, 32))


@sizes
@pytest.mark.parametrize("axis", [-1, -2])
def test_in_front_of_a_cast(axis: int, size: int, device: torch.device) -> None:
    """The bits of the two steps, whatever the cast, and the shape of the first."""
    for block, rounding in (
        ((1, 32), "nearest"),
        ((1, 128), "stochastic"),
        ((32, 32), "nearest"),
        ((1, 256), "stochastic"),
    ):
        x = torch.randn(70, 145, device=device).bfloat16()
        rest = {"block": block, "rounding": rounding, "seed": mxfp8.RngKey(seed=3, step=4, stream=5)}
        want = mxfp8.quantize(mxfp8.hadamard(x, axis, size, 7), axis, **rest)
        got = mxfp8.quantize(x, axis, **rest, hadamard=size, hadamard_seed=7)
        assert (
            got.shape
            == want.shape
            == tuple(-(-n // size) * size if i == axis % 2 else n for i, n in enumerate(x.shape))
        )
        assert torch.equal(got.scale_bytes, want.scale_bytes)
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))


def test_bad_sizes_in_front_of_a_cast(device: torch.device) -> None:
    for size in (0, 8, 48, 256):
        with pytest.raises(ValueError, match=f"Hadamard size is {size}: use 16, 32, 64 or 128"):
            mxfp8.quantize(torch.randn(4, 64, device=device), hadamard=size)


def test_a_cast_of_nothing(device: torch.device) -> None:
    for shape, axis, want in (((0, 64), -1, (0, 64)), ((3, 0), -1, (3, 0)), ((0, 5), -2, (0, 5)), ((7,), -1, (32,))):
        assert mxfp8.quantize(torch.randn(shape, device=device), axis, hadamard=32).shape == want
