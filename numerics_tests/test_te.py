"""Exchange with Transformer Engine, which cannot be installed without a GPU toolchain: a stand-in takes its place that
has the constructors and attributes of its release 2.20 and reads the bytes as its documentation describes them."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch

import mxfp8
from mxfp8 import te


class DType(Enum):
    kFloat8E4M3 = 0  # noqa: N815  (its names)
    kFloat8E5M2 = 1  # noqa: N815


class Quantizer:
    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        self.dtype, self.rowwise_usage, self.columnwise_usage = fp8_dtype, rowwise, columnwise


class Tensor:
    """What ``MXFP8Tensor`` keeps, and what its shapes must be."""

    def __init__(
        self, *, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False, rowwise_data: Any,
        rowwise_scale_inv: Any, columnwise_data: Any, columnwise_scale_inv: Any, fp8_dtype: DType, quantizer: Quantizer,
        with_gemm_swizzled_scales: bool,
    ) -> None:  # fmt: skip
        rows, cols = shape
        for data, scale, size in (
            (rowwise_data, rowwise_scale_inv, (up(rows, 128), up(cols // 32, 4))),
            (columnwise_data, columnwise_scale_inv, (up(rows // 32, 4), up(cols, 128))),
        ):
            assert (data is None) == (scale is None)
            for part, want in ((data, shape), (scale, size)):
                assert part is None or (part.dtype, part.is_contiguous()) == (torch.uint8, True)
                assert part is None or tuple(part.shape) == want
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, self._quantizer, self.dtype = fp8_dtype, quantizer, dtype
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales

    def values(self, columnwise: bool = False) -> torch.Tensor:
        """Entry (i, j) times 2**(byte - 127), where the byte is at (i, j // 32) or at (i // 32, j)."""
        kind = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}[self._fp8_dtype]
        data, scale = self._rowwise_data, self._rowwise_scale_inv
        if columnwise:
            data, scale = self._columnwise_data, self._columnwise_scale_inv
        i, j = torch.meshgrid(*map(torch.arange, data.shape), indexing="ij")
        byte = scale[i // 32, j] if columnwise else scale[i, j // 32]
        return data.view(kind).double() * torch.exp2(byte.double() - 127)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def general_gemm(
    A: Tensor, B: Tensor, out_dtype: Any = None, quantization_params: Any = None, gelu: bool = False, *,
    layout: str = "TN", bias: Any = None, use_split_accumulator: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Column-major: with "TN" the first operand's rows are the output's columns."""
    assert layout == "TN"
    out = B.values() @ A.values().mT
    return (out if bias is None else out + bias.double()).to(out_dtype), None, None, None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    members: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": Tensor, "MXFP8Quantizer": Quantizer},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine_torch": {"DType": DType},
    }
    for name, contents in members.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def exact(q: mxfp8.MXTensor) -> torch.Tensor:
    return q.dequantize(torch.float64)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (1, 256)])
@pytest.mark.parametrize("shape", [(32, 32), (160, 288), (128, 128)])
def test_both_copies_there_and_back(shape: tuple[int, int], block: tuple[int, int], fmt: str) -> None:
    x = torch.randn(shape) * torch.logspace(-30, 30, shape[0])[:, None]
    rows, columns = mxfp8.quantize_both(x, fmt, block)
    there = te.to_transformer_engine(rows, columns, dtype=torch.float16)
    assert torch.equal(there.values(), exact(rows))
    assert torch.equal(there.values(columnwise=True), exact(columns))
    assert (there.dtype, there._quantizer.rowwise_usage, there._quantizer.columnwise_usage) == (
        torch.float16,
        True,
        True,
    )
    for back, q, axis in zip(te.from_transformer_engine(there), (rows, columns), (-1, -2), strict=True):
        assert back is not None
        assert (back.axis, back.block, back.fmt) == (axis, (1, 32), q.fmt)
        assert torch.equal(back.qdata.view(torch.uint8), q.qdata.view(torch.uint8))
        assert torch.equal(back.scale_bytes, q.expanded_scale().view(torch.uint8))


@pytest.mark.usefixtures("engine")
def test_one_copy_and_square_blocks() -> None:
    x = torch.randn(96, 64)
    for axis, sides in ((-1, (True, False)), (-2, (False, True))):
        q = mxfp8.quantize(x, axis)
        there = te.to_transformer_engine(rows=q if sides[0] else None, columns=q if sides[1] else None)
        assert tuple(part is not None for part in te.from_transformer_engine(there)) == sides
        assert (there._quantizer.rowwise_usage, there._quantizer.columnwise_usage) == sides
        assert torch.equal(there.values(columnwise=sides[1]), exact(q))
    square = mxfp8.quantize(x, block=(32, 32))
    both = te.to_transformer_engine(square, square)
    assert torch.equal(both.values(), exact(square))
    assert torch.equal(both.values(columnwise=True), exact(square))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("byte", [0, 1, 127, 254])
def test_scale_bytes_travel_as_they_are(byte: int) -> None:
    q = mxfp8.quantize(torch.ones(32, 64))
    q = mxfp8.MXTensor(q.qdata, torch.full_like(q.scale_bytes, byte), q.fmt)
    back, _ = te.from_transformer_engine(te.to_transformer_engine(q))
    assert back is not None
    assert (back.scale_bytes == byte).all()


@pytest.mark.usefixtures("engine")
def test_a_product() -> None:
    a, b = mxfp8.quantize(torch.randn(96, 128)), mxfp8.quantize(torch.randn(64, 128), fmt="e5m2", block=(32, 32))
    bias = torch.randn(64)
    out = te.gemm(a, b, bias=bias, out_dtype=torch.float32)
    assert torch.equal(out, (exact(a) @ exact(b).mT + bias.double()).float())
    with pytest.raises(ValueError, match=r"a\[M, K\] and b\[N, K\], not \(96, 128\) and \(64, 96\)"):
        te.gemm(a, mxfp8.quantize(torch.randn(64, 96)))


@pytest.mark.usefixtures("engine")
def test_what_it_cannot_hold_is_refused() -> None:
    x = torch.randn(64, 64)
    with pytest.raises(ValueError, match="not neither"):
        te.to_transformer_engine()
    with pytest.raises(ValueError, match=r"multiples of 32, not \(64, 80\)"):
        te.to_transformer_engine(mxfp8.quantize(torch.randn(64, 80)))
    with pytest.raises(ValueError, match="scaled along axis -1"):
        te.to_transformer_engine(columns=mxfp8.quantize(x))
    with pytest.raises(ValueError, match="must be of one tensor"):
        te.to_transformer_engine(mxfp8.quantize(x), mxfp8.quantize(x, -2, fmt="e5m2"))
    with pytest.raises(TypeError, match="is no MXFP8Tensor"):
        te.from_transformer_engine(x)
    there = te.to_transformer_engine(mxfp8.quantize(x))
    there._with_gemm_swizzled_scales = True
    with pytest.raises(ValueError, match="optimize_for_gemm off"):
        te.from_transformer_engine(there)


def test_missing_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match=r"pip install 'mxfp8\[te\]'"):
        te.to_transformer_engine(mxfp8.quantize(torch.randn(32, 32)))
    available, reason = te.is_available()
    assert not available
    assert "mxfp8[te]" in reason


@pytest.mark.usefixtures("engine")
def test_it_needs_blackwell() -> None:
    available, reason = te.is_available()
    if not torch.cuda.is_available():
        assert (available, reason) == (False, "torch sees no CUDA GPU")
    elif torch.cuda.get_device_capability() < (10, 0):
        assert not available
        assert "needs compute capability 10.0" in reason
