"""The GEMM kernels: exact where results can be, within derived bounds elsewhere, for every pair of
blocks and formats, ragged shapes, strides and special values.

On a GPU the compiled kernels run. On a CPU the portable ones run where Triton's interpreter is on, which
``test_interpreter.py`` arranges in a process of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import mxfp8
from mxfp8 import dispatch
from numerics_tests import tolerances
from numerics_tests.operands import (
    BLOCKS,
    ELEMENTS,
    HIGH,
    OUT,
    Backend,
    Operand,
    available,
    integers,
    operand,
    spread_out,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

KINDS = [*BLOCKS, *HIGH]
PAIRS = [(a, b) for a, b in itertools.product(KINDS, KINDS) if a in BLOCKS or b in BLOCKS]
ROWS, DEPTHS = (1, 17, 64, 129), (1, 32, 33, 96, 160, 512)
SHAPES = list(itertools.product(ROWS, ROWS, DEPTHS))
FORMATS = list(itertools.product(ELEMENTS, ELEMENTS))
pairs = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
block_pairs = pytest.mark.parametrize("pair", [p for p in PAIRS if not set(p) & set(HIGH)], ids="-".join)


@pytest.fixture(params=["triton", "hopper"])
def plain(request: pytest.FixtureRequest) -> Backend:
    """A backend of ``gemm`` and the device where it runs; skips with dispatch's reason where it cannot."""
    return available(request, "gemm")


