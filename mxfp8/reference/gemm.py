"""Matrix products of MX operands, exact products accumulated in float32.

Operands come as plain tensors: ``(qdata, scale bytes, (rows, columns) of a block)``; the last two are None for an
operand that stays in high precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from mxfp8.reference.fused import Casts, Maybe, activated, copies
from mxfp8.tensor import dequantize, rounded

__all__ = ["gemm", "gemm_quantize", "grouped_gemm"]


def gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: tuple[int, int] | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: tuple[int, int] | None,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """``activation(a[M, K] @ b[N, K].T + bias)`` for a MX or high-precision ``a`` and ``b``; contract in
    :func:`mxfp8.gemm`."""
    with full_precision(a.device):
        left, right = operand(a, a_scale, a_block), operand(b, b_scale, b_block)
        if bias is None:
            sums = left @ right.mT
        else:
            sums = torch.addmm(bias.to(torch.float32), left, right.mT)
    if accumulate and out is not None:
        return out.add_(sums)
    result = rounded(activated(sums, activation), out_dtype)
    return result if out is None else out.copy_(result)


def gemm_quantize(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: tuple[int, int] | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: tuple[int, int] | None,
    *,
    bias: torch.Tensor | None,
    activation: str | None,
    hp_dtype: torch.dtype,
    casts: Casts,
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe]:
    """``(qdata, scale)`` along -1 and along -2 of ``activation(h)``, then ``h``, which is the product plus ``bias`` in
    ``hp_dtype``; None for what ``casts`` does not ask for. Contract in :func:`mxfp8.gemm_quantize`."""
    with_h = "hp" in casts.outputs
    out_dtype = hp_dtype if with_h or casts.round_first else torch.float32
    h = gemm(a, a_scale, a_block, b, b_scale, b_block, bias=bias, out_dtype=out_dtype)
    made = replace(casts, outputs=tuple(name for name in casts.outputs if name != "hp"), round_first=False)
    return *copies(activated(h.to(torch.float32), activation), hp_dtype, made)[:4], h if with_h else None


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_block: tuple[int, int] | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_block: tuple[int, int] | None,
    *,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of group ``g`` of ``a[M, K]`` times ``b[g, N, K].T``; contract in :func:`mxfp8.grouped_gemm`."""
    with full_precision(a.device):
        left, right = operand(a, a_scale, a_block), operand(b, b_scale, b_block)
        out = left.new_zeros(left.shape[0], right.shape[1])
        start = 0
        for g, stop in enumerate(offs.tolist()):
            torch.matmul(left[start:stop], right[g].mT, out=out[start:stop])
            start = stop
        return rounded(out, out_dtype)


def operand(x: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int] | None) -> torch.Tensor:
    if scale is None or block is None:
        return x.to(torch.float32)
    return dequantize(x, scale, block)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in true float32: no autocast, no TF32 or bfloat16 passes, whatever the user's global setting.

    A compiled graph cannot change that setting, but MX operands lose nothing to it: their few significant bits are
    exact in TF32 and bfloat16, and sums are float32 either way.
    """
    # The meta device has no autocast.
    with contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False):
        if torch.compiler.is_compiling():
            yield
            return
        matmul = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        saved = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = saved
