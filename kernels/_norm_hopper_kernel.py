"""RMSNorm and LayerNorm with MX casts, for rows of any width: the input crosses the second-level cache once (Gluon).

A row's statistics need all of the row, a block of a column needs 32 rows or more, and no multiprocessor holds 32 whole
rows of 4096. So the ``PARTS`` programs of a strip of rows each keep their part of it in shared memory, and exchange
statistics through global memory before they cast::

    part 0    | copy tiles to shared memory, moments of its columns | moments -> memory, wait for all | cast tiles
    part 1    | copy tiles to shared memory, moments of its columns | moments -> memory, wait for all | cast tiles

Three or so programs share a multiprocessor, so that one casts while others load or wait. The wait ends: programs start
in the order of their numbers (as decoupled look-back scans rely on as well), so that of all the strips that have begun
only the last can lack parts, and a strip has fewer parts than the GPU runs programs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import triton

from ._gluon import async_copy, barrier, gl, gluon
from .activation_quantize_hopper import inside_only, load_row, load_tile, store_copies, store_rows, store_tile
from .norm_quantize_triton import inverse_root
from .quantize_hopper import widen


@gluon.jit
def _fetch(
    x_ptr, held, pm, first, R, C, x_r, TILES: gl.constexpr, WHOLE: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Start to copy tiles ``first``, ``first + 1``, ... of a strip into shared memory, each a group of its own; zeros
    outside."""
    BM: gl.constexpr = held.type.shape[1]
    BK: gl.constexpr = held.type.shape[2]
    row = pm * BM
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    where = x_ptr + row.to(gl.int64) * x_r + first * BK + (rows[:, None] * x_r + cols[None, :])
    for j in gl.static_range(TILES):
        if WHOLE:
            async_copy.async_copy_global_to_shared(held.index(j), where + j * BK)
        else:
            inside = (row + rows < R)[:, None] & ((first + j) * BK + cols < C)[None, :]
            async_copy.async_copy_global_to_shared(held.index(j), where + j * BK, mask=inside)
        async_copy.commit_group()


@gluon.jit
def _moments(
    held, r_ptr, h_ptr, b, pm, first, R, C, r_r, TILES: gl.constexpr, LAYER: gl.constexpr, RESIDUAL: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """``(mean, sum of squared deviations)`` of each row over the tiles of a part; without ``LAYER`` deviations from 0.
    With ``RESIDUAL`` the tiles first become ``x + residual``, in their own dtype, which is also stored."""
    BM: gl.constexpr = held.type.shape[1]
    BK: gl.constexpr = held.type.shape[2]
    each = gl.zeros([BM, BK], gl.float32, L)
    for j in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - j)
        low = held.index(j).load(L)
        if RESIDUAL:
            r = load_tile(r_ptr, pm, first + j, R, C, r_r, 0, BM, BK, WHOLE, L, "")
            low = (low.to(gl.float32) + r.to(gl.float32)).to(low.dtype)
            store_tile(low, h_ptr, b, pm, first + j, R, C, 0, C, WHOLE, L)
            held.index(j).store(low)
        h = widen(low)
        if LAYER:
            each += h
        else:
            each = gl.fma(h, h, each)
    total = gl.sum(each, axis=1)
    if LAYER:
        n = gl.minimum(C - first * BK, TILES * BK).to(gl.float32)
        mean = total / n
        each = gl.zeros([BM, BK], gl.float32, L)
        for j in gl.static_range(TILES):
            deviation = widen(held.index(j).load(L)) - gl.expand_dims(mean, 1)
            deviation = inside_only(deviation, pm, first + j, R, C, WHOLE, L)
            each = gl.fma(deviation, deviation, each)
        return mean, gl.sum(each, axis=1)
    else:
        return total, total


@gluon.jit
def _exchanged(
    mean, squares, part_ptr, count_ptr, next_ptr, strip, part, C, HALF, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    LAYER: gl.constexpr,
):  # fmt: skip
    """Moments of whole rows from those of this part, ``WIDTH`` columns wide (the last may be narrower), and of the
    others (Chan, Golub, LeVeque 1979: no cancellation, whatever the mean), in the same order in all of them.

    ``part_ptr``: float32 ``[strips, PARTS, 2, BM]``. ``count_ptr``: a zero for each strip: how many parts have stored
    theirs. ``next_ptr``: ints that become zeros, from 0 and from ``HALF`` on."""
    BM: gl.constexpr = squares.shape[0]
    rows = gl.arange(0, BM, layout=squares.type.layout)
    at = part_ptr + strip.to(gl.int64) * (PARTS * 2 * BM) + rows
    gl.store(at + part * (2 * BM), squares)
    if LAYER:
        gl.store(at + part * (2 * BM) + BM, mean)
    barrier()  # all threads' moments are stored before the count says so
    count = gl.atomic_add(count_ptr + strip, 1, sem="acq_rel", scope="gpu") + 1
    while count < PARTS:  # one thread looks for all: each look empties the first-level cache
        count = gl.atomic_add(count_ptr + strip, 0, sem="acquire", scope="gpu")
    if part == 0:
        gl.store(next_ptr + strip, 0)
        gl.store(next_ptr + strip + HALF, 0)
    # Past the first-level cache, which does not see what other multiprocessors write.
    squares = gl.load(at, cache_modifier=".cg")
    if LAYER:
        mean = gl.load(at + BM, cache_modifier=".cg")
    for p in gl.static_range(1, PARTS):
        more = gl.load(at + p * (2 * BM), cache_modifier=".cg")
        if LAYER:
            seen = WIDTH * p
            n = gl.minimum(C - seen, WIDTH)
            delta = gl.load(at + p * (2 * BM) + BM, cache_modifier=".cg") - mean
            share = n.to(gl.float32) / (seen + n).to(gl.float32)
            more += delta * delta * (seen * share)
            mean += delta * share
        squares += more
    return mean, squares