def gemm(
    backend: Backend, a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    run = dispatch.resolve("gemm", *backend)
    out: torch.Tensor = run(*a.parts, *b.parts, bias=bias, out_dtype=out_dtype)
    assert (out.shape, out.dtype) == ((a.x.shape[0], b.x.shape[0]), out_dtype)
    return out


def bound(
    backend: Backend, a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """FP8 tensor cores may be taken by Hopper's backend only."""
    bias64 = None if bias is None else bias.double()
    if backend[0] != "hopper":
        return tolerances.gemm_error(a.exact, b.exact, out_dtype, bias64)
    return tolerances.hopper_error(a.exact, b.exact, (a.block, b.block), out_dtype, bias64)


def may_use_fp8(backend: Backend, *blocks: tuple[int, int] | None) -> bool:
    """Whether scales reach over 128 of K on both sides, or belong to squares."""
    coarse = all(block is not None and block[1] >= tolerances.FP8_CHAIN for block in blocks)
    return backend[0] == "hopper" and (coarse or blocks == (tolerances.SQUARE, tolerances.SQUARE))


# Exact results


@pairs
def test_integers_are_exact(plain: Backend, pair: tuple[str, str]) -> None:
    """Each pair of blocks takes its share of shapes, formats, output dtypes and biases; together they take all."""
    at = PAIRS.index(pair)
    for i, (m, n, k) in list(enumerate(SHAPES))[at :: len(PAIRS)]:
        (fa, fb), out_dtype = FORMATS[(i + at) % 4], OUT[(i + at) % 3]
        a = operand(integers(m, k, device=plain[1]), pair[0], fa)
        b = operand(integers(n, k, device=plain[1]), pair[1], fb)
        bias = torch.randint(-9, 10, (n,), device=plain[1]).to(OUT[i % 3]) if (i + at) % 2 else None
        want = a.exact @ b.exact.mT + (0 if bias is None else bias.double())
        out = gemm(plain, a, b, out_dtype, bias)
        assert torch.equal(out, want.float().to(out_dtype)), (m, n, k, fa, fb, out_dtype, bias is not None)


@block_pairs
def test_each_block_has_its_own_scale(plain: Backend, pair: tuple[str, str]) -> None:
    """Elements of one, scales that differ widely: a scale taken from a neighbour shows in the sum of its powers of two.
    Rows and columns have one non-zero in each 32 of K, so that sums stay exact."""
    k = 288
    sparse = (torch.arange(k, device=plain[1]) % 32 == 7).float()
    a = operand(sparse.expand(131, k).contiguous(), pair[0], low=121, high=134)
    b = operand(torch.ones(34, k, device=plain[1]), pair[1], low=124, high=131)
    assert torch.equal(gemm(plain, a, b, torch.float32).double(), a.exact @ b.exact.mT)


def test_pairs_of_slots_whose_scales_agree_or_not(plain: Backend) -> None:
    """256 of K by 128 columns after another, with one byte of b for both halves, with two, or NaN in one of them, in
    every order, and K that ends in the first half of a pair: a promotion may span 256 of K only in the first case."""
    m, k = 70, 9 * 128
    a = operand(integers(m, k, device=plain[1]), "1x256")
    b = operand(integers(300, k, device=plain[1]), "128x128")
    assert b.scale is not None
    pattern = [[0, 0, 3, 3, 1, 2, 0, 0, 4], [1, 0, 2, 2, 3, 1, 1, 0, 3], [0, 0, 0, 0, 0, 0, 0, 0, 0]]
    b.scale.copy_(torch.tensor(pattern, device=plain[1]) + 125)
    want = a.exact @ b.exact.mT
    assert torch.equal(gemm(plain, a, b, torch.float32).double(), want)
    b.scale[1, 6] = 255
    out = gemm(plain, a, b, torch.float32)
    assert out[:, 128:256].isnan().all()
    assert torch.equal(out[:, :128].double(), want[:, :128])
    assert torch.equal(out[:, 256:].double(), want[:, 256:])


def test_steps_of_squares_whose_scales_agree_or_not(plain: Backend) -> None:
    """Four steps of 32 of K in every pattern of equal and other scales, for all rows and columns or for some: which of
    them share a sum in the tensor core is decided by them, and NaN in one is not lost to that."""
    patterns = [[(i >> j) & 1 for j in range(3)] for i in range(8)]
    steps = [n for p in patterns for n in (0, *torch.tensor(p).cumsum(0).tolist())]
    a = operand(integers(200, 32 * len(steps), device=plain[1]), "32x32")
    b = operand(integers(300, 32 * len(steps), device=plain[1]), "32x32", "e5m2")
    assert a.scale is not None
    assert b.scale is not None
    for scale, other in ((a.scale, b.scale), (b.scale, a.scale)):
        scale.copy_(torch.tensor(steps, device=plain[1]) + 124)
        other.fill_(126)
        for part in (slice(None), slice(2, 3)):
            other[part, 5::7] = 128
            assert torch.equal(gemm(plain, a, b, torch.float32).double(), a.exact @ b.exact.mT)
    b.scale[4, 9] = 255
    out = gemm(plain, a, b, torch.float32)
    assert out[:, 128:160].isnan().all()
    rest = [*range(128), *range(160, 300)]
    assert torch.equal(out[:, rest].double(), (a.exact @ b.exact.mT)[:, rest])


EXTREMES = [  # bytes of a and b, factor and format of the elements: -3 to 3 times the factor
    (0, 254, 0.5, "e4m3"),  # 2**-127 times 2**127
    (254, 0, 0.5, "e4m3"),
    (254, 60, 0.5, "e4m3"),  # elements under byte 254 stay below 2, as float32 holds no others
    (0, 250, 1.0, "e4m3"),
    (3, 127, 1.0, "e4m3"),
    (50, 52, 2.0**14, "e5m2"),  # scales of 2**-152 together, results of 2**-124
    (200, 190, 2.0**-9, "e4m3"),  # 2**136 together, results below 2**128
]


@pytest.mark.parametrize("a_byte, b_byte, factor, fmt", EXTREMES)
@block_pairs
def test_every_pair_of_scale_bytes(
    plain: Backend, pair: tuple[str, str], a_byte: int, b_byte: int, factor: float, fmt: str
) -> None:
    """Results that float32 holds, from scales whose product or whose products with elements it does not."""
    if may_use_fp8(plain, *(BLOCKS[kind] for kind in pair)) and not 2**-149 <= 2.0 ** (a_byte + b_byte - 254) < 2**128:
        pytest.skip("documented: on FP8 tensor cores a product of two scales has the range of float32")
    a, b = (
        operand(integers(rows, 64, device=plain[1]) * factor, kind, fmt, byte, byte + 1)
        for rows, kind, byte in zip((64, 40), pair, (a_byte, b_byte), strict=True)
    )
    want = a.exact @ b.exact.mT
    assert 0 < want.abs().max() < 2.0**128
    assert torch.equal(gemm(plain, a, b, torch.float32).double(), want)


@pytest.mark.parametrize("pair", ["1x32-bf16", "bf16-128x128", "fp16-1x32", "32x32-fp32"])
@pytest.mark.parametrize("byte, factor", [(0, 2.0**100), (254, 2.0**-100)])
def test_extreme_bytes_beside_high_precision(plain: Backend, pair: str, byte: int, factor: float) -> None:
    factor = min(max(factor, 2.0**-14), 2.0**10) if "fp16" in pair else factor
    a, b = (
        operand(integers(rows, 64, device=plain[1]) * (factor if kind in HIGH else 0.5), kind, "e4m3", byte, byte + 1)
        for rows, kind in zip((64, 40), pair.split("-"), strict=True)
    )
    assert torch.equal(gemm(plain, a, b, torch.float32).double(), a.exact @ b.exact.mT)


# Bounds


@pytest.mark.parametrize("data", ["normal", "positive"])
@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "1x256-128x128", "128x128-128x128", "1x128-1x128",
                                  "1x256-1x256", "32x32-32x32", "1x32-128x128", "1x32-bf16", "fp16-1x128",
                                  "fp32-32x32"])  # fmt: skip
