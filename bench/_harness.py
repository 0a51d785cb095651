"""What every benchmark shares: interleaved timing, rows in one fixed set of columns, table + CSV + one JSON line.

Method. All variants of a case are timed in the same process and in turn (A B C, B C A, ...), so a drift of the clock
speed hits them alike. Before each timed call a buffer larger than the last-level cache is overwritten, so no variant
finds its inputs warm. On CUDA the time is the distance of two events; the flush is still running when the call is
launched, which hides the host's launch cost. Reported are the median and the 20th and 80th percentile. Correctness is
checked by each benchmark before it calls ``time_variants``.
"""

import csv
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_ROOT = Path(__file__).parent.parent
_SLEEP_CYCLES = 600_000  # 0.3 ms
_FLUSH_BYTES = 256 * 2**20  # larger than the last-level cache of the CPUs and GPUs in use (H200: 50 MB of L2)
_WARMUP_ROUNDS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 7, 200


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing to time. ``before`` runs untimed ahead of every call (it may clear gradients or touch the weights)."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds per call: median, 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a results file; the field names are its columns. ``ratio`` above 1 means that ours is faster.

    ``baseline_value`` and ``ratio`` are None, an empty cell, where the baseline is not installed.
    """

    bench: str
    case: str
    shape: str
    metric: str
    value: float
    unit: str
    p20: float
    p80: float
    baseline: str
    baseline_value: float | None
    ratio: float | None
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        """What a new measurement of the same thing replaces."""
        return (self.bench, self.case, self.shape, self.metric, self.baseline)


COLUMNS = tuple(f.name for f in fields(Row))
_NUMBERS = ("value", "p20", "p80", "baseline_value", "ratio")


def resolve_device(device: str) -> torch.device:
    """``"cpu"`` or ``"cuda"`` as a device that is there.

    Raises:
        ValueError: for any other word, or for ``"cuda"`` on a machine without a CUDA GPU.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
    return torch.device(device)


def time_variants(variants: Sequence[Variant], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Times all variants in turn for about ``seconds`` in all, never fewer than 7 rounds, after two of warm-up."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_WARMUP_ROUNDS):
        started = time.perf_counter()
        for variant in variants:
            _time_once(variant, device, flush)
        round_seconds = time.perf_counter() - started
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(seconds / round_seconds)))

    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    for i in range(rounds):
        start = i % len(variants)
        for variant in [*variants[start:], *variants[:start]]:
            samples[variant.name].append(_time_once(variant, device, flush))
    return {name: summary(values) for name, values in samples.items()}


def _time_once(variant: Variant, device: torch.device, flush: torch.Tensor) -> float:
    """One call in microseconds."""
    if variant.before is not None:
        variant.before()
    if device.type == "cpu":
        flush.zero_()
        started = time.perf_counter()
        variant.call()
        return (time.perf_counter() - started) * 1e6
    flush.sum(dtype=torch.int32)  # read, not written: dirty lines would be written back during the call
    torch.cuda._sleep(_SLEEP_CYCLES)  # the host gets ahead, so that its launches are not timed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    variant.call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def summary(values_us: list[float]) -> Timing:
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.quantile(torch.tensor(values_us, dtype=torch.float64), at).tolist()
    return Timing(median_us=median, p20_us=p20, p80_us=p80)


def time_row(
    *, bench: str, case: str, shape: str, ours: Timing, baseline: str, theirs: Timing | None, device: torch.device
) -> Row:
    """The row of one timed case against one baseline; ``theirs`` is None where the baseline is not installed.

    It is shown on stderr at once: a run of many cases takes minutes, and may be cut short.
    """
    row = Row(
        bench=bench,
        case=case,
        shape=shape,
        metric="time",
        value=round(ours.median_us, 1),
        unit="us",
        p20=round(ours.p20_us, 1),
        p80=round(ours.p80_us, 1),
        baseline=baseline,
        baseline_value=None if theirs is None else round(theirs.median_us, 1),
        ratio=None if theirs is None else round(theirs.median_us / ours.median_us, 3),
        gpu=device_name(device),
        torch=torch.__version__,
        triton=package_version("triton") or "none",
        commit=_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    beside = "" if row.ratio is None else f", {row.ratio:.3f} of {baseline}"
    print(f"{bench} {case} {shape}: {row.value} us{beside}", file=sys.stderr, flush=True)
    return row


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model}, torch threads: {torch.get_num_threads()}"


def jagged(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """Ends of groups of random sizes, the largest about six times the smallest."""
    ends = (torch.rand(groups, device=device) + 0.2).cumsum(0)
    offs = (ends / ends[-1] * rows).to(torch.int32)
    offs[-1] = rows
    return offs


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


HAS_TORCHAO = package_version("torchao") is not None


def torchao_label(what: str) -> str:
    """The baseline's name with its version, or how to install it."""
    if not HAS_TORCHAO:
        return "torchao not installed: pip install torchao==0.18.0"
    return f"torchao {package_version('torchao')} {what}"


@functools.cache  # one answer for a whole run, also when somebody commits meanwhile
def _commit() -> str:
    """Short hash of HEAD, with ``-dirty`` if tracked files differ from it.

    In a copy of the tree without its git history: the environment variable BENCH_COMMIT, or ``unknown``.
    """

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_COMMIT", "unknown")


def results_folder(device: torch.device) -> Path:
    """``bench/results/cpu`` or ``bench/results/<gpu name in lower case>``, for instance ``h200``."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_rows(path: Path) -> list[Row]:
    """The rows of one results file.

    Raises:
        ValueError: if its columns are not ``COLUMNS`` or a number cannot be read; names the file and the line.
    """
    with path.open(newline="") as f:
        reader = csv.DictReader(f)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns must be {','.join(COLUMNS)}, got {','.join(reader.fieldnames or ())}")
        return [_parse(record, f"{path}:{reader.line_num}") for record in reader]


def _parse(record: dict[str, str], where: str) -> Row:
    try:
        numbers = {name: float(record[name]) if record[name] else None for name in _NUMBERS}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}; the columns {', '.join(_NUMBERS)} hold numbers") from error
    return Row(**{**record, **numbers})  # type: ignore[arg-type]  # the header was checked against the fields


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes ``rows``; earlier rows of the same case stay only where none of the new ones has their key."""
    fresh = {row.key for row in rows}
    kept = [row for row in read_rows(path) if row.key not in fresh] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in [*kept, *rows])
    temporary.replace(path)


def report(rows: Sequence[Row], device: torch.device, save: bool) -> None:
    """Prints the table, saves the CSV if asked to, and prints one JSON object as the last line of stdout."""
    bench = rows[0].bench
    table = Table(title=f"{bench} on {rows[0].gpu}, torch {rows[0].torch}, {rows[0].commit}")
    for column in ("case", "shape", "median us", "p20", "p80", "baseline", "baseline us", "ratio"):
        table.add_column(column, justify="left" if column in ("case", "shape", "baseline") else "right")
    for row in rows:
        theirs = "" if row.baseline_value is None else f"{row.baseline_value:,.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        numbers = (f"{row.value:,.0f}", f"{row.p20:,.0f}", f"{row.p80:,.0f}")
        table.add_row(row.case, row.shape, *numbers, row.baseline, theirs, ratio)
    console = Console(width=max(120, Console().width))
    console.print(table)
    if save:
        path = results_folder(device) / f"{bench}.csv"
        save_rows(path, rows)
        console.print(f"saved {path.relative_to(_ROOT)}", highlight=False)
    print(json.dumps({"bench": bench, "rows": [asdict(row) for row in rows]}))
