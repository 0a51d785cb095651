"""E8M0 scales in the tiled form that cuBLAS and Blackwell's tensor cores read, and back: exact inverses.

``linear``
    ``[..., rows, columns]``: one byte for each row of the matrix and each 32 elements along the contraction axis.
``tiled``
    ``[..., tiles * 512]``: tiles of 128 rows by 4 columns, one after the other along a row of tiles; byte (r, c) of a
    tile at ``(r % 32) * 16 + (r // 32) * 4 + c``. Bytes that stand for no scale are zero.
``tiled, jagged``
    Rows of many sequences, each of which starts a new row of tiles, so that a product over one sequence finds whole
    tiles of its own. The elements stay unpadded. Nothing here waits for the device: the result has room for the
    largest number of tiles that so many rows and sequences can need.

Everything exists twice with the same bytes: in plain torch (``*_torch``), and as a Triton kernel, which functions
without that suffix take where it can run. Scales are uint8 or float8_e8m0fnu, of any strides; results are uint8.

Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import aligned, launch, triton_why_not
from .quantize_triton import readable, three_dims

__all__ = [
    "from_tiled",
    "from_tiled_jagged",
    "from_tiled_jagged_torch",
    "from_tiled_torch",
    "jagged_tiles",
    "tile_starts",
    "tiled_size",
    "to_tiled",
    "to_tiled_jagged",
    "to_tiled_jagged_torch",
    "to_tiled_torch",
    "why_not",
]

ROWS, COLUMNS = 128, 4
TILE = ROWS * COLUMNS


def why_not(kind: str) -> str | None:
    """The reason why these kernels cannot run on a device type, or None."""
    return triton_why_not(kind)


def tiled_size(rows: int, columns: int) -> int:
    """Bytes of the tiled form of one matrix of scales."""
    return -(-rows // ROWS) * -(-columns // COLUMNS) * TILE


def jagged_tiles(rows: int, sequences: int) -> int:
    """The largest number of rows of tiles that ``rows`` rows in so many sequences can take."""
    return (rows + (ROWS - 1) * sequences) // ROWS


def tile_starts(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """int32 ``[sequences + 1]``: each sequence's first row of tiles, and how many there are in all."""
    tiles = (cu_seqlens.diff() + (ROWS - 1)) // ROWS
    return torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).to(torch.int32)


