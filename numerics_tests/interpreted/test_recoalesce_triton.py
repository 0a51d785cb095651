"""The re-coalescing kernel, in Triton's interpreter or on a GPU: bit for bit against the reference."""

import pytest
import torch

import mxfp8
from mxfp8.formats import ELEMENT_FORMATS, ElementFormat
from mxfp8.reference import recoalesce as reference

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import recoalesce_triton as kernel
from mxfp8.kernels._device import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 before pytest starts, or a GPU"
)
formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=str)
STEPS = [((1, 32), (1, 128)), ((1, 32), (1, 256)), ((1, 32), (32, 32)), ((1, 32), (128, 128)), ((32, 32), (128, 128))]
STEPS += [((32, 1), (128, 1)), ((32, 1), (32, 32)), ((1, 128), (1, 128))]
steps = pytest.mark.parametrize("block, new_block", STEPS, ids=str)


def check(qdata: torch.Tensor, scale: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    (want, its), (got, scales) = reference.recoalesce(qdata, scale, *args), kernel.recoalesce(qdata, scale, *args)
    assert (got.dtype, got.shape, scales.dtype, scales.shape) == (want.dtype, want.shape, its.dtype, its.shape)
    assert torch.equal(scales, its)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    return got, scales


@formats
def test_every_code_at_every_distance(fmt: ElementFormat) -> None:
    """Each code 0 to 40 binades below its neighbour, and under bytes 0, 254 and 255; NaN and Inf codes among them."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(8, 32)
    one = torch.full((8, 32), 0x3C, dtype=torch.uint8, device=DEVICE)
    rows = torch.cat([codes, one], 1).repeat(44, 1).view(fmt.dtype)
    low = [127 - d for d in range(41)] + [0, 254, 255]
    scale = torch.tensor([[n, 127] for n in low], dtype=torch.uint8, device=DEVICE).repeat_interleave(8, 0)
    got, scales = check(rows, scale, (1, 32), (1, 64), fmt)
    assert scales[-1] == 255
    assert (got[:8].view(torch.uint8)[:, :32] != codes).sum() == (1 if fmt.name == "e4m3" else 5)  # NaN becomes 0x7F


@formats
@steps
@pytest.mark.parametrize("shape", [(130, 260), (2, 33, 129), (1, 1)], ids=str)
def test_blocks_and_ragged_shapes(shape, block, new_block, fmt: ElementFormat) -> None:
    axis = -2 if block[1] == 1 else -1
    x = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randint(-9, 9, shape, device=DEVICE))
    x[..., : shape[-1] // 2] = 0
    q = mxfp8.quantize(x, axis, fmt, block if axis == -1 else block[::-1], backend="reference")
    scale = q.scale_bytes.clone()
    scale[..., 0, 0] = 250  # under a block of zeros, unless the tensor is narrow
    check(q.qdata, scale, block, new_block, fmt)
    scale[..., -1, -1] = 255
    check(q.qdata, scale, block, new_block, fmt)
    columns, _ = check(q.qdata.mT.contiguous().mT, scale, block, new_block, fmt)
    if min(shape[-2:]) > 1:
        assert columns.stride(-2) == 1
        assert columns.stride(-1) % 16 == 0  # bulk copies can address every column


def test_rows_leading_dimensions_and_empty_tensors() -> None:
    for shape in ((300,), (2, 3, 5, 70), (0, 64), (3, 0), (0,), (2, 0, 64)):
        q = mxfp8.quantize(torch.randn(shape, device=DEVICE), backend="reference")
        check(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)


def test_blocks_that_do_not_fit_are_refused() -> None:
    q = mxfp8.quantize(torch.randn(64, 64, device=DEVICE), backend="reference")
    with pytest.raises(ValueError, match="must be multiples"):
        kernel.recoalesce(q.qdata, q.scale_bytes, (1, 32), (1, 48), q.fmt)
