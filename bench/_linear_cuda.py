"""GPU cases of ``bench.linear``: forward and backward as CUDA graphs, every cast counted, the weights' too.

====================  ==========================================================  ==========================
case                  ours                                                        baseline
====================  ==========================================================  ==========================
coalesced             ``MXFP8Linear``, blocks of 128 on FP8 tensor cores          ``bf16``: nn.Linear
square, exact         32x32 weights, 1x32 everywhere: BF16 tensor cores           ``bf16``
small                 as coalesced, narrower than policies.recsys converts        ``bf16``
eager                 as coalesced, without a graph                               ``graphed``: with one
grouped               ``MXFP8GroupedLinear``, 8 groups of random sizes            ``bf16``: _grouped_mm
grouped_eager         the same without a graph                                    ``graphed``: with one
mlp_fused             ``MXFP8MLP``: RMSNorm, linear, SiLU, linear                 ``bf16``: torch.compile
mlp_fused_kept        the same with ``recompute=False``                           ``bf16``
mlp_eager             as mlp_fused, without a graph                               ``graphed``
memory_kept           bytes that autograd keeps for one linear layer              ``bf16``: nn.Linear
memory_peak_mlp6      most bytes allocated while a stack of six MLPs trains       ``bf16``: modules, eager
====================  ==========================================================  ==========================

The ratio of a memory row is the baseline's bytes by ours: above 1 means that ours needs less. Results are compared with
the baseline's before anything is timed.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mxfp8
from bench import _harness
from bench._harness import Row, Timing, Variant
from mxfp8.metrics import sqnr_db

RECIPES = {"coalesced": "mxfp8_coalesced", "square": "mxfp8_square", "exact": "mxfp8_rceil"}
CASES = (
    *RECIPES, "small", "eager", "grouped", "grouped_eager", "mlp_fused", "mlp_fused_kept", "mlp_eager",
    "memory_kept", "memory_peak_mlp6",
)  # fmt: skip

# A product of E4M3 operands has 28.5 dB or more, less 1.5 dB; through two of them and a norm 25.0 dB, less 2 dB.
MIN_SQNR_DB = {"linear": 27.0, "mlp": 23.0}

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Rows of every input, widths of the square layers, groups of rows, width and hidden width of the MLP, depth of
    its stack."""

    rows: int = 65536
    widths: tuple[int, ...] = (1024, 2048, 4096)
    small: int = 512
    groups: int = 8
    mlp: tuple[int, int] = (1024, 4096)
    depth: int = 6


def cases(
    device: torch.device, seconds: float, peers: bool, chosen: tuple[str, ...] = CASES, sizes: Sizes | None = None
) -> list[Row]:
    """The rows of the ``chosen`` cases, each shown as soon as it is measured.

    Raises:
        ValueError: an unknown case. RuntimeError: a result of ours that is farther from the baseline's than MXFP8
            explains. Errors of ours are not caught; a peer that fails says why on stderr and is left out.
    """
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"unknown case {unknown[0]!r}: use some of {', '.join(CASES)}")
    wanted, sizes = frozenset(chosen), sizes or Sizes()
    table: list[Row] = []
    if "memory_kept" in wanted:
        table.append(memory_kept(device, sizes.rows, sizes.widths[0]))
    if "memory_peak_mlp6" in wanted:
        table.append(memory_peak(device, sizes))
    if wanted & {"mlp_fused", "mlp_fused_kept", "mlp_eager"}:
        table += mlp_rows(device, seconds, sizes, wanted)
    recipes = {case: recipe for case, recipe in RECIPES.items() if case in wanted}
    if recipes or "eager" in wanted:
        for width in sizes.widths:
            table += linear_rows(device, seconds, sizes.rows, width, recipes, "eager" in wanted, peers)
    if wanted & {"grouped", "grouped_eager"}:
        for width in sizes.widths:
            table += grouped_rows(device, seconds, sizes, width, wanted)
    if "small" in wanted:
        table += linear_rows(device, seconds, sizes.rows, sizes.small, {"small": "mxfp8_coalesced"}, False, False)
    return table


