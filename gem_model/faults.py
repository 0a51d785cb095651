"""Broken precisions, planted on purpose: `gem compare --plant NAME` must call them "fail" and name the worst layers.

A comparison that has never failed proves nothing. Each fault is a mistake that real MXFP8 code has made; none of them
touches the library: a recipe and a policy are data, and the scale faults wrap the public `mxfp8.ops.quantize`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import mxfp8
from mxfp8 import CastSpec, LinearRecipe, MXTensor, PrecisionPolicy

FAULTS: dict[str, str] = {
    "e5m2_floor": "every linear layer, heads and gates included, in E5M2 with floor scales",
    "scale_too_small": "every scale byte is one too small, so that maxima of blocks clip, by up to a factor of 2",
    "scale_too_large": "every scale byte is read as one larger than it was written, so that casts come out doubled",
}
ALIASES = {"scale_off_by_one": "scale_too_small"}


def check_fault(name: str) -> str:
    """The full name of a fault. ValueError lists the known ones."""
    name = ALIASES.get(name, name)
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}; choose one of {sorted([*FAULTS, *ALIASES])}")
    return name


def planted_policy(name: str, policy: PrecisionPolicy) -> PrecisionPolicy:
    """The policy to convert with: the given one, or the broken recipe for every layer."""
    if name != "e5m2_floor":
        return policy
    cast = CastSpec(fmt="e5m2", scale_rule="floor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recipe warns that E5M2 gradients diverge, which is the point here
        recipe = LinearRecipe.from_operands(name="e5m2_floor", input=cast, weight=cast, grad_output=cast)
    return PrecisionPolicy(rules=[], default=recipe, name="all")


@contextlib.contextmanager
def plant(name: str | None) -> Iterator[None]:
    """Inside the block every cast of this process is faulty as `name` says; None plants nothing."""
    broken = {"scale_too_small": _one_too_small, "scale_too_large": _one_too_large}.get(name or "")
    if broken is None:
        yield
        return
    quantize = functools.partial(broken, mxfp8.ops.quantize)

    def quantize_both(
        x: Tensor, fmt: str, block: tuple[int, int], column_block: tuple[int, int], scale_rule: str
    ) -> tuple[MXTensor, MXTensor]:
        return quantize(x, -1, fmt, block, scale_rule), quantize(x, -2, fmt, column_block, scale_rule)

    with mock.patch.multiple(mxfp8.ops, quantize=quantize, quantize_both=quantize_both):
        yield


def _one_too_small(quantize: Callable[..., MXTensor], x: Tensor, *args: object, **kwargs: object) -> MXTensor:
    q = quantize(x, *args, **kwargs)
    scale = _shifted(q, -1)
    ones = torch.ones(q.shape, device=x.device).to(q.fmt.dtype)
    per_element = MXTensor(ones, scale, q.fmt, q.axis, q.block).dequantize()
    elements = (x.float() / per_element).clamp(-q.fmt.max, q.fmt.max)
    return MXTensor(elements.to(q.fmt.dtype), scale, q.fmt, q.axis, q.block)


def _one_too_large(quantize: Callable[..., MXTensor], x: Tensor, *args: object, **kwargs: object) -> MXTensor:
    q = quantize(x, *args, **kwargs)
    return MXTensor(q.qdata, _shifted(q, +1), q.fmt, q.axis, q.block)


def _shifted(q: MXTensor, by: int) -> Tensor:
    """Scale bytes moved by one; 0 (an empty block) and 255 (NaN) stay."""
    code = q.scale_bytes.to(torch.int16)
    moved = torch.where((code == 0) | (code == 255), code, (code + by).clamp(0, 254))
    return moved.to(torch.uint8)
