"""Shapes, strides, dtypes and axes: where the bytes lie must not depend on how the input lies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from numerics_tests import oracles
from numerics_tests.validation.case import Case, Property
from numerics_tests.validation.implementation import Implementation


def _data(rows: int, cols: int) -> torch.Tensor:
    rng = np.random.default_rng(rows * 1000 + cols)
    return torch.from_numpy(np.ldexp(rng.standard_normal((rows, cols)), rng.integers(-20, 20, (rows, cols)))).float()


def _differs(
    implementation: Implementation, x: torch.Tensor, fmt: str, rule: str, block: tuple[int, int], axis: int
) -> str | None:
    """None if ``x`` (2-D) has the oracle's bytes; else the first place that differs."""
    rows, cols = block if axis == -1 else (block[1], block[0])
    want, want_scale = oracles.quantize(x.double().cpu().numpy(), rows, cols, fmt, rule)
    scales, codes = implementation.quantize(x, fmt, rule, block, axis)
    for what, got, exact in (("scale byte", scales, want_scale), ("element", codes, want)):
        if tuple(got.shape) != exact.shape:
            return f"{what}s have shape {tuple(got.shape)}, expected {exact.shape}"
        if (wrong := np.argwhere(got.cpu().numpy() != exact)).size:
            at = tuple(int(i) for i in wrong[0])
            return f"{what} at {at} is 0x{int(got[at]):02x}, expected 0x{exact[at]:02x}"
    return None


def _each(
    implementation: Implementation, inputs: dict[str, torch.Tensor], axes: tuple[int, ...] = (-1,), square: bool = False
) -> Iterator[Case]:
    can = implementation.capabilities
    chosen = [b for b in can.blocks if (b[0] == b[1]) == square]
    for note, x in inputs.items():
        for fmt in can.formats:
            for block in chosen:
                for axis in axes:
                    said = _differs(implementation, x, fmt, can.rules[0], block, axis)
                    if said is not None:
                        where = f"{note}, block {block[0]}x{block[1]}, axis {axis}"
                        yield Case(said=said, fmt=fmt, rule=can.rules[0], note=where)


def whole(implementation: Implementation) -> Iterator[Case]:
    yield from _each(implementation, {f"{m}x{k}": _data(m, k) for m, k in ((1, 256), (2, 512), (33, 256))})


def tails(implementation: Implementation) -> Iterator[Case]:
    sizes = ((1, 1), (1, 31), (1, 33), (3, 40), (2, 129), (33, 257))
    yield from _each(implementation, {f"{m}x{k}": _data(m, k) for m, k in sizes})


def strides(implementation: Implementation) -> Iterator[Case]:
    base = _data(64, 512)
    views = {
        "transposed 64x64": _data(64, 64).T,
        "every second row": base[::2, :256],
        "every second column": base[:, ::2],
        "one row expanded": base[:1, :256].expand(5, 256),
        "one column expanded": base[:5, :1].expand(5, 256),
        "offset by 5 floats": base.flatten()[5 : 5 + 256 * 3].view(3, 256),
    }
    yield from _each(implementation, views)


def columns(implementation: Implementation) -> Iterator[Case]:
    yield from _each(implementation, {f"{m}x{k}": _data(m, k) for m, k in ((32, 1), (256, 3), (40, 5))}, (-2,))


def squares(implementation: Implementation) -> Iterator[Case]:
    yield from _each(
        implementation, {f"{m}x{k}": _data(m, k) for m, k in ((32, 32), (128, 128), (40, 70))}, (-1, -2), square=True
    )
    can = implementation.capabilities
    x = _data(70, 40)
    for block in (b for b in can.blocks if b[0] == b[1]):
        scales, codes = implementation.quantize(x, can.formats[0], can.rules[0], block)
        scales_t, codes_t = implementation.quantize(x.T.contiguous(), can.formats[0], can.rules[0], block)
        if not torch.equal(scales.T, scales_t) or not torch.equal(codes.T, codes_t):
            yield Case(said="the transpose has other bytes", rule=can.rules[0], note=f"70x40, block {block}")


def _narrow(dtype: torch.dtype, implementation: Implementation) -> Iterator[Case]:
    can = implementation.capabilities
    x = _data(64, 256).clamp(-60000, 60000).to(dtype)  # finite in float16
    for fmt in can.formats:
        for rule in can.rules:
            said = _differs(implementation, x, fmt, rule, (1, 32), -1)
            if said is not None:
                yield Case(said=said, fmt=fmt, rule=rule, note=f"{dtype} 64x256")


def bfloat16(implementation: Implementation) -> Iterator[Case]:
    yield from _narrow(torch.bfloat16, implementation)


def float16(implementation: Implementation) -> Iterator[Case]:
    yield from _narrow(torch.float16, implementation)


def empty(implementation: Implementation) -> Iterator[Case]:
    can = implementation.capabilities
    for shape in ((0, 32), (0, 64)):
        scales, codes = implementation.quantize(torch.zeros(shape), can.formats[0], can.rules[0])
        want = ((0, shape[1] // 32), shape)
        if (tuple(scales.shape), tuple(codes.shape)) != want:
            yield Case(said=f"shapes {tuple(scales.shape)}, {tuple(codes.shape)}, expected {want}", note=f"{shape}")


LAYOUTS: tuple[Property, ...] = tuple(
    Property(name=name, statement=words, needs=("quantize", *needs), directed=directed)
    for name, words, needs, directed in (
        ("whole_blocks", "every allowed block along rows has the oracle's bytes", (), whole),
        ("tails", "a tail is a block padded with zeros", ("tails",), tails),
        ("strides", "views have the bytes of their contiguous copies", ("strides",), strides),
        ("columns", "axis -2: blocks run down columns", ("columns", "tails"), columns),
        ("square_transpose", "square blocks: the transpose has the same bytes", ("square",), squares),
        ("bfloat16_input", "bfloat16 input is cast as its float32 values", (), bfloat16),
        ("float16_input", "float16 input is cast as its float32 values", ("float16",), float16),
        ("no_rows", "no rows give no blocks", (), empty),
    )
)
