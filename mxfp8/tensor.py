"""``MXTensor``: an immutable pair of 8-bit elements and power-of-two block scales.

It is a plain frozen dataclass and not a ``torch.Tensor`` subclass: arithmetic on it is an error instead of a silent
dequantisation, and the functions below the public ops see ordinary tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from mxfp8.formats import BLOCK_SHAPES, SCALE_DTYPE, BlockShape, ElementFormat, get_block, get_format

__all__ = ["MXTensor", "assembled", "block_rc", "cat", "dequantize", "rounded", "scale_shape", "scale_values"]


def block_rc(block: BlockShape, axis: int) -> tuple[int, int]:
    """Block extent as ``(rows, columns)``: ``block`` is (across, along), ``axis`` says which one is *along*."""
    return block if axis == -1 else (block[1], block[0])


def scale_shape(shape: Sequence[int], block: BlockShape, axis: int) -> tuple[int, ...]:
    """Shape of the compact scale of a tensor of ``shape``: one entry per block, a ragged tail counts as a block."""
    rows, cols = block_rc(block, axis)
    if len(shape) == 1:
        return (-(-shape[0] // cols),)
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def check_axis(axis: int, ndim: int, block: BlockShape) -> None:
    """ValueError unless ``axis`` is -1 or -2 and a tensor of ``ndim`` dimensions has it."""
    if not isinstance(axis, int) or axis not in (-1, -2):
        raise ValueError(f"axis is {axis!r}: use -1 (blocks along the last dimension) or -2 (along the one before)")
    if ndim < 1:
        raise ValueError("a 0-dim tensor has no axis to scale along: reshape it to at least one dimension")
    if ndim == 1 and (axis == -2 or block[0] != 1):
        raise ValueError(f"a 1-D tensor takes axis=-1 and a block of one row, not axis={axis} with block={block}")


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Exact float32 values of E8M0 bytes: ``2**(byte - 127)``; byte 0 is 2**-127 (a float32 subnormal), 255 is NaN."""
    byte = (scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def _spread(scale: torch.Tensor, rows: int, cols: int, shape: Sequence[int]) -> torch.Tensor:
    """Repeat per-block values over their blocks and cut the ragged tail: one value per element."""
    if cols > 1:
        scale = scale.repeat_interleave(cols, dim=-1)
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=-2)
    if scale.ndim > 1:
        scale = scale[..., : shape[-2], :]
    return scale[..., : shape[-1]]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.to(dtype)`` without the call that would change nothing: torch 2.11 compiles such a call inside an autograd
    function into two outputs that are one tensor, and the gradient of the first is lost."""
    return x if x.dtype == dtype else x.to(dtype)


def _decode(qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Element codes as values, in a new tensor. On CPU through a table: torch converts float8 there one by one."""
    if qdata.device.type != "cpu" or torch.compiler.is_compiling():
        return qdata.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(qdata.dtype).to(dtype)
    return table.index_select(0, qdata.view(torch.uint8).flatten().to(torch.int32)).view(qdata.shape)


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    saturate: bool = False,
) -> torch.Tensor:
    """``qdata * scale`` for plain tensors; ``block`` is (rows, columns). See :meth:`MXTensor.dequantize`."""
    if qdata.ndim >= 2 and qdata.stride(-1) != 1 and qdata.stride(-2) == 1:
        # Work in memory order: a transposed view costs three times as much.
        return dequantize(qdata.mT, scale.mT, (block[1], block[0]), dtype, saturate).mT
    rows, cols = block
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values, factors = _decode(qdata, exact), rounded(scale_values(scale), exact)
    out: torch.Tensor
    whole = qdata.shape[-1] % cols == 0 and (qdata.ndim < 2 or qdata.shape[-2] % rows == 0)
    if whole and qdata.numel() and qdata.ndim >= 2:
        blocks = values.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))
        out = blocks.mul_(factors[..., :, None, :, None]).flatten(-2, -1).flatten(-3, -2)
    else:
        out = values * _spread(factors, rows, cols, qdata.shape)
    if saturate:
        limit = torch.finfo(dtype).max
        out = out.clamp(-limit, limit)
    return rounded(out, dtype)


