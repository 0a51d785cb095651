"""One optimiser step of one parameter, and the MX copies of the updated weight, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw as torch_adamw

from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule
from mxfp8.reference.quantize import quantize

__all__ = ["WeightCast", "adamw", "rowwise_adagrad"]

Copies = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCast:
    """A quantised copy that a step is to leave behind: the arguments of :func:`mxfp8.quantize`, to nearest."""

    axis: int
    fmt: ElementFormat
    block: BlockShape
    scale_rule: ScaleRule


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    *,
    step: int,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    casts: Sequence[WeightCast],
) -> Copies:
    """AdamW on ``param``, in place; returns ``(qdata, scale bytes)`` of the updated parameter for each of ``casts``.

    Args:
        param: float32, bfloat16, float16 or float64.
        grad: dense, the shape of ``param``, any float dtype.
        exp_avg, exp_avg_sq: moments, updated in place; float32 (float64 for float64).
        master: a float32 copy of a narrower ``param``, updated in its stead; ``param`` then gets it rounded.
        step: the number of this step, from 1.

    **Numerics.** The bits of ``torch.optim.AdamW(foreach=False)`` in float32 (on ``master``, or on ``param`` widened),
    rounded once to ``param.dtype``. Copies are those of ``param`` as it is stored.
    """
    wide = _widened(param, master)
    torch_adamw(
        [wide], [grad.to(wide.dtype)], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step - 1))], foreach=False,
        amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps, maximize=maximize,
    )  # fmt: skip
    if wide is not param:
        param.copy_(wide)
    return _copies(param, casts)


def rowwise_adagrad(
    param: torch.Tensor,
    grad: torch.Tensor,
    accumulator: torch.Tensor,
    master: torch.Tensor | None,
    *,
    lr: float | torch.Tensor,
    eps: float,
    weight_decay: float,
    maximize: bool,
    casts: Sequence[WeightCast],
) -> Copies:
    """Row-wise Adagrad on ``param[..., D]``, in place; returns copies as :func:`adamw`.

    Args:
        accumulator: float32 ``[..., 1]``, one number for each row: the sum over steps of the mean squared gradient.

    **Numerics.** In float32: ``g += weight_decay * p``; ``accumulator += mean(g * g)`` over the row;
    ``p -= lr / (sqrt(accumulator) + eps) * g``. Source: FBGEMM, EXACT_ROWWISE_ADAGRAD with L2 weight decay.
    """
    if param.numel():
        wide = _widened(param, master)
        g = grad.to(wide.dtype)
        g = -g if maximize else g
        if weight_decay != 0:
            g = g + weight_decay * wide
        accumulator.add_(g.square().mean(-1, keepdim=True))
        wide.sub_(g * (lr / (accumulator.sqrt() + eps)))
        if wide is not param:
            param.copy_(wide)
    return _copies(param, casts)


def _widened(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """What the step computes on: ``param`` itself unless it is narrower than float32."""
    if master is not None:
        return master
    return param.to(torch.float32) if param.dtype.itemsize < 4 else param


def _copies(param: torch.Tensor, casts: Sequence[WeightCast]) -> Copies:
    return [
        quantize(
            param, axis=c.axis, fmt=c.fmt, block=c.block, scale_rule=c.scale_rule, rounding=Rounding.NEAREST, key=None,
            satfinite=False,
        )
        for c in casts
    ]  # fmt: skip
