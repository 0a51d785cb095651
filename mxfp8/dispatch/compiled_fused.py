"""Norms, activations and products that write MX copies, as torch operators: one node each for ``torch.compile``.

As :mod:`mxfp8.dispatch.compiled`, but on every backend: the reference too runs as it is, since a compiler that wrote
exponentials anew would give other bits. An operator returns the tensors that were asked for and no others, elements as
bytes; what would be its input again (the sum of a norm without a residual) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mxfp8.dispatch.compiled import as_bytes, kernel, layout, operand_of
from mxfp8.formats import BlockShape, ScaleRule, get_format
from mxfp8.reference import fused as reference
from mxfp8.reference import gemm as products
from mxfp8.reference.fused import Casts

__all__ = ["OPERATORS"]

Maybe = torch.Tensor | None

_CASTS = (
    "str[] outputs, bool round_first, str fmt, int[] block, int[] column_block, str scale_rule, bool satfinite, "
    "str backend) -> Tensor[]"
)
_SCHEMAS = {
    "activation_quantize": "(Tensor x, Tensor? bias, str activation, ",
    "activation_quantize_backward": "(Tensor dy, Tensor x, Tensor? bias, str activation, ",
    "norm_quantize": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, str norm, int norm_block, float eps, "
    ),
    "norm_quantize_backward": (
        "(Tensor dy, Tensor h, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? dh, str norm, int norm_block, "
        "bool with_bias, "
    ),
    "gemm_quantize": (
        "(Tensor a, Tensor? a_scale, int[]? a_block, str? a_fmt, Tensor b, Tensor? b_scale, int[]? b_block, "
        "str? b_fmt, Tensor? bias, str? activation, ScalarType hp_dtype, "
    ),
}


def _flat(casts: Casts) -> tuple[Any, ...]:
    """The last arguments of an operator, but for the backend."""
    return (
        casts.outputs, casts.round_first, casts.fmt.name, casts.block, casts.column_block, casts.scale_rule.value,
        casts.satfinite,
    )  # fmt: skip


def _casts(
    outputs: list[str], round_first: bool, fmt: str, block: list[int], column_block: list[int], scale_rule: str,
    satfinite: bool,
) -> Casts:  # fmt: skip
    return Casts(
        outputs=tuple(outputs), round_first=round_first, fmt=get_format(fmt), block=(block[0], block[1]),
        column_block=(column_block[0], column_block[1]), scale_rule=ScaleRule(scale_rule), satfinite=satfinite,
    )  # fmt: skip


def _present(parts: Sequence[Maybe]) -> list[torch.Tensor]:
    """What there is, elements as bytes."""
    return [p.view(torch.uint8) if p.dtype.itemsize == 1 else p for p in parts if p is not None]


def _copies(shape: Sequence[int], like: torch.Tensor, casts: Casts) -> list[torch.Tensor]:
    """Empty ``[q, s, t, u, hp]``, as far as asked for, as kernels lay them out."""
    out: list[torch.Tensor] = []
    for name, axis, block in (("rows", -1, casts.block), ("columns", -2, casts.column_block)):
        if name in casts.outputs:
            out += layout(shape, like.device, axis, block)
    return out + ([like.new_empty(shape)] if "hp" in casts.outputs else [])


def _restored(casts: Casts, parts: list[torch.Tensor], more: Sequence[bool]) -> tuple[Maybe, ...]:
    """The tuple that the table's functions return: ``more`` says which tensors there are after the five copies."""
    left: Iterator[torch.Tensor] = iter(parts)
    out: list[Maybe] = []
    for name in ("rows", "columns"):
        out += [next(left).view(casts.fmt.dtype), next(left)] if name in casts.outputs else [None, None]
    return *out, *(next(left) if there else None for there in ("hp" in casts.outputs, *more))


# What the operators do.


def _activation(x: torch.Tensor, bias: Maybe, activation: str, *how: Any) -> list[torch.Tensor]:
    run = kernel("activation_quantize", how[-1], x.device)
    return _present(run(x, bias, activation=activation, casts=_casts(*how[:-1])))


def _activation_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: Maybe, activation: str, *how: Any
) -> list[torch.Tensor]:
    run = kernel("activation_quantize_backward", how[-1], x.device)
    return _present(run(dy, x, bias, activation=activation, casts=_casts(*how[:-1])))