@dataclass(frozen=True, eq=False, init=False, slots=True)
class MXTensor:
    """Elements and scales of a microscaling tensor: ``x ~ qdata * scale``.

    Args:
        qdata: elements, the shape and (usually) strides of the tensor they stand for, dtype ``fmt.dtype``.
        scale: ``torch.float8_e8m0fnu`` (or the same bytes as uint8), one per block (compact). For ``axis=-1`` and block
            (r, c) its shape is ``[..., ceil(rows/r), ceil(columns/c)]``; for ``axis=-2`` the two block extents swap.
        fmt: element format (an :class:`~mxfp8.formats.ElementFormat` or its name).
        axis: -1 or -2, the dimension along which blocks run. A GEMM contracts over this one.
        block: (across, along), one of :data:`~mxfp8.formats.BLOCK_SHAPES`.

    Raises:
        ValueError: the shapes of ``qdata`` and ``scale`` do not fit ``axis`` and ``block``.
        TypeError: wrong dtypes.

    **Numerics.** Scale byte ``c`` means ``2**(c - 127)`` for 0..254 (0 is 2**-127, not zero); 255 makes the whole block
    NaN. OCP Microscaling Formats v1.0, section 5.
    """

    qdata: torch.Tensor
    scale_bytes: torch.Tensor  # uint8: what kernels read, and what torch.compile handles on every device
    fmt: ElementFormat
    axis: int
    block: BlockShape

    def __init__(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        fmt: str | ElementFormat,
        axis: int = -1,
        block: BlockShape = (1, 32),
    ) -> None:
        form, block = get_format(fmt), get_block(block)
        for name, part in (("qdata", qdata), ("scale", scale)):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"{name} is a {type(part).__name__}: use a tensor")
            # torch.compile cannot read the layout inside a backward pass; what it traces is dense.
            if not torch.compiler.is_compiling() and part.layout != torch.strided:
                raise TypeError(f"{name} has layout {part.layout}: use a dense tensor")
        if qdata.device != scale.device:
            raise ValueError(f"qdata is on {qdata.device}, scale on {scale.device}: move one of them")
        if qdata.dtype != form.dtype:
            raise TypeError(f"qdata is {qdata.dtype}, but format {form} is stored as {form.dtype}")
        if scale.dtype not in (SCALE_DTYPE, torch.uint8):
            raise TypeError(f"scale is {scale.dtype}: use {SCALE_DTYPE}, or its bytes as torch.uint8")
        check_axis(axis, qdata.ndim, block)
        want = scale_shape(qdata.shape, block, axis)
        if tuple(scale.shape) != want:
            raise ValueError(
                f"scale has shape {tuple(scale.shape)}; qdata of shape {tuple(qdata.shape)} with "
                f"axis={axis} and block={block} needs {want}"
            )
        self._set(qdata, scale if scale.dtype == torch.uint8 else scale.view(torch.uint8), form, axis, block)

    @classmethod
    def trusted(
        cls, qdata: torch.Tensor, scale_bytes: torch.Tensor, fmt: ElementFormat, axis: int, block: BlockShape
    ) -> MXTensor:
        """Without the checks, which cost as much as a launch: for parts that a kernel has just made to measure."""
        if not torch.compiler.is_compiling():
            return assembled(qdata, scale_bytes, fmt, axis, block)
        out = object.__new__(cls)
        out._set(qdata, scale_bytes, fmt, axis, block)
        return out

    def _set(
        self, qdata: torch.Tensor, scale_bytes: torch.Tensor, fmt: ElementFormat, axis: int, block: BlockShape
    ) -> None:
        put = object.__setattr__
        put(self, "qdata", qdata)
        put(self, "scale_bytes", scale_bytes)
        put(self, "fmt", fmt)
        put(self, "axis", axis)
        put(self, "block", block)

    def _like(self, qdata: torch.Tensor, scale_bytes: torch.Tensor) -> MXTensor:
        return MXTensor(qdata, scale_bytes, self.fmt, self.axis, self.block)

    # What it is

    @property
    def scale(self) -> torch.Tensor:
        """Scales as ``torch.float8_e8m0fnu``, a view of ``scale_bytes``."""
        return self.scale_bytes.view(SCALE_DTYPE)

    @property
    def shape(self) -> torch.Size:
        return self.qdata.shape

    @property
    def ndim(self) -> int:
        return self.qdata.ndim

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales together (8.25 bit per element for 1x32 blocks)."""
        return self.qdata.numel() + self.scale_bytes.numel()

    @property
    def is_square(self) -> bool:
        """True if one scale covers a square, so that the tensor and its transpose have the same scales."""
        return self.block[0] == self.block[1]

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return (
            f"MXTensor(shape={tuple(self.shape)}, fmt={self.fmt}, axis={self.axis}, block={self.block}, "
            f"device={self.device})"
        )

    # What it means

    def dequantize(self, dtype: torch.dtype = torch.float32, *, saturate: bool = False) -> torch.Tensor:
        """Return ``qdata * scale`` as a tensor of ``dtype``, with the shape of ``qdata``.

        **Numerics.** The product is formed in float32 (float64 for float64), where it is exact, and rounded once to
        ``dtype``. A block whose scale byte is 255 is NaN. Elements of 2**128 and above exceed float32: they become Inf
        there, or the largest finite number of ``dtype`` with ``saturate=True`` (NaN stays NaN).
        """
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise TypeError(f"dequantize to {dtype}: use float32, bfloat16, float16 or float64")
        return dequantize(self.qdata, self.scale_bytes, block_rc(self.block, self.axis), dtype, saturate)

    def expanded_scale(self) -> torch.Tensor:
        """Scales in the 1x32 form that any MX consumer expects: ``[..., R, ceil(C/32)]`` for axis -1,
        ``[..., ceil(R/32), C]`` for axis -2. The same bytes, repeated; ``qdata`` fits it unchanged."""
        rows, cols = block_rc(self.block, self.axis)
        r32, c32 = block_rc((1, 32), self.axis)
        out = _spread(self.scale_bytes, rows // r32, cols // c32, scale_shape(self.shape, (1, 32), self.axis))
        return out.contiguous().view(SCALE_DTYPE)

    def scales_along(self, axis: int) -> bool:
        """True if blocks run along ``axis`` (-1 or -2); a square block runs along both."""
        return self.axis == axis or self.is_square

    def with_axis(self, axis: int) -> MXTensor:
        """The same square-block tensor, declared to be scaled along ``axis``. ValueError if blocks are not square."""
        if not self.scales_along(axis):
            raise ValueError(
                f"{self!r} is scaled along axis {self.axis}: quantise from high precision with axis={axis}"
            )
        return MXTensor(self.qdata, self.scale_bytes, self.fmt, axis, self.block)

    # Views

    @property
    def mT(self) -> MXTensor:  # noqa: N802  (torch's name)
        """The transpose of the last two dimensions, a view: blocks that ran along -1 now run along -2."""
        if self.ndim < 2:
            raise ValueError("a 1-D MXTensor has no transpose")
        return MXTensor.trusted(self.qdata.mT, self.scale_bytes.mT, self.fmt, -3 - self.axis, self.block)

    def t(self) -> MXTensor:
        if self.ndim != 2:
            raise ValueError(f"t() takes a 2-D MXTensor, this one has shape {tuple(self.shape)}: use .mT")
        return self.mT

    def transpose(self, dim0: int, dim1: int) -> MXTensor:
        """Swap the last two dimensions (torch's signature; other pairs are an error)."""
        if {dim0 % self.ndim, dim1 % self.ndim} != {self.ndim - 1, self.ndim - 2}:
            raise ValueError(f"transpose({dim0}, {dim1}): only the last two dimensions can be swapped")
        return self.mT

    def contiguous(self) -> MXTensor:
        return self._like(self.qdata.contiguous(), self.scale_bytes.contiguous())

    def narrow(self, dim: int, start: int, length: int) -> MXTensor:
        """A view of ``length`` entries of ``dim`` from ``start``; both ends lie on block boundaries (or at the end)."""
        dim = self._dim(dim)
        size = self.shape[dim]
        if not (0 <= start <= size and 0 <= length <= size - start):
            raise ValueError(f"narrow({dim}, {start}, {length}) exceeds dimension {dim} of {tuple(self.shape)}")
        step = self._step(dim)
        stop = start + length
        if start % step or (stop % step and stop != size):
            raise ValueError(
                f"entries {start}..{stop} of dimension {dim} cut a block of {step}: slice at multiples of {step}"
            )
        scale = self.scale_bytes.narrow(dim, start // step, -(-length // step))
        return self._like(self.qdata.narrow(dim, start, length), scale)

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[MXTensor, ...]:
        """Like ``torch.split``; ValueError if a piece would not start on a block boundary."""
        size = self.shape[self._dim(dim)]
        if isinstance(split_size_or_sections, int):
            if split_size_or_sections < 1:
                raise ValueError(f"split size is {split_size_or_sections}: use a size >= 1")
            step = split_size_or_sections
            sections = [min(step, size - i) for i in range(0, size, step)] or [0]
        else:
            sections = list(split_size_or_sections)
        if sum(sections) != size:
            raise ValueError(f"sections {sections} do not add up to {size}, the size of dimension {dim}")
        starts = [sum(sections[:i]) for i in range(len(sections))]
        return tuple(self.narrow(dim, a, n) for a, n in zip(starts, sections, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[MXTensor, ...]:
        """Like ``torch.chunk``; ValueError if a piece would not start on a block boundary."""
        if chunks < 1:
            raise ValueError(f"chunk into {chunks} pieces: use at least 1")
        size = self.shape[self._dim(dim)]
        return self.split(math.ceil(size / chunks) if size else [0] * chunks, dim)

    def __getitem__(self, index: Any) -> MXTensor:
        """Slices with step 1 on block boundaries; integers on leading (batch) dimensions only."""
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        out, dim = self, 0
        for item in items:
            if isinstance(item, slice) and item.step in (None, 1):
                start, stop, _ = item.indices(out.shape[dim])
                out, dim = out.narrow(dim, start, max(0, stop - start)), dim + 1
            elif isinstance(item, int) and dim < out.ndim - 2:
                out = out._like(out.qdata.select(dim, item), out.scale_bytes.select(dim, item))
            else:
                raise TypeError(
                    f"index {item!r}: use slices with step 1, and integers on leading dimensions only; "
                    "for anything else index the dequantised tensor"
                )
        return out

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise ValueError(f"dimension {dim} of a tensor with {self.ndim} dimensions")
        return dim % self.ndim

    def _step(self, dim: int) -> int:
        """Block extent along ``dim`` (1 for leading dimensions)."""
        rows, cols = block_rc(self.block, self.axis)
        return cols if dim == self.ndim - 1 else rows if dim == self.ndim - 2 else 1

    # Moving and storing

    def to(self, device: str | torch.device | torch.dtype, *, non_blocking: bool = False) -> MXTensor:
        """Move to ``device``. A dtype is refused: say ``dequantize(dtype)`` when that is meant."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"an MXTensor has no other dtype: use .dequantize({device})")
        qdata = self.qdata.to(device, non_blocking=non_blocking)
        return self._like(qdata, self.scale_bytes.to(device, non_blocking=non_blocking))

    def clone(self) -> MXTensor:
        return self._like(self.qdata.clone(), self.scale_bytes.clone())

    def detach(self) -> MXTensor:
        return self  # elements and scales never require grad

    def to_parts(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """``(tensors, metadata)`` as safetensors takes them: ``save_file(tensors, path, metadata=metadata)``."""
        meta = {
            "fmt": self.fmt.name,
            "axis": str(self.axis),
            "block": f"{self.block[0]}x{self.block[1]}",
        }
        whole = self.contiguous()
        return {"qdata": whole.qdata, "scale": whole.scale}, meta

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> MXTensor:
        """Inverse of :meth:`to_parts`. ValueError naming what is missing or malformed."""
        for name, part in (("tensors", tensors), ("metadata", metadata)):
            if not isinstance(part, Mapping):
                raise TypeError(f"{name} is a {type(part).__name__}: use a mapping, as to_parts gives it")
        missing = [k for k in ("qdata", "scale") if k not in tensors]
        missing += [k for k in ("fmt", "axis", "block") if k not in metadata]
        if missing:
            raise ValueError(f"not the parts of an MXTensor: {', '.join(missing)} missing")
        axis, blocks = metadata["axis"], {f"{across}x{along}": (across, along) for across, along in BLOCK_SHAPES}
        if not isinstance(axis, str) or axis not in ("-1", "-2"):
            raise ValueError(f"axis is {axis!r}: use the text '-1' or '-2'")
        if metadata["block"] not in list(blocks):
            raise ValueError(f"block is {metadata['block']!r}: use one of {', '.join(map(repr, blocks))}")
        block = blocks[metadata["block"]]
        return cls(tensors["qdata"], tensors["scale"], get_format(metadata["fmt"]), int(axis), block)

    def __reduce__(self) -> tuple[Callable[..., MXTensor], tuple[Any, ...]]:
        # Neither pickle nor deepcopy knows float8 storages everywhere: bytes travel as uint8.
        return _rebuild, (self.qdata.view(torch.uint8), self.scale_bytes, self.fmt.name, self.axis, self.block)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own: dict[Any, Callable[..., Any]] = {
            torch.chunk: cls.chunk,
            torch.split: cls.split,
            torch.cat: cat,
            torch.transpose: cls.transpose,
            torch.t: cls.t,
            torch.narrow: cls.narrow,
        }
        if func not in own:
            name = getattr(func, "__name__", str(func))
            raise TypeError(f"torch.{name} does not take an MXTensor: use mxfp8.gemm, or .dequantize() first")
        # torch names its first argument; as a method it is self.
        named = {("self" if name in ("input", "tensor") else name): v for name, v in (kwargs or {}).items()}
        return own[func](*args, **named)


# A third of the time of object.__setattr__; torch.compile does not know them.
_new = object.__new__
_set_qdata, _set_scale_bytes, _set_fmt, _set_axis, _set_block = (
    MXTensor.__dict__[name].__set__ for name in ("qdata", "scale_bytes", "fmt", "axis", "block")
)


def assembled(
    qdata: torch.Tensor, scale_bytes: torch.Tensor, fmt: ElementFormat, axis: int, block: BlockShape
) -> MXTensor:
    """:meth:`MXTensor.trusted` outside ``torch.compile``, where a call takes no longer than a small kernel's launch."""
    out = _new(MXTensor)
    _set_qdata(out, qdata)
    _set_scale_bytes(out, scale_bytes)
    _set_fmt(out, fmt)
    _set_axis(out, axis)
    _set_block(out, block)
    return out


def cat(tensors: Sequence[MXTensor], dim: int = 0) -> MXTensor:
    """Concatenate MX tensors of one format, axis and block along ``dim``.

    ValueError if they differ, or if a tensor other than the last ends inside a block along ``dim``.
    """
    if not tensors:
        raise ValueError("cat needs at least one MXTensor")
    first = tensors[0]
    dim = first._dim(dim)
    for i, q in enumerate(tensors):
        if (q.fmt, q.axis, q.block) != (first.fmt, first.axis, first.block):
            raise ValueError(f"cat: tensor {i} is {q!r}, tensor 0 is {first!r}: format, axis and block must agree")
        if i < len(tensors) - 1 and q.shape[dim] % q._step(dim):
            size, step = q.shape[dim], q._step(dim)
            raise ValueError(f"cat: tensor {i} has {size} entries along {dim}, not a multiple of {step}")
    qdata = torch.cat([q.qdata.view(torch.uint8) for q in tensors], dim).view(first.fmt.dtype)
    return first._like(qdata, torch.cat([q.scale_bytes for q in tensors], dim))


def _rebuild(qdata: torch.Tensor, scale: torch.Tensor, fmt: str, axis: int, block: BlockShape) -> MXTensor:
    form = get_format(fmt)
    return MXTensor(qdata.view(form.dtype), scale, form, axis, block)


def _flatten(q: MXTensor) -> tuple[list[torch.Tensor], tuple[str, int, BlockShape]]:
    return [q.qdata, q.scale_bytes], (q.fmt.name, q.axis, q.block)


def _unflatten(children: Iterable[Any], context: Any) -> MXTensor:
    # Leaves may be anything while a tree is mapped, so the checks of __post_init__ do not apply here.
    fmt, axis, block = context
    qdata, scale_bytes = children
    return MXTensor.trusted(qdata, scale_bytes, get_format(fmt), axis, block)


pytree.register_pytree_node(
    MXTensor,
    _flatten,
    _unflatten,
    serialized_type_name="mxfp8.MXTensor",
    # Through JSON a tuple comes back as a list, and the tree would no longer equal itself.
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: (context[0], context[1], tuple(context[2])),
)
torch.serialization.add_safe_globals([MXTensor, _rebuild])
