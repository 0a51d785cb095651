"""GPU cases of ``bench.linear``: forward and backward as CUDA graphs, every cast counted, the weight's too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import mxfp8
from bench import _harness
from bench._harness import Row, Variant

ROWS = 65536
SIZES = (1024, 2048, 4096)
RECIPES = {"coalesced": "mxfp8_coalesced", "square": "mxfp8_square", "exact": "mxfp8_rceil"}


def fwd_bwd(layer: nn.Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients. Quantised weights are dropped first: a training step casts them anew."""
    if isinstance(layer, mxfp8.MXFP8Linear):
        layer.clear_cache()
    y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    return y, dx, dw


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` captured as a CUDA graph, so that host time does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def torchao_layers(weight: Tensor) -> dict[str, Callable[[Tensor, Tensor], object]]:
    """Compiled forward and backward of torchao's training layers that run on this GPU, by baseline name."""
    if not _harness.HAS_TORCHAO:
        return {}
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    n, k = weight.shape
    found: dict[str, nn.Linear] = {}
    for name in ("rowwise", "tensorwise"):
        plain = nn.Sequential(nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype))
        config = Float8LinearConfig.from_recipe_name(name)
        found[f"torchao_float8_{name}"] = convert_to_float8_training(plain, config=config)[0]
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    emulated = MXFP8Linear(k, n, bias=False, kernel_preference=KernelPreference.EMULATED)
    emulated.weight = nn.Parameter(weight.detach().clone())
    found["torchao_mxfp8_emulated"] = emulated
    out: dict[str, Callable[[Tensor, Tensor], object]] = {}
    for name, layer in found.items():
        compiled = torch.compile(layer)

        def call(x: Tensor, dy: Tensor, run: Callable[..., Tensor] = compiled, layer: nn.Linear = layer) -> object:
            return torch.autograd.grad(run(x), (x, layer.weight), dy)

        out[name] = call
    return out


def cases(device: torch.device, seconds: float, peers: bool) -> list[Row]:
    """One row for each recipe, size and baseline that runs; a baseline that fails is reported and left out."""
    table: list[Row] = []
    for size in SIZES:
        torch.manual_seed(0)
        x = torch.randn(ROWS, size, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(ROWS, size, device=device, dtype=torch.bfloat16)
        bf16 = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
        ours = {case: mxfp8.MXFP8Linear.from_linear(bf16, recipe) for case, recipe in RECIPES.items()}
        calls: dict[str, Callable[[], object]] = {"bf16": partial(fwd_bwd, bf16, x, dy)}
        calls |= {case: partial(fwd_bwd, layer, x, dy) for case, layer in ours.items()}
        if peers:
            calls |= {name: partial(call, x, dy) for name, call in torchao_layers(bf16.weight).items()}
        variants = []
        for name, step in calls.items():
            try:
                variants.append(Variant(name=name, call=graphed(step)))
            except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:  # a peer that cannot run
                print(f"{name} at {size}: {type(error).__name__}: {str(error)[:200]}")
        variants.append(Variant(name="eager", call=calls["coalesced"]))
        timings = _harness.time_variants(variants, device, seconds)
        for case in (*RECIPES, "eager"):
            baselines = ["coalesced"] if case == "eager" else [n for n in timings if n == "bf16" or "torchao" in n]
            if case not in timings:
                continue
            for baseline in baselines:
                table.append(
                    _harness.time_row(
                        bench="linear",
                        case=case,
                        shape=f"{ROWS}x{size}x{size}",
                        ours=timings[case],
                        baseline="graphed" if case == "eager" else baseline,
                        theirs=timings[baseline],
                        device=device,
                    )
                )
        del variants, calls, ours, x, dy
        torch.cuda.empty_cache()
    return table
