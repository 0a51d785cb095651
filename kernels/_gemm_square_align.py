"""The same tensor in 32x32 blocks with more equal scales among neighbours, in plain Triton and one pass over memory.

:mod:`_gemm_square_kernel` is faster where the four blocks of a slot have one scale. A block whose scale is below that
of its neighbours can take theirs if its elements can be divided by the ratio: a power of two, so that this is exact but
for the few elements that then are subnormal and lose a bit. A block that has any is left as it is. Of normal data nine
in ten blocks one binade down have none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._device import encode
from ._launch import aligned, launch
from .dequantize_triton import FORMAT_CODES, decoded
from .quantize_triton import hardware
from .recoalesce_triton import _block_max, _spread

__all__ = ["align"]

GROUP = 4
"""Blocks along K that are made alike: those of a slot of the GEMM."""


@triton.jit
def _align_kernel(
    q_ptr, s_ptr, o_ptr, t_ptr, R, C, PITCH, q_r, q_c, s_r, s_c,
    GROUP: tl.constexpr, FMT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One group of blocks. Elements of the output are ``[R, C]`` with rows ``PITCH`` bytes apart, its scales
    contiguous ``[ceil(R/32), ceil(C/32)]``."""
    pm, pk = tl.program_id(1), tl.program_id(0)
    rows = (pm * 32 + tl.arange(0, 32)).to(tl.int64)[:, None]
    cols = (pk * 32 * GROUP + tl.arange(0, 32 * GROUP)).to(tl.int64)[None, :]
    s_cols = pk * GROUP + tl.arange(0, GROUP)[None, :]
    width = tl.cdiv(C, 32)
    here = (rows < R) & (cols < C)
    code = tl.load(q_ptr + rows * q_r + cols * q_c, mask=here, other=0)
    byte = tl.load(s_ptr + pm.to(tl.int64) * s_r + s_cols.to(tl.int64) * s_c, mask=s_cols < width, other=0).to(tl.int32)

    empty = (_block_max(code.to(tl.int32) & 0x7F, 32, 32) == 0) | (byte == 255)  # NaN stays alone
    highest = tl.max(tl.where(empty, 0, byte), axis=1, keep_dims=True)
    # 64 binades down nothing is left of any element, and a float32 holds all powers up to there.
    down = tl.minimum(tl.maximum(highest - byte, 0), 64)
    factor = ((127 - down) << 23).to(tl.float32, bitcast=True)
    value = decoded(code, FMT, HARDWARE) * _spread(factor, 32, 32)
    new = encode(value, FMT, HARDWARE)
    lost = _block_max((decoded(new, FMT, HARDWARE) != value).to(tl.int32), 32, 32)  # of a NaN or Inf too
    keep = (lost != 0) | (byte == 255)
    new = tl.where(_spread(keep.to(tl.int32), 32, 32) != 0, code, new)
    tl.store(o_ptr + rows * PITCH + cols, new, mask=here)
    tl.store(t_ptr + pm.to(tl.int64) * width + s_cols, tl.where(keep, byte, highest).to(tl.uint8), mask=s_cols < width)


def align(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q, scale)`` of exactly the same values, for float8 ``q[R, C]`` under uint8 scales of 32x32 blocks, in any
    strides. Elements are contiguous along C, rows start at multiples of 16 bytes.

    **Numerics.** No value changes but the sign and payload of NaN under a byte that is not 255; scales of blocks of
    zeros may be any but 255.
    """
    (R, C), pitch = q.shape, -(-q.shape[1] // 16) * 16
    codes, bytes_ = q.view(torch.uint8), scale.view(torch.uint8)
    out = torch.empty((R, pitch), dtype=torch.uint8, device=q.device)
    new_scale = torch.empty((-(-R // 32), -(-C // 32)), dtype=torch.uint8, device=q.device)
    constants = {"GROUP": GROUP, "FMT": FORMAT_CODES[q.dtype], "HARDWARE": hardware(q.device)}
    ints = (R, C, pitch, *codes.stride(), *bytes_.stride())
    launch(
        _align_kernel,
        (ints, tuple(constants.values()), aligned(codes, bytes_)),
        (-(-C // (32 * GROUP)), -(-R // 32), 1),
        (codes, bytes_, out, new_scale, *ints),
        constants,
        q.device,
        num_warps=1,
    )
    return out[:, :C].view(q.dtype), new_scale
