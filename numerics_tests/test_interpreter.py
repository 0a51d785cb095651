"""The portable kernels on a CPU, in Triton's interpreter: on before kernels are imported, so in another process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EVERY_BACKEND = ("test_quantize_kernels.py", "test_gemm_kernels.py", "test_fused.py")
INTERPRETED = [*sorted((HERE / "interpreted").glob("test_*.py")), *(HERE / name for name in EVERY_BACKEND)]
"""Files made for it, and those that hold every backend to one body, of which only the portable one runs here."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda p: p.stem)
def test_interpreted(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    if path.parent == HERE:
        command += ["-k", "triton"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run([*command, str(path)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
