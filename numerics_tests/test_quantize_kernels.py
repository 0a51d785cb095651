"""The quantise kernels against the reference, bit for bit: every block, axis, dtype and layout, edges and tails.

On a GPU the compiled kernels run. On a CPU the portable ones run where Triton's interpreter is on, which
``test_interpreter.py`` arranges in a process of its own.
"""

from dataclasses import replace

import pytest
import torch

import mxfp8
from mxfp8 import dispatch
from mxfp8.formats import BLOCK_SHAPES, BlockShape, get_format, get_rounding, get_scale_rule
from mxfp8.reference.quantize import quantize as reference
from mxfp8.reference.quantize import quantize_both as reference_both
from mxfp8.rng import RngKey
from numerics_tests.operands import Backend, available

KEY = RngKey(seed=2**63 + 12345, step=7, stream=2**31 + 5, row_offset=3, col_offset=5)
PAIRS = [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((1, 128), (1, 128)), ((32, 32), (32, 32)), ((1, 256), (1, 128)),
         ((1, 32), (1, 256)), ((128, 128), (128, 128)), ((1, 256), (1, 256))]  # fmt: skip


@pytest.fixture(params=["triton", "hopper"])
def kernels(request: pytest.FixtureRequest) -> Backend:
    """A backend of casts and the device where it runs."""
    return available(request, "quantize")


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """60 binades of normal numbers with NaN of both signs, Inf, runs of both zeros, subnormals and huge values."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    flat = x.view(-1)
    for at, value in ((5, float("nan")), (-3, float("inf")), (777, -float("nan")), (1200, -float("inf"))):
        if flat.numel() > 2000:
            flat[at] = value
    for start, value in ((100, 0.0), (300, -0.0), (400, 1e-40), (600, 3e38)):
        flat[start : start + 100] = value
    return x.to(dtype).to(device)


SMALL = not torch.cuda.is_available()
"""Whether kernels are interpreted, in tiles of 64x128 or of one block: a few programs with tails are enough there."""


def size(large: tuple[int, int], small: tuple[int, int]) -> tuple[int, int]:
    return small if SMALL else large


LAYOUTS = {
    "whole": lambda dt, dev: inputs(size((256, 256), (128, 128)), dt, dev),
    "tails": lambda dt, dev: inputs(size((129, 264), (70, 136)), dt, dev),
    "ragged_columns": lambda dt, dev: inputs((33, 63), dt, dev),
    "transposed": lambda dt, dev: inputs(size((256, 128), (136, 70)), dt, dev).t(),
    "slice": lambda dt, dev: inputs(size((140, 304), (140, 176)), dt, dev)[:, 16:-16],
    "unaligned": lambda dt, dev: inputs(size((64, 257), (64, 137)), dt, dev)[:, 1:],
    "batch": lambda dt, dev: inputs((3, 40, 72), dt, dev),
    "swapped_batch": lambda dt, dev: inputs((2, 5, 256), dt, dev).transpose(0, 1),
    "four_dims": lambda dt, dev: inputs((2, 4, 17, 64), dt, dev)[:, ::2],
    "expanded": lambda dt, dev: inputs((1, 96), dt, dev).expand(40, 96),
    "one_row": lambda dt, dev: inputs((1, 128), dt, dev),
    "vector": lambda dt, dev: inputs((71,), dt, dev),
    "no_rows": lambda dt, dev: inputs((0, 64), dt, dev),
    "no_columns": lambda dt, dev: inputs((64, 0), dt, dev),
}


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> list[str]:
    """What differs between two tuples of elements and scales, named."""
    out = []
    for name, g, w in zip(("qdata", "scale", "column qdata", "column scale"), got, want, strict=False):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        wrong = torch.argwhere(g.view(torch.uint8) != w.view(torch.uint8))
        if len(wrong):
            at = tuple(wrong[0].tolist())
            g8, w8 = g.view(torch.uint8)[at].item(), w.view(torch.uint8)[at].item()
            out.append(f"{name}: {len(wrong)} differ, first at {at}: {g8:#04x}, expected {w8:#04x}")
    return out


def run(backend: str, op: str, x: torch.Tensor, **kw: object) -> tuple[torch.Tensor, ...]:
    return dispatch.resolve(op, backend, x.device)(x, **kw)


NARROW = ("tails", "batch", "vector", "unaligned")  # layouts for dtypes other than bfloat16
EVERY = [(layout, torch.bfloat16) for layout in LAYOUTS]
EVERY += [(layout, dtype) for layout in NARROW for dtype in (torch.float32, torch.float16, torch.float64)]


@pytest.mark.parametrize("layout, dtype", EVERY, ids=str)
def test_every_layout_block_and_axis(kernels: tuple[str, torch.device], layout: str, dtype: torch.dtype) -> None:
    backend, device = kernels
    x = LAYOUTS[layout](dtype, device)
    for block in BLOCK_SHAPES:
        for axis in (-1, -2):
            if x.ndim == 1 and (axis == -2 or block[0] != 1):
                continue
            kw = {"axis": axis, "fmt": get_format("e4m3"), "block": block, "scale_rule": get_scale_rule("rceil"),
                  "rounding": get_rounding("nearest"), "key": None, "satfinite": False}  # fmt: skip
            assert same(run(backend, "quantize", x, **kw), reference(x, **kw)) == [], (block, axis)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout, dtype",
    [(name, torch.bfloat16) for name in ("whole", "tails", "slice", "unaligned", "batch", "transposed")]
    + [("tails", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_directions_in_one_pass(
    kernels: tuple[str, torch.device], layout: str, dtype: torch.dtype, pair: tuple[BlockShape, BlockShape]
) -> None:
    backend, device = kernels
    x = LAYOUTS[layout](dtype, device)
    kw = {"fmt": get_format("e4m3"), "block": pair[0], "column_block": pair[1], "scale_rule": get_scale_rule("rceil"),
          "satfinite": False}  # fmt: skip
    assert same(run(backend, "quantize_both", x, **kw), reference_both(x, **kw)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("satfinite", [False, True])
def test_every_format_rule_and_rounding(
    kernels: tuple[str, torch.device], fmt: str, rule: str, rounding: str, satfinite: bool
) -> None:
    backend, device = kernels
    for layout, block in (("tails", (1, 32)), ("whole", (32, 32))):
        x = LAYOUTS[layout](torch.float32, device)
        kw = {"fmt": get_format(fmt), "block": block, "scale_rule": get_scale_rule(rule), "satfinite": satfinite}
        for axis in (-1, -2):
            one = {**kw, "axis": axis, "rounding": get_rounding(rounding), "key": KEY}
            assert same(run(backend, "quantize", x, **one), reference(x, **one)) == [], axis  # type: ignore[arg-type]
        if rounding == "nearest":
            two = {**kw, "column_block": block}
            assert same(run(backend, "quantize_both", x, **two), reference_both(x, **two)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["tails", "batch", "transposed"])
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1, 256)], ids=str)
@pytest.mark.parametrize("col_offset", [5, 8])
def test_stochastic_rounding_of_tall_blocks(
    kernels: tuple[str, torch.device], block: BlockShape, layout: str, col_offset: int
) -> None:
    """Blocks of 128 or 256 rows, which are read twice, a strip at a time."""
    backend, device = kernels
    x = LAYOUTS[layout](torch.bfloat16, device)
    kw = {"fmt": get_format("e4m3"), "block": block, "scale_rule": get_scale_rule("rceil"), "satfinite": False,
          "rounding": get_rounding("stochastic"), "key": replace(KEY, col_offset=col_offset)}  # fmt: skip
    for axis in (-1, -2):
        assert same(run(backend, "quantize", x, axis=axis, **kw), reference(x, axis=axis, **kw)) == [], axis  # type: ignore[arg-type]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("col_offset", [0, 2, 4, 2**32 - 8, 2**32 - 6])
def test_random_bits_at_every_offset(kernels: tuple[str, torch.device], col_offset: int, in_memory: bool) -> None:
    """Four columns share a counter, wherever a tile starts, and positions wrap at 2**32."""
    backend, device = kernels
    x = LAYOUTS["tails"](torch.float32, device)
    step = torch.tensor(9, device=device) if in_memory else 9
    key = RngKey(seed=6, step=step, stream=1, row_offset=2**32 - 3, col_offset=col_offset)
    for axis in (-1, -2):
        kw = {"fmt": get_format("e5m2"), "block": (1, 32), "scale_rule": get_scale_rule("floor"), "satfinite": False,
              "rounding": get_rounding("stochastic"), "key": key, "axis": axis}  # fmt: skip
        assert same(run(backend, "quantize", x, **kw), reference(x, **kw)) == [], axis  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [(1, 32), (128, 128)], ids=str)
def test_long_and_wide(kernels: tuple[str, torch.device], block: BlockShape) -> None:
    backend, device = kernels
    x = torch.randn(2050, 2064, device=device)
    for axis in (-1, -2):
        kw = {"fmt": get_format("e4m3"), "block": block, "scale_rule": get_scale_rule("rceil"), "satfinite": False,
              "rounding": get_rounding("nearest"), "key": None, "axis": axis}  # fmt: skip
        assert same(run(backend, "quantize", x, **kw), reference(x, **kw)) == [], axis  # type: ignore[arg-type]


def test_every_bfloat16_maximum(kernels: tuple[str, torch.device]) -> None:
    """All 2**16 patterns, each the maximum of a block of its own, under every rule and along both axes."""
    backend, device = kernels
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    x = torch.zeros(32, 2**16, dtype=torch.bfloat16, device=device)
    x[7] = values
    rules = ("rceil", "floor", "ceil", "even")
    if device.type == "cpu":  # the interpreter is slow: one rule, one sign and the top binades of the other
        x, rules = x[:, :36_000], ("rceil",)
    for rule in rules:
        kw = {"fmt": get_format("e4m3"), "block": (1, 32), "scale_rule": get_scale_rule(rule),
              "rounding": get_rounding("nearest"), "key": None, "satfinite": False}  # fmt: skip
        for view, axis in ((x, -2), (x.t().contiguous(), -1)):
            got = run(backend, "quantize", view, axis=axis, **kw)
            assert same(got, reference(view, axis=axis, **kw)) == [], (rule, axis)  # type: ignore[arg-type]


def test_contraction_is_contiguous_and_padding_zero(kernels: tuple[str, torch.device]) -> None:
    """A GEMM that contracts over the scaled axis finds it contiguous, columns start at multiples of 16 bytes, and what
    lies between is zero also beside a NaN block."""
    backend, device = kernels
    x = inputs((41, 64), torch.bfloat16, device)
    x[40, 3] = float("nan")
    q = mxfp8.quantize(x, axis=-2, backend=backend)
    assert q.qdata.stride() == (1, 48)
    storage = torch.as_strided(q.qdata.view(torch.uint8), (64, 48), (48, 1))
    assert torch.equal(storage[:, 41:], torch.zeros_like(storage[:, 41:]))
    assert mxfp8.quantize(x, axis=-1, backend=backend).qdata.stride() == (64, 1)


def test_stochastic_step_may_live_on_the_device(kernels: tuple[str, torch.device]) -> None:
    backend, device = kernels
    x = torch.randn(64, 96, device=device)
    for step in (3, 4):
        at = torch.tensor(step, device=device)
        got = mxfp8.quantize(x, rounding="stochastic", seed=RngKey(seed=9, step=at), backend=backend)
        want = mxfp8.quantize(x, rounding="stochastic", seed=RngKey(seed=9, step=step), backend="reference")
        assert same((got.qdata, got.scale_bytes), (want.qdata, want.scale_bytes)) == []


@pytest.mark.gpu
def test_a_graph_replays_on_new_values(kernels: tuple[str, torch.device]) -> None:
    backend, device = kernels
    x = torch.randn(256, 512, device=device)
    mxfp8.ops.quantize_both(x, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, columns = mxfp8.ops.quantize_both(x, backend=backend)
    x.copy_(torch.randn(256, 512))
    graph.replay()
    want_rows, want_columns = mxfp8.ops.quantize_both(x, backend="reference")
    for got, want in ((rows, want_rows), (columns, want_columns)):
        assert same((got.qdata, got.scale_bytes), (want.qdata, want.scale_bytes)) == []


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements(kernels: tuple[str, torch.device]) -> None:
    """524,416 x 4096 elements: the last rows, in both directions."""
    backend, device = kernels
    x = torch.empty(524_416, 4096, dtype=torch.bfloat16, device=device)
    for part in x.split(65_536):
        part.normal_()
    rows, columns = mxfp8.ops.quantize_both(x, backend=backend)
    last = mxfp8.ops.quantize_both(x[-64:].clone(), backend="reference")
    for got, want in ((rows, last[0]), (columns, last[1])):
        tail = got.scale_bytes[-want.scale_bytes.shape[0] :]
        assert same((got.qdata[-64:], tail), (want.qdata, want.scale_bytes)) == []


@pytest.mark.gpu
def test_other_memory_does_not_leak_in(kernels: tuple[str, torch.device]) -> None:
    """Buffers full of NaN bytes are freed first, so that what a kernel forgets to write shows."""
    backend, device = kernels
    for rows in (1, 31, 32, 33, 127, 129):
        x = torch.randn(rows, 96, device=device)
        for byte in (0x7F, 0xFF):
            poison = [torch.full((2**n,), byte, dtype=torch.uint8, device=device) for n in range(5, 18)]
            del poison
            got = mxfp8.ops.quantize_both(x, backend=backend)
            want = mxfp8.ops.quantize_both(x, backend="reference")
            for g, w in zip(got, want, strict=True):
                assert same((g.qdata, g.scale_bytes), (w.qdata, w.scale_bytes)) == []
