"""Grouped GEMM and ``MXFP8GroupedLinear``: each group as if it were alone, empty groups and trailing rows zero."""

import copy
import subprocess
import sys

import pytest
import torch

import mxfp8
from mxfp8 import MXFP8GroupedLinear
from mxfp8.recipe import HP, CastSpec, LinearRecipe
from numerics_tests import tolerances
from numerics_tests.composition import ALL_RECIPES, LinearReference
from numerics_tests.operands import ends

# Blocks of several rows would straddle groups; such recipes are refused, see below.
RECIPES = [r for r in ALL_RECIPES if all(spec is None or spec.block[0] == 1 for spec in (r.fprop.lhs, r.dgrad.lhs))]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)
GROUPS = {
    "ragged": ([5, 0, 27, 64], 96),
    "empty_in_the_middle": ([32, 0, 64], 96),
    "trailing_rows": ([5, 0, 27], 40),
    "all_empty": ([0, 0, 0], 7),
    "no_rows": ([0, 0], 0),
    "one": ([33], 33),
    "first_and_last_empty": ([0, 31, 1, 0], 33),
}
groups = pytest.mark.parametrize("sizes, rows", GROUPS.values(), ids=GROUPS.keys())


def run(layer: MXFP8GroupedLinear, x: torch.Tensor, offs: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x, offs)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


@groups
@pytest.mark.parametrize("kinds", ["mx-mx", "mx-bf16", "bf16-mx"])
def test_grouped_gemm(kinds: str, sizes: list[int], rows: int, device: torch.device) -> None:
    a, b = torch.randn(rows, 80, device=device), torch.randn(len(sizes), 24, 80, device=device)
    a[sum(sizes) :] = torch.nan  # rows of no group must not be read
    a, b = (mxfp8.quantize(t) if k == "mx" else t.bfloat16() for t, k in zip((a, b), kinds.split("-"), strict=True))
    a64, b64 = (t.dequantize(torch.float64) if isinstance(t, mxfp8.MXTensor) else t.double() for t in (a, b))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = mxfp8.grouped_gemm(a, b, ends(sizes, device), dtype)
        assert (out.shape, out.dtype) == ((rows, 24), dtype)
        start = 0
        for g, size in enumerate(sizes):
            part = slice(start, start := start + size)
            bound = tolerances.gemm_error(a64[part], b64[g], dtype)
            assert ((out[part].double() - a64[part] @ b64[g].mT).abs() <= bound).all()
        assert not out[start:].any()
    assert torch.equal(mxfp8.grouped_gemm(a, b, ends(sizes, device, torch.int64), dtype), out)


@pytest.mark.parametrize("G, N, K", [(3, 0, 64), (3, 24, 0), (0, 24, 64)])
def test_empty_dimensions_of_grouped_gemm(G: int, N: int, K: int, device: torch.device) -> None:
    a, b = mxfp8.quantize(torch.randn(7, K, device=device)), mxfp8.quantize(torch.randn(G, N, K, device=device))
    offs = torch.full((G,), 7, dtype=torch.int32, device=device)
    out = mxfp8.grouped_gemm(a, b, offs)
    assert out.shape == (7, N)
    assert not out.any()


@groups
@recipes
def test_layer_against_the_composition(recipe: LinearRecipe, sizes, rows: int, device: torch.device) -> None:
    layer = MXFP8GroupedLinear(len(sizes), 64, 96, device=device, recipe=recipe)
    layer.fqn = "moe.experts"
    x, dy = torch.randn(rows, 64, device=device), torch.randn(rows, 96, device=device)
    y, dx, dw = run(layer, x, ends(sizes, device), dy)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        want = LinearReference(recipe=recipe, weight=layer.weight[g].detach(), name=layer.fqn, row=start)
        want.fprop(x[part], torch.float32).assert_equals(y[part])
        want.dgrad(dy[part], torch.float32).assert_equals(dx[part])
        want.wgrad(dy[part], x[part], torch.float32).assert_equals(dw[g])
        assert size or not dw[g].any()
        start += size
    assert not y[start:].any()
    assert not dx[start:].any()


