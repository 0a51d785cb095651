"""Products that end in an activation, in an addition to what is there, or in MX copies, on all backends that run here.

Sums of small integers are exact everywhere, so that relu and hardswish of them, and their casts, are compared bit for
bit with the reference; smooth activations with float64. What a backend gives must also have the bits of its own product
followed by its own activation and casts.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

import mxfp8
from mxfp8 import dispatch, fused
from mxfp8.reference.fused import ACTIVATIONS, activated
from numerics_tests import tolerances
from numerics_tests.operands import Backend, Operand, available, integers, operand

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

OUT = (torch.float32, torch.bfloat16, torch.float16)
POINTWISE = [name for name in ACTIVATIONS if name != "swiglu"]
SMOOTH = [name for name in POINTWISE if name not in ("relu", "hardswish")]
SMALL = not torch.cuda.is_available()
"""Whether kernels are interpreted: a few programs are enough there."""
PAIRS = [
    "1x128-128x128",
    "1x32-1x32",
    "32x32-bf16",
    *([] if SMALL else ["1x128-1x128", "1x256-128x128", "32x32-32x32"]),
]
SHAPES = [(50, 130, 160)] if SMALL else [(70, 128, 160), (333, 256, 1040), (129, 130, 256), (64, 384, 9000), (8, 8, 0)]
"""A multiple of 128 columns or not, a ragged end of K, one that is split, and none."""


@pytest.fixture(params=["reference", "triton", "hopper", "blackwell"])
def plain(request: pytest.FixtureRequest) -> Backend:
    return available(request, "gemm_quantize")


def operands(backend: Backend, pair: str, shape: tuple[int, int, int]) -> tuple[Operand, Operand]:
    """Few non-zeros, so that float16 and bfloat16 hold their sums and the FP8 tensor cores' too, at any K."""
    m, n, k = shape
    kinds, step = pair.split("-"), max(1, k // 64)
    few = (torch.arange(k, device=backend[1]) % step == 0).float()
    a = operand(integers(m, k, device=backend[1]) * few, kinds[0], low=125, high=128)
    return a, operand(integers(n, k, device=backend[1]), kinds[1], low=125, high=128)


def gemm(backend: Backend, a: Operand, b: Operand, out_dtype: torch.dtype, **how: Any) -> torch.Tensor:
    run = dispatch.resolve("gemm", *backend)
    out: torch.Tensor = run(*a.parts, *b.parts, **{"bias": None, "out_dtype": out_dtype, **how})
    assert (out.shape, out.dtype) == ((a.x.shape[0], b.x.shape[0]), out_dtype)
    return out


def cases(pairs: list[str]) -> list[tuple[str, tuple[int, int, int]]]:
    return list(itertools.product(pairs, SHAPES))


@pytest.mark.parametrize("pair, shape", cases(PAIRS), ids=str)
def test_activations_of_exact_sums(plain: Backend, pair: str, shape: tuple[int, int, int]) -> None:
    """On a GPU each case takes a share of activations and dtypes: compiling is what takes time."""
    a, b = operands(plain, pair, shape)
    every = list(enumerate(itertools.product(("relu", "hardswish", *SMOOTH), OUT)))
    for i, (activation, out_dtype) in every[(SHAPES.index(shape) + PAIRS.index(pair)) % len(SHAPES) :: len(SHAPES)]:
        bias = integers(shape[1], device=plain[1]).to(OUT[(i + 1) % 3]) if i % 2 else None
        exact = a.exact @ b.exact.mT + (0 if bias is None else bias.double())
        out = gemm(plain, a, b, out_dtype, bias=bias, activation=activation)
        if activation not in SMOOTH:
            assert torch.equal(out, activated(exact.float(), activation).to(out_dtype)), (activation, out_dtype)
            continue
        want = activated(exact, activation)
        allowed = tolerances.activation_error(activation, exact)
        allowed = allowed + (want.abs() + allowed) * tolerances.OUT_UNIT[out_dtype] + tolerances.SMALLEST[out_dtype]
        assert ((out.double() - want).abs() <= allowed).all(), (activation, out_dtype)


@pytest.mark.parametrize("pair, shape", cases(PAIRS), ids=str)
def test_into_a_tensor_that_exists(plain: Backend, pair: str, shape: tuple[int, int, int]) -> None:
    a, b = operands(plain, pair, shape)
    bias, exact = integers(shape[1], device=plain[1]), a.exact @ b.exact.mT
    for dtype in OUT:
        out = torch.full(shape[:2], torch.nan, dtype=dtype, device=plain[1])
        assert gemm(plain, a, b, dtype, out=out, activation="relu") is out
        assert torch.equal(out, exact.clamp_min(0).to(dtype))
    out = before = integers(*shape[:2], device=plain[1])
    want = before.double()
    for more in (None, bias):  # twice: to what the first call left
        want = want + exact + (0 if more is None else more.double())
        assert gemm(plain, a, b, torch.float32, bias=more, out=out, accumulate=True) is out
        assert torch.equal(out.double(), want)


def bits(x: torch.Tensor | None) -> torch.Tensor | None:
    """Elements as integers, all NaN alike in wider dtypes."""
    if x is None or x.dtype.itemsize == 1:
        return None if x is None else x.view(torch.uint8)
    x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def same(got: tuple[Any, ...], want: tuple[Any, ...]) -> bool:
    return all(
        (g is None) == (w is None) and (g is None or torch.equal(bits(g), bits(w)))  # type: ignore[arg-type]
        for g, w in zip(got, want, strict=True)
    )


def casts(outputs: tuple[str, ...], block: tuple[int, int], column_block: tuple[int, int], **how: Any) -> Any:
    given = {"fmt": "e4m3", "scale_rule": "rceil", "satfinite": False, "round_first": False, **how}
    return fused.make_casts(
        given["fmt"], block, column_block, given["scale_rule"], outputs, given["round_first"], given["satfinite"]
    )  # fmt: skip


def quantized(backend: Backend, a: Operand, b: Operand, made: Any, **how: Any) -> tuple[Any, ...]:
    run = dispatch.resolve("gemm_quantize", *backend)
    rest = {"bias": None, "activation": None, "hp_dtype": torch.bfloat16, **how}
    parts: tuple[Any, ...] = run(*a.parts, *b.parts, casts=made, **rest)
    return parts


OUTPUTS = [("rows",), ("rows", "hp"), ("columns",), ("rows", "columns"), ("rows", "columns", "hp"), ("columns", "hp")]
BLOCKS = [((1, 128), (128, 128)), ((1, 32), (1, 32)), ((32, 32), (32, 32)), ((1, 256), (1, 128))]


@pytest.mark.parametrize("outputs", OUTPUTS, ids="-".join)
@pytest.mark.parametrize("pair", PAIRS[: 1 if SMALL else None])
def test_copies_have_the_bits_of_the_reference(plain: Backend, pair: str, outputs: tuple[str, ...]) -> None:
    """Of exact sums, for every rule and format in turn."""
    rules = itertools.cycle(itertools.product(("rceil", "floor", "even", "ceil"), ("e4m3", "e5m2")))
    for i, (shape, blocks) in enumerate(itertools.product(SHAPES, BLOCKS)):
        a, b = operands(plain, pair, shape)
        rule, fmt = next(rules)
        made = casts(outputs, *blocks, fmt=fmt, scale_rule=rule)
        bias = integers(shape[1], device=plain[1]).to(OUT[i % 3]) if i % 2 else None
        how = {"bias": bias, "activation": ("relu", None, "hardswish")[i % 3], "hp_dtype": OUT[i % 3]}
        want = quantized(("reference", plain[1]), a, b, made, **how)
        assert same(quantized(plain, a, b, made, **how), want), (shape, blocks, how["activation"], how["hp_dtype"])


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("pair", PAIRS)
def test_copies_have_the_bits_of_the_steps(plain: Backend, pair: str, activation: str | None) -> None:
    """Of any values: product, activation and casts of the same backend, one after the other."""
    kinds = pair.split("-")
    for i, (m, n, k) in enumerate(SHAPES):
        a, b = (operand(torch.randn(r, k, device=plain[1]), t) for r, t in zip((m, n), kinds, strict=True))
        bias = torch.randn(n, device=plain[1]) if i % 2 else None
        few = SMALL or pair != PAIRS[0]
        for outputs, blocks in itertools.product(OUTPUTS[4 if few else 0 :], BLOCKS[: 1 if few else 2]):
            made, hp_dtype = casts(outputs, *blocks), OUT[(i + 1) % 3]
            h = gemm(plain, a, b, hp_dtype if "hp" in outputs else torch.float32, bias=bias)
            names = tuple(name for name in outputs if name != "hp")
            steps: list[Any] = [None] * 4
            if activation is not None:
                run = dispatch.resolve("activation_quantize", *plain)
                steps = list(run(h, None, activation=activation, casts=casts(names, *blocks))[:4])
            else:
                for at, (name, axis) in enumerate((("rows", -1), ("columns", -2))):
                    if name in names:
                        q = mxfp8.quantize(h, axis, block=blocks[at], backend=_there("quantize", plain))
                        steps[2 * at : 2 * at + 2] = q.qdata, q.scale_bytes
            got = quantized(plain, a, b, made, bias=bias, activation=activation, hp_dtype=hp_dtype)
            assert same(got, (*steps, h if "hp" in outputs else None)), (m, n, k, outputs, blocks)


def _there(op: str, backend: Backend) -> str:
    return backend[0] if dispatch.why_not(op, *backend) is None else "triton"


@pytest.mark.parametrize("outputs", OUTPUTS, ids="-".join)
def test_what_hopper_makes_is_what_was_asked_for(outputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come from the accumulators bring no other tensor along. Without the launch, on any machine."""
    gemm_hopper = pytest.importorskip("mxfp8.kernels.gemm_hopper", reason="tests of Triton kernels")
    launched: list[Any] = []
    monkeypatch.setattr(gemm_hopper, "plan_for", lambda *_: mock.Mock(split=1))
    monkeypatch.setattr(gemm_hopper, "coalesced", lambda *_, **__: launched.append(1))
    monkeypatch.setattr(gemm_hopper, "product_and_casts", lambda *_: ("steps",))
    a, b = (operand(torch.ones(rows, 128), kind) for rows, kind in ((32, "1x128"), (128, "128x128")))
    how = {"bias": None, "activation": None, "hp_dtype": torch.bfloat16}
    made = gemm_hopper.gemm_quantize(*a.parts, *b.parts, casts=casts(outputs, (1, 32), (1, 32)), **how)
    if "columns" in outputs:
        assert (made, launched) == (("steps",), [])
    else:
        assert len(launched) == 1
        assert [part is not None for part in made] == [True, True, False, False, "hp" in outputs]


@pytest.mark.parametrize("hp_dtype", OUT, ids=str)
def test_rounded_first_are_the_copies_that_come_with_the_value(plain: Backend, hp_dtype: torch.dtype) -> None:
    for (i, (m, n, k)), pair in itertools.product(enumerate(SHAPES), PAIRS[:2]):
        a, b = (operand(torch.randn(r, k, device=plain[1]), t) for r, t in zip((m, n), pair.split("-"), strict=True))
        how = {"bias": torch.randn(n, device=plain[1]), "activation": ("silu", None)[i % 2], "hp_dtype": hp_dtype}
        for outputs in (("rows",), ("rows", "columns")):
            with_h = quantized(plain, a, b, casts((*outputs, "hp"), *BLOCKS[0]), **how)
            got = quantized(plain, a, b, casts(outputs, *BLOCKS[0], round_first=True), **how)
            assert same(got, (*with_h[:4], None)), (m, n, k, pair, outputs)


@pytest.mark.parametrize("satfinite", [False, True])
def test_special_values(plain: Backend, satfinite: bool) -> None:
    """NaN and Inf in a sum reach their own blocks and no others, in both orientations."""
    for (m, n, k), block in itertools.product([(70, 384, 256)], ((1, 32), (1, 128))):
        a, b = operands(plain, "1x128-128x128", (m, n, k))
        assert a.scale is not None
        a.scale[5, 1] = 255
        bias = torch.zeros(n, device=plain[1])
        bias[40], bias[200], bias[201] = torch.inf, -torch.inf, torch.nan
        for activation in (None, "relu", "silu"):
            made = casts(("rows", "columns", "hp"), block, block, satfinite=satfinite)
            how = {"bias": bias, "activation": activation}
            want = quantized(("reference", plain[1]), a, b, made, **how)
            got = quantized(plain, a, b, made, **how)
            bad = [(want[i] == 255) for i in (1, 3)]
            assert bad[0][5].all()
            assert not bad[0].all()
            for i, at in ((1, 0), (3, 1)):
                assert torch.equal(got[i] == 255, bad[at]), activation
            if activation != "silu":
                assert same(got, want)


def test_many_calls_of_the_public_names(device: torch.device) -> None:
    """On a GPU later calls are replayed: each must read and write its own tensors."""
    w = mxfp8.quantize(torch.randn(128, 256, device=device), block=(128, 128))
    total, sums = torch.zeros(64, 128, device=device), []
    for _ in range(5):
        x = mxfp8.quantize(torch.randn(64, 256, device=device), block=(1, 128))
        bias = torch.randn(128, device=device)
        product = mxfp8.gemm(x, w, bias, torch.float32)
        assert mxfp8.gemm(x, w, bias, out=total, accumulate=True) is total
        sums.append(product)
        assert torch.equal(mxfp8.gemm(x, w, bias, torch.float32, activation="relu"), product.clamp_min(0))
        made = mxfp8.gemm_quantize(x, w, bias, activation="silu", outputs=("rows", "columns", "hp"), block=(1, 128))
        h = mxfp8.gemm(x, w, bias)
        want = fused.activation_quantize(h, "silu", block=(1, 128))
        assert made.rows is not None
        assert made.columns is not None
        assert same(
            (made.hp, made.rows.qdata, made.columns.scale_bytes), (h, want.rows.qdata, want.columns.scale_bytes)
        )
    expected = torch.zeros_like(total)
    for product in sums:
        expected += product
    assert torch.equal(total, expected)


def test_whole_graphs(device: torch.device) -> None:
    """``torch.compile``: one graph, the bits of eager."""
    w = mxfp8.quantize(torch.randn(128, 256, device=device), block=(128, 128))
    bias, there = torch.randn(128, device=device), torch.randn(64, 128, device=device)

    def net(x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        q = mxfp8.quantize(x, block=(1, 128))
        mxfp8.gemm(q, w, out=out, accumulate=True)
        made = mxfp8.gemm_quantize(q, w, bias, activation="silu", outputs=("rows", "columns", "hp"))
        half = mxfp8.gemm_quantize(q, w, activation="swiglu", outputs=("rows",), block=(1, 128))
        low = mxfp8.gemm(q, w, bias, activation="gelu", out=torch.empty_like(out, dtype=torch.bfloat16))
        assert made.rows is not None
        assert made.columns is not None
        assert made.hp is not None
        assert half.rows is not None
        return [made.rows.dequantize(), made.columns.dequantize(), made.hp, half.rows.dequantize(), low]

    x = torch.randn(64, 256, device=device)
    outs = there.clone(), there.clone()
    torch._dynamo.reset()
    got = torch.compile(net, backend="aot_eager", fullgraph=True)(x, outs[0])
    torch._dynamo.reset()
    assert same((*got, outs[0]), (*net(x, outs[1]), outs[1]))


Q = mxfp8.quantize(torch.ones(4, 32))
BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: mxfp8.gemm(Q, Q, activation="tanh"), ValueError, "activation is 'tanh': use None or one of relu, "),
    (lambda: mxfp8.gemm(Q, Q, activation="swiglu"), ValueError, "swiglu: gemm_quantize"),
    (lambda: mxfp8.gemm(Q, Q, accumulate=True), ValueError, "pass out="),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 4).bfloat16(), accumulate=True), ValueError, "adds in float32"),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 4), accumulate=True, activation="relu"), ValueError, "one of the two"),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 5)), ValueError, "needs contiguous (4, 4)"),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 8)[:, ::2]), ValueError, "needs contiguous (4, 4)"),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 4).double()), TypeError, "out_dtype is torch.float64"),
    (lambda: mxfp8.gemm(Q, Q, out=torch.ones(4, 4).requires_grad_()), TypeError, "out requires grad"),
    (lambda: mxfp8.gemm_quantize(Q, Q, outputs=("hp",)), ValueError, "name 'rows' or 'columns' too"),
    (lambda: mxfp8.gemm_quantize(Q, Q, outputs=("all",)), ValueError, "name one or more of"),
    (lambda: mxfp8.gemm_quantize(Q, Q, activation="tanh"), ValueError, "unknown activation 'tanh'"),
    (lambda: mxfp8.gemm_quantize(Q, Q, hp_dtype=torch.int8), TypeError, "out_dtype is torch.int8"),
    (lambda: mxfp8.gemm_quantize(Q, Q.mT), ValueError, "gemm_quantize"),
    (lambda: mxfp8.gemm_quantize(Q, mxfp8.quantize(torch.ones(3, 32)), activation="swiglu"), ValueError, "halves"),
]


@pytest.mark.parametrize("call, error, said", BAD)
def test_bad_arguments_are_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said.replace("(", r"\(").replace(")", r"\)")):
        call()
