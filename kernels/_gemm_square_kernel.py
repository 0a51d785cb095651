"""The FP8 GEMM of :mod:`gemm_hopper` for 32x32 blocks on both sides, in Gluon for sm_90a.

Built as :mod:`_gemm_hopper_kernel`: a loader warp, two scaler warps and two or three consumer warpgroups around a ring
of slots, each 128 of K deep. A slot has four steps of 32 of K, in each of which the factor of a result is that of its
32x32 neighbours. A thread holds two rows by 32 columns of a step's product, so that it needs four factors: the scalers
leave products of scales in the slot, in the order [step, 32 rows, 32 columns], and one 16-byte load gets a step's.

A promotion costs about what the tensor core takes for the step. So where a step has the factors of the one before, for
all of a consumer's blocks, it adds to the same sum in the tensor core, and one promotion serves both. Scalers compare
scale bytes and leave three bits a slot. Blocks of one tensor mostly agree, or differ by one binade where their maxima
lie around a power of two times 448.

**Numerics.** As :mod:`_gemm_hopper_kernel`, but a partial sum spans 32 of K, or up to 128 where factors agree. The
factors alone decide which, so that the same operands give the same bits.
"""

from __future__ import annotations

from ._gemm_hopper_epilogue import store
from ._gemm_hopper_kernel import BK, _factor, _load, _next, _place, _units
from ._gluon import gl, gluon, hopper, reinterpreted

if hasattr(hopper, "tma"):
    tma, mbarrier = hopper.tma, hopper.mbarrier
    fence_async_shared = hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait


@gluon.jit
def _both(x, y):
    return x & y


@gluon.jit
def _either(x, y):
    return x | y


@gluon.jit
def _bytes(a_ptr, a_c, a_inside, b_ptr, b_c, b_inside, step, end):
    """Scale bytes of steps ``step``, ``step`` + 1 and ``step`` + 2. Past the last block of K, where operands are zero,
    its bytes are repeated."""
    step0 = gl.minimum(step, end)
    step1 = gl.minimum(step + 1, end)
    step2 = gl.minimum(step + 2, end)
    a0 = gl.load(a_ptr + step0 * a_c, mask=a_inside, other=127)
    b0 = gl.load(b_ptr + step0 * b_c, mask=b_inside, other=127)
    a1 = gl.load(a_ptr + step1 * a_c, mask=a_inside, other=127)
    b1 = gl.load(b_ptr + step1 * b_c, mask=b_inside, other=127)
    a2 = gl.load(a_ptr + step2 * a_c, mask=a_inside, other=127)
    b2 = gl.load(b_ptr + step2 * b_c, mask=b_inside, other=127)
    return a0, b0, a1, b1, a2, b2