@recipes
def test_groups_do_not_see_each_other(recipe: LinearRecipe, device: torch.device) -> None:
    """NaN in one group's rows and in trailing rows: the others keep every bit."""
    layer = MXFP8GroupedLinear(3, 64, 32, device=device, recipe=recipe)
    x, dy, offs = torch.randn(50, 64, device=device), torch.randn(50, 32, device=device), ends([5, 27, 10], device)
    y, dx, dw = run(layer, x, offs, dy)
    x[10], x[45], dy[12], dy[46] = torch.nan, torch.nan, torch.inf, torch.nan
    y2, dx2, dw2 = run(layer, x, offs, dy)
    others = [*range(5), *range(32, 50)]
    assert torch.equal(y2[others], y[others])
    assert torch.equal(dx2[others], dx[others])
    assert torch.equal(dw2[[0, 2]], dw[[0, 2]])
    assert y2[10].isnan().all()
    assert dx2[12].isnan().all()
    assert dw2[1].isnan().any()


@recipes
def test_any_layout_any_dtype_of_offsets_same_result(recipe: LinearRecipe, device: torch.device) -> None:
    """Small integers: sums are exact in any order, which for high-precision GEMMs may change with the layout."""
    layer = MXFP8GroupedLinear(2, 64, 32, device=device, recipe=recipe)
    x, dy = (torch.randint(-3, 4, shape, device=device).float() for shape in ((64, 40), (1, 32)))
    x, dy = x.mT, dy.expand(40, 32)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, (2, 32, 64), device=device))
    want = run(layer, x.contiguous(), ends([7, 33], device), dy.contiguous())
    got = run(layer, x, ends([7, 33], device, torch.int64), dy)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_and_autocast(weight_dtype: torch.dtype, device: torch.device) -> None:
    layer = MXFP8GroupedLinear(2, 64, 32, device=device, dtype=weight_dtype)
    offs = ends([7, 33], device)
    x32 = torch.randn(40, 64, device=device)
    for x, autocast in ((x32.bfloat16(), False), (x32, True)):
        layer.zero_grad()
        leaf = x.requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            y = layer(leaf, offs)
        y.float().sum().backward()
        assert (y.dtype, leaf.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, x.dtype, weight_dtype)


def test_weight_is_cast_once_per_step_and_copies_are_independent(device: torch.device) -> None:
    layer, offs = MXFP8GroupedLinear(2, 64, 32, device=device), ends([7, 33], device)
    x, dy = torch.randn(40, 64, device=device), torch.randn(40, 32, device=device)
    want, twin = run(layer, x, offs, dy), copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(run(layer, x, offs, dy)[0], 2 * want[0])
    assert all(torch.equal(g, w) for g, w in zip(run(twin, x, offs, dy), want, strict=True))
    assert list(layer.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    "gemm, spec",
    [("input", CastSpec(block=(32, 32))), ("grad_output", CastSpec(block=(128, 128)))],
)
def test_blocks_that_would_straddle_groups_are_refused(gemm: str, spec: CastSpec) -> None:
    recipe = LinearRecipe.from_operands(name="bad", wgrad=HP, **{gemm: spec})
    with pytest.raises(ValueError, match=f"{gemm} blocks of .* would straddle groups"):
        MXFP8GroupedLinear(2, 64, 32, recipe=recipe)


@pytest.mark.parametrize(
    "offs, match",
    [
        ([0, 5, 3], r"offs\[2\] is 3, after 5"),
        ([0, -1, 3], r"offs\[1\] is -1, after 0"),
        ([-1, 0, 3], r"offs\[0\] is -1, after 0"),
        ([0, 5, 8], r"offs\[2\] is 8, after 5.*0\.\.7"),
        ([0, 7], r"of shape \(2,\).*shape \(3,\)"),
        ([[0, 1, 2]], r"of shape \(1, 3\)"),
        ([0.0, 1.0, 2.0], "offs is torch.float32"),
    ],
)
def test_bad_offsets_are_named(offs, match: str) -> None:
    x, layer = torch.randn(7, 64), MXFP8GroupedLinear(3, 64, 32)
    for call in (
        lambda: mxfp8.grouped_gemm(mxfp8.quantize(x), mxfp8.quantize(layer.weight), torch.tensor(offs)),
        lambda: layer(x, torch.tensor(offs)),
    ):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize(
    "error, match, x",
    [
        (ValueError, "must be 64", torch.ones(7, 65)),
        (ValueError, r"takes input \[M, 64\]", torch.ones(2, 7, 64)),
        (TypeError, "input is torch.int64", torch.ones(7, 64).long()),
    ],
)
def test_bad_inputs_are_named(error, match: str, x: torch.Tensor) -> None:
    with pytest.raises(error, match=match):
        MXFP8GroupedLinear(1, 64, 32)(x, torch.tensor([7]))