def test_error_is_within_the_derived_bound(plain: Backend, pair: str, data: str) -> None:
    kind_a, kind_b = pair.split("-")
    for i, (m, n, k) in enumerate(((33, 17, 160), (5, 40, 1000), (64, 64, 31))):
        make = torch.randn if data == "normal" else torch.rand
        a = operand(make(m, k, device=plain[1]) * 100, kind_a, "e4m3", 119, 136)
        b = operand(make(n, k, device=plain[1]) * 100, kind_b, "e5m2", 119, 136)
        bias = torch.randn(n, device=plain[1]) if i else None
        out = gemm(plain, a, b, OUT[i % 2], bias)
        want = a.exact @ b.exact.mT + (0 if bias is None else bias.double())
        assert ((out.double() - want).abs() <= bound(plain, a, b, OUT[i % 2], bias)).all(), (m, n, k)


@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "1x256-128x128", "128x128-128x128", "1x128-1x128",
                                  "1x256-1x256", "32x32-32x32", "1x32-128x128"])  # fmt: skip
def test_few_accumulator_bits_would_show(plain: Backend, pair: str) -> None:
    """One large product, then many small ones. An accumulator that drops all of those gives 200704; one that does so
    for 128 of K at most is within the bound."""
    values_a, values_b = torch.ones(3, 2048, device=plain[1]), torch.full((5, 2048), 0.25, device=plain[1])
    values_a[:, 0] = values_b[:, 0] = 448.0
    a, b = (operand(x, kind, low=127, high=128) for x, kind in zip((values_a, values_b), pair.split("-"), strict=True))
    out = gemm(plain, a, b, torch.float32)
    assert ((out.double() - (448 * 448 + 2047 * 0.25)).abs() <= bound(plain, a, b, torch.float32)).all()


# Special values


