"""The GEMM contract: exact where it can be exact, within the derived bound elsewhere, and strict about operands."""

import itertools

import pytest
import torch

import mxfp8
from mxfp8.formats import BLOCK_SHAPES
from numerics_tests import tolerances

OUT = [torch.float32, torch.bfloat16, torch.float16]
out_dtypes = pytest.mark.parametrize("out_dtype", OUT, ids=str)


def exact(x: mxfp8.MXTensor | torch.Tensor) -> torch.Tensor:
    """The operand as multiplied, in float64: kernel error is measured on the same quantised values."""
    return x.dequantize(torch.float64) if isinstance(x, mxfp8.MXTensor) else x.double()


def assert_within_bound(a, b, bias=None, out_dtype=torch.float32) -> None:
    out = mxfp8.gemm(a, b, bias, out_dtype)
    assert out.dtype == out_dtype
    a64, b64, bias64 = exact(a), exact(b), None if bias is None else bias.double()
    want = a64 @ b64.mT if bias64 is None else a64 @ b64.mT + bias64
    blocks = tuple(x.block if isinstance(x, mxfp8.MXTensor) else None for x in (a, b))
    assert ((out.double() - want).abs() <= tolerances.product_error(a64, b64, blocks, out_dtype, bias64)).all()


def integers(rows: int, cols: int, device: torch.device, fmt: str, block) -> mxfp8.MXTensor:
    """Integers in -3..3 with a random power of two per block: every partial sum below is exact in float32."""
    q = mxfp8.quantize(torch.randint(-3, 4, (rows, cols), device=device).float(), fmt=fmt, block=block)
    scale = torch.randint(125, 130, q.scale_bytes.shape, device=device, dtype=torch.uint8)
    ones = torch.randint(-3, 4, (rows, cols), device=device).float().to(q.qdata.dtype)
    return mxfp8.MXTensor(ones, scale, q.fmt, -1, block)


@pytest.mark.parametrize("fmts", list(itertools.product(("e4m3", "e5m2"), repeat=2)), ids="-".join)
def test_small_integers_are_exact(fmts: tuple[str, str], device: torch.device) -> None:
    for block_a, block_b in itertools.product(BLOCK_SHAPES, repeat=2):
        a, b = integers(33, 300, device, fmts[0], block_a), integers(17, 300, device, fmts[1], block_b)
        out = mxfp8.gemm(a, b, out_dtype=torch.float32)
        assert torch.equal(out.double(), exact(a) @ exact(b).mT)
        bias = torch.randint(-9, 10, (17,), device=device).float()
        assert torch.equal(mxfp8.gemm(a, b, bias, torch.float32), out + bias)


@out_dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kinds", ["mx-mx", "mx-bf16", "bf16-mx", "mx-fp32", "fp16-mx"])
def test_error_is_within_the_derived_bound(kinds: str, with_bias: bool, out_dtype, device: torch.device) -> None:
    for m, n, k in ((33, 17, 40), (5, 9, 1000), (64, 64, 31)):
        operands = []
        for kind, rows in zip(kinds.split("-"), (m, n), strict=True):
            x = torch.randn(rows, k, device=device)
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
            operands.append(mxfp8.quantize(x) if kind == "mx" else x.to(dtype))
        bias = torch.randn(n, device=device).bfloat16() if with_bias else None
        assert_within_bound(*operands, bias, out_dtype)


@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_blocks_and_the_default_output(block, device: torch.device) -> None:
    a = mxfp8.quantize(torch.randn(50, 333, device=device), block=block)
    b = mxfp8.quantize(torch.randn(40, 333, device=device), block=block, fmt="e5m2")
    assert_within_bound(a, b)
    assert mxfp8.gemm(a, b).dtype == torch.bfloat16


def test_few_accumulator_bits_would_show(device: torch.device) -> None:
    """One large product, then many small ones: an accumulator that drops them gives 200704, half a percent low."""
    a, b = torch.ones(1, 4096, device=device), torch.full((1, 4096), 0.25, device=device)
    a[0, 0] = b[0, 0] = 448.0
    scale = torch.full((1, 128), 127, dtype=torch.uint8, device=device)
    qa, qb = (mxfp8.MXTensor(x.to(torch.float8_e4m3fn), scale, "e4m3") for x in (a, b))
    assert mxfp8.gemm(qa, qb, out_dtype=torch.float32).item() == 448 * 448 + 4095 * 0.25


