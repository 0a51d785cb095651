"""Laws that casts and products obey whatever the numbers are. Hypothesis looks for numbers that break one.

No law here needs a second implementation: each compares the library with itself on related inputs, or with the error
that the format's definition allows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mxfp8
from mxfp8 import MXTensor
from mxfp8.formats import BLOCK_SHAPES, get_format
from mxfp8.tensor import block_rc, scale_values
from numerics_tests import tolerances
from numerics_tests.oracles import RULES
from numerics_tests.strategies import Laid, laid_out

LAWS = settings(max_examples=60, deadline=None)
INPUTS = laid_out()


def quantize(laid: Laid, x: torch.Tensor | None = None) -> MXTensor:
    return mxfp8.quantize(laid.x if x is None else x, laid.axis, laid.fmt, laid.block, laid.rule)


def codes(q: MXTensor) -> torch.Tensor:
    return q.qdata.view(torch.uint8)


def assert_same_bits(got: MXTensor, want: MXTensor) -> None:
    assert torch.equal(codes(got), codes(want))
    assert torch.equal(got.scale_bytes, want.scale_bytes)


def per_element(q: MXTensor, per_block: torch.Tensor) -> torch.Tensor:
    """One entry per block, repeated over the block's elements."""
    rows, cols = block_rc(q.block, q.axis)
    spread = per_block.repeat_interleave(cols, -1).repeat_interleave(rows, -2)
    return spread[..., : q.shape[-2], : q.shape[-1]]