@pairs
def test_nan_stays_in_its_rows_and_columns(plain: Backend, pair: tuple[str, str]) -> None:
    """Scale bytes of 255 over zeros and numbers, and NaN elements, in the first and the last block of K."""
    m, n, k = 35, 130, 150
    a = operand(integers(m, k, device=plain[1]), pair[0])
    b = operand(integers(n, k, device=plain[1]), pair[1], "e5m2")
    want = torch.zeros(m, n, dtype=torch.bool, device=plain[1])
    a.x.view(torch.uint8 if a.scale is not None else a.x.dtype)[3, 149] = 0x7F if a.scale is not None else torch.nan
    b.x.view(torch.uint8 if b.scale is not None else b.x.dtype)[129, 0] = 0x7E if b.scale is not None else torch.nan
    want[3], want[:, 129] = True, True
    if a.scale is not None and a.block is not None:
        a.scale[-1, -1] = 255
        want[(m - 1) // a.block[0] * a.block[0] :] = True
    if b.scale is not None and b.block is not None:
        b.scale[0, 0] = 255
        b.x[: b.block[0], : b.block[1]] = 0
        want[:, : b.block[0]] = True
    out = gemm(plain, a, b, torch.float32)
    assert torch.equal(out.isnan(), want)
    assert torch.equal(out[~want].double(), (a.exact @ b.exact.mT)[~want])


def test_infinities_of_e5m2_and_of_the_output(plain: Backend) -> None:
    for kind in ("1x32", "1x128", "128x128"):
        a = operand(integers(5, 64, device=plain[1]).abs() + 1, kind, "e5m2", 127, 128)
        b = operand(torch.ones(7, 64, device=plain[1]), "128x128", "e5m2", 127, 128)
        a.x.view(torch.uint8)[2, 9] = 0xFC
        out = gemm(plain, a, b, torch.float32)
        assert (out[2] == -torch.inf).all()
        assert out[[0, 1, 3, 4]].isfinite().all()
        large = operand(torch.full((3, 64), 448.0, device=plain[1]), kind, low=127, high=128)
        assert (gemm(plain, large, large, torch.float16) == torch.inf).all()
        assert (gemm(plain, large, large, torch.float32) == 64 * 448**2).all()


@pytest.mark.parametrize("kind", HIGH)
def test_a_high_precision_operand_keeps_its_bits(plain: Backend, kind: str) -> None:
    """Times one, in each position of K: the sum is the entry itself, Inf and NaN included."""
    x = torch.randn(33, 70, device=plain[1]).to(HIGH[kind])
    x[3, 5], x[4, 69], x[5, 64] = torch.inf, -torch.inf, torch.nan
    ones = operand(torch.eye(70, device=plain[1]), "1x32", low=127, high=128)
    special = ~x.isfinite().all(1)
    out = gemm(plain, Operand(x), ones, torch.float32)
    assert torch.equal(out[~special], x[~special].float())
    assert torch.equal(gemm(plain, ones, Operand(x), torch.float32)[:, ~special], x[~special].float().mT)
    assert torch.equal(out[[3, 4], [5, 69]], torch.tensor([torch.inf, -torch.inf], device=plain[1]))
    assert out[5].isnan().all()  # Inf and NaN times zero are NaN
    assert out[3].isnan().sum() == out[4].isnan().sum() == 69


@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "1x32-bf16", "fp32-32x32"])
def test_empty_dimensions(plain: Backend, pair: str) -> None:
    kinds = pair.split("-")
    bias = torch.randn(96, device=plain[1])
    for (m, n, k), out_dtype in itertools.product(((0, 96, 64), (32, 0, 64), (32, 96, 0), (0, 0, 0)), OUT):
        a, b = (operand(integers(r, k, device=plain[1]), kind) for r, kind in zip((m, n), kinds, strict=True))
        assert not gemm(plain, a, b, out_dtype).any()
        if n == 96:
            assert torch.equal(gemm(plain, a, b, out_dtype, bias), bias.to(out_dtype).expand(m, n))


# Memory


@pytest.mark.parametrize("how", ["transposed", "slice", "odd_pitch", "steps", "unaligned"])
@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "128x128-1x256", "32x32-bf16", "fp32-1x32"])
def test_strides_never_matter_and_neighbours_are_not_read(plain: Backend, pair: str, how: str) -> None:
    kinds = pair.split("-")
    a, b = (operand(integers(r, 176, device=plain[1]), kind) for r, kind in zip((66, 35), kinds, strict=True))
    want = (a.exact @ b.exact.mT).float()
    other = [
        Operand(spread_out(x.x, how), None if x.scale is None else spread_out(x.scale, how), x.block) for x in (a, b)
    ]
    bias = torch.arange(70, device=plain[1]).float()[::2]
    assert torch.equal(gemm(plain, *other, torch.float32), want)
    assert torch.equal(gemm(plain, other[0], b, torch.float32, bias), want + bias)
    assert torch.equal(gemm(plain, a, other[1], torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "32x32-32x32", "1x32-bf16"])