def test_scale_byte_0_is_a_number(device: torch.device) -> None:
    """2^112 times 256 * 2^-127, 128 of them over 2^0: exactly 256 * 2^-8 ... = 1 each pair summed to 1 by hand."""
    a = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)
    a[:, 7] = 2.0**112
    b = mxfp8.MXTensor(
        torch.full((3, 128), 256.0, device=device).to(torch.float8_e4m3fn),
        torch.zeros(3, 4, dtype=torch.uint8, device=device),
        "e4m3",
    )
    assert (mxfp8.gemm(a, b, out_dtype=torch.float32) == 2.0 ** (112 + 8 - 127)).all()


@out_dtypes
def test_empty_dimensions(out_dtype, device: torch.device) -> None:
    bias = torch.randn(96, device=device)
    for m, n, k in ((0, 96, 64), (32, 0, 64), (32, 96, 0), (0, 0, 0)):
        a, b = mxfp8.quantize(torch.randn(m, k, device=device)), mxfp8.quantize(torch.randn(n, k, device=device))
        out = mxfp8.gemm(a, b, out_dtype=out_dtype)
        assert (out.shape, out.dtype) == ((m, n), out_dtype)
        assert not out.any()
        if n == 96:
            assert torch.equal(mxfp8.gemm(a, b, bias, out_dtype), bias.to(out_dtype).expand(m, n))


def test_square_operands_work_either_way_round(device: torch.device) -> None:
    x, w = torch.randn(40, 64, device=device), torch.randn(64, 64, device=device)
    a, q = mxfp8.quantize(x), mxfp8.quantize(w, block=(32, 32))
    assert_within_bound(a, q)
    assert_within_bound(a, q.mT)
    want = mxfp8.gemm(a, mxfp8.quantize(w.mT, block=(32, 32)), out_dtype=torch.float32)
    assert torch.equal(mxfp8.gemm(a, q.mT, out_dtype=torch.float32), want)


def test_nan_stays_in_its_row_and_column(device: torch.device) -> None:
    x, w = torch.randn(7, 64, device=device), torch.randn(5, 64, device=device)
    x[2, 40], w[3, 0] = torch.nan, torch.inf
    out = mxfp8.gemm(mxfp8.quantize(x), mxfp8.quantize(w), out_dtype=torch.float32)
    want = torch.zeros(7, 5, dtype=torch.bool, device=device)
    want[2], want[:, 3] = True, True
    assert torch.equal(out.isnan(), want)


def test_overflow_of_the_output_is_inf(device: torch.device) -> None:
    q = mxfp8.quantize(torch.full((1, 32), 448.0, device=device))
    assert mxfp8.gemm(q, q, out_dtype=torch.float16).item() == torch.inf
    assert mxfp8.gemm(q, q, out_dtype=torch.float32).item() == 32 * 448**2


def set_legacy(precision: str):
    return lambda: torch.set_float32_matmul_precision(precision)


def set_backend(backend: str, precision: str):
    def switch() -> None:
        matmul = torch.backends.cuda.matmul if backend == "cuda" else torch.backends.mkldnn.matmul
        matmul.fp32_precision = precision

    return switch


