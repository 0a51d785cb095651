"""Activations and norms with MX casts, on every backend that runs here, the reference included.

Three kinds of assertion. Bit for bit: relu and hardswish, and norms given the statistics that they return. Inside an
interval: what cannot be the same bits is compared with float64, and every scale byte and element must be one that some
value within the derived error would give. Alone: formulas of gradients against autograd, statistics against float64.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch

import mxfp8
from mxfp8 import dispatch, fused
from mxfp8.formats import BlockShape, ElementFormat, get_format
from mxfp8.reference import fused as reference
from mxfp8.reference.quantize import scale_byte
from mxfp8.tensor import MXTensor, block_rc
from numerics_tests import tolerances

OPS = ("activation_quantize", "activation_quantize_backward", "norm_quantize", "norm_quantize_backward")
ALL = ("rows", "columns", "hp")
PAIRS = [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((32, 32), (32, 32)), ((1, 256), (1, 128)), ((1, 32), (1, 256)),
         ((1, 256), (1, 256))]  # fmt: skip
EXACT = ("relu", "hardswish")
SMOOTH = tuple(a for a in reference.ACTIVATIONS if a not in EXACT)
BLUNT = 1e-2
"""Elements for which an interval may leave a choice: more would hide what it is to find. gelu's tail comes closest."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dispatch's table may not have yet."""
    monkeypatch.setattr(dispatch, "OPS", (*dispatch.OPS, *(op for op in OPS if op not in dispatch.OPS)))
    for op in OPS:
        monkeypatch.setitem(dispatch._functions, (op, "reference"), getattr(reference, op))
        monkeypatch.setitem(dispatch._FILES, op, op.removesuffix("_backward"))


@pytest.fixture(params=["reference", "triton", "hopper"])
def kernels(request: pytest.FixtureRequest) -> tuple[str, torch.device]:
    """A backend's name and the device where it runs; skips with dispatch's reason where it cannot."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := dispatch.why_not("norm_quantize", request.param, device):
        pytest.skip(f"{request.param}: {reason}")
    return request.param, device


def values(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 3.0) -> torch.Tensor:
    return (
        (torch.randn(shape) * torch.exp2(torch.randint(-3, 2, (*shape[:-1], 1)).float()) * spread).to(dtype).to(device)
    )


SMALL = not torch.cuda.is_available()
"""Whether kernels are interpreted, in tiles of 64x128 or of one block: a few programs with tails are enough there."""


def size(large: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, ...]:
    return small if SMALL else large


LAYOUTS: dict[str, Callable[[torch.dtype, torch.device], torch.Tensor]] = {
    "whole": lambda dt, dev: values(*size((128, 256), (64, 256)), dtype=dt, device=dev),
    "tails": lambda dt, dev: values(*size((129, 304), (70, 144)), dtype=dt, device=dev),
    "ragged": lambda dt, dev: values(33, 70, dtype=dt, device=dev),
    "transposed": lambda dt, dev: values(*size((160, 96), (144, 64)), dtype=dt, device=dev).t(),
    "slice": lambda dt, dev: values(*size((70, 320), (48, 192)), dtype=dt, device=dev)[:, 32:-32],
    "unaligned": lambda dt, dev: values(64, 131, dtype=dt, device=dev)[:, 1:],
    "batch": lambda dt, dev: values(*size((3, 40, 96), (2, 40, 96)), dtype=dt, device=dev),
    "one_row": lambda dt, dev: values(1, 128, dtype=dt, device=dev),
    "one_column_pair": lambda dt, dev: values(64, 2, dtype=dt, device=dev),
    "no_rows": lambda dt, dev: values(0, 64, dtype=dt, device=dev),
}


