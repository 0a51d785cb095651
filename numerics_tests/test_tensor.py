"""``MXTensor``: views and pieces keep every byte, storage round trips, and nonsense is refused by name."""

import copy
import io
import itertools
import pickle
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree

import mxfp8
from mxfp8 import MXTensor
from mxfp8.formats import BLOCK_SHAPES

blocks = pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
axes = pytest.mark.parametrize("axis", [-1, -2])


def make(*shape: int, device: torch.device | str = "cpu", **kw) -> MXTensor:
    return mxfp8.quantize(torch.randn(shape, device=device), **kw)


def assert_same(a: MXTensor, b: MXTensor) -> None:
    assert (a.fmt, a.axis, a.block, a.shape) == (b.fmt, b.axis, b.block, b.shape)
    assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
    assert torch.equal(a.scale_bytes, b.scale_bytes)


# Views


@blocks
@axes
def test_transpose_is_the_quantised_transpose(block, axis: int, device: torch.device) -> None:
    x = torch.randn(2, 130, 70, device=device)
    q = mxfp8.quantize(x, axis, block=block)
    assert_same(q.mT, mxfp8.quantize(x.mT, -3 - axis, block=block))
    assert_same(q.mT.mT, q)
    assert_same(torch.transpose(q, -1, -2), q.mT)
    assert_same(torch.transpose(input=q, dim0=1, dim1=2), q.mT)
    assert torch.equal(q.mT.dequantize(), q.dequantize().mT)
    assert q.mT.qdata.data_ptr() == q.qdata.data_ptr()


@pytest.mark.parametrize("block", [b for b in BLOCK_SHAPES if b[0] == b[1]], ids=str)
def test_square_blocks_commute_with_transposition(block, device: torch.device) -> None:
    x = torch.randn(130, 70, device=device)
    q = mxfp8.quantize(x, -1, block=block)
    assert_same(q.with_axis(-2), mxfp8.quantize(x, -2, block=block))
    assert_same(q.mT.with_axis(-1), mxfp8.quantize(x.mT, -1, block=block))
    assert q.scales_along(-1)
    assert q.scales_along(-2)


def test_t_and_transpose_refuse_what_has_no_meaning() -> None:
    q = make(2, 32, 64)
    with pytest.raises(ValueError, match="2-D"):
        q.t()
    with pytest.raises(ValueError, match="only the last two"):
        q.transpose(0, 1)
    with pytest.raises(ValueError, match="1-D"):
        _ = make(32).mT
    with pytest.raises(ValueError, match="quantise from high precision"):
        make(32, 32).with_axis(-2)


@blocks
@axes
def test_expanded_scale_is_a_valid_mx_tensor(block, axis: int, device: torch.device) -> None:
    """The same qdata under 1x32 scales: same values, for ragged shapes and leading dimensions too."""
    for shape in ((2, 130, 70), (33, 129), (1, 1), (256, 257)):
        q = mxfp8.quantize(torch.randn(shape, device=device), axis, block=block)
        assert q.expanded_scale().dtype == torch.float8_e8m0fnu
        plain = MXTensor(q.qdata, q.expanded_scale(), q.fmt, axis)
        assert torch.equal(plain.dequantize(), q.dequantize())
        assert torch.equal(plain.expanded_scale().view(torch.uint8), plain.scale_bytes)


def test_expanded_scale_of_a_row() -> None:
    q = make(300, block=(1, 128))
    assert q.expanded_scale().view(torch.uint8).tolist() == q.scale_bytes.repeat_interleave(4)[:10].tolist()


# Pieces

PIECES = {
    "method": lambda q, n, dim: q.split(n, dim),
    "method_keyword": lambda q, n, dim: q.split(n, dim=dim),
    "function": lambda q, n, dim: torch.split(q, n, dim),
    "function_keyword": lambda q, n, dim: torch.split(q, n, dim=dim),
    "function_all_keywords": lambda q, n, dim: torch.split(tensor=q, split_size_or_sections=n, dim=dim),
    "sections": lambda q, n, dim: q.split([min(n, q.shape[dim] - i) for i in range(0, q.shape[dim], n)], dim),
    "narrow": lambda q, n, dim: tuple(
        torch.narrow(q, dim=dim, start=i, length=min(n, q.shape[dim] - i)) for i in range(0, q.shape[dim], n)
    ),
    "slices": lambda q, n, dim: tuple(
        q[..., i : i + n] if dim == 2 else q[:, i : i + n] for i in range(0, q.shape[dim], n)
    ),
}