@pytest.mark.parametrize(
    "switch",
    [set_legacy("medium"), set_legacy("high"), set_backend("cuda", "tf32"), set_backend("mkldnn", "bf16")],
    ids=["medium", "high", "cuda_tf32", "mkldnn_bf16"],
)
def test_user_precision_settings_do_not_reach_it(switch, device: torch.device) -> None:
    """Neither way of asking torch for fast float32 products changes a bit, and the setting is left as it was."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    a, b = torch.randn(64, 512, device=device), mxfp8.quantize(torch.randn(64, 512, device=device))
    want = mxfp8.gemm(a, b, out_dtype=torch.float32)
    assert_within_bound(a, b)
    saved = [m.fp32_precision for m in matmuls]
    try:
        switch()
        setting = [m.fp32_precision for m in matmuls]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = mxfp8.gemm(a, b, out_dtype=torch.float32)
        assert [m.fp32_precision for m in matmuls] == setting
    finally:
        torch.set_float32_matmul_precision("highest")
        for matmul, precision in zip(matmuls, saved, strict=True):
            matmul.fp32_precision = precision
    assert torch.equal(got, want)


def test_strides_of_operands_never_matter(device: torch.device) -> None:
    base = torch.randn(4 * 64, 96, device=device)
    x, w = base.mT[:, 64:128], base.mT[:48, 128:192]
    want = mxfp8.gemm(mxfp8.quantize(x.contiguous()), mxfp8.quantize(w.contiguous()))
    assert torch.equal(mxfp8.gemm(mxfp8.quantize(x), mxfp8.quantize(w)), want)
    q = mxfp8.quantize(x.mT.contiguous(), -2).mT
    assert torch.equal(mxfp8.gemm(q, mxfp8.quantize(w)), want)


def test_meta_operands_give_shapes() -> None:
    a, b = (mxfp8.quantize(torch.empty(n, 64, device="meta")) for n in (3, 5))
    assert mxfp8.gemm(a, b).shape == (3, 5)


def q(*shape: int, **kw) -> mxfp8.MXTensor:
    return mxfp8.quantize(torch.ones(shape), **kw)


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ValueError, r"not \(4, 32\) and \(4, 64\)", lambda: mxfp8.gemm(q(4, 32), q(4, 64))),
        (ValueError, r"not \(2, 4, 32\)", lambda: mxfp8.gemm(q(2, 4, 32), q(4, 32))),
        (ValueError, r"not \(32,\)", lambda: mxfp8.gemm(q(32), q(4, 32))),
        (ValueError, "b is scaled along axis -2", lambda: mxfp8.gemm(q(32, 32), q(32, 32, axis=-2))),
        (ValueError, "a is scaled along axis -2", lambda: mxfp8.gemm(q(32, 32).mT, q(32, 32))),
        (TypeError, "at least one MXTensor", lambda: mxfp8.gemm(torch.ones(4, 32), torch.ones(4, 32))),
        (TypeError, "b is torch.float64", lambda: mxfp8.gemm(q(4, 32), torch.ones(4, 32).double())),
        (TypeError, "a is torch.int32", lambda: mxfp8.gemm(torch.ones(4, 32).int(), q(4, 32))),
        (TypeError, "b is list", lambda: mxfp8.gemm(q(4, 32), [1.0])),
        (TypeError, "out_dtype is torch.float64", lambda: mxfp8.gemm(q(4, 32), q(4, 32), None, torch.float64)),
        (TypeError, "out_dtype is torch.int8", lambda: mxfp8.gemm(q(4, 32), q(4, 32), None, torch.int8)),
        (ValueError, r"bias has shape \(3,\).*needs \(4,\)", lambda: mxfp8.gemm(q(4, 32), q(4, 32), torch.ones(3))),
        (ValueError, r"bias has shape \(1, 4\)", lambda: mxfp8.gemm(q(4, 32), q(4, 32), torch.ones(1, 4))),
        (TypeError, "bias takes .* not torch.int64", lambda: mxfp8.gemm(q(4, 32), q(4, 32), torch.ones(4).long())),
        (TypeError, "bias takes .* not float", lambda: mxfp8.gemm(q(4, 32), q(4, 32), 1.0)),
        (ValueError, "bias is on meta", lambda: mxfp8.gemm(q(4, 32), q(4, 32), torch.ones(4, device="meta"))),
        (ValueError, "a is on cpu, b on meta", lambda: mxfp8.gemm(q(4, 32), q(4, 32).to("meta"))),
        (TypeError, "a requires grad", lambda: mxfp8.gemm(torch.ones(4, 32, requires_grad=True), q(4, 32))),
        (TypeError, "bias requires grad", lambda: mxfp8.gemm(q(4, 32), q(4, 32), torch.ones(4, requires_grad=True))),
        (ValueError, "unknown backend 'cublas'", lambda: mxfp8.gemm(q(4, 32), q(4, 32), backend="cublas")),
    ],
)
def test_bad_operands_are_named(error, match: str, call) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("rule", sorted(tolerances.REFERENCE_SQNR_DB))
def test_format_error_of_normal_data(rule: str, device: torch.device) -> None:
    """The error of the format, which no bound above contains: SQNR on N(0, 1) as documented."""
    x = torch.randn(2**15, 32, device=device)
    noise = (mxfp8.quantize(x, scale_rule=rule).dequantize(torch.float64) - x.double()).square().sum()
    sqnr_db = (10 * torch.log10(x.double().square().sum() / noise)).item()
    assert abs(sqnr_db - tolerances.REFERENCE_SQNR_DB[rule]) <= tolerances.SQNR_SLACK_DB
