"""The portable kernels for groups of rows, in Triton's interpreter: the bits of each group alone, and no access outside
memory whatever the offsets hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

import mxfp8
from mxfp8 import MXGroups
from mxfp8.recipe import get_recipe

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _grouped_exact, grouped_gemm_hopper, grouped_gemm_triton
from mxfp8.kernels._device import INTERPRETED

from numerics_tests.operands import ends

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts")

GROUPS = {
    "ragged": ([5, 0, 27, 64], 96),
    "trailing_rows": ([5, 0, 27], 40),
    "all_empty": ([0, 0], 7),
    "one": ([33], 33),
    "several_blocks": ([300, 1, 0, 200], 520),
}
groups = pytest.mark.parametrize("sizes, rows", GROUPS.values(), ids=GROUPS.keys())
BLOCKS = [(1, 32), (1, 128), (1, 256), (32, 32), (128, 128)]
BAD = {
    "decreasing": [50, 7, 60, 20],
    "negative": [-5, 3, -(2**40), 4],
    "beyond_the_rows": [10, 97, 2**40, 2**33 + 5],
    "all_of_it": [200, -3, 5, 2**31],
}


def same(got: MXGroups, want: MXGroups) -> None:
    assert torch.equal(got.starts, want.starts)
    assert torch.equal(got.q.scale_bytes, want.q.scale_bytes)
    assert torch.equal(got.q.qdata.view(torch.uint8), want.q.qdata.view(torch.uint8))


@groups
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("rounding, hadamard", [("nearest", None), ("stochastic", None), ("stochastic", 128)])
def test_cast_has_the_bits_of_the_reference(sizes, rows, block, rounding, hadamard) -> None:
    x, offs = torch.randn(rows, 80), ends(sizes)
    x[3, 1], x[sum(sizes) :] = torch.nan, torch.nan
    key = mxfp8.RngKey(seed=3, step=5, stream=2, row_offset=7, col_offset=3 if hadamard else 8)
    rest = {"block": block, "rounding": rounding, "seed": key, "hadamard": hadamard, "hadamard_seed": 9}
    same(
        mxfp8.quantize_grouped(x, offs, **rest, backend="triton"),
        mxfp8.quantize_grouped(x, offs, **rest, backend="reference"),
    )


def test_cast_of_any_dtype_format_stride_and_width_of_offsets() -> None:
    x, offs = torch.randn(50, 97).bfloat16().t(), ends([40, 0, 55], dtype=torch.int64)
    for rest in ({"fmt": "e5m2", "scale_rule": "even"}, {"hadamard": 16, "satfinite": True}):
        same(
            mxfp8.quantize_grouped(x, offs, **rest, backend="triton"),
            mxfp8.quantize_grouped(x, offs, **rest, backend="reference"),
        )


@groups
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_both_casts_have_the_bits_of_the_reference(sizes, rows, block) -> None:
    x, offs = torch.randn(rows, 80), ends(sizes)
    x[3, 1], x[sum(sizes) :] = torch.nan, torch.inf
    for how in ({}, {"fmt": "e5m2", "scale_rule": "even", "satfinite": True}):
        (got, groups), (want, columns) = (
            mxfp8.quantize_both_grouped(x, offs, column_block=block, backend=backend, **how)
            for backend in ("triton", "reference")
        )
        same(groups, columns)
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(got.scale_bytes, want.scale_bytes)


@pytest.mark.parametrize("sizes, rows", [GROUPS["ragged"], GROUPS["several_blocks"], GROUPS["all_empty"]], ids=str)
@pytest.mark.parametrize("blocks", [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((1, 32), (1, 256))], ids=str)
def test_weight_gradient_has_the_bits_of_each_group_alone(sizes, rows, blocks) -> None:
    dy, x, offs = torch.randn(rows, 70), torch.randn(rows, 90), ends(sizes)
    dy[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    a, b = (mxfp8.quantize_grouped(t, offs, block=k, backend="reference") for t, k in zip((dy, x), blocks, strict=True))
    got = mxfp8.grouped_wgrad(a, b, out_dtype=torch.float32, backend="triton")
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start := start + size)
        qa, qb = (mxfp8.quantize(t[part], -2, block=k) for t, k in zip((dy, x), blocks, strict=True))
        want = mxfp8.gemm(qa.mT, qb.mT, out_dtype=torch.float32, backend="triton")
        assert torch.equal(got[g], want if size else torch.zeros_like(want))


@pytest.mark.parametrize("high", ["a", "b", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_high_precision_beside_it(high: str, dtype: torch.dtype) -> None:
    sizes, offs = [5, 0, 27, 40], ends([5, 0, 27, 40])
    if high == "both" and dtype is torch.float32:
        return
    dy, x = torch.randn(80, 40).to(dtype), torch.randn(80, 48).to(dtype)
    dy[72:], x[72:] = torch.nan, torch.nan
    starts = pad(offs, (1, 0)).to(torch.int32)
    sides = []
    for name, t in (("a", dy), ("b", x)):
        if high in (name, "both"):
            sides.append((t, None, None, starts))
        else:
            q, s = mxfp8.quantize_grouped(t, offs, backend="reference")
            sides.append((q.qdata, q.scale_bytes, (32, 1), s))
    got = grouped_gemm_triton.grouped_wgrad(*sides[0], *sides[1], out_dtype=torch.float32)
    values = [
        t.double() if s is None else MXGroups(
            mxfp8.MXTensor(t, s, "e4m3", -2, (1, 32)), at
        ).q.dequantize(torch.float64)
        for t, s, _, at in sides
    ]  # fmt: skip
    for g, size in enumerate(sizes):
        a, b = (v[at[g] : at[g] + size] for v, (*_, at) in zip(values, sides, strict=True))
        assert (got[g].double() - a.mT @ b).abs().max() <= 1e-4 if size else not got[g].any()


@pytest.mark.parametrize("offs", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bad_offsets_lead_nowhere_outside_memory(offs: list[int], dtype: torch.dtype) -> None:
    """Each end is taken to lie within the rows and to be no less than the one before: by every kernel, so that what
    they compute is what these offsets would give."""
    bad = torch.tensor(offs).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    good = bad.clamp(0, 96).cummax(0).values
    x, w = torch.randn(96, 64), mxfp8.quantize(torch.randn(4, 40, 64), backend="reference")
    row = mxfp8.quantize(x, backend="reference")
    parts = (row.qdata, row.scale_bytes, (1, 32), w.qdata, w.scale_bytes, (1, 32))
    run = grouped_gemm_triton.grouped_gemm
    got, want = (run(*parts, offs=o, out_dtype=torch.float32) for o in (bad, good))
    assert torch.equal(got, want)
    # The public op would refuse them here, where the host can read them: the kernel does not.
    cast = mxfp8.dispatch.resolve("quantize_grouped", "triton", x.device)
    rest = {
        "fmt": mxfp8.E4M3, "block": (1, 32), "scale_rule": mxfp8.ScaleRule.RCEIL, "rounding": mxfp8.Rounding.NEAREST,
        "key": None, "satfinite": False, "hadamard": None, "hadamard_seed": 0,
    }  # fmt: skip
    for one, other in zip(cast(x, bad, **rest), cast(x, good, **rest), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for height in (128, 192):
        got, want = (grouped_gemm_hopper._table(o, 96, 4, height) for o in (bad, good))
        assert torch.equal(got, want)


@pytest.mark.parametrize("starts", [[0, 64, 32, 500], [-32, 96, 3, 5], [2**31 - 1, 0, -(2**31), 7]], ids=str)
def test_bad_starts_lead_nowhere_outside_memory(starts: list[int]) -> None:
    """What no cast of ours would say: sums over nothing or over rows that exist, and numbers of zeros and ones."""
    q = mxfp8.quantize(torch.ones(96, 32), -2, backend="reference")
    groups = MXGroups(q, torch.tensor(starts, dtype=torch.int32))
    out = mxfp8.grouped_wgrad(groups, groups, out_dtype=torch.float32, backend="triton")
    assert out.shape == (3, 32, 32)
    assert ((out >= 0) & (out <= 96)).all()


def test_a_layer_on_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward as on a GPU: not one read of the offsets, and the values of the reference."""
    layer, offs = mxfp8.MXFP8GroupedLinear(3, 64, 32, recipe=get_recipe("mxfp8_robust")), ends([5, 0, 30])
    x, dy = torch.randn(40, 64), torch.randn(40, 32)

    def step() -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, offs)
        y.backward(dy)
        return [y.detach(), leaf.grad, layer.weight.grad]

    want, resolve = step(), mxfp8.dispatch.resolve
    ours = {"quantize_grouped", "quantize_both_grouped", "grouped_gemm", "grouped_wgrad", "check_offsets"}
    monkeypatch.setattr(
        mxfp8.dispatch, "resolve", lambda op, b, d: resolve(op, "triton" if op in ours and b == "auto" else b, d)
    )
    for name in ("tolist", "item", "cpu"):  # the interpreter itself reads them by data_ptr
        monkeypatch.setattr(offs, name, None, raising=False)
    for got, other in zip(step(), want, strict=True):
        assert (got - other).abs().max() <= 1e-4


