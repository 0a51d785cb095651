"""Re-coalescing: the reference against a float64 script of its own, its contract, and what it costs."""

import math

import pytest
import torch

import mxfp8
from mxfp8.formats import E4M3, E5M2, ELEMENT_FORMATS, ElementFormat
from mxfp8.reference.recoalesce import recoalesce, recoalesce_loss
from mxfp8.tensor import dequantize, scale_values

formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=str)
STEPS = [((1, 32), (1, 128)), ((1, 32), (1, 256)), ((1, 32), (32, 32)), ((1, 32), (128, 128)), ((32, 32), (128, 128))]
STEPS += [((32, 1), (128, 1)), ((32, 1), (32, 32)), ((1, 128), (1, 128))]
steps = pytest.mark.parametrize("block, new_block", STEPS, ids=str)


def elements(*codes: int, fmt: ElementFormat = E4M3) -> torch.Tensor:
    """A row of 64: two blocks of 32, each starting with half of ``codes``."""
    row, half = torch.zeros(2, 32, dtype=torch.uint8), len(codes) // 2
    row[:, :half] = torch.tensor(codes, dtype=torch.uint8).view(2, half)
    return row.view(1, 64).view(fmt.dtype)


def joined(
    qdata: torch.Tensor, byte: tuple[int, int], fmt: ElementFormat = E4M3, device: torch.device | str = "cpu"
) -> tuple[list[int], int]:
    scale = torch.tensor([byte], dtype=torch.uint8, device=device)
    q, s = recoalesce(qdata.to(device), scale, (1, 32), (1, 64), fmt)
    assert q.dtype == fmt.dtype
    assert s.shape == (1, 1)
    return q.view(torch.uint8)[0].tolist(), int(s)


def test_a_lower_block_is_rounded_to_even_once(device: torch.device) -> None:
    # 17 binades apart a 448 is 0.0034 = 1.75 of the smallest element; one binade keeps normal codes exact.
    codes, byte = joined(elements(0x7E, 0x38, 0xFE, 0x09), (120, 121), device=device)
    assert (codes[:2], codes[32:34], byte) == ([0x76, 0x30], [0xFE, 0x09], 121)
    codes, byte = joined(elements(0x7E, 0x38, 0x7E, 0x00), (120, 137), device=device)
    assert (codes[:2], codes[32], byte) == ([0x02, 0x00], 0x7E, 137)
    # Odd subnormals halve to ties: 1 -> 0, 3 -> 2, 5 -> 2, 7 -> 4 units, with their signs.
    codes, _ = joined(elements(0x01, 0x83, 0x05, 0x87, 0x38, 0, 0, 0), (120, 121), device=device)
    assert codes[:4] == [0x00, 0x82, 0x02, 0x84]


def test_a_block_of_zeros_does_not_raise_the_others(device: torch.device) -> None:
    assert joined(elements(0x09, 0x80, 0x00, 0x80), (100, 200), device=device)[1] == 100
    codes, byte = joined(elements(0x00, 0x80, 0x80, 0x00), (100, 200), device=device)
    assert (codes[:2], codes[32:34], byte) == ([0x00, 0x80], [0x80, 0x00], 0)


@formats
def test_nan_and_inf(fmt: ElementFormat, device: torch.device) -> None:
    """Byte 255 takes the whole block, over zeros too; a NaN or Inf code under another byte stays alone."""
    for codes in ((0x38, 0x00), (0x00, 0x38), (0x00, 0x00)):
        got, byte = joined(elements(*codes, fmt=fmt), (255, 130), fmt, device)
        assert (set(got), byte) == ({0x7F}, 255)
    got, byte = joined(elements(0xFF, 0x3C, 0x40, 0x00, fmt=fmt), (127, 128), fmt, device)
    assert (got[0], byte, got.count(0x7F)) == (0x7F, 128, 1)
    if fmt is E5M2:
        got, _ = joined(elements(0xFC, 0x7C, 0x40, 0x7D, fmt=fmt), (127, 128), fmt, device)
        assert (got[:2], got[32:34]) == ([0xFC, 0x7C], [0x40, 0x7F])


