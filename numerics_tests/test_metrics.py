"""Tensor metrics against values worked out by hand, and what they say of empty, zero, Inf and NaN."""

import math

import pytest
import torch

from mxfp8 import metrics

NAN, INF = math.nan, math.inf
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sqnr_and_rel_rms_by_hand(dtype: torch.dtype) -> None:
    # signal 9 + 16 = 25, noise 0.25: ratio 100 = 20 dB = 10 % relative RMS, every number exact in bf16.
    reference, x = t(3, 4, dtype=dtype), t(3, 4.5, dtype=dtype)
    assert metrics.sqnr_db(reference, x) == pytest.approx(20.0, abs=1e-12)
    assert metrics.rel_rms(reference, x) == pytest.approx(0.1, rel=1e-12)


def test_sqnr_is_not_limited_by_float32() -> None:
    # One fp32 ulp at 1.0 is 2^-23: 138.47 dB. The squares 3e38^2 overflow fp32 and must not.
    one = t(1.0)
    assert metrics.sqnr_db(one, torch.nextafter(one, t(2.0))) == pytest.approx(20 * 23 * math.log10(2), abs=1e-9)
    assert metrics.sqnr_db(t(2.0**127), t(2.0**126)) == pytest.approx(20 * math.log10(2), abs=1e-9)


@pytest.mark.parametrize(
    ("reference", "x", "expected_db"),
    [
        ([], [], INF),
        ([0.0, 0.0], [0.0, -0.0], INF),
        ([1.0, 2.0], [1.0, 2.0], INF),
        ([0.0, 0.0], [0.0, 1.0], -INF),
        ([1.0, 2.0], [1.0, INF], -INF),
        ([1.0, 2.0], [NAN, 2.0], NAN),
        ([NAN, 2.0], [1.0, 2.0], NAN),
        ([NAN, 2.0], [NAN, 2.0], NAN),
        ([INF, 2.0], [1.0, 2.0], NAN),
        ([INF, 2.0], [INF, 2.0], NAN),
    ],
)
def test_sqnr_specials(reference: list[float], x: list[float], expected_db: float) -> None:
    got = metrics.sqnr_db(torch.tensor(reference), torch.tensor(x))
    assert got == expected_db or (math.isnan(got) and math.isnan(expected_db))
    expected_rel = 10.0 ** (-expected_db / 20)
    got_rel = metrics.rel_rms(torch.tensor(reference), torch.tensor(x))
    assert got_rel == expected_rel or (math.isnan(got_rel) and math.isnan(expected_rel))


@pytest.mark.parametrize("q_dtype", [*FP8, torch.bfloat16])
def test_underflow_counts_only_nonzero_inputs(q_dtype: torch.dtype) -> None:
    x = t(1.0, 1e-30, -1e-30, 0.0, -0.0)
    q = t(1.0, 0.0, -0.0, 0.0, -0.0, dtype=q_dtype)
    assert metrics.underflow_frac(x, q) == 2 / 3  # three non-zero inputs, two became +-0


def test_underflow_specials() -> None:
    empty = torch.empty(0, 4)
    assert metrics.underflow_frac(empty, empty) == 0.0
    assert metrics.underflow_frac(torch.zeros(3), torch.zeros(3)) == 0.0
    assert metrics.underflow_frac(t(NAN, 1.0), t(NAN, 0.0)) == 0.5  # NaN stays in the count, as a survivor
    assert metrics.underflow_frac(t(NAN, 1.0), t(0.0, 1.0)) == 0.5  # and a NaN that became zero is a loss


def test_underflow_of_an_fp8_input_and_strided_views() -> None:
    x = t(1.0, 0.0, 2.0, -0.0).to(torch.float8_e5m2).reshape(2, 2).T
    assert metrics.underflow_frac(x, torch.zeros(2, 2)) == 1.0


