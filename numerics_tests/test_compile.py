"""``torch.compile``: whole graphs, the bits of eager, and no recompilation from step to step."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mxfp8
from mxfp8 import dispatch
from mxfp8.recipe import RECIPES
from mxfp8.rng import get_step, set_step
from numerics_tests.oracles import RULES
from numerics_tests.test_linear import make, run, same

recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module, **kw):
    return torch.compile(module, backend="aot_eager", fullgraph=True, **kw)


class Counter:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@recipes
def test_whole_graph_equals_eager(recipe: str, device: torch.device) -> None:
    layer, x, dy = make(recipe, device=device), torch.randn(33, 64, device=device), torch.randn(33, 96, device=device)
    want = run(layer, x, dy)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = compiled(layer)(leaf)
    y.backward(dy)
    assert same([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad], want)


def test_compiling_before_any_eager_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a process chooses backends while it is traced: that must not trip the graph's own guards."""
    monkeypatch.setattr(dispatch, "_chosen", {})
    layer, x = make("mxfp8_robust", device=device), torch.randn(33, 64, device=device)
    got = compiled(layer)(x)
    assert torch.equal(got, layer(x))


def test_stochastic_bits_follow_the_step_without_recompiling(device: torch.device) -> None:
    layer, x, before = make("mxfp8_robust", device=device), torch.randn(33, 64, device=device), get_step()
    counter, dy = Counter(), torch.randn(33, 96, device=device)
    fast = torch.compile(layer, backend=counter, fullgraph=True)
    gradients = []
    try:
        for step in range(5):
            set_step(step)
            leaf = x.clone().requires_grad_()
            fast(leaf).backward(dy)
            assert torch.equal(leaf.grad, run(layer, x, dy)[1])
            gradients.append(leaf.grad)
    finally:
        set_step(before)
    assert counter.graphs == 1
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(gradients, 2))


def test_weight_updates_are_seen(device: torch.device) -> None:
    layer, x = make(device=device), torch.randn(33, 64, device=device)
    fast, optimizer = compiled(layer), torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        fast(x).sum().backward()
        optimizer.step()
        assert torch.equal(fast(x), layer(x))


def test_row_counts_do_not_recompile(device: torch.device) -> None:
    """Jagged batches: a graph for whole blocks, one for tails and one for a single block serve every row count."""

    def wgrad_operand(x: torch.Tensor) -> torch.Tensor:
        return mxfp8.quantize(x, -2).dequantize()

    counter = Counter()
    fast = torch.compile(wgrad_operand, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for rows in (33, 64, 7, 48, 100, 31, 257, 512, 1024):
        x = torch.randn(rows, 64, device=device)
        assert torch.equal(fast(x), wgrad_operand(x))
        graphs.append(counter.graphs)
    assert graphs[2] == graphs[-1]


def test_group_sizes_do_not_recompile(device: torch.device) -> None:
    """Group ends are data: the layer runs outside the graph, and 20 batches compile what two do."""
    layer, counter = mxfp8.MXFP8GroupedLinear(3, 64, 32, device=device), Counter()

    def net(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x * 2, offs))

    fast, x = torch.compile(net, backend=counter), torch.randn(60, 64, device=device)
    graphs = []
    for i in range(20):
        offs = torch.tensor([i, 20 + i, 40 + i], dtype=torch.int32, device=device)
        assert torch.equal(fast(x, offs), net(x, offs))
        graphs.append(counter.graphs)
    assert graphs[1] == graphs[-1]


def test_checkpointing_a_compiled_layer(device: torch.device) -> None:
    layer, x, dy = (
        make("mxfp8_robust", device=device),
        torch.randn(33, 64, device=device),
        torch.randn(33, 96, device=device),
    )
    want, fast = run(layer, x, dy), torch.compile(layer, backend="aot_eager", fullgraph=True)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = checkpoint(fast, leaf, use_reentrant=False)
    y.backward(dy)
    assert same([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad], want)


@pytest.mark.parametrize("fmt, rule", list(itertools.product(("e4m3", "e5m2"), RULES)))
def test_casts_under_every_rule(fmt: str, rule: str, device: torch.device) -> None:
    """Specials too: constant folding must not turn byte 255 into a number."""
    x = torch.randn(8, 70, device=device) * torch.exp2(torch.randint(-140, 100, (8, 70), device=device))
    x[0, 0], x[1, 40], x[2] = torch.nan, torch.inf, 0.0

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = mxfp8.quantize(x, fmt=fmt, scale_rule=rule)
        return q.qdata.view(torch.uint8), q.scale_bytes, q.dequantize(torch.bfloat16)

    for got, want in zip(compiled(cast)(x), cast(x), strict=True):
        assert (
            torch.equal(got.nan_to_num(7), want.nan_to_num(7)) if want.is_floating_point() else torch.equal(got, want)
        )


def test_mx_tensors_cross_the_border_of_a_graph(device: torch.device) -> None:
    a, b = (mxfp8.quantize(torch.randn(n, 64, device=device)) for n in (33, 32))
    assert torch.equal(compiled(lambda p, q: mxfp8.gemm(p, q))(a, b), mxfp8.gemm(a, b))
    q = compiled(lambda x: mxfp8.quantize(x))(a.dequantize())
    assert isinstance(q, mxfp8.MXTensor)
    assert torch.equal(q.dequantize(), a.dequantize())


@pytest.mark.slow
def test_inductor_gives_the_bits_of_eager(device: torch.device) -> None:
    """Generated code, not only traced, with Hadamard, stochastic rounding and tails. No bias: its gradient is a plain
    sum, which generated code may add up in another order."""
    layer, x, dy = make("mxfp8_robust", bias=False, device=device), torch.randn(33, 64), torch.randn(33, 96)
    x, dy = x.to(device), dy.to(device)
    want = run(layer, x, dy)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = torch.compile(layer, fullgraph=True)(leaf)
    y.backward(dy)
    assert same([y.detach(), leaf.grad, layer.weight.grad], want)
