"""What the GEMM of :mod:`_gemm_hopper_kernel` does with a finished accumulator: bias, activation, addition to what the
output holds, one rounding and the store; or its cast to MX along the rows, from the registers it was summed in.

An accumulator is ``[64, 128]`` in float32 where four threads share a row, so that the maximum of a block of 32 or 128
columns takes two exchanges between them, and two more turn single elements into 16 bytes for each store.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._device import scale_byte
from ._gemm_epilogue import activate_alike
from ._gluon import gl, gluon, hopper
from .quantize_hopper import block_amax, codes_of

if hasattr(hopper, "tma"):
    tma, fence_async_shared = hopper.tma, hopper.fence_async_shared


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Compile-time choices.

    Attributes:
        bias: whether there is one.
        activation: a number of :data:`activation_quantize_triton.ACTIVATIONS`, or -1.
        add: whether the result is added to what the output holds.
        block: columns of a block (32 or 128) of the cast along rows; 0: no cast, the value itself is stored.
        fmt, rule, satfinite: of the cast.
        before: whether the value before the activation is stored beside the cast, which then takes that rounded value.
        through: what else the value is rounded to before the activation: bfloat16 (1), float16 (2) or nothing (0).
    """

    bias: bool = False
    activation: int = -1
    add: bool = False
    block: int = 0
    fmt: int = 0
    rule: int = 0
    satfinite: bool = False
    before: bool = False
    through: int = 0


@gluon.jit
def _biased(acc, bias_ptr, col, N):
    """``acc`` plus its columns of the bias, in float32. One load a thread: in the layout of ``acc`` it would be 32,
    whose offsets the compiler keeps in registers all through the main loop."""
    by_thread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = col + gl.arange(0, 128, layout=by_thread)
    bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)
    return acc + gl.convert_layout(bias, gl.SliceLayout(0, acc.type.layout))[None, :]


@gluon.jit
def _write(value, out_ptr, ldc, row, end, col, part, M, N, ADD: gl.constexpr, WHOLE: gl.constexpr):
    """Round and store a tile from registers; what lies past the last row or column (``WHOLE``: there are no such
    columns) is dropped. ``ADD`` to what is there: in two halves, whose addresses fit registers beside the tile."""
    if ADD:
        ROWS: gl.constexpr = value.shape[0]
        HALF: gl.constexpr = value.shape[1] // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        _put(left, out_ptr, ldc, row, end, col, part, M, N, True, WHOLE)
        _put(right, out_ptr, ldc, row, end, col + HALF, part, M, N, True, WHOLE)
    else:
        _put(value, out_ptr, ldc, row, end, col, part, M, N, False, WHOLE)


@gluon.jit
def _put(value, out_ptr, ldc, row, end, col, part, M, N, ADD: gl.constexpr, WHOLE: gl.constexpr):
    """As :func:`_write`, a tile of any width."""
    rows = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    cols = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    corner = out_ptr + (part.to(gl.int64) * M + row) * ldc + col
    mask = (rows < end - row)[:, None]
    if not WHOLE:
        mask = mask & (cols < N - col)[None, :]
    where = corner + rows.to(gl.int64)[:, None] * ldc + cols[None, :]
    if ADD:
        value += gl.load(where, mask=mask)
    gl.store(where, value.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _prefetch(at):
    """Ask for the lines of 128 bytes at these addresses to be in the second-level cache."""
    asm: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(output, row, end, col, SUBS: gl.constexpr):
    """For one warp: ask for the ``64 * SUBS`` x 128 float32 values that a tile is added to, to be in the second-level
    cache. The loads have little in flight and would wait long for memory."""
    out_ptr, ldc = output[1], output[2]
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    column = gl.minimum(col + lane % 4 * 32, ldc - 1)  # of a line of 128 bytes
    for i in range(8 * SUBS):
        rows = gl.minimum(row + 8 * i + lane // 4, end - 1)
        _prefetch(out_ptr + (rows.to(gl.int64) * ldc + column))


@gluon.jit
def _send(value, c_buf, c_desc, row, col, PENDING: gl.constexpr):
    """Round a tile and store it by TMA, which drops what lies past the output. ``PENDING`` earlier stores of other
    buffers may still be running."""
    tma.store_wait(PENDING)
    c_buf.store(value.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)


@gluon.jit
def _cast(y, q_ptr, s_ptr, ldc, row, end, col, M, HOW: gl.constexpr):
    """Elements and scale bytes of a tile along its rows; columns are whole, rows past ``end`` are dropped."""
    block: gl.constexpr = HOW.block
    # Rows where the accumulator has them, and 16 neighbours of a row in each thread.
    stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )  # fmt: skip
    byte = scale_byte(block_amax(y, 1, block), HOW.fmt, HOW.rule, HOW.satfinite)
    codes = codes_of(y, byte, 1, block, HOW.fmt, stored)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, stored))
    where = q_ptr + row.to(gl.int64) * ldc + col + (rows[:, None] * ldc + cols[None, :])
    gl.store(where, codes, mask=(rows < end - row)[:, None])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, byte.type.layout))
    blocks = gl.arange(0, 128 // block, layout=gl.SliceLayout(0, byte.type.layout))
    where = s_ptr + (col // block).to(gl.int64) * M + row + (blocks.to(gl.int64)[None, :] * M + rows[:, None])
    gl.store(where, byte.to(gl.uint8), mask=(rows < end - row)[:, None])


@gluon.jit
def store(
    acc, c_buf, output, row, end, col, part, M, N,
    TMA_STORE: gl.constexpr, PENDING: gl.constexpr, GROUPED: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Bias, activation, one rounding and the store of a tile, by TMA where the output allows it and, of groups, where
    the tile ends with its group or before; or the cast of a tile, after a store of the value before the activation.
    ``HOW`` is an :class:`Epilogue`."""
    c_desc, out_ptr, ldc, bias_ptr, q_ptr, s_ptr = output
    if HOW.bias:
        acc = _biased(acc, bias_ptr, col, N)
    if HOW.block == 0:
        if HOW.activation >= 0:
            acc = activate_alike(acc, HOW.activation, True)
        if TMA_STORE:
            if GROUPED and row + 64 > end:
                _write(acc, out_ptr, ldc, row, end, col, part, M, N, HOW.add, False)
            else:
                _send(acc, c_buf, c_desc, row, col, PENDING)
        else:
            # ldc is N, and may be known to be a multiple of what a thread stores at once.
            _write(acc, out_ptr, ldc, row, end, col, part, M, ldc, HOW.add, False)
    else:
        if HOW.before:
            acc = acc.to(out_ptr.dtype.element_ty)
            if TMA_STORE:
                _send(acc, c_buf, c_desc, row, col, PENDING)
            else:
                _write(acc, out_ptr, ldc, row, end, col, part, M, N, False, True)
            acc = acc.to(gl.float32)
        if HOW.through == 1:
            acc = acc.to(gl.bfloat16).to(gl.float32)
        elif HOW.through == 2:
            acc = acc.to(gl.float16).to(gl.float32)
        if HOW.activation >= 0:
            acc = activate_alike(acc, HOW.activation, True)
        _cast(acc, q_ptr, s_ptr, ldc, row, end, col, M, HOW)
