"""Element and scale formats: every code, every scale byte, every pair of them, against three other opinions."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import mxfp8
from mxfp8.formats import BLOCK_SHAPES, ELEMENT_FORMATS, get_block, get_format, get_rounding, get_scale_rule
from mxfp8.reference.quantize import _inverse
from mxfp8.tensor import scale_values
from numerics_tests import oracles

FORMATS = sorted(ELEMENT_FORMATS)
CODES = torch.arange(256, dtype=torch.uint8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def all_pairs(fmt: str, device: torch.device) -> mxfp8.MXTensor:
    """``[256 * 256, 32]``: every code under every scale byte, one block each, the code in all 32 places."""
    codes = CODES.repeat(256)[:, None].expand(-1, 32).contiguous().to(device)
    scales = CODES.repeat_interleave(256)[:, None].to(device)
    return mxfp8.MXTensor(codes.view(get_format(fmt).dtype), scales, fmt)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal values, equal signs of zero, NaN where NaN."""
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all() and (a == b)[~nan].all() and (np.signbit(a) == np.signbit(b))[~nan].all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_element_values_against_definition_ml_dtypes_and_torch(fmt: str) -> None:
    form, table = get_format(fmt), oracles.ELEMENTS[fmt].table
    theirs = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt]
    assert same(CODES.numpy().view(theirs).astype(np.float64), table)
    assert same(CODES.view(form.dtype).double().numpy(), table)


@pytest.mark.parametrize("fmt", FORMATS)
def test_element_values_against_gfloat(fmt: str) -> None:
    gfloat = pytest.importorskip("gfloat", reason="the second opinion gfloat is not installed")
    from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2

    info = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}[fmt]
    assert same(np.array([gfloat.decode_float(info, c).fval for c in range(256)]), oracles.ELEMENTS[fmt].table)


@pytest.mark.parametrize("fmt", FORMATS)
def test_described_limits_are_those_of_the_values(fmt: str) -> None:
    form, element = get_format(fmt), oracles.ELEMENTS[fmt]
    normal = element.finite[1 << form.mantissa_bits]
    assert (form.max, form.min_subnormal, form.min_normal) == (element.max, element.finite[1], normal)
    assert form.emax == math.floor(math.log2(form.max))
    assert element.value(form.max_code) == form.max
    assert math.isnan(element.value(form.nan_code))


def test_scale_values_of_all_bytes(device: torch.device) -> None:
    got = scale_values(CODES.to(device)).cpu().double().numpy()
    assert same(got, oracles.scale_values())
    assert same(CODES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64), oracles.scale_values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reciprocal_scales_of_all_bytes(dtype: torch.dtype, device: torch.device) -> None:
    """Byte 254 needs the subnormal 2^-127, whose loss would zero a block; 255 is NaN."""
    got = _inverse(torch.arange(256, dtype=torch.int32, device=device), dtype)
    assert got.dtype == dtype
    assert same(got.cpu().double().numpy(), 1 / oracles.scale_values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_all_codes_under_all_scale_bytes(fmt: str, dtype: torch.dtype, device: torch.device) -> None:
    q = all_pairs(fmt, device)
    exact = np.multiply.outer(oracles.scale_values(), oracles.ELEMENTS[fmt].table).ravel()
    with np.errstate(over="ignore"):
        if dtype == torch.bfloat16:
            expected = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        else:
            expected = exact.astype(torch.empty(0, dtype=dtype).numpy().dtype).astype(np.float64)
    got = q.dequantize(dtype)
    assert got.dtype == dtype
    assert same(got[:, 0].cpu().double().numpy(), expected)
    assert same(got[:, 31].cpu().double().numpy(), expected)
    # Float32 is exact up to its range, so that the one rounding of narrower types is a rounding of the exact value.
    if dtype == torch.float32:
        inside = np.isfinite(exact) & (np.abs(exact) < 2.0**128)
        assert (expected[inside] == exact[inside]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_saturating_dequantisation_changes_overflow_only(fmt: str, dtype: torch.dtype, device: torch.device) -> None:
    q = all_pairs(fmt, device)
    plain, saturated = (q.dequantize(dtype, saturate=s)[:, 0].cpu().double() for s in (False, True))
    limit = torch.finfo(dtype).max
    expected = plain.clamp(-limit, limit)
    assert same(saturated.numpy(), expected.numpy())


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantising_what_was_dequantised_changes_nothing(fmt: str, device: torch.device) -> None:
    # Anchored by the largest element, each block has the scale it came with, so every finite code comes back.
    codes = CODES.clone()
    codes[get_format(fmt).max_code + 1 : 128] = codes[get_format(fmt).max_code + 129 :] = 0
    payload = torch.full((256, 32), get_format(fmt).max_code, dtype=torch.uint8)
    payload[:, 1] = codes
    top = {"e4m3": 246, "e5m2": 239}[fmt]  # the last scale whose largest element is a finite float32
    for byte in (0, 1, 2, 60, 127, 200, top):
        scale = torch.full((256, 1), byte, dtype=torch.uint8)
        q = mxfp8.MXTensor(payload.view(get_format(fmt).dtype).to(device), scale.to(device), fmt)
        again = mxfp8.quantize(q.dequantize(), fmt=fmt)
        assert torch.equal(again.scale_bytes.cpu(), scale)
        assert torch.equal(again.qdata.view(torch.uint8).cpu(), payload)


@pytest.mark.parametrize(
    "getter, good, bad",
    [
        (get_format, ["e4m3", "e5m2", mxfp8.E4M3], ["E4M3", "fp8", "", None, 8, ["e4m3"], torch.float8_e4m3fn]),
        (get_scale_rule, ["rceil", mxfp8.ScaleRule.EVEN], ["RCEIL", "nearest", None, 1]),
        (get_rounding, ["nearest", mxfp8.Rounding.STOCHASTIC], ["rne", None, 0]),
        (get_block, [*BLOCK_SHAPES, [1, 32]], [(32, 1), (1, 16), (1, 32, 1), (), 32, None, "1x32"]),
    ],
)
def test_names_are_found_or_refused_with_the_choices(getter, good, bad) -> None:
    for value in good:
        getter(value)
    for value in bad:
        with pytest.raises(ValueError, match=r"unknown .* use one of"):
            getter(value)


def test_blocks_are_valid_mx_blocks() -> None:
    assert all(along % 32 == 0 and across in (1, along) for across, along in BLOCK_SHAPES)
