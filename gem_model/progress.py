"""Progress of training runs on stderr: a live bar per run on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from gem_model.train import Progress

PLAIN_SECONDS = 10.0
"""A run prints a plain line at most this often, and one when it ends."""


class ProgressDisplay:
    """Call it with (name of the run, `Progress`); a context manager. `runs` is how many runs there will be."""

    def __init__(self, runs: int, steps: int) -> None:
        self._console = Console(file=sys.stderr)
        self._live: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}
        self._done: dict[str, int] = {}
        self._steps = runs * steps
        self._start = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description:<14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._live = RichProgress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._overall = self._live.add_task("all runs", total=self._steps, note="")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, name: str, progress: Progress) -> None:
        self._done[name] = progress.step
        note = f"NE {progress.ne:.4f}  {progress.samples_per_s:,.0f} samples/s"
        if self._live is not None:
            if name not in self._tasks:
                self._tasks[name] = self._live.add_task(name, total=progress.total, note="")
            self._live.update(self._tasks[name], completed=progress.step, note=note)
            self._live.update(self._overall, completed=sum(self._done.values()))
        else:
            self._plain(name, progress, note)

    def _plain(self, name: str, progress: Progress, note: str) -> None:
        now = time.monotonic()
        if progress.step < progress.total and now - self._printed.get(name, self._start) < PLAIN_SECONDS:
            return
        self._printed[name] = now
        share = sum(self._done.values()) / self._steps
        left = (now - self._start) * (1 / share - 1)
        line = f"{name}: step {progress.step}/{progress.total}, {note}; all runs {share:.0%}, about {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)
