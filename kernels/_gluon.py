"""The names that Hopper kernels take from Gluon, Triton's lower level, in one place: they moved between releases.

``HAVE_GLUON`` is False, and ``gluon.jit`` leaves functions as they are, where this Triton cannot compile the kernels;
modules that define them can be imported everywhere.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import triton

from ._launch import triton_why_not

__all__ = [
    "HAVE_GLUON",
    "RELEASES",
    "Descriptor",
    "async_copy",
    "barrier",
    "gl",
    "gluon",
    "hopper",
    "hopper_why_not",
    "reinterpreted",
    "swizzled",
]

RELEASES = ("3.6", "3.7", "3.8", "3.9")
"""Triton releases whose Gluon the kernels were compiled with; run with 3.6 only. 3.5 checks things differently."""

HAVE_GLUON = triton.__version__.startswith(tuple(f"{r}." for r in RELEASES))
gluon: Any
gl: Any
hopper: Any
async_copy: Any
barrier: Any
if HAVE_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper as _hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _TensorDescriptor

    def _with(module: ModuleType, **names: Any) -> ModuleType:
        """A module with more names: a kernel may read a global that is a module, but no other kind of namespace."""
        copy = ModuleType(module.__name__)
        copy.__dict__.update(vars(module) | names)
        return copy

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # so from 3.7 on
    async_copy = _async_copy
    if hasattr(_async_copy, "async_load"):  # from 3.8 on; 3.9 has no other name for it, here and below
        async_copy = _with(_async_copy, async_copy_global_to_shared=_async_copy.async_load)
    hopper = _hopper
    if hasattr(_hopper.tma, "async_load"):
        _tma = _hopper.tma
        _copies = {
            "async_copy_global_to_shared": _tma.async_load,
            "async_copy_shared_to_global": _tma.async_store,
        }
        hopper = _with(_hopper, tma=_with(_tma, **_copies))

    if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # from 3.9 on

        @gluon.jit
        def reinterpreted(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
            return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)
    else:

        @gluon.jit
        def reinterpreted(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
            """The same shared memory in another shape and layout."""
            return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)
else:
    gluon = SimpleNamespace(jit=lambda fn=None, **_: fn if fn is not None else (lambda f: f))
    gl, hopper, async_copy = SimpleNamespace(constexpr=int), SimpleNamespace(), SimpleNamespace()
    barrier = reinterpreted = None
    _TensorDescriptor = object


def hopper_why_not(kind: str) -> str | None:
    """The reason why Gluon kernels for Hopper cannot run on a device type, or None."""
    if not HAVE_GLUON:
        return f"needs Gluon as in triton {', '.join(RELEASES)}; this is triton {triton.__version__}"
    return triton_why_not(kind, exactly=(9, 0))


class Descriptor(_TensorDescriptor):
    """A TMA descriptor of a tensor, made for every launch: Triton's own spends microseconds on checks that the callers
    here have made (base and row pitch multiples of 16 bytes, last dimension contiguous, nothing empty)."""

    def __init__(self, tensor: Any, block_shape: list[int], layout: Any) -> None:
        self.base = tensor
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.block_shape = block_shape
        self.layout = layout
        self.padding = "zero"


def swizzled(bits: int, swizzle: int = 128) -> Any:
    """The shared-memory layout of a TMA tile with rows of at least ``swizzle`` bytes of ``bits``-bit elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
