"""The portable kernels on a CPU, in Triton's interpreter: on before kernels are imported, so in other processes."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EVERY_BACKEND = ("test_quantize_kernels.py", "test_gemm_kernels.py", "test_fused.py")
INTERPRETED = [*(HERE / name for name in EVERY_BACKEND), *sorted((HERE / "interpreted").glob("test_*.py"))]
"""Files that hold every backend to one body, of which only the portable one runs here, and those made for it."""

Done = subprocess.CompletedProcess[str]


def interpret(path: Path) -> Done:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    if path.parent == HERE:
        command += ["-k", "triton"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run([*command, str(path)], env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[Done]]]:
    """The chosen files, one process for each core; nothing under xdist, whose workers have the cores already."""
    chosen = [item.callspec.params["path"] for item in request.session.items if item.path == request.path]
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield {}
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {path: pool.submit(interpret, path) for path in chosen}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda p: p.stem)
def test_interpreted(path: Path, started: dict[Path, Future[Done]]) -> None:
    done = started[path].result() if path in started else interpret(path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
