"""``torch.compile`` with Inductor, its default backend, on a GPU: whole graphs with the bits of eager, also as CUDA
graphs. What :mod:`test_compile` asks of graphs, with the code generator that users get."""

import functools

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import fused
from mxfp8.recipe import RECIPES
from numerics_tests import tolerances
from numerics_tests.test_linear import make, run, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
D = torch.device("cuda")
recipes = pytest.mark.parametrize("recipe", RECIPES)


def step(module: nn.Module, call, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of one step; copies, since a CUDA graph writes over what it returned before."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    return [t.detach().clone() for t in (y, leaf.grad, *(p.grad for p in module.parameters()))]


def agree(got: list[torch.Tensor], want: list[torch.Tensor], dy: torch.Tensor) -> bool:
    """Of a layer with a bias, whose gradient is last and which Inductor adds up in an order of its own."""
    off = (got[-1].double() - want[-1].double()).abs()
    return same(got[:-1], want[:-1]) and bool((off <= 2 * tolerances.sum_error(dy.double(), torch.float32)).all())


@recipes
def test_a_layer_has_the_bits_of_eager(recipe: str) -> None:
    layer = make(recipe, device=D)
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (33, 128):
        x, dy = torch.randn(rows, 64, device=D), torch.randn(rows, 96, device=D)
        want = run(layer, x, dy)
        assert agree(step(layer, compiled, x, dy), want, dy)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
def test_an_mlp_has_the_bits_of_eager(recipe: str, recompute: bool) -> None:
    mlp = mxfp8.MXFP8MLP(128, 256, bias=False, recipe=recipe, recompute=recompute, device=D, dtype=torch.bfloat16)
    x, dy = (torch.randn(256, 128, device=D, dtype=torch.bfloat16) for _ in range(2))
    want = step(mlp, mlp, x, dy)
    assert same(step(mlp, torch.compile(mlp, fullgraph=True), x, dy), want)


def test_what_surrounds_a_layer_is_compiled_with_it() -> None:
    """Inductor's own kernels before and after ours, in one graph."""
    layer = make("mxfp8_coalesced", device=D)

    def surrounded(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x * 2)) * 0.5  # powers of two: no rounding that fusion could change

    x, dy = torch.randn(64, 64, device=D), torch.randn(64, 96, device=D)
    want = step(layer, surrounded, x, dy)
    assert agree(step(layer, torch.compile(surrounded, fullgraph=True), x, dy), want, dy)


def test_as_cuda_graphs() -> None:
    """``mode="reduce-overhead"`` replays the graph with new inputs and new weights."""
    layer = make("mxfp8_coalesced", device=D)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for i in range(4):
        x, dy = torch.randn(128, 64, device=D), torch.randn(128, 96, device=D)
        torch.compiler.cudagraph_mark_step_begin()
        got = step(layer, compiled, x, dy)
        assert agree(got, run(layer, x, dy), dy), i
        with torch.no_grad():
            layer.weight.mul_(1.5)


@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil", "mxfp8_robust"])
def test_a_layer_of_groups_has_the_bits_of_eager(recipe: str) -> None:
    layer = mxfp8.MXFP8GroupedLinear(4, 128, 96, device=D, dtype=torch.bfloat16, recipe=recipe)
    compiled = torch.compile(layer, fullgraph=True)
    for sizes in ([5, 0, 27, 64], [0, 96, 0, 0], [1, 2, 3, 4]):
        x, dy = (torch.randn(96, n, device=D, dtype=torch.bfloat16) for n in (128, 96))
        offs = torch.tensor(sizes, device=D).cumsum(0).to(torch.int32)
        got, want = (step(layer, functools.partial(call, offs=offs), x, dy) for call in (compiled, layer))
        assert same(got, want)


def test_fused_ops() -> None:
    x = torch.randn(128, 256, device=D, dtype=torch.bfloat16)

    def both(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = fused.activation_quantize(t + 1, "silu", outputs=("rows", "columns", "hp"))
        return made.rows.qdata, made.rows.scale_bytes, made.columns.qdata, made.columns.scale_bytes, made.hp

    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(torch.compile(both, fullgraph=True)(x), both(x), strict=True)
    )
