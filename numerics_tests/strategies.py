"""Hypothesis strategies: tensors with the values, shapes and strides that casts have to get right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from mxfp8.formats import BLOCK_SHAPES, BlockShape
from numerics_tests.oracles import ELEMENTS, RULES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A tensor and the way to quantise it."""

    x: torch.Tensor
    axis: int
    fmt: str
    block: BlockShape
    rule: str


@st.composite
def laid_out(draw: st.DrawFn) -> Laid:
    """Any dtype, 2 to 4 dimensions, tails, transposed and strided views, 60 binades, zeros, subnormals, specials."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    shape += [draw(st.integers(1, 70)), draw(st.integers(1, 140))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    low, high = sorted((draw(st.integers(-150, 127)), draw(st.integers(-150, 127))))
    exponents = torch.randint(low, high + 1, shape, generator=generator)
    x = torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents)
    for value in draw(st.lists(st.sampled_from([0.0, -0.0, 2.0**-149, 448.0, torch.inf, torch.nan]), max_size=4)):
        x.view(-1)[torch.randint(x.numel(), (1,), generator=generator)] = value
    x = x.to(dtype)
    if draw(st.booleans()):
        x = x.mT
    if draw(st.booleans()):
        x = x[..., :: draw(st.integers(1, 3)), draw(st.integers(0, x.shape[-1] - 1)) :]
    return Laid(
        x=x,
        axis=draw(st.sampled_from((-1, -2))),
        fmt=draw(st.sampled_from(sorted(ELEMENTS))),
        block=draw(st.sampled_from(BLOCK_SHAPES)),
        rule=draw(st.sampled_from(RULES)),
    )
