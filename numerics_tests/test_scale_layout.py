"""Tiled scales: against torchao and a script of the definition, exact inverses, and sequences that start whole tiles.

Run on CPU (plain torch), on a GPU, and in Triton's interpreter (through ``interpreted/test_scale_layout_triton.py``).
"""

import pytest
import torch

import mxfp8

pytest.importorskip("triton", reason="the module holds a Triton kernel")
from mxfp8.kernels import scale_layout as layout

shapes = pytest.mark.parametrize("rows", [1, 127, 128, 129, 130])
widths = pytest.mark.parametrize("columns", [1, 3, 4, 5, 90])
LENGTHS = {
    "mixed": [5, 128, 0, 129, 1, 300],
    "empty_ends": [0, 0, 200, 0],
    "whole": [128, 256],
    "one": [77],
    "none": [],
    "all_empty": [0, 0],
}


def scales(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, device=device)


def by_definition(scale: torch.Tensor) -> torch.Tensor:
    rows, columns = scale.shape
    across = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            out[(r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    return out


@widths
@shapes
def test_tiled_is_the_definition_and_comes_back(rows: int, columns: int, device: torch.device) -> None:
    scale = scales(rows, columns, device=device)
    want = by_definition(scale.cpu())
    for to, back in ((layout.to_tiled, layout.from_tiled), (layout.to_tiled_torch, layout.from_tiled_torch)):
        tiled = to(scale)
        assert torch.equal(tiled.cpu(), want)
        assert torch.equal(to(scale.view(torch.float8_e8m0fnu)), tiled)
        assert torch.equal(to(scale.mT.contiguous().mT), tiled)
        assert torch.equal(back(tiled, rows, columns), scale)


@widths
@shapes
def test_tiled_is_what_torchao_writes(rows: int, columns: int) -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="a peer; not installed here")
    scale = scales(rows, columns, device=torch.device("cpu"))
    assert torch.equal(layout.to_tiled(scale), torchao.to_blocked(scale))


def test_leading_dimensions_and_empty_matrices(device: torch.device) -> None:
    scale = scales(2, 3, 130, 5, device=device)
    tiled = layout.to_tiled(scale)
    assert torch.equal(tiled, layout.to_tiled_torch(scale))
    assert torch.equal(tiled[1, 2], layout.to_tiled(scale[1, 2]))
    assert torch.equal(layout.from_tiled(tiled, 130, 5), scale)
    for shape in ((0, 4), (3, 0), (0, 130, 5)):
        empty = scales(*shape, device=device)
        assert torch.equal(layout.from_tiled(layout.to_tiled(empty), *shape[-2:]), empty)


def test_a_wrong_size_is_refused(device: torch.device) -> None:
    tiled = layout.to_tiled(scales(130, 5, device=device))
    for back in (layout.from_tiled, layout.from_tiled_torch):
        with pytest.raises(ValueError, match="2048 bytes; those of 128 by 5 scales have 1024"):
            back(tiled, 128, 5)
    with pytest.raises(ValueError, match="in these sequences"):
        layout.from_tiled_jagged(tiled, torch.tensor([0, 3], device=device), 3, 5)


@pytest.mark.parametrize("extra", [0, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_sequence_starts_a_row_of_tiles(
    lengths: str, dtype: torch.dtype, extra: int, device: torch.device
) -> None:
    """Each sequence's tiles are those of its scales alone; rows of no sequence (``extra``) come back as zero."""
    sizes = LENGTHS[lengths]
    ends = torch.tensor([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device)
    total = sum(sizes)
    scale = scales(total + extra, 5, device=device)
    for to, back in (
        (layout.to_tiled_jagged, layout.from_tiled_jagged),
        (layout.to_tiled_jagged_torch, layout.from_tiled_jagged_torch),
    ):
        tiled, starts = to(scale, ends)
        rows_of_tiles = tiled.view(-1, 2 * 512)
        assert rows_of_tiles.shape[0] == layout.jagged_tiles(total + extra, len(sizes))
        assert starts.dtype == torch.int32
        assert starts.tolist() == [0, *torch.tensor([-(-n // 128) for n in sizes]).cumsum(0).int().tolist()]
        at = 0
        for s, n in enumerate(sizes):
            own = layout.to_tiled_torch(scale[at : at + n])
            assert torch.equal(rows_of_tiles[int(starts[s]) : int(starts[s + 1])].flatten(), own)
            at += n
        assert not rows_of_tiles[int(starts[-1]) :].any()
        want = scale.clone()
        want[total:] = 0
        assert torch.equal(back(tiled, ends, total + extra, 5), want)


def test_sequences_that_do_not_begin_at_row_zero(device: torch.device) -> None:
    scale, ends = scales(200, 3, device=device), torch.tensor([10, 150, 190], device=device)
    for to in (layout.to_tiled_jagged, layout.to_tiled_jagged_torch):
        tiled, starts = to(scale, ends)
        want = torch.cat([layout.to_tiled_torch(scale[10:150]), layout.to_tiled_torch(scale[150:190])])
        assert starts.tolist() == [0, 2, 3]
        assert torch.equal(tiled[: want.numel()], want)
    back = layout.from_tiled_jagged(tiled, ends, 200, 3)
    assert torch.equal(back[10:190], scale[10:190])
    assert not back[:10].any()
    assert not back[190:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (130, 150), (128, 128), (2, 129, 300), (257, 33)], ids=str)
def test_quantising_straight_into_tiles(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_quantize_tiled(shape, dtype, torch.device("cuda"))


def check_quantize_tiled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    from mxfp8.kernels.quantize_tiled_triton import quantize_tiled

    x = torch.randn(shape, device=device).to(dtype)
    x[..., 0, 0] = torch.nan
    for fmt in ("e4m3", "e5m2"):
        for view in (x, x.mT.contiguous().mT):
            want = mxfp8.quantize(view, fmt=fmt, backend="reference")
            qdata, tiled = quantize_tiled(view, fmt=want.fmt, scale_rule="rceil")
            assert torch.equal(qdata.view(torch.uint8), want.qdata.view(torch.uint8))
            assert torch.equal(tiled, layout.to_tiled_torch(want.scale_bytes))