@pytest.mark.parametrize(("dtype", "code"), [(torch.float8_e4m3fn, 0x7E), (torch.float8_e5m2, 0x7B)])
def test_saturated_by_code(dtype: torch.dtype, code: int) -> None:
    # +max, -max, one code below, zero, NaN with either sign: 4 of 6 are at or beyond the largest finite value.
    q = torch.tensor([code, code | 0x80, code - 1, 0, 0x7F, 0xFF], dtype=torch.uint8).view(dtype)
    assert metrics.saturated_frac(q) == 4 / 6
    assert metrics.saturated_frac(q, max_code=code) == 4 / 6
    assert metrics.saturated_frac(q, max_code=code - 1) == 5 / 6
    assert metrics.saturated_frac(q[:0]) == 0.0
    assert float(q[0].float()) == torch.finfo(dtype).max  # the code is that of the largest finite value


def test_saturated_counts_inf_of_e5m2() -> None:
    assert metrics.saturated_frac(torch.tensor([0x7C, 0x00], dtype=torch.uint8).view(torch.float8_e5m2)) == 0.5


@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_amax(dtype: torch.dtype) -> None:
    assert metrics.amax(t(1.0, -3.5, 2.0, dtype=dtype)) == 3.5
    assert metrics.amax(t(dtype=dtype)) == 0.0
    assert math.isnan(metrics.amax(t(1.0, NAN, 5.0, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scale_histogram(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0, 127, 127], [255, 254, 0]], dtype=torch.uint8).view(dtype)
    expected = torch.zeros(256, dtype=torch.int64)
    expected[[0, 127, 254, 255]] = torch.tensor([2, 2, 1, 1])
    assert torch.equal(metrics.scale_histogram(scale), expected)
    assert torch.equal(metrics.scale_histogram(scale.T), expected)
    assert torch.equal(metrics.scale_histogram(scale[:0]), torch.zeros(256, dtype=torch.int64))


@pytest.mark.parametrize("measure", [metrics.sqnr_db, metrics.rel_rms, metrics.underflow_frac])
def test_shape_and_dtype_errors(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(ValueError, match=r"same shape, got \(2,\) and \(3,\)"):
        measure(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError, match=r"floating-point dtype, got torch.int64"):
        measure(torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(TypeError, match=r"got list"):
        measure([0.0], torch.zeros(1))


def test_byte_metric_errors() -> None:
    with pytest.raises(TypeError, match=r"float8_e4m3fn or float8_e5m2 tensor, got torch.float32"):
        metrics.saturated_frac(torch.zeros(2))
    with pytest.raises(ValueError, match=r"max_code must be in 1\.\.127"):
        metrics.saturated_frac(torch.zeros(2).to(torch.float8_e5m2), max_code=0xFE)
    with pytest.raises(TypeError, match=r"uint8 view, got torch.float32"):
        metrics.scale_histogram(torch.zeros(2))


def test_no_gradient_and_no_write() -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = x.detach().clone()
    metrics.sqnr_db(x, x * 1.01)
    metrics.underflow_frac(x, x)
    metrics.amax(x)
    assert x.grad is None
    assert torch.equal(x.detach(), before)


@pytest.mark.gpu
def test_cuda_gives_the_numbers_of_the_cpu() -> None:
    x = torch.randn(1000, 33, generator=torch.Generator().manual_seed(0))
    q = (x * 200).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).repeat(3).view(torch.float8_e8m0fnu)
    back = q.float() / 200
    for name, arguments in {
        "sqnr_db": (x, back),
        "rel_rms": (x, back),
        "underflow_frac": (x, q),
        "saturated_frac": (q,),
        "amax": (q,),
    }.items():
        measure = getattr(metrics, name)
        # Counts and maxima are exact; float64 sums of 33,000 terms in another order agree to 33,000 x 2^-53 < 1e-11.
        assert measure(*(a.cuda() for a in arguments)) == pytest.approx(measure(*arguments), rel=1e-11), name
    assert torch.equal(metrics.scale_histogram(scale.cuda()).cpu(), torch.full((256,), 3))
