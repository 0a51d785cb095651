"""Checkpoints of a training run: one file, written all or nothing, loaded all or nothing, resumed bit for bit.

The file is `torch.save`'s zip with plain containers and tensors only, so `torch.load(weights_only=True)` reads it:

    format, version        what the file is
    fingerprint            model configuration, data schema and training configuration, as JSON text
    model                  state_dict; the same keys whether or not the model is converted to MXFP8
    optimizers             state_dict of each optimiser
    loader                 epoch and position in it
    rng                    torch's CPU generator, and the generator of each CUDA device
    mxfp8_step             step counter of stochastic rounding
    run                    step, losses, training curve, metric window, seconds and samples so far
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gem_model.data import Loader
from gem_model.train import CurvePoint, Trainer

FORMAT, VERSION = "gem-checkpoint", 1
PARTS = ("format", "version", "fingerprint", "model", "optimizers", "loader", "rng", "mxfp8_step", "run")


UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError, RuntimeError, EOFError, OSError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
)
"""What zipfile and torch.load raise for a file whose bytes are wrong: they check little before they use it."""


class CheckpointError(ValueError):
    """A checkpoint file that cannot be used: names the file and what is wrong with it."""


def fingerprint(trainer: Trainer) -> str:
    """JSON text of everything that must be equal for a resume: model configuration, schema, training configuration."""
    model = trainer.model
    parts = {"model": asdict(model.config), "schema": asdict(model.schema), "train": asdict(trainer.config)}
    return json.dumps(parts, sort_keys=True)


def save_checkpoint(path: str | Path, trainer: Trainer) -> Path:
    """Write the run to `path` by way of a temporary file beside it; creates the folder. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(_collect(trainer), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_checkpoint(path: str | Path, trainer: Trainer) -> None:
    """Bring `trainer` to the saved state. Everything is checked before anything is changed.

    Raises FileNotFoundError, or CheckpointError naming the file and what is wrong: not a checkpoint, truncated,
    damaged, of another version, or of another model, schema or training configuration (the differing field is named).
    """
    path = Path(path)
    state = read_checkpoint(path)
    own_state = _collect(trainer)
    for part in ("fingerprint", "loader", "rng", "mxfp8_step", "run"):
        _check_kind(path, part, state[part], own_state[part])
    _check_fingerprint(path, state["fingerprint"], own_state["fingerprint"])
    _check_tensors(path, "model", state["model"], own_state["model"])
    _check_optimizers(path, state["optimizers"], trainer.optimizers)
    _check_history(path, state["run"], len(trainer.window.tasks))
    own = trainer.loader
    probe = Loader(own.source, own.batch_size, seed=own.seed, shuffle=own.shuffle, drop_last=own.drop_last)
    try:
        probe.load_state_dict(state["loader"])
        trainer.window.check_state_dict(state["run"]["window"])
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    _apply(state, trainer)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The parts of the file, on the CPU; checks that the file is whole and is a checkpoint of this version."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not verify the checksums that torch.save wrote
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path}: truncated, damaged or no checkpoint at all ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"checkpoint {path}: damaged, the checksum of {damaged!r} does not match")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: not written by gem_model (no format mark {FORMAT!r})")
    if state.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path}: version {state.get('version')}, this release reads {VERSION}")
    if missing := [part for part in PARTS if part not in state]:
        raise CheckpointError(f"checkpoint {path}: the parts {missing} are missing")
    return state


def _collect(trainer: Trainer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint(trainer),
        "model": trainer.model.state_dict(),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in trainer.optimizers.items()},
        "loader": trainer.loader.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "cuda": _cuda_rng()},
        "mxfp8_step": trainer.mxfp8_step,
        "run": {
            "step": trainer.step,
            "losses": list(trainer.losses),
            "curve": [(point.step, list(point.ne)) for point in trainer.curve],
            "window": trainer.window.state_dict(),
            "seconds": trainer.seconds,
            "samples": trainer.samples,
        },
    }


def _apply(state: Mapping[str, Any], trainer: Trainer) -> None:
    trainer.model.load_state_dict(state["model"])
    for name, optimizer in trainer.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    trainer.loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"]["cpu"])
    if len(state["rng"]["cuda"]) == len(_cuda_rng()):
        for device, rng in enumerate(state["rng"]["cuda"]):
            torch.cuda.set_rng_state(rng, device)
    trainer.mxfp8_step = state["mxfp8_step"]
    run = state["run"]
    trainer.step, trainer.seconds, trainer.samples = run["step"], run["seconds"], run["samples"]
    trainer.losses = list(run["losses"])
    trainer.curve = [CurvePoint(step=step, ne=tuple(ne)) for step, ne in run["curve"]]
    trainer.window.load_state_dict(run["window"])


