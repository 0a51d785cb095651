"""Activations and norms whose results are cast to MX in the same pass: what they compute, in plain torch.

Everything is float32: the input is widened once, and its value goes into the cast unrounded (``round_first`` rounds it
to the input's dtype before). Activations are written out here, not taken from ``torch.nn.functional``, because kernels
must repeat them operation by operation: relu and hardswish are then the same bits everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxfp8.formats import BlockShape, ElementFormat, Rounding, ScaleRule
from mxfp8.reference.quantize import quantize

__all__ = [
    "ACTIVATIONS",
    "Casts",
    "activated",
    "activation_quantize",
    "activation_quantize_backward",
    "copies",
    "group",
    "norm_quantize",
    "norm_quantize_backward",
]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "hardswish", "swiglu")
TANH_1, TANH_3 = 2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715

Maybe = torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Casts:
    """What is made of a value that was computed in float32.

    Attributes:
        outputs: which of ``"rows"`` (MX along -1 in ``block``), ``"columns"`` (MX along -2 in ``column_block``) and
            ``"hp"`` (the input's dtype).
        round_first: cast to MX what ``"hp"`` holds, instead of the float32 value.
    """

    outputs: tuple[str, ...]
    round_first: bool
    fmt: ElementFormat
    block: BlockShape
    column_block: BlockShape
    scale_rule: ScaleRule
    satfinite: bool


def activation_quantize(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """``(qdata, scale)`` along -1, ``(qdata, scale)`` along -2 and the value in the dtype of ``x``; None for what
    ``casts`` does not ask for. Contract in :func:`mxfp8.fused.activation_quantize`."""
    y = activated(_widened(x, bias), activation)
    return copies(y, x.dtype, casts)


def activation_quantize_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]:
    """The five of :func:`activation_quantize` for ``dx``, and ``dbias`` (None without a bias). Contract in
    :func:`mxfp8.fused.activation_quantize_backward`."""
    dx = _gradient(_widened(x, bias), dy.to(torch.float32), activation)
    dbias = None if bias is None else dx.reshape(-1, dx.shape[-1]).sum(0)
    return *copies(dx, x.dtype, casts), dbias


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    norm: str,
    norm_block: int,
    eps: float,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, torch.Tensor, Maybe, torch.Tensor]:
    """The five of :func:`activation_quantize` for the normalised value, then ``h``, ``mean`` (None unless ``norm`` is
    ``"layer"``) and ``rstd``. Contract in :func:`mxfp8.fused.norm_quantize`."""
    h = x if residual is None else (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    wide, size = h.to(torch.float32), group(norm, norm_block, x.shape[-1])
    mean = _per_group(wide, size) if norm == "layer" else None
    centred = wide if mean is None else wide - _spread(mean, size, wide)
    rstd = 1.0 / torch.sqrt(_per_group(centred.square(), size) + eps)
    y = _affine(centred * _spread(rstd, size, wide), weight, bias)
    return *copies(y, x.dtype, casts), h, mean, rstd


def norm_quantize_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dh: torch.Tensor | None,
    *,
    norm: str,
    norm_block: int,
    with_bias: bool,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]:
    """The five of :func:`activation_quantize` for ``dx``, then ``dweight`` and ``dbias`` in float32 (None where there
    is none). Contract in :func:`mxfp8.fused.norm_quantize_backward`."""
    wide, size = h.to(torch.float32), group(norm, norm_block, h.shape[-1])
    centred = wide if mean is None else wide - _spread(mean, size, wide)
    factor = _spread(rstd, size, wide)
    normed, grad = centred * factor, dy.to(torch.float32)
    g = grad if weight is None else grad * weight.to(torch.float32)
    inner = g - normed * _spread(_per_group(g * normed, size), size, wide)
    if mean is not None:
        inner = inner - _spread(_per_group(g, size), size, wide)
    dx = factor * inner
    if dh is not None:
        dx = dx + dh.to(torch.float32)
    dweight = None if weight is None else (grad * normed).reshape(-1, h.shape[-1]).sum(0)
    dbias = grad.reshape(-1, h.shape[-1]).sum(0) if with_bias else None
    return *copies(dx, h.dtype, casts), dweight, dbias


def copies(
    y: torch.Tensor,
    dtype: torch.dtype,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """What ``casts`` makes of float32 ``y``, as :func:`activation_quantize` gives it; ``"hp"`` is in ``dtype``."""
    hp = y.to(dtype)
    value = hp.to(torch.float32) if casts.round_first else y
    out: list[Maybe] = []
    for name, axis, block in (("rows", -1, casts.block), ("columns", -2, casts.column_block)):
        if name not in casts.outputs:
            out += [None, None]
            continue
        out += quantize(
            value, axis=axis, fmt=casts.fmt, block=block, scale_rule=casts.scale_rule, rounding=Rounding.NEAREST,
            key=None, satfinite=casts.satfinite,
        )  # fmt: skip
    return out[0], out[1], out[2], out[3], hp if "hp" in casts.outputs else None


def _widened(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x.to(torch.float32)
    return wide if bias is None else wide + bias.to(torch.float32)


def activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of float32 ``x`` (itself for None); swiglu halves the last dimension."""
    if activation is None:
        return x
    if activation == "relu":
        return torch.where(x <= 0, 0.0, x)  # NaN stays; every zero is +0
    if activation == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    if activation == "gelu_tanh":  # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2z)), which does not cancel for negative z
        return x / (1.0 + torch.exp(-(x * (TANH_1 + TANH_3 * (x * x)))))
    if activation == "hardswish":
        return torch.where(x <= -3, 0.0, torch.where(x >= 3, x, x * ((x + 3.0) * (1.0 / 6.0))))
    if activation == "silu":
        return x / (1.0 + torch.exp(-x))
    gate, up = x.chunk(2, -1)
    return activated(gate, "silu") * up


def _gradient(x: torch.Tensor, dy: torch.Tensor, activation: str) -> torch.Tensor:
    """``act'(x) * dy`` in float32; for swiglu the gradient of ``[gate | up]``."""
    if activation == "relu":
        return torch.where(x <= 0, 0.0, dy)
    if activation == "gelu":
        density = torch.exp(-0.5 * (x * x)) * (1.0 / math.sqrt(2.0 * math.pi))
        return dy * (0.5 * (1.0 + torch.erf(x * math.sqrt(0.5))) + x * density)
    if activation == "gelu_tanh":
        s = 1.0 / (1.0 + torch.exp(-(x * (TANH_1 + TANH_3 * (x * x)))))
        return dy * (s + x * (s * (1.0 - s)) * (TANH_1 + 3.0 * TANH_3 * (x * x)))
    if activation == "hardswish":
        return torch.where(x <= -3, 0.0, torch.where(x >= 3, dy, dy * (x * (1.0 / 3.0) + 0.5)))
    if activation == "silu":
        s = 1.0 / (1.0 + torch.exp(-x))
        return dy * (s * (1.0 + x * (1.0 - s)))
    gate, up = x.chunk(2, -1)
    return torch.cat([_gradient(gate, dy * up, "silu"), dy * activated(gate, "silu")], -1)


def group(norm: str, norm_block: int, width: int) -> int:
    """How many features share a mean and a root mean square."""
    return max(1, min(norm_block, width) if norm == "block" else width)


def _per_group(x: torch.Tensor, size: int) -> torch.Tensor:
    """Means over groups of ``size`` along the last dimension; the last group may be shorter."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 0))
    return torch.cat([part.mean(-1, keepdim=True) for part in x.split(size, -1)], -1)


def _spread(values: torch.Tensor, size: int, like: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(size, -1)[..., : like.shape[-1]]


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        x = x * weight.to(torch.float32)
    return x if bias is None else x + bias.to(torch.float32)
