"""Repeat what an op did on the host without deciding it again.

Two calls of an op on tensors of the same dtypes, shapes, strides and alignment differ in nothing but addresses: they
allocate the same outputs and launch the same compiled kernels with the same integers. :func:`record` runs an op once
and writes that down; the :class:`Replay` that comes of it does only that, for a third of the host time. Whatever the op
makes for its own use lies in one allocation there.

What cannot be repeated so is noticed, and :func:`record` then gives no replay: any operator of torch other than views
and uninitialised allocations, a kernel that was not launched through :mod:`_launch`, an address inside a tensor.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import _launch
from ._launch import _get_device, _get_stream

__all__ = ["Replay", "record", "recording"]

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_MAX_MAPS = 256  # of a TMA argument: one for each address that a caching allocator hands out again and again
_ALIGNMENT = 512  # bytes, of tensors that share an allocation: what CUDA's caching allocator gives

Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Map:
    """A TMA descriptor among the arguments: of the ``source``-th tensor, made by ``fill(address, *parameters)``. It
    depends on nothing else, so that those of addresses that were seen before can be used again."""

    source: int
    fill: Callable[..., Any]
    parameters: tuple[Any, ...]
    made: dict[int, Any] = field(default_factory=dict)

    def make(self, address: int) -> Any:
        """The descriptor of an address that has none yet."""
        if len(self.made) >= _MAX_MAPS:
            self.made.clear()
        made = self.made[address] = self.fill(address, *self.parameters)
        return made


class Launch(NamedTuple):
    """One launch: ``run(*grid, stream, *fixed, *pick(values), *tail)``, with the values of :class:`Replay`; ``tail``
    are the last arguments, the same every time."""

    run: Callable[..., Any]
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    tail: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The host side of an op for inputs like those it was recorded with.

    Arguments of launches are picked from these values: the addresses of all tensors (inputs, then allocations), the
    addresses of ``parts``, TMA descriptors, constants.

    Attributes:
        index: of the device.
        allocations: size, stride and dtype of each tensor that is made.
        parts: where inside the last allocation the tensors begin that only the op itself sees.
        maps: the TMA descriptors.
        constants: what does not depend on an address.
        launches: in order.
        views: what to make of tensors that are not results as they are: number (inputs first, then allocations), size,
            stride, dtype.
        results: takes the op's result, or a tuple of them, from all tensors and, as the last, None.
    """

    index: int | None
    allocations: tuple[Allocation, ...]
    parts: tuple[int, ...]
    maps: tuple[Map, ...]
    constants: tuple[Any, ...]
    launches: tuple[Launch, ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    results: Callable[[Sequence[Any]], Any]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What the op gives; None, with nothing done, where only the op itself will do: on another device than the
        current one, or while a profiler watches launches."""
        index = self.index
        if _get_device() != index or knobs.runtime.launch_enter_hook.calls:
            return None
        allocate = _launch.allocate
        tensors: list[Any] = [*inputs, *[allocate(*a) for a in self.allocations]]
        values: list[Any] = [tensor.data_ptr() for tensor in tensors]
        if self.parts:
            shared = values[-1]
            values += [shared + offset for offset in self.parts]
        if self.maps:
            values += [m.made.get(values[m.source]) or m.make(values[m.source]) for m in self.maps]
        values += self.constants
        stream = _get_stream(index)
        for run, grid, fixed, pick, tail in self.launches:
            run(*grid, stream, *fixed, *pick(values), *tail)
        for i, size, stride, dtype in self.views:
            tensors[i] = tensors[i].as_strided(size, stride).view(dtype)
        tensors.append(None)
        return self.results(tensors)


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


def recording() -> bool:
    """Whether this thread is inside a call that is being recorded."""
    return _launch.watcher.active is not None


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
    sources = [None if r is None else where.get(r.data_ptr(), -1) for r in results]
    made_of = [(i, r) for i, r in zip(sources, results, strict=True) if i is not None and r is not None]
    if len({i for i, _ in made_of}) != len(made_of):
        return None
    if any(i < 0 or tensors[i].itemsize != r.itemsize for i, r in made_of):
        return None
    own = sorted({*range(inputs), *(i for i, _ in made_of)})  # inputs and results have a tensor each
    forms = {i: _form(tensors[i]) for i in own}
    views = []
    for i, result in made_of:
        if i >= inputs and forms[i][:2] == _form(result)[:2]:
            forms[i] = _form(result)
        elif forms[i] != _form(result):
            views.append((own.index(i), *_form(result)))
    allocations = [forms[i] for i in own[inputs:]]
    places = {tensors[i].data_ptr(): place for place, i in enumerate(own)}
    parts, size = [], 0
    for i in sorted({*range(len(tensors))} - {*own}):  # all others share one
        places[tensors[i].data_ptr()] = len(own) + 1 + len(parts)
        parts.append(size)
        size += -(-tensors[i].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    if parts:
        allocations.append(((size,), (1,), torch.uint8))
    arguments = _Arguments(places, len(own) + bool(parts) + len(parts))
    if not all(arguments.add(seen) for seen in recorder.launches):
        return None
    return Replay(
        recorder.launches[0].device_index, tuple(allocations), tuple(parts), tuple(arguments.maps),
        tuple(arguments.constants), arguments.launches(), tuple(views),
        itemgetter(*(-1 if i is None else own.index(i) for i in sources)),
    )  # fmt: skip


def _form(tensor: torch.Tensor) -> Allocation:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Arguments:
    """Arguments of launches by their places among the values of a replay. ``places``: of addresses; ``count``: how many
    values there are before the descriptors."""

    def __init__(self, places: dict[int, int], count: int) -> None:
        self.places, self.count = places, count
        self.maps: list[Map] = []
        self.constants: list[Any] = []
        self._taken: list[tuple[Callable[..., Any], _launch.Seen, list[tuple[str, int]], tuple[Any, ...]]] = []

    def add(self, seen: _launch.Seen) -> bool:
        """Take a launch apart. False if an argument is no known tensor's address, or the launcher is unknown."""
        run, metas = seen.direct.run, []
        if any(hasattr(arg, "block_shape") for arg in seen.args):  # Triton would make descriptors anew at every launch
            inside = inspect.getclosurevars(run).nonlocals
            run, metas = inside.get("launcher"), list(inside.get("tensordesc_meta") or ())
            if run is None:
                return False
        order: list[tuple[str, Any]] = []
        for arg in seen.args:
            tensor = arg.base if hasattr(arg, "block_shape") else arg
            if not isinstance(tensor, torch.Tensor):
                order.append(("constant", arg))
                continue
            place = self.places.get(tensor.data_ptr())
            if place is None:
                return False
            if tensor is arg:
                order.append(("address", place))
                continue
            if not metas or metas[0] is None or metas[0]["fp4_padded"]:
                return False
            order.append(("map", len(self.maps)))
            self.maps.append(Map(place, *_launch.descriptor(arg, metas.pop(0))))
            order += [("constant", number) for number in (*arg.shape, *arg.strides)]
        last = max((i for i, (kind, _) in enumerate(order) if kind != "constant"), default=0) + 1
        if last < 2:  # itemgetter gives a tuple of two or more
            return False
        taken = []
        for kind, value in order[:last]:
            if kind == "constant":
                self.constants.append(value)
                value = len(self.constants) - 1
            taken.append((kind, value))
        self._taken.append((run, seen, taken, (*(value for _, value in order[last:]), *seen.direct.values)))
        return True

    def launches(self) -> tuple[Launch, ...]:
        """All that were added."""
        first = {"address": 0, "map": self.count, "constant": self.count + len(self.maps)}
        return tuple(
            Launch(run, seen.grid, seen.direct.fixed, itemgetter(*(first[kind] + i for kind, i in taken)), tail)
            for run, seen, taken, tail in self._taken
        )
