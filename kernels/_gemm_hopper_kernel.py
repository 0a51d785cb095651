"""The warp-specialised FP8 GEMM of :mod:`gemm_hopper`, in Gluon for sm_90a.

One persistent program per SM, and a ring of slots in shared memory, each 128 of K deep. A loader warp fills slots with
tiles of A and B by TMA, two scaler warps fill them with float32 factors, two or three consumer warpgroups empty them::

    loader     | wait empty[s] | TMA A, B -> slot s, signals full[s]                           | next slot
    scalers    | wait empty[s] | factors of slot s from scale bytes loaded one slot ahead      | next slot
    consumer   | (slot s is full) wgmma over 128 of K from zero -> partial; wait full[s + 1]
               | signal empty[s]; accumulator += partial * factor (float32)                    | next slot
               | in the last slot, before the wait: where is the next tile?
    epilogue   | + bias, cast, shared memory, TMA store; the store and the loader run into the next tile

A consumer owns one or two (``ROWS``) sub-tiles of 64 x 128 results, so that the program's tile is
``64 * ROWS * CONSUMERS`` by 128. Factors belong to rows where one scale byte of B holds for the tile's 128 columns
(``SIDES`` = 1), else to rows and to columns (2): the second kind costs a multiplication more for each result and slot.

Where A's scales reach over 256 of K, one partial sum takes a pair of slots (``PAIR`` = 2). B's scales then do too, or
they are those of 128x128 blocks, of which two in a row may differ (``MIXED``): the scalers see both bytes and leave a
word beside the factors that says whether they agree, and the consumers promote once or twice accordingly.

**Numerics.** FP8 wgmma keeps few bits while it accumulates (about 14), so a partial sum spans 128 of K, or 256 under
scales that hold for 256 on both sides (``MIXED``: that agree), and is then added to a float32 accumulator by one fused
multiply-add. Its factor, the product of both scales, is one float32
2**(a + b - 254), exact from 2**-149 to 2**127. Above that it is Inf, so that the result is Inf (NaN where the partial
sum is exactly 0); below, it is 0. Byte 255 makes it NaN.
"""

from __future__ import annotations

from ._gemm_hopper_epilogue import fetch, store
from ._gluon import gl, gluon, hopper

if hasattr(hopper, "tma"):
    tma, mbarrier = hopper.tma, hopper.mbarrier
    fence_async_shared = hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

BK = gl.constexpr(128)
"""Bytes of K in a slot of the ring: one row of the 128-byte swizzle."""