@pytest.mark.parametrize("how", PIECES)
@pytest.mark.parametrize("dim", [1, 2])
@axes
@blocks
def test_pieces_are_those_of_the_values_and_join_again(block, axis: int, dim: int, how: str) -> None:
    rows, cols = block if axis == -1 else block[::-1]
    q = make(2, 2 * rows + 1, 2 * cols + 5, axis=axis, block=block)
    size = (rows, cols)[dim - 1]
    parts = PIECES[how](q, size, dim)
    assert isinstance(parts, tuple)
    for part, want in zip(parts, q.dequantize().split(size, dim), strict=True):
        assert torch.equal(part.dequantize(), want)
        assert part.qdata.untyped_storage().data_ptr() == q.qdata.untyped_storage().data_ptr()
    for joined in (mxfp8.cat(parts, dim), torch.cat(parts, dim=dim), torch.cat(tensors=list(parts), dim=dim - 3)):
        assert_same(joined, q)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 7])
def test_chunks_are_torchs(chunks: int) -> None:
    for shape, dim in (((160, 64), 0), ((64, 160), 1), ((0, 64), 0), ((7, 3, 32), 0)):
        q = make(*shape)
        want = torch.chunk(q.dequantize(), chunks, dim)
        if dim == 1 and any(w.shape[1] % 32 for w in want[:-1]):
            with pytest.raises(ValueError, match="cut a block of 32"):
                q.chunk(chunks, dim)
            continue
        named = torch.chunk(input=q, chunks=chunks, dim=dim)
        for got in (q.chunk(chunks, dim), torch.chunk(q, chunks, dim=dim), named):
            assert [g.shape for g in got] == [w.shape for w in want]
            assert all(torch.equal(g.dequantize(), w) for g, w in zip(got, want, strict=True))


@axes
def test_cuts_inside_a_block_are_refused(axis: int) -> None:
    q = make(3, 70, 70, axis=axis)
    dim = 2 if axis == -1 else 1
    for cut in (
        lambda: q.narrow(dim, 16, 32),
        lambda: q.narrow(dim, 32, 16),
        lambda: q.split(16, dim),
        lambda: q.split([33, 37], dim),
        lambda: torch.chunk(q, 2, dim=dim),
        lambda: q.mT[..., 5:] if axis == -2 else q[..., 5:],
    ):
        with pytest.raises(ValueError, match="cut a block of 32: slice at multiples of 32"):
            cut()
    q.narrow(3 - dim, 16, 5)  # across the blocks any cut is good


def test_indices() -> None:
    q = make(3, 4, 64, 96)
    x = q.dequantize()
    for index in (
        (1,),
        (-1, 2),
        (slice(1, None), 0),
        (0, slice(1, 3), slice(5, 9), slice(32, 64)),
        (..., slice(0, 32)),
        (1, ..., slice(64, None)),
        (slice(None),) * 4,
        (slice(2, 1),),
        (..., slice(96, None)),
        (),
    ):
        assert torch.equal(q[index].dequantize(), x[index])
    assert torch.equal(torch.stack([p.dequantize() for p in q]), x)
    for index in ((0, 0, 0), (slice(0, None, 2),), (None,), (torch.tensor([0]),), ([0, 1],), (0, 0, slice(None), 1)):
        with pytest.raises(TypeError, match="use slices with step 1"):
            q[index]
    with pytest.raises(IndexError):
        q[3]


