"""Activations with MX casts, on every backend that runs here, the reference included, and what they share with norms.

Two kinds of assertion. Bit for bit: relu and hardswish. Inside an interval: what cannot be the same bits is compared
with float64, and every scale byte and element must be one that some value within the derived error would give.
"""

import dataclasses
import functools
import itertools

import pytest
import torch

import mxfp8
from mxfp8 import fused
from mxfp8.formats import BlockShape, get_format
from mxfp8.reference import fused as reference
from mxfp8.tensor import MXTensor
from numerics_tests import tolerances
from numerics_tests.fused_oracle import (
    ALL,
    EXACT,
    INPUTS,
    LAYOUTS,
    SMALL,
    SMOOTH,
    check_inside,
    exact_activation,
    flat,
    gradient_bounds,
    padding_is_zero,
    recomputed,
    same,
    size,
    value_error,
    values,
    widened,
)

OPS = ("activation_quantize", "activation_quantize_backward", "norm_quantize", "norm_quantize_backward")
PAIRS = [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((32, 32), (32, 32)), ((1, 256), (1, 128)), ((1, 32), (1, 256)),
         ((1, 256), (1, 256))]  # fmt: skip


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


def test_gelu_by_logistic_is_gelu_by_tanh() -> None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    want = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(exact_activation(x, "gelu_tanh"), want, rtol=1e-12, atol=1e-14)


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