def finite_part(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


# Casts


@LAWS
@given(INPUTS)
def test_a_cast_of_what_was_cast_changes_nothing(laid: Laid) -> None:
    """What was cast is representable under its scale. The second scale is that scale, or half of it where the largest
    element was rounded down to its bound; half a scale has a grid as fine and is large enough, so no value moves.
    (Values stay below 2^120: above, FLT_MAX rounds to 2^128, which float32 does not hold.)"""
    x = finite_part(laid.x.float()).clamp(-(2.0**120), 2.0**120)
    once = quantize(laid, x).dequantize()
    twice = quantize(laid, once).dequantize()
    assert torch.equal(once.view(torch.int32), twice.view(torch.int32))  # signs of zeros too


@LAWS
@given(INPUTS, st.integers(-20, 20))
def test_scaling_by_a_power_of_two_moves_scale_bytes_only(laid: Laid, shift: int) -> None:
    """As long as neither the numbers nor the bytes leave their ranges."""
    x = finite_part(laid.x.double())
    tiny = (x != 0) & (x.abs() < 2.0**-90)
    x = torch.where(tiny, 0.0, x.clamp(-(2.0**90), 2.0**90)).float()  # with 20 binades to go up and down
    q, moved = quantize(laid, x), quantize(laid, torch.ldexp(x, torch.tensor(shift)))
    empty = q.scale_bytes == 0  # blocks of zeros stay at byte 0
    assert torch.equal(codes(q), codes(moved))
    assert torch.equal(torch.where(empty, 0, q.scale_bytes.int() + shift), moved.scale_bytes.int())


@LAWS
@given(INPUTS)
def test_negation_flips_sign_bits_only(laid: Laid) -> None:
    q, negated = quantize(laid), quantize(laid, -laid.x)
    assert torch.equal(q.scale_bytes, negated.scale_bytes)
    nan = per_element(q, q.scale_bytes) == 255
    assert torch.equal(codes(negated), torch.where(nan, codes(q), codes(q) ^ 0x80))


@LAWS
@given(st.integers(0, 2**32), st.sampled_from(BLOCK_SHAPES), st.sampled_from(RULES), st.integers(-140, 120))
def test_the_order_inside_a_block_does_not_matter(seed: int, block: tuple[int, int], rule: str, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, cols = block
    x = torch.ldexp(torch.randn(rows, cols, generator=generator), torch.tensor(exponent))
    order = torch.randperm(rows * cols, generator=generator)
    q = mxfp8.quantize(x, block=block, scale_rule=rule)
    shuffled = mxfp8.quantize(x.flatten()[order].view(rows, cols), block=block, scale_rule=rule)
    assert torch.equal(shuffled.scale_bytes, q.scale_bytes)
    assert torch.equal(codes(shuffled).flatten(), codes(q).flatten()[order])


@LAWS
@given(INPUTS, st.data())
def test_blocks_are_cast_alone(laid: Laid, data: st.DataObject) -> None:
    """A stretch of whole blocks cut out of a tensor has the bits it has within it."""
    q = quantize(laid)
    height, width = laid.x.shape[-2:]
    rows, cols = block_rc(laid.block, laid.axis)
    top = data.draw(st.integers(0, (height - 1) // rows)) * rows
    left = data.draw(st.integers(0, (width - 1) // cols)) * cols
    part = (..., slice(top, top + rows), slice(left, left + cols))
    assert_same_bits(quantize(laid, laid.x[part]), q[part])


@LAWS
@given(INPUTS)
def test_larger_inputs_have_no_smaller_values(laid: Laid) -> None:
    """Inside a block the cast is monotone, and it keeps the sign."""
    q = quantize(laid)
    value, x = q.dequantize(torch.float64), laid.x.float().double()
    rows, cols = block_rc(laid.block, laid.axis)
    for top, left in itertools.product(range(0, x.shape[-2], rows), range(0, x.shape[-1], cols)):
        part = (..., slice(top, top + rows), slice(left, left + cols))
        before, after = x[part].flatten(-2), value[part].flatten(-2)
        sorted_after = after.gather(-1, before.argsort(dim=-1))
        assert not (sorted_after.diff(dim=-1) < 0).any()  # False for NaN blocks
    assert ((value == 0) | value.isnan() | (value.sign() == x.sign())).all()


@LAWS
@given(INPUTS)
def test_error_of_each_element_is_that_of_the_format(laid: Laid) -> None:
    """Half a unit in the last place of the element, at least half the smallest subnormal; what exceeds the largest
    element lands on it; and with rceil nothing exceeds it, so the first bound holds alone."""
    form, q, x = get_format(laid.fmt), quantize(laid), laid.x.float().double()
    scale = per_element(q, scale_values(q.scale_bytes).double())
    good = ~scale.isnan()
    assert torch.equal(good, per_element(q, q.scale_bytes) != 255)
    scaled, value = torch.where(good, x / scale, 0.0), torch.where(good, q.qdata.double(), 0.0)
    exponent = torch.frexp(scaled).exponent - 1
    half_unit = torch.ldexp(torch.full_like(scaled, 0.5), exponent.clamp(min=form.emin) - form.mantissa_bits)
    clipped = scaled.abs() > form.max
    assert ((value - scaled).abs() <= half_unit)[~clipped].all()
    assert torch.equal(value[clipped], (scaled.sign() * form.max)[clipped])
    if laid.rule == "rceil":
        # The scale byte stops at 254, where the largest element stands for far more than float32 holds.
        assert not clipped.any()


@LAWS
@given(INPUTS)
def test_rceil_scales_are_the_smallest_that_do_not_clip(laid: Laid) -> None:
    q = quantize(replace(laid, rule="rceil"))
    form, scale = get_format(laid.fmt), scale_values(q.scale_bytes).double()
    rows, cols = block_rc(laid.block, laid.axis)
    x = laid.x.float().double().abs()
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % cols, 0, -x.shape[-2] % rows))
    amax = padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows)).amax((-3, -1))
    good = q.scale_bytes != 255
    assert torch.equal(good, amax.isfinite())
    assert (amax <= form.max * scale)[good].all()
    assert (amax > form.max * scale / 2)[good & (q.scale_bytes > 0)].all()


@LAWS
@given(INPUTS, st.sampled_from([(32, 32), (128, 128)]))
def test_square_blocks_commute_with_transposition(laid: Laid, block: tuple[int, int]) -> None:
    laid = replace(laid, block=block)
    q, t = quantize(laid), quantize(laid, laid.x.mT)
    assert torch.equal(codes(t), codes(q).mT)
    assert torch.equal(t.scale_bytes, q.scale_bytes.mT)


@LAWS
@given(INPUTS)
def test_a_cast_along_the_other_axis_is_the_transpose_of_the_transposes_cast(laid: Laid) -> None:
    flipped = replace(laid, axis=-3 - laid.axis)
    assert_same_bits(quantize(flipped, laid.x.mT), quantize(laid).mT)


@LAWS
@given(INPUTS)
def test_the_expanded_form_is_the_same_tensor(laid: Laid) -> None:
    q = quantize(laid)
    wide = MXTensor(q.qdata, q.expanded_scale(), q.fmt, q.axis)
    assert torch.equal(wide.dequantize().nan_to_num(nan=1.5), q.dequantize().nan_to_num(nan=1.5))
    tensors, metadata = q.to_parts()
    assert_same_bits(MXTensor.from_parts(tensors, metadata), q)


# Products


def operand(rows: int, k: int, seed: int, block: tuple[int, int] = (1, 32)) -> MXTensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 9, (rows, k), generator=generator)
    return mxfp8.quantize(torch.ldexp(torch.randn(rows, k, generator=generator), exponents), block=block)


def product(a: MXTensor, b: MXTensor) -> torch.Tensor:
    return mxfp8.gemm(a, b, out_dtype=torch.float32)


def assert_two_sums_agree(got: torch.Tensor, want: torch.Tensor, a: MXTensor, b: MXTensor) -> None:
    """Two evaluations of one product may sum in different orders: each has the error of the contract."""
    bound = tolerances.gemm_error(a.dequantize(torch.float64), b.dequantize(torch.float64), torch.float32)
    assert ((got.double() - want.double()).abs() <= 2 * bound).all()


SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**32)


