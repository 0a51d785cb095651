"""The portable kernels on a CPU, in Triton's interpreter: it must be on before kernels are imported, hence a process."""

import importlib.util
import os
import subprocess
import sys

import pytest

FILES = ["test_quantize_kernels.py"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    path = os.path.join(os.path.dirname(__file__), file)
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, path, "-k", "triton"], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