@gluon.jit
def _scale(data, SUBS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """The scaler warps, two steps of a slot each: 8 x 4 factors for each step, of which ``2 * SUBS`` blocks of rows are
    used; and two words for each consumer, where together bit ``i`` says that step ``i + 1`` has the scale bytes of step
    ``i``. Bytes are loaded before the wait for the slot, which is as long as their way."""
    f_bufs, t_bufs, full, empty, sa_ptr, sa_r, sa_c, sb_ptr, sb_r, sb_c, shape = data
    M, N, K = shape[0], shape[1], shape[2]
    end = gl.cdiv(K, 32) - 1
    at = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [2], [0]))
    down, across, step = at // 4 % 8, at % 4, at // 32 * 2
    slot = 0
    phase = 1
    for unit in range(gl.program_id(0), _units(shape, 64 * SUBS, False), gl.num_programs(0)):
        row, _, col, _, first, last, _ = _place(unit, shape, 64 * SUBS, 1, PARTS, False)
        a_inside = (down < 2 * SUBS) & (row + 32 * down < M)
        b_inside = col + 32 * across < N
        a_at = (row // 32 + down) * sa_r
        b_at = (col // 32 + across) * sb_r
        bytes_ = _bytes(sa_ptr + a_at, sa_c, a_inside, sb_ptr + b_at, sb_c, b_inside, 4 * first + step, end)
        for k in range(first, last):
            a0, b0, a1, b1, a2, b2 = bytes_
            after = gl.minimum(4 * (k + 1), end) + step
            bytes_ = _bytes(sa_ptr + a_at, sa_c, a_inside, sb_ptr + b_at, sb_c, b_inside, after, end)
            # The last word's second bit is not used.
            alike = gl.where((a0 == a1) & (b0 == b1), 1, 0) | gl.where((a1 == a2) & (b1 == b2), 2, 0)
            alike = gl.reduce((alike << step).reshape([8, 8]), 1, _both)
            f0, f1 = _factor(a0.to(gl.int32), b0.to(gl.int32)), _factor(a1.to(gl.int32), b1.to(gl.int32))
            mbarrier.wait(empty.index(slot), phase)
            f_bufs.index(slot).slice(0, 1, 1).store(f0.reshape([2, 1, 32]))
            f_bufs.index(slot).slice(1, 1, 1).store(f1.reshape([2, 1, 32]))
            t_bufs.index(slot).store(alike.reshape([2, 4]))
            mbarrier.arrive(full.index(slot))
            slot, phase = _next(slot, phase, STAGES)


# Products are [64, 128], and seen as [2, 32, 4, 32] where factors and sums are concerned.


@gluon.jit
def _factors(f_bufs, at, WHO: gl.constexpr, seen: gl.constexpr):
    """Of step ``at`` of the ring."""
    f = f_bufs.index(at).slice(2 * WHO, 2, 0)
    return f.load(gl.SliceLayout(1, gl.SliceLayout(3, seen))).expand_dims(1).expand_dims(3)


@gluon.jit
def _ahead(data, state, k, WHO: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """While the tensor cores do the last step of a slot: where the next tile is, and the next slot."""
    full, shape = data[5], data[8]
    slot, phase, place, after, last = state
    if k + 1 >= last:
        place = _place(after, shape, 64 * CONSUMERS, 1, PARTS, False)
    slot, phase = _next(slot, phase, STAGES)
    mbarrier.wait(full.index(slot), phase, pred=k + 1 < last)
    return slot, phase, place


@gluon.jit
def _slot(
    acc, alike, data, state, k,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CHAIN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A slot's four steps; with ``CHAIN`` a step whose bit is set in ``alike`` adds to the sum before."""
    f_bufs, empty, here = data[3], data[6], state[0]
    seen: gl.constexpr = acc.type.layout
    a = data[0].index(here * CONSUMERS + WHO)
    b = data[1].index(here)
    p = gl.zeros([64, 128], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
    for step in gl.static_range(4):
        a_step = a.slice(32 * step, 32, 1)
        b_step = b.slice(32 * step, 32, 1).permute([1, 0])
        if step == 0:
            p = warpgroup_mma(a_step, b_step, p, use_acc=False, is_async=True)
        else:
            go_on = False
            if CHAIN:
                go_on = (alike & (1 << (step - 1))) != 0
            if not go_on:
                f = _factors(f_bufs, 4 * here + step - 1, WHO, seen)
                part = warpgroup_mma_wait(0, deps=[p])
                acc += part.reshape([2, 32, 4, 32]) * f
            # Into the registers of the partial sum before: with others the compiler keeps two, and spills.
            p = warpgroup_mma(a_step, b_step, p, use_acc=go_on, is_async=True)
    f = _factors(f_bufs, 4 * here + 3, WHO, seen)
    slot, phase, place = _ahead(data, state, k, WHO, CONSUMERS, STAGES, PARTS)
    p = warpgroup_mma_wait(0, deps=[p])
    mbarrier.arrive(empty.index(here))
    acc += p.reshape([2, 32, 4, 32]) * f
    return acc, slot, phase, place


@gluon.jit
def _consume(
    data, WHO: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, TMA_STORE: gl.constexpr,
    PARTS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup ``WHO``: rows ``64 * WHO`` and following of every tile."""
    c_bufs, t_bufs, full, output, shape = data[2], data[4], data[5], data[7], data[8]
    M, N = shape[0], shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    words: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [4, 1], [0, 1])
    zeros = gl.zeros([64, 128], gl.float32, layout).reshape([2, 32, 4, 32])
    slot = 0
    phase = 0
    units = _units(shape, 64 * CONSUMERS, False)
    place = _place(gl.program_id(0), shape, 64 * CONSUMERS, 1, PARTS, False)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, end, col, _, first, last, part = place
        after = gl.minimum(unit + gl.num_programs(0), units - 1)
        acc = zeros
        # Without this use Triton 3.6 takes ``first`` for dead, as no more than a bound of an inner loop, and every part
        # of K would start where the first one does.
        mbarrier.wait(full.index(slot), phase, pred=first < last)
        for k in range(first, last):
            state = (slot, phase, place, after, last)
            alike = gl.reduce(t_bufs.index(slot).slice(WHO, 1, 1).load(words).reshape([2]), 0, _either) & 7
            if alike == 0:  # without a question between steps
                acc, slot, phase, place = _slot(acc, alike, data, state, k, WHO, CONSUMERS, STAGES, False, PARTS)
            else:
                acc, slot, phase, place = _slot(acc, alike, data, state, k, WHO, CONSUMERS, STAGES, True, PARTS)
        row += WHO * 64
        done = gl.convert_layout(acc.reshape([64, 128]), layout, assert_trivial=True)
        store(done, c_bufs.index(WHO), output, row, end, col, part, M, N, TMA_STORE, 0, False, HOW)
    if TMA_STORE:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["sa_r", "sa_c", "sb_g", "sb_r", "sb_c", "M", "N", "K", "SPAN", "SPLIT", "G"])
def square_kernel(
    a_desc, b_desc, c_desc, out_ptr, ldc, bias_ptr, sa_ptr, sa_r, sa_c, sb_ptr, sb_g, sb_r, sb_c,
    M, N, K, SPAN, SPLIT, G, table_ptr, q_ptr, s_ptr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SPARE: gl.constexpr,
    TMA_STORE: gl.constexpr, PARTS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """As ``coalesced_kernel`` with one sub-tile a consumer, for scales of 32 rows by 32 of K on both sides. ``sb_g``,
    ``G`` and ``table_ptr`` are not used."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * CONSUMERS, 64, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, BK], b_desc.layout)
    c_bufs = a_bufs
    if TMA_STORE:
        c_bufs = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS, 64, 128], c_desc.layout)
    f_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 2, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    f_steps = reinterpreted(f_bufs, [STAGES * 4, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    t_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    shape = (M, N, K, SPAN, SPLIT, G, table_ptr)
    output = (c_desc, out_ptr, ldc, bias_ptr, q_ptr, s_ptr)
    data = (a_bufs, b_bufs, c_bufs, f_steps, t_bufs, full, empty, output, shape)
    load = (a_bufs, b_bufs, full, empty, a_desc, b_desc, output, shape)
    scale = (f_bufs, t_bufs, full, empty, sa_ptr, sa_r, sa_c, sb_ptr, sb_r, sb_c, shape)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (data, 0, CONSUMERS, STAGES, TMA_STORE, PARTS, HOW)),
                (_consume, (data, 1, CONSUMERS, STAGES, TMA_STORE, PARTS, HOW)),
                (_consume, (data, 2, CONSUMERS, STAGES, TMA_STORE, PARTS, HOW)),
                (_load, (load, CONSUMERS, STAGES, 1, PARTS, False, HOW)),
                (_scale, (scale, CONSUMERS, STAGES, PARTS)),
            ],
            [4, 4, 1, 2],
            [REGISTERS, REGISTERS, SPARE, SPARE],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (data, 0, CONSUMERS, STAGES, TMA_STORE, PARTS, HOW)),
                (_consume, (data, 1, CONSUMERS, STAGES, TMA_STORE, PARTS, HOW)),
                (_load, (load, CONSUMERS, STAGES, 1, PARTS, False, HOW)),
                (_scale, (scale, CONSUMERS, STAGES, PARTS)),
            ],
            [4, 1, 2],
            [REGISTERS, SPARE, SPARE],
        )
