"""Plant each fault in a copy of the tree and run the test that must catch it.

    python -m numerics_tests.mutation [--only NAME ...] [--jobs N] [--write docs/mutations.md]

First the tests run once without a fault and must pass; then once per fault, each in its own process, and must fail by
an assertion or an error of the library, not because nothing could be imported. The last line of stdout is JSON; the
exit code is 0 only if every fault was caught.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from numerics_tests.mutation.cast_faults import CAST_FAULTS
from numerics_tests.mutation.faults import Fault
from numerics_tests.mutation.group_faults import GROUP_FAULTS
from numerics_tests.mutation.layer_faults import LAYER_FAULTS
from numerics_tests.mutation.model_faults import MODEL_FAULTS
from numerics_tests.mutation.product_faults import PRODUCT_FAULTS

__all__ = ["FAULTS", "Outcome", "main", "table"]

FAULTS: tuple[Fault, ...] = (*CAST_FAULTS, *PRODUCT_FAULTS, *GROUP_FAULTS, *LAYER_FAULTS, *MODEL_FAULTS)
ROOT = Path(__file__).resolve().parents[2]
COPIED = ("mxfp8", "kernels", "gem_model", "numerics_tests", "pyproject.toml")
TIMEOUT = 240  # seconds for one fault; a test that hangs proves nothing and counts as an error

# An installed mxfp8 must not be tested in place of the copy.
_CHILD = """
import pathlib, sys
import gem_model, mxfp8, numerics_tests, pytest
root = pathlib.Path.cwd().resolve()
for module in (mxfp8, gem_model, numerics_tests):
    assert pathlib.Path(module.__file__).resolve().is_relative_to(root), f"{module.__file__} is not in {root}"
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one fault: ``"caught"``, ``"survived"`` (its test passed) or ``"error"`` (nothing was tested)."""

    fault: Fault
    status: str
    detail: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m numerics_tests.mutation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant these faults only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of faults there, in Markdown")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only or ()) - {fault.name for fault in FAULTS})
    if unknown or options.jobs < 1 or (options.only and options.write):
        parser.error(
            f"unknown fault {unknown[0]!r}" if unknown else "use --jobs of at least 1, and --write without --only"
        )
    if not (ROOT / "pyproject.toml").exists():
        parser.error(f"needs a checkout: {ROOT} holds no pyproject.toml")
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    started = time.perf_counter()
    outcomes = run(faults, options.jobs)
    bad = [o for o in outcomes if o.status != "caught"]
    for outcome in bad:
        print(f"{outcome.status}: {outcome.fault.name} ({outcome.fault.test}) {outcome.detail}")
    if options.write and not bad:
        options.write.write_text(table(outcomes))
    summary = {
        "planted": len(outcomes),
        "caught": len(outcomes) - len(bad),
        "survived": [o.fault.name for o in bad if o.status == "survived"],
        "errors": [o.fault.name for o in bad if o.status == "error"],
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary))
    return int(bool(bad))


def run(faults: Sequence[Fault], jobs: int) -> list[Outcome]:
    """Outcomes in the order of ``faults``. RuntimeError if a test fails without any fault."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, Progress(*columns, console=console) as progress:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(jobs):
            trees.put(_copy(Path(folder) / str(i)))
        bar = progress.add_task("no fault", total=len(faults))
        _check_without_fault(faults, trees, jobs)
        found: dict[str, Outcome] = {}
        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(_plant, fault, trees) for fault in faults]):
                outcome = done.result()
                found[outcome.fault.name] = outcome
                progress.update(bar, advance=1, description=outcome.fault.name)
                if outcome.status != "caught" or not console.is_terminal:
                    line = f"{len(found)}/{len(faults)} {outcome.status}: {outcome.fault.name}"
                    progress.console.print(f"{line} ({outcome.seconds:.1f} s)", highlight=False)
    return [found[fault.name] for fault in faults]


def _copy(target: Path) -> Path:
    target.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def _check_without_fault(faults: Sequence[Fault], trees: queue.SimpleQueue[Path], jobs: int) -> None:
    tests = sorted({fault.test for fault in faults})

    def share(i: int) -> tuple[int, str]:
        tree = trees.get()
        try:
            return _pytest(tree, tests[i::jobs], timeout=20 * TIMEOUT)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(jobs) as pool:
        for code, output in pool.map(share, range(min(jobs, len(tests)))):
            if code != 0:
                raise RuntimeError(f"tests fail without any fault (exit code {code}):\n{output[-3000:]}")


def _plant(fault: Fault, trees: queue.SimpleQueue[Path]) -> Outcome:
    tree, start = trees.get(), time.perf_counter()
    path = tree / fault.file
    whole = path.read_text()
    try:
        path.write_text(fault.planted(tree))
        code, output = _pytest(tree, [fault.test], timeout=TIMEOUT)
    finally:
        path.write_text(whole)
        trees.put(tree)
    status, detail = _judge(code, output)
    return Outcome(fault=fault, status=status, detail=detail, seconds=time.perf_counter() - start)


def _pytest(tree: Path, tests: Iterable[str], timeout: float) -> tuple[int, str]:
    """Exit code (-1: timed out) and output of pytest on ``tests`` inside ``tree``."""
    # No bytecode: two versions of a file may have one size and one second.
    settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    flags = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", _CHILD, *flags, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | settings, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"timed out after {timeout} s"
    return done.returncode, done.stdout + done.stderr


def _judge(code: int, output: str) -> tuple[str, str]:
    if code == 0:
        ran = " passed" in output
        return ("survived" if ran else "error"), ("" if ran else "every test was skipped")
    failures = [line for line in output.splitlines() if line.startswith("FAILED ")]
    if code != 1 or not failures:
        return "error", output[-1500:]
    message = failures[0].partition(" - ")[2]
    if message.startswith(("NameError", "ImportError", "SyntaxError", "ModuleNotFoundError")):
        return "error", failures[0]
    return "caught", failures[0]


def table(outcomes: Sequence[Outcome]) -> str:
    """The document: one row per fault."""
    lines = [
        "# Faults and the tests that catch them",
        "",
        "Written by `python -m numerics_tests.mutation --write docs/mutations.md`. Each fault is planted alone in a",
        "copy of the tree, and the named test must then fail; without a fault it passes. The changes themselves are in",
        f"`numerics_tests/mutation/`. Planted: {len(outcomes)}, caught: {sum(o.status == 'caught' for o in outcomes)}.",
        "",
        "| fault | file | what it would do | caught by |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        fault = outcome.fault
        lines.append(f"| `{fault.name}` | `{fault.file}` | {fault.why} | `{fault.test}` |")
    return "\n".join(lines) + "\n"
