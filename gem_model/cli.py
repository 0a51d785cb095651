"""`gem train` and `gem compare`.

Results go to stdout, the last line of it one JSON object; progress goes to stderr. Exit code 0: done (verdict "pass" or
"inconclusive"); 1: verdict "fail", or a run that became non-finite; 2: bad input, in one line that names the offender.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import mxfp8
from gem_model.checkpoint import load_checkpoint, save_checkpoint
from gem_model.compare import CompareConfig, compare
from gem_model.compare_report import terminal_tables, write_report
from gem_model.config import GEMConfig, get_config
from gem_model.data import DATASETS
from gem_model.faults import check_fault
from gem_model.jobs import BF16, MXFP8, DataSpec, build_model, default_workers, evaluate, load_data
from gem_model.progress import ProgressDisplay
from gem_model.train import NonFiniteError, TrainConfig, Trainer
from mxfp8 import PrecisionPolicy, policies, report

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MIN_DIM = {"tiny": 32, "small": 32}
"""`min_dim` of the recsys policy for configurations whose layers are all too small to gain speed: numerics only."""

Data = Annotated[str, typer.Option("--data", help="ml-100k, ml-latest-small, criteo or synthetic")]
DataPath = Annotated[Path | None, typer.Option("--path", help="where the data lies, for data sets that need it")]
Option = Annotated[list[str] | None, typer.Option("--option", help="KEY=VALUE for the data set, e.g. holdout_days=60")]
Config = Annotated[str, typer.Option("--config", help="model size: tiny, small, base")]
Recipe = Annotated[str, typer.Option("--recipe", help=f"MXFP8 recipe: {', '.join(mxfp8.RECIPES)}")]
Policy = Annotated[
    str, typer.Option("--policy", help="recsys, all (every linear layer), or a policy file (.json, .yaml)")
]
Epochs = Annotated[int, typer.Option("--epochs", help="passes over the training data")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="samples per step")]
History = Annotated[int | None, typer.Option("--history", help="latest events kept per sample (default: the config's)")]
Limit = Annotated[int | None, typer.Option("--limit", help="train on the latest LIMIT samples only")]
Seed = Annotated[int, typer.Option("--seed", help="weights and order of the data")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda")]


@app.callback()
def _main() -> None:
    """GEM: train it in BF16 or MXFP8, and compare the two."""


@app.command("compare")
def compare_command(
    data: Data = "ml-100k",
    config: Config = "tiny",
    seeds: Annotated[int, typer.Option("--seeds", help="pairs of runs; a pass needs at least 3")] = 3,
    recipe: Recipe = "mxfp8_rceil",
    policy: Policy = "recsys",
    plant: Annotated[str | None, typer.Option("--plant", help="plant a fault, which must come out as fail")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="largest relative NE difference that passes")] = 2e-4,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", help="folder of the report (default: runs/<data>-<config>)")
    ] = None,
    epochs: Epochs = 1,
    batch_size: BatchSize = 512,
    history: History = None,
    limit: Limit = None,
    seed: Seed = 0,
    path: DataPath = None,
    option: Option = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="processes (default: one per core; 0: this one)")
    ] = None,
) -> None:
    """Train BF16 and MXFP8 from the same weights on the same data, for every seed, and judge the difference."""
    command = shlex.join(["gem", *sys.argv[1:]])
    with _one_line_errors():
        model, spec = _model_and_data(config, data, path, history, limit, option or [])
        fault = None if plant is None else check_fault(plant)
        settings = CompareConfig(
            data=spec,
            model=model,
            train=TrainConfig(epochs=epochs, batch_size=batch_size, seed=seed),
            policy=_policy(policy, recipe, config),
            seeds=seeds,
            fault=fault,
            tolerance=tolerance,
            device=_device(device),
            workers=default_workers(device, 2 * seeds) if workers is None else workers,
        )
        folder = out or Path("runs") / "-".join([data, config, *([fault] if fault else [])])
        _writable(folder)
        steps = -(-len(load_data(spec).train) // batch_size) * epochs
        with ProgressDisplay(2 * seeds, steps) as display:
            result = compare(settings, display)
        pages = write_report(result, folder, command)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for table in terminal_tables(result):
        console.print(table)
    console.print("report:", *map(str, pages), highlight=False, soft_wrap=True)
    _last_line(result.headline() | {"report": str(pages[0])})
    raise typer.Exit(1 if result.drift.verdict == "fail" else 0)


@app.command("train")
def train_command(
    data: Data = "ml-100k",
    config: Config = "tiny",
    precision: Annotated[str, typer.Option("--precision", help="bf16 or mxfp8")] = MXFP8,
    recipe: Recipe = "mxfp8_rceil",
    policy: Policy = "recsys",
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", help="folder of the checkpoint (default: runs/train-...)")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="go on from this checkpoint")] = None,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", help="steps between checkpoints")] = 100,
    stop_after: Annotated[int | None, typer.Option("--stop-after", help="stop at this step; --resume goes on")] = None,
    epochs: Epochs = 1,
    batch_size: BatchSize = 512,
    history: History = None,
    limit: Limit = None,
    seed: Seed = 0,
    path: DataPath = None,
    option: Option = None,
) -> None:
    """Train one model with checkpoints, and score it on the held-out split."""
    with _one_line_errors():
        if precision not in (BF16, MXFP8):
            raise ValueError(f"unknown precision {precision!r}; choose one of {[BF16, MXFP8]}")
        if checkpoint_every < 1 or (stop_after is not None and stop_after < 1):
            raise ValueError(
                f"checkpoint-every and stop-after must be at least 1, got {checkpoint_every}, {stop_after}"
            )
        model_config, spec = _model_and_data(config, data, path, history, limit, option or [])
        chosen = _policy(policy, recipe, config)
        folder = out or Path("runs") / f"train-{data}-{config}-{precision}"
        _writable(folder)
        dataset = load_data(spec)
        model = build_model(model_config, dataset, seed)
        if precision == MXFP8:
            model = mxfp8.convert(model, chosen)
        settings = TrainConfig(epochs=epochs, batch_size=batch_size, seed=seed)
        trainer = Trainer(model, dataset.train, settings, _device(device))
        if resume is not None:
            load_checkpoint(resume, trainer)
        file = folder / "checkpoint.pt"
        _train(trainer, file, precision, checkpoint_every, stop_after)
        result = evaluate(model, dataset)
    columns = ("task", "NE", "AUC", "calibration")
    rows = [[t, f"{result.ne[t]:.5f}", f"{result.auc[t]:.4f}", f"{result.calibration[t]:.4f}"] for t in result.ne]
    Console().print(report.table(f"{precision}, held-out split", columns, rows))
    scores = {"ne": result.ne, "auc": result.auc, "calibration": result.calibration}
    speed = trainer.progress().samples_per_s
    done = {"precision": precision, "step": trainer.step, "steps": trainer.total, "samples_per_s": speed}
    _last_line(done | scores | {"checkpoint": str(file)})


def _train(trainer: Trainer, file: Path, precision: str, every: int, stop_after: int | None) -> None:
    end = trainer.total if stop_after is None else min(stop_after, trainer.total)
    if trainer.step > end:
        raise ValueError(f"the checkpoint is at step {trainer.step}, past the last step {end} of this run")
    with ProgressDisplay(1, trainer.total) as display:
        while trainer.step < end:
            until = min(end, (trainer.step // every + 1) * every)
            trainer.run(until=until, on_step=lambda progress: display(precision, progress))
            save_checkpoint(file, trainer)


def _model_and_data(
    config: str, data: str, path: Path | None, history: int | None, limit: int | None, extra: list[str]
) -> tuple[GEMConfig, DataSpec]:
    model = get_config(config)
    if history is not None and not 0 <= history <= model.max_history:
        raise ValueError(f"history is {history}: config {config!r} takes 0 to {model.max_history} events")
    if data not in DATASETS:
        raise ValueError(f"unknown dataset {data!r}; choose one of {sorted(DATASETS)}")
    options: dict[str, Any] = {} if path is None else {"path": str(path)}
    if data != "criteo":  # which has no event stream
        options["max_history"] = model.max_history if history is None else history
    if data.startswith("ml-"):
        options["hide_user_ids"] = 0.5  # most users of the held-out month are new: see docs/gem_compare.md
    for text in extra:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"option {text!r} is not KEY=VALUE, such as holdout_days=60")
        number = (
            float(value)
            if re.fullmatch(r"-?\d+\.\d*", value)
            else int(value)
            if re.fullmatch(r"-?\d+", value)
            else value
        )
        options[key] = number
    return model, DataSpec(name=data, options=tuple(sorted(options.items())), limit=limit)


def _policy(name: str, recipe: str, config: str) -> PrecisionPolicy:
    if name == "recsys":
        return policies.recsys(recipe, min_dim=MIN_DIM[config]) if config in MIN_DIM else policies.recsys(recipe)
    if name == "all":
        return PrecisionPolicy(rules=[], default=mxfp8.get_recipe(recipe), name="all")
    file = Path(name)
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"unknown policy {name!r}; choose recsys, all, or a .json or .yaml file")
    text = file.read_text(encoding="utf-8")
    return PrecisionPolicy.from_json(text) if file.suffix == ".json" else PrecisionPolicy.from_yaml(text)


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"unknown device {name!r}; choose cpu or cuda")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not available: this torch sees no CUDA GPU; use --device cpu")
    return name


def _writable(folder: Path) -> None:
    """Find out before hours of training that the results have nowhere to go."""
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (NonFiniteError, RuntimeError) as error:
        _say(error)
        raise typer.Exit(1) from error
    except (ValueError, TypeError, OSError) as error:
        _say(error)
        raise typer.Exit(2) from error


def _say(error: Exception) -> None:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def _last_line(values: dict[str, Any]) -> None:
    print(json.dumps(report.to_jsonable(values), allow_nan=False), flush=True)


if __name__ == "__main__":
    app()