def test_other_memory_does_not_leak_in(plain: Backend, pair: str) -> None:
    """Buffers full of NaN bytes are freed first, so that what a kernel forgets to write shows."""
    kinds = pair.split("-")
    for m, n, k in ((1, 8, 128), (33, 129, 96), (127, 17, 260)):
        a, b = (operand(integers(r, k, device=plain[1]), kind) for r, kind in zip((m, n), kinds, strict=True))
        for byte in (0x7F, 0xFF):
            poison = [torch.full((2**p,), byte, dtype=torch.uint8, device=plain[1]) for p in range(5, 20)]
            del poison
            assert torch.equal(gemm(plain, a, b, torch.float32).double(), a.exact @ b.exact.mT)


def test_through_the_public_name(plain: Backend) -> None:
    """Quantised operands as the library makes them: rows, columns seen as a transpose, and square ones both ways."""
    x, w = torch.randn(40, 96, device=plain[1]), torch.randn(64, 96, device=plain[1])
    for block in BLOCKS.values():
        rows = mxfp8.quantize(x, block=block, backend="reference")
        columns = mxfp8.quantize(w.mT.contiguous(), -2, block=block, backend="reference").mT
        out = mxfp8.gemm(rows, columns, out_dtype=torch.float32, backend=plain[0])
        a, b = (Operand(q.qdata, q.scale_bytes, block) for q in (rows, columns))
        want = a.exact @ b.exact.mT
        assert ((out.double() - want).abs() <= bound(plain, a, b, torch.float32)).all(), block


# Larger ones, and what only a GPU has


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["1x128-128x128", "1x256-128x128", "1x32-1x32", "32x32-32x32", "1x128-1x128"])
def test_many_tiles_and_the_same_bits_every_time(plain: Backend, pair: str) -> None:
    kinds = pair.split("-")
    for m, n, k in ((1500, 1100, 640), (300, 260, 16_384), (4097, 130, 272)):
        a, b = (operand(integers(r, k, device=plain[1]), kind) for r, kind in zip((m, n), kinds, strict=True))
        assert torch.equal(gemm(plain, a, b, torch.float32).double(), a.exact @ b.exact.mT), (m, n, k)
        a, b = (operand(torch.randn(r, k, device=plain[1]), kind) for r, kind in zip((m, n), kinds, strict=True))
        first = gemm(plain, a, b, torch.bfloat16)
        assert all(torch.equal(gemm(plain, a, b, torch.bfloat16), first) for _ in range(20)), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["1x128-128x128", "1x32-1x32", "1x32-bf16"])
def test_a_graph_replays_on_new_values(plain: Backend, pair: str) -> None:
    kinds = pair.split("-")
    a, b = (operand(integers(r, 256, device=plain[1]), kind) for r, kind in zip((300, 200), kinds, strict=True))
    gemm(plain, a, b, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(plain, a, b, torch.bfloat16)
    a.x.copy_(integers(300, 256, device=plain[1]))
    graph.replay()
    assert torch.equal(out, (a.exact @ b.exact.mT).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["1x128-128x128", "1x32-1x32"])
def test_more_than_two_to_the_31_elements(plain: Backend, pair: str) -> None:
    """Of ``a``, then of the output: the last rows."""
    kinds = pair.split("-")
    for m, n, k in ((524_416, 64, 4160), (66_000, 33_000, 64)):
        values = torch.randint(-3, 4, (m, k), device=plain[1], dtype=torch.int8)
        a = operand(values, kinds[0])
        b = operand(integers(n, k, device=plain[1]), kinds[1])
        last = (m - 130) // 128 * 128
        tail = Operand(a.x[last:], a.scale[last // a.block[0] :], a.block)  # type: ignore[index]
        want = (tail.exact @ b.exact.mT).bfloat16()
        assert torch.equal(gemm(plain, a, b, torch.bfloat16)[last:], want), (m, n, k)