def test_bad_operands_of_grouped_gemm_are_named() -> None:
    a, b, offs = mxfp8.quantize(torch.ones(7, 64)), mxfp8.quantize(torch.ones(2, 64, 64)), torch.tensor([3, 7])
    with pytest.raises(ValueError, match=r"takes a\[M, K\] and b\[G, N, K\]"):
        mxfp8.grouped_gemm(a, a, offs)
    with pytest.raises(ValueError, match="b is scaled along axis -2"):
        mxfp8.grouped_gemm(a, b.mT, offs)
    with pytest.raises(TypeError, match="at least one MXTensor"):
        mxfp8.grouped_gemm(a.dequantize(), b.dequantize(), offs)
    with pytest.raises(TypeError, match=r"out_dtype is torch\.int32"):
        mxfp8.grouped_gemm(a, b, offs, torch.int32)


# The ops beneath the layer


@groups
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("hadamard", [None, 16, 128])
def test_cast_of_each_group_alone(sizes, rows: int, block, rounding: str, hadamard, device: torch.device) -> None:
    x, offs = torch.randn(rows, 80, device=device), ends(sizes, device)
    x[sum(sizes) :] = torch.nan  # rows of no group must not be read
    key = mxfp8.RngKey(seed=5, step=3, stream=1, row_offset=2)
    rest = {"block": block, "rounding": rounding}
    q, starts = mxfp8.quantize_grouped(x, offs, **rest, seed=key, hadamard=hadamard, hadamard_seed=7)
    step = max(block[1], hadamard or 1)
    assert q.shape == ((rows + min(len(sizes), rows) * (step - 1)) // step * step, 80)
    at = start = 0
    for size, found in zip(sizes, starts.tolist(), strict=False):
        assert found == at
        part = x[start : start + size]
        if hadamard is not None:
            part = mxfp8.hadamard(part, -2, hadamard, 7)
        want = mxfp8.quantize(part, -2, **rest, seed=key.at(start))
        blocks = want.scale_bytes.shape[0]
        assert torch.equal(q.qdata[at : at + len(part)].view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(q.scale_bytes[at // block[1] : at // block[1] + blocks], want.scale_bytes)
        past = -(-len(part) // step) * step
        assert not q.qdata[at + len(part) : at + past].view(torch.uint8).any()
        at, start = at + past, start + size
    assert starts[-1] == at
    assert not q.qdata[at:].view(torch.uint8).any()
    assert not q.scale_bytes[at // block[1] :].any()


@groups
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (1, 256), (32, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("column_block", [(1, 32), (1, 128), (1, 256), (32, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("width, offset", [(80, 0), (272, 0), (544, 16), (97, 3)])
def test_both_casts_in_one_pass(
    sizes, rows: int, block, column_block, width: int, offset: int, device: torch.device
) -> None:
    """Rows of no group, too, are cast along themselves; of other widths, and of rows that are not aligned, in two."""
    x = torch.randn(rows, width + offset, device=device).bfloat16()[:, offset:]
    x[1:2, 5], x[sum(sizes) + 1 :] = torch.nan, torch.inf
    for t in (x, x.float() * 2.0**-126, x.half()):
        for dtype, how in ((torch.int32, {}), (torch.int64, {"fmt": "e5m2", "scale_rule": "floor", "satfinite": True})):
            offs = ends(sizes, device, dtype)
            got, groups = mxfp8.quantize_both_grouped(t, offs, block=block, column_block=column_block, **how)
            want = mxfp8.quantize(t, block=block, **how, backend="reference")
            columns = mxfp8.quantize_grouped(t, offs, block=column_block, **how, backend="reference")
            assert torch.equal(groups.starts, columns.starts)
            for a, b in ((got, want), (groups.q, columns.q)):
                assert (a.axis, a.block, a.qdata.dtype) == (b.axis, b.block, b.qdata.dtype)
                assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
                assert torch.equal(a.scale_bytes, b.scale_bytes)


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("sizes, rows, width", [([], 7, 64), ([], 0, 64), ([3, 4], 7, 0), ([0, 0], 0, 0)])
def test_casts_of_nothing(sizes, rows: int, width: int, block, device: torch.device) -> None:
    x, offs = torch.randn(rows, width, device=device), ends(sizes, device)
    for backend in ("auto", "reference"):
        q, both = mxfp8.quantize_both_grouped(x, offs, column_block=block, backend=backend)
        alone = mxfp8.quantize_grouped(x, offs, block=block, backend=backend)
        padded = (rows + min(len(sizes), rows) * (block[1] - 1)) // block[1] * block[1]
        assert q.shape == (rows, width)
        assert both.q.shape == alone.q.shape == (padded, width)
        want = [0]
        for size in sizes:
            want.append(want[-1] + -(-size // block[1]) * block[1])
        assert both.starts.tolist() == alone.starts.tolist() == want
    assert mxfp8.grouped_wgrad(both, alone).shape == (len(sizes), width, width)


@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
def test_a_layer_without_groups(recipe: str, device: torch.device) -> None:
    layer = MXFP8GroupedLinear(0, 64, 32, device=device, recipe=recipe)
    y, dx, dw = run(layer, torch.randn(7, 64, device=device), ends([], device), torch.randn(7, 32, device=device))
    assert (y.shape, dx.shape, dw.shape) == ((7, 32), (7, 64), (0, 32, 64))
    assert not y.any()
    assert not dx.any()


@groups
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_other_memory_does_not_leak_into_casts(sizes, rows: int, byte: int, device: torch.device) -> None:
    """Buffers full of NaN bytes are freed first, so that what a kernel forgets to write shows."""
    x, offs = torch.randn(rows, 272, device=device).bfloat16(), ends(sizes, device)
    for column_block in ((1, 32), (1, 128), (32, 32), (128, 128)):
        found = []
        for backend in ("auto", "reference"):
            poison = [torch.full((2**n,), byte, dtype=torch.uint8, device=device) for n in range(5, 18)]
            del poison
            q, both = mxfp8.quantize_both_grouped(x, offs, column_block=column_block, backend=backend)
            alone = mxfp8.quantize_grouped(x, offs, block=column_block, backend=backend)
            parts = [t for p in (q, both.q, alone.q) for t in (p.qdata.view(torch.uint8), p.scale_bytes)]
            found.append([*parts, both.starts, alone.starts])
        assert all(map(torch.equal, *found))


PAIRS = [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((1, 256), (1, 256)), ((1, 32), (1, 128)), (None, (1, 32)),
         ((32, 32), None)]  # fmt: skip


@groups
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_weight_gradients(sizes, rows: int, pair, device: torch.device) -> None:
    """Small integers, whose sums are exact in every backend."""
    dy, x = (torch.randint(-3, 4, (rows, n), device=device).bfloat16() for n in (72, 200))
    dy[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    offs = ends(sizes, device)
    a, b = (t if k is None else mxfp8.quantize_grouped(t, offs, block=k) for t, k in zip((dy, x), pair, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        got, start = mxfp8.grouped_wgrad(a, b, offs, dtype), 0
        assert (got.shape, got.dtype) == ((len(sizes), 72, 200), dtype)
        for g, size in enumerate(sizes):
            part = slice(start, start := start + size)
            assert torch.equal(got[g], (dy[part].double().mT @ x[part].double()).to(dtype))


@pytest.mark.parametrize("N, K", [(0, 32), (32, 0)])
def test_empty_weight_gradients(N: int, K: int, device: torch.device) -> None:
    offs = ends([3, 4], device)
    a, b = (mxfp8.quantize_grouped(torch.ones(7, n, device=device), offs) for n in (N, K))
    assert mxfp8.grouped_wgrad(a, b).shape == (2, N, K)


def test_bad_operands_of_weight_gradients_are_named() -> None:
    x, offs = torch.ones(7, 64), torch.tensor([3, 7])
    q = mxfp8.quantize_grouped(x, offs)
    with pytest.raises(TypeError, match="at least one operand"):
        mxfp8.grouped_wgrad(x, x, offs)
    with pytest.raises(TypeError, match=r"out_dtype is torch\.int32"):
        mxfp8.grouped_wgrad(q, q, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=r"b is torch\.float64"):
        mxfp8.grouped_wgrad(q, x.double(), offs)
    with pytest.raises(ValueError, match="b is in high precision"):
        mxfp8.grouped_wgrad(q, x)
    with pytest.raises(ValueError, match=r"a has 2 groups .* b 1"):
        mxfp8.grouped_wgrad(q, mxfp8.quantize_grouped(x, offs[1:]))
    for call, match in (
        (lambda: mxfp8.quantize_grouped(x[None], offs), r"takes x\[M, C\]"),
        (lambda: mxfp8.quantize_both_grouped(x[None], offs), r"takes x\[M, C\]"),
        (lambda: mxfp8.quantize_both_grouped(x, offs + 1), r"offs\[1\] is 8"),
        (lambda: mxfp8.quantize_grouped(x, offs, rounding="stochastic"), "needs seed"),
        (lambda: mxfp8.quantize_grouped(x, offs, hadamard=8), "Hadamard size is 8"),
        (lambda: mxfp8.quantize_grouped(x, offs + 1), r"offs\[1\] is 8"),
        (lambda: mxfp8.grouped_wgrad(q, x, offs - 4), r"offs\[0\] is -1"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    for cast in (mxfp8.quantize_grouped, mxfp8.quantize_both_grouped):
        with pytest.raises(TypeError, match=r"not torch\.int64"):
            cast(x.long(), offs)
        with pytest.raises(TypeError, match="not list"):
            cast([[1.0]], offs)
        with pytest.raises(TypeError, match="offs is list"):
            cast(x, [3, 7])
    with pytest.raises(TypeError, match="seed is '1'"):
        mxfp8.quantize_grouped(x, offs, rounding="stochastic", seed="1")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"])
def test_a_graph_replays_with_other_groups(recipe: str) -> None:
    """Forward and backward wait for nothing, and read the offsets anew at every replay."""
    layer = MXFP8GroupedLinear(3, 128, 256, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(700, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy, offs = torch.randn(700, 256, device="cuda", dtype=torch.bfloat16), ends([200, 0, 450], torch.device("cuda"))

    def step() -> tuple[torch.Tensor, ...]:
        layer.weight.grad = x.grad = None
        y = layer(x, offs)
        y.backward(dy)
        return y.detach(), x.grad, layer.weight.grad

    side, before = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for sizes in ([200, 0, 450], [1, 699, 0], [0, 0, 0], [31, 33, 129]):
        offs.copy_(ends(sizes, offs.device))
        graph.replay()
        got = [t.clone() for t in made]
        assert all(torch.equal(g, w) for g, w in zip(got, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("offs", [[5, 3, 7], [-1, 3, 7], [3, 7, 900]], ids=str)
@pytest.mark.parametrize("calls", [0, 3])
def test_bad_offsets_stop_the_device(calls: int, offs: list[int]) -> None:
    """In a process of its own: what stops there cannot go on. Also where good ones went before, in replayed calls."""
    code = (
        "import mxfp8, torch\n"
        "a, b = (mxfp8.quantize(torch.ones(n, device='cuda')) for n in ((64, 128), (3, 128, 128)))\n"
        f"for _ in range({calls}): mxfp8.grouped_gemm(a, b, torch.tensor([3, 7, 64], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
        "print('so far')\n"
        f"mxfp8.grouped_gemm(a, b, torch.tensor({offs}, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "so far" in done.stdout
    assert "assert" in done.stderr + done.stdout
