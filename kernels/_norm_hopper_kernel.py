"""RMSNorm and LayerNorm with MX casts along columns or both ways, for rows of any width: memory is read once (Gluon).

A row's statistics need all of the row, a block of a column needs 32 rows or more, and no multiprocessor holds 32 whole
rows of 4096. So there are two kinds of programs in one grid, on the same strips of rows (``y`` of the grid)::

    y    | cast the tiles of strip y - LAG              | statistics of the rows of strip y
    y+1  | cast the tiles of strip y + 1 - LAG          | statistics of the rows of strip y + 1

What the second kind reads, the first kind finds again in the second-level cache: ``LAG`` strips fit there, and are more
than the GPU works on at once, so that statistics are nearly always there when a cast asks for them. Where they are not,
it waits. That ends: programs start in the order of their numbers (as decoupled look-back scans rely on as well), and
nothing that a program waits for has a higher number.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import triton

from ._gluon import gl, gluon
from .activation_quantize_hopper import inside_only, load_row, load_tile, store_copies, store_tile
from .norm_quantize_triton import add_moments, inverse_root
from .quantize_hopper import widen


@gluon.jit
def _statistics(
    x_ptr, r_ptr, h_ptr, mean_ptr, rstd_ptr, b, pm, R, C, x_r, r_r, eps, SR: gl.constexpr, SK: gl.constexpr,
    UNROLL: gl.constexpr, LAYER: gl.constexpr, RESIDUAL: gl.constexpr, KEEP: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Of ``SR`` rows, in tiles of ``SK`` columns; with ``RESIDUAL`` also ``h = x + residual`` in the dtype of ``x``."""
    rows = pm * SR + gl.arange(0, SR, layout=gl.SliceLayout(1, L))
    mean = gl.zeros([SR], gl.float32, gl.SliceLayout(1, L))
    squares = gl.zeros([SR], gl.float32, gl.SliceLayout(1, L))
    each = gl.zeros([SR, SK], gl.float32, L)
    for first in range(0, gl.cdiv(C, SK), UNROLL):
        for j in gl.static_range(UNROLL):
            k = first + j
            low = load_tile(x_ptr, pm, k, R, C, x_r, 0, SR, SK, WHOLE, L, KEEP)
            if RESIDUAL:
                r = load_tile(r_ptr, pm, k, R, C, r_r, 0, SR, SK, WHOLE, L, "")
                low = (low.to(gl.float32) + r.to(gl.float32)).to(low.dtype)
                store_tile(low, h_ptr, b, pm, k, R, C, 0, C, WHOLE, L)
            h = widen(low)
            if LAYER:
                cols = k * SK + gl.arange(0, SK, layout=gl.SliceLayout(0, L))
                n = gl.minimum(C - k * SK, SK)
                if n > 0:
                    inside = (rows < R)[:, None] & (cols < C)[None, :]
                    seen = (k * SK).to(gl.float32)
                    mean, squares = add_moments(mean, squares, seen, h, inside, n.to(gl.float32))
            else:
                each = gl.fma(h, h, each)
    if not LAYER:
        squares = gl.sum(each, axis=1)
    at = b * R + rows.to(gl.int64)
    gl.store(rstd_ptr + at, inverse_root(squares / C, eps), mask=rows < R)
    if LAYER:
        gl.store(mean_ptr + at, mean, mask=rows < R)


@gluon.jit
def _await(count_ptr, target):
    """Until the int that ``count_ptr`` points to is ``target``. One thread looks for all of the program's: each look
    empties the first-level cache."""
    count = gl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    while count < target:
        count = gl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")