INPUTS = [(name, torch.bfloat16) for name in LAYOUTS]
INPUTS += [(name, dtype) for name in ("tails", "batch") for dtype in (torch.float32, torch.float16)]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with one pattern for every NaN."""
    if x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view(INTEGERS[x.dtype.itemsize])


def flat(result: tuple[object, ...]) -> list[torch.Tensor | None]:
    out: list[torch.Tensor | None] = []
    for part in result:
        out += [part.qdata, part.scale_bytes] if isinstance(part, MXTensor) else [part]  # type: ignore[list-item]
    return out


def same(got: tuple[object, ...], want: tuple[object, ...]) -> list[str]:
    """Which parts of two results differ, and in how many entries."""
    out = []
    for i, (g, w) in enumerate(zip(flat(got), flat(want), strict=True)):
        if g is None or w is None:
            out += [] if g is w else [f"part {i}: one is None"]
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype), i
        if wrong := int((bits(g) != bits(w)).sum()):
            out.append(f"part {i} ({g.dtype}, {tuple(g.shape)}): {wrong} differ")
    return out


def padding_is_zero(columns: MXTensor) -> bool:
    """The bytes between the columns of a column-major copy."""
    q = columns.qdata.view(torch.uint8)
    if q.stride(-2) != 1 or q.numel() == 0 or q.ndim != 2:
        return True
    pitch = q.stride(-1)
    return not torch.as_strided(q, (q.shape[1], pitch), (pitch, 1))[:, q.shape[0] :].any()


def grid(x: torch.Tensor, rc: tuple[int, int]) -> torch.Tensor:
    """``[..., R, C]`` as ``[..., R / r, r, C / c, c]``, padded with zeros."""
    r, c = rc
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % c, 0, -x.shape[-2] % r))
    return x.unflatten(-1, (-1, c)).unflatten(-3, (-1, r))


def outward(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 bounds as float32 numbers that are not inside them."""
    below, above = low.to(torch.float32), high.to(torch.float32)
    inf = torch.tensor(torch.inf, device=low.device)
    below = torch.where(below.to(torch.float64) > low, torch.nextafter(below, -inf), below)
    return below, torch.where(above.to(torch.float64) < high, torch.nextafter(above, inf), above)


def outside(q: MXTensor, low: torch.Tensor, high: torch.Tensor, rule: str = "rceil") -> tuple[int, int, float]:
    """How many scale bytes and how many elements no value in ``[low, high]`` gives; and for what part of the elements
    the interval leaves a choice, which is how blunt the check is."""
    rc, fmt, rule_ = block_rc(q.block, q.axis), q.fmt, mxfp8.ScaleRule(rule)
    least = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
    most = torch.maximum(low.abs(), high.abs())
    byte = q.scale_bytes.to(torch.int32)
    lo, hi = (scale_byte(grid(v, rc).amax((-3, -1)).view(torch.int32), fmt, rule_) for v in (least, most))
    inverse = torch.where(byte == 254, 0x00400000, (254 - byte) << 23).view(torch.float32)[..., :, None, :, None]
    floor, ceiling = (rounded(grid(v, rc) * inverse, fmt) for v in (low, high))
    element = grid(q.qdata.to(torch.float32), rc)
    wrong = (element < floor) | (element > ceiling)
    return int(((byte < lo) | (byte > hi)).sum()), int(wrong.sum()), float((floor != ceiling).float().mean())


def rounded(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype).to(torch.float32)


def check_inside(
    result: tuple[object, ...], exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype, round_first: bool
) -> None:
    """Every part of a result is one of ``exact +- error``; and the interval decides nearly every element."""
    low, high = outward(exact - error, exact + error)
    near = (low.to(dtype), high.to(dtype))
    for part in result[:2]:
        if isinstance(part, MXTensor):
            bounds = (n.to(torch.float32) for n in near) if round_first else (low, high)
            scales, elements, blunt = outside(part, *bounds)
            assert (scales, elements) == (0, 0), (part.axis, part.block)
            assert blunt < BLUNT or exact.numel() < 10_000, "the bound decides too little"
    hp = result[2]
    if isinstance(hp, torch.Tensor):
        assert hp.dtype == dtype
        assert ((hp >= near[0]) & (hp <= near[1])).all()


def exact_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Independent of the reference: torch's own functions in float64. Its gelu by tanh cancels in float64 too."""
    functional = torch.nn.functional
    if activation == "swiglu":
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return getattr(functional, activation)(x)