@gluon.jit
def _normed(
    h, mean, rstd, w_ptr, bias_ptr, pm, k, R, C, LAYER: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
    WHOLE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """The normalised float32 values of tile ``(pm, k)``, zero outside."""
    y = widen(h)
    if LAYER:
        y -= gl.expand_dims(mean, 1)
    y *= gl.expand_dims(rstd, 1)
    if WEIGHT:
        y *= load_row(w_ptr, k, C, 0, h.shape[1], L)
    if BIAS:
        y += load_row(bias_ptr, k, C, 0, h.shape[1], L)
    return inside_only(y, pm, k, R, C, WHOLE, L)


@gluon.jit
def forward_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr, part_ptr, count_ptr, next_ptr,
    q_ptr, s_ptr, t_ptr, u_ptr,
    R, C, R_PAD, HALF, x_b, x_r, r_b, r_r, eps,
    BM: gl.constexpr, BK: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LAYER: gl.constexpr,
    RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr, HP: gl.constexpr, ROUND: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, RB: gl.constexpr, CB: gl.constexpr, TRB: gl.constexpr,
    TCB: gl.constexpr, FMT: gl.constexpr, RULE: gl.constexpr, SATFINITE: gl.constexpr, HARDWARE: gl.constexpr,
    WHOLE: gl.constexpr, BATCHED: gl.constexpr, LS: gl.constexpr, L1: gl.constexpr, LA: gl.constexpr,
    LB: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Program ``strip * PARTS + part``: ``TILES`` tiles ``[BM, BK]`` of a strip of rows, kept in layout ``HELD``."""
    strip = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    pm = strip
    b = (strip * 0).to(gl.int64)
    if BATCHED:
        strips = gl.cdiv(R, BM)
        b = (strip // strips).to(gl.int64)
        pm = strip % strips
    first = part * TILES
    held = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [TILES, BM, BK], HELD)
    _fetch(x_ptr + b * x_b, held, pm, first, R, C, x_r, TILES, WHOLE, LS)
    mean, squares = _moments(held, r_ptr + b * r_b, h_ptr, b, pm, first, R, C, r_r, TILES, LAYER, RESIDUAL, WHOLE, LS)
    # One row a thread: a correctly rounded root takes many instructions.
    mean, squares = gl.convert_layout(mean, L1), gl.convert_layout(squares, L1)
    if PARTS > 1:
        mean, squares = _exchanged(
            mean, squares, part_ptr, count_ptr, next_ptr, strip, part, C, HALF, PARTS, TILES * BK, LAYER
        )
    rstd = inverse_root(squares / C, eps)
    if part == 0:
        rows = pm * BM + gl.arange(0, BM, layout=L1)
        at = b * R + rows.to(gl.int64)
        gl.store(rstd_ptr + at, rstd, mask=rows < R)
        if LAYER:
            gl.store(mean_ptr + at, mean, mask=rows < R)
    tiles = gl.minimum(TILES, gl.cdiv(C, BK) - first)
    # One way after the other: together they would need the registers of both.
    if ROWS or HP:
        mean_a = gl.convert_layout(mean, gl.SliceLayout(1, LA))
        rstd_a = gl.convert_layout(rstd, gl.SliceLayout(1, LA))
        for j in range(tiles):
            h = held.index(j).load(LA)
            y = _normed(h, mean_a, rstd_a, w_ptr, bias_ptr, pm, first + j, R, C, LAYER, WEIGHT, BIAS, WHOLE, LA)
            if HP or ROUND:
                low = y.to(y_ptr.dtype.element_ty)
                if HP:
                    store_tile(low, y_ptr, b, pm, first + j, R, C, 0, C, WHOLE, LA)
                if ROUND:
                    y = low.to(gl.float32)
            if ROWS:
                store_rows(y, q_ptr, s_ptr, b, pm, first + j, R, C, 0, C, RB, CB, FMT, RULE, SATFINITE, WHOLE, LA)
    if COLUMNS:
        mean_b = gl.convert_layout(mean, gl.SliceLayout(1, LB))
        rstd_b = gl.convert_layout(rstd, gl.SliceLayout(1, LB))
        for j in range(tiles):
            h = held.index(j).load(LB)
            y = _normed(h, mean_b, rstd_b, w_ptr, bias_ptr, pm, first + j, R, C, LAYER, WEIGHT, BIAS, WHOLE, LB)
            if ROUND:
                y = y.to(y_ptr.dtype.element_ty).to(gl.float32)
            store_copies(
                y, y, q_ptr, s_ptr, t_ptr, u_ptr, b, pm, first + j, R, C, R_PAD, 0, C, False, RB, CB, TRB, TCB, FMT,
                RULE, SATFINITE, WHOLE, LA, LB,
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
