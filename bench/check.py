"""``python -m bench.check``: which committed rows of bench/results/ fall short of the goals in bench/targets.toml.

Exit status 1 if any row falls short. A goal without a row is listed as not measured and does not fail.
"""

import tomllib
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

import typer
from rich.console import Console

from bench._harness import RESULTS, Row, read_rows

TARGETS = Path(__file__).parent / "targets.toml"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One goal: every row of ``folder`` that matches the globs must have at least ``min_ratio``."""

    why: str
    folder: str
    bench: str
    case: str
    baseline: str
    min_ratio: float
    shape: str = "*"

    def covers(self, folder: str, row: Row) -> bool:
        """Whether this goal speaks about a row, found in a folder of bench/results/."""
        pairs = [(folder, self.folder), (row.bench, self.bench), (row.case, self.case), (row.baseline, self.baseline)]
        pairs.append((row.shape, self.shape))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)


def read_targets(path: Path) -> list[Target]:
    """The goals of a TOML file.

    Raises:
        ValueError: if an entry's keys are not Target's fields; names the file and the entry.
    """
    names = {f.name for f in fields(Target)}
    needed = {f.name for f in fields(Target) if f.default is MISSING}
    entries = tomllib.loads(path.read_text())["target"]
    for i, entry in enumerate(entries, start=1):
        if not needed <= set(entry) <= names:
            raise ValueError(f"{path}, target {i}: keys must be {sorted(names)}, got {sorted(entry)}")
    return [Target(**entry) for entry in entries]


def shortfalls(targets: list[Target], rows: list[tuple[str, Row]]) -> tuple[list[str], list[str], int]:
    """Messages for the rows under a goal, messages for the goals without a row, and the number of rows that hold."""
    short, unmeasured, met = [], [], 0
    for target in targets:
        covered = [(folder, row) for folder, row in rows if row.ratio is not None and target.covers(folder, row)]
        if not covered:
            unmeasured.append(f"not measured: {target.folder}/{target.bench} {target.case} against {target.baseline}")
        for folder, row in covered:
            if row.ratio is not None and row.ratio >= target.min_ratio:
                met += 1
            else:
                where = f"{folder}/{row.bench} {row.case} {row.shape} against {row.baseline}"
                short.append(f"short: {where}: ratio {row.ratio}, goal {target.min_ratio} ({target.why})")
    return short, unmeasured, met


def main() -> None:
    """Hold the committed rows against the goals."""
    rows = [(path.parent.name, row) for path in sorted(RESULTS.glob("*/*.csv")) for row in read_rows(path)]
    short, unmeasured, met = shortfalls(read_targets(TARGETS), rows)
    console = Console(soft_wrap=True, highlight=False)
    for line in [*short, *unmeasured]:
        console.print(line, markup=False)
    console.print(f"{met} met, {len(short)} short, {len(unmeasured)} goals not measured")
    raise typer.Exit(code=1 if short else 0)


if __name__ == "__main__":
    typer.run(main)
