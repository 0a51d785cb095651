"""Repeat what an op did on the host without deciding it again.

Two calls of an op on tensors of the same dtypes, shapes, strides and alignment differ in nothing but addresses: they
allocate the same outputs and launch the same compiled kernels with the same integers. :func:`record` runs an op once
and writes that down as the source of a function: allocations, addresses, launches, results, one line each. To run that
takes a third of the host time. Whatever the op makes for its own use lies in one allocation there::

    def replay(x0):
        if get_device() != 0 or knobs.runtime.launch_enter_hook.calls:
            return None
        x1 = allocate((64, 256), (256, 1), c0)
        x2 = allocate((64, 8), (1, 64), c1)
        a0 = x0.data_ptr()
        a1 = x1.data_ptr()
        a2 = x2.data_ptr()
        stream = get_stream(0)
        c2(8, 1, 1, stream, 94512, False, False, None, None, c3, None, None, None, a0, a1, a2, 64, 256)
        return x1, x2

What cannot be repeated so is noticed, and :func:`record` then gives no replay: any operator of torch other than views
and uninitialised allocations, a kernel that was not launched through :mod:`_launch`, an address inside a tensor.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import _launch
from ._launch import _get_device, _get_stream

__all__ = ["Replay", "record", "recording"]

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_MAX_MAPS = 256  # of a TMA argument: one for each address that a caching allocator hands out again and again
_ALIGNMENT = 512  # bytes, of tensors that share an allocation: what CUDA's caching allocator gives

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, stride and dtype of a tensor."""

Replay = Callable[..., Any]
"""The host side of an op for inputs like those it was recorded with: takes them and gives what the op gives. None, with
nothing done, where only the op itself will do: on another device than the current one, or while a profiler watches
launches. Its ``__doc__`` is its source."""


@dataclass(frozen=True, slots=True)
class Map:
    """TMA descriptors of one argument, made by ``fill(address, *parameters)``. They depend on nothing else, so that
    those of addresses that were seen before can be used again."""

    fill: Callable[..., Any]
    parameters: tuple[Any, ...]
    made: dict[int, Any] = field(default_factory=dict)

    def make(self, address: int) -> Any:
        """The descriptor of an address that has none yet."""
        if len(self.made) >= _MAX_MAPS:
            self.made.clear()
        made = self.made[address] = self.fill(address, *self.parameters)
        return made


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
    return out, _replay(recorder, out, len(inputs))


def _replay(recorder: _Recorder, out: Any, inputs: int) -> Replay | None:
    results: Sequence[torch.Tensor | None] = (out,) if isinstance(out, torch.Tensor) else out
    tensors = recorder.tensors
    where = {t.data_ptr(): i for i, t in enumerate(tensors)}
    complete = len(recorder.launches) == recorder.count > 0 and 0 not in where
    if recorder.foreign or not complete or len(where) != len(tensors):
        return None
    sources = [None if r is None else where.get(r.data_ptr(), -1) for r in results]
    made_of = {i: r for i, r in zip(sources, results, strict=True) if i is not None and r is not None}
    if len(made_of) != sum(r is not None for r in results):
        return None
    if any(i < 0 or tensors[i].itemsize != r.itemsize for i, r in made_of.items()):
        return None
    writer = _Writer(where)
    launches = [writer.launch(seen) for seen in recorder.launches]
    if None in launches:
        return None
    index = recorder.launches[0].device_index
    lines = [f"if get_device() != {index} or knobs.runtime.launch_enter_hook.calls:", "    return None"]
    forms = {i: _form(tensors[i]) for i in range(len(tensors)) if i < inputs or i in made_of}
    for i, result in made_of.items():
        if i >= inputs and forms[i][:2] == _form(result)[:2]:  # a view of another dtype: allocated as that
            forms[i] = _form(result)
    lines += [f"x{i} = allocate({writer.named(*form)})" for i, form in forms.items() if i >= inputs]
    lines += [f"a{i} = x{i}.data_ptr()" for i in forms]
    lines += _shared(writer, {i: t for i, t in enumerate(tensors) if i not in forms})
    lines += [*writer.maps, f"stream = get_stream({index})", *(line for line in launches if line is not None)]
    taken = ["None" if i is None else writer.result(i, forms[i], _form(made_of[i])) for i in sources]
    lines += [f"return {', '.join(taken)}{',' * (len(taken) == 1 and not isinstance(out, torch.Tensor))}"]
    return writer.function([f"x{i}" for i in range(inputs)], lines)