@gluon.jit
def _tile(unit, tiles_m, tiles_n, SPAN):
    """Tile ``unit`` of a path that goes down ``SPAN`` rows of tiles before it goes right: operands stay in L2."""
    per_span = SPAN * tiles_n
    first = (unit // per_span) * SPAN
    rows = min(tiles_m - first, SPAN)
    at = unit % per_span
    return first + at % rows, at // rows


@gluon.jit
def _tiles(shape, BM: gl.constexpr, GROUPED: gl.constexpr):
    """Rows and columns of tiles."""
    M, N = shape[0], shape[1]
    if GROUPED == 2:
        return gl.cdiv(M, BM) * shape[5], gl.cdiv(N, 128)
    elif GROUPED:
        return M // BM + shape[5] + 1, gl.cdiv(N, 128)  # each group, and the rows after the last, may end within a tile
    else:
        return gl.cdiv(M, BM), gl.cdiv(N, 128)


@gluon.jit
def _units(shape, BM: gl.constexpr, GROUPED: gl.constexpr):
    """How many units of work there are: tiles of the output, times parts of K."""
    tiles_m, tiles_n = _tiles(shape, BM, GROUPED)
    return tiles_m * tiles_n * shape[4]


@gluon.jit
def _place(unit, shape, BM: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr):
    """Of a unit of work: its first row, where rows end, its first column, the group whose matrix it takes (or if groups
    divide K the row of A that is its first), its slots of K ``[first, last)``, and which part of K that is. Every
    division here takes a hundred cycles or two."""
    M, _, K, SPAN, SPLIT, _, table_ptr = shape
    tiles_m, tiles_n = _tiles(shape, BM, GROUPED)
    chains = gl.cdiv(K, BK * PAIR)
    part = unit * 0
    first = part
    last = chains * PAIR
    if PARTS:
        part = unit // (tiles_m * tiles_n)
        unit -= part * (tiles_m * tiles_n)
        first = part * chains // SPLIT * PAIR
        last = (part + 1) * chains // SPLIT * PAIR
    tile_m, tile_n = _tile(unit, tiles_m, tiles_n, SPAN)
    if GROUPED == 2:
        entry = table_ptr + 5 * tile_m
        row, end, a_row = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        return row, end, tile_n * 128, a_row, gl.load(entry + 3), gl.load(entry + 4), part
    elif GROUPED:
        row = gl.load(table_ptr + 3 * tile_m)
        end = gl.load(table_ptr + 3 * tile_m + 1)
        group = gl.load(table_ptr + 3 * tile_m + 2)
        return row, end, tile_n * 128, group, first, gl.where(group < 0, first, last), part
    else:
        return tile_m * BM, M, tile_n * 128, 0, first, last, part


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The slot after this one, and the phase of its barriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _load(
    data, SUBS: gl.constexpr, STAGES: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The loader warp: tiles of A and B into the ring, in the order in which the consumers take them. What a tile is
    added to (``HOW.add``) is fetched into the second-level cache when all of its operands are on their way."""
    a_bufs, b_bufs, full, empty, a_desc, b_desc, output, shape = data
    slot = 0
    phase = 1
    for unit in range(gl.program_id(0), _units(shape, 64 * SUBS, GROUPED), gl.num_programs(0)):
        row, end, col, group, first, last, _ = _place(unit, shape, 64 * SUBS, PAIR, PARTS, GROUPED)
        b_row = group * shape[1] + col
        if GROUPED == 2:
            row = group
            b_row = col
        for k in range(first, last):
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (64 * SUBS + 128) * BK)
            for i in gl.static_range(SUBS):
                tma.async_copy_global_to_shared(a_desc, [row + 64 * i, k * BK], ready, a_bufs.index(slot * SUBS + i))
            tma.async_copy_global_to_shared(b_desc, [b_row, k * BK], ready, b_bufs.index(slot))
            slot, phase = _next(slot, phase, STAGES)
        if HOW.add:
            fetch(output, row, end, col, SUBS)


@gluon.jit
def _factor(a, b):
    """float32 2**(a + b - 254) of scale bytes as int32: Inf and zero beyond its range, NaN where a byte is 255."""
    exponent = a + b - 127
    bits = gl.where(exponent > 0, gl.minimum(exponent, 255) << 23, 0x400000 >> gl.minimum(-exponent, 31))
    bits = gl.where((a == 255) | (b == 255), 0x7FC00000, bits)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _b_bytes(base, at, sb_c, k, K, inside, SIDES: gl.constexpr, MIXED: gl.constexpr, B_K: gl.constexpr):
    """Scale bytes of B for slot ``k`` of K, and for the slot after it where that one may have another (``MIXED``)."""
    if SIDES == 1:
        first = gl.load(base + (at + k * BK // B_K * sb_c))
    else:
        first = gl.load(base + (at + k * BK // B_K * sb_c), mask=inside, other=127)
    second = first
    if MIXED:  # where K ends within the pair, its second half is zero and takes any scale
        second = gl.load(base + (at + gl.minimum(k + 1, (K - 1) // BK) * sb_c))
    return first, second


@gluon.jit
def _scale(
    data, SUBS: gl.constexpr, STAGES: gl.constexpr, SIDES: gl.constexpr, PAIR: gl.constexpr, MIXED: gl.constexpr,
    A_R: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """The scaler warps: scale bytes into factors, one slot (or pair of slots) ahead of its use."""
    f_bufs, g_bufs, t_bufs, full, empty, sa_ptr, sa_r, sa_c, sb_ptr, sb_g, sb_r, sb_c, shape = data
    N, K = shape[1], shape[2]
    BM: gl.constexpr = 64 * SUBS
    FACTORS: gl.constexpr = f_bufs.type.shape[1]
    row_layout: gl.constexpr = gl.BlockedLayout([FACTORS // 64], [32], [2], [0])
    col_layout: gl.constexpr = gl.BlockedLayout([2], [32], [2], [0])
    one_layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    rows = gl.arange(0, FACTORS, layout=row_layout)
    cols = gl.arange(0, 128, layout=col_layout)
    slot = 0
    phase = 1
    for unit in range(gl.program_id(0), _units(shape, BM, GROUPED), gl.num_programs(0)):
        row, end, col, group, first, last, _ = _place(unit, shape, BM, PAIR, PARTS, GROUPED)
        if GROUPED == 2:
            row = group
            end = shape[0]
        inside = (rows < BM) & (row + rows < end)
        b_base = sb_ptr
        if GROUPED == 1:
            b_base += gl.maximum(group, 0).to(gl.int64) * sb_g
        # Offsets inside a matrix of scales fit 32 bits, and take half the registers of pointers.
        a_at = (row + rows) // A_R * sa_r
        if SIDES == 1:
            b_inside = True
            b_at = col // 128 * sb_r
        else:
            b_inside = col + cols < N
            b_at = (col + cols) * sb_r
        a = gl.load(sa_ptr + (a_at + first * BK // A_K * sa_c), mask=inside, other=127)
        b, b_second = _b_bytes(b_base, b_at, sb_c, first, K, b_inside, SIDES, MIXED, B_K)
        for k in range(first, last, PAIR):
            k_next = gl.minimum(k + PAIR, last - PAIR)
            a_next = gl.load(sa_ptr + (a_at + k_next * BK // A_K * sa_c), mask=inside, other=127)
            b_next, b_next_second = _b_bytes(b_base, b_at, sb_c, k_next, K, b_inside, SIDES, MIXED, B_K)
            if PAIR == 2:
                mbarrier.wait(empty.index(slot), phase)
                if MIXED:
                    f_bufs.index(slot).store(_factor(a.to(gl.int32), b.to(gl.int32)))
                    t_bufs.index(slot).store(gl.full([1], (b == b_second).to(gl.int32), gl.int32, one_layout))
                mbarrier.arrive(full.index(slot))
                slot, phase = _next(slot, phase, STAGES)
            mbarrier.wait(empty.index(slot), phase)
            if SIDES == 1:
                f_bufs.index(slot).store(_factor(a.to(gl.int32), b_second.to(gl.int32)))
            else:
                f_bufs.index(slot).store(_factor(a.to(gl.int32), 127))
                g_bufs.index(slot).store(_factor(b.to(gl.int32), 127).to(gl.bfloat16))
            mbarrier.arrive(full.index(slot))
            a, b, b_second = a_next, b_next, b_next_second
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _consume(
    data, WHO: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SIDES: gl.constexpr,
    PAIR: gl.constexpr, MIXED: gl.constexpr, TMA_STORE: gl.constexpr, PARTS: gl.constexpr,
    GROUPED: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup ``WHO``: rows ``64 * ROWS * WHO`` and following of every tile."""
    a_bufs, b_bufs, c_bufs, f_bufs, g_bufs, t_bufs, full, empty, output, shape = data
    M, N = shape[0], shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_col: gl.constexpr = gl.SliceLayout(0, layout)
    one_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SUBS: gl.constexpr = ROWS * CONSUMERS
    A0: gl.constexpr = WHO * ROWS
    A1: gl.constexpr = A0 + ROWS - 1
    # The store of a consumer's other buffer, unless a group's end may have made that one a direct store.
    PENDING: gl.constexpr = 0 if GROUPED else ROWS - 1
    zero = gl.zeros([64, 128], gl.float32, layout)
    slot = 0
    phase = 0
    units = _units(shape, 64 * SUBS, GROUPED)
    place = _place(gl.program_id(0), shape, 64 * SUBS, PAIR, PARTS, GROUPED)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, end, col, _, first, last, part = place
        after = gl.minimum(unit + gl.num_programs(0), units - 1)
        acc0 = zero
        acc1 = zero
        mbarrier.wait(full.index(slot), phase, pred=first < last)
        for k in range(first, last, PAIR):
            here = slot
            b = b_bufs.index(here).permute([1, 0])
            if MIXED:  # do both halves of the pair have the same factors?
                together = gl.max(t_bufs.index(here).load(one_layout), 0) != 0
            p = warpgroup_mma(a_bufs.index(here * SUBS + A0), b, zero, use_acc=False, is_async=True)
            if PAIR == 2:
                before = here
                slot, phase = _next(slot, phase, STAGES)
                here = slot
                mbarrier.wait(full.index(here), phase)
                b = b_bufs.index(here).permute([1, 0])
                if MIXED:
                    if not together:
                        f = f_bufs.index(before).slice(A0 * 64, 64, 0).load(by_row)
                        half = warpgroup_mma_wait(0, deps=[p])
                        acc0 += half * f[:, None]
                    p = warpgroup_mma(a_bufs.index(here * SUBS + A0), b, p, use_acc=together, is_async=True)
                else:
                    p = warpgroup_mma(a_bufs.index(here * SUBS + A0), b, p, is_async=True)
                p = warpgroup_mma_wait(1, deps=[p])
                mbarrier.arrive(empty.index(before))
            # While the tensor cores run: this slot's factors (three consumers lack the registers for those of columns),
            # where the next tile is, and the next slot.
            f = f_bufs.index(here).slice(A0 * 64, 64, 0).load(by_row)
            if SIDES == 2 and CONSUMERS == 2:
                g = g_bufs.index(here).load(by_col)
            if k + PAIR >= last:
                place = _place(after, shape, 64 * SUBS, PAIR, PARTS, GROUPED)
            slot, phase = _next(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase, pred=k + PAIR < last)
            p = warpgroup_mma_wait(0, deps=[p])
            if SIDES == 2 and CONSUMERS == 3:
                g = g_bufs.index(here).load(by_col)
            if ROWS == 1:
                mbarrier.arrive(empty.index(here))
            if SIDES == 2:
                acc0 += p * (f[:, None] * g.to(gl.float32)[None, :])
            else:
                acc0 += p * f[:, None]
            if ROWS == 2:
                # Nothing is in flight: this keeps the compiler from starting the next product before the sum above is
                # done, which would need the registers of two partial sums.
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
                p = warpgroup_mma(a_bufs.index(here * SUBS + A1), b, p, use_acc=False, is_async=True)
                f = f_bufs.index(here).slice(A1 * 64, 64, 0).load(by_row)
                p = warpgroup_mma_wait(0, deps=[p])
                mbarrier.arrive(empty.index(here))
                acc1 += p * f[:, None]
        row += WHO * 64 * ROWS
        store(acc0, c_bufs.index(A0), output, row, end, col, part, M, N, TMA_STORE, PENDING, GROUPED, HOW)
        if ROWS == 2:
            store(acc1, c_bufs.index(A1), output, row + 64, end, col, part, M, N, TMA_STORE, PENDING, GROUPED, HOW)
        if GROUPED and first >= last:  # a tile of zeros had no loop to find the next one in
            place = _place(after, shape, 64 * SUBS, PAIR, PARTS, GROUPED)
    if TMA_STORE:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["sa_r", "sa_c", "sb_g", "sb_r", "sb_c", "M", "N", "K", "SPAN", "SPLIT", "G"])
def coalesced_kernel(
    a_desc, b_desc, c_desc, out_ptr, ldc, bias_ptr, sa_ptr, sa_r, sa_c, sb_ptr, sb_g, sb_r, sb_c,
    M, N, K, SPAN, SPLIT, G, table_ptr, q_ptr, s_ptr,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SPARE: gl.constexpr,
    SIDES: gl.constexpr, PAIR: gl.constexpr, A_R: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr,
    MIXED: gl.constexpr, TMA_STORE: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """``out[M, N] = a[M, K] @ b[N, K].T``, or ``SPLIT`` partial sums of it over parts of K, each ``[M, N]``, in turn.

    ``a_desc``, ``b_desc``: float8, tiles ``[64, 128]`` and ``[128, 128]``, 128-byte swizzle. ``c_desc``: the output in
    tiles of ``[64, 128]``, or None without ``TMA_STORE``: then ``out_ptr`` is written directly with row pitch ``ldc``.
    ``sa_ptr``: bytes, one for ``A_R`` rows by ``A_K`` of K, at strides ``sa_r``, ``sa_c``; ``sb_ptr``: one for 128 rows
    of b (``SIDES`` = 1) or for one (2), by ``B_K`` of K. ``SIDES`` = 2 and ``PAIR`` = 2 need ``ROWS`` = 1, and ``PAIR``
    = 2 needs ``A_K`` = 256 and ``B_K`` = 256, or 128 with ``MIXED``. ``PARTS``: whether ``SPLIT`` is above 1. With
    ``GROUPED``, ``b_desc`` is ``[G * N, K]``, scales of a matrix are ``sb_g`` bytes apart, and ``table_ptr`` (int32)
    holds for each of ``M // BM + G + 1`` rows of tiles its first row, where its rows end, and its group: -1 where the
    output is zero. ``GROUPED`` = 2: groups divide K instead, ``b_desc`` is ``[N, K]``, the output ``[G * M, N]``, and
    ``table_ptr`` holds for each of its ``G * cdiv(M, BM)`` rows of tiles the first row, where the group's rows end, the
    first row of A, and the group's first slot of K and the one after its last. ``REGISTERS`` of a consumer's threads,
    ``SPARE`` of the others'. ``HOW``: an :class:`Epilogue`;
    where it casts along rows (N a multiple of 128), ``q_ptr`` is ``[M, N]`` with pitch ``ldc``, ``s_ptr`` one byte for
    a block of a row, consecutive rows at consecutive addresses, and the output the value before the activation.
    """
    SUBS: gl.constexpr = CONSUMERS * ROWS
    FACTORS: gl.constexpr = 128 if SUBS == 2 else 256
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * SUBS, 64, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, BK], b_desc.layout)
    c_bufs = a_bufs
    if TMA_STORE:
        c_bufs = gl.allocate_shared_memory(c_desc.dtype, [SUBS, 64, 128], c_desc.layout)
    f_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS], flat)
    g_bufs = f_bufs
    if SIDES == 2:
        g_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128], flat)
    t_bufs = f_bufs
    if MIXED:
        t_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    shape = (M, N, K, SPAN, SPLIT, G, table_ptr)
    output = (c_desc, out_ptr, ldc, bias_ptr, q_ptr, s_ptr)
    data = (a_bufs, b_bufs, c_bufs, f_bufs, g_bufs, t_bufs, full, empty, output, shape)
    load = (a_bufs, b_bufs, full, empty, a_desc, b_desc, output, shape)
    scale = (f_bufs, g_bufs, t_bufs, full, empty, sa_ptr, sa_r, sa_c, sb_ptr, sb_g, sb_r, sb_c, shape)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (data, 0, CONSUMERS, ROWS, STAGES, SIDES, PAIR, MIXED, TMA_STORE, PARTS, GROUPED, HOW)),
                (_consume, (data, 1, CONSUMERS, ROWS, STAGES, SIDES, PAIR, MIXED, TMA_STORE, PARTS, GROUPED, HOW)),
                (_consume, (data, 2, CONSUMERS, ROWS, STAGES, SIDES, PAIR, MIXED, TMA_STORE, PARTS, GROUPED, HOW)),
                (_load, (load, SUBS, STAGES, PAIR, PARTS, GROUPED, HOW)),
                (_scale, (scale, SUBS, STAGES, SIDES, PAIR, MIXED, A_R, A_K, B_K, PARTS, GROUPED)),
            ],
            [4, 4, 1, 2],
            [REGISTERS, REGISTERS, SPARE, SPARE],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (data, 0, CONSUMERS, ROWS, STAGES, SIDES, PAIR, MIXED, TMA_STORE, PARTS, GROUPED, HOW)),
                (_consume, (data, 1, CONSUMERS, ROWS, STAGES, SIDES, PAIR, MIXED, TMA_STORE, PARTS, GROUPED, HOW)),
                (_load, (load, SUBS, STAGES, PAIR, PARTS, GROUPED, HOW)),
                (_scale, (scale, SUBS, STAGES, SIDES, PAIR, MIXED, A_R, A_K, B_K, PARTS, GROUPED)),
            ],
            [4, 1, 2],
            [REGISTERS, SPARE, SPARE],
        )
