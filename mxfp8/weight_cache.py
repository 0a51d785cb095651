"""Quantise a weight once per optimiser step, however many micro-batches use it, and never serve a stale copy."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mxfp8 import ops
from mxfp8.recipe import CastSpec
from mxfp8.rng import get_step
from mxfp8.tensor import MXTensor

__all__ = ["Key", "WeightCache", "quantize_weights"]

Key = tuple[CastSpec, int]
"""Which copy of a weight: the cast and the axis."""


def quantize_weights(weight: torch.Tensor, keys: tuple[Key, ...]) -> list[MXTensor]:
    """Copies of ``weight`` from its own (master) precision, not from a copy narrowed by autocast; in one pass if they
    are two along both axes that differ in nothing but their blocks."""
    if len(keys) == 2:
        (rows, first), (columns, second) = keys
        if (first, second) == (-1, -2) and (rows.fmt, rows.scale_rule) == (columns.fmt, columns.scale_rule):
            return list(ops.quantize_both(weight, rows.fmt, rows.block, columns.block, rows.scale_rule))
    return [ops.quantize(weight, axis, spec.fmt, spec.block, spec.scale_rule) for spec, axis in keys]


class WeightCache:
    """Quantised copies of one weight, dropped as soon as the weight may have changed.

    A copy is reused only while all of this holds: same tensor object and storage, same autograd version (every in-place
    operation raises it), no optimiser step since (of any optimiser, whose writes, like those of sharding and averaging
    code, may go behind autograd's back). On CPU the bits are compared with a snapshot as well, which also catches
    writes through ``weight.data``; on CUDA that would stall the stream, so after writing through ``.data`` outside an
    optimiser call :meth:`clear` there. Nothing is cached under ``torch.compile``, in inference mode, or for fake
    tensors.

    An optimiser that makes the copies itself, in the step that writes the weight, leaves them here with :meth:`put`.
    Steps of optimisers of that kind do not outdate them (each raises the version of what it writes); all others do.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every copy."""
        self._put: dict[Key, MXTensor] = {}
        self._asked: list[tuple[tuple[Key, ...], list[MXTensor]]] = []
        self._was_put = False
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._state: tuple[Any, ...] = ()
        self._snapshot: torch.Tensor | None = None

    @property
    def _copies(self) -> dict[Key, MXTensor]:
        asked = {key: q for keys, copies in self._asked for key, q in zip(keys, copies, strict=True)}
        return {**self._put, **asked}

    def get(self, weight: torch.Tensor, keys: tuple[Key, ...]) -> list[MXTensor]:
        """``weight`` quantised by each of ``keys``: cached copies if they are provably current."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _has_version(weight):
            return quantize_weights(weight, keys)
        if not self._is_current(weight):
            self._restart(weight, was_put=False)
        for known, copies in self._asked:
            if known is keys:  # a plan's, which is the same object in every call: to hash it takes as long as a launch
                return copies
        found = self._copies
        missing = tuple(key for key in keys if key not in found) if found else keys
        copies = quantize_weights(weight, missing)
        if found:
            found.update(zip(missing, copies, strict=True))
            copies = [found[key] for key in keys]
        self._asked.append((keys, copies))
        return copies

    def used(self, weight: torch.Tensor) -> tuple[Key, ...]:
        """The ``(spec, axis)`` that were asked for since the weight last changed: what its next value is likely to be
        asked for, and an optimiser may :meth:`put`."""
        if self._weight is None or self._weight() is not weight:
            return ()
        return tuple(dict.fromkeys(key for keys, _ in self._asked for key in keys))

    def put(self, weight: torch.Tensor, copies: Mapping[Key, MXTensor]) -> None:
        """Take ``copies`` of ``weight`` as it is now, in place of all others.

        For an optimiser inside its step, which must raise the weight's version before this call, and whose class says
        so by an attribute ``fills_weight_caches`` that is true.
        """
        self.clear()
        if _has_version(weight):
            self._restart(weight, was_put=True)
            self._put.update(copies)

    def _restart(self, weight: torch.Tensor, *, was_put: bool) -> None:
        self.clear()
        self._weight, self._was_put, self._state = weakref.ref(weight), was_put, _state(weight, was_put)
        self._snapshot = _bits(weight).clone() if weight.device.type == "cpu" else None

    def _is_current(self, weight: torch.Tensor) -> bool:
        if self._weight is None or self._weight() is not weight or self._state != _state(weight, self._was_put):
            return False
        return self._snapshot is None or torch.equal(_bits(weight), self._snapshot)


def _has_version(weight: torch.Tensor) -> bool:
    return not (weight.is_inference() or weight.is_meta or isinstance(weight, FakeTensor))


def _state(weight: torch.Tensor, was_put: bool) -> tuple[Any, ...]:
    steps = _other_steps if was_put else get_step()
    return weight._version, weight.data_ptr(), weight.dtype, weight.device, steps


_other_steps = 0  # of optimisers that do not say which weights they wrote


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_other(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    global _other_steps
    _other_steps += not getattr(optimizer, "fills_weight_caches", False)


register_optimizer_step_post_hook(_count_other)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return weight.detach().view(integers[weight.dtype.itemsize])
