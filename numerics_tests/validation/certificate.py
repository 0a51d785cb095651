"""Run every property over an implementation and write down what came out: table, JSON, HTML."""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from mxfp8 import report
from numerics_tests.validation.agreed import agreed_for
from numerics_tests.validation.case import DIFFERS, FAIL, NOT_APPLICABLE, PASS, Outcome, Property, judge
from numerics_tests.validation.casts import CASTS
from numerics_tests.validation.implementation import Implementation
from numerics_tests.validation.laws import LAWS
from numerics_tests.validation.layouts import LAYOUTS
from numerics_tests.validation.products import PRODUCTS
from numerics_tests.validation.randomised import RANDOMISED

PROPERTIES: tuple[Property, ...] = (*CASTS, *LAWS, *LAYOUTS, *PRODUCTS, *RANDOMISED)
COLUMNS = ("property", "result", "smallest failing input", "reason")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome of every property for one implementation on one machine."""

    implementation: str
    device: str
    hardware: str
    versions: dict[str, str]
    seed: int
    date: str
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """True if every property passes, does not apply, or differs as agreed."""
        return all(o.result != FAIL for o in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(o.result for o in self.outcomes)
        return {result: found[result] for result in (PASS, DIFFERS, NOT_APPLICABLE, FAIL)}

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{n} {result}" for result, n in self.counts.items())
        return f"{self.implementation} on {self.hardware}: {counts}"


def hardware(device: torch.device) -> str:
    """The GPU with its compute capability, or the CPU's architecture."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    return f"CPU {platform.machine()}"


def certify(implementation: Implementation, seed: int = 0) -> Certificate:
    """Judge every property. The same seed gives the same drawn examples."""
    outcomes = tuple(
        outcome
        for prop in PROPERTIES
        for outcome in judge(
            prop, implementation, agreed_for(implementation.name, prop.name, implementation.device), seed
        )
    )
    common = {"torch": torch.__version__, "python": platform.python_version()}
    return Certificate(
        implementation=implementation.name,
        device=str(implementation.device),
        hardware=hardware(implementation.device),
        versions=implementation.versions() | common,
        seed=seed,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        outcomes=outcomes,
    )


def rows(certificate: Certificate) -> list[list[str]]:
    return [[o.name, o.result, o.smallest, o.reason] for o in certificate.outcomes]


def show(certificate: Certificate, console: Console) -> None:
    """The table, then one line."""
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    console.print(report.table(f"{certificate.implementation} ({versions})", COLUMNS, rows(certificate)))
    console.print(certificate.summary, highlight=False, markup=False)


def document(certificates: list[Certificate]) -> dict[str, object]:
    """What is written as JSON."""
    plain = [report.to_jsonable(c) | {"ok": c.ok, "counts": c.counts} for c in certificates]
    return {"certificate": 1, "ok": all(c.ok for c in certificates), "implementations": plain}


def write_json(certificates: list[Certificate], path: Path) -> None:
    report.write_text(path, json.dumps(document(certificates), indent=1) + "\n")


def write_html(certificates: list[Certificate], path: Path) -> None:
    """One page with the verdict, the facts and the table of each implementation, and what each property states."""
    page = report.HtmlReport("MXFP8 numerics certificate", "Bits and bounds of docs/numerics.md, property by property")
    for certificate in certificates:
        page.heading(certificate.implementation)
        page.verdict("pass" if certificate.ok else "fail", certificate.summary)
        page.facts(certificate.versions | {"seed": certificate.seed, "date": certificate.date})
        page.table(COLUMNS, rows(certificate))
    page.heading("Properties")
    page.table(("property", "statement"), [[p.name, p.statement] for p in PROPERTIES])
    page.write(path)