# Through bfloat16 and torch's grouped GEMM


def wide(x: torch.Tensor, block: tuple[int, int] | None, axis: int = -1) -> tuple[_grouped_exact.Operand, torch.Tensor]:
    """An operand and its values."""
    if block is None:
        return (x.bfloat16(), None, None), x.bfloat16().double()
    q = mxfp8.quantize(x, axis, block=block, backend="reference")
    rc = block if axis == -1 else block[::-1]
    return (q.qdata, q.scale_bytes, rc), q.dequantize(torch.float64)


@groups
@pytest.mark.parametrize(
    "blocks", [((1, 32), (1, 32)), ((1, 128), (32, 32)), (None, (1, 32)), ((1, 128), None)], ids=str
)
def test_products_in_bfloat16(sizes, rows, blocks) -> None:
    """Small integers: exact, so that nothing but the rows and matrices that are taken can be wrong."""
    x, w = torch.randint(-3, 4, (rows, 64)).float(), torch.randint(-3, 4, (len(sizes), 40, 64)).float()
    x[sum(sizes) :] = torch.nan
    (a, a64), (b, b64) = wide(x, blocks[0]), wide(w, blocks[1])
    assert _grouped_exact.takes((a, b), torch.bfloat16)
    got = _grouped_exact.grouped_gemm(a, b, ends(sizes, dtype=torch.int64))
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start := start + size)
        assert torch.equal(got[part], (a64[part] @ b64[g].mT).bfloat16())
    assert not got[start:].any()