def _norm(
    x: torch.Tensor, weight: Maybe, bias: Maybe, residual: Maybe, norm: str, norm_block: int, eps: float, *how: Any
) -> list[torch.Tensor]:
    run = kernel("norm_quantize", how[-1], x.device)
    parts = run(
        x, weight, bias, residual, norm=norm, norm_block=norm_block, eps=eps, casts=_casts(*how[:-1])
    )  # fmt: skip
    return _present(parts if residual is not None else (*parts[:5], *parts[6:]))


def _norm_backward(
    dy: torch.Tensor, h: torch.Tensor, weight: Maybe, mean: Maybe, rstd: torch.Tensor, dh: Maybe, norm: str,
    norm_block: int, with_bias: bool, *how: Any,
) -> list[torch.Tensor]:  # fmt: skip
    run = kernel("norm_quantize_backward", how[-1], h.device)
    return _present(
        run(
            dy, h, weight, mean, rstd, dh, norm=norm, norm_block=norm_block, with_bias=with_bias,
            casts=_casts(*how[:-1]),
        )
    )  # fmt: skip


def _product(*operands: Any) -> list[torch.Tensor]:
    a, *rest = operands
    return _present(_call_product(kernel("gemm_quantize", rest[-1], a.device), *operands))


def _call_product(
    run: Callable[..., Any], a: torch.Tensor, a_scale: Maybe, a_block: list[int] | None, a_fmt: str | None,
    b: torch.Tensor, b_scale: Maybe, b_block: list[int] | None, b_fmt: str | None, bias: Maybe, activation: str | None,
    hp_dtype: torch.dtype, *how: Any,
) -> tuple[Maybe, ...]:  # fmt: skip
    sides = *operand_of(a, a_scale, a_block, a_fmt), *operand_of(b, b_scale, b_block, b_fmt)
    parts: tuple[Maybe, ...] = run(*sides, bias=bias, activation=activation, hp_dtype=hp_dtype, casts=_casts(*how[:-1]))
    return parts


# What they return, without a body; the reference itself says so of the reference.


