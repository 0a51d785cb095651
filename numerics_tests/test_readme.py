"""The documents tell the truth: Python blocks run, commands and options exist, links and paths lead somewhere."""

import csv
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
TREE_FOLDERS = ("mxfp8", "kernels", "gem_model", "bench", "examples")

# Commands short enough to be run as they stand; of all others the options are looked up in their --help.
RUN_AS_IS = ("python -m mxfp8.dispatch", "python -m bench.check")


def blocks(language: str) -> list[tuple[str, str]]:
    """``(document:number, text)`` of every fenced block in a language; none where the documents are not installed."""
    found = []
    for name in DOCUMENTS:
        path = ROOT / name
        texts = _BLOCK.findall(path.read_text()) if path.exists() else []
        found += [(f"{name}:{i}", text) for i, (tag, text) in enumerate(texts, start=1) if tag == language]
    return found


def commands() -> list[str]:
    """Each distinct command line of the bash blocks, comments removed."""
    lines = [line.split(" #")[0].strip() for _, text in blocks("bash") for line in text.splitlines()]
    return sorted({line for line in lines if line and not line.startswith("#")})


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    # Wide and plain, so that typer's help neither wraps nor colours the options' names.
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb", "MPLBACKEND": "Agg"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in blocks("python")])
def test_python_block_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block alone, with nothing defined before it and in an empty folder, as a reader would paste it."""
    if "ml-100k" in text and importlib.util.find_spec("recbole") is None:
        pytest.skip("MovieLens-100K needs `pip install --no-deps recbole==1.2.1`")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "<document>", "exec"), {"__name__": "__main__"})


def as_argv(command: str) -> list[str]:
    """A command line with the interpreter of this run: console scripts become ``-m``."""
    words = shlex.split(command)
    if words[0] in ("mxfp8", "gem"):
        package = {"mxfp8": "mxfp8", "gem": "gem_model"}[words[0]]
        return [sys.executable, "-m", f"{package}.cli", *words[1:]]
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize("command", commands())
def test_command_exists(command: str, repo_root: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (repo_root / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif words[0] in ("git", "cd", "pip", "pytest"):
        assert command in _INSTALLERS or command.startswith("pytest numerics_tests"), (
            f"not checked by any rule: {command}"
        )
    elif command in RUN_AS_IS:
        done = run(as_argv(command), repo_root)
        short = command == "python -m bench.check"  # its status says whether goals are met, which is not asked here
        assert done.returncode in ((0, 1) if short else (0,)), done.stderr
    else:
        _check_options(command)


_INSTALLERS = (
    "pip install -e .",
    "pip install -e '.[triton]'",
    "pip install --no-deps recbole==1.2.1",
    "pip install torchao==0.18.0",
)


@functools.cache
def help_of(*argv: str) -> subprocess.CompletedProcess[str]:
    return run([*argv, "--help"], ROOT)


def _check_options(command: str) -> None:
    words = shlex.split(command)
    assert words[0] in ("mxfp8", "gem", "python"), f"not checked by any rule: {command}"
    argv = as_argv(command)
    first_option = next((i for i, word in enumerate(argv) if i > 2 and word.startswith("-")), len(argv))
    done = help_of(*argv[: min(first_option, 4)])  # the module and its subcommand
    assert done.returncode == 0, done.stderr
    for option in (word.split("=")[0] for word in argv[first_option:] if word.startswith("--")):
        assert re.search(rf"(?<!\S){re.escape(option)}(?!\S)", done.stdout), f"{command}: no {option} in\n{done.stdout}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str, repo_root: Path) -> None:
    document = repo_root / name
    dead = [link for link in _LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not dead


def listed_in_tree(text: str) -> set[str]:
    """Paths of a file tree written with two spaces a level; a folder ends in a slash."""
    found, folders = set(), [""]
    for line in text.splitlines():
        name = line.strip().split()[0] if line.strip() else ""
        if not name:
            continue
        level = (len(line) - len(line.lstrip())) // 2
        del folders[level + 1 :]
        if name.endswith("/"):
            folders.append(folders[level] + name)
        else:
            found.add(folders[level] + name)
    return found


def test_file_tree_is_complete(repo_root: Path) -> None:
    """Every module has its line in the README, and every line its file."""
    trees = [text for name, text in blocks("text") if name.startswith("README.md") and text.startswith("mxfp8/")]
    assert len(trees) == 1
    listed = listed_in_tree(trees[0])
    missing = {path for path in listed if not (repo_root / path).exists()}
    assert not missing, "listed but not there"
    actual = {p.relative_to(repo_root) for folder in TREE_FOLDERS for p in (repo_root / folder).rglob("*.py")}
    modules = {p.as_posix() for p in actual if p.name != "__init__.py" and "tests" not in p.parts}
    unlisted = modules - listed
    assert not unlisted, "not in the README's file tree"


def test_measured_ratios_are_saved_rows(repo_root: Path) -> None:
    """Each ratio in the README is that of the saved row it names, to two digits after the point."""
    line = re.compile(r"^\| `([\w/-]+\.csv)` \| ([^|]+) \| (?:(\w+) \| )?([^|]+) \| ([\d.]+) \|$", re.M)
    quoted = line.findall((repo_root / "README.md").read_text())
    assert len(quoted) > 3
    for file, case, shape, baseline, ratio in quoted:
        with (repo_root / "bench" / "results" / file).open(newline="") as f:
            rows = [row for row in csv.DictReader(f) if (row["case"], row["baseline"]) == (case, baseline)]
        found = [row["ratio"] for row in rows if row["shape"] == shape or not shape]
        assert [f"{float(value):.2f}" for value in found] == [ratio], f"{file}: {case} {shape} beside {baseline}"


def test_tree_parser() -> None:
    text = "a/            folder\n  b.py        one\n  c/\n    d.py      two\ne.md          three\n"
    assert listed_in_tree(text) == {"a/b.py", "a/c/d.py", "e.md"}
