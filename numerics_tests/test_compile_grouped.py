"""``torch.compile`` of ops and layers on groups of rows: whole graphs, the bits of eager, one graph for all groups."""

import pytest
import torch

import mxfp8
from mxfp8 import MXFP8GroupedLinear
from mxfp8.rng import get_step, set_step
from numerics_tests.fused_oracle import bits
from numerics_tests.operands import ends
from numerics_tests.test_compile import Counter, compiled
from numerics_tests.test_grouped import GROUPS, RECIPES, run
from numerics_tests.test_linear import same

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def fast_run(fast, layer: MXFP8GroupedLinear, *args: torch.Tensor) -> list[torch.Tensor]:
    """As :func:`run`, compiled."""
    x, offs, dy = args
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = fast(x, offs)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_whole_graph_equals_eager(recipe, dtype: torch.dtype, device: torch.device) -> None:
    layer = MXFP8GroupedLinear(4, 64, 96, device=device, recipe=recipe)
    x, dy = (torch.randn(96, n, device=device, dtype=dtype) for n in (64, 96))
    offs = ends([5, 0, 27, 30], device)
    assert same(fast_run(compiled(layer), layer, x, offs, dy), run(layer, x, offs, dy))


def test_a_graph_serves_all_groups_and_one_more_all_rows(device: torch.device) -> None:
    layer, counter = MXFP8GroupedLinear(4, 64, 96, device=device, recipe="mxfp8_coalesced"), Counter()
    fast = torch.compile(layer, backend=counter, fullgraph=True)
    for i, rows in enumerate((96, 33, 200, 77)):
        x, dy = torch.randn(rows, 64, device=device), torch.randn(rows, 96, device=device)
        for sizes in ([5, 0, 27, 1], [0, 0, 0, 0], [1, 2, 3, rows - 6]):
            args = x, ends(sizes, device), dy
            assert same(fast_run(fast, layer, *args), run(layer, *args))
            assert counter.graphs == min(1 + i, 2)


@pytest.mark.parametrize("hadamard", [None, 32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", [(1, 32), (128, 128)])
@pytest.mark.parametrize("sizes, rows", GROUPS.values(), ids=GROUPS.keys())
def test_ops(
    sizes: list[int], rows: int, block: tuple[int, int], rounding: str, hadamard: int | None, device: torch.device
) -> None:
    x, dy = torch.randn(rows, 128, device=device), torch.randn(rows, 48, device=device)
    w = mxfp8.quantize(torch.randn(len(sizes), 48, 128, device=device), block=block)

    def net(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> list[torch.Tensor]:
        how = {"block": block, "rounding": rounding, "hadamard": hadamard, "hadamard_seed": 2**40 + 1}
        seed = 7 if rounding == "stochastic" else None
        a, b = (mxfp8.quantize_grouped(t, offs, seed=seed, **how) for t in (dy, x))
        rows, columns = mxfp8.quantize_both_grouped(x, offs, column_block=block)
        y = mxfp8.grouped_gemm(rows, w, offs, torch.float32)
        parts = [t for g in (a, b, columns) for t in (g.q.qdata, g.q.scale_bytes, g.starts)]
        return [*parts, rows.qdata, rows.scale_bytes, y, mxfp8.grouped_wgrad(a, b), mxfp8.grouped_wgrad(a, x, offs)]

    args = x, dy, ends(sizes, device)
    for got, want in zip(compiled(net)(*args), net(*args), strict=True):
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert torch.equal(bits(got), bits(want))


def test_what_surrounds_a_layer_is_in_its_graph(device: torch.device) -> None:
    """Twenty batches of other groups and the same rows compile what one does."""
    layer, counter = MXFP8GroupedLinear(3, 64, 32, device=device), Counter()

    def net(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x * 2, offs))

    fast, x = torch.compile(net, backend=counter, fullgraph=True), torch.randn(60, 64, device=device)
    for i in range(20):
        offs = torch.tensor([i, 20 + i, 40 + i], dtype=torch.int32, device=device)
        assert torch.equal(fast(x, offs), net(x, offs))
        assert counter.graphs == 1


def test_random_bits_follow_the_step(device: torch.device) -> None:
    layer, before = MXFP8GroupedLinear(4, 64, 96, device=device, recipe="mxfp8_robust"), get_step()
    args = torch.randn(96, 64, device=device), ends([5, 0, 27, 64], device), torch.randn(96, 96, device=device)
    fast, seen = compiled(layer), []
    try:
        for step in (0, 1):
            set_step(step)
            seen.append(fast_run(fast, layer, *args))
            assert same(seen[-1], run(layer, *args))
    finally:
        set_step(before)
    assert not torch.equal(seen[0][1], seen[1][1])


def test_bad_groups_are_refused_in_a_graph() -> None:
    layer, x = MXFP8GroupedLinear(3, 64, 96), torch.randn(40, 64)
    fast = compiled(layer)
    assert same([fast(x, ends([5, 0, 27], x.device))], [layer(x, ends([5, 0, 27], x.device))])
    for offs in ([5, 4, 27], [-1, 5, 27], [5, 6, 41]):
        with pytest.raises(ValueError, match="group ends must not decrease"):
            fast(x, torch.tensor(offs, dtype=torch.int32))


@pytest.mark.parametrize(
    "op", ["check_offsets", "quantize_grouped", "quantize_both_grouped", "grouped_gemm", "grouped_wgrad"]
)
def test_operators_are_what_torch_expects(op: str, device: torch.device) -> None:
    """Schemas, fakes (with symbolic sizes, too) and tracing."""
    x, w = torch.randn(40, 64, device=device), mxfp8.quantize(torch.randn(3, 48, 64, device=device))
    q, offs, backend = mxfp8.quantize(x), ends([5, 0, 27], device), "reference"
    groups = mxfp8.quantize_grouped(x, offs, backend=backend)
    columns = groups.q.qdata.view(torch.uint8), groups.q.scale_bytes, (32, 1), "e4m3", groups.starts
    args = {
        "check_offsets": (offs, 40, backend),
        "quantize_grouped": (x, offs, "e4m3", (1, 32), "rceil", "nearest", [], None, False, None, [0, 0], backend),
        "quantize_both_grouped": (x, offs, "e4m3", (1, 32), (1, 128), "rceil", False, backend),
        "grouped_gemm": (
            q.qdata.view(torch.uint8), q.scale_bytes, (1, 32), "e4m3",
            w.qdata.view(torch.uint8), w.scale_bytes, (1, 32), "e4m3", offs, torch.float32, backend,
        ),
        "grouped_wgrad": (*columns, *columns, torch.bfloat16, backend),
    }  # fmt: skip
    torch.library.opcheck(getattr(torch.ops.mxfp8, op), args[op])