def _fake_activation(x: torch.Tensor, bias: Maybe, activation: str, *how: Any) -> list[torch.Tensor]:
    casts = _casts(*how[:-1])
    if how[-1] == "reference":
        return _present(reference.activation_quantize(x, bias, activation=activation, casts=casts))
    return _copies((*x.shape[:-1], x.shape[-1] // (2 if activation == "swiglu" else 1)), x, casts)


def _fake_activation_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: Maybe, activation: str, *how: Any
) -> list[torch.Tensor]:
    casts = _casts(*how[:-1])
    if how[-1] == "reference":
        return _present(reference.activation_quantize_backward(dy, x, bias, activation=activation, casts=casts))
    return _copies(x.shape, x, casts) + [x.new_empty(x.shape[-1:], dtype=torch.float32)] * (bias is not None)


def _fake_norm(
    x: torch.Tensor, weight: Maybe, bias: Maybe, residual: Maybe, norm: str, norm_block: int, eps: float, *how: Any
) -> list[torch.Tensor]:
    casts = _casts(*how[:-1])
    if how[-1] == "reference":
        parts = reference.norm_quantize(
            x, weight, bias, residual, norm=norm, norm_block=norm_block, eps=eps, casts=casts
        )  # fmt: skip
        return _present(parts if residual is not None else (*parts[:5], *parts[6:]))
    out = _copies(x.shape, x, casts) + [x.new_empty(x.shape)] * (residual is not None)
    group = reference.group(norm, norm_block, x.shape[-1])
    shape = (*x.shape[:-1], -(-x.shape[-1] // group))
    return out + [x.new_empty(shape, dtype=torch.float32) for _ in range(1 + (norm == "layer"))]


def _fake_norm_backward(
    dy: torch.Tensor, h: torch.Tensor, weight: Maybe, mean: Maybe, rstd: torch.Tensor, dh: Maybe, norm: str,
    norm_block: int, with_bias: bool, *how: Any,
) -> list[torch.Tensor]:  # fmt: skip
    casts = _casts(*how[:-1])
    if how[-1] == "reference":
        return _present(
            reference.norm_quantize_backward(
                dy, h, weight, mean, rstd, dh, norm=norm, norm_block=norm_block, with_bias=with_bias, casts=casts
            )
        )  # fmt: skip
    sums = (weight is not None) + with_bias
    return _copies(h.shape, h, casts) + [h.new_empty(h.shape[-1:], dtype=torch.float32) for _ in range(sums)]


def _fake_product(
    a: torch.Tensor, a_scale: Maybe, a_block: list[int] | None, a_fmt: str | None, b: torch.Tensor, b_scale: Maybe,
    b_block: list[int] | None, b_fmt: str | None, bias: Maybe, activation: str | None, hp_dtype: torch.dtype, *how: Any,
) -> list[torch.Tensor]:  # fmt: skip
    if how[-1] == "reference":
        return _present(
            _call_product(
                products.gemm_quantize, a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, bias, activation,
                hp_dtype, *how,
            )
        )  # fmt: skip
    rows, columns, casts = a.shape[0], b.shape[0], _casts(*how[:-1])
    made = replace(casts, outputs=tuple(name for name in casts.outputs if name != "hp"))
    out = _copies((rows, columns // (2 if activation == "swiglu" else 1)), a, made)
    return out + ([a.new_empty((rows, columns), dtype=hp_dtype)] if "hp" in casts.outputs else [])


for _op, _body, _fake in (
    ("activation_quantize", _activation, _fake_activation),
    ("activation_quantize_backward", _activation_backward, _fake_activation_backward),
    ("norm_quantize", _norm, _fake_norm),
    ("norm_quantize_backward", _norm_backward, _fake_norm_backward),
    ("gemm_quantize", _product, _fake_product),
):
    torch.library.custom_op(f"mxfp8::{_op}", _body, mutates_args=(), schema=_SCHEMAS[_op] + _CASTS).register_fake(_fake)


# The same signatures as the functions of the table, by way of the operators above.


def activation_quantize(
    backend: str, x: torch.Tensor, bias: Maybe, *, activation: str, casts: Casts
) -> tuple[Maybe, ...]:
    parts = torch.ops.mxfp8.activation_quantize(x, bias, activation, *_flat(casts), backend)
    return _restored(casts, parts, ())


def activation_quantize_backward(
    backend: str, dy: torch.Tensor, x: torch.Tensor, bias: Maybe, *, activation: str, casts: Casts
) -> tuple[Maybe, ...]:
    parts = torch.ops.mxfp8.activation_quantize_backward(dy, x, bias, activation, *_flat(casts), backend)
    return _restored(casts, parts, (bias is not None,))


def norm_quantize(
    backend: str, x: torch.Tensor, weight: Maybe, bias: Maybe, residual: Maybe, *, norm: str, norm_block: int,
    eps: float, casts: Casts,
) -> tuple[Maybe, ...]:  # fmt: skip
    parts = torch.ops.mxfp8.norm_quantize(
        x, weight, bias, residual, norm, norm_block, eps, *_flat(casts), backend
    )  # fmt: skip
    *copies, h, mean, rstd = _restored(casts, parts, (residual is not None, norm == "layer", True))
    return *copies, x if residual is None else h, mean, rstd


def norm_quantize_backward(
    backend: str, dy: torch.Tensor, h: torch.Tensor, weight: Maybe, mean: Maybe, rstd: torch.Tensor, dh: Maybe, *,
    norm: str, norm_block: int, with_bias: bool, casts: Casts,
) -> tuple[Maybe, ...]:  # fmt: skip
    parts = torch.ops.mxfp8.norm_quantize_backward(
        dy, h, weight, mean, rstd, dh, norm, norm_block, with_bias, *_flat(casts), backend
    )
    return _restored(casts, parts, (weight is not None, with_bias))


def gemm_quantize(
    backend: str, a: torch.Tensor, a_scale: Maybe, a_block: BlockShape | None, b: torch.Tensor, b_scale: Maybe,
    b_block: BlockShape | None, *, bias: Maybe, activation: str | None, hp_dtype: torch.dtype, casts: Casts,
) -> tuple[Maybe, ...]:  # fmt: skip
    (a, a_fmt), (b, b_fmt) = as_bytes(a), as_bytes(b)
    parts = torch.ops.mxfp8.gemm_quantize(
        a, a_scale, a_block, a_fmt, b, b_scale, b_block, b_fmt, bias, activation, hp_dtype, *_flat(casts), backend
    )
    return _restored(casts, parts, ())


OPERATORS: dict[str, Callable[..., Any]] = {
    "activation_quantize": activation_quantize,
    "activation_quantize_backward": activation_quantize_backward,
    "norm_quantize": norm_quantize,
    "norm_quantize_backward": norm_quantize_backward,
    "gemm_quantize": gemm_quantize,
}
"""``op -> function(backend, ...)`` for use inside a compiled region, on every backend."""
