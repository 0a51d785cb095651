"""Launch a compiled kernel again for a few microseconds instead of twenty.

Triton's own launch inspects every argument each time, to find out which compiled version fits. A caller here names the
version with a hashable ``key`` instead: everything that the arguments' types, alignment and constants depend on. The
first launch goes through Triton; later ones with the same key hand the arguments to the driver directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from ._device import INTERPRETED

# The driver's entry point is private and has changed between releases: elsewhere Triton's own launch is used.
_DIRECT = triton.__version__.startswith("3.6.") and not INTERPRETED

Versions = dict[Hashable, Any]
"""Compiled versions of a kernel by launch key; one for each plan, so that a key need not repeat what a plan fixes."""


class Direct(NamedTuple):
    """A compiled version: ``run(*grid, stream, *fixed, *args, *values)`` launches it."""

    run: Callable[..., Any]
    fixed: tuple[Any, ...]
    values: tuple[Any, ...]  # of the constants


class Seen(NamedTuple):
    """A launch as :mod:`_replay` writes it down."""

    direct: Direct
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    device_index: int | None


class _Watcher(threading.local):
    """Who writes down allocations and launches of this thread, if anybody does."""

    active: Any = None


watcher = _Watcher()


def _allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# Bound once: a look-up in a module costs as much as the call. (A CPU build of torch has neither.)
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_get_stream: Callable[[Any], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _allocate
)
"""An uninitialised tensor on the current device, by the function that compiled graphs use: a third of the time of
``torch.empty``."""


def empty(size: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Uninitialised bytes (uint8)."""
    if watcher.active is None and device.type == "cuda" and _get_device() == device.index:
        return allocate(size, stride, torch.uint8)
    return torch.empty_strided(size, stride, dtype=torch.uint8, device=device)  # a watcher sees this one


_versions: Versions = {}
_LIMIT = 8192  # versions are few, keys are one per shape: forget them all before they become a leak


def launch(
    kernel: Any,
    key: Hashable,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    device: torch.device,
    **options: Any,
) -> None:
    """As :func:`launch_version`, with a ``key`` that says all: constants, dtypes, and for each pointer and int what
    Triton specialises on (divisibility by 16, being 1, needing 64 bits). Shapes and strides themselves will do."""
    if len(_versions) >= _LIMIT:
        _versions.clear()
    launch_version(kernel, _versions, (kernel, key), grid, args, constants, device, **options)


def launch_version(
    kernel: Any,
    versions: Versions,
    key: Hashable,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    device: torch.device,
    **options: Any,
) -> None:
    """Run ``kernel[grid](*args, **constants, **options)`` on ``device``'s current stream.

    Args:
        kernel: a ``triton.jit`` or ``gluon.jit`` function whose compile-time parameters come last, in the order of
            ``constants``.
        versions: where compiled versions are kept. ``kernel``, ``constants``, ``options``, the ints and their
            divisibility must be the same for all launches that share it.
        key: with ``versions`` it determines the compiled version: dtypes of pointers, and whether they are aligned.
        options: ``num_warps``, ``num_stages`` and the like.
    """
    index = device.index
    found: Direct | None = versions.get((key, index))
    if found is not None and _get_device() == index and not knobs.runtime.launch_enter_hook.calls:
        found.run(*grid, _get_stream(index), *found.fixed, *args, *found.values)
        return
    if grid[0] * grid[1] * grid[2] == 0:
        return
    with torch.cuda.device(index if device.type == "cuda" else -1):
        compiled = kernel[grid](*args, **constants, **options)
    if _DIRECT:
        direct, repeatable = _direct(compiled, tuple(constants.values()))
        versions[key, index] = direct
        if repeatable and watcher.active is not None:
            watcher.active.launched(Seen(direct, grid, args, index))


def _direct(compiled: Any, values: tuple[Any, ...]) -> tuple[Direct, bool]:
    """How to launch a compiled kernel, and whether that needs nothing else: scratch memory is allocated by a wrapper,
    which is left out where there is none."""
    launcher, metadata = compiled.run, compiled.packed_metadata
    hooks = (None, None, None)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return Direct(launcher, (compiled.function, metadata, *hooks), values), False
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    return Direct(launcher.launch, (compiled.function, *flags, None, None, metadata, *hooks), values), True


def descriptor(arg: Any, meta: Mapping[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``(fill, parameters)``: ``fill(address, *parameters)`` is the TMA descriptor that Triton makes of ``arg``."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return triton.runtime.driver.active.utils.fill_tma_descriptor, (
        meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"],
        arg.shape, arg.strides, int(arg.padding == "nan"),
    )  # fmt: skip


def aligned(*tensors: torch.Tensor) -> int:
    """Which of the tensors start at a multiple of 16 bytes, as a bit mask: a part of a launch key."""
    mask = 0
    for i, tensor in enumerate(tensors):
        mask |= (tensor.data_ptr() % 16 == 0) << i
    return mask


def triton_why_not(kind: str, least: tuple[int, int] = (8, 0), exactly: tuple[int, int] | None = None) -> str | None:
    """Why plain Triton kernels cannot run on a device type: no GPU, or an older one; on a CPU only interpreted."""
    if kind == "cpu":
        return None if INTERPRETED and exactly is None else "needs a CUDA GPU (on CPU: tests set TRITON_INTERPRET=1)"
    if kind != "cuda":
        return f"needs a CUDA GPU, not {kind}"
    if INTERPRETED:
        return "TRITON_INTERPRET is set: kernels of this process run on CPU tensors"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    have = torch.cuda.get_device_capability()
    if exactly is not None and have != exactly:
        return f"made for compute capability {exactly[0]}.{exactly[1]}; this GPU has {have[0]}.{have[1]}"
    if have < least:
        return f"needs compute capability {least[0]}.{least[1]} or later; this GPU has {have[0]}.{have[1]}"
    return None
