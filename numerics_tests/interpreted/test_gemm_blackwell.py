"""The Blackwell GEMM in Triton's interpreter, where float64 stands in for the tensor core: everything around the
instruction. And how torch's scaled product is called, with a stand-in for it that reads tiles of scales.

The tests are those of every GEMM kernel. On a Blackwell GPU this file runs the compiled kernel instead.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import gemm_blackwell
from mxfp8.kernels._device import INTERPRETED
from mxfp8.kernels.scale_layout import from_tiled_torch, tiled_size, to_tiled_torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp8.formats import BLOCK_SHAPES
from numerics_tests import test_gemm_kernels as every
from numerics_tests.operands import Backend, Operand, available, integers, operand
from numerics_tests.test_gemm_kernels import block_pairs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts")
some_pairs = pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128", "1x256-32x32", "128x128-1x32"])
split_pairs = pytest.mark.parametrize(  # each block on each side
    "pair",
    [("1x32", "128x128"), ("1x128", "32x32"), ("1x256", "1x32"), ("32x32", "1x256"), ("128x128", "1x128")],
    ids="-".join,
)


@pytest.fixture(params=["blackwell"])
def plain(request: pytest.FixtureRequest) -> Backend:
    return available(request, "gemm")


# By tl.dot_scaled


@block_pairs
def test_integers_are_exact(plain: Backend, pair: tuple[str, str]) -> None:
    every.test_integers_are_exact(plain, pair)


@split_pairs
def test_each_block_has_its_own_scale(plain: Backend, pair: tuple[str, str]) -> None:
    every.test_each_block_has_its_own_scale(plain, pair)


@pytest.mark.parametrize("a_byte, b_byte, factor, fmt", every.EXTREMES)
@pytest.mark.parametrize("pair", [("1x32", "1x32"), ("1x128", "128x128")])
def test_every_pair_of_scale_bytes(
    plain: Backend, pair: tuple[str, str], a_byte: int, b_byte: int, factor: float, fmt: str
) -> None:
    every.test_every_pair_of_scale_bytes(plain, pair, a_byte, b_byte, factor, fmt)


@pytest.mark.parametrize("data", ["normal", "positive"])
@some_pairs
def test_error_is_within_the_derived_bound(plain: Backend, pair: str, data: str) -> None:
    every.test_error_is_within_the_derived_bound(plain, pair, data)


@some_pairs
def test_few_accumulator_bits_would_show(plain: Backend, pair: str) -> None:
    every.test_few_accumulator_bits_would_show(plain, pair)


@split_pairs
def test_nan_stays_in_its_rows_and_columns(plain: Backend, pair: tuple[str, str]) -> None:
    every.test_nan_stays_in_its_rows_and_columns(plain, pair)


def test_infinities_of_e5m2_and_of_the_output(plain: Backend) -> None:
    every.test_infinities_of_e5m2_and_of_the_output(plain)


@some_pairs
def test_empty_dimensions(plain: Backend, pair: str) -> None:
    bias = integers(
        96, device=plain[1]
    )  # which bfloat16 holds: the sum of parts is not rounded right in an interpreter
    for (m, n, k), out_dtype in itertools.product(((0, 96, 64), (32, 0, 64), (32, 96, 0)), every.OUT):
        a, b = (operand(integers(r, k, device=plain[1]), kind) for r, kind in zip((m, n), pair.split("-"), strict=True))
        assert not every.gemm(plain, a, b, out_dtype).any()
        if n == 96:
            assert torch.equal(every.gemm(plain, a, b, out_dtype, bias), bias.to(out_dtype).expand(m, n))


@pytest.mark.parametrize("how", ["transposed", "slice", "odd_pitch", "steps", "unaligned"])
@pytest.mark.parametrize("pair", ["1x32-1x32", "1x128-128x128"])
def test_strides_never_matter_and_neighbours_are_not_read(plain: Backend, pair: str, how: str) -> None:
    every.test_strides_never_matter_and_neighbours_are_not_read(plain, pair, how)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_adds_to_what_is_there(plain: Backend, bias: bool) -> None:
    a, b = (operand(integers(rows, 96, device=plain[1]), "1x32") for rows in (33, 50))
    there = integers(33, 50, device=plain[1])
    row = integers(50, device=plain[1]) if bias else None
    want = there + (a.exact @ b.exact.mT).float() + (0 if row is None else row)
    out = gemm_blackwell.gemm(
        *a.parts, *b.parts, bias=row, out_dtype=torch.float32, out=there, accumulate=True
    )  # fmt: skip
    assert out is there
    assert torch.equal(there, want)
    with pytest.raises(ValueError, match="accumulate=True adds in float32"):
        gemm_blackwell.gemm(
            *a.parts, *b.parts, bias=None, out_dtype=torch.bfloat16, out=there.bfloat16(), accumulate=True
        )  # fmt: skip


# By torch


@pytest.mark.parametrize("block", BLOCK_SHAPES, ids=str)
@needs_interpreter
def test_tiled_scales_are_those_of_the_expanded_tensor(block: tuple[int, int]) -> None:
    for rows, cols in ((1, 32), (128, 512), (130, 96), (257, 1056), (300, 600)):
        scale = torch.randint(0, 256, (-(-rows // block[0]), -(-cols // block[1])), dtype=torch.uint8)
        expanded = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1] // 32, 1)
        want = to_tiled_torch(expanded[:rows, : -(-cols // 32)])
        for found in (scale, scale.t().contiguous().t()):
            assert torch.equal(gemm_blackwell.tiled_scales(found, block, rows, cols), want), (rows, cols)


REFUSALS = [  # K, N, dtypes, reason
    (96, 48, (E4M3, E4M3), None),
    (96, 48, (E5M2, E4M3), None),
    (96, 48, (E5M2, E5M2), "E5M2 by E5M2"),
    (80, 48, (E4M3, E4M3), "K = 80"),
    (96, 40, (E4M3, E4M3), "N = 40"),
]


@pytest.mark.parametrize("k, n, dtypes, reason", REFUSALS)
def test_what_torch_refuses(
    k: int, n: int, dtypes: tuple[torch.dtype, torch.dtype], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_blackwell, "INTERPRETED", False)
    found = gemm_blackwell.refused(torch.empty(130, k, dtype=dtypes[0]), torch.empty(n, k, dtype=dtypes[1]))
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize("sides", [(512, 512), (1024, 511)])
def test_torch_itself_accepts_the_call(sides: tuple[int, int]) -> None:
    """Its checks of shapes, strides, dtypes and layout, on tensors without memory: 130 rows of scales fill two rows of
    tiles, 48 one."""
    with FakeTensorMode():
        a, b = (torch.empty(rows, 96, dtype=E4M3, device="cuda") for rows in (130, 48))
        sa, sb = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in (tiled_size(130, 3), sides[1]))
        if sides == (512, 512):
            out = gemm_blackwell.scaled_mm(a, sa, b, sb, None, torch.bfloat16)
            assert (tuple(out.shape), out.dtype) == ((130, 48), torch.bfloat16)
        else:
            with pytest.raises((RuntimeError, ValueError), match="MX scaling"):
                gemm_blackwell.scaled_mm(a, sa, b, sb, None, torch.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``torch.nn.functional.scaled_mm`` is asked for, computed from its own arguments."""
    f, seen = torch.nn.functional, []

    def scaled_mm(a, b, sa, recipe_a, sb, recipe_b, swizzle_a, swizzle_b, *, bias, output_dtype):  # type: ignore[no-untyped-def]
        assert recipe_a == recipe_b == f.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == f.SwizzleType.SWIZZLE_32_4_4
        assert a.stride(1) == b.stride(0) == 1
        assert bias is None or (bias.dtype == output_dtype and bias.dtype.itemsize == 2 and bias.is_contiguous())
        sides = []
        for x, scale in ((a, sa), (b.t(), sb)):
            rows, cols = x.shape
            assert scale.dtype == torch.float8_e8m0fnu
            assert scale.is_contiguous()
            sides.append(Operand(x, from_tiled_torch(scale.view(torch.uint8), rows, cols // 32), (1, 32)).exact)
        seen.append({"bias": bias is not None, "dtype": output_dtype})
        out = sides[0] @ sides[1].mT
        return (out if bias is None else out + bias.double()).to(output_dtype)

    monkeypatch.setattr(f, "scaled_mm", scaled_mm)
    return seen


FUSED = [  # output, bias, accumulate, what torch is asked for
    (torch.bfloat16, None, False, {"bias": False, "dtype": torch.bfloat16}),
    (torch.bfloat16, torch.bfloat16, False, {"bias": True, "dtype": torch.bfloat16}),
    (torch.bfloat16, torch.float32, False, {"bias": False, "dtype": torch.float32}),
    (torch.float16, torch.float16, False, {"bias": True, "dtype": torch.float16}),
    (torch.float32, None, False, {"bias": False, "dtype": torch.float32}),
    (torch.float32, torch.float32, False, {"bias": False, "dtype": torch.float32}),
    (torch.float32, torch.bfloat16, True, {"bias": False, "dtype": torch.float32}),
]


@needs_interpreter
@pytest.mark.parametrize("out_dtype, bias_dtype, accumulate, asked", FUSED)
@some_pairs
def test_torch_gets_the_same_product(
    calls: list[dict[str, Any]],
    pair: str,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    accumulate: bool,
    asked: dict[str, Any],
) -> None:
    device = torch.device("cpu")
    few = (
        torch.arange(288) % 32 == 5
    ).float()  # so that bfloat16 holds all sums: interpreted kernels round them wrongly
    a, b = (
        operand(integers(rows, 288, device=device).sign() * few, kind, low=126, high=129)
        for rows, kind in zip((131, 48), pair.split("-"), strict=True)
    )
    bias = None if bias_dtype is None else integers(48, device=device).to(bias_dtype)
    there = integers(131, 48, device=device).to(out_dtype)
    want = a.exact @ b.exact.mT + (0 if bias is None else bias.double()) + (there.double() if accumulate else 0)
    for out in (there,) if accumulate else (None, there):
        found = gemm_blackwell._by_torch(*a.parts, *b.parts, bias, out_dtype, out, accumulate)
        assert torch.equal(found, want.float().to(out_dtype))
        assert out is None or found is out
        assert calls.pop() == asked
