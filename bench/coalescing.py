"""``python -m bench.coalescing``: what sharing a scale over more tokens costs a weight gradient, on real gradients.

Trains the tiny GEM on MovieLens-100K (or the synthetic log) and, at a few steps, casts both operands of every wgrad in
different blocks along the tokens. Rare positive labels make the gradients of neighbouring tokens differ by many
binades, so this is where a coarser block could lose something: the SQNR of dW, and gradients that become zero, tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mxfp8
from bench import _harness
from gem_model.config import get_config
from gem_model.jobs import DataSpec, build_model, load_data
from gem_model.train import TrainConfig, Trainer
from mxfp8 import observe
from mxfp8.formats import BlockShape
from mxfp8.metrics import sqnr_db, underflow_frac

BLOCKS: tuple[tuple[BlockShape, BlockShape], ...] = (
    ((1, 32), (1, 32)),
    ((1, 128), (1, 128)),
    ((1, 128), (128, 128)),
    ((1, 256), (1, 128)),
    ((1, 256), (1, 256)),
    ((32, 32), (32, 32)),
    ((128, 128), (128, 128)),
)
"""Of ``grad_output`` and ``input``, along the tokens."""
COLUMNS = (
    "data",
    "grad_output",
    "input",
    "gemms",
    "sqnr_db_mean",
    "sqnr_db_worst",
    "underflow_mean",
    "underflow_worst",
)


def wgrads(data: str, steps: tuple[int, ...], history: int) -> list[tuple[Tensor, Tensor]]:
    """``(grad_output, input)`` of every wgrad at the given training steps."""
    options = (("max_history", history),)
    dataset = load_data(DataSpec(name=data, options=options))
    model = build_model(get_config("tiny"), dataset, 0)
    model = mxfp8.convert(model, mxfp8.policies.recsys(min_dim=32))
    trainer = Trainer(model, dataset.train, TrainConfig(seed=0))
    found: list[tuple[Tensor, Tensor]] = []
    inputs: dict[str, Tensor] = {}

    def see(event: observe.Event) -> None:
        if isinstance(event, observe.CastEvent) and event.gemm == "wgrad":
            if event.operand == "input":
                inputs[event.layer] = event.x.detach().clone()
            else:
                found.append((event.x.detach().clone(), inputs.pop(event.layer)))

    for step in steps:
        trainer.run(until=step)
        with observe.subscribe(see):
            trainer.run(until=step + 1)
    return found


def measure(pairs: list[tuple[Tensor, Tensor]], dy_block: BlockShape, x_block: BlockShape) -> tuple[float, ...]:
    """Mean and worst SQNR of dW in dB, mean and worst fraction of gradients that became zero."""
    sqnr, lost = [], []
    for dy, x in pairs:
        q = mxfp8.quantize(dy, axis=-2, block=dy_block)
        p = mxfp8.quantize(x, axis=-2, block=x_block)
        exact = dy.double().mT @ x.double()
        if not exact.any():
            continue
        sqnr.append(sqnr_db(exact, q.dequantize(torch.float64).mT @ p.dequantize(torch.float64)))
        lost.append(underflow_frac(dy.float(), q.dequantize(torch.float32)))
    return sum(sqnr) / len(sqnr), min(sqnr), sum(lost) / len(lost), max(lost)


METRICS = (
    ("sqnr_db_mean", "dB"),
    ("sqnr_db_worst", "dB"),
    ("underflow_mean", "fraction"),
    ("underflow_worst", "fraction"),
)


def main(
    data: Annotated[str, typer.Option(help="ml-100k or synthetic")] = "ml-100k",
    history: Annotated[int, typer.Option(help="events of history")] = 16,
    save: Annotated[bool, typer.Option("--save", help="write the rows to bench/results/")] = False,
) -> None:
    """Print one row for each pair of blocks."""
    pairs = wgrads(data, (5, 40, 120), history)
    table = Table("grad_output", "input", *(name for name, _ in METRICS), title=f"wgrad on {data}: {len(pairs)} GEMMs")
    rows = []
    for dy_block, x_block in BLOCKS:
        names = ["x".join(map(str, block)) for block in (dy_block, x_block)]
        numbers = measure(pairs, dy_block, x_block)
        table.add_row(*names, *(f"{n:.4g}" for n in numbers))
        for (metric, unit), value in zip(METRICS, numbers, strict=True):
            rows.append(_row(data, " . ".join(names), metric, value, unit))
    Console(width=120).print(table)
    if save:
        _harness.save_rows(_harness.results_folder(torch.device("cpu")) / "coalescing.csv", rows)


def _row(data: str, case: str, metric: str, value: float, unit: str) -> _harness.Row:
    value = float(f"{value:.4g}")
    found = _harness.time_row(
        bench="coalescing",
        case=f"wgrad {case}",
        shape=data,
        ours=_harness.Timing(median_us=value, p20_us=value, p80_us=value),
        baseline="none",
        theirs=None,
        device=torch.device("cpu"),
    )
    return replace(found, metric=metric, unit=unit, value=value, p20=value, p80=value)


if __name__ == "__main__":
    typer.run(main)
