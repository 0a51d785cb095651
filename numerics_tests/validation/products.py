"""What the bytes mean, alone and in a matrix product. Operands are made of bytes here, by no library's cast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from numerics_tests import oracles, tolerances
from numerics_tests.oracles import ELEMENTS
from numerics_tests.validation.case import Case, Property
from numerics_tests.validation.implementation import Implementation, Operand

PROBE = 201727.75  # 448 * 448 + 4095 * 0.25
PROBE_ERROR = 1e-4
"""Relative. float32 accumulation of 4096 terms is within 4096 * 2^-24 = 2.4e-4 at worst and exact here in any order, as
every partial sum is a multiple of 1/4 below 2^18; an accumulator that drops single small terms is 5e-3 off."""


def _tensor(x: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def decode_grid(implementation: Implementation, dtype: torch.dtype) -> Iterator[Case]:
    """All 256 x 256 pairs of element and scale byte against float64, rounded once to ``dtype``."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for fmt in implementation.capabilities.formats:
        exact = torch.from_numpy(ELEMENTS[fmt].table[codes] * oracles.scale_values()[scales].repeat(32, axis=1))
        want = exact.to(dtype)
        got = implementation.dequantize(_tensor(codes), _tensor(scales), fmt, dtype).cpu()
        same = (got == want) & (torch.signbit(got) == torch.signbit(want)) | (got.isnan() & want.isnan())
        for byte, code in torch.argwhere(~same).tolist():
            said = f"{got[byte, code].item():g}, expected {want[byte, code].item():g}"
            yield Case(said=said, fmt=fmt, byte=byte, code=code, note=str(dtype).removeprefix("torch."))


def _decode_float32(implementation: Implementation) -> Iterator[Case]:
    yield from decode_grid(implementation, torch.float32)


def _decode_bfloat16(implementation: Implementation) -> Iterator[Case]:
    yield from decode_grid(implementation, torch.bfloat16)


def operand(values: NDArray[np.float64], scales: NDArray[np.int64], fmt: str) -> tuple[Operand, torch.Tensor]:
    """Elements that are exact in ``fmt`` and scale bytes, with what they mean in float64."""
    codes = oracles.encode(values, fmt)
    factors = oracles.scale_values()[scales].repeat(32, axis=1)[:, : values.shape[1]]
    exact = torch.from_numpy(ELEMENTS[fmt].table[codes] * factors)
    return Operand(elements=_tensor(codes), scales=_tensor(scales.astype(np.uint8)), fmt=fmt), exact


