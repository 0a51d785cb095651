"""``torch.compile``: whole graphs, the bits of eager, and no recompilation from step to step."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mxfp8
from mxfp8 import dispatch, fused
from mxfp8.recipe import RECIPES, LinearRecipe
from mxfp8.rng import get_step, set_step
from numerics_tests.composition import ALL_RECIPES
from numerics_tests.fused_oracle import bits, flat
from numerics_tests.oracles import RULES
from numerics_tests.test_linear import make, run, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")
recipes = pytest.mark.parametrize("recipe", RECIPES)


def compiled(module, **kw):
    return torch.compile(module, backend="aot_eager", fullgraph=True, **kw)


class Counter:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_whole_graph_equals_eager(recipe: LinearRecipe, device: torch.device) -> None:
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
    """Jagged batches: a graph for whole blocks, one for a single block and one for tails (two where kernels pad them to
    16 rows) serve every row count."""

    def wgrad_operand(x: torch.Tensor) -> torch.Tensor:
        return mxfp8.quantize(x, -2).dequantize()

    counter = Counter()
    fast = torch.compile(wgrad_operand, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for rows in (33, 64, 7, 48, 100, 31, 257, 512, 1024):
        x = torch.randn(rows, 64, device=device)
        assert torch.equal(fast(x), wgrad_operand(x))
        graphs.append(counter.graphs)
    assert graphs[3] == graphs[-1]


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


ALL = ("rows", "columns", "hp")


def activations(activation: str, **how):
    """Forward and backward of a fused activation, with a bias."""

    def net(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor | None]:
        bias = x[0].contiguous()
        dy = dy[:, : x.shape[-1] // 2] if activation == "swiglu" else dy
        value = fused.activation_quantize(x, activation, bias, **how)
        return flat((*value, *fused.activation_quantize_backward(dy, x, activation, bias, **how)))

    return net


def norms(norm: str, with_residual: bool, **how):
    """Forward and backward of a fused norm, with everything it can have."""

    def net(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor | None]:
        weight, bias, residual = x[0].contiguous(), x[1].contiguous(), dy if with_residual else None
        value = fused.norm_quantize(x, weight, bias, residual, norm=norm, norm_block=32, **how)
        gradient = fused.norm_quantize_backward(
            dy, value.h, value.rstd, value.mean, weight, residual, with_bias=True, norm=norm, norm_block=32, **how
        )
        return flat((*value, *gradient))

    return net


FUSED = {
    "relu": activations("relu", outputs=ALL),
    "silu": activations("silu", outputs=("columns",), block=(1, 128), column_block=(128, 128)),
    "swiglu": activations("swiglu", fmt="e5m2", scale_rule="floor", round_first=True, outputs=ALL),
    "rms": norms("rms", False, outputs=("rows",)),
    "layer": norms("layer", True, outputs=ALL, satfinite=True),
    "block": norms("block", False),
}


def assert_same_bits(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride())
            assert torch.equal(bits(g), bits(w))


@pytest.mark.parametrize("name", FUSED)
def test_fused_ops_are_one_node_each_with_the_bits_of_eager(name: str, device: torch.device) -> None:
    net = FUSED[name]
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        nodes.extend(str(n.target) for n in graph.graph.nodes if "mxfp8" in str(n.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x, dy = torch.randn(2, 70, 96, device=device).bfloat16()
    assert_same_bits(torch.compile(net, backend=backend, fullgraph=True)(x, dy), net(x, dy))
    op = "norm_quantize" if name in fused.NORMS else "activation_quantize"
    assert nodes == [f"mxfp8.{op}", f"mxfp8.{op}_backward"]


def test_fused_ops_do_not_recompile_for_every_row_count(device: torch.device) -> None:
    net, counter, graphs = FUSED["layer"], Counter(), []
    fast = torch.compile(net, backend=counter, fullgraph=True, dynamic=True)
    for rows in (70, 64, 7, 33, 257, 31, 100, 512):
        x, dy = torch.randn(2, rows, 96, device=device)
        assert_same_bits(fast(x, dy), net(x, dy))
        graphs.append(counter.graphs)
    assert graphs[3] == graphs[-1]


def test_gradients_through_a_compiled_fused_op(device: torch.device) -> None:
    """As models use them: inside an autograd function."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return fused.activation_quantize(x, "gelu", outputs=("rows",)).rows.dequantize()

        @staticmethod
        def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return fused.activation_quantize_backward(dy, x, "gelu", outputs=("columns",)).columns.dequantize()

    x, dy = torch.randn(2, 64, 96, device=device)
    results = []
    for f in (Function.apply, compiled(Function.apply)):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.backward(dy)
        results.append([y.detach(), leaf.grad])
    assert_same_bits(*results)


def test_wrong_arguments_of_fused_ops_are_named_in_a_compiled_region(device: torch.device) -> None:
    x = torch.randn(8, 64, device=device)
    with pytest.raises(Exception, match="unknown activation 'tanh'"):
        compiled(lambda x: fused.activation_quantize(x, "tanh").rows.dequantize())(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "layer"])
def test_inductor_gives_the_bits_of_eager_for_fused_ops(name: str, device: torch.device) -> None:
    """Exponentials and sums of generated code would be others: the operators run as they are."""
    net = FUSED[name]
    x, dy = torch.randn(2, 70, 96, device=device).bfloat16()
    assert_same_bits(torch.compile(net, fullgraph=True)(x, dy), net(x, dy))
