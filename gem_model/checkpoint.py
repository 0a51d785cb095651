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
import zipfile
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
    _check_fingerprint(path, state["fingerprint"], fingerprint(trainer))
    _check_tensors(path, "model", state["model"], trainer.model.state_dict())
    _check_optimizers(path, state["optimizers"], trainer.optimizers)
    own = trainer.loader
    probe = Loader(own.source, own.batch_size, seed=own.seed, shuffle=own.shuffle, drop_last=own.drop_last)
    try:
        probe.load_state_dict(state["loader"])
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
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
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
    saved_parts, own_parts = json.loads(saved), json.loads(own)
    for part, values in own_parts.items():
        for field, value in values.items():
            other = saved_parts.get(part, {}).get(field)
            if other != value:
                raise CheckpointError(
                    f"checkpoint {path}: written with {part}.{field} = {_short(other)}, this run has {_short(value)}; "
                    "resume with the saved settings"
                )
    raise CheckpointError(f"checkpoint {path}: its settings have fields that this release does not know")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_tensors(path: Path, part: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if odd := sorted(set(saved) ^ set(own)):
        where = "the checkpoint" if odd[0] in saved else "this run"
        raise CheckpointError(f"checkpoint {path}: {part}: only {where} has {odd[0]!r} ({len(odd)} such entries)")
    for name, value in own.items():
        if saved[name].shape != value.shape or saved[name].dtype != value.dtype:
            raise CheckpointError(
                f"checkpoint {path}: {part}: {name!r} is {saved[name].dtype} {tuple(saved[name].shape)}, "
                f"this run needs {value.dtype} {tuple(value.shape)}"
            )


def _check_optimizers(path: Path, saved: Mapping[str, Any], own: Mapping[str, Optimizer]) -> None:
    if set(saved) != set(own):
        raise CheckpointError(f"checkpoint {path}: optimisers {sorted(saved)}, this run has {sorted(own)}")
    for name, optimizer in own.items():
        counts = [[len(group["params"]) for group in s["param_groups"]] for s in (saved[name], optimizer.state_dict())]
        if counts[0] != counts[1]:
            raise CheckpointError(
                f"checkpoint {path}: optimiser {name!r} has parameter groups of {counts[0]}, this run {counts[1]}"
            )