@formats
@steps
@pytest.mark.parametrize("shape", [(300, 260), (2, 33, 129), (1, 1), (2, 3, 40, 64)], ids=str)
def test_against_a_float64_script(shape, block, new_block, fmt: ElementFormat, device: torch.device) -> None:
    """Scale bytes from the definition, elements by dividing in float64 and rounding with the format's own cast."""
    axis = -1 if block[0] == 1 or block[0] == block[1] else -2
    spread = torch.randn(shape, device=device) * torch.exp2(torch.randint(-9, 9, shape, device=device))
    spread[..., : shape[-1] // 2] *= torch.randint(0, 2, (), device=device)
    q = mxfp8.quantize(spread, axis, fmt, block if axis == -1 else block[::-1], backend="reference")
    got, scale = recoalesce(q.qdata, q.scale_bytes, block, new_block, fmt)
    rows, cols = new_block
    for at in torch.cartesian_prod(*map(torch.arange, scale.shape)).view(-1, scale.ndim).tolist():
        *lead, i, j = at
        here = (*lead, slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
        n, m = rows // block[0], cols // block[1]
        parts = q.scale_bytes[(*lead, slice(i * n, (i + 1) * n), slice(j * m, (j + 1) * m))]
        values = q.dequantize(torch.float64)[here]
        held = [
            int(parts[a, b])
            for a in range(parts.shape[0])
            for b in range(parts.shape[1])
            if values[a * block[0] : (a + 1) * block[0], b * block[1] : (b + 1) * block[1]].any()
        ]
        assert int(scale[tuple(at)]) == max(held, default=0)
        want = (values / 2.0 ** (max(held, default=0) - 127)).float().to(fmt.dtype)
        assert torch.equal(got[here].view(torch.uint8), want.view(torch.uint8))


@steps
def test_views_keep_their_memory_order(block, new_block, device: torch.device) -> None:
    axis = -1 if block[0] == 1 else -2 if block[1] == 1 else -1
    q = mxfp8.quantize(torch.randn(2, 64, 96, device=device), axis, block=block if axis == -1 else block[::-1])
    want, scale = recoalesce(q.qdata.contiguous(), q.scale_bytes, block, new_block, q.fmt)
    got, its = recoalesce(q.qdata.mT.contiguous().mT, q.scale_bytes, block, new_block, q.fmt)
    assert got.stride(-2) == 1
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(its, scale)


def test_rows_and_empty_tensors(device: torch.device) -> None:
    q = mxfp8.quantize(torch.randn(300, device=device))
    got, scale = recoalesce(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)
    whole, its = recoalesce(q.qdata[None], q.scale_bytes[None], (1, 32), (1, 128), q.fmt)
    assert torch.equal(got.view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(scale, its[0])
    for shape in ((0, 64), (3, 0), (0,), (2, 0, 64)):
        q = mxfp8.quantize(torch.randn(shape, device=device))
        got, scale = recoalesce(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)
        assert got.shape == shape
        assert scale.shape == mxfp8.quantize(torch.randn(shape), block=(1, 128)).scale.shape


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block, new_block", [((1, 32), (1, 128)), ((1, 32), (128, 128)), ((32, 32), (128, 128))])
def test_the_public_name(block, new_block, axis: int, device: torch.device) -> None:
    """The bits of the reference whatever ``auto`` takes, as a tensor that a product accepts."""
    q = mxfp8.quantize(torch.randn(96, 300, device=device) * torch.randn(96, 1, device=device).exp(), axis, block=block)
    got = mxfp8.recoalesce(q, new_block)
    rc, new_rc = (b if axis == -1 else b[::-1] for b in (block, new_block))
    want, scale = recoalesce(q.qdata, q.scale_bytes, rc, new_rc, q.fmt)
    assert (got.block, got.axis, got.fmt) == (new_block, axis, q.fmt)
    assert torch.equal(got.qdata.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got.scale_bytes, scale)
    assert mxfp8.recoalesce_loss(q, new_block) == recoalesce_loss(q.qdata, q.scale_bytes, rc, new_rc, q.fmt)
    if axis == -1:
        assert torch.equal(mxfp8.gemm(got, got), mxfp8.gemm(mxfp8.recoalesce(q, new_block, backend="reference"), got))


def test_blocks_that_do_not_fit_are_refused() -> None:
    q = mxfp8.quantize(torch.randn(64, 64))
    for new_block in ((1, 48), (32, 1)):
        with pytest.raises(ValueError, match="must be multiples"):
            recoalesce(q.qdata, q.scale_bytes, (1, 32), new_block, q.fmt)


def test_loss_counts_what_changed(device: torch.device) -> None:
    """Values with few bits move by a few binades unharmed; a 1 next to 2^20 is lost."""
    x = torch.ones(1, 128, device=device)
    x[0, 64] = 8.0
    q = mxfp8.quantize(x)
    loss = recoalesce_loss(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)
    assert (loss.changed_frac, loss.sqnr_db) == (0.0, math.inf)
    x[0, 64] = 2.0**20
    q = mxfp8.quantize(x)
    loss = recoalesce_loss(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)
    before = dequantize(q.qdata, q.scale_bytes, (1, 32), torch.float64)
    assert loss.changed_frac == (before == 1).sum().item() / 128
    assert loss.sqnr_db == pytest.approx(10 * math.log10(before.square().sum().item() / (before == 1).sum().item()))


def test_scale_of_the_result_is_that_of_the_values() -> None:
    """Against quantising the dequantised tensor coarsely: the same bytes unless a maximum rounded up a binade."""
    q = mxfp8.quantize(torch.randn(64, 256))
    _, scale = recoalesce(q.qdata, q.scale_bytes, (1, 32), (1, 128), q.fmt)
    assert torch.equal(scale, mxfp8.quantize(q.dequantize(), block=(1, 128)).scale_bytes)
    assert scale_values(scale).isfinite().all()
