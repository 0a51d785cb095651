"""What follows a matrix product on any backend: its activation inside a GEMM's kernel, and the casts of a product that
was written to memory.

A product, its activation and its casts in one kernel give the bits of separate steps: compilers may contract
``a * b + c`` in a GEMM, and must not in an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from .activation_quantize_triton import _TANH_1, _TANH_3, activate, logistic_denominator, over

__all__ = ["activate_alike", "product_and_casts"]

Maybe = torch.Tensor | None


@triton.jit
def _cubic(square, HARDWARE: tl.constexpr):
    """``square`` times the coefficient of gelu_tanh, which the compiler cannot make a part of a fused multiply-add."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [square, _TANH_3], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return square * _TANH_3


@triton.jit
def activate_alike(x, ACT: tl.constexpr, HARDWARE: tl.constexpr):
    """The bits of ``activate`` in a kernel that is compiled with contraction."""
    if ACT == 2:
        z = x * (_TANH_1 + _cubic(x * x, HARDWARE))
        return over(x, logistic_denominator(z, HARDWARE), HARDWARE)
    else:
        return activate(x, ACT, HARDWARE)


def product_and_casts(
    product: Callable[[torch.dtype], torch.Tensor],
    activation: str | None,
    hp_dtype: torch.dtype,
    casts: Any,
    cast: ModuleType,
    activate_and_cast: ModuleType,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """What ``mxfp8.reference.gemm.gemm_quantize`` gives, in steps.

    Args:
        product: makes ``h`` in a dtype.
        cast, activate_and_cast: the modules of the backend for ``quantize`` and for ``activation_quantize``.
    """
    with_h = "hp" in casts.outputs
    h = product(hp_dtype if with_h or casts.round_first else torch.float32)
    return *_casts_of(h, activation, casts, cast, activate_and_cast), h if with_h else None


def _casts_of(
    h: torch.Tensor, activation: str | None, casts: Any, cast: ModuleType, activate_and_cast: ModuleType
) -> tuple[Maybe, Maybe, Maybe, Maybe]:
    """``(q, s)`` along rows and ``(t, u)`` along columns of ``activation(h)``; None for what is not asked for."""
    made = replace(casts, outputs=tuple(name for name in casts.outputs if name != "hp"), round_first=False)
    if activation is not None:
        q, s, t, u, _ = activate_and_cast.activation_quantize(h, None, activation=activation, casts=made)
        return q, s, t, u
    same = {"fmt": casts.fmt, "scale_rule": casts.scale_rule, "satfinite": casts.satfinite}
    if made.outputs == ("rows", "columns"):
        q, s, t, u = cast.quantize_both(h, block=casts.block, column_block=casts.column_block, **same)
        return q, s, t, u
    axis, block = (-1, casts.block) if made.outputs == ("rows",) else (-2, casts.column_block)
    q, s = cast.quantize(h, axis=axis, block=block, rounding="nearest", key=None, **same)
    return (q, s, None, None) if axis == -1 else (None, None, q, s)