def _cuda_rng() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _check_fingerprint(path: Path, saved: str, own: str) -> None:
    if saved == own:
        return
    try:
        saved_parts, own_parts = json.loads(saved), json.loads(own)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: the fingerprint is no JSON ({error})") from error
    for part, values in own_parts.items():
        fields = saved_parts.get(part) if isinstance(saved_parts, dict) else None
        for field, value in values.items():
            other = fields.get(field) if isinstance(fields, dict) else None
            if other != value:
                raise CheckpointError(
                    f"checkpoint {path}: written with {part}.{field} = {_short(other)}, this run has {_short(value)}; "
                    "resume with the saved settings"
                )
    raise CheckpointError(f"checkpoint {path}: its settings have fields that this release does not know")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_kind(path: Path, what: str, saved: Any, own: Any) -> None:
    """CheckpointError unless `saved` is made like `own`: types, keys, and dtypes and shapes of tensors, at any depth.

    Entries of lists are not looked at: their number is what a run changes. Types are exact, so True is no step.
    """
    if type(saved) is not type(own):
        raise CheckpointError(
            f"checkpoint {path}: {what} is a {type(saved).__name__}, this release writes a {type(own).__name__}"
        )
    if isinstance(own, dict):
        if set(saved) != set(own):
            raise CheckpointError(f"checkpoint {path}: {what} has the fields {list(saved)}, expected {list(own)}")
        for key, value in own.items():
            _check_kind(path, f"{what}.{key}", saved[key], value)
    elif isinstance(own, Tensor) and (saved.dtype != own.dtype or saved.shape != own.shape):
        raise CheckpointError(
            f"checkpoint {path}: {what} is {saved.dtype} {tuple(saved.shape)}, "
            f"this run needs {own.dtype} {tuple(own.shape)}"
        )


def _check_history(path: Path, run: Mapping[str, Any], tasks: int) -> None:
    """Losses are numbers, curve points (step, one number per task), counters not negative."""
    if not all(isinstance(loss, float) for loss in run["losses"]):
        raise CheckpointError(f"checkpoint {path}: run.losses holds something else than numbers")
    for point in run["curve"]:
        if not (isinstance(point, tuple) and len(point) == 2 and isinstance(point[0], int)):
            raise CheckpointError(f"checkpoint {path}: run.curve holds {point!r}, expected (step, [ne per task])")
        if not (isinstance(point[1], list) and len(point[1]) == tasks and all(isinstance(n, float) for n in point[1])):
            raise CheckpointError(f"checkpoint {path}: run.curve at step {point[0]} has not {tasks} numbers")
    if min(run["step"], run["samples"], run["seconds"]) < 0 or len(run["losses"]) != run["step"]:
        raise CheckpointError(f"checkpoint {path}: step {run['step']} with {len(run['losses'])} losses")


def _check_tensors(path: Path, part: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"checkpoint {path}: {part} is a {type(saved).__name__}, expected a state_dict")
    if odd := sorted(set(saved) ^ set(own), key=str):
        where = "the checkpoint" if odd[0] in saved else "this run"
        raise CheckpointError(f"checkpoint {path}: {part}: only {where} has {odd[0]!r} ({len(odd)} such entries)")
    for name, value in own.items():
        if not isinstance(saved[name], Tensor):
            raise CheckpointError(f"checkpoint {path}: {part}: {name!r} is a {type(saved[name]).__name__}, no tensor")
        if saved[name].shape != value.shape or saved[name].dtype != value.dtype:
            raise CheckpointError(
                f"checkpoint {path}: {part}: {name!r} is {saved[name].dtype} {tuple(saved[name].shape)}, "
                f"this run needs {value.dtype} {tuple(value.shape)}"
            )


def _check_optimizers(path: Path, saved: Mapping[str, Any], own: Mapping[str, Optimizer]) -> None:
    if not isinstance(saved, Mapping) or set(saved) != set(own):
        theirs = list(saved) if isinstance(saved, Mapping) else saved
        raise CheckpointError(f"checkpoint {path}: optimisers {theirs}, this run has {list(own)}")
    for name, optimizer in own.items():
        where, groups = f"optimiser {name!r}", optimizer.state_dict()["param_groups"]
        if not isinstance(saved[name], Mapping) or set(saved[name]) != {"state", "param_groups"}:
            raise CheckpointError(f"checkpoint {path}: {where} is no state_dict of an optimiser")
        saved_groups = saved[name]["param_groups"]
        if not isinstance(saved_groups, list) or len(saved_groups) != len(groups):
            raise CheckpointError(f"checkpoint {path}: {where} has not the {len(groups)} parameter groups of this run")
        for i, (group, own_group) in enumerate(zip(saved_groups, groups, strict=True)):
            _check_kind(path, f"{where}, group {i}", group, own_group)
            if group["params"] != own_group["params"]:
                raise CheckpointError(f"checkpoint {path}: {where}, group {i}: other parameters than this run's")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check_optimizer_state(path, where, saved[name]["state"], parameters)


def _check_optimizer_state(path: Path, where: str, state: Any, parameters: list[Tensor]) -> None:
    """State of each parameter: tensors of its shape, of one number, or of one number per row."""
    if not isinstance(state, Mapping) or not set(state) <= set(range(len(parameters))):
        raise CheckpointError(f"checkpoint {path}: {where}: its state is not that of {len(parameters)} parameters")
    for at, values in state.items():
        shapes = (torch.Size(()), parameters[at].shape, parameters[at].shape[:1])
        tensors = values.values() if isinstance(values, Mapping) else [None]
        if not all(isinstance(x, Tensor) and x.is_floating_point() and x.shape in shapes for x in tensors):
            raise CheckpointError(f"checkpoint {path}: {where}: the state of parameter {at} does not fit its shape")
