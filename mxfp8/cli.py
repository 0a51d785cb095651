"""The ``mxfp8`` command: what runs here, whether it is exact, what a policy would do to a model, and an audit of it.

A model is named by a *factory*, ``module:function``: a function without arguments, importable from the current folder,
that returns ``(model, batches, loss_fn)`` as :func:`mxfp8.audit` takes them. Wrong input gives one line on stderr and
exit code 2; ``--debug`` shows where it arose instead.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from mxfp8 import __version__, dispatch, modes, policies, report, tuning
from mxfp8.audit import audit
from mxfp8.description import describe
from mxfp8.policy import AnyPolicy
from mxfp8.recipe import GEMMS, RECIPES
from mxfp8.rules import BF16, PrecisionPolicy

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="MXFP8 training for PyTorch: inspect and audit.")

Factory = Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="returns (model, batches, loss_fn)")]
Policy = Annotated[str | None, typer.Option(help="'recsys', a recipe's name, 'bf16', or a .json or .yaml file")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback instead of one line")]


@contextlib.contextmanager
def _one_line_errors(debug: bool) -> Iterator[None]:
    """Turn the errors that tell a user what to change into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if debug:
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


def _load_factory(name: str) -> tuple[Any, ...]:
    """Call ``module:function``. ValueError if it does not name a function that returns three things."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r} does not name a factory: write module:function")
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(module_name)
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise ValueError(f"module {module_name!r} ({module.__file__}) has no function {function_name!r}")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ValueError(f"{name} returned {got}: a factory returns (model, batches, loss_fn)")
    return made


def _load_policy(name: str | None) -> AnyPolicy:
    """A built-in policy, a recipe, or a policy file. ValueError lists what there is."""
    if name is None or name == BF16 or name in RECIPES:
        return name
    if name == "recsys":
        return policies.recsys()
    path = Path(name)
    readers = {
        ".json": PrecisionPolicy.from_json,
        ".yaml": PrecisionPolicy.from_yaml,
        ".yml": PrecisionPolicy.from_yaml,
    }
    if path.suffix not in readers:
        raise ValueError(f"unknown policy {name!r}: use recsys, {BF16}, {', '.join(RECIPES)}, or a .json or .yaml file")
    try:
        return readers[path.suffix](path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@app.command()
def info(
    backend: Annotated[
        str | None, typer.Option(help="show how this backend of gemm would multiply; default: the one taken here")
    ] = None,
    debug: Debug = False,
) -> None:
    """Versions, the device, which backend can run which op here, and how each recipe's products are formed.

    The last line is JSON.
    """
    with _one_line_errors(debug):
        console, versions = Console(), _versions()
        backend = backend or modes.gemm_backend()
        found = modes.recipe_modes(backend)
        for name, value in versions.items():
            console.print(f"{name:8}{value}", highlight=False)
        cells = dispatch.explain()
        rows = [[cell.op, cell.backend, "yes" if cell.available else "no", cell.reason] for cell in cells]
        console.print(report.table(f"Backends on {cells[0].device}", ["op", "backend", "runs", "why not"], rows))
        _print_modes(console, found, backend)
    last = {
        "versions": versions,
        "device": cells[0].device,
        "runs": [f"{cell.op}/{cell.backend}" for cell in cells if cell.available],
        "gemm_backend": backend,
        "recipes": {row.recipe: {gemm: getattr(row, gemm).value for gemm in GEMMS} for row in found},
    }
    typer.echo(json.dumps(report.to_jsonable(last)))


def _versions() -> dict[str, str]:
    versions = {"mxfp8": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if importlib.util.find_spec("triton") is not None:
        versions["triton"] = importlib.import_module("triton").__version__
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        versions["gpu"] = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    return versions


def _print_modes(console: Console, rows: list[modes.RecipeModes], backend: str) -> None:
    """How each recipe multiplies with ``backend``, what the words mean, and what was measured."""
    sizes = [f"{size}x{size}" for size in modes.LAYER_SIZES]
    ratios = [[f"{ratio:.2f}" for ratio in r.layer_ratios] if r.layer_ratios else [None] * len(sizes) for r in rows]
    cells = [[r.recipe, *(getattr(r, g).value for g in GEMMS), *told] for r, told in zip(rows, ratios, strict=True)]
    measured = any(row.layer_ratios for row in rows)
    caption = (
        f"Right: speed of a layer, forward and backward, relative to BF16 ({modes.LAYER_SOURCE})" if measured else ""
    )
    columns = ["recipe", *GEMMS, *(sizes if measured else [])]
    cells = [row[: len(columns)] for row in cells]
    console.print(report.table(f"Products of each recipe, {backend} backend", columns, cells, caption=caption or None))
    for mode in dict.fromkeys(getattr(row, gemm) for row in rows for gemm in GEMMS):
        cost = modes.MEASURED.get((backend, mode))
        speed = f"; {cost} x BF16's speed ({cost.source})" if cost else ""
        console.print(f"{mode.value:14}{mode.meaning}{speed}", highlight=False, soft_wrap=True)


@app.command("describe")
def describe_command(factory: Factory, policy: Policy = "recsys", debug: Debug = False) -> None:
    """What a policy would do to each layer of a model, and why. Nothing is run."""
    with _one_line_errors(debug):
        model, _, _ = _load_factory(factory)
        Console().print(describe(model, _load_policy(policy)))


@app.command("audit")
def audit_command(
    factory: Factory,
    policy: Policy = None,
    batches: Annotated[int, typer.Option(min=1, help="batches to run at most")] = 4,
    worst: Annotated[int | None, typer.Option(min=1, help="print only the rows of lowest SQNR")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the report as JSON")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="write the report as one HTML file")] = None,
    debug: Debug = False,
) -> None:
    """Run a few batches forward and backward and show what MXFP8 does to every GEMM. The last line is JSON."""
    with _one_line_errors(debug):
        model, data, loss_fn = _load_factory(factory)
        result = audit(model, itertools.islice(data, batches), loss_fn, _load_policy(policy))
        rows = result.worst(worst) if worst is not None else result.rows
        Console().print(replace(result, rows=tuple(rows)))
        if json_path is not None:
            result.write_json(json_path)
        if html_path is not None:
            result.write_html(html_path)
    lowest = result.worst(1)[0]
    last = {"gemms": len(result.rows), "worst": f"{lowest.layer}.{lowest.gemm}", "worst_sqnr_db": lowest.sqnr_db}
    typer.echo(json.dumps(report.to_jsonable(last)))


@app.command()
def tune(
    rows: Annotated[int, typer.Argument(min=1, help="of the layer's input")],
    in_features: Annotated[int, typer.Argument(min=1)],
    out_features: Annotated[int, typer.Argument(min=1)],
    recipe: Annotated[str, typer.Option(help="whose blocks the products have")] = "mxfp8_coalesced",
    debug: Debug = False,
) -> None:
    """Time the products of a linear layer on this GPU in every sensible way, and store the fastest for later processes.

    The last line is JSON.
    """
    with _one_line_errors(debug):
        if (reason := tuning.why_not()) is not None:
            raise ValueError(f"nothing to tune: {reason}")
        times = tuning.tune_linear(rows, in_features, out_features, recipe)
    cells = [
        [t.gemm, "x".join(map(str, t.shape)), t.tile, t.split, f"{t.microseconds:.1f}", "kept" if t.kept else ""]
        for t in times
    ]
    columns = ["gemm", "MxNxK", "tile", "parts of K", "us", ""]
    Console().print(report.table(f"Products of {recipe}", columns, cells, caption=f"kept in {tuning.cache_path()}"))
    kept = {t.gemm: {"tile": t.tile, "split": t.split, "microseconds": t.microseconds} for t in times if t.kept}
    typer.echo(json.dumps(report.to_jsonable(kept)))


@app.command()
def validate(
    implementation: Annotated[
        list[str] | None, typer.Option(help="a backend or a peer such as torchao; repeatable; default: our backends")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is a GPU")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the drawn examples")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the certificate as JSON")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="write it as one HTML file")] = None,
) -> None:
    """Hold an implementation of MXFP8 to the contract, property by property, and write a certificate.

    Exit code 0: every property passes, does not apply, or differs as agreed; 1: one fails; 2: it cannot run here. The
    last line is JSON.
    """
    if importlib.util.find_spec("hypothesis") is None:
        typer.echo("error: hypothesis is not installed: pip install 'mxfp8[validate]'", err=True)
        raise typer.Exit(2)
    # A program of its own: the suite stands above this package, which does not import it.
    command = [sys.executable, "-m", "numerics_tests.validation", "--seed", str(seed)]
    for name in implementation or []:
        command += ["--implementation", name]
    for option, value in (("--device", device), ("--json", json_path), ("--html", html_path)):
        command += [option, str(value)] if value is not None else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    app()
