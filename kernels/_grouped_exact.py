"""Grouped matrix products through bfloat16 and torch's grouped GEMM, for operands whose scales reach over fewer than
128 of what is summed. As :mod:`_gemm_exact`: both operands are dequantised and multiplied with float32 accumulation.

Group ends stay on the device. What torch takes for granted of them, and leaves unwritten, is seen to here: a first,
tiny kernel brings them within bounds, a last one clears the rows after the last group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from ._gemm_exact import Operand
from ._groups import group_bounds, lanes
from ._launch import aligned, launch
from .dequantize_triton import dequantize

__all__ = ["grouped_gemm", "grouped_wgrad", "takes"]


def takes(operands: tuple[Operand, Operand], out_dtype: torch.dtype) -> bool:
    """Whether :func:`grouped_gemm` and :func:`grouped_wgrad` can multiply these: bfloat16 holds them and is what they
    become, and all but the numbers of rows and groups are multiples of 16 bytes and not zero."""
    if out_dtype is not torch.bfloat16 or any(x.dtype in (torch.float32, torch.float16) for x, *_ in operands):
        return False
    return all(x.numel() > 0 and x.shape[-1] % 8 == 0 and (x.ndim == 2 or x.shape[-2] % 8 == 0) for x, *_ in operands)


def grouped_gemm(a: Operand, b: Operand, offs: torch.Tensor) -> torch.Tensor:
    """Rows of group ``g`` of ``a[M, K]`` times ``b[g, N, K].T``: bfloat16 ``[M, N]``, zero after ``offs[-1]``.

    **Numerics.** As :func:`_gemm_exact.exact`.
    """
    (M, _), (G, N, _) = a[0].shape, b[0].shape
    ends = _ends(offs, M)
    out = _multiply(_wide(a), _wide(b).mT, ends)
    constants = {"BM": 64, "BN": 512}
    key = (*constants.values(), M, N, G, aligned(out, ends))
    launch(_clear_kernel, key, (-(-M // 64), -(-N // 512), 1), (out, ends, M, N, G), constants, out.device, num_warps=4)
    return out


def grouped_wgrad(a: Operand, b: Operand, starts: torch.Tensor) -> torch.Tensor:
    """``a[rows of g, N].T @ b[rows of g, K]``: bfloat16 ``[G, N, K]``, zero for a group without rows. ``starts``: of
    the groups in both, which must be as long.

    **Numerics.** As :func:`_gemm_exact.exact`.
    """
    return _multiply(_wide(a).mT, _wide(b), _ends(starts[1:], len(a[0])))


def _multiply(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    with torch.autocast(a.device.type, enabled=False):
        out: torch.Tensor = F.grouped_mm(a, b, offs=ends)
    return out


def _wide(x: Operand) -> torch.Tensor:
    """An operand in bfloat16, with 16-byte aligned rows or columns."""
    data, scale, block = x
    if scale is not None and block is not None:
        return dequantize(data, scale, block, torch.bfloat16)
    rows = data if data.stride(-1) == 1 else data.mT
    pitches = rows.stride()[:-1]
    fits = rows.stride(-1) == 1 and not any(s % 8 for s in pitches) and pitches[-1] >= rows.shape[-1]
    return data if fits and data.data_ptr() % 16 == 0 else data.clone(memory_format=torch.contiguous_format)


def _ends(offs: torch.Tensor, M: int) -> torch.Tensor:
    """int32 ends of groups, each within ``M`` rows and no less than the one before."""
    G = len(offs)
    ends = torch.empty(G, dtype=torch.int32, device=offs.device)
    offs = offs.contiguous()
    constants: dict[str, Any] = {"GROUPS": lanes(G + 1)}
    key = (*constants.values(), M, G, offs.dtype, aligned(offs))
    launch(_ends_kernel, key, (1, 1, 1), (offs, ends, M, G), constants, offs.device, num_warps=1)
    return ends


@triton.jit(do_not_specialize=["M", "G"])
def _ends_kernel(offs_ptr, ends_ptr, M, G, GROUPS: tl.constexpr):
    g, _, ends = group_bounds(offs_ptr, M, G, GROUPS)
    tl.store(ends_ptr + g, ends, mask=g < G)


@triton.jit(do_not_specialize=["M", "G"])
def _clear_kernel(out_ptr, ends_ptr, M, N, G, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros in a tile of ``out[M, N]``, contiguous, where it lies after the last group."""
    end = tl.load(ends_ptr + G - 1)
    row = tl.program_id(0) * BM
    if row + BM > end:
        rows, cols = row + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
        inside = ((rows >= end) & (rows < M))[:, None] & (cols < N)[None, :]
        zeros = tl.zeros((BM, BN), out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], zeros, mask=inside)
