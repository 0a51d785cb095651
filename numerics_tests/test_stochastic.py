"""Stochastic rounding: the generator, the bits it gives, that they are unbiased and independent of tiling."""

import itertools

import numpy as np
import pytest
import torch

import mxfp8
from mxfp8.formats import BLOCK_SHAPES
from mxfp8.reference.random import philox, random_bits
from mxfp8.rng import RngKey, get_step, set_step, step_tensor
from numerics_tests import oracles, tolerances

# Known answers of Random123 1.09, philox4x32-10: key, counter, output.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def codes(q: mxfp8.MXTensor) -> torch.Tensor:
    return q.qdata.view(torch.uint8)


def stochastic(x: torch.Tensor, key: RngKey | int, **kw) -> mxfp8.MXTensor:
    return mxfp8.quantize(x, rounding="stochastic", seed=key, **kw)


@pytest.mark.parametrize("key, counter, words", KNOWN_ANSWERS)
def test_philox_known_answers(key, counter, words, device: torch.device) -> None:
    assert oracles.philox4x32_10(key, counter) == words
    tensors = tuple(torch.tensor(c, dtype=torch.int64, device=device) for c in counter)
    assert tuple(int(w) for w in philox(key[0] | key[1] << 32, tensors)) == words


@pytest.mark.parametrize(
    "key",
    [
        RngKey(seed=0),
        RngKey(seed=2**64 - 1, step=2**32 + 5, stream=2**32 - 1),
        RngKey(seed=0xDEADBEEF << 16, step=7, stream=3, row_offset=100, col_offset=3),
        RngKey(seed=1, row_offset=2**32 - 2, col_offset=2**32 - 6),  # positions wrap at 2^32
    ],
)
def test_random_words_are_those_of_the_definition(key: RngKey, device: torch.device) -> None:
    got = random_bits(key, 5, 11, device).cpu()
    for r, c in itertools.product(range(5), range(11)):
        want = oracles.random_word(key.seed, int(key.step), key.stream, key.row_offset + r, key.col_offset + c)
        assert int(got[r, c]) == want


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_bits_are_those_of_the_definition(fmt: str, device: torch.device) -> None:
    """Against exact fractions: random data, every kind of neighbour, subnormals, and values on the grid, which stay."""
    element = oracles.ELEMENTS[fmt]
    x = torch.randn(16, 64) * torch.exp2(torch.randint(-24, 1, (16, 64)))
    x[0, :32] = torch.tensor(element.finite[-32:] / element.max)
    x[1, :8] = torch.tensor([0.0, -0.0, 2.0**-100, -(2.0**-149), 1.0, -1.0, 2.0**-9, 3 * 2.0**-20])
    q = stochastic(x.to(device), RngKey(seed=11, step=4, stream=9), fmt=fmt)
    bytes_, got = q.scale_bytes.cpu().numpy().astype(int), codes(q).cpu().numpy()
    scaled = np.ldexp(x.double().numpy(), 127 - bytes_.repeat(32, axis=1))
    for r, c in np.ndindex(got.shape):
        word = oracles.random_word(11, 4, 9, r, c)
        assert got[r, c] == oracles.round_stochastic(scaled[r, c], word, fmt), (r, c, scaled[r, c])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_word_equal_to_the_distance_rounds_down(fmt: str, device: torch.device) -> None:
    """Place values of the lowest gap exactly where their own word is: up only from the next distance on."""
    element, key = oracles.ELEMENTS[fmt], RngKey(seed=8)
    words = random_bits(key, 256, 64, device)
    words = torch.where(words % 256 == 0, words, 0)  # a float32 holds these distances, and the next, exactly
    words[:, ::32] = 0
    assert (words > 0).sum() > 20
    for up in (0, 1):
        x = (words + 256 * up).double() * 2.0**-32 * float(element.finite[1])
        x[:, ::32] = element.max  # scale 1
        got = codes(stochastic(x, key, fmt=fmt))[words > 0]
        assert got.tolist() == [up] * len(got)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_mean_of_many_roundings_is_the_value(fmt: str, device: torch.device) -> None:
    """Bound from the variance of one rounding, gap^2 p (1 - p); nearest rounding fails it by orders of magnitude."""
    element, n = oracles.ELEMENTS[fmt], 2**16
    low = [(element.finite[0], 0.3), (element.finite[2], 0.9)]  # subnormals
    for below, distance in [*low, (1.0, 0.25), (1.0, 0.01), (element.finite[-3], 0.5)]:
        index = int(np.searchsorted(element.finite, below))
        gap = float(element.finite[index + 1] - element.finite[index])
        value = float(below + distance * gap)
        x = torch.full((n, 2), value)
        x[:, 0] = element.max  # scale 1
        mean = stochastic(x.to(device), 5, fmt=fmt).dequantize(torch.float64)[:, 1].mean().item()
        exact = float(np.float32(value))
        bound = tolerances.stochastic_mean_error((exact - float(below)) / gap, gap, n)
        assert abs(mean - exact) <= bound
        assert abs(mxfp8.quantize(x[:1], fmt=fmt).dequantize()[0, 1].item() - exact) > bound