def widened(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the activation is taken of, in float64: the float32 sum."""
    return (x.float() if bias is None else x.float() + bias.float()).double()


def value_error(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != "swiglu":
        return tolerances.activation_error(activation, x)
    gate, up = x.chunk(2, -1)
    product = torch.nn.functional.silu(gate) * up
    return tolerances.activation_error("silu", gate) * up.abs() + tolerances.U32 * product.abs()


def gradient_bounds(x: torch.Tensor, dy: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact gradient by autograd in float64, and the error of a float32 one."""
    x = x.clone().requires_grad_()
    exact_activation(x, activation).backward(dy)
    exact, x = x.grad, x.detach()
    assert exact is not None
    if activation != "swiglu":
        error = dy.abs() * tolerances.activation_gradient_error(activation, x)
    else:
        gate, up = x.chunk(2, -1)
        through_gate = (dy * up).abs() * tolerances.activation_gradient_error("silu", gate)
        error = torch.cat([through_gate, dy.abs() * tolerances.activation_error("silu", gate)], -1)
    return exact, error * 1.01 + 3 * tolerances.U32 * exact.abs() + tolerances.SMALLEST[torch.float32]


def biases(x: torch.Tensor) -> list[torch.Tensor | None]:
    return [None, torch.randn(x.shape[-1]).to(x.device)]


@pytest.mark.parametrize("layout, dtype", INPUTS, ids=str)
@pytest.mark.parametrize("activation", EXACT)
def test_exact_activations_are_the_reference_bit_for_bit(
    kernels: tuple[str, torch.device], activation: str, dtype: torch.dtype, layout: str
) -> None:
    """With specials: NaN (in the last rows too, beside padding), infinities, both zeros, the corners of hardswish."""
    backend, device = kernels
    x = LAYOUTS[layout](dtype, device)
    if x.numel() > 2000:
        special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3, -3, 2.998, -2.998, 1e-39, 6e4, -6e4]
        x[..., (1, -1), :12] = torch.tensor(special, dtype=dtype, device=device)
    dy = values(*x.shape, dtype=dtype, device=device)
    for bias, round_first in zip(biases(x), (False, True), strict=True):
        kw = {"outputs": ALL, "round_first": round_first}
        got = fused.activation_quantize(x, activation, bias, backend=backend, **kw)  # type: ignore[arg-type]
        assert same(got, fused.activation_quantize(x, activation, bias, backend="reference", **kw)) == []  # type: ignore[arg-type]
        assert got.columns is not None
        assert padding_is_zero(got.columns)
        back = fused.activation_quantize_backward(dy, x, activation, bias, backend=backend, **kw)  # type: ignore[arg-type]
        want = fused.activation_quantize_backward(dy, x, activation, bias, backend="reference", **kw)  # type: ignore[arg-type]
        assert same(back[:3], want[:3]) == []


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_pair_of_blocks_and_every_choice_of_outputs(
    kernels: tuple[str, torch.device], pair: tuple[BlockShape, BlockShape], fmt: str
) -> None:
    backend, device = kernels
    x = values(161, 288, dtype=torch.bfloat16, device=device)
    if SMALL:  # two tiles each way, one of them with a tail
        rows, cols = (max(b[i] for b in pair) for i in (0, 1))
        x = x[: max(64, rows, pair[1][1]) + 9, : max(128, cols) + 16]
    for n in (1, 2, 3) if pair == PAIRS[1] and (fmt == "e4m3" or not SMALL) else (3,):
        for outputs in itertools.combinations(ALL, n):
            kw = {"fmt": fmt, "block": pair[0], "column_block": pair[1], "outputs": outputs, "scale_rule": "floor"}
            got = fused.activation_quantize(x, "hardswish", backend=backend, **kw)  # type: ignore[arg-type]
            assert [part is not None for part in got] == [name in outputs for name in ALL]
            assert same(got, fused.activation_quantize(x, "hardswish", backend="reference", **kw)) == []  # type: ignore[arg-type]
            norm = fused.norm_quantize(x, backend=backend, **kw)  # type: ignore[arg-type]
            assert [part is not None for part in norm[:3]] == [name in outputs for name in ALL]
            assert same(norm[:3], recomputed(norm, None, None, x.dtype, "rms", 256, kw)) == []


