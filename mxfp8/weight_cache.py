"""Quantise a weight once per optimiser step, however many micro-batches use it, and never serve a stale copy."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mxfp8 import ops
from mxfp8.recipe import CastSpec
from mxfp8.rng import get_step
from mxfp8.tensor import MXTensor

__all__ = ["WeightCache", "quantize_weight"]


def quantize_weight(weight: torch.Tensor, spec: CastSpec, axis: int) -> MXTensor:
    """Cast ``weight`` from its own (master) precision, not from a copy narrowed by autocast."""
    return ops.quantize(weight.detach(), axis, spec.fmt, spec.block, spec.scale_rule)


class WeightCache:
    """Quantised copies of one weight, dropped as soon as the weight may have changed.

    A copy is reused only while all of this holds: same tensor object and storage, same autograd version (every in-place
    operation raises it), no optimiser step since (of any optimiser, whose writes, like those of sharding and averaging
    code, may go behind autograd's back). On CPU the bits are compared with a snapshot as well, which also catches
    writes through ``weight.data``; on CUDA that would stall the stream, so after writing through ``.data`` outside an
    optimiser call :meth:`clear` there. Nothing is cached under ``torch.compile``, in inference mode, or for fake
    tensors.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every copy."""
        self._copies: dict[tuple[CastSpec, int], MXTensor] = {}
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._state: tuple[Any, ...] = ()
        self._snapshot: torch.Tensor | None = None

    def get(self, weight: torch.Tensor, spec: CastSpec, axis: int) -> MXTensor:
        """``weight`` quantised by ``spec`` along ``axis``: a cached copy if it is provably current."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _has_version(weight):
            return quantize_weight(weight, spec, axis)
        if not self._is_current(weight):
            self.clear()
            self._weight, self._state = weakref.ref(weight), _state(weight)
            self._snapshot = _bits(weight).clone() if weight.device.type == "cpu" else None
        if (spec, axis) not in self._copies:
            self._copies[spec, axis] = quantize_weight(weight, spec, axis)
        return self._copies[spec, axis]

    def _is_current(self, weight: torch.Tensor) -> bool:
        if self._weight is None or self._weight() is not weight or self._state != _state(weight):
            return False
        return self._snapshot is None or torch.equal(_bits(weight), self._snapshot)


def _has_version(weight: torch.Tensor) -> bool:
    return not (weight.is_inference() or weight.is_meta or isinstance(weight, FakeTensor))


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device, get_step()


def _bits(weight: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return weight.detach().view(integers[weight.dtype.itemsize])