@pytest.mark.parametrize(
    "match, call",
    [
        ("exceeds dimension 0", lambda q: q.narrow(0, 60, 10)),
        ("exceeds dimension 0", lambda q: q.narrow(0, -1, 1)),
        ("exceeds dimension 0", lambda q: q.split([-32, 96])),
        ("dimension 2 of a tensor with 2", lambda q: q.narrow(2, 0, 1)),
        ("dimension -3 of a tensor with 2", lambda q: q.split(32, -3)),
        ("use a size >= 1", lambda q: q.split(0)),
        ("at least 1", lambda q: q.chunk(0)),
        ("do not add up to 64", lambda q: q.split([32, 31])),
        ("at least one MXTensor", lambda q: mxfp8.cat([])),
        ("tensor 1 is .*e5m2", lambda q: mxfp8.cat([q, make(64, 64, fmt="e5m2")])),
        ("tensor 1 is .*axis=-2", lambda q: mxfp8.cat([q, q.mT])),
        ("tensor 2 is .*block=.32, 32.", lambda q: mxfp8.cat([q, q, make(64, 64, block=(32, 32))])),
        ("tensor 0 has 40 entries along 1, not a multiple of 32", lambda q: mxfp8.cat([make(64, 40), q], dim=1)),
    ],
)
def test_bad_pieces_are_named(match: str, call) -> None:
    with pytest.raises(ValueError, match=match):
        call(make(64, 64))


# Arithmetic is refused


@pytest.mark.parametrize(
    "name, call",
    [
        ("add", lambda q: torch.add(q, q)),
        ("add", lambda q: torch.add(torch.zeros(32, 32), q)),
        ("mm", lambda q: torch.mm(q, q)),
        ("matmul", lambda q: torch.matmul(q, torch.zeros(32, 32))),
        ("relu", lambda q: torch.relu(q)),
        ("linear", lambda q: torch.nn.functional.linear(torch.zeros(32, 32), q)),
        ("stack", lambda q: torch.stack([q, q])),
        ("equal", lambda q: torch.equal(q, q)),
    ],
)
def test_torch_functions_say_what_to_do_instead(name: str, call) -> None:
    with pytest.raises(TypeError, match=rf"torch\.{name} does not take an MXTensor: use mxfp8.gemm, or"):
        call(make(32, 32))


@pytest.mark.parametrize("call", [lambda q: q + q, lambda q: torch.ones(1) + q, lambda q: q @ q, lambda q: 2 * q])
def test_operators_are_refused(call) -> None:
    with pytest.raises(TypeError, match="MXTensor"):
        call(make(32, 32))


def test_a_dtype_is_not_a_place() -> None:
    q = make(32, 32)
    with pytest.raises(TypeError, match=r"use .dequantize\(torch.bfloat16\)"):
        q.to(torch.bfloat16)
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(TypeError, match="use float32, bfloat16, float16 or float64"):
            q.dequantize(dtype)
    assert_same(q.to("cpu"), q)
    assert q.to("meta").device.type == "meta"


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        make(32, 32).axis = -2  # type: ignore[misc]


# Storage


def variants() -> list[MXTensor]:
    kinds = itertools.product(("e4m3", "e5m2"), (-1, -2), BLOCK_SHAPES)
    out = [make(33, 70, fmt=fmt, axis=axis, block=block) for fmt, axis, block in kinds]
    return [*out, make(33, 70).mT, make(96, 96)[32:, 64:], make(0, 64), make(70), make(2, 3, 64)]


def through_torch_save(q: MXTensor) -> MXTensor:
    file = io.BytesIO()
    torch.save({"q": [q]}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["q"][0]


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        lambda q: pickle.loads(pickle.dumps(q)),
        through_torch_save,
        lambda q: q.clone(),
        lambda q: q.contiguous(),
        lambda q: q.detach(),
        lambda q: MXTensor.from_parts(*q.to_parts()),
        lambda q: pytree.tree_map(torch.clone, q),
        lambda q: MXTensor(q.qdata, q.scale, q.fmt, q.axis, q.block),
    ],
    ids=["deepcopy", "copy", "pickle", "torch_save", "clone", "contiguous", "detach", "parts", "pytree", "new"],
)
def test_copies_keep_every_byte(copied) -> None:
    for q in variants():
        assert_same(copied(q), q)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save, lambda q: q.clone()])
def test_deep_copies_share_nothing(copied) -> None:
    q = make(32, 32)
    before = copied(q)
    q.qdata.view(torch.uint8).fill_(1)
    q.scale_bytes.fill_(1)
    assert not (before.qdata.view(torch.uint8) == 1).all()
    assert not (before.scale_bytes == 1).any()