@LAWS
@given(SIZES, SIZES, st.integers(1, 200), SEEDS, st.integers(-30, 30))
def test_products_are_linear_in_scales(m: int, n: int, k: int, seed: int, shift: int) -> None:
    """All scales of an operand moved by 2^s: exactly 2^s times the product, bit for bit (nothing over- or underflows:
    values lie within 2^-60..2^60 before and after)."""
    a, b = operand(m, k, seed), operand(n, k, seed + 1)
    moved = MXTensor(a.qdata, (a.scale_bytes.int() + shift).clamp(min=0).to(torch.uint8), a.fmt)
    assume(bool((a.scale_bytes.int() + shift >= 1).all()))
    assert torch.equal(product(moved, b), torch.ldexp(product(a, b), torch.tensor(shift)))
    assert torch.equal(product(b, moved), torch.ldexp(product(b, a), torch.tensor(shift)))


@LAWS
@given(SIZES, SIZES, st.integers(1, 200), SEEDS)
def test_rows_and_columns_of_a_product_go_where_those_of_its_operands_go(m: int, n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = operand(m, k, seed), operand(n, k, seed + 1)
    rows, columns = torch.randperm(m, generator=generator), torch.randperm(n, generator=generator)
    pa, pb = (MXTensor(q.qdata[i], q.scale_bytes[i], q.fmt) for q, i in ((a, rows), (b, columns)))
    assert_two_sums_agree(product(pa, pb), product(a, b)[rows][:, columns], pa, pb)


@LAWS
@given(SIZES, SIZES, st.integers(1, 6), SEEDS)
def test_the_order_of_blocks_along_k_does_not_matter(m: int, n: int, blocks: int, seed: int) -> None:
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    a, b = operand(m, 32 * blocks, seed), operand(n, 32 * blocks, seed + 1)
    columns = (order[:, None] * 32 + torch.arange(32)).flatten()
    pa, pb = (MXTensor(q.qdata[:, columns], q.scale_bytes[:, order], q.fmt) for q in (a, b))
    assert_two_sums_agree(product(pa, pb), product(a, b), a, b)


@LAWS
@given(SIZES, SIZES, st.integers(1, 200), SEEDS)
def test_a_transposed_product_is_the_product_of_swapped_operands(m: int, n: int, k: int, seed: int) -> None:
    a, b = operand(m, k, seed), operand(n, k, seed + 1)
    assert_two_sums_agree(product(b, a).mT, product(a, b), a, b)


@pytest.mark.parametrize("block", [(1, 32), (32, 32), (1, 128)], ids=str)
def test_every_number_of_rows_modulo_32(block: tuple[int, int], device: torch.device) -> None:
    """Integers, so that the sums are exact and a row lost or mixed with its padding shows in the last bit."""
    x = torch.randint(-3, 4, (64, 72), device=device).float()
    w = mxfp8.quantize(torch.randint(-3, 4, (33, 72), device=device).float())
    for m in range(65):
        q = mxfp8.quantize(x[:m], block=block)
        want = q.dequantize(torch.float64) @ w.dequantize(torch.float64).mT
        assert torch.equal(product(q, w).double(), want)
        assert torch.equal(product(w, q).double(), want.mT)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_casts_beside_poisoned_memory(block: tuple[int, int], poison: float, device: torch.device) -> None:
    """A view into the middle of a buffer of NaN: reading one number too far, also for padding, would show."""
    for m, k in ((1, 1), (1, 33), (31, 31), (33, 65), (65, 130)):
        for dtype, axis in itertools.product((torch.float32, torch.bfloat16), (-1, -2)):
            x = torch.randn(m, k, device=device).to(dtype)
            buffer = torch.full((m + 70, k + 70), poison, dtype=dtype, device=device)
            view = buffer[35 : 35 + m, 35 : 35 + k]
            view.copy_(x)
            assert_same_bits(mxfp8.quantize(view, axis, block=block), mxfp8.quantize(x, axis, block=block))
            # A view whose rows are dense, so that its storage ends in poison without a gap.
            rows = torch.full((m + 70, k), poison, dtype=dtype, device=device)
            rows[:m] = x
            assert_same_bits(mxfp8.quantize(rows[:m], axis, block=block), mxfp8.quantize(x, axis, block=block))


@pytest.mark.parametrize("poison", [0x7F, 0xFF, 0x7E])
def test_products_beside_poisoned_memory(poison: int, device: torch.device) -> None:
    """Elements and scale bytes are views into buffers of NaN codes (0xFF is the NaN of a scale)."""

    def embedded(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.shape[0] + 66, x.shape[1] + 66), poison, dtype=torch.uint8, device=device)
        view = buffer[33 : 33 + x.shape[0], 33 : 33 + x.shape[1]]
        view.copy_(x)
        return view

    def hidden(q: MXTensor) -> MXTensor:
        return MXTensor(embedded(codes(q)).view(q.fmt.dtype), embedded(q.scale_bytes), q.fmt, -1, q.block)

    for m, n, k in ((1, 1, 1), (31, 33, 40), (33, 5, 129), (2, 65, 32)):
        a, b = (mxfp8.quantize(torch.randint(-3, 4, (rows, k), device=device).float()) for rows in (m, n))
        want = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT
        assert torch.equal(product(hidden(a), hidden(b)).double(), want)
        assert torch.equal(hidden(a).dequantize(), a.dequantize())
        offs = torch.tensor([m // 2, m], device=device)
        stacked = MXTensor(torch.stack([codes(b)] * 2).view(b.fmt.dtype), torch.stack([b.scale_bytes] * 2), b.fmt)
        assert torch.equal(mxfp8.grouped_gemm(hidden(a), stacked, offs, torch.float32).double(), want)