def _random(m: int, k: int, fmt: str, seed: int, spread: int = 8) -> tuple[Operand, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return operand(100 * rng.standard_normal((m, k)), rng.integers(127 - spread, 127 + spread, (m, k // 32)), fmt)


def _compare(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float, note: str, fmt: str) -> Iterator[Case]:
    if tuple(got.shape) != tuple(want.shape):
        yield Case(said=f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", fmt=fmt, note=note)
        return
    wrong = torch.argwhere(~((got.cpu().double() - want).abs() <= bound))
    if len(wrong):
        i, j = wrong[0].tolist()
        said = f"entry ({i}, {j}) is {got[i, j].item():.9g}, expected {want[i, j].item():.9g}"
        yield Case(said=said, fmt=fmt, note=note)


def exact_integers(implementation: Implementation) -> Iterator[Case]:
    """Integers up to 4 times 2^-1..2^1: every sum is exact in float32, so in any order the result is."""
    for fmt in implementation.capabilities.formats:
        for m, n, k in ((1, 1, 32), (3, 5, 64), (17, 33, 128), (64, 32, 256)):
            rng = np.random.default_rng(k)
            (a, va), (b, vb) = (
                operand(rng.integers(-4, 5, (rows, k)).astype(np.float64), rng.integers(126, 129, (rows, k // 32)), fmt)
                for rows in (m, n)
            )
            got = implementation.gemm(a, b, torch.float32)
            yield from _compare(got, va @ vb.T, 0.0, f"M={m} N={n} K={k}", fmt)


def bounded(implementation: Implementation) -> Iterator[Case]:
    """Random operands of 16 binades: the derived bound on the same operands, float32 and bfloat16 out."""
    for fmt in implementation.capabilities.formats:
        for dtype in (torch.float32, torch.bfloat16):
            for k in (32, 96, 1024):
                (a, va), (b, vb) = _random(33, k, fmt, 1), _random(31, k, fmt, 2)
                got, bound = implementation.gemm(a, b, dtype), tolerances.gemm_error(va, vb, dtype)
                yield from _compare(got, va @ vb.T, bound, f"M=33 N=31 K={k} {dtype} out", fmt)


def accumulates(implementation: Implementation) -> Iterator[Case]:
    """One large product and 4095 small ones: a short accumulator loses them."""
    a, b = np.ones((1, 4096)), np.full((1, 4096), 0.25)
    a[0, 0] = b[0, 0] = 448.0
    one = np.full((1, 128), 127)
    got = implementation.gemm(operand(a, one, "e4m3")[0], operand(b, one, "e4m3")[0], torch.float32)
    want = torch.tensor([[PROBE]], dtype=torch.float64)
    yield from _compare(got, want, PROBE_ERROR * PROBE, "[448, 1, 1, ...] . [448, 1/4, 1/4, ...], K=4096", "e4m3")


def degenerate(implementation: Implementation) -> Iterator[Case]:
    """M, N or K of zero: the right shape, and zeros for an empty sum."""
    for m, n, k in ((0, 3, 32), (3, 0, 32), (2, 3, 0)):
        a, b = (operand(np.ones((rows, k)), np.full((rows, k // 32), 127), "e4m3")[0] for rows in (m, n))
        got = implementation.gemm(a, b, torch.float32)
        yield from _compare(got, torch.full((m, n), float(k), dtype=torch.float64), 0.0, f"M={m} N={n} K={k}", "e4m3")


def nan_spreads(implementation: Implementation) -> Iterator[Case]:
    """A NaN element, or a scale byte 255, makes its row of the result NaN and no other."""
    for fmt in implementation.capabilities.formats:
        for what in ("element", "scale"):
            (a, _), (b, _) = _random(4, 64, fmt, 3), _random(5, 64, fmt, 4)
            if what == "element":
                a.elements[2, 40] = 0x7F
            else:
                a.scales[2, 1] = 255
            nan = implementation.gemm(a, b, torch.float32).cpu().isnan()
            want = torch.zeros(4, 5, dtype=torch.bool)
            want[2] = True
            if not torch.equal(nan, want):
                rows = sorted({i for i, _ in torch.argwhere(nan).tolist()})
                yield Case(said=f"NaN in rows {rows}, expected row 2 whole", fmt=fmt, note=f"NaN {what} in row 2")


def scales_factor_out(implementation: Implementation) -> Iterator[Case]:
    """Every scale byte of one operand plus k: the result times 2^k, bit for bit."""
    for fmt in implementation.capabilities.formats:
        (a, _), (b, _) = _random(9, 96, fmt, 5), _random(7, 96, fmt, 6)
        base = implementation.gemm(a, b, torch.float32).cpu().double()
        for k in (1, -20, 40):
            moved = Operand(elements=a.elements, scales=(a.scales.int() + k).to(torch.uint8), fmt=fmt)
            got = implementation.gemm(moved, b, torch.float32)
            yield from _compare(got, base * 2.0**k, 0.0, f"scales of a plus {k}", fmt)


def extreme_scales(implementation: Implementation) -> Iterator[Case]:
    """Scale byte 0 against byte 254: 2^-127 times 2^127 is 1, and neither is zero. Dequantised, all are float32."""
    for fmt in implementation.capabilities.formats:
        values = np.array([0.25, 0.5, 0.75, 1.0])[:, None].repeat(32, axis=1)
        (a, va), (b, vb) = (operand(values, np.full((4, 1), byte), fmt) for byte in (0, 254))
        got = implementation.gemm(a, b, torch.float32)
        yield from _compare(got, va @ vb.T, 0.0, "scale bytes 0x00 and 0xfe, M=N=4 K=32", fmt)


def rows_permute(implementation: Implementation) -> Iterator[Case]:
    """Permuted rows of either operand permute the result within the bound (tiling may change the order of sums)."""
    fmt = implementation.capabilities.formats[0]
    (a, va), (b, vb) = _random(40, 64, fmt, 7), _random(37, 64, fmt, 8)
    p, q = (torch.from_numpy(np.random.default_rng(n).permutation(n)) for n in (40, 37))
    moved = [Operand(elements=x.elements[i], scales=x.scales[i], fmt=fmt) for x, i in ((a, p), (b, q))]
    bound = tolerances.gemm_error(va, vb, torch.float32)[p][:, q]
    yield from _compare(implementation.gemm(*moved, torch.float32), (va @ vb.T)[p][:, q], bound, "rows permuted", fmt)


PRODUCTS: tuple[Property, ...] = tuple(
    Property(name=name, statement=words, needs=(need,), directed=directed)
    for name, words, need, directed in (
        ("dequantize_float32", "all 256 x 256 pairs of element and scale byte, exact", "dequantize", _decode_float32),
        ("dequantize_bfloat16", "the same in bfloat16, rounded once", "dequantize", _decode_bfloat16),
        ("gemm_integers", "products of small integers are exact", "gemm", exact_integers),
        ("gemm_bound", "within the derived bound of float64 on the same operands", "gemm", bounded),
        ("gemm_accumulation", "one large and 4095 small products: none is lost", "gemm", accumulates),
        ("gemm_empty", "M, N or K of zero give the right shape and zeros", "gemm", degenerate),
        ("gemm_nan", "NaN spreads over its row and no further", "gemm", nan_spreads),
        ("gemm_scales", "scales factor out of the product exactly", "gemm", scales_factor_out),
        ("gemm_extreme_scales", "scale byte 0 times scale byte 254 is 1", "gemm", extreme_scales),
        ("gemm_rows", "permuted rows permute the product", "gemm", rows_permute),
    )
)
