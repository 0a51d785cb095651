"""Calls on a GPU that repeat earlier ones: what those did on the host is done again, not decided again.

A call is known by its ``key``: dtype, shape, strides, device and alignment of every tensor, and all other arguments.
The first call with a key does nothing special (shapes of jagged batches may never come back), the second is recorded
(:mod:`mxfp8.kernels._replay`), later ones are replayed. What can be replayed has passed every check of the op.

An op may be made of others: a layer's whole forward is one call, with all its casts and products. While it is recorded
they run as they are; where it cannot be replayed, they are, one by one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["again", "forget", "key", "run"]

_RECORDED = ("cuda",)  # device types
_LIMIT = 8192  # keys are one per shape: forget them all before they become a leak
_PLAIN = (torch.Tensor, nn.Parameter)

_seen: dict[Hashable, bool] = {}  # whether a call is still to be recorded
_replays: dict[Hashable, Callable[..., Any]] = {}


def key(op: str, tensors: Iterable[torch.Tensor], *rest: Hashable) -> tuple[Hashable, ...] | None:
    """The key of a call of ``op`` on ``tensors`` with the arguments ``rest``. None while ``torch.compile`` traces, and
    for tensors that kernels cannot read as they are: subclasses, wrappers, sparse ones."""
    if torch.compiler.is_compiling():
        return None
    known: list[Hashable] = [op, rest]
    try:
        for x in tensors:
            if type(x) not in _PLAIN:
                return None
            known += x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16
    except RuntimeError:
        return None
    return tuple(known)


def again(key: Hashable, *inputs: torch.Tensor) -> Any:
    """What the op gives for ``inputs``, by replaying a call with this ``key``; None where the op itself must run."""
    try:
        found = _replays.get(key)
    except TypeError:  # an argument that cannot be hashed is of a wrong type, for the op's checks to name
        return None
    return None if found is None else found(*inputs)


def run(key: Hashable, op: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
    """``op()``, recorded if it is the second call with this key. ``inputs``: all tensors that it reads. A key that is
    None is never recorded, and neither is a part of a call that is."""
    if key is None or inputs[0].device.type not in _RECORDED or not _has_triton():
        return op()
    if key not in _seen:
        if len(_seen) >= _LIMIT:
            forget()
        _seen[key] = True
    elif _seen[key] and len({x.data_ptr() for x in inputs}) == len(inputs):  # else whose address is it?
        recorder = importlib.import_module("mxfp8.kernels._replay")
        if recorder.recording():
            return op()
        _seen[key] = False
        out, replay = recorder.record(op, inputs)
        if replay is not None:
            _replays[key] = replay
        return out
    return op()


def forget() -> None:
    """Forget every call: what they would launch is not what the ops would decide any more."""
    _seen.clear()
    _replays.clear()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
