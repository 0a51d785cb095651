"""One scale for several neighbouring blocks of a quantised tensor, in plain Triton and one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import FORMATS, encode
from ._launch import aligned, launch, triton_why_not
from .dequantize_triton import decoded
from .quantize_triton import hardware, readable, three_dims

__all__ = ["recoalesce", "why_not"]


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


@triton.jit
def _block_max(x, RB: tl.constexpr, CB: tl.constexpr):
    """Maximum of each block of ``RB`` rows by ``CB`` columns of an int32 tile."""
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    if CB > 1:
        x = tl.max(tl.reshape(x, (BM, BK // CB, CB)), axis=2)
    if RB > 1:
        x = tl.max(tl.reshape(x, (BM // RB, RB, BK // CB)), axis=1)
    return x


@triton.jit
def _spread(x, RB: tl.constexpr, CB: tl.constexpr):
    """Each entry of a tile repeated over ``RB`` rows and ``CB`` columns."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :, None], (M, RB, N, CB)), (M * RB, N * CB))


@triton.jit
def _recoalesce_kernel(
    q_ptr, s_ptr, o_ptr, t_ptr, R, C, PITCH, q_b, q_r, q_c, s_b, s_r, s_c,
    BM: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, NRB: tl.constexpr, NCB: tl.constexpr,
    FMT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BK]`` of whole new blocks. Output: rows of ``PITCH`` bytes, scales with rows running fastest."""
    tiles_k = tl.cdiv(PITCH, BK)
    tiles = tl.cdiv(R, BM) * tiles_k
    pid = tl.program_id(0)
    b = (pid // tiles).to(tl.int64)
    pm, pk = (pid % tiles) // tiles_k, pid % tiles_k
    rows = (pm * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = (pk * BK + tl.arange(0, BK)).to(tl.int64)[None, :]
    s_rows = (pm * (BM // RB) + tl.arange(0, BM // RB)).to(tl.int64)[:, None]
    s_cols = (pk * (BK // CB) + tl.arange(0, BK // CB)).to(tl.int64)[None, :]
    inside = (s_rows < tl.cdiv(R, RB)) & (s_cols < tl.cdiv(C, CB))
    code = tl.load(q_ptr + b * q_b + rows * q_r + cols * q_c, mask=(rows < R) & (cols < C), other=0)
    byte = tl.load(s_ptr + b * s_b + s_rows * s_r + s_cols * s_c, mask=inside, other=0).to(tl.int32)

    magnitude = code.to(tl.int32) & 0x7F
    empty = (_block_max(magnitude, RB, CB) == 0) & (byte != 255)
    highest = _block_max(tl.where(empty, 0, byte), NRB // RB, NCB // CB)
    # 64 binades down every element is zero, and a float32 holds all powers up to there.
    down = tl.minimum(tl.maximum(_spread(highest, NRB // RB, NCB // CB) - byte, 0), 64)
    factor = ((127 - down) << 23).to(tl.float32, bitcast=True)
    new = encode(decoded(code, FMT, HARDWARE) * _spread(factor, RB, CB), FMT, HARDWARE)
    if FMT == 1:
        new = tl.where(magnitude == 0x7C, code, new)  # Inf stays, where the cast would saturate
    new = tl.where(_spread(highest, NRB, NCB) == 255, 0x7F, new)
    new = tl.where(cols < C, new, 0).to(tl.uint8)  # padding is zero
    tl.store(o_ptr + (b * R + rows) * PITCH + cols, new, mask=(rows < R) & (cols < PITCH))

    t_rows = (pm * (BM // NRB) + tl.arange(0, BM // NRB)).to(tl.int64)[:, None]
    t_cols = (pk * (BK // NCB) + tl.arange(0, BK // NCB)).to(tl.int64)[None, :]
    height, width = tl.cdiv(R, NRB), tl.cdiv(C, NCB)
    t_at = t_ptr + (b * width + t_cols) * height + t_rows
    tl.store(t_at, highest.to(tl.uint8), mask=(t_rows < height) & (t_cols < width))


def recoalesce(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    new_block: tuple[int, int],
    fmt: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, scale bytes as uint8)`` with one scale for each ``new_block`` (rows, columns) instead of each
    ``block``: the bits of ``mxfp8.reference.recoalesce``, where the contract is.

    Layout as the quantisation kernels write it: elements in the memory order of ``qdata``, each column of a
    column-major tensor padded to a multiple of 16 bytes; scales with the other dimension running fastest.
    """
    if new_block[0] % block[0] or new_block[1] % block[1]:
        raise ValueError(f"blocks of {block} do not fill blocks of {new_block}: both extents must be multiples")
    if qdata.ndim >= 2 and qdata.stride(-1) != 1 and qdata.stride(-2) == 1:
        q, s = _recoalesce(qdata.mT, scale.mT, block[::-1], new_block[::-1], fmt, 16)
        return q.mT, s.mT
    return _recoalesce(qdata, scale, block, new_block, fmt, 1)


def _recoalesce(
    qdata: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], new_block: tuple[int, int], fmt: Any, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For rows in memory; ``align`` is what the pitch of the output's rows is a multiple of."""
    codes, bytes_ = readable(qdata.view(torch.uint8)), readable(scale.view(torch.uint8))
    (b, r, c), q_strides = three_dims(codes.shape, codes.stride())
    _, s_strides = three_dims(bytes_.shape, bytes_.stride())
    pitch, (rb, cb), (nrb, ncb) = -(-c // align) * align, block, new_block
    out = torch.empty((*qdata.shape[:-1], pitch), dtype=torch.uint8, device=qdata.device)
    new_scale = torch.empty((b, -(-c // ncb), -(-r // nrb)), dtype=torch.uint8, device=qdata.device)
    elements, scales = out[..., :c].view(fmt.dtype), _as_scales(new_scale, qdata)
    if qdata.numel() == 0:
        return elements, scales.zero_()
    bm, bk = _tile(nrb, ncb, r, pitch)
    constants = {
        "BM": bm, "BK": bk, "RB": rb, "CB": cb, "NRB": nrb, "NCB": ncb, "FMT": FORMATS[fmt.name],
        "HARDWARE": hardware(qdata.device),
    }  # fmt: skip
    launch(
        _recoalesce_kernel,
        (b, r, c, pitch, q_strides, s_strides, tuple(constants.values()), aligned(codes, bytes_)),
        (b * -(-r // bm) * -(-pitch // bk), 1, 1),
        (codes, bytes_, out, new_scale, r, c, pitch, *q_strides, *s_strides),
        constants,
        qdata.device,
        num_warps=8 if bm * bk > 4096 else 4,
    )
    return elements, scales


def _as_scales(new_scale: torch.Tensor, qdata: torch.Tensor) -> torch.Tensor:
    """``[batch, columns, rows]`` of blocks as the scales of ``qdata``: ``[..., rows, columns]``."""
    if qdata.ndim == 1:
        return new_scale[0, :, 0]
    return new_scale.mT.unflatten(0, qdata.shape[:-2]) if qdata.ndim > 2 else new_scale[0].mT


def _tile(nrb: int, ncb: int, r: int, c: int) -> tuple[int, int]:
    """``(BM, BK)``: whole new blocks, about 4096 elements."""
    bk = max(ncb, min(128, triton.next_power_of_2(c)))
    return max(nrb, min(max(1, 4096 // bk), triton.next_power_of_2(r))), bk
