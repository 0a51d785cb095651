"""GPU cases of ``bench.quantize``: casts against a device copy of as many bytes, and what a call costs the host."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mxfp8
from bench import _harness
from bench._harness import Row, Timing, Variant
from mxfp8 import fused
from mxfp8.tensor import MXTensor

SHAPES = ((65536, 1024), (65536, 4096))
GROUPS = 8  # of random sizes
SETS = 3  # of inputs, taken in turn: each is larger than the L2
HOST_CALLS = 2000

Cast = Callable[..., tuple[MXTensor, ...]]


def _fused(device: torch.device, k: int) -> dict[str, Callable[..., object]]:
    """Producers that can write MX copies instead of their value in bf16."""
    weight = torch.ones(k, device=device, dtype=torch.bfloat16)
    return {
        "rmsnorm_both": lambda x, outputs: fused.norm_quantize(x, weight, outputs=outputs),
        "silu_both": lambda x, outputs: fused.activation_quantize(x, "silu", outputs=outputs),
    }


def _one(x: Tensor, axis: int, **how: Any) -> tuple[MXTensor, ...]:
    return (mxfp8.quantize(x, axis, **how),)


@functools.cache
def _ends(rows: int, device: torch.device) -> Tensor:
    return _harness.jagged(rows, GROUPS, device)


def _both_grouped(x: Tensor, backend: str = "auto") -> tuple[MXTensor, ...]:
    q, groups = mxfp8.quantize_both_grouped(x, _ends(len(x), x.device), block=(1, 128), backend=backend)
    return q, groups.q


_RANDOM: dict[str, Any] = {"rounding": "stochastic", "seed": 1}
CASTS: dict[str, Cast] = {
    "row": partial(_one, axis=-1),
    "row_g128": partial(_one, axis=-1, block=(1, 128)),
    "row_stochastic": partial(_one, axis=-1, **_RANDOM),
    "row_hadamard": partial(_one, axis=-1, hadamard=32),
    "column": partial(_one, axis=-2),
    "column_g128": partial(_one, axis=-2, block=(1, 128)),
    "column_stochastic": partial(_one, axis=-2, **_RANDOM),
    "column_hadamard": partial(_one, axis=-2, hadamard=32),
    "both": partial(mxfp8.quantize_both, block=(1, 32), column_block=(1, 32)),
    "both_g128": partial(mxfp8.quantize_both, block=(1, 128), column_block=(1, 128)),
    "both_g128_tile": partial(mxfp8.quantize_both, block=(1, 128), column_block=(128, 128)),
    "both_grouped_g128": _both_grouped,
    "square_both": partial(mxfp8.quantize_both, block=(32, 32), column_block=(32, 32)),
}


def cases(
    device: torch.device, seconds: float, baselines: Callable[[], dict[str, Callable[[Tensor], object]]]
) -> list[Row]:
    """Every cast at every shape against a copy of its bytes; rows of ``row`` also against ``baselines()``."""
    table = []
    for m, k in SHAPES:
        inputs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(SETS)]
        for name, cast in CASTS.items():
            _check(inputs[0][:256], cast)
            moved = inputs[0].numel() * 2 + sum(q.nbytes for q in cast(inputs[0]))
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_(256)
            target = torch.empty_like(source)
            variants = [_in_turn("ours", cast, inputs), Variant(name="copy", call=partial(target.copy_, source))]
            if name == "row":
                variants += [_in_turn(label, call, inputs) for label, call in baselines().items()]
            timings = _harness.time_variants(variants, device, seconds)
            table += [
                _harness.time_row(
                    bench="quantize",
                    case=name,
                    shape=f"{m}x{k}",
                    ours=timings["ours"],
                    baseline=label,
                    theirs=timings[label],
                    device=device,
                )
                for label in [v.name for v in variants[1:]]
            ]
        for name, produce in _fused(device, k).items():
            variants = [
                _in_turn("ours", partial(produce, outputs=("rows", "columns")), inputs),
                _in_turn("bf16_op", partial(produce, outputs=("hp",)), inputs),
            ]
            timings = _harness.time_variants(variants, device, seconds)
            table.append(
                _harness.time_row(
                    bench="quantize",
                    case=name,
                    shape=f"{m}x{k}",
                    ours=timings["ours"],
                    baseline="bf16_op",
                    theirs=timings["bf16_op"],
                    device=device,
                )
            )
        del inputs
    return [*table, *host_cost(device)]


def _in_turn(name: str, call: Callable[[Tensor], object], inputs: list[Tensor]) -> Variant:
    """A variant that takes another input at every call."""
    state = {"next": 0}

    def run() -> None:
        state["next"] = (state["next"] + 1) % len(inputs)
        call(inputs[state["next"]])

    return Variant(name=name, call=run)


def _check(x: Tensor, cast: Cast) -> None:
    """RuntimeError unless the cast has the bytes of the reference."""
    for q, want in zip(cast(x), cast(x, backend="reference"), strict=True):
        for name, a, b in (("scale", q.scale_bytes, want.scale_bytes), ("element", q.qdata, want.qdata)):
            differing = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
            if differing:
                raise RuntimeError(f"{q}: {differing} of {a.numel()} {name} bytes differ from the reference's")


def host_cost(device: torch.device) -> list[Row]:
    """Host time of one call on a tensor so small that the GPU is never waited for, allocation included."""
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    w = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    mm = _host(lambda: torch.mm(x, w))
    calls = {
        "host_cost": lambda: mxfp8.quantize(x),
        "host_cost_both": lambda: mxfp8.quantize_both(x),
        "host_cost_both_grouped": lambda: _both_grouped(x),
    }
    return [
        _harness.time_row(
            bench="quantize", case=name, shape="64x256", ours=_host(call), baseline="torch.mm", theirs=mm, device=device
        )
        for name, call in calls.items()
    ]


def _host(call: Callable[[], object]) -> Timing:
    samples = []
    for _ in range(7):
        call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS // 7):
            call()
        samples.append((time.perf_counter() - started) / (HOST_CALLS // 7) * 1e6)
        torch.cuda.synchronize()
    return _harness.summary(samples)