def _form(tensor: torch.Tensor) -> Form:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _shared(writer: _Writer, tensors: dict[int, torch.Tensor]) -> list[str]:
    """Lines that make one allocation for ``tensors``, which nobody but the op itself sees."""
    lines, size = [], 0
    for i, tensor in tensors.items():
        lines.append(f"a{i} = shared + {size}")
        size += -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    made = [f"room = allocate({writer.named((size,), (1,), torch.uint8)})", "shared = room.data_ptr()"]
    return [*made, *lines] if lines else []


class _Writer:
    """Writes the source of a replay, in which ``a<i>`` is the address of the ``i``-th tensor. ``where`` says which one
    lies at an address. Numbers are written as they are, other constants by a name."""

    def __init__(self, where: dict[int, int]) -> None:
        self.where = where
        self.maps: list[str] = []  # lines that look up TMA descriptors
        self.names: dict[str, Any] = {
            "allocate": _launch.allocate, "get_device": _get_device, "get_stream": _get_stream, "knobs": knobs,
        }  # fmt: skip

    def named(self, *values: Any) -> str:
        """``values`` as arguments of a call."""
        texts = []
        for value in values:
            parts = value if type(value) is tuple else (value,)
            if all(part is None or type(part) in (int, bool) for part in parts):
                texts.append(repr(value))
                continue
            texts.append(f"c{len(self.names)}")
            self.names[texts[-1]] = value
        return ", ".join(texts)

    def launch(self, seen: _launch.Seen) -> str | None:
        """The line that launches again; None if an argument is no known tensor, or the launcher is unknown."""
        run, metas = seen.direct.run, []
        if any(hasattr(arg, "block_shape") for arg in seen.args):  # Triton would make descriptors anew at every launch
            inside = inspect.getclosurevars(run).nonlocals
            run, metas = inside.get("launcher"), list(inside.get("tensordesc_meta") or ())
            if run is None:
                return None
        arguments = [self.named(*seen.grid), "stream", self.named(*seen.direct.fixed)]
        for arg in seen.args:
            tensor = arg.base if hasattr(arg, "block_shape") else arg
            if not isinstance(tensor, torch.Tensor):
                arguments.append(self.named(arg))
                continue
            i = self.where.get(tensor.data_ptr())
            if i is None:
                return None
            if tensor is arg:
                arguments.append(f"a{i}")
                continue
            if not metas or metas[0] is None or metas[0]["fp4_padded"]:
                return None
            found = Map(*_launch.descriptor(arg, metas.pop(0)))
            name = f"m{len(self.maps)}"
            self.maps.append(f"{name} = {self.named(found.made)}.get(a{i}) or {self.named(found.make)}(a{i})")
            arguments += [name, self.named(*arg.shape, *arg.strides)]
        arguments += [self.named(*seen.direct.values)] if seen.direct.values else []
        return f"{self.named(run)}({', '.join(arguments)})"

    def result(self, i: int, form: Form, wanted: Form) -> str:
        """The ``i``-th tensor, which has this form, in the wanted one."""
        size, stride, dtype = wanted
        return f"x{i}" if form == wanted else f"x{i}.as_strided({self.named(size, stride)}).view({self.named(dtype)})"

    def function(self, arguments: list[str], lines: list[str]) -> Replay:
        """What was written, as a function."""
        source = "\n    ".join([f"def replay({', '.join(arguments)}):", *lines])
        exec(compile(source, "<replay>", "exec"), self.names)
        made: Replay = self.names["replay"]
        made.__doc__ = source
        return made
