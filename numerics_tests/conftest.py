"""Shared set-up: one thread (xdist's workers share the cores), fixed seeds, and what a test may need or skip for."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mxfp8 import dispatch
from numerics_tests.interpreted.processes import Processes
from numerics_tests.operands import Backend, available

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def is_interpreted(item: pytest.Item) -> bool:
    return item.path.name == "test_interpreter.py"


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for other processes come last. A test of a backend is one of the GPU where there is one: without
    the mark ``-m gpu`` would leave it out."""
    items.sort(key=is_interpreted)
    if torch.cuda.is_available():
        for item in filter(takes_a_backend, items):
            item.add_marker(pytest.mark.gpu)


def takes_a_backend(item: pytest.Item) -> bool:
    """Whether one of a test's parameters is the name of a backend, which runs on the GPU if there is one."""
    call = getattr(item, "callspec", None)
    return call is not None and any(isinstance(v, str) and v in dispatch.BACKENDS for v in call.params.values())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("marked gpu: torch sees no CUDA GPU here")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same state of torch's default generators and leaves the caller's untouched."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_tuned_tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Products are planned as on a machine on which nothing was tuned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Tests in Triton's interpreter, which start with the session on the cores that it leaves idle; xdist's workers
    leave none, so there each starts when its result is asked for."""
    items = request.session.items
    groups = [item.callspec.params["group"] for item in items if is_interpreted(item)]
    if "PYTEST_XDIST_WORKER" in os.environ or importlib.util.find_spec("triton") is None:
        groups = []
    processes = Processes(groups, max(1, (os.cpu_count() or 1) - (len(items) > len(groups))))
    yield processes
    processes.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device the test can run on."""
    return torch.device(request.param)


@pytest.fixture(params=["reference", "triton", "hopper"])
def kernels(request: pytest.FixtureRequest) -> Backend:
    """A backend of fused ops and the device where it runs."""
    return available(request, "norm_quantize")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """``torch.compile`` as in a new process, for this test and for what comes after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout; skips where the suite runs from an installed package."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs a checkout: this test reads files that are not installed")
    return ROOT
