"""The program behind ``mxfp8 validate``: ``python -m numerics_tests.validation --help``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from mxfp8.dispatch import BACKENDS
from numerics_tests.validation.certificate import Certificate, certify, show, write_html, write_json
from numerics_tests.validation.implementation import NAMES, Implementation, UnavailableError, load


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mxfp8 validate", description="Hold implementations of MXFP8 to the contract."
    )
    parser.add_argument("--implementation", action="append", choices=NAMES, help="repeatable; default: our backends")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn examples")
    parser.add_argument("--json", type=Path, help="write the certificate as JSON")
    parser.add_argument("--html", type=Path, help="write it as one HTML file")
    return parser.parse_args(argv)


def chosen(names: list[str] | None, device: str, console: Console) -> list[Implementation]:
    """The named implementations, or every backend of ours that runs here. UnavailableError if a named one cannot."""
    if names:
        return [load(name, device) for name in names]
    found = []
    for name in BACKENDS:
        try:
            found.append(load(name, device))
        except UnavailableError as error:
            console.print(f"not available here: {error}", highlight=False, markup=False)
    return found


def main(argv: list[str]) -> int:
    """Exit code: 0 all pass or differ as agreed, 1 a property fails, 2 an implementation is not available."""
    options = parse(argv)
    console = Console()
    torch.set_num_threads(1)
    try:
        implementations = chosen(options.implementation, options.device, console)
    except (UnavailableError, RuntimeError) as error:
        print(f"error: not available here: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    certificates: list[Certificate] = []
    for implementation in implementations:
        certificates.append(certify(implementation, options.seed))
        show(certificates[-1], console)
    if options.json is not None:
        write_json(certificates, options.json)
    if options.html is not None:
        write_html(certificates, options.html)
    ok = all(c.ok for c in certificates)
    print(json.dumps({"ok": ok, "implementations": {c.implementation: c.counts for c in certificates}}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
