"""The bits of ``quantize``: scale bytes and elements against the definition, ml_dtypes and gfloat. No tolerances."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import mxfp8
from mxfp8.formats import BLOCK_SHAPES, get_format, get_scale_rule
from mxfp8.reference.quantize import scale_byte
from numerics_tests import oracles
from numerics_tests.cases import QUANTIZE_CASES, QuantizeCase
from numerics_tests.strategies import Laid, laid_out

FORMATS = ("e4m3", "e5m2")
FORMAT_RULES = list(itertools.product(FORMATS, oracles.RULES))
THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def raw(q: mxfp8.MXTensor) -> tuple[np.ndarray, np.ndarray]:
    return q.qdata.view(torch.uint8).cpu().numpy(), q.scale_bytes.cpu().numpy()


def assert_bits(q: mxfp8.MXTensor, codes: np.ndarray, scales: np.ndarray) -> None:
    """Bitwise equality; a failure names the first differing byte."""
    for what, got, want in zip(("element", "scale"), raw(q), (codes, scales), strict=True):
        assert got.shape == want.shape
        if (wrong := np.argwhere(got != want)).size:
            at = tuple(wrong[0])
            pytest.fail(f"{len(wrong)} {what} bytes differ, first at {at}: {got[at]:#04x}, expected {want[at]:#04x}")


@pytest.mark.parametrize("case", QUANTIZE_CASES, ids=str)
def test_named_case(case: QuantizeCase, device: torch.device) -> None:
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, : len(case.x)] = torch.tensor(case.x, dtype=torch.float64)
    x = x.to(getattr(torch, case.dtype)).to(device)
    q = mxfp8.quantize(x, fmt=case.fmt, scale_rule=case.rule, satfinite=case.satfinite)
    codes, scales = raw(q)
    rest = 0x7F if case.byte == 255 else 0x00
    assert (scales.item(), tuple(codes[0, : len(case.x)])) == (case.byte, case.data), case.why
    assert (codes[0, len(case.x) :] == rest).all()


def test_named_cases_are_named_once() -> None:
    names = [case.name for case in QUANTIZE_CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_every_bf16_amax(fmt: str, rule: str, device: torch.device) -> None:
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)  # zero to the largest finite number
    x = (amax[:, None] * torch.empty(32).uniform_(-1, 1)).bfloat16()
    x[:, 0], x[1::2, 0] = amax, -amax[1::2]
    assert torch.equal(x.abs().amax(1), amax)
    codes, scales = oracles.quantize(x.double().numpy(), 1, 32, fmt, rule)
    q = mxfp8.quantize(x.to(device), fmt=fmt, scale_rule=rule)
    assert_bits(q, codes, scales)
    assert_bits(mxfp8.quantize(x.float().to(device), fmt=fmt, scale_rule=rule), codes, scales)
    # ml_dtypes rounds the elements, given the scale; its casts do not saturate, so clip first.
    scaled = np.ldexp(x.double().numpy(), 127 - scales.astype(int)).clip(-get_format(fmt).max, get_format(fmt).max)
    assert (scaled.astype(np.float32).astype(THEIRS[fmt]).view(np.uint8) == codes).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_elements_against_gfloat(fmt: str, device: torch.device) -> None:
    gfloat = pytest.importorskip("gfloat", reason="the second opinion gfloat is not installed")
    from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2

    info = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}[fmt]
    x = torch.randn(4096, 32) * torch.exp2(torch.randint(-20, 20, (4096, 32)))
    for rule in oracles.RULES:
        q = mxfp8.quantize(x.to(device), fmt=fmt, scale_rule=rule)
        scaled = np.ldexp(x.double().numpy(), 127 - q.scale_bytes.cpu().numpy().astype(int))
        theirs = gfloat.round_ndarray(info, scaled, gfloat.RoundMode.TiesToEven, True)
        ours = oracles.ELEMENTS[fmt].table[raw(q)[0]]
        assert (ours == theirs).all()
        assert (np.signbit(ours) == np.signbit(theirs)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_midpoint_and_its_neighbours(fmt: str, device: torch.device) -> None:
    """Between codes c and c + 1: the midpoint goes to the even one, an ulp to either side decides."""
    finite = oracles.ELEMENTS[fmt].finite
    middle = torch.tensor((finite[1:] + finite[:-1]) / 2)
    code = np.arange(len(middle))
    top = {"e4m3": 246, "e5m2": 239}[fmt]
    for byte in (0, 1, 2, 22, 23, 24, 64, 126, 127, 128, 200, top):
        tie = torch.ldexp(middle, torch.tensor(byte - 127)).float()
        assert torch.equal(tie.double(), torch.ldexp(middle, torch.tensor(byte - 127)))
        anchor = torch.full_like(tie, get_format(fmt).max * 2.0 ** (byte - 127))
        below, above = torch.nextafter(tie, torch.zeros(())), torch.nextafter(tie, torch.tensor(torch.inf))
        x = torch.zeros(len(tie), 32)
        x[:, :7] = torch.stack([anchor, tie, -tie, below, -below, above, -above], dim=1)
        codes, scales = raw(mxfp8.quantize(x.to(device), fmt=fmt))
        assert (scales == byte).all()
        even = code + code % 2
        want = np.stack([even, even | 0x80, code, code | 0x80, code + 1, code + 1 | 0x80], axis=1)
        assert (codes[:, 1:7] == want).all()


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
def test_scale_bytes_around_every_limit(fmt: str, rule: str, device: torch.device) -> None:
    """64 ulps to either side of M 2^k, of 2^k and of EVEN's half step, for every k: where rules change their mind."""
    form = get_format(fmt)
    half_step = 2.0 - 2.0 ** -(form.mantissa_bits + 1)
    centres = np.concatenate([np.ldexp(m, np.arange(-149, 128)) for m in (form.max / 2.0**form.emax, 1.0, half_step)])
    with np.errstate(over="ignore"):
        bits = centres.astype(np.float32).view(np.int32)[:, None] + np.arange(-64, 65, dtype=np.int32)
    bits = np.unique(bits.clip(0, 0x7F7FFFFF)).astype(np.int32)
    amax = bits.view(np.float32).astype(np.float64)
    x = torch.zeros(len(bits), 32)
    x[:, 5] = -torch.from_numpy(bits).view(torch.float32)
    q = mxfp8.quantize(x.to(device), fmt=fmt, scale_rule=rule)
    want = oracles.scale_byte(amax, fmt, rule)
    assert (q.scale_bytes[:, 0].cpu().numpy() == want).all()
    if rule in ("rceil", "ceil"):  # these two never clip
        assert (amax <= np.ldexp(form.max, want - 127)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_rceil_over_a_whole_binade(fmt: str, device: torch.device) -> None:
    """All 2^23 mantissas: no division, reciprocal or logarithm has to be trusted."""
    form = get_format(fmt)
    bits = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32, device=device)
    got = scale_byte(bits, form, get_scale_rule("rceil")).to(torch.uint8)
    limit = torch.tensor(form.max * 2.0**-form.emax, device=device)
    want = 127 - form.emax + (bits.view(torch.float32) > limit).to(torch.uint8)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rule", oracles.RULES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_blocks_axes_and_tails(block: tuple[int, int], axis: int, fmt: str, rule: str, device: torch.device) -> None:
    rows, cols = block if axis == -1 else block[::-1]
    for shape in ((3, 40), (40, 3), (33, 129), (130, 257), (1, 1), (128, 256)):
        x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape))
        codes, scales = oracles.quantize(x.double().numpy(), rows, cols, fmt, rule)
        assert_bits(mxfp8.quantize(x.to(device), axis, fmt, block, rule), codes, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_strides_never_matter(block: tuple[int, int], axis: int, dtype: torch.dtype, device: torch.device) -> None:
    base = torch.randn(4, 36, 8, 66, device=device).to(dtype)
    layouts = {
        "transposed": base[0, :, :3].transpose(0, 2)[:9],
        "sliced": base[1, ::3, 2:7, 1::2],
        "four_d": base.transpose(1, 2)[:2, ::4],
        "expanded_row": base[0, 0, :1].expand(70, 66),
        "expanded_column": base[0, :, 0, :1].expand(36, 70),
        "offset": base.flatten()[5:].as_strided((33, 40), (41, 1)),
        "permuted": base[:, :3].permute(3, 1, 0, 2)[:5],
    }
    for name, x in layouts.items():
        got, want = mxfp8.quantize(x, axis, block=block), mxfp8.quantize(x.contiguous(), axis, block=block)
        assert got.shape == x.shape, name
        assert all((g == w).all() for g, w in zip(raw(got), raw(want), strict=True)), name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(laid_out())
def test_any_input_against_the_oracle(laid: Laid) -> None:
    q = mxfp8.quantize(laid.x, laid.axis, laid.fmt, laid.block, laid.rule)
    rows, cols = laid.block if laid.axis == -1 else laid.block[::-1]
    flat = laid.x.float().double().reshape(-1, *laid.x.shape[-2:])
    for i, matrix in enumerate(flat):
        codes, scales = oracles.quantize(matrix.numpy(), rows, cols, laid.fmt, laid.rule)
        got_codes, got_scales = raw(q)
        assert (got_codes.reshape(len(flat), *codes.shape)[i] == codes).all()
        assert (got_scales.reshape(len(flat), *scales.shape)[i] == scales).all()


@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_blocks_do_not_see_each_other(block: tuple[int, int], device: torch.device) -> None:
    """Poison one block at a time: its bytes change, all others stay. Leading dimensions and tails included."""
    rows, cols = block
    x = torch.randn(2, 2 * rows + 1, 2 * cols + 5, device=device)
    codes, scales = raw(mxfp8.quantize(x, block=block))
    for batch, i, j in itertools.product(range(2), range(3), range(3)):
        y = x.clone()
        y[batch, i * rows, j * cols] = torch.nan
        got_codes, got_scales = raw(mxfp8.quantize(y, block=block))
        inside = np.zeros(x.shape, dtype=bool)
        inside[batch, i * rows : (i + 1) * rows, j * cols : (j + 1) * cols] = True
        assert (got_codes[inside] == 0x7F).all()
        assert (got_codes[~inside] == codes[~inside]).all()
        assert (np.argwhere(got_scales != scales) == [[batch, i, j]]).all()
        assert got_scales[batch, i, j] == 255


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_tail_is_a_block_padded_with_zeros(rounding: str, device: torch.device) -> None:
    x = torch.randn(37, 45, device=device)
    padded = torch.nn.functional.pad(x, (0, 51 - 32, 0, 27))
    for block, axis in itertools.product(((1, 32), (32, 32)), (-1, -2)):
        q = mxfp8.quantize(x, axis, block=block, rounding=rounding, seed=3)
        p = mxfp8.quantize(padded, axis, block=block, rounding=rounding, seed=3)
        assert q.shape == x.shape
        assert (raw(q)[0] == raw(p)[0][:37, :45]).all()
        rows, cols = q.scale_bytes.shape
        assert torch.equal(q.scale_bytes, p.scale_bytes[:rows, :cols])
        assert not p.scale_bytes[rows:].any()
        assert not p.scale_bytes[:, cols:].any()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(0,), (0, 0), (0, 40), (5, 0), (2, 0, 40), (0, 5, 40), (0, 0, 0)], ids=str)
