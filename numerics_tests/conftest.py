"""Shared set-up: one thread (xdist's workers share the cores), fixed seeds, and what a test may need or skip for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("marked gpu: torch sees no CUDA GPU here")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same state of torch's default generators and leaves the caller's untouched."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device the test can run on."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout; skips where the suite runs from an installed package."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs a checkout: this test reads files that are not installed")
    return ROOT
