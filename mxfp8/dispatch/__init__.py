"""Which backend runs an op, and why not another one.

One table maps ``(op, backend)`` to a function; a kernel module is imported when it is first asked for. Every function
of one op has the reference's signature. A backend named by the user runs or raises with the reason; ``"auto"`` takes
the first that can run, fastest first, records the choice, and warns once when a CUDA tensor has to take the plain-torch
reference.

    python -m mxfp8.dispatch        # op x backend x available x reason
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from mxfp8.dispatch import compiled, compiled_fused, compiled_grouped
from mxfp8.reference.attention import block_attention, generalized_attention, jagged_attention
from mxfp8.reference.fused import (
    activation_quantize,
    activation_quantize_backward,
    norm_quantize,
    norm_quantize_backward,
)
from mxfp8.reference.gemm import gemm, gemm_quantize, grouped_gemm
from mxfp8.reference.grouped import check_offsets, grouped_wgrad, quantize_both_grouped, quantize_grouped
from mxfp8.reference.hadamard import hadamard, hadamard_quantize
from mxfp8.reference.optim import adamw, rowwise_adagrad
from mxfp8.reference.quantize import quantize, quantize_both
from mxfp8.reference.recoalesce import recoalesce

__all__ = ["BACKENDS", "OPS", "Availability", "chosen", "explain", "is_available", "resolve", "why_not"]

BACKENDS = ("blackwell", "hopper", "triton", "reference")
"""Fastest first: the order in which ``backend="auto"`` looks."""

OPS = (
    "quantize",
    "quantize_both",
    "recoalesce",
    "hadamard",
    "hadamard_quantize",
    "gemm",
    "gemm_quantize",
    "grouped_gemm",
    "grouped_wgrad",
    "quantize_grouped",
    "quantize_both_grouped",
    "check_offsets",
    "jagged_attention",
    "generalized_attention",
    "block_attention",
    "activation_quantize",
    "activation_quantize_backward",
    "norm_quantize",
    "norm_quantize_backward",
    "adamw",
    "rowwise_adagrad",
)

_functions: dict[tuple[str, str], Callable[..., Any]] = {
    ("quantize", "reference"): quantize,
    ("quantize_both", "reference"): quantize_both,
    ("recoalesce", "reference"): recoalesce,
    ("hadamard", "reference"): hadamard,
    ("hadamard_quantize", "reference"): hadamard_quantize,
    ("gemm", "reference"): gemm,
    ("gemm_quantize", "reference"): gemm_quantize,
    ("grouped_gemm", "reference"): grouped_gemm,
    ("grouped_wgrad", "reference"): grouped_wgrad,
    ("quantize_grouped", "reference"): quantize_grouped,
    ("quantize_both_grouped", "reference"): quantize_both_grouped,
    ("check_offsets", "reference"): check_offsets,
    ("jagged_attention", "reference"): jagged_attention,
    ("generalized_attention", "reference"): generalized_attention,
    ("block_attention", "reference"): block_attention,
    ("activation_quantize", "reference"): activation_quantize,
    ("activation_quantize_backward", "reference"): activation_quantize_backward,
    ("norm_quantize", "reference"): norm_quantize,
    ("norm_quantize_backward", "reference"): norm_quantize_backward,
    ("adamw", "reference"): adamw,
    ("rowwise_adagrad", "reference"): rowwise_adagrad,
}
_FILES = {
    "quantize_both": "quantize",
    "hadamard_quantize": "hadamard",
    "gemm_quantize": "gemm",
    "grouped_wgrad": "grouped_gemm",
    "quantize_both_grouped": "quantize_grouped",
    "check_offsets": "grouped_gemm",
    "activation_quantize_backward": "activation_quantize",
    "norm_quantize_backward": "norm_quantize",
    "adamw": "optim",
    "rowwise_adagrad": "optim",
}  # ops that share a kernel file with another one
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
    if importlib.util.find_spec("mxfp8.kernels") is None:
        return "mxfp8.kernels is not installed: pip install -e . (or the wheel) instead of running from the source tree"
    module = _module(op, backend)
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
        backend = _choose(op, device.type)
    elif backend != "reference":
        _require(op, backend, device.type)
    if torch.compiler.is_compiling():
        for module in (compiled_fused, compiled_grouped):
            if op in module.OPERATORS:
                return functools.partial(module.OPERATORS[op], backend)
        if backend != "reference" and op in compiled.OPERATORS:
            return functools.partial(compiled.OPERATORS[op], backend)
    return _functions[op, backend]


def chosen() -> dict[tuple[str, str], str]:
    """What ``backend="auto"`` took so far: ``{(op, device type): backend}``."""
    return dict(_chosen)


@overload
def is_available(
    op: str, backend: str, device: str | torch.device | None = None, *, return_reason: Literal[False] = False
) -> bool: ...
@overload
def is_available(
    op: str, backend: str, device: str | torch.device | None = None, *, return_reason: Literal[True]
) -> tuple[bool, str]: ...
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


# torch.compile runs these two while tracing and takes the result as a constant of the graph. They hold every read of
# what they write: a guard on `_chosen` taken before `_choose` fills it would fail on its own first check.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(op: str, kind: str) -> str:
    if (op, kind) in _chosen:
        return _chosen[op, kind]
    # On a CPU kernels run in Triton's interpreter, which is for tests that name it.
    reasons = {b: why_not(op, b, kind) for b in (BACKENDS if kind == "cuda" else ("reference",))}
    backend = next(b for b, reason in reasons.items() if reason is None)
    if backend == "reference" and kind == "cuda":
        said = "; ".join(f"{b}: {r}" for b, r in reasons.items() if r)
        warnings.warn(f"{op} on CUDA takes the plain-torch reference ({said})", stacklevel=4)
    _load(op, backend)
    _chosen[op, kind] = backend
    return backend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _require(op: str, backend: str, kind: str) -> None:
    reason = why_not(op, backend, kind)
    if reason is not None:
        usable = ", ".join(b for b in BACKENDS if why_not(op, b, kind) is None)
        raise RuntimeError(f"{op}: backend {backend!r} cannot run on {kind}: {reason}. Usable here: {usable}")
    _load(op, backend)


def _load(op: str, backend: str) -> None:
    if (op, backend) not in _functions:
        _functions[op, backend] = getattr(importlib.import_module(_module(op, backend)), op)


def _module(op: str, backend: str) -> str:
    return f"mxfp8.kernels.{_FILES.get(op, op)}_{backend}"


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