def test_empty(shape: tuple[int, ...], rounding: str, device: torch.device) -> None:
    for block, axis in itertools.product(BLOCK_SHAPES, (-1, -2)):
        if len(shape) == 1 and (block[0] != 1 or axis == -2):
            continue
        q = mxfp8.quantize(torch.empty(shape, device=device), axis, block=block, rounding=rounding, seed=0)
        assert q.shape == shape == q.dequantize().shape
        assert q.device.type == device.type
        assert not q.scale_bytes.any()


def test_one_dimension_is_a_row(device: torch.device) -> None:
    x = torch.randn(77, device=device)
    for block in ((1, 32), (1, 128), (1, 256)):
        q, row = mxfp8.quantize(x, block=block), mxfp8.quantize(x[None], block=block)
        assert_bits(q, raw(row)[0][0], raw(row)[1][0])
        assert torch.equal(q.dequantize(), row.dequantize()[0])


def test_input_is_left_alone_and_gives_no_gradient(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device, requires_grad=True)
    before, version = x.detach().clone(), x._version
    q = mxfp8.quantize(x)
    assert torch.equal(x, before)
    assert x._version == version
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize("fake", ["meta", "fake"])
def test_meta_and_fake_tensors_give_shapes(fake: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for block, axis, rounding in itertools.product(BLOCK_SHAPES, (-1, -2), ("nearest", "stochastic")):
        real = mxfp8.quantize(torch.zeros(3, 45, 70), axis, block=block)
        scale, expanded = real.scale.shape, real.expanded_scale().shape
        with mode:
            x = torch.empty(3, 45, 70, device="meta" if fake == "meta" else "cpu")
            q = mxfp8.quantize(x, axis, block=block, rounding=rounding, seed=1)
            assert (q.shape, q.scale.shape, q.qdata.dtype) == (real.shape, scale, real.qdata.dtype)
            assert q.dequantize().shape == x.shape
            assert q.expanded_scale().shape == expanded


@pytest.mark.parametrize("rule", oracles.RULES)
def test_torch_settings_do_not_reach_the_bits(rule: str, device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    want = raw(mxfp8.quantize(x, scale_rule=rule))
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.inference_mode():
        got = raw(mxfp8.quantize(x, scale_rule=rule))
    assert all((g == w).all() for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "error, match, call",
    [
        (TypeError, "not torch.int32", lambda x: mxfp8.quantize(x.int())),
        (TypeError, "not torch.complex64", lambda x: mxfp8.quantize(x.to(torch.complex64))),
        (TypeError, "not torch.float8_e4m3fn", lambda x: mxfp8.quantize(x.to(torch.float8_e4m3fn))),
        (TypeError, "not list", lambda x: mxfp8.quantize([1.0])),
        (TypeError, "not MXTensor", lambda x: mxfp8.quantize(mxfp8.quantize(x))),
        (ValueError, "axis is 0: use -1", lambda x: mxfp8.quantize(x, 0)),
        (ValueError, "axis is 1: use -1", lambda x: mxfp8.quantize(x, 1)),
        (ValueError, "0-dim", lambda x: mxfp8.quantize(x[0, 0])),
        (ValueError, "1-D", lambda x: mxfp8.quantize(x[0], -2)),
        (ValueError, "1-D", lambda x: mxfp8.quantize(x[0], block=(32, 32))),
        (ValueError, r"\(1, 64\)", lambda x: mxfp8.quantize(x, block=(1, 64))),
        (ValueError, "'e3m4'", lambda x: mxfp8.quantize(x, fmt="e3m4")),
        (ValueError, "'up'", lambda x: mxfp8.quantize(x, scale_rule="up")),
        (ValueError, "'up'", lambda x: mxfp8.quantize(x, rounding="up")),
        (ValueError, "needs seed", lambda x: mxfp8.quantize(x, rounding="stochastic")),
        (TypeError, "seed is 1.5", lambda x: mxfp8.quantize(x, rounding="stochastic", seed=1.5)),
        (ValueError, "seed is -1", lambda x: mxfp8.quantize(x, rounding="stochastic", seed=-1)),
        (ValueError, "'cuda9'", lambda x: mxfp8.quantize(x, backend="cuda9")),
    ],
)
def test_bad_arguments_are_named(error, match, call) -> None:
    with pytest.raises(error, match=match):
        call(torch.zeros(4, 32))