# One step


def fwd_bwd(module: nn.Module, x: Tensor, dy: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Output, then the gradients of the input and of all parameters. Quantised weights are dropped first: a training
    step casts them anew. ``run`` is what to call instead of ``module`` (a compiled one)."""
    if isinstance(module, mxfp8.MXFP8Linear | mxfp8.MXFP8GroupedLinear | mxfp8.MXFP8MLP):
        module.clear_cache()
    y = module(x) if run is None else run(x)
    return [y, *torch.autograd.grad(y, (x, *module.parameters()), dy)]


def graphed(call: Call, device: torch.device) -> Call:
    """``call`` captured as a CUDA graph, so that host time does not count. (As it is on a CPU, for tests.)"""
    if device.type != "cuda":
        return call
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


def check(name: str, floor_db: float, got: list[Tensor], want: list[Tensor]) -> None:
    """RuntimeError unless each of ``got`` is as close to ``want`` as MXFP8 is to bfloat16. The shape of a gradient that
    belongs to nothing wide (a norm's weight) is checked only: its sum over all rows is another matter."""
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours.shape != theirs.shape:
            raise RuntimeError(f"{name}: result {i} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        found = sqnr_db(theirs, ours) if ours.ndim > 1 else floor_db
        if not found >= floor_db:  # a NaN fails too
            raise RuntimeError(f"{name}: result {i} has SQNR {found:.2f} dB, expected {floor_db} dB or more")


def free(device: torch.device) -> None:
    """Give memory back between cases."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Linear layers


def linear_rows(
    device: torch.device, seconds: float, rows: int, width: int, recipes: dict[str, str], eager: bool, peers: bool
) -> list[Row]:
    """A row for each of ``recipes`` (case: recipe) at one width; then without a graph, and beside each peer."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    bf16 = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
    steps = {"bf16": partial(fwd_bwd, bf16, x, dy)}
    for case, recipe in (recipes | ({"coalesced": RECIPES["coalesced"]} if eager else {})).items():
        steps[case] = partial(fwd_bwd, mxfp8.MXFP8Linear.from_linear(bf16, recipe), x, dy)
    want = steps["bf16"]()
    for case in steps.keys() - {"bf16"}:
        check(f"{case} at {width}", MIN_SQNR_DB["linear"], steps[case](), want)
    del want
    variants = [Variant(name=name, call=graphed(step, device)) for name, step in steps.items()]
    if eager:
        variants.append(Variant(name="eager", call=steps["coalesced"]))
    shape = f"{rows}x{width}x{width}"
    timings = _harness.time_variants(variants, device, seconds)
    table = [time_row(case, shape, timings, "bf16", device) for case in recipes]
    if eager:
        table.append(time_row("eager", shape, timings, "coalesced", device, label="graphed"))
    if peers:
        ours = [variant for variant in variants if variant.name in recipes]
        for name, build in peer_layers(bf16.weight).items():
            table += peer_rows(name, build, ours, x, dy, shape, seconds)
    del variants, steps
    free(device)
    return table


class GroupedLinear(nn.Module):
    """The rows of each group times the group's matrix, in BF16 by torch."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=offs)


def grouped_rows(device: torch.device, seconds: float, sizes: Sizes, width: int, wanted: frozenset[str]) -> list[Row]:
    torch.manual_seed(0)
    x = torch.randn(sizes.rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(sizes.rows, width, device=device, dtype=torch.bfloat16)
    offs = _harness.jagged(sizes.rows, sizes.groups, device)
    ours = mxfp8.MXFP8GroupedLinear(
        sizes.groups, width, width, device=device, dtype=torch.bfloat16, recipe="mxfp8_coalesced"
    )
    layers = {"bf16": GroupedLinear(ours.weight), "grouped": ours}
    steps = {name: partial(fwd_bwd, layer, x, dy, partial(layer, offs=offs)) for name, layer in layers.items()}
    check(f"grouped at {width}", MIN_SQNR_DB["linear"], steps["grouped"](), steps["bf16"]())
    variants = [Variant(name=name, call=graphed(step, device)) for name, step in steps.items()]
    if "grouped_eager" in wanted:
        variants.append(Variant(name="grouped_eager", call=steps["grouped"]))
    timings = _harness.time_variants(variants, device, seconds)
    shape = f"{sizes.rows}x{width}x{width}"
    table = [time_row("grouped", shape, timings, "bf16", device)] if "grouped" in wanted else []
    if "grouped_eager" in wanted:
        table.append(time_row("grouped_eager", shape, timings, "grouped", device, label="graphed"))
    del variants, steps
    free(device)
    return table


def time_row(
    case: str, shape: str, timings: dict[str, Timing], baseline: str, device: torch.device, label: str | None = None
) -> Row:
    return _harness.time_row(
        bench="linear", case=case, shape=shape, ours=timings[case], baseline=label or baseline,
        theirs=timings[baseline], device=device,
    )  # fmt: skip


def peer_layers(weight: Tensor) -> dict[str, Callable[[], nn.Module]]:
    """Makers of torchao's training layers, by baseline name; none if torchao is not installed."""
    n, k = weight.shape

    def float8(name: str) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        plain = nn.Sequential(nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype))
        converted: nn.Module = convert_to_float8_training(plain, config=Float8LinearConfig.from_recipe_name(name))[0]
        return converted

    def emulated() -> nn.Module:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        layer: nn.Module = MXFP8Linear(k, n, bias=False, kernel_preference=KernelPreference.EMULATED)
        layer.weight = nn.Parameter(weight.detach().clone())
        return layer

    if not _harness.HAS_TORCHAO:
        print("peers: torchao is not installed", file=sys.stderr)
        return {}
    return {
        "torchao_float8_rowwise": partial(float8, "rowwise"),
        "torchao_float8_tensorwise": partial(float8, "tensorwise"),
        "torchao_mxfp8_emulated": emulated,
    }


def peer_rows(
    name: str, build: Callable[[], nn.Module], ours: list[Variant], x: Tensor, dy: Tensor, shape: str, seconds: float
) -> list[Row]:
    """Our variants beside a compiled peer; nothing, and the reason on stderr, if the peer cannot run."""
    try:
        layer = build()
        step = partial(fwd_bwd, layer, x, dy, torch.compile(layer))
        timings = _harness.time_variants([*ours, Variant(name=name, call=graphed(step, x.device))], x.device, seconds)
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in another library must not end this run)
        print(f"{name} at {shape} left out: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return []
    return [time_row(variant.name, shape, timings, name, x.device) for variant in ours]


# The MLP


def plain_mlp(width: int, hidden: int, device: torch.device) -> nn.Sequential:
    """RMSNorm, linear, SiLU, linear in bfloat16."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    parts = {
        "norm": nn.RMSNorm(width, eps=1e-5, **kind),
        "fc1": nn.Linear(width, hidden, bias=False, **kind),
        "act": nn.SiLU(),
        "fc2": nn.Linear(hidden, width, bias=False, **kind),
    }
    return nn.Sequential(OrderedDict(parts))


def fused_mlp(plain: nn.Sequential, recompute: bool = True) -> mxfp8.MXFP8MLP:
    """Ours, around the same parameters."""
    parts: dict[str, Any] = dict(plain.named_children())
    return mxfp8.MXFP8MLP.from_modules(
        parts["norm"], parts["fc1"], parts["act"], parts["fc2"], "mxfp8_coalesced", recompute=recompute
    )


def mlp_rows(device: torch.device, seconds: float, sizes: Sizes, wanted: frozenset[str]) -> list[Row]:
    torch.manual_seed(0)
    width, hidden = sizes.mlp
    x = torch.randn(sizes.rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(sizes.rows, width, device=device, dtype=torch.bfloat16)
    plain = plain_mlp(width, hidden, device)
    steps = {
        "bf16": partial(fwd_bwd, plain, x, dy, torch.compile(plain)),
        "mlp_fused": partial(fwd_bwd, fused_mlp(plain), x, dy),
    }
    if "mlp_fused_kept" in wanted:
        steps["mlp_fused_kept"] = partial(fwd_bwd, fused_mlp(plain, recompute=False), x, dy)
    want = steps["bf16"]()
    for case in steps.keys() - {"bf16"}:
        check(case, MIN_SQNR_DB["mlp"], steps[case](), want)
    del want
    variants = [Variant(name=name, call=graphed(step, device)) for name, step in steps.items()]
    if "mlp_eager" in wanted:
        variants.append(Variant(name="mlp_eager", call=steps["mlp_fused"]))
    timings = _harness.time_variants(variants, device, seconds)
    shape = f"{sizes.rows}x{width}x{hidden}"
    table = [time_row(c, shape, timings, "bf16", device) for c in ("mlp_fused", "mlp_fused_kept") if c in wanted]
    if "mlp_eager" in wanted:
        table.append(time_row("mlp_eager", shape, timings, "mlp_fused", device, label="graphed"))
    del variants, steps
    free(device)
    return table


# Memory


def memory_row(case: str, shape: str, metric: str, ours: int, theirs: int, device: torch.device) -> Row:
    """A row in MiB, shown at once; the ratio is the baseline's by ours."""
    mine, beside = round(ours / 2**20, 1), round(theirs / 2**20, 1)
    print(f"linear {case} {shape}: {mine} MiB, {theirs / ours:.3f} of bf16", file=sys.stderr, flush=True)
    return Row(
        bench="linear", case=case, shape=shape, metric=metric, value=mine, unit="MiB", p20=mine, p80=mine,
        baseline="bf16", baseline_value=beside, ratio=round(theirs / ours, 3), gpu=_harness.device_name(device),
        torch=torch.__version__, triton=_harness.package_version("triton") or "none", commit=_harness._commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )  # fmt: skip


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of all storages that autograd keeps for one call of ``module``, its parameters excepted."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return sum(kept.values()) - sum(kept.get(p.untyped_storage().data_ptr(), 0) for p in module.parameters())


def memory_kept(device: torch.device, rows: int, width: int) -> Row:
    """Of one linear layer, its quantised weight included."""
    bf16 = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    ours = kept_bytes(mxfp8.MXFP8Linear.from_linear(bf16, "mxfp8_coalesced"), x)
    return memory_row("memory_kept", f"{rows}x{width}x{width}", "kept", ours, kept_bytes(bf16, x), device)


def peak_bytes(build: Callable[[], nn.Module], x: Tensor) -> int:
    """Most bytes allocated during a forward and a backward pass of what ``build`` makes: parameters, gradients and
    quantised copies count, ``x`` does not."""
    free(x.device)
    before = torch.cuda.memory_allocated(x.device)
    module = build()
    for _ in range(2):  # the first one warms up
        module.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        torch.cuda.reset_peak_memory_stats(x.device)
        y = module(leaf)
        y.backward(y.detach())
        del y, leaf
    return torch.cuda.max_memory_allocated(x.device) - before


def memory_peak(device: torch.device, sizes: Sizes) -> Row:
    """Of a stack of MLPs, each with its default of what it keeps."""
    width, hidden = sizes.mlp
    x = torch.randn(sizes.rows, width, device=device, dtype=torch.bfloat16)

    def plain() -> Iterator[nn.Sequential]:
        return (plain_mlp(width, hidden, device) for _ in range(sizes.depth))

    theirs = peak_bytes(lambda: nn.Sequential(*plain()), x)
    ours = peak_bytes(lambda: nn.Sequential(*(fused_mlp(p) for p in plain())), x)
    free(device)
    return memory_row("memory_peak_mlp6", f"{sizes.rows}x{width}x{hidden}", "peak", ours, theirs, device)
