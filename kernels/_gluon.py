"""The names that Hopper kernels take from Gluon, Triton's lower level, in one place: they moved between releases.

``HAVE_GLUON`` is False, and ``gluon.jit`` leaves functions as they are, where this Triton cannot compile the kernels;
modules that define them can be imported everywhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton

__all__ = ["HAVE_GLUON", "RELEASES", "Descriptor", "gl", "gluon", "hopper", "swizzled"]

RELEASES = ("3.6", "3.7")
"""Triton releases whose Gluon the kernels were compiled with. 3.5 and 3.8 name or check things differently."""

HAVE_GLUON = triton.__version__.startswith(tuple(f"{r}." for r in RELEASES))
gluon: Any
gl: Any
hopper: Any
if HAVE_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _TensorDescriptor
else:
    gluon = SimpleNamespace(jit=lambda fn=None, **_: fn if fn is not None else (lambda f: f))
    gl, hopper, _TensorDescriptor = SimpleNamespace(constexpr=int), SimpleNamespace(), object


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
