"""Tiles that were timed: the file they are kept in, and that products are planned with them."""

import json
from pathlib import Path

import pytest
import torch

import mxfp8
from mxfp8 import tuning

pytest.importorskip("triton")
from mxfp8.kernels import _gemm_tiles, _tuned_tiles

SHAPE = (512, 384, 1024)
KEY = _tuned_tiles.product_key(*SHAPE, 1, False)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MXFP8_CACHE_DIR", str(tmp_path / "kept"))
    _tuned_tiles._read.cache_clear()
    return tmp_path / "kept" / "gemm_tiles.json"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of different names, which need not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")


def test_the_file_is_in_the_users_cache_unless_told(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert tuning.cache_path() == file
    monkeypatch.delenv("MXFP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tuning.cache_path() == Path("/somewhere/mxfp8/gemm_tiles.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.cache_path() == Path.home() / ".cache/mxfp8/gemm_tiles.json"


def test_what_was_stored_is_planned_with(gpu: None, file: Path) -> None:
    assert _gemm_tiles.measured(*SHAPE, 1, False, 0) is None
    _tuned_tiles.add({KEY: ("wide", 3)}, 0)
    _tuned_tiles.add({_tuned_tiles.product_key(8, 8, 8, 2, True): ("small_pairs", 1)}, 0)  # keeps what is there
    assert _gemm_tiles.measured(*SHAPE, 1, False, 0) == (_gemm_tiles.WIDE, 3)
    assert _gemm_tiles.measured(8, 8, 8, 2, True, 0) == (_gemm_tiles.SMALL_PAIRS, 1)
    assert _gemm_tiles.measured(*SHAPE, 1, False, 1) is None, "another GPU"
    assert _gemm_tiles.measured(512, 384, 1025, 1, False, 0) is None, "another product"
    assert _gemm_tiles.measured(*SHAPE, 2, False, 0) is None, "other blocks"
    assert [p.name for p in file.parent.iterdir()] == [file.name], "no temporary file is left"


def test_a_tile_that_cannot_form_the_product_is_not_taken(gpu: None) -> None:
    _tuned_tiles.add({KEY: ("small_pairs", 1)}, 0)
    assert _gemm_tiles.measured(*SHAPE, 1, False, 0) is None
    _tuned_tiles.add({KEY: ("of another release", 1)}, 0)
    assert _gemm_tiles.measured(*SHAPE, 1, False, 0) is None


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"GPU 0": 3}', '{"GPU 0": {"a": ["tall", 0]}}', '{"a": {"b": ["tall"]}}']
)
def test_a_broken_file_is_named_and_left_alone(text: str, file: Path, gpu: None) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"gemm_tiles.json is not used: .*mxfp8 tune"):
        assert _gemm_tiles.measured(*SHAPE, 1, False, 0) is None
    assert file.read_text() == text


def test_every_modelled_way_has_a_name() -> None:
    for sides, pairs in ((1, False), (1, True), (2, False), (2, True)):
        ways = list(_gemm_tiles.modelled(4096, 4096, 65536, sides, pairs, 132))
        assert {tile for _, tile, _ in ways} <= set(_gemm_tiles.TILES.values())
        assert min(ways)[1:] == _gemm_tiles.choose(4096, 4096, 65536, sides, pairs, 132)


def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="use 1 or more"):
        tuning.tune_linear(0, 64, 64)
    with pytest.raises(ValueError, match="none of its products has blocks of 128"):
        tuning.tune_linear(64, 64, 64, "mxfp8_rceil")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can")
def test_without_the_gpu_it_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"nothing to tune: .*GPU"):
        tuning.tune_linear(64, 128, 128)


@pytest.mark.gpu
@pytest.mark.skipif(tuning.why_not() is not None, reason="tiles are those of the Hopper kernels")
def test_the_fastest_is_kept_and_right(file: Path) -> None:
    rows, width = 4096, 1024
    times = tuning.tune_linear(rows, width, width)
    assert [t.gemm for t in times if t.kept] == ["fprop", "dgrad", "wgrad"]
    for gemm in ("fprop", "dgrad", "wgrad"):
        mine = [t for t in times if t.gemm == gemm]
        assert mine[0].kept
        assert mine[0].microseconds == min(t.microseconds for t in mine) > 0
        assert len({(t.tile, t.split) for t in mine}) == len(mine) > 1
    best = next(t for t in times if t.kept)
    found = _gemm_tiles.measured(rows, width, width, 1, False, torch.cuda.current_device())
    assert found == (_gemm_tiles.TILES[best.tile], best.split)
    assert len(json.loads(file.read_text())) == 1
    a = mxfp8.quantize(torch.randn(rows, width, device="cuda"), block=(1, 128))
    b = mxfp8.quantize(torch.randn(width, width, device="cuda"), block=(128, 128))
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT
    error = (mxfp8.gemm(a, b, out_dtype=torch.float32).double() - exact).norm() / exact.norm()
    assert error < 1e-3
