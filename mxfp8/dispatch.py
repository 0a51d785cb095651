"""Which backend runs an op, and why not another one.

One table maps ``(op, backend)`` to the dotted path of a function; a backend is imported when first asked for. Every
function of one op has the reference's signature. A backend named by the user runs or raises with the reason;
``"auto"`` takes the first that can run, fastest first, records the choice, and warns once when a CUDA tensor has to take
the plain-torch reference.

    python -m mxfp8.dispatch        # op x backend x available x reason
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BACKENDS", "OPS", "Availability", "chosen", "explain", "is_available", "resolve", "why_not"]

BACKENDS = ("blackwell", "hopper", "triton", "reference")
"""Fastest first: the order in which ``backend="auto"`` looks."""

OPS = (
    "quantize",
    "hadamard",
    "gemm",
    "grouped_gemm",
    "jagged_attention",
    "generalized_attention",
    "block_attention",
)

_REFERENCE = {
    "quantize": "mxfp8.reference.quantize:quantize",
    "hadamard": "mxfp8.reference.hadamard:hadamard",
    "gemm": "mxfp8.reference.gemm:gemm",
    "grouped_gemm": "mxfp8.reference.gemm:grouped_gemm",
    "jagged_attention": "mxfp8.reference.attention:jagged_attention",
    "generalized_attention": "mxfp8.reference.attention:generalized_attention",
    "block_attention": "mxfp8.reference.attention:block_attention",
}

_chosen: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """One cell of the table: can ``backend`` run ``op`` on ``device`` type, and if not, why."""

    op: str
    backend: str
    device: str
    available: bool
    reason: str


def why_not(op: str, backend: str, device: str | torch.device | None = None) -> str | None:
    """The reason why ``backend`` cannot run ``op`` on ``device`` (default: CUDA if present), or None if it can.

    Raises:
        ValueError: unknown op or backend.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: use one of {', '.join(OPS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use 'auto' or one of {', '.join(BACKENDS)}")
    kind = torch.device(device).type if device is not None else _default_device()
    if backend == "reference":
        return None
    module = f"mxfp8.kernels.{op}_{backend}"
    if importlib.util.find_spec(module) is None:
        return f"no {backend} kernel for {op} in this release"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'mxfp8[triton]'"
    reason: str | None = importlib.import_module(module).why_not(kind)
    return reason


def resolve(op: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """The function that runs ``op`` for tensors on ``device``.

    Raises:
        ValueError: unknown op or backend.
        RuntimeError: the named backend cannot run here; the message says why and what can.
    """
    if backend == "auto":
        backend = _first(op, device.type)
    elif (reason := why_not(op, backend, device)) is not None:
        usable = [b for b in BACKENDS if why_not(op, b, device) is None]
        raise RuntimeError(
            f"{op}: backend {backend!r} cannot run on {device.type}: {reason}. Usable here: {', '.join(usable)}"
        )
    return _load(op, backend)


def chosen() -> dict[tuple[str, str], str]:
    """What ``backend="auto"`` took so far: ``{(op, device type): backend}``."""
    return dict(_chosen)


def is_available(
    op: str, backend: str, device: str | torch.device | None = None, *, return_reason: bool = False
) -> bool | tuple[bool, str]:
    """True if ``backend`` can run ``op`` on ``device`` (default: CUDA if present); with the reason if asked for."""
    reason = why_not(op, backend, device)
    return (reason is None, reason or "") if return_reason else reason is None


def explain(device: str | torch.device | None = None) -> list[Availability]:
    """The whole table for one device (default: CUDA if present), op by op, fastest backend first."""
    kind = torch.device(device).type if device is not None else _default_device()
    rows = []
    for op in OPS:
        for backend in BACKENDS:
            reason = why_not(op, backend, kind)
            rows.append(
                Availability(op=op, backend=backend, device=kind, available=reason is None, reason=reason or "")
            )
    return rows


@functools.cache
def _first(op: str, kind: str) -> str:
    reasons = {}
    for backend in BACKENDS:
        reason = why_not(op, backend, kind)
        if reason is None:
            _chosen[op, kind] = backend
            if backend == "reference" and kind == "cuda":
                said = "; ".join(f"{b}: {r}" for b, r in reasons.items())
                warnings.warn(f"{op} on CUDA takes the plain-torch reference ({said})", stacklevel=4)
            return backend
        reasons[backend] = reason
    raise AssertionError("the reference runs everywhere")


@functools.cache
def _load(op: str, backend: str) -> Callable[..., Any]:
    path = _REFERENCE[op] if backend == "reference" else f"mxfp8.kernels.{op}_{backend}:{op}"
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _main() -> None:
    from rich.console import Console
    from rich.table import Table

    rows = explain()
    table = Table(title=f"mxfp8 backends on {rows[0].device}")
    for name in ("op", "backend", "available", "reason"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.op, row.backend, "yes" if row.available else "no", row.reason)
    Console().print(table)


if __name__ == "__main__":
    _main()