@groups
def test_weight_gradients_in_bfloat16(sizes, rows) -> None:
    dy, x, offs = torch.randint(-3, 4, (rows, 40)).float(), torch.randint(-3, 4, (rows, 64)).float(), ends(sizes)
    dy[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    a, b = (mxfp8.quantize_grouped(t, offs, backend="reference") for t in (dy, x))
    left, right = ((t.q.qdata, t.q.scale_bytes, (32, 1)) for t in (a, b))
    assert _grouped_exact.takes((left, right), torch.bfloat16)
    got = _grouped_exact.grouped_wgrad(left, right, a.starts)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start := start + size)
        assert torch.equal(got[g], (dy[part].mT @ x[part]).bfloat16())


def test_operands_that_bfloat16_cannot_take() -> None:
    x, w, odd = torch.zeros(8, 64), torch.zeros(2, 40, 64), torch.zeros(2, 41, 64)
    (a, _), (b, _) = wide(x, (1, 32)), wide(w, (1, 32))
    assert not _grouped_exact.takes((a, b), torch.float32)
    assert not _grouped_exact.takes((a, (w, None, None)), torch.bfloat16)
    assert not _grouped_exact.takes((a, wide(odd, (1, 32))[0]), torch.bfloat16)
    assert not _grouped_exact.takes((a, (torch.zeros(0, 40, 64).bfloat16(), None, None)), torch.bfloat16)


def test_strides_of_an_operand_in_bfloat16() -> None:
    w = torch.randint(-3, 4, (2, 40, 64)).bfloat16()
    shifted, stepped = torch.zeros(2 * 40 * 64 + 1).bfloat16()[1:].view(2, 40, 64), torch.zeros(2, 40, 129).bfloat16()
    shifted.copy_(w)
    stepped[:, :, :128:2] = w
    narrow = w.mT.contiguous().mT
    (a, a64), offs = wide(torch.randint(-3, 4, (9, 64)).float(), (1, 32)), ends([4, 5])
    want = torch.cat([a64[:4] @ w[0].double().mT, a64[4:] @ w[1].double().mT]).bfloat16()
    for b in (w, shifted, stepped[:, :, :128:2], narrow, w[:1].expand(2, 40, 64)):
        right = want if b.stride(0) else torch.cat([want[:4], (a64[4:] @ w[0].double().mT).bfloat16()])
        assert torch.equal(_grouped_exact.grouped_gemm(a, (b, None, None), offs), right)


@pytest.mark.parametrize("offs", BAD.values(), ids=BAD.keys())
def test_bad_offsets_do_not_reach_torch(offs: list[int]) -> None:
    bad = torch.tensor(offs)
    assert torch.equal(_grouped_exact._ends(bad, 96), bad.clamp(0, 96).cummax(0).values.int())
