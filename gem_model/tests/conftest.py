"""Shared set-up of the GEM tests: one thread, and where real data lies (none of it is in the repository)."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gem_model.data import Dataset, load


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """A folder with ml-latest-small/ and samples/; skips where there is none."""
    named = os.environ.get("MXFP8_TEST_DATA")
    if named and not Path(named).is_dir():
        raise ValueError(f"MXFP8_TEST_DATA is {named!r}, which is not a folder")
    folder = Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no test data: set MXFP8_TEST_DATA to a folder that holds ml-latest-small/ and samples/")
    return folder


@pytest.fixture(scope="session")
def ml_100k() -> Dataset:
    """MovieLens-100K with default options; skips where the wheel that ships it is not installed."""
    if find_spec("recbole") is None:
        pytest.skip("MovieLens-100K needs `pip install --no-deps recbole==1.2.1`")
    return load("ml-100k")
