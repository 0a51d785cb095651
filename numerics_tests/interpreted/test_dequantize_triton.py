"""The dequantisation kernel, in Triton's interpreter or on a GPU: bit for bit against ``mxfp8.tensor.dequantize``."""

import pytest
import torch

import mxfp8
from mxfp8.formats import BLOCK_SHAPES, ELEMENT_FORMATS
from mxfp8.tensor import block_rc, dequantize

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import dequantize_triton as kernel
from mxfp8.kernels._device import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 before pytest starts, or a GPU"
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's, where Inf is what is wanted
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits of the values, with one pattern for every NaN."""
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(INTEGERS[x.dtype.itemsize])


def quantized(*shape: int, **kw: object) -> mxfp8.MXTensor:
    return mxfp8.quantize(torch.randn(shape, device=DEVICE), backend="reference", **kw)


def check(qdata: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], *args: object) -> torch.Tensor:
    want, got = dequantize(qdata, scale, block, *args), kernel.dequantize(qdata, scale, block, *args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(bits(got), bits(want))
    return got


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=str)
def test_every_code_under_every_scale_byte(fmt: mxfp8.ElementFormat, dtype: torch.dtype, saturate: bool) -> None:
    """Ties and subnormals of bfloat16 and float16, byte 0, NaN by code and by byte, and overflow are all among them."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(256, 1).view(fmt.dtype)
    scale = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(8).view(256, 8)
    values = check(codes, scale, (1, 32), dtype, saturate)
    assert values[255].isnan().all()
    assert values[127, 0x38 if fmt.name == "e4m3" else 0x3C] == 1.0
    assert values[:255].isnan().sum() == 255 * (2 if fmt.name == "e4m3" else 6)


@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (2, 65, 70), (2, 3, 5, 40), (300,), (0, 64), (64, 0)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
def test_blocks_and_ragged_shapes(block: tuple[int, int], axis: int, shape: tuple[int, ...]) -> None:
    if len(shape) == 1 and (axis == -2 or block[0] > 1):
        pytest.skip("one dimension has no columns")
    q = quantized(*shape, axis=axis, block=block)
    for dtype in (torch.float32, torch.bfloat16):
        check(q.qdata, q.scale_bytes, block_rc(block, axis), dtype)
    check(q.qdata, q.scale, block_rc(block, axis))  # the same bytes as float8_e8m0fnu


@pytest.mark.parametrize("axis", [-1, -2])
def test_strides_and_memory_order(axis: int) -> None:
    q = quantized(3, 96, 64, axis=axis)
    block = block_rc((1, 32), axis)
    transposed = check(q.qdata.mT, q.scale_bytes.mT, block[::-1])
    assert transposed.stride() == (96 * 64, 1, 64)
    narrow = q[:, 32:96, :32]
    check(narrow.qdata, narrow.scale_bytes, block)
    check(q.qdata[::2], q.scale_bytes[::2], block)
    padded = torch.zeros(
        3, 64, 112, dtype=torch.uint8, device=DEVICE
    )  # columns with a pitch, as the quantiser lays them out
    padded[:, :, :96] = q.qdata.view(torch.uint8).mT
    columns = padded.view(q.qdata.dtype).mT[:, :96]
    assert torch.equal(check(columns, q.scale_bytes, block), q.dequantize())
    four = q.qdata.view(torch.uint8).view(3, 1, 96, 64).expand(3, 2, 96, 64)  # leading dimensions that do not merge
    check(four.view(q.qdata.dtype), q.scale_bytes[:, None].expand(3, 2, *q.scale_bytes.shape[1:]), block)


def test_dtypes_that_are_refused() -> None:
    q = quantized(2, 32)
    with pytest.raises(TypeError, match="use float32"):
        kernel.dequantize(q.qdata, q.scale_bytes, (1, 32), torch.int32)
    with pytest.raises(TypeError, match="float8"):
        kernel.dequantize(q.qdata.view(torch.uint8), q.scale_bytes, (1, 32))


def test_the_comparison_sees_a_changed_scale() -> None:
    q = quantized(32, 64)
    other = q.scale_bytes + 1
    assert not torch.equal(bits(kernel.dequantize(q.qdata, other, (1, 32))), bits(q.dequantize()))
