"""What `gem compare` shows and writes: tables for the terminal, `report.html` and `report.json`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import mxfp8
from gem_model.compare import Comparison, settings
from gem_model.jobs import Evaluation, JobResult
from mxfp8 import report
from mxfp8.drift import LayerHealth

QUALITY = ("model", "task", "NE", "NE spread over seeds", "AUC", "calibration")
OPERANDS = ("input", "weight", "grad_output")
HEALTH = ("layer", "GEMM", "output, dB", "input, dB", "weight, dB", "grad, dB", "underflow %", "saturated %", "amax")
PACKAGES = ("torch", "numpy", "scipy", "triton")


def environment(device: str) -> dict[str, str]:
    """Versions and hardware that the figures depend on."""
    found = {"mxfp8": mxfp8.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["cpu cores"] = str(os.cpu_count())
    found["device"] = torch.cuda.get_device_name() if device.startswith("cuda") else device
    found["backends"] = ", ".join(f"{row.op}: {row.backend}" for row in mxfp8.explain(device) if row.available)
    return found


def quality_rows(comparison: Comparison) -> list[list[report.Cell]]:
    """Held-out quality: MXFP8, BF16, the logistic regression, and the best possible where it is known."""
    rows: list[list[report.Cell]] = []
    for task in comparison.dataset.schema.tasks:
        runs = (("GEM, BF16", [r.test for r in comparison.bf16]), ("GEM, MXFP8", [r.test for r in comparison.mxfp8]))
        for name, tests in runs:
            rows.append([name, task, *_quality([test for test in tests if test is not None], task)])
        rows.append(["logistic regression", task, f"{comparison.logistic[task]:.5f}", None, None, None])
        if task in comparison.dataset.best_ne:
            best = comparison.dataset.best_ne[task]
            rows.append(["true probabilities", task, f"{best:.5f}", None, None, None])
    return rows


def _quality(tests: Sequence[Evaluation], task: str) -> list[report.Cell]:
    if not tests:
        return ["not finite", None, None, None]
    ne = [test.ne[task] for test in tests]
    auc = sum(test.auc[task] for test in tests) / len(tests)
    calibration = sum(test.calibration[task] for test in tests) / len(tests)
    return [f"{sum(ne) / len(ne):.5f}", f"{max(ne) - min(ne):.5f}", f"{auc:.4f}", f"{calibration:.4f}"]


def terminal_tables(comparison: Comparison) -> list[Table]:
    """Quality, worst layers and the verdict, which comes last."""
    shown = comparison.drift.unhealthy_layers() or comparison.drift.worst_layers()
    worst = [[row.layer, row.gemm, row.operand, f"{row.sqnr_db:.2f}", *_shares([row])] for row in shown[:5]]
    columns = ("layer", "GEMM", "operand", "SQNR, dB", "underflow %", "saturated %")
    return [
        report.table("Held-out quality (mean over seeds)", QUALITY, quality_rows(comparison)),
        report.table("Worst layers (MXFP8 runs, watched training steps)", columns, worst),
        comparison.drift.table(),
    ]


def health_rows(layers: Sequence[LayerHealth]) -> list[list[report.Cell]]:
    """One row per GEMM: its output and its casts."""
    grouped: dict[tuple[str, str], list[LayerHealth]] = {}
    for row in layers:
        grouped.setdefault((row.layer, row.gemm), []).append(row)
    out: list[list[report.Cell]] = []
    for (layer, gemm), rows in grouped.items():
        output = next((f"{row.sqnr_db:.2f}" for row in rows if row.operand == "output"), None)
        casts = [row for row in rows if row.operand != "output"]
        by_operand = {row.operand: f"{row.sqnr_db:.1f}" for row in casts}
        amax = max((row.amax for row in casts if row.amax is not None), default=None)
        out.append([layer, gemm, output, *(by_operand.get(name) for name in OPERANDS), *_shares(casts), amax])
    return out


def _shares(rows: Sequence[LayerHealth]) -> list[report.Cell]:
    return [
        report.percent_number(max((row.underflow_frac for row in rows), default=0.0)),
        report.percent_number(max((row.saturated_frac for row in rows), default=0.0)),
    ]


def write_report(comparison: Comparison, folder: Path, command: str) -> tuple[Path, Path]:
    """Write `report.html` and `report.json` into `folder` and return their paths."""
    document = to_dict(comparison, command)
    return _page(comparison, command).write(folder / "report.html"), report.write_json(folder / "report.json", document)


def to_dict(comparison: Comparison, command: str) -> dict[str, Any]:
    """Everything in the HTML page, as plain values."""
    layers = next((run.layers for run in comparison.mxfp8 if run.layers is not None), None)
    return {
        **comparison.headline(),
        "command": command,
        "settings": settings(comparison.config),
        "environment": environment(comparison.config.device),
        "quality": [dict(zip(QUALITY, row, strict=True)) for row in quality_rows(comparison)],
        "logistic": comparison.logistic,
        "best_ne": dict(comparison.dataset.best_ne),
        "drift": comparison.drift.to_dict(),
        "policy": None if layers is None else [asdict(row) for row in layers.rows],
        "runs": [_run(run) for run in (*comparison.bf16, *comparison.mxfp8)],
    }


def _run(run: JobResult) -> dict[str, Any]:
    return {
        "precision": run.precision,
        "seed": run.seed,
        "weights_hash": run.weights_hash,
        "order_hash": run.order_hash,
        "samples_per_s": run.samples_per_s,
        "losses": list(run.losses),
        "curve": [asdict(point) for point in run.curve],
        "test": _scores(run.test),
        "same_weights": _scores(run.same_weights),
        "failure": run.failure,
        "health": {str(step): rows for step, rows in (run.health or {}).items()},
    }


def _scores(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {"ne": evaluation.ne, "auc": evaluation.auc, "calibration": evaluation.calibration}


def _page(comparison: Comparison, command: str) -> report.HtmlReport:
    config, dataset = comparison.config, comparison.dataset
    plural = "s" if config.seeds > 1 else ""
    subtitle = f"{dataset.name}, config {config.model.name}, {config.seeds} seed{plural}, {config.device}"
    page = report.HtmlReport("GEM in MXFP8 against BF16", subtitle)
    _facts(page, comparison)
    comparison.drift.add_to(page, floor_db=round(comparison.drift.config.worst_cast_db, 2))
    page.heading("Held-out quality").table(QUALITY, quality_rows(comparison), caption=_split(comparison))
    _curves(page, comparison)
    page.heading("Every watched GEMM and cast").table(
        HEALTH,
        health_rows(comparison.drift.layers),
        caption="Worst of the watched training steps and seeds. Output: the GEMM against the product of its operands "
        "before their casts. Underflow: non-zero elements that became zero. Saturated: elements at the largest code.",
    )
    _policy(page, comparison)
    runs: list[list[report.Cell]] = [
        [r.precision, r.seed, r.weights_hash[:16], r.order_hash[:16]] for r in (*comparison.bf16, *comparison.mxfp8)
    ]
    page.heading("Pairing").table(
        ("precision", "seed", "initial weights, SHA-256", "sample order, SHA-256"),
        runs,
        caption="The two runs of a seed have the same initial weights and the same samples in the same order.",
    )
    page.heading("To run it again").text(command)
    facts = environment(config.device) | {k: str(v) for k, v in settings(config).items()}
    return page.table(("setting", "value"), [[name, value] for name, value in facts.items()])


def _facts(page: report.HtmlReport, comparison: Comparison) -> None:
    figures = comparison.headline()
    main = comparison.pairing(comparison.task, "trained")
    page.facts(
        {
            f"NE {comparison.task}, BF16": "-" if main is None else f"{main.ne_baseline:.5f}",
            f"NE {comparison.task}, MXFP8": "-" if main is None else f"{main.ne_candidate:.5f}",
            "relative difference": "-" if main is None else report.percent(main.rel_ne_diff, signed=True),
            "this run resolves": "unknown" if figures["resolves"] is None else report.percent(figures["resolves"]),
            "NE, logistic regression": f"{figures['ne_logistic']:.5f}",
            "samples/s, MXFP8": f"{figures['samples_per_s']:,.0f}",
            "samples/s, BF16": f"{figures['samples_per_s_bf16']:,.0f}",
        }
    )
    if comparison.config.fault is not None:
        page.text(f"A fault is planted on purpose: {comparison.config.fault}.")


def _split(comparison: Comparison) -> str:
    dataset = comparison.dataset
    return (
        f"{len(dataset.train):,} training samples, {len(dataset.test):,} test samples, all later in time. NE: log loss "
        "over the entropy of the base rate; 1 is a model that knows the base rate only, lower is better."
    )


def _curves(page: report.HtmlReport, comparison: Comparison) -> None:
    runs = {"BF16": comparison.bf16, "MXFP8": comparison.mxfp8}
    curves = {
        name: [([p.step for p in run.curve], [p.ne[0] for p in run.curve]) for run in group if run.curve]
        for name, group in runs.items()
    }
    curves = {name: lines for name, lines in curves.items() if lines}
    if curves:
        title = f"Training, NE of {comparison.task} over {comparison.config.train.window} steps"
        page.heading("Training").figure(report.plot_training_curves(curves, title=title))


def _policy(page: report.HtmlReport, comparison: Comparison) -> None:
    layers = next((run.layers for run in comparison.mxfp8 if run.layers is not None), None)
    if layers is None:
        return
    rows: list[list[report.Cell]] = [
        [row.name, " x ".join(map(str, row.shape)), row.precision, row.parameters, row.reason] for row in layers.rows
    ]
    totals = "; ".join(
        f"{name}: {total.parameters:,} parameters, {report.percent(total.flops_frac)} of GEMM FLOPs per row"
        for name, total in layers.totals.items()
    )
    page.heading("Which layer runs in which precision, and why")
    page.table(("layer", "shape", "precision", "parameters", "why"), rows, caption=totals)
