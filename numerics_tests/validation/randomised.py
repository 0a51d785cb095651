"""Stochastic rounding and the Hadamard transform: what no peer offers for MXFP8 and our backends must."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxfp8.rng import RngKey
from numerics_tests import tolerances
from numerics_tests.oracles import ELEMENTS, random_word, round_stochastic
from numerics_tests.validation.case import Case, Property
from numerics_tests.validation.implementation import Implementation
from numerics_tests.validation.own import Backend


def _backend(implementation: Implementation) -> Backend:
    assert isinstance(implementation, Backend), f"{implementation.name} claims a feature that only backends have"
    return implementation


def _data(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def unbiased(implementation: Implementation) -> Iterator[Case]:
    """The mean of 64,000 roundings of one value, under an anchor that keeps the scale at 1."""
    backend, n = _backend(implementation), 2000
    for fmt in implementation.capabilities.formats:
        table, top = torch.from_numpy(ELEMENTS[fmt].table), ELEMENTS[fmt].max
        for distance in (0.0625, 0.25, 0.5, 0.875):
            below, above = (float(ELEMENTS[fmt].finite[i]) for i in (60, 61))
            value = below + distance * (above - below)
            x = torch.full((n, 32), value)
            x[:, 0] = top
            _, codes = backend.stochastic(x, fmt, RngKey(seed=11))
            mean = table[codes.cpu().int()][:, 1:].mean().item()
            bound = tolerances.stochastic_mean_error(distance, above - below, n * 31)
            if not abs(mean - value) <= bound:
                yield Case(said=f"mean {mean:.9g}, more than {bound:.3g} away", values=(top, value), fmt=fmt)


def defined(implementation: Implementation) -> Iterator[Case]:
    """Elements are rounded by the words of the definition (docs/numerics.md), wherever a tensor lies in a larger one:
    by rows and columns that turn negative as an int32, and past 2**32, where a position has more than 32 bits."""
    backend, x = _backend(implementation), _data(3, 32).clamp(-3, 3)
    for fmt in implementation.capabilities.formats:
        x[:, 0] = ELEMENTS[fmt].max  # keeps the scale at 1
        for row, col in ((0, 0), (2**31 - 2, 2**31 - 4), (2**32 - 1, 2**32 - 8), (5, 2**32 - 6)):
            key = RngKey(seed=2**63 + 9, step=2**31 + 1, stream=7, row_offset=row, col_offset=col)
            codes = backend.stochastic(x, fmt, key)[1].cpu()
            for r, c in ((r, c) for r in range(3) for c in range(32)):
                word = random_word(key.seed, 2**31 + 1, key.stream, row + r, col + c)
                want, got, value = round_stochastic(float(x[r, c]), word, fmt), int(codes[r, c]), float(x[r, c])
                if got != want:
                    yield Case(
                        said=f"{got:#04x}, not {want:#04x}", values=(value,), fmt=fmt, note=f"at ({row + r}, {col + c})"
                    )


def reproducible(implementation: Implementation) -> Iterator[Case]:
    """The same key gives the same bits; another seed, step or stream gives others."""
    backend, x = _backend(implementation), _data(64, 128)
    for fmt in implementation.capabilities.formats:
        first, again, *others = (
            backend.stochastic(x, fmt, RngKey(seed=seed, step=step, stream=stream))[1]
            for seed, step, stream in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
        )
        if not torch.equal(first, again):
            yield Case(said="two calls with one key differ", fmt=fmt, note="64x128")
        for name, other in zip(("seed", "step", "stream"), others, strict=True):
            if torch.equal(first, other):
                yield Case(said=f"the bits do not depend on the {name}", fmt=fmt, note="64x128")


def shards(implementation: Implementation) -> Iterator[Case]:
    """Pieces of rows and of columns, cast with their offsets, have the bits of the whole."""
    backend, x, key = _backend(implementation), _data(70, 128), RngKey(seed=5)
    for fmt in implementation.capabilities.formats:
        _, whole = backend.stochastic(x, fmt, key)
        for row, col in ((0, 64), (13, 0), (37, 96)):
            _, piece = backend.stochastic(x[row:, col:].contiguous(), fmt, key.at(row, col))
            if not torch.equal(piece, whole[row:, col:]):
                yield Case(said="the piece has other bits than the whole", fmt=fmt, note=f"from ({row}, {col})")


def orthogonal(implementation: Implementation) -> Iterator[Case]:
    """The transform of the identity times its transpose is the identity."""
    for size in (16, 32, 64, 128):
        h = _backend(implementation).hadamard(torch.eye(size), size, 3).cpu().double()
        error = (h @ h.T - torch.eye(size, dtype=torch.float64)).abs().max().item()
        bound = 2 * tolerances.hadamard_error(size, 1.0)
        if not error <= bound:
            yield Case(said=f"off by {error:.3g}, more than {bound:.3g}", note=f"size {size}")


RANDOMISED: tuple[Property, ...] = tuple(
    Property(name=name, statement=words, needs=(need,), directed=directed)
    for name, words, need, directed in (
        ("stochastic_unbiased", "the mean of stochastic roundings is the value", "stochastic", unbiased),
        ("stochastic_defined", "random bits are those of the definition, at any position", "stochastic", defined),
        ("stochastic_reproducible", "bits are a function of seed, step and stream", "stochastic", reproducible),
        ("stochastic_shards", "shards have the bits of the whole", "stochastic", shards),
        ("hadamard_orthogonal", "the Hadamard transform is orthogonal", "hadamard", orthogonal),
    )
)
