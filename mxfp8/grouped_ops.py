"""Ops on groups of rows (those of an expert, say) beside :func:`mxfp8.grouped_gemm`: the cast along the rows of each
group, and the product that sums over them.

On a GPU the ends of the groups are never read on the host: nothing waits, and a CUDA graph replays with new groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from mxfp8 import dispatch, ops
from mxfp8.dispatch import replays
from mxfp8.formats import (
    BlockShape,
    ElementFormat,
    Rounding,
    ScaleRule,
    get_block,
    get_format,
    get_scale_rule,
)
from mxfp8.rng import RngKey
from mxfp8.tensor import MXTensor, block_rc

__all__ = ["MXGroups", "columns_of", "grouped_wgrad", "groups_of", "quantize_both_grouped", "quantize_grouped"]


class MXGroups(NamedTuple):
    """Groups of rows that were cast along their columns, one after the other, each padded with zeros to whole blocks.

    Attributes:
        q: ``[P, C]``, scaled along axis -2. P is a bound that follows from the shapes; what is past the last group is
            zero.
        starts: int32 ``[G + 1]``, where each group starts in ``q``, and where the last one ends.
    """

    q: MXTensor
    starts: torch.Tensor


def quantize_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    scale_rule: str | ScaleRule = "rceil",
    rounding: str | Rounding = "nearest",
    seed: int | RngKey | None = None,
    backend: str = "auto",
    *,
    satfinite: bool = False,
    hadamard: int | None = None,
    hadamard_seed: int = 0,
) -> MXGroups:
    """Quantise the rows of each group of ``x`` along its columns (axis -2): what :func:`grouped_wgrad` multiplies.

    Args:
        x: ``[M, C]``, as :func:`mxfp8.quantize`.
        offs: as :func:`mxfp8.grouped_gemm`. Rows past ``offs[-1]`` are not read.
        fmt, block, scale_rule, rounding, seed, backend, satfinite: as :func:`mxfp8.quantize`.
        hadamard: None, or the size of a random Hadamard transform of each group's columns that goes before the cast, as
            :func:`mxfp8.hadamard` with ``hadamard_seed``.

    Returns:
        :class:`MXGroups`. The rows of group g, from ``starts[g]`` on, are bit for bit
        ``quantize(x[s:e], axis=-2, ...)``; they are padded to a multiple of the block or, if that is larger, of
        ``hadamard``.

    Raises:
        ValueError, TypeError: as :func:`mxfp8.quantize` and :func:`mxfp8.grouped_gemm`; ``x`` not 2-D.

    **Numerics.** As :func:`mxfp8.quantize`. Random bits belong to rows of ``x``: those of a group do not depend on the
    others'.
    """
    known = None
    if seed is None and rounding == "nearest" and hadamard is None:
        known = replays.key("quantize_grouped", (x, offs), fmt, block, scale_rule, satfinite, backend)
        if (made := replays.again(known, x, offs)) is not None:
            return groups_of(made, get_format(fmt), get_block(block))
    _check_rows("quantize_grouped", x)
    mode, key = ops.get_rounding_key(rounding, seed)
    if hadamard is not None:
        ops.check_size(hadamard)
    block, form, rule = get_block(block), get_format(fmt), get_scale_rule(scale_rule)
    run, x = dispatch.resolve("quantize_grouped", backend, x.device), x.detach()

    def cast() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = ops.check_offsets(offs, None, x)
        return run(  # type: ignore[no-any-return]
            x, ends, fmt=form, block=block, scale_rule=rule, rounding=mode, key=key, satfinite=satfinite,
            hadamard=hadamard, hadamard_seed=hadamard_seed,
        )  # fmt: skip

    return groups_of(replays.run(known, cast, (x, offs)), form, block)


def quantize_both_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    backend: str = "auto",
    *,
    satfinite: bool = False,
) -> tuple[MXTensor, MXGroups]:
    """Quantise ``x`` along its rows, and the rows of each group along their columns, reading it once: what a training
    step needs of the input and of the gradient of a grouped product.

    Args:
        x, offs: as :func:`quantize_grouped`. Rows past ``offs[-1]`` are cast along rows only.
        block: of the copy along axis -1.
        column_block: of the copy along axis -2; default: ``block``.
        fmt, scale_rule, backend, satfinite: of both, as :func:`mxfp8.quantize`.

    Returns:
        ``(quantize(x, -1, ..., block), quantize_grouped(x, offs, ..., column_block))``, bit for bit.

    Raises:
        ValueError, TypeError: as :func:`quantize_grouped`.

    **Numerics.** As :func:`mxfp8.quantize`, to nearest.
    """
    block = get_block(block)
    column_block = block if column_block is None else get_block(column_block)
    known = replays.key("quantize_both_grouped", (x, offs), fmt, block, column_block, scale_rule, satfinite, backend)
    made = replays.again(known, x, offs)
    form = get_format(fmt)
    if made is None:
        _check_rows("quantize_both_grouped", x)
        rule = get_scale_rule(scale_rule)
        run, x = dispatch.resolve("quantize_both_grouped", backend, x.device), x.detach()

        def cast() -> tuple[torch.Tensor, ...]:
            ends = ops.check_offsets(offs, None, x)
            return run(  # type: ignore[no-any-return]
                x, ends, fmt=form, block=block, column_block=column_block, scale_rule=rule, satfinite=satfinite
            )

        made = replays.run(known, cast, (x, offs))
    return MXTensor.trusted(made[0], made[1], form, -1, block), groups_of(made[2:], form, column_block)


def _check_rows(op: str, x: torch.Tensor) -> None:
    ops.check_float(op, x)
    if x.ndim != 2:
        raise ValueError(f"{op} takes x[M, C], not {tuple(x.shape)}")


def groups_of(parts: Sequence[torch.Tensor], fmt: ElementFormat, block: BlockShape) -> MXGroups:
    """Of what a backend gives: elements, scale bytes, starts."""
    qdata, scale, starts = parts
    return MXGroups(MXTensor.trusted(qdata, scale, fmt, -2, block), starts)


def grouped_wgrad(
    a: MXGroups | torch.Tensor,
    b: MXGroups | torch.Tensor,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Sums over the rows of each group: ``out[g] = a[s:e].T @ b[s:e]``, the weight gradients of a grouped product.

    Args:
        a, b: ``[M, N]`` and ``[M, K]`` as :func:`quantize_grouped` cast them with the same ``offs``; one of them may be
            a float32, bfloat16 or float16 tensor.
        offs: as :func:`mxfp8.grouped_gemm`; needed beside a tensor in high precision.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        ``[G, N, K]`` of ``out_dtype``; zeros for a group without rows.

    Raises:
        ValueError: different numbers of groups; a tensor in high precision that is not 2-D, or without ``offs``.
        TypeError: as :func:`mxfp8.gemm`.

    **Numerics.** As :func:`mxfp8.gemm`, group by group. Padding adds zeros.
    """
    known: object = None
    inputs: tuple[torch.Tensor, ...] = ()
    if type(a) is MXGroups and type(b) is MXGroups:
        inputs = tuple(t for x in (a, b) for t in (x.q.qdata, x.q.scale_bytes, x.starts))
        known = replays.key("grouped_wgrad", inputs, a.q.block, b.q.block, out_dtype, backend)
        if (made := replays.again(known, *inputs)) is not None:
            return made  # type: ignore[no-any-return]
    if out_dtype not in ops.OUT_DTYPES:
        raise TypeError(f"grouped_wgrad: out_dtype is {out_dtype}, use float32, bfloat16 or float16")
    if not isinstance(a, MXGroups) and not isinstance(b, MXGroups):
        raise TypeError("grouped_wgrad needs at least one operand from quantize_grouped")
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, MXGroups):
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in ops.OUT_DTYPES:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"grouped_wgrad: {name} is {got}, use MXGroups or a float32, bfloat16 or float16 tensor")
        if x.ndim != 2 or offs is None:
            raise ValueError(f"grouped_wgrad: {name} is in high precision: it takes [M, N] and offs")
        offs = ops.check_offsets(offs, None, x)
    parts = [*columns_of(a, offs), *columns_of(b, offs)]
    if len(parts[3]) != len(parts[7]) or parts[0].device != parts[4].device:
        raise ValueError(
            f"grouped_wgrad: a has {len(parts[3]) - 1} groups on {parts[0].device}, b {len(parts[7]) - 1} on "
            f"{parts[4].device}"
        )
    run = dispatch.resolve("grouped_wgrad", backend, parts[0].device)

    def product() -> torch.Tensor:
        with torch.no_grad():
            return run(*parts, out_dtype=out_dtype)  # type: ignore[no-any-return]

    return replays.run(known, product, inputs)  # type: ignore[no-any-return]


def columns_of(x: MXGroups | torch.Tensor, offs: torch.Tensor | None) -> tuple[Any, ...]:
    """Plain tensors for a backend: data, scale bytes, (rows, columns) of a block, starts of the groups."""
    if isinstance(x, MXGroups):
        return x.q.qdata, x.q.scale_bytes, block_rc(x.q.block, x.q.axis), x.starts
    assert offs is not None
    return x, None, None, F.pad(offs.clamp(0, len(x)).to(torch.int32), (1, 0))
