"""Fused norms and activations whose columns are rotated before their cast, as wgrad of a robust recipe wants them."""

import pytest
import torch

import mxfp8
from mxfp8 import fused
from mxfp8.tensor import MXTensor
from numerics_tests.fused_oracle import ALL, bits

SIZE, SEED = 32, 5


def results(x: torch.Tensor, dy: torch.Tensor, **how) -> list[tuple[object, ...]]:
    """All four ops."""
    weight = x.float().mean(0)
    value = fused.norm_quantize(x, weight, residual=dy, norm="layer", **how)
    return [
        fused.activation_quantize(x, "relu", weight, **how)[:3],
        fused.activation_quantize_backward(dy, x, "hardswish", weight, **how)[:3],
        value[:3],
        fused.norm_quantize_backward(dy, value.h, value.rstd, value.mean, weight, norm="layer", **how)[:3],
    ]


def assert_same(got: MXTensor, want: MXTensor) -> None:
    assert torch.equal(bits(got.qdata.view(torch.uint8)), bits(want.qdata.view(torch.uint8)))
    assert torch.equal(got.scale_bytes, want.scale_bytes)
    assert (got.fmt, got.axis, got.block) == (want.fmt, want.axis, want.block)


@pytest.mark.parametrize("rows", [64, 40])
@pytest.mark.parametrize("rule, column_block", [("rceil", (1, 32)), ("floor", (32, 32))])
def test_columns_are_those_of_the_rotated_value(
    rows: int, rule: str, column_block: tuple[int, int], kernels: tuple[str, torch.device]
) -> None:
    backend, device = kernels
    x, dy = torch.randn(2, rows, 96).to(device, torch.bfloat16)
    how = {"outputs": ALL, "scale_rule": rule, "column_block": column_block, "backend": backend, "satfinite": True}
    plain, rotated = results(x, dy, **how), results(x, dy, hadamard=SIZE, seed=SEED, **how)
    for (q, _, hp), (p, columns, value) in zip(plain, rotated, strict=True):
        assert_same(p, q)  # rows and the value itself are not rotated
        assert torch.equal(value, hp)
        turned = mxfp8.hadamard(hp, -2, SIZE, SEED)
        want = mxfp8.quantize(turned, -2, "e4m3", column_block, rule, satfinite=True, backend="reference")
        assert_same(columns, want)


def test_the_product_of_two_rotated_operands_is_that_of_the_values() -> None:
    """The same size and seed on both operands of a wgrad: nothing is left of the rotation but other rounding."""
    x, dy = torch.randn(2, 64, 96)
    how = {"outputs": ("columns", "hp"), "hadamard": SIZE, "seed": SEED}
    a, b = fused.activation_quantize(x, "silu", **how), fused.activation_quantize_backward(dy, x, "silu", **how)
    got, want = mxfp8.gemm(b.columns.mT, a.columns.mT, out_dtype=torch.float32), b.hp.T @ a.hp
    assert float((got - want).norm() / want.norm()) < 0.06
    other = fused.activation_quantize(x, "silu", **{**how, "seed": SEED + 1})
    wrong = mxfp8.gemm(b.columns.mT, other.columns.mT, out_dtype=torch.float32)
    assert float((wrong - want).norm() / want.norm()) > 0.5


@pytest.mark.parametrize("outputs", [("rows",), ("columns",), ("hp",), ("rows", "columns")])
def test_nothing_is_made_that_was_not_asked_for(outputs: tuple[str, ...]) -> None:
    x, dy = torch.randn(2, 32, 64)
    for parts in results(x, dy, outputs=outputs, hadamard=16):
        made = tuple(n for n, part in zip(ALL, parts, strict=True) if part is not None)
        assert made == outputs


@pytest.mark.parametrize("hadamard", [0, 48, "32", True])
def test_unknown_sizes_are_refused(hadamard: object) -> None:
    with pytest.raises(ValueError, match=r"hadamard is .*: use None or one of 16, 32, 64, 128"):
        fused.activation_quantize(torch.randn(4, 64), "relu", hadamard=hadamard)


def test_one_graph(kernels: tuple[str, torch.device]) -> None:
    backend, device = kernels

    def net(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = fused.activation_quantize(x, "silu", outputs=("columns",), hadamard=SIZE, backend=backend).columns
        return q.qdata.view(torch.uint8), q.scale_bytes

    torch._dynamo.reset()
    x = torch.randn(40, 64, device=device)
    for got, want in zip(torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x), strict=True):
        assert torch.equal(got, want)