@gluon.jit
def _normed(
    h, w_ptr, bias_ptr, mean_ptr, rstd_ptr, b, pm, k, R, C, LAYER: gl.constexpr, WEIGHT: gl.constexpr,
    BIAS: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """The normalised float32 values of tile ``(pm, k)``, zero outside. Statistics are read past the first-level cache,
    which does not see what other multiprocessors write."""
    rows = pm * h.shape[0] + gl.arange(0, h.shape[0], layout=gl.SliceLayout(1, L))
    at = b * R + rows.to(gl.int64)
    y = widen(h)
    if LAYER:
        y -= gl.expand_dims(gl.load(mean_ptr + at, mask=rows < R, other=0.0, cache_modifier=".cg"), 1)
    y *= gl.expand_dims(gl.load(rstd_ptr + at, mask=rows < R, other=0.0, cache_modifier=".cg"), 1)
    if WEIGHT:
        y *= load_row(w_ptr, k, C, 0, h.shape[1], L)
    if BIAS:
        y += load_row(bias_ptr, k, C, 0, h.shape[1], L)
    return inside_only(y, pm, k, R, C, WHOLE, L)


@gluon.jit
def forward_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr, count_ptr, next_ptr, q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, STRIPS, LAG, HALF, x_b, x_r, r_b, r_r, eps,
    BM: gl.constexpr, BK: gl.constexpr, SR: gl.constexpr, SK: gl.constexpr, UNROLL: gl.constexpr, LAYER: gl.constexpr,
    RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr,
    TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr,
    WHOLE: gl.constexpr, BATCHED: gl.constexpr, KEEP: gl.constexpr, DROP: gl.constexpr,
    LS: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """``STRIPS`` strips of ``BM`` rows. Program ``(x, y)``: tile ``x`` of strip ``y - LAG``; after the last tile,
    statistics of ``SR`` rows of strip ``y``. ``count_ptr``: int32 ``[STRIPS]``, zeros: how many programs have stored
    statistics of a strip. ``next_ptr``: ints that become zeros, from 0 and from ``HALF`` on. ``KEEP``, ``DROP``: cache
    hints for what will be read again, and not again.
    """
    PARTS: gl.constexpr = BM // SR
    tiles = gl.cdiv(C, BK)
    k = gl.program_id(0)
    strip = gl.program_id(1)
    if k < tiles:
        strip -= LAG
    if strip < 0 or strip >= STRIPS:
        return
    pm = strip
    b = (strip * 0).to(gl.int64)
    if BATCHED:
        strips = gl.cdiv(R, BM)
        b = (strip // strips).to(gl.int64)
        pm = strip % strips
    if k >= tiles:
        part = pm * PARTS + (k - tiles)
        _statistics(
            x_ptr + b * x_b, r_ptr + b * r_b, h_ptr, mean_ptr, rstd_ptr, b, part, R, C, x_r, r_r, eps, SR, SK, UNROLL,
            LAYER, RESIDUAL, KEEP, WHOLE, LS,
        )  # fmt: skip
        gl.thread_barrier()  # all threads' statistics are stored before the count says so
        gl.atomic_add(count_ptr + strip, 1, sem="release", scope="gpu")
        gl.store(next_ptr + strip, 0)
        gl.store(next_ptr + strip + HALF, 0)
    else:
        if RESIDUAL:
            _await(count_ptr + strip, PARTS)
            low = load_tile(h_ptr + b * R * C, pm, k, R, C, C, 0, BM, BK, WHOLE, LA, DROP)
        else:
            low = load_tile(x_ptr + b * x_b, pm, k, R, C, x_r, 0, BM, BK, WHOLE, LA, DROP)
            _await(count_ptr + strip, PARTS)
        y = _normed(low, w_ptr, bias_ptr, mean_ptr, rstd_ptr, b, pm, k, R, C, LAYER, WEIGHT, BIAS, WHOLE, LA)
        if HP or ROUND:
            low = y.to(y_ptr.dtype.element_ty)
            if HP:
                store_tile(low, y_ptr, b, pm, k, R, C, 0, C, WHOLE, LA)
            if ROUND:
                y = low.to(gl.float32)
        if ROUND:
            z = widen(gl.convert_layout(low, LB))
        else:
            z = gl.convert_layout(y, LB)
        store_copies(
            y, z, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, k, R, C, R_PAD, 0, C, ROWS, RB, CB, TRB, TCB, FMT, RULE, SATFINITE,
            WHOLE, LA, LB,
        )  # fmt: skip


_zeros: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_lock = threading.Lock()


def room(strips: int) -> int:
    """How many counters are kept for so many strips: the next power of two."""
    power: int = triton.next_power_of_2(strips)
    return power


@contextlib.contextmanager
def zeros(strips: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``count_ptr`` and ``next_ptr`` for one launch on the current stream: counters that are zero, and those that the
    launch must make zero, for the one after it with as much room. A graph is launched again as it is, perhaps beside
    others, so that its zeros are its own and made by it."""
    size = room(strips)
    made = functools.partial(torch.zeros, 2, 2 * size, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        yield made().unbind()
        return
    where = size, device.index, torch.cuda.current_stream(device).cuda_stream
    with _lock:  # no other thread may launch between the look and the exchange
        counts, after = _zeros.get(where) or made().unbind()
        yield counts, after
        _zeros[where] = after, counts