@pytest.mark.parametrize("layout, dtype", INPUTS, ids=str)
@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activations_and_gradients_lie_in_their_intervals(
    kernels: tuple[str, torch.device], activation: str, dtype: torch.dtype, layout: str
) -> None:
    backend, device = kernels
    x = LAYOUTS[layout](dtype, device)
    width = x.shape[-1] // 2 if activation == "swiglu" else x.shape[-1]
    dy = values(*x.shape[:-1], width, dtype=dtype, device=device)
    for bias, round_first in zip(biases(x), (True, False), strict=True):
        kw = {"outputs": ALL, "round_first": round_first, "backend": backend}
        wide = widened(x, bias)
        got = fused.activation_quantize(x, activation, bias, **kw)  # type: ignore[arg-type]
        check_inside(got, exact_activation(wide, activation), value_error(wide, activation), dtype, round_first)
        back = fused.activation_quantize_backward(dy, x, activation, bias, **kw)  # type: ignore[arg-type]
        exact, error = gradient_bounds(wide, dy.double(), activation)
        check_inside(back, exact, error, dtype, round_first)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_the_gradient_of_the_bias_is_a_float32_sum(kernels: tuple[str, torch.device], activation: str) -> None:
    backend, device = kernels
    rows = 70 if SMALL else 333
    x = values(2, rows, 96, dtype=torch.bfloat16, device=device)
    dy = values(2, rows, 48 if activation == "swiglu" else 96, dtype=torch.bfloat16, device=device)
    bias = torch.randn(96, device=device)
    runs = [
        fused.activation_quantize_backward(dy, x, activation, bias, outputs=o, backend=backend).bias
        for o in (("rows", "columns"), ("rows", "columns"), ("hp",), ("rows",), ("columns",))
    ]
    exact, error = gradient_bounds(widened(x, bias), dy.double(), activation)
    rows, error = exact.reshape(-1, 96), error.reshape(-1, 96)
    bound = tolerances.sum_error(rows.abs() + error, torch.float32) + error.sum(0)
    for run in runs:
        assert run is not None
        assert run.dtype == torch.float32
        assert ((run.double() - rows.sum(0)).abs() <= bound).all()
    assert torch.equal(runs[0], runs[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", PAIRS[1:2] if SMALL else [*PAIRS[:3], ((1, 128), (1, 128))], ids=str)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_copies_made_alone_are_those_made_together(
    kernels: tuple[str, torch.device], activation: str, pair: tuple[BlockShape, BlockShape]
) -> None:
    """By other kernels, or in other layouts of their threads: the same bits, beside padding and in it too."""
    backend, device = kernels
    halves = 2 if activation == "swiglu" else 1
    shapes = [(256, 256), (385, 304)] if not SMALL else [(71, 144)]
    for rows, columns in shapes:
        x = values(rows, halves * columns, dtype=torch.bfloat16, device=device)
        dy = values(rows, columns, dtype=torch.bfloat16, device=device)
        x[-1, :2] = torch.tensor([torch.nan, torch.inf], dtype=x.dtype)
        bias = None if rows == 256 else torch.randn(halves * columns).to(device)
        kw = {"block": pair[0], "column_block": pair[1]}
        for compute in (
            functools.partial(fused.activation_quantize, x, activation, bias, **kw),  # type: ignore[arg-type]
            functools.partial(fused.activation_quantize_backward, dy, x, activation, bias, **kw),  # type: ignore[arg-type]
        ):
            both = compute(outputs=("rows", "columns"), backend=backend)[:2]
            if activation in EXACT:
                assert same(both, compute(outputs=("rows", "columns"), backend="reference")[:2]) == []
            for i, name in enumerate(("rows", "columns")):
                alone = compute(outputs=(name,), backend=backend)
                assert same((alone[i],), (both[i],)) == [], name
                assert name == "rows" or (padding_is_zero(alone[i]) and padding_is_zero(both[i]))


@pytest.mark.parametrize("activation", SMOOTH)
def test_backends_differ_from_the_reference_in_few_elements(kernels: tuple[str, torch.device], activation: str) -> None:
    """The interval admits one step; this says how often it is taken."""
    backend, device = kernels
    x = values(*size((512, 512), (128, 256)), dtype=torch.bfloat16, device=device)
    got = flat(fused.activation_quantize(x, activation, backend=backend))
    want = flat(fused.activation_quantize(x, activation, backend="reference"))
    for g, w in zip(got, want, strict=True):
        if g is None or w is None:
            continue
        steps = (g.view(torch.uint8).int() - w.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-3


def test_a_block_across_gate_and_up(kernels: tuple[str, torch.device]) -> None:
    """swiglu of 40 columns: the gradient's second block of 32 holds eight columns of the gate and 24 of up."""
    backend, device = kernels
    x, dy = (values(64, n, dtype=torch.float32, device=device) for n in (80, 40))
    for block in ((1, 32), (32, 32)):
        got = fused.activation_quantize_backward(dy, x, "swiglu", block=block, backend=backend, outputs=ALL)
        assert got.rows is not None
        assert got.columns is not None
        assert got.hp is not None
        want = mxfp8.ops.quantize_both(got.hp, block=block, backend="reference")
        assert same((got.rows, got.columns), want) == []


def recomputed(
    result: fused.Normalized, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, norm: str,
    norm_block: int, kw: dict[str, object],
) -> tuple[object, ...]:  # fmt: skip
    """What the returned sum and statistics say that the copies must be."""
    h, size = result.h.float(), norm_block if norm == "block" else max(1, result.h.shape[-1])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(size, -1)[..., : h.shape[-1]]

    y = h if result.mean is None else h - spread(result.mean)
    y = y * spread(result.rstd)
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    outputs, hp = kw.get("outputs", ("rows", "columns")), y.to(dtype)
    casts = {k: v for k, v in kw.items() if k in ("fmt", "scale_rule", "block", "column_block")}
    value = hp if kw.get("round_first") else y
    rows, columns = mxfp8.ops.quantize_both(value, backend="reference", **casts)  # type: ignore[arg-type]
    made = {"rows": rows, "columns": columns, "hp": hp}
    return tuple(made[name] if name in outputs else None for name in ALL)  # type: ignore[operator]


# Blocks as wide as a tile; and blocks wider than any row here, which is one block then.
WIDE_BLOCKS = [("block", 128, name, torch.bfloat16) for name in ("tails", "ragged", "unaligned", "slice", "no_rows")]
WIDE_BLOCKS += [("block", 128, "batch", torch.float16), ("block", 1024, "batch", torch.float32)]
WIDE_BLOCKS += [("block", 1024, "tails", torch.bfloat16), ("block", 1024, "no_rows", torch.bfloat16)]
if not SMALL:
    WIDE_BLOCKS = [("block", width, *of) for width in (128, 1024) for of in INPUTS]
NORMS = [(*norm, *of) for norm in (("rms", 256), ("layer", 256), ("block", 32)) for of in INPUTS] + WIDE_BLOCKS


@pytest.mark.parametrize("norm, norm_block, layout, dtype", NORMS, ids=str)
def test_norms_are_exact_given_their_statistics(
    kernels: tuple[str, torch.device], norm: str, norm_block: int, dtype: torch.dtype, layout: str
) -> None:
    backend, device = kernels
    x = LAYOUTS[layout](dtype, device)
    weight, bias = (torch.randn(x.shape[-1]).to(dtype).to(device) for _ in range(2))
    residual = values(*x.shape, dtype=dtype, device=device)
    group = norm_block if norm == "block" else max(1, x.shape[-1])
    for w, b, r, round_first in (
        (None, None, None, False),
        (weight, bias, residual, True),
        (weight, None, None, False),
    ):
        kw = {"outputs": ALL, "round_first": round_first}
        got = fused.norm_quantize(x, w, b, r, norm=norm, norm_block=norm_block, backend=backend, **kw)  # type: ignore[arg-type]
        want_h = x if r is None else (x.float() + r.float()).to(dtype)
        assert torch.equal(bits(got.h), bits(want_h))
        assert same(got[:3], recomputed(got, w, b, dtype, norm, group, kw)) == []
        assert got.columns is not None
        assert padding_is_zero(got.columns)
        h = want_h.double()
        mean = h.mean(-1, keepdim=True)
        for part, rstd in zip(h.split(group, -1), got.rstd.split(1, -1), strict=True):
            centred = part - mean if norm == "layer" else part
            exact = 1 / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            bound = tolerances.layer_error(group, 3.0) if norm == "layer" else tolerances.rms_error(group)
            assert ((rstd - exact).abs() <= bound * exact).all()
        if norm == "layer":
            assert got.mean is not None
            assert ((got.mean - mean).abs() <= (group + 4) * tolerances.U32 * h.abs().mean(-1, keepdim=True)).all()
        else:
            assert got.mean is None


def test_a_far_mean_does_not_cancel(kernels: tuple[str, torch.device]) -> None:
    """sigma 1 around 4096: squares minus the square of the mean would be wrong by several of 1."""
    backend, device = kernels
    x = (4096 + torch.randn(64, 384)).to(device)
    got = fused.norm_quantize(x, norm="layer", backend=backend)
    exact = 1 / (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert ((got.rstd - exact).abs() <= tolerances.layer_error(16, 4096.0) * exact).all()  # sums are trees, or nearly


@pytest.mark.parametrize("norm, norm_block, layout, dtype", NORMS, ids=str)
def test_gradients_of_norms_lie_in_their_intervals(
    kernels: tuple[str, torch.device], norm: str, norm_block: int, dtype: torch.dtype, layout: str
) -> None:
    backend, device = kernels
    h = LAYOUTS[layout](dtype, device)
    dy, dh = (values(*h.shape, dtype=dtype, device=device) for _ in range(2))
    group = norm_block if norm == "block" else max(1, h.shape[-1])
    for affine, extra, round_first in ((None, None, False), (torch.randn(h.shape[-1]).to(device), dh, True)):
        kw = {"norm": norm, "norm_block": norm_block, "backend": backend}
        saved = fused.norm_quantize(h, affine, affine, outputs=("rows",), **kw)  # type: ignore[arg-type]
        got = fused.norm_quantize_backward(
            dy, h, saved.rstd, saved.mean, affine, extra, with_bias=affine is not None, outputs=ALL,
            round_first=round_first, **kw,  # type: ignore[arg-type]
        )  # fmt: skip
        wide, g = h.double(), dy.double() if affine is None else dy.double() * affine.double()
        factor = saved.rstd.double().repeat_interleave(group, -1)[..., : h.shape[-1]]
        normed = (wide if saved.mean is None else wide - saved.mean.double()) * factor

        def mean(v: torch.Tensor) -> torch.Tensor:
            return torch.cat([p.mean(-1, keepdim=True).expand_as(p) for p in v.split(group, -1)], -1)

        exact = factor * (g - normed * mean(g * normed) - (mean(g) if norm == "layer" else 0))
        error = tolerances.norm_gradient_error(g, normed, factor, group, norm == "layer")
        if norm == "layer" and saved.mean is not None:  # the difference rounds at the size of its operands
            error = error + 4 * tolerances.U32 * factor * mean(g.abs()) * (wide.abs() + saved.mean.abs()) * factor
        if extra is not None:
            error, exact = error + 2 * tolerances.U32 * (exact.abs() + dh.double().abs()), exact + extra.double()
        low, high = outward(exact - error, exact + error)
        near = (low.to(dtype), high.to(dtype))
        assert got.hp is not None
        assert ((got.hp >= near[0]) & (got.hp <= near[1])).all()
        for part in (got.rows, got.columns):
            assert part is not None
            bounds = (n.float() for n in near) if round_first else (low, high)
            assert outside(part, *bounds)[:2] == (0, 0), part.axis
        assert (got.weight is None) == (got.bias is None) == (affine is None)
        for total, terms in ((got.weight, dy.double() * normed), (got.bias, dy.double())):
            if total is not None:
                terms = terms.reshape(-1, h.shape[-1])
                off = tolerances.sum_error(terms, torch.float32) + 3 * tolerances.U32 * terms.abs().sum(0)
                assert ((total - terms.sum(0)).abs() <= off).all()


def test_gradients_of_norms_are_those_of_autograd() -> None:
    """The formula, in float64 terms: torch's own norms differentiated."""
    x, weight, bias, dy = (torch.randn(s, dtype=torch.float64) for s in ((8, 64), (64,), (64,), (8, 64)))
    for norm, group in (("rms", 64), ("layer", 64), ("block", 32)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        parts = leaves[0].split(group, -1)
        if norm == "layer":
            y = torch.nn.functional.layer_norm(leaves[0], (64,), eps=1e-5)
        else:
            y = torch.cat([torch.nn.functional.rms_norm(p, (group,), eps=1e-5) for p in parts], -1)
        (y * leaves[1] + leaves[2]).backward(dy)
        f32 = [t.float() for t in (x, weight, bias, dy)]
        kw = {"norm": norm, "norm_block": 32, "outputs": ("hp",), "backend": "reference"}
        saved = fused.norm_quantize(f32[0], f32[1], f32[2], **kw)  # type: ignore[arg-type]
        got = fused.norm_quantize_backward(
            f32[3], f32[0], saved.rstd, saved.mean, f32[1], with_bias=True, **kw,  # type: ignore[arg-type]
        )  # fmt: skip
        for mine, theirs in zip((got.hp, got.weight, got.bias), (t.grad for t in leaves), strict=True):
            assert mine is not None
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


def test_gelu_by_logistic_is_gelu_by_tanh() -> None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    want = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(exact_activation(x, "gelu_tanh"), want, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
def test_other_memory_does_not_leak_in(kernels: tuple[str, torch.device]) -> None:
    """Buffers full of NaN bytes are freed first, so that what a kernel forgets to write shows."""
    backend, device = kernels
    for rows, byte in itertools.product((1, 31, 33, 129), (0x7F, 0xFF)):
        x = torch.randn(rows, 304, device=device).bfloat16()
        poison = [torch.full((2**n,), byte, dtype=torch.uint8, device=device) for n in range(5, 18)]
        del poison
        got = fused.activation_quantize(x, "relu", outputs=ALL, backend=backend)
        assert same(got, fused.activation_quantize(x, "relu", outputs=ALL, backend="reference")) == []
        norm = fused.norm_quantize(x, outputs=ALL, backend=backend)
        assert same(norm[:3], recomputed(norm, None, None, x.dtype, "rms", 304, {"outputs": ALL})) == []


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("columns", [1024, 4096, 4112, 9200, 40000])
def test_wide_strips_and_many_programs(kernels: tuple[str, torch.device], columns: int, norm: str) -> None:
    """Sizes at which every multiprocessor works, and several of them on one row, 20 times over: the same bits, and the
    right ones."""
    backend, device = kernels
    x = torch.randn(8192 if columns < 8192 else 1000, columns, device=device).bfloat16()
    residual = torch.randn_like(x)
    for outputs in (("rows", "columns"), ("rows",), ("columns",)):
        kw = {"norm": norm, "outputs": outputs, "backend": backend}
        first = fused.norm_quantize(x, None, None, residual, **kw)  # type: ignore[arg-type]
        assert same(first[:3], recomputed(first, None, None, x.dtype, norm, columns, {"outputs": outputs})) == []
        h = first.h.double()
        variance = h.var(-1, correction=0, keepdim=True) if norm == "layer" else h.square().mean(-1, keepdim=True)
        exact = 1 / (variance + 1e-5).sqrt()
        bound = tolerances.layer_error(columns, 1.0) if norm == "layer" else tolerances.rms_error(columns)
        assert ((first.rstd - exact).abs() <= bound * exact).all()
        for _ in range(20 if columns < 8192 else 3):
            assert same(fused.norm_quantize(x, None, None, residual, **kw), first) == []  # type: ignore[arg-type]


CASTS = {"outputs": "rows", "fmt": "e3m4", "block": (1, 16), "column_block": (7, 7), "scale_rule": "round"}


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_checked(name: str) -> None:
    x = torch.randn(32, 64)
    for call in (lambda **kw: fused.activation_quantize(x, "relu", **kw), lambda **kw: fused.norm_quantize(x, **kw)):
        with pytest.raises(ValueError, match=str(CASTS[name])[:5].replace("(", r"\(")):
            call(**{name: CASTS[name]})


def test_inputs_are_checked() -> None:
    x, v = torch.randn(32, 64), torch.randn(64)
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        fused.activation_quantize(x, "tanh")
    with pytest.raises(TypeError, match=r"the input is torch\.float64"):
        fused.activation_quantize(x.double(), "relu")
    with pytest.raises(TypeError, match="bias requires one"):
        fused.activation_quantize(x, "relu", v.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"bias has shape \(63,\)"):
        fused.activation_quantize(x, "relu", v[1:])
    with pytest.raises(ValueError, match="need two dimensions"):
        fused.activation_quantize(v, "relu")
    with pytest.raises(ValueError, match="halves the last dimension, which is 63"):
        fused.activation_quantize(x[:, 1:], "swiglu")
    with pytest.raises(ValueError, match=r"dy is torch.float32 of shape \(32, 64\)"):
        fused.activation_quantize_backward(x, x, "swiglu")
    with pytest.raises(ValueError, match="unknown norm 'group'"):
        fused.norm_quantize(x, norm="group")
    with pytest.raises(ValueError, match="norm_block is 48"):
        fused.norm_quantize(x, norm="block", norm_block=48)
    with pytest.raises(ValueError, match="eps is 0"):
        fused.norm_quantize(x, eps=0)
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        fused.norm_quantize(x, residual=x.half())
    with pytest.raises(ValueError, match="mean is missing"):
        fused.norm_quantize_backward(x, x, v[:32, None], norm="layer")
    with pytest.raises(ValueError, match=r"rstd is torch.float32 of shape \(32, 1\): needs float32 \(32, 2\)"):
        fused.norm_quantize_backward(x, x, v[:32, None], norm="block", norm_block=32)


def test_one_dimension_has_rows() -> None:
    got = fused.activation_quantize(torch.randn(100), "relu", outputs=("rows", "hp"))
    assert got.hp is not None
    assert got.rows is not None
    want = mxfp8.quantize(got.hp, backend="reference")
    assert same((got.rows,), (want,)) == []


@pytest.mark.parametrize("op", OPS)
def test_every_backend_has_the_reference_s_signature(op: str) -> None:
    """Also where it cannot run; dispatch's own test looks only at backends that can."""
    pytest.importorskip("triton", reason="kernels are written in it")
    import importlib
    import inspect

    for backend in ("triton", "hopper"):
        module = importlib.import_module(f"mxfp8.kernels.{op.removesuffix('_backward')}_{backend}")
        mine, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (getattr(module, op), getattr(reference, op))
        )
        assert mine == theirs


def test_the_interval_can_fail() -> None:
    """Four wrong results: an element a step off, a byte one off, a value lost, an activation of something else."""
    x = values(64, 64, dtype=torch.float32, device=torch.device("cpu"))
    exact = exact_activation(x.double(), "silu")
    got = fused.activation_quantize(x, "silu", backend="reference")
    error = value_error(x.double(), "silu")
    assert got.rows is not None
    check_inside(got, exact, error, x.dtype, False)
    codes = got.rows.qdata.view(torch.uint8).clone()
    codes[3, 5] ^= 1
    late = got.rows.scale_bytes.clone()
    late[3, 1] += 1
    for wrong in (
        MXTensor(codes.view(get_format("e4m3").dtype), got.rows.scale_bytes, "e4m3"),
        MXTensor(got.rows.qdata, late, "e4m3"),
        mxfp8.quantize(torch.where(torch.arange(64) == 40, 0.0, exact.float())),
        mxfp8.quantize(exact_activation(x, "gelu_tanh")),
    ):
        with pytest.raises(AssertionError):
            check_inside((wrong, None, None), exact, error, x.dtype, False)
    assert dataclasses.is_dataclass(reference.Casts)
