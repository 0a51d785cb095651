"""Repeat what an op did on the host without deciding it again.

Two calls of an op on tensors of the same dtypes, shapes, strides and alignment differ in nothing but addresses: they
allocate the same outputs and launch the same compiled kernels with the same integers. :func:`record` runs an op once
and writes that down; the :class:`Replay` that comes of it does only that, for a third of the host time.

What cannot be repeated so is noticed, and :func:`record` then gives no replay: any operator of torch other than views
and uninitialised allocations, a kernel that was not launched through :mod:`_launch`, an address inside a tensor.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import _launch
from ._launch import _get_device, _get_stream

__all__ = ["Replay", "record"]

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_MAX_MAPS = 256  # of a TMA argument: one for each address that a caching allocator hands out again and again

Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Map:
    """A TMA descriptor among the arguments: of the ``source``-th tensor, made by ``fill(address, *parameters)``. It
    depends on nothing else, so that those of addresses that were seen before can be used again."""

    source: int
    fill: Callable[..., Any]
    parameters: tuple[Any, ...]
    made: dict[int, Any] = field(default_factory=dict)

    def at(self, address: int) -> Any:
        found = self.made.get(address)
        if found is None:
            if len(self.made) >= _MAX_MAPS:
                self.made.clear()
            found = self.made[address] = self.fill(address, *self.parameters)
        return found


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: ``run(*grid, stream, *fixed, *arguments)``, where ``pick`` takes the arguments from the addresses of
    all tensors, then ``maps``, then ``constants``, in this order; ``tail`` are the last arguments."""

    run: Callable[..., Any]
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    maps: tuple[Map, ...]
    constants: tuple[Any, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    tail: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The host side of an op for inputs like those it was recorded with.

    Attributes:
        index: of the device.
        allocations: size, stride and dtype of each tensor that is made.
        launches: in order.
        views: what to make of tensors that are not results as they are: number (inputs first, then allocations), size,
            stride, dtype.
        results: takes the op's result, or a tuple of them, from all tensors and, as the last, None.
    """

    index: int | None
    allocations: tuple[Allocation, ...]
    launches: tuple[Launch, ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    results: Callable[[Sequence[Any]], Any]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What the op gives; None, with nothing done, where only the op itself will do: on another device than the
        current one, or while a profiler watches launches."""
        if _get_device() != self.index or knobs.runtime.launch_enter_hook.calls:
            return None
        tensors = [*inputs, *[_launch.allocate(*a) for a in self.allocations]]
        addresses = [tensor.data_ptr() for tensor in tensors]
        stream = _get_stream(self.index)
        for launch in self.launches:
            values: list[Any] = addresses
            if launch.maps or launch.constants:
                values = [*addresses, *[m.at(addresses[m.source]) for m in launch.maps], *launch.constants]
            launch.run(*launch.grid, stream, *launch.fixed, *launch.pick(values), *launch.tail)
        for i, size, stride, dtype in self.views:
            tensors[i] = tensors[i].as_strided(size, stride).view(dtype)
        return self.results([*tensors, None])


class _Recorder(TorchDispatchMode):
    """Watches one call of an op. ``tensors``: inputs, then all that was allocated, kept alive so that no address is
    used twice."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(inputs)
        self.launches: list[_launch.Seen] = []
        self.count = 0  # of all launches of Triton kernels on this thread
        self.foreign = ""  # the first thing that a replay could not repeat
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated(out)
        elif not func.is_view:
            self.foreign = self.foreign or str(func)
        return out

    def allocated(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)

    def launched(self, seen: _launch.Seen) -> None:
        self.launches.append(seen)

    def hook(self, metadata: object) -> None:
        self.count += threading.get_ident() == self._thread


def record(op: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> tuple[Any, Replay | None]:
    """``(op(), a replay of it)``, or None in the place of the latter where it cannot be repeated.

    Args:
        op: gives a tensor, or a tuple of tensors and Nones.
        inputs: all tensors that it reads, with distinct addresses.
    """
    recorder = _Recorder(inputs)
    hooks = knobs.runtime.launch_enter_hook
    hooks.add(recorder.hook)
    _launch.watcher.active = recorder
    try:
        with recorder:
            out = op()
    finally:
        _launch.watcher.active = None
        hooks.remove(recorder.hook)
    return out, _replay(recorder, (out,) if isinstance(out, torch.Tensor) else out, len(inputs))


def _replay(recorder: _Recorder, results: Sequence[torch.Tensor | None], inputs: int) -> Replay | None:
    tensors = recorder.tensors
    where = {t.data_ptr(): i for i, t in enumerate(tensors)}
    complete = len(recorder.launches) == recorder.count > 0 and 0 not in where
    if recorder.foreign or not complete or len(where) != len(tensors):
        return None
    launches = [_repeated(seen, where, len(tensors)) for seen in recorder.launches]
    allocations: list[Allocation] = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors[inputs:]]
    taken: list[int] = []
    views = []
    for result in results:
        if result is None:
            taken.append(-1)
            continue
        i = where.get(result.data_ptr(), -1)
        if i < 0 or i in taken or tensors[i].itemsize != result.itemsize:
            return None
        taken.append(i)
        same = tensors[i].shape == result.shape and tensors[i].stride() == result.stride()
        if same and i >= inputs:
            allocations[i - inputs] = (tuple(result.shape), result.stride(), result.dtype)
        elif not same or result.dtype != tensors[i].dtype:
            views.append((i, tuple(result.shape), result.stride(), result.dtype))
    if None in launches:
        return None
    done = tuple(launch for launch in launches if launch is not None)
    return Replay(recorder.launches[0].device_index, tuple(allocations), done, tuple(views), itemgetter(*taken))


def _repeated(seen: _launch.Seen, where: dict[int, int], count: int) -> Launch | None:
    """A launch by the places of its arguments, None if one is no known tensor's address or the launcher is unknown."""
    maps: list[Map] = []
    plain: list[Any] = []
    order: list[tuple[str, int]] = []
    run, metas = seen.direct.run, []
    if any(hasattr(arg, "block_shape") for arg in seen.args):  # Triton would make descriptors anew at every launch
        inside = inspect.getclosurevars(run).nonlocals
        run, metas = inside.get("launcher"), list(inside.get("tensordesc_meta") or ())
    for arg in seen.args:
        tensor = arg.base if hasattr(arg, "block_shape") else arg
        if not isinstance(tensor, torch.Tensor):
            order.append(("plain", len(plain)))
            plain.append(arg)
        elif tensor.data_ptr() not in where:
            return None
        elif tensor is arg:
            order.append(("tensor", where[tensor.data_ptr()]))
        elif not metas or metas[0] is None or metas[0]["fp4_padded"]:
            return None
        else:
            order.append(("map", len(maps)))
            maps.append(Map(where[tensor.data_ptr()], *_launch.descriptor(arg, metas.pop(0))))
            shape = (*arg.shape, *arg.strides)
            order += [("plain", len(plain) + i) for i in range(len(shape))]
            plain += shape
    last = max(i for i, (kind, _) in enumerate(order) if kind != "plain") + 1
    first = {"tensor": 0, "map": count, "plain": count + len(maps)}
    if last < 2:  # itemgetter gives a tuple of two or more
        return None
    pick = itemgetter(*(first[kind] + i for kind, i in order[:last]))
    chosen = tuple(plain[i] for kind, i in order[:last] if kind == "plain")
    tail = (*(plain[i] for _, i in order[last:]), *seen.direct.values)
    return Launch(run, seen.grid, seen.direct.fixed, tuple(maps), chosen, pick, tail)
