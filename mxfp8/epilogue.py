"""Products that hand their result to the next product in MX, as :mod:`mxfp8.fused` does for activations and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mxfp8 import dispatch, ops
from mxfp8.dispatch import replays
from mxfp8.formats import BlockShape, ElementFormat, ScaleRule
from mxfp8.fused import make_casts
from mxfp8.reference.fused import ACTIVATIONS
from mxfp8.tensor import MXTensor

__all__ = ["Product", "gemm_quantize"]


class Product(NamedTuple):
    """What was asked for of a product, the rest None: MX along -1, MX along -2, and its value before the activation."""

    rows: MXTensor | None
    columns: MXTensor | None
    hp: torch.Tensor | None


def gemm_quantize(
    a: MXTensor | torch.Tensor,
    b: MXTensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    outputs: Sequence[str] = ("rows",),
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    satfinite: bool = False,
    hp_dtype: torch.dtype = torch.bfloat16,
    round_first: bool = False,
    backend: str = "auto",
) -> Product:
    """``activation(h)`` of ``h = a[M, K] @ b[N, K].T + bias[N]`` as MX copies; the value itself is not written.

    On Hopper, rows in blocks of 1x32 or 1x128 come straight from the accumulators of a product on FP8 tensor cores
    whose N is a multiple of 128. Columns, other blocks and other backends take a product followed by casts: the same
    bits, more memory traffic.

    Args:
        a, b, bias: as :func:`mxfp8.gemm`.
        activation: None, or a name as in :func:`mxfp8.fused.activation_quantize`: with ``"swiglu"`` the copies have
            half as many columns as ``h``.
        outputs: which of ``"rows"`` (MX along -1 in ``block``), ``"columns"`` (MX along -2 in ``column_block``, by
            default ``block``) and ``"hp"`` (``h`` in ``hp_dtype``, which the backward pass of an activation needs) to
            make; at least one of the first two.
        fmt, block, column_block, scale_rule, satfinite: of the casts, as :func:`mxfp8.quantize_both`.
        hp_dtype: float32, bfloat16 or float16.
        round_first: round ``h`` to ``hp_dtype`` even if it is not asked for: the copies that come with it otherwise.

    Raises:
        TypeError, ValueError: as :func:`mxfp8.gemm` and :func:`mxfp8.fused.activation_quantize`.

    **Numerics.** The float32 value of ``h`` goes into the activation and on into the casts; with ``"hp"`` or
    ``round_first`` it is first rounded to ``hp_dtype``, so that backward, which starts from the rounded value,
    differentiates what forward computed. Either way the copies are those of ``activation_quantize(h, activation)`` for
    the ``h`` that :func:`mxfp8.gemm` gives in float32 or in ``hp_dtype``, bit for bit.
    """
    casts = make_casts(fmt, block, column_block, scale_rule, outputs, round_first, satfinite)
    ops.check_product("gemm_quantize", a, b, bias, hp_dtype)
    _check(activation, casts.outputs, b.shape[0])
    left, right = ops.parts_of(a), ops.parts_of(b)
    inputs = [t for t in (*left[:2], *right[:2], bias) if t is not None]
    how = (left[2], right[2], bias is None, activation, hp_dtype, casts, backend)
    known = replays.key("gemm_quantize", inputs, *how)
    if (parts := replays.again(known, *inputs)) is None:
        run = dispatch.resolve("gemm_quantize", backend, a.device)
        bias = None if bias is None else bias.detach()
        rest = {"bias": bias, "activation": activation, "hp_dtype": hp_dtype, "casts": casts}
        with torch.no_grad():
            parts = replays.run(known, lambda: run(*left, *right, **rest), inputs)
    q, s, t, u, h = parts
    rows = None if q is None else MXTensor.trusted(q, s, casts.fmt, -1, casts.block)
    columns = None if t is None else MXTensor.trusted(t, u, casts.fmt, -2, casts.column_block)
    return Product(rows, columns, h)


def _check(activation: str | None, outputs: tuple[str, ...], columns: int) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"gemm_quantize: unknown activation {activation!r}: use None or one of {', '.join(ACTIVATIONS)}"
        )
    if activation == "swiglu" and columns % 2:
        raise ValueError(f"gemm_quantize: swiglu halves the columns of the product, which are {columns}")
    if outputs == ("hp",):
        raise ValueError("gemm_quantize: outputs is ('hp',), which mxfp8.gemm makes: name 'rows' or 'columns' too")
