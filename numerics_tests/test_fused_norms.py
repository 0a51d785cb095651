"""Norms with MX casts, on every backend that runs here, the reference included: copies bit for bit given the statistics
that are returned, statistics against float64, gradients inside an interval, and their formulas against autograd.
"""

import itertools

import pytest
import torch

from mxfp8 import fused
from numerics_tests import tolerances
from numerics_tests.fused_oracle import (
    ALL,
    INPUTS,
    LAYOUTS,
    SMALL,
    bits,
    outside,
    outward,
    padding_is_zero,
    recomputed,
    same,
    values,
)

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
