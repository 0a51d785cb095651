"""What planted faults showed to be untested: each test here was written for a fault that nothing else caught."""

from pathlib import Path

import pytest
import torch

import mxfp8
from gem_model.checkpoint import load_checkpoint, save_checkpoint
from gem_model.config import get_config
from gem_model.data import load
from gem_model.jobs import build_model
from gem_model.train import TrainConfig, Trainer
from mxfp8 import observe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_negative_nan_has_the_one_nan_code_too(fmt: str, dtype: torch.dtype, device: torch.device) -> None:
    """A NaN that comes in with its sign bit set leaves no trace of it, neither in its own element nor beside it."""
    x = torch.randn(2, 64, device=device).to(dtype)
    x.view(torch.int32 if dtype == torch.float32 else torch.int16)[0, 3] = -1  # all bits set
    x[1, 40] = torch.nan
    assert x[0, 3].isnan()
    codes = mxfp8.quantize(x, fmt=fmt).qdata.view(torch.uint8)
    assert (codes[0, :32] == 0x7F).all()
    assert (codes[1, 32:] == 0x7F).all()


def test_a_checkpoint_brings_torchs_generator_back(tmp_path: Path) -> None:
    """Nothing in training draws from it today; a layer with dropout would, and must not notice the interruption."""
    config = get_config("tiny", dim=32, heads=1, layers=1, fm_hidden=(32,), head_hidden=(32,), max_history=6)
    dataset = load("synthetic", num_samples=64, num_users=10, num_ads=10, max_history=6)
    trainer = Trainer(build_model(config, dataset, 0), dataset.train, TrainConfig(batch_size=32))
    torch.manual_seed(1234)
    torch.rand(7)
    save_checkpoint(tmp_path / "c.pt", trainer)
    wanted = torch.rand(5)
    torch.manual_seed(0)
    load_checkpoint(tmp_path / "c.pt", trainer)
    assert torch.equal(torch.rand(5), wanted)


def test_watching_ends_with_its_block_and_only_for_its_observer() -> None:
    layer, x = mxfp8.MXFP8Linear(32, 32), torch.randn(4, 32)
    outer: list[observe.Event] = []
    inner: list[observe.Event] = []
    with observe.subscribe(outer.append):
        with observe.subscribe(inner.append):
            layer(x)
        layer(x)
    layer(x)
    each = 4  # casts of the input for fprop and for wgrad, of the weight for fprop, and one GEMM
    assert (len(inner), len(outer)) == (each, 2 * each)
    assert not observe.active()