def test_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    for q in variants():
        tensors, metadata = q.to_parts()
        save_file(tensors, tmp_path / "q.safetensors", metadata=metadata)
        with safe_open(tmp_path / "q.safetensors", "pt") as file:
            assert_same(MXTensor.from_parts({k: file.get_tensor(k) for k in file.keys()}, file.metadata()), q)  # noqa: SIM118


@pytest.mark.parametrize(
    "match, change",
    [
        ("qdata missing", lambda t, m: t.pop("qdata")),
        ("scale, block missing", lambda t, m: (t.pop("scale"), m.pop("block"))),
        ("'32'", lambda t, m: m.update(block="32")),
        ("'one'", lambda t, m: m.update(axis="one")),
        ("axis is '0'", lambda t, m: m.update(axis="0")),
        ("'e3m4'", lambda t, m: m.update(fmt="e3m4")),
        (r"needs \(32, 1\)", lambda t, m: t.update(scale=t["scale"][:1])),
    ],
)
def test_bad_parts_are_named(match: str, change) -> None:
    tensors, metadata = make(32, 32).to_parts()
    change(tensors, metadata)
    with pytest.raises(ValueError, match=match):
        MXTensor.from_parts(tensors, metadata)


def test_pytree_leaves_and_structure() -> None:
    q = make(32, 32)
    leaves, spec = pytree.tree_flatten({"a": q, "b": 1})
    assert len(leaves) == 3
    assert_same(pytree.tree_unflatten(leaves, spec)["a"], q)
    assert pytree.tree_map(lambda t: None, q).qdata is None  # leaves may be anything while a tree is mapped
    spec = pytree.tree_structure(q)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


QDATA = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
SCALE = torch.zeros(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (TypeError, "qdata is torch.float8_e4m3fn, but format e5m2", (QDATA, SCALE, "e5m2")),
        (TypeError, "qdata is torch.float32", (QDATA.float(), SCALE, "e4m3")),
        (TypeError, "qdata is a list", ([0.0], SCALE, "e4m3")),
        (TypeError, "scale is a float", (QDATA, 1.0, "e4m3")),
        (TypeError, "scale is torch.float32", (QDATA, SCALE.float(), "e4m3")),
        (TypeError, "scale is torch.int8", (QDATA, SCALE.to(torch.int8), "e4m3")),
        (ValueError, r"scale has shape \(4, 1\).*needs \(4, 2\)", (QDATA, SCALE[:, :1], "e4m3")),
        (ValueError, r"needs \(1, 64\)", (QDATA, SCALE, "e4m3", -2)),
        (ValueError, r"needs \(1, 2\)", (QDATA, SCALE, "e4m3", -1, (32, 32))),
        (ValueError, "axis is 1", (QDATA, SCALE, "e4m3", 1)),
        (ValueError, "axis is None", (QDATA, SCALE, "e4m3", None)),
        (ValueError, r"\(2, 32\)", (QDATA, SCALE, "e4m3", -1, (2, 32))),
        (ValueError, "'e4m3fn'", (QDATA, SCALE, "e4m3fn")),
        (ValueError, "0-dim", (QDATA[0, 0], SCALE[0, 0], "e4m3")),
        (ValueError, "qdata is on cpu, scale on meta", (QDATA, SCALE.to("meta"), "e4m3")),
    ],
)
def test_the_constructor_refuses_nonsense(error, match: str, arguments) -> None:
    with pytest.raises(error, match=match):
        MXTensor(*arguments)


def test_what_it_says_of_itself() -> None:
    q = make(3, 64, 96)
    assert (q.ndim, q.size(), q.size(1), q.device.type) == (3, (3, 64, 96), 64, "cpu")
    assert q.nbytes == 3 * 64 * 96 * 33 // 32
    assert repr(q) == "MXTensor(shape=(3, 64, 96), fmt=e4m3, axis=-1, block=(1, 32), device=cpu)"
    assert q.scale.dtype == torch.float8_e8m0fnu
    assert (q == q.clone()) is False
    assert len({q, q}) == 1