def test_signs_round_alike(device: torch.device) -> None:
    x = torch.randn(32, 32, device=device)
    assert torch.equal(codes(stochastic(x, 1)) ^ 0x80, codes(stochastic(-x, 1)))


def test_saturates_like_nearest(device: torch.device) -> None:
    x = torch.tensor([[511.0, -511.0] + [0.0] * 30], device=device)
    q = stochastic(x, 1, scale_rule="floor")
    assert codes(q)[0, :2].tolist() == [0x7E, 0xFE]
    q = stochastic(torch.tensor([[torch.nan, 1.0]], device=device), 1)
    assert codes(q).tolist() == [[0x7F, 0x7F]]
    assert q.scale_bytes.tolist() == [[255]]


def test_same_key_same_bits_and_every_part_of_the_key_counts(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    key = RngKey(seed=5, step=6, stream=7)
    base = codes(stochastic(x, key))
    assert torch.equal(base, codes(stochastic(x.clone(), RngKey(seed=5, step=torch.tensor(6), stream=7))))
    others = [
        RngKey(seed=4, step=6, stream=7),
        RngKey(seed=5 + 2**32, step=6, stream=7),
        RngKey(seed=5, step=7, stream=7),
        RngKey(seed=5, step=6, stream=8),
        key.at(1),
        key.at(0, 1),
    ]
    results = [base, *(codes(stochastic(x, other)) for other in others)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))
    torch.rand(3)  # torch's generators have no part in it
    assert torch.equal(base, codes(stochastic(x, key)))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_shards_have_the_bits_of_the_whole(block: tuple[int, int], axis: int, device: torch.device) -> None:
    """Row shards, column shards and tiles on block boundaries, each quantised alone under its offset."""
    rows, cols = block if axis == -1 else block[::-1]
    x = torch.randn(4 * rows + 1, 2 * cols + 3, device=device)
    key = RngKey(seed=3, step=2, stream=1, row_offset=10, col_offset=7)
    whole = stochastic(x, key, axis=axis, block=block)
    for step_r, step_c in ((rows, x.shape[1]), (x.shape[0], cols), (rows, cols), (3 * rows, 2 * cols)):
        for r, c in itertools.product(range(0, x.shape[0], step_r), range(0, x.shape[1], step_c)):
            tile = stochastic(x[r : r + step_r, c : c + step_c], key.at(r, c), axis=axis, block=block)
            assert torch.equal(codes(tile), codes(whole)[r : r + step_r, c : c + step_c])


def test_leading_dimensions_are_flattened_into_rows(device: torch.device) -> None:
    x = torch.randn(2, 3, 5, 40, device=device)
    assert torch.equal(codes(stochastic(x, 1)).view(30, 40), codes(stochastic(x.view(30, 40), 1)))


def test_strides_never_matter(device: torch.device) -> None:
    x = torch.randn(48, 80, device=device)
    assert torch.equal(codes(stochastic(x.mT.contiguous().mT, 1)), codes(stochastic(x, 1)))


def test_the_step_counts_optimiser_steps_and_can_be_set() -> None:
    before = get_step()
    try:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        set_step(41)
        torch.optim.SGD([weight], lr=0.1).step()
        assert (get_step(), int(step_tensor())) == (42, 42)
        with pytest.raises(ValueError, match="step is -1"):
            set_step(-1)
        assert get_step() == 42
    finally:
        set_step(before)


def test_training_on_fake_tensors_leaves_nothing_behind() -> None:
    """Memory estimates run whole training steps under a fake mode; the counter must not trip them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = get_step()
    try:
        with FakeTensorMode():
            layer = mxfp8.MXFP8Linear(64, 64, recipe="mxfp8_robust")
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            layer(torch.randn(3, 64)).sum().backward()
            optimizer.step()
        assert get_step() == before + 1
    finally:
        set_step(before)


@pytest.mark.parametrize(
    "values, name",
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": 0, "stream": 2**32}, "stream"),
        ({"seed": 0, "row_offset": -1}, "row_offset"),
        ({"seed": 0, "col_offset": 2**32}, "col_offset"),
        ({"seed": 0, "step": 1.5}, "step"),
        ({"seed": 0, "step": None}, "step"),
    ],
)
def test_bad_keys_are_named(values, name: str) -> None:
    with pytest.raises(ValueError, match=rf"RngKey\.{name} is"):
        RngKey(**values)
