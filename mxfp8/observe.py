"""The two seams where numerics can be watched: after each cast and after each GEMM.

Observers can only watch: they get references, and what they return is ignored. With no observer the cost is one test of
an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mxfp8.tensor import MXTensor

__all__ = ["CastEvent", "Event", "GemmEvent", "active", "emit", "subscribe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CastEvent:
    """One operand was quantised.

    Attributes:
        layer: dotted name of the layer ("" if it was not given one).
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        x: the high-precision tensor that was cast (after the Hadamard transform, if any).
        q: the result.
    """

    layer: str
    gemm: str
    operand: str
    x: torch.Tensor
    q: MXTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmEvent:
    """One GEMM ``out = a @ b.T + bias`` ran; ``a`` and ``b`` are as multiplied, transformed and quantised.

    A grouped one has ``offs`` (ends of the groups' rows of ``a``) and a ``b`` with one matrix for each group.
    """

    layer: str
    gemm: str
    a: MXTensor | torch.Tensor
    b: MXTensor | torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    offs: torch.Tensor | None = None


Event = CastEvent | GemmEvent

_observers: list[Callable[[Event], object]] = []


def active() -> bool:
    """True if anyone watches."""
    return bool(_observers)


def emit(event: Event) -> None:
    """Show ``event`` to every observer, in the order of subscription."""
    with torch.no_grad():
        for observer in tuple(_observers):
            observer(event)


@contextlib.contextmanager
def subscribe(observer: Callable[[Event], object]) -> Iterator[None]:
    """Watch every cast and GEMM inside the ``with`` block. Cached weights are cast again while someone watches."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
