"""Operands of GEMMs made by the op that computes them: a norm or an activation that casts what it has in registers."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from mxfp8 import dispatch, observe
from mxfp8.dispatch import replays
from mxfp8.formats import get_format, get_scale_rule
from mxfp8.linear import Plan, fusible
from mxfp8.recipe import CastSpec
from mxfp8.reference.fused import Casts
from mxfp8.tensor import MXTensor

__all__ = ["Names", "as_mx", "operands", "run_op"]

Names = tuple[str, str] | None
"""GEMM and operand that a copy is for; None if it is not needed."""


def operands(
    plan: Plan, op: str, tensors: tuple[torch.Tensor | None, ...], options: dict[str, Any], rows: Names,
    columns: Names,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What ``op`` computes as the operand ``rows`` (blocks along -1) and as the operand ``columns`` (along -2), each
    None if not asked for; then what else it returns.

    It makes the casts itself as far as it can: those to nearest, both if they differ in their blocks alone. The others
    take the value in the input's dtype.
    """
    first, second = plan.spec(*rows) if rows else None, plan.spec(*columns) if columns else None
    if first is not None and not fusible(first, first):
        first = None
    if second is not None and not fusible(second if first is None else first, second):
        second = None
    needs_hp = (first is None and (rows is not None or second is None)) or (columns is not None and second is None)
    q, s, t, u, hp, *rest = run_op(op, tensors, (first, second, needs_hp), options)
    a = b = None
    if rows is not None:
        a = plan.cast(hp, *rows, -1) if first is None else as_mx(q, s, first, -1)
    if columns is not None:
        b = plan.cast(hp, *columns, -2) if second is None else as_mx(t, u, second, -2)
    if observe.active() and (first is not None or second is not None):
        wide = tuple(None if v is None else v.to(torch.float32) for v in tensors)
        exact = run_op(op, wide, (None, None, True), options)[4]
        if rows is not None and first is not None:
            plan.watch_cast(*rows, exact, cast(MXTensor, a))
        if columns is not None and second is not None:
            plan.watch_cast(*columns, exact, cast(MXTensor, b))
    return a, b, rest


def as_mx(q: torch.Tensor, s: torch.Tensor, spec: CastSpec, axis: int) -> MXTensor:
    return MXTensor.trusted(q, s, get_format(spec.fmt), axis, spec.block)


def run_op(
    op: str, tensors: tuple[torch.Tensor | None, ...], casts: tuple[CastSpec | None, CastSpec | None, bool],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """A fused op with the casts of :func:`_casts`; on a GPU, repeated calls cost the host little."""
    present = [t for t in tensors if t is not None]
    known = replays.key(op, present, casts, *(t is None for t in tensors), *options.values())
    if (made := replays.again(known, *present)) is not None:
        return made
    run = dispatch.resolve(op, "auto", present[0].device)
    return replays.run(known, lambda: run(*tensors, casts=_casts(*casts), **options), present)


def _casts(rows: CastSpec | None, columns: CastSpec | None, hp: bool) -> Casts:
    """What a fused op is to make: MX along rows, along columns (of one format and rule), the value in its dtype."""
    return (_new_casts if torch.compiler.is_compiling() else _known_casts)(rows, columns, hp)


def _new_casts(rows: CastSpec | None, columns: CastSpec | None, hp: bool) -> Casts:
    spec = rows or columns or CastSpec()
    made = {"rows": rows is not None, "columns": columns is not None, "hp": hp}
    return Casts(
        outputs=tuple(name for name, wanted in made.items() if wanted),
        round_first=False,
        fmt=get_format(spec.fmt),
        block=spec.block if rows is None else rows.block,
        column_block=spec.block if columns is None else columns.block,
        scale_rule=get_scale_rule(spec.scale_rule),
        satfinite=False,
    )


_known_casts = functools.lru_cache(maxsize=256)(_new_casts)
