"""Runs files of tests in Triton's interpreter, which is on or off for a whole process."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
_FILES = (
    "test_fused", "test_fused_norms", "test_quantize_kernels", "test_gemm_kernels", "test_epilogue",
    "test_grouped_gemm_kernels",
)  # fmt: skip
GROUPS = {name: HERE.parent / f"{name}.py" for name in _FILES}
"""Files that hold every backend to one body, of which only the portable one runs interpreted, longest first; and all
that are made for the interpreter."""
GROUPS["interpreted"] = HERE


class Processes:
    """Groups of tests, each in a process of its own: a few at a time, and none left behind.

    Args:
        groups: keys of ``GROUPS``.
        at_once: how many processes run at a time.
    """

    def __init__(self, groups: list[str], at_once: int) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._pool = ThreadPoolExecutor(at_once)
        self._results: dict[str, Future[tuple[int, str]]] = {g: self._pool.submit(self._run, g) for g in groups}

    def result(self, group: str) -> tuple[int, str]:
        """The exit status of a group and what it printed; one that was not started runs now."""
        return self._results[group].result() if group in self._results else self._run(group)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()

    def _run(self, group: str) -> tuple[int, str]:
        path = GROUPS[group]
        plugins = ("-p", "numerics_tests.interpreted.quick", "-p", "no:cacheprovider", "-p", "no:xdist")
        command = [sys.executable, "-m", "pytest", "-q", *plugins, "-W", "ignore", str(path)]
        if path != HERE:
            command += ["-k", "triton"]
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env.pop("PYTEST_ADDOPTS", None)
        with subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE.parents[1]
        ) as process:
            self._running.add(process)
            try:
                printed, _ = process.communicate(timeout=900)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
            self._running.discard(process)
            return process.returncode, printed