def to_tiled(scale: torch.Tensor) -> torch.Tensor:
    """The tiled form, uint8 ``[..., tiles * 512]``, of linear scales ``[..., rows, columns]``."""
    if why_not(scale.device.type) is not None:
        return to_tiled_torch(scale)
    rows, columns = scale.shape[-2:]
    out = torch.empty((*scale.shape[:-2], tiled_size(rows, columns)), dtype=torch.uint8, device=scale.device)
    _copy(scale.view(torch.uint8), out, -(-rows // ROWS), None, True)
    return out


def from_tiled(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of :func:`to_tiled`: uint8 ``[..., rows, columns]``, contiguous. ValueError if the size does not fit."""
    _check_size(tiled, tiled_size(rows, columns), f"{rows} by {columns} scales")
    if why_not(tiled.device.type) is not None:
        return from_tiled_torch(tiled, rows, columns)
    out = torch.empty((*tiled.shape[:-1], rows, columns), dtype=torch.uint8, device=tiled.device)
    _copy(out, tiled.view(torch.uint8).contiguous(), -(-rows // ROWS), None, False)
    return out


def to_tiled_jagged(scale: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(tiled, starts)`` of the scales ``[rows, columns]`` of sequences that follow each other.

    Args:
        scale: linear scales; the scaled axis is the last one, so that rows belong to one sequence each.
        cu_seqlens: int32 or int64 ``[sequences + 1]``, where each sequence begins, and the end of the last; not
            decreasing, within ``rows``. It stays on its device and is not checked: that would stall the stream.

    Returns:
        uint8 of ``jagged_tiles(rows, sequences)`` rows of tiles, zero past the last sequence, and
        :func:`tile_starts`: sequence s has the rows of tiles ``starts[s]..starts[s + 1]``.
    """
    if why_not(scale.device.type) is not None:
        return to_tiled_jagged_torch(scale, cu_seqlens)
    tiles, starts = jagged_tiles(scale.shape[0], cu_seqlens.shape[0] - 1), tile_starts(cu_seqlens)
    size = tiles * tiled_size(ROWS, scale.shape[1])
    out = torch.empty(size, dtype=torch.uint8, device=scale.device)
    _copy(scale.view(torch.uint8), out, tiles, _row_ranges(cu_seqlens, starts, tiles), True)
    return out, starts


def from_tiled_jagged(tiled: torch.Tensor, cu_seqlens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of :func:`to_tiled_jagged`: uint8 ``[rows, columns]``; rows of no sequence are zero."""
    tiles = jagged_tiles(rows, cu_seqlens.shape[0] - 1)
    _check_size(tiled, tiles * tiled_size(ROWS, columns), f"{rows} by {columns} scales in these sequences")
    if why_not(tiled.device.type) is not None:
        return from_tiled_jagged_torch(tiled, cu_seqlens, rows, columns)
    out = torch.zeros((rows, columns), dtype=torch.uint8, device=tiled.device)  # not every row is written
    ranges = _row_ranges(cu_seqlens, tile_starts(cu_seqlens), tiles)
    _copy(out, tiled.view(torch.uint8).contiguous(), tiles, ranges, False)
    return out


# The same in plain torch


def to_tiled_torch(scale: torch.Tensor) -> torch.Tensor:
    """:func:`to_tiled` in plain torch."""
    *lead, rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
    split = padded.reshape(*lead, -(-rows // ROWS), 4, 32, -(-columns // COLUMNS), COLUMNS)
    return split.transpose(-4, -2).reshape(*lead, tiled_size(rows, columns))


def from_tiled_torch(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """:func:`from_tiled` in plain torch."""
    _check_size(tiled, tiled_size(rows, columns), f"{rows} by {columns} scales")
    lead, down, across = tiled.shape[:-1], -(-rows // ROWS), -(-columns // COLUMNS)
    split = tiled.view(torch.uint8).reshape(*lead, down, across, 32, 4, COLUMNS)
    whole = split.transpose(-4, -2).reshape(*lead, down * ROWS, across * COLUMNS)
    return whole[..., :rows, :columns].contiguous()


def to_tiled_jagged_torch(scale: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`to_tiled_jagged` in plain torch: spread the rows over whole tiles, then tile the matrix."""
    tiles, starts = jagged_tiles(scale.shape[0], cu_seqlens.shape[0] - 1), tile_starts(cu_seqlens)
    first, stop = _row_ranges(cu_seqlens, starts, tiles)
    rows = (first[:, None] + torch.arange(ROWS, device=scale.device)).flatten()
    inside = rows < stop.repeat_interleave(ROWS)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, 0, 0, 1))  # a row of zeros, for padding
    return to_tiled_torch(padded[torch.where(inside, rows, scale.shape[0])]), starts


def from_tiled_jagged_torch(tiled: torch.Tensor, cu_seqlens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """:func:`from_tiled_jagged` in plain torch."""
    tiles = jagged_tiles(rows, cu_seqlens.shape[0] - 1)
    _check_size(tiled, tiles * tiled_size(ROWS, columns), f"{rows} by {columns} scales in these sequences")
    first, stop = _row_ranges(cu_seqlens, tile_starts(cu_seqlens), tiles)
    at = (first[:, None] + torch.arange(ROWS, device=tiled.device)).flatten()
    padded = tiled.new_zeros((rows + 1, columns), dtype=torch.uint8)  # its last row takes the padding
    padded[torch.where(at < stop.repeat_interleave(ROWS), at, rows)] = from_tiled_torch(tiled, tiles * ROWS, columns)
    return padded[:rows].contiguous()


def _row_ranges(cu_seqlens: torch.Tensor, starts: torch.Tensor, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of tiles: its first row of the matrix, and where its sequence stops (0 past the last sequence)."""
    index = torch.arange(tiles, device=starts.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts[1:].contiguous(), index, right=True)
    past = sequence == starts.shape[0] - 1
    sequence = torch.where(past, 0, sequence)
    first = cu_seqlens[sequence].to(torch.int64) + ROWS * (index - starts[sequence])
    return torch.where(past, 0, first), torch.where(past, 0, cu_seqlens[1:][sequence].to(torch.int64))


def _check_size(tiled: torch.Tensor, size: int, what: str) -> None:
    if tiled.shape[-1] != size:
        raise ValueError(f"tiled scales have {tiled.shape[-1]} bytes; those of {what} have {size}")


# The kernel


@triton.jit
def tiled_offset(rows, cols):
    """Where in its tile the byte of (row, column) lies."""
    return (rows % 32) * 16 + (rows % 128) // 32 * 4 + cols % 4


@triton.jit
def _copy_kernel(
    linear_ptr, tiled_ptr, first_ptr, stop_ptr, R, C, TILES, l_b, l_r, l_c,
    TC: tl.constexpr, JAGGED: tl.constexpr, TO_TILED: tl.constexpr,
):  # fmt: skip
    """``TC`` tiles that follow each other in a row of tiles, in one direction or the other."""
    groups = tl.cdiv(C, 4 * TC)
    pid = tl.program_id(0)
    b = (pid // (TILES * groups)).to(tl.int64)
    tile, group = (pid // groups) % TILES, pid % groups
    if JAGGED:
        first, stop = tl.load(first_ptr + tile), tl.load(stop_ptr + tile)
    else:
        first, stop = (tile * 128).to(tl.int64), R
    down = tl.arange(0, 128)[:, None]
    rows, cols = first + down, (group * 4 * TC + tl.arange(0, 4 * TC))[None, :]
    inside = (rows < stop) & (cols < C)
    linear_at = linear_ptr + b * l_b + rows * l_r + cols.to(tl.int64) * l_c
    across = tl.cdiv(C, 4)
    tiled_at = tiled_ptr + ((b * TILES + tile) * across + cols // 4) * 512 + tiled_offset(down, cols)
    if TO_TILED:
        tl.store(tiled_at, tl.load(linear_at, mask=inside, other=0), mask=cols < across * 4)
    else:
        tl.store(linear_at, tl.load(tiled_at, mask=inside, other=0), mask=inside)


def _copy(
    linear: torch.Tensor,
    tiled: torch.Tensor,
    tiles: int,
    ranges: tuple[torch.Tensor, torch.Tensor] | None,
    to_tiled: bool,
) -> None:
    """Launch the kernel over ``tiles`` rows of tiles for each matrix."""
    if tiled.numel() == 0:
        return
    linear = readable(linear)
    (b, r, c), strides = three_dims(linear.shape, linear.stride())
    first, stop = ranges if ranges is not None else (tiled, tiled)
    constants = {"TC": 4, "JAGGED": ranges is not None, "TO_TILED": to_tiled}
    launch(
        _copy_kernel,
        (b, r, c, tiles, strides, tuple(constants.values()), aligned(linear, tiled, first, stop)),
        (b * tiles * -(-c // 16), 1, 1),
        (linear, tiled, first, stop, r, c, tiles, *strides),
        constants,
        tiled.device,
        num_warps=4,
    )
