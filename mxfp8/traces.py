"""Where two training runs part: the first step and layer at which they differ too much or stop being finite.

The caller records a ``StepTrace`` per step (loss, activation RMS and gradient norm per layer); nothing here runs a
model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One training step. Each mapping is in the order of execution: activations forward, gradients backward."""

    step: int
    loss: float
    activation_rms: Mapping[str, float] = field(default_factory=dict)
    grad_norm: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> list[tuple[str, str, float]]:
        """(quantity, layer, value) in order of execution; the loss has layer ``""``."""
        return [
            *(("activation_rms", layer, value) for layer, value in self.activation_rms.items()),
            ("loss", "", self.loss),
            *(("grad_norm", layer, value) for layer, value in self.grad_norm.items()),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """The first place where two runs part, or where a run stops being finite."""

    step: int
    layer: str
    quantity: str
    baseline: float | None
    candidate: float | None
    #: ``"departs"``: both finite, too far apart. ``"nonfinite"``: a NaN or Inf in at least one.
    kind: Literal["departs", "nonfinite"]

    def __str__(self) -> str:
        where = f"{self.quantity} of {self.layer}" if self.layer else self.quantity
        verb = "is not finite" if self.kind == "nonfinite" else "departs"
        seen = [
            f"{k} {v:.6g}" for k, v in (("baseline", self.baseline), ("candidate", self.candidate)) if v is not None
        ]
        return f"step {self.step}: {where} {verb} ({', '.join(seen)})"


def first_departure(
    baseline: Sequence[StepTrace], candidate: Sequence[StepTrace], *, threshold: float = 0.1
) -> Departure | None:
    """First step, and within it the first value in order of execution, where two runs part.

    They part where ``|candidate - baseline| > threshold * |baseline|`` or where either is NaN or Inf. The default,
    10 %, is about three times the relative error of one MXFP8 GEMM (29 dB is 3.5 %). A run that stopped early is
    compared as far as it went.

    Returns:
        None when they stay together over the steps both have.

    Raises:
        ValueError: a trace is empty, the steps or the layers of the two do not line up (named), threshold not positive.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be a positive relative difference such as 0.1, got {threshold}")
    if not baseline or not candidate:
        raise ValueError(f"both traces need at least one step, got {len(baseline)} and {len(candidate)}")
    for a, b in zip(baseline, candidate, strict=False):
        values_a, values_b = a.values(), b.values()
        if a.step != b.step:
            raise ValueError(f"traces do not line up: baseline step {a.step} meets candidate step {b.step}")
        if {v[:2] for v in values_a} != {v[:2] for v in values_b}:
            odd = sorted({v[:2] for v in values_a} ^ {v[:2] for v in values_b})[0]
            raise ValueError(f"step {a.step}: only one trace has {odd[0]} of layer {odd[1]!r}; record the same layers")
        other = {v[:2]: v[2] for v in values_b}
        for quantity, layer, x in values_a:
            y = other[quantity, layer]
            finite = math.isfinite(x) and math.isfinite(y)
            if not finite or abs(y - x) > threshold * abs(x):
                kind: Literal["departs", "nonfinite"] = "departs" if finite else "nonfinite"
                return Departure(step=a.step, layer=layer, quantity=quantity, baseline=x, candidate=y, kind=kind)
    return None


def first_nonfinite(
    trace: Sequence[StepTrace], *, run: Literal["baseline", "candidate"] = "candidate"
) -> Departure | None:
    """First step and, in order of execution, first value of one run that is NaN or Inf; None when all are finite."""
    for step in trace:
        for quantity, layer, value in step.values():
            if not math.isfinite(value):
                seen = {
                    "baseline": value if run == "baseline" else None,
                    "candidate": value if run == "candidate" else None,
                }
                return Departure(step=step.step, layer=layer, quantity=quantity, kind="nonfinite", **seen)
    return None
