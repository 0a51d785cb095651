"""To and from NVIDIA Transformer Engine's ``MXFP8Tensor``, and a product by it. Written from its source; not run.

Both libraries hold the same bytes, so nothing is quantised again: scales are repeated to 1x32, as all of Transformer
Engine's are, and padded. It needs a Blackwell GPU and ``pip install 'mxfp8[te]'``, and is imported when it is first
asked for. No op takes it on its own: it is for exchange with models that use it, and for comparison.

    from mxfp8 import te

    both = te.to_transformer_engine(*mxfp8.quantize_both(x))
    rows, columns = te.from_transformer_engine(both)

Its ``MXFP8Tensor`` has up to two copies of a matrix ``[R, C]``: one with blocks along C (``rowwise_data`` and
``rowwise_scale_inv``, padded to multiples of 128 rows and 4 columns), and one with blocks along R (``columnwise_data``,
not transposed, and ``columnwise_scale_inv``, padded to multiples of 4 rows and 128 columns).
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from mxfp8.formats import ELEMENT_FORMATS, ElementFormat
from mxfp8.tensor import MXTensor

__all__ = ["from_transformer_engine", "gemm", "is_available", "to_transformer_engine"]

_INSTALL = "pip install 'mxfp8[te]' (it builds its torch part from source: CUDA's compiler is needed)"
_BLOCK = 32


class _Engine(NamedTuple):
    """What is used of Transformer Engine."""

    tensor: Any
    quantizer: Any
    dtypes: dict[str, Any]
    product: Any


def _engine() -> _Engine:
    """Its classes. ImportError that says how to install it."""
    try:
        module = importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
        product = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        dtype = importlib.import_module("transformer_engine_torch").DType
    except (ImportError, RuntimeError, AttributeError) as error:  # without its binaries it raises RuntimeError
        raise ImportError(f"Transformer Engine cannot be used: {error}. Install it: {_INSTALL}") from error
    dtypes = {"e4m3": dtype.kFloat8E4M3, "e5m2": dtype.kFloat8E5M2}
    return _Engine(module.MXFP8Tensor, module.MXFP8Quantizer, dtypes, product)


def is_available() -> tuple[bool, str]:
    """Whether :func:`gemm` can run here, and if not, why."""
    try:
        _engine()
    except ImportError as error:
        return False, str(error)
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        return False, f"its MXFP8 needs compute capability 10.0 or later; this GPU has {major}.{minor}"
    return True, ""


def to_transformer_engine(
    rows: MXTensor | None = None, columns: MXTensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """An ``MXFP8Tensor`` of the same bytes.

    Args:
        rows: a matrix with blocks along axis -1, or square ones.
        columns: the same matrix with blocks along axis -2, or square ones. One of the two may be left out.
        dtype: what the tensor says it is when asked for its dtype.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: neither is given, they differ in shape or format, blocks run along the other axis, or a dimension
            is not a multiple of 32.
    """
    first = rows if rows is not None else columns
    if first is None:
        raise ValueError("to_transformer_engine takes rows, columns or both, not neither")
    for side in (rows, columns):
        _check(first, side)
    engine = _engine()
    row_parts = (None, None) if rows is None else _parts(rows.with_axis(-1), (128, 4))
    column_parts = (None, None) if columns is None else _parts(columns.with_axis(-2), (4, 128))
    kind = engine.dtypes[first.fmt.name]
    return engine.tensor(
        shape=tuple(first.shape),
        dtype=dtype,
        rowwise_data=row_parts[0],
        rowwise_scale_inv=row_parts[1],
        columnwise_data=column_parts[0],
        columnwise_scale_inv=column_parts[1],
        fp8_dtype=kind,
        quantizer=engine.quantizer(kind, rowwise=rows is not None, columnwise=columns is not None),
        with_gemm_swizzled_scales=False,
    )


def _check(first: MXTensor, side: MXTensor | None) -> None:
    """ValueError unless Transformer Engine can hold ``side`` beside ``first``."""
    if side is None:
        return
    if side.ndim != 2 or any(size % _BLOCK or size == 0 for size in side.shape):
        raise ValueError(f"Transformer Engine takes matrices of multiples of {_BLOCK}, not {tuple(side.shape)}")
    if side.shape != first.shape or side.fmt is not first.fmt:
        raise ValueError(f"rows and columns must be of one tensor, but are {first!r} and {side!r}")


def _parts(q: MXTensor, multiples: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and 1x32 scales as uint8, contiguous, the scales padded with zeros to ``multiples``."""
    scale = q.expanded_scale().view(torch.uint8)
    down, across = (-size % multiple for size, multiple in zip(scale.shape, multiples, strict=True))
    return q.qdata.view(torch.uint8).contiguous(), torch.nn.functional.pad(scale, (0, across, 0, down))


def from_transformer_engine(tensor: Any) -> tuple[MXTensor | None, MXTensor | None]:
    """``(rows, columns)`` of an ``MXFP8Tensor``: the same elements, and the scales without their padding; None for a
    copy that it does not have.

    Raises:
        ImportError: Transformer Engine is not installed.
        TypeError: another kind of tensor.
        ValueError: its scales are already in the tiles that only products read.
    """
    engine = _engine()
    if not hasattr(tensor, "_rowwise_scale_inv") or not hasattr(tensor, "_fp8_dtype"):
        raise TypeError(f"{type(tensor).__name__} is no MXFP8Tensor of Transformer Engine")
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        raise ValueError("its scales are in tiles, for products only: use a quantizer with optimize_for_gemm off")
    name = next((name for name, kind in engine.dtypes.items() if kind == tensor._fp8_dtype), None)
    if name is None:
        raise TypeError(f"elements are {tensor._fp8_dtype}: only E4M3 and E5M2 are known here")
    form = ELEMENT_FORMATS[name]
    rows = _side(tensor._rowwise_data, tensor._rowwise_scale_inv, form, -1)
    columns = _side(tensor._columnwise_data, tensor._columnwise_scale_inv, form, -2)
    return rows, columns


def _side(data: Any, scale: Any, form: ElementFormat, axis: int) -> MXTensor | None:
    if data is None:
        return None
    elements = data.view(torch.uint8).reshape(-1, data.shape[-1])  # its scales see all but the last dimension as one
    down, across = elements.shape
    down, across = (down, across // _BLOCK) if axis == -1 else (down // _BLOCK, across)
    return MXTensor(elements.view(form.dtype), scale.view(torch.uint8)[:down, :across], form, axis)


def gemm(
    a: MXTensor, b: MXTensor, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias`` by Transformer Engine, that is by cuBLAS: operands as in :func:`mxfp8.gemm`, with
    M, N and K multiples of 32.

    **Numerics.** Not measured. Products are exact; the sums are cuBLAS's, accumulated in float32.

    Raises:
        ImportError, ValueError: as :func:`to_transformer_engine`.
        ValueError: shapes that cannot be multiplied.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"gemm takes a[M, K] and b[N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    left, right = to_transformer_engine(a, dtype=out_dtype), to_transformer_engine(b, dtype=out_dtype)
    # In cuBLAS's column-major words the transpose of the second operand comes first, which gives out[M, N] in rows.
    out: torch.Tensor = _engine().product(
        right, left, out_dtype=out_dtype, layout="TN", bias=bias, use_split_accumulator=True
    )[0]
    return out
