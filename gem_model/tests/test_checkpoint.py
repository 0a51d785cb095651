"""Checkpoints: resume bit for bit in every precision; a bad file is named and changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxfp8
from gem_model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gem_model.config import get_config
from gem_model.data import Dataset, load
from gem_model.jobs import build_model
from gem_model.train import TrainConfig, Trainer

CONFIG = get_config("tiny", dim=32, heads=1, layers=1, fm_hidden=(32,), head_hidden=(32,), max_history=6)
TRAIN = TrainConfig(batch_size=32, window=3, epochs=2)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load("synthetic", num_samples=480, num_users=50, num_ads=40, max_history=6)


def _trainer(dataset: Dataset, precision: str = "bf16", config: TrainConfig = TRAIN, seed: int = 0) -> Trainer:
    model = build_model(CONFIG, dataset, seed)
    if precision != "bf16":
        model = mxfp8.convert(model, mxfp8.policies.recsys(precision, min_dim=32))
    return Trainer(model, dataset.train, config)


def _bits(trainer: Trainer) -> list[torch.Tensor]:
    states = [s for o in trainer.optimizers.values() for _, s in sorted(o.state_dict()["state"].items())]
    return [
        *trainer.model.state_dict().values(),
        *(v for s in states for v in s.values() if isinstance(v, torch.Tensor)),
    ]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8_rceil", "mxfp8_robust"])
def test_resume_is_bit_exact_across_an_epoch(dataset: Dataset, tmp_path: Path, precision: str) -> None:
    whole = _trainer(dataset, precision)
    whole.run(until=20)  # an epoch has 12 steps
    first = _trainer(dataset, precision)
    first.run(until=8)
    save_checkpoint(tmp_path / "c.pt", first)
    mxfp8.set_step(12345)  # what another process, or another run of this one, would leave behind
    second = _trainer(dataset, precision, seed=7)  # other weights: everything must come from the file
    load_checkpoint(tmp_path / "c.pt", second)
    second.run(until=20)
    assert second.losses == whole.losses
    assert second.curve == whole.curve
    assert second.loader.state_dict() == whole.loader.state_dict()
    assert second.samples == whole.samples
    assert all(torch.equal(a, b) for a, b in zip(_bits(second), _bits(whole), strict=True))


def test_a_stochastic_run_would_notice_a_lost_step_counter(dataset: Dataset, tmp_path: Path) -> None:
    runs = []
    for lost in (False, True):
        trainer = _trainer(dataset, "mxfp8_robust")
        trainer.run(until=3)
        trainer.mxfp8_step += int(lost)
        trainer.run(until=6)
        runs.append(trainer.losses)
    assert runs[0][:3] == runs[1][:3]
    assert runs[0] != runs[1]


def test_state_dict_crosses_precisions(dataset: Dataset) -> None:
    bf16, mx = _trainer(dataset).model, _trainer(dataset, "mxfp8_rceil", seed=1).model
    wanted = {name: value.clone() for name, value in bf16.state_dict().items()}
    mx.load_state_dict(bf16.state_dict(), strict=True)
    fresh = build_model(CONFIG, dataset, seed=2)
    fresh.load_state_dict(mx.state_dict(), strict=True)
    assert all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items())


def test_a_checkpoint_of_one_precision_resumes_in_the_other(dataset: Dataset, tmp_path: Path) -> None:
    first = _trainer(dataset)
    first.run(until=2)
    second = _trainer(dataset, "mxfp8_rceil")
    load_checkpoint(save_checkpoint(tmp_path / "c.pt", first), second)
    second.run(until=4)
    assert second.losses[:2] == first.losses
    assert len(second.losses) == 4


def test_files_that_cannot_be_used_change_nothing(dataset: Dataset, tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path / "good.pt", _trainer(dataset))
    assert list(tmp_path.iterdir()) == [good], "no temporary file is left"
    content = good.read_bytes()
    flipped = bytearray(content)
    at = len(flipped) // 2
    flipped[at] ^= 0x10
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    bad = {
        "truncated.pt": content[: len(content) // 2],
        "flipped.pt": bytes(flipped),
        "text.pt": b"not a checkpoint",
        "empty.pt": b"",
        "foreign.pt": (tmp_path / "foreign.pt").read_bytes(),
    }
    trainer = _trainer(dataset, seed=3)
    before = [value.clone() for value in _bits(trainer)]
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name, trainer)
    with pytest.raises(FileNotFoundError, match=r"missing\.pt"):
        load_checkpoint(tmp_path / "missing.pt", trainer)
    assert all(torch.equal(a, b) for a, b in zip(_bits(trainer), before, strict=True))
    assert (trainer.step, trainer.loader.position) == (0, 0)


def test_other_settings_are_named(dataset: Dataset, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", _trainer(dataset))
    with pytest.raises(CheckpointError, match=r"train\.batch_size = 32, this run has 16"):
        load_checkpoint(path, _trainer(dataset, config=replace(TRAIN, batch_size=16)))
    state = torch.load(path, weights_only=True)
    state["model"].pop("head.towers.click.prediction.bias")
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"only this run has 'head\.towers\.click\.prediction\.bias'"):
        load_checkpoint(path, _trainer(dataset))
