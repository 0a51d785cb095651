"""Kernels for groups of rows, compiled ahead of time for Hopper and Blackwell: the instruction that does the work is
there and nothing spills. As :mod:`numerics_tests.test_aot`, whose reading of machine code this uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="tests of Triton kernels")
import triton.language as tl
from mxfp8.kernels import (
    _grouped_exact,
    _groups,
    grouped_gemm_hopper,
    grouped_gemm_triton,
    quantize_grouped_hopper,
    quantize_grouped_triton,
)
from mxfp8.kernels._device import INTERPRETED
from mxfp8.kernels._gluon import HAVE_GLUON

from numerics_tests import test_aot
from numerics_tests.test_aot import (
    BLACKWELL,
    CAST,
    HOPPER,
    SPILLS,
    TOOLS,
    Make,
    Version,
    build,
    coalesced,
    counted,
    portable_gemm,
)

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="an interpreted process cannot compile"),
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton brings no cuobjdump"),
]
WORDS = ("seed_lo", "seed_hi", "step", "stream", "row_offset", "col_offset", "signs_lo", "signs_hi")


def cast(block: tuple[int, int], hadamard: int | None, noisy: bool) -> Version:
    step = quantize_grouped_triton.step_of(block, hadamard)
    bk, warps = quantize_grouped_triton.tile(step, block, noisy)
    return Version(
        kernel=quantize_grouped_triton._kernel,
        constants={
            "BM": step, "BK": bk, "RB": block[1], "CB": block[0], "FMT": 0, "RULE": 0, "SATFINITE": False,
            "ROUNDING": 2 if noisy else 0, "HADAMARD": hadamard or 0, "FACTOR": (hadamard or 1) ** -0.5,
            "HARDWARE": True, "GROUPS": 16, "x_c": 1,
        },
        types={
            "x_ptr": "*bf16", "offs_ptr": "*i32", "starts_ptr": "*i32", "step_ptr": "*i64",
            **dict.fromkeys(WORDS, "i64"),
        },
        odd=("M", "G", *WORDS),
        options={"num_warps": warps},
        instruction=CAST,
    )  # fmt: skip


def hopper_cast(block: tuple[int, int], x: str, along: int = 0) -> Version:
    """``along``: of blocks along rows that are made in the same pass, 0 for none."""
    rc = (block[1], block[0])
    bm, bk, options = quantize_grouped_hopper._tile(along, rc, 4 if x == "*fp32" else 2)
    warps = options["num_warps"]
    return Version(
        kernel=quantize_grouped_hopper._kernel,
        constants={
            "BM": bm, "BK": bk, "STEP": rc[0], "CB": rc[1], "ALONG": along, "FMT": 0, "RULE": 0,
            "SATFINITE": False, "WHOLE": False,
            "LA": quantize_grouped_hopper.row_layout(bk, 2, warps),
            "LB": quantize_grouped_hopper.column_layout(bm, bk, warps),
        },
        types={"x_ptr": x, "table_ptr": "*i32"},
        odd=("pieces", "across", "s_r", "s_c"),
        options=options,
        instruction={HOPPER: r"STG\.E\.EL\.128"},
        gluon=True,
    )  # fmt: skip


def weight_gradient(tile: tuple[int, int, int], **more: Any) -> Version:
    made = portable_gemm(grouped_gemm_triton._wgrad_kernel, tile, **more)
    odd = ("P", "Q", "sa_r", "sa_k", "sb_r", "sb_k")
    return replace(made, types={**made.types, "a_starts_ptr": "*i32", "b_starts_ptr": "*i32"}, odd=odd)


def hopper_weight_gradient(tile: str, *blocks: tuple[int, int], out: str = "bf16") -> Version:
    made = coalesced(tile, *blocks, out=out, groups=8)
    return replace(made, constants={**made.constants, "GROUPED": 2})


def around_torch(kernel: Any, constants: dict[str, int], store: str) -> Version:
    types = {"offs_ptr": "*i64", "ends_ptr": "*i32", "out_ptr": "*bf16"}
    names = {n: types[n] for n in kernel.arg_names if n in types}
    rest: Any = {
        "odd": ("M", "G"),
        "options": {"num_warps": 4},
        "instruction": dict.fromkeys((HOPPER, BLACKWELL), store),
    }
    return Version(kernel=kernel, constants=constants, types=names, **rest)


BOTH = [
    (along, block)
    for along in (32, 128, 256)
    for block in ((1, 32), (1, 128), (1, 256), (32, 32), (128, 128))
    if along * block[1] <= 128 * 128
]


def versions() -> Iterator[tuple[str, Make, tuple[int, ...]]]:
    both = (HOPPER, BLACKWELL)
    for block, noisy in itertools.product(((1, 32), (1, 128), (1, 256), (32, 32), (128, 128)), (False, True)):
        yield f"quantize_grouped {block} {'noisy' if noisy else 'nearest'}", partial(cast, block, None, noisy), both
    for block, hadamard in (((1, 32), 32), ((1, 32), 128), ((1, 128), 16)):
        yield f"quantize_grouped {block} hadamard {hadamard}", partial(cast, block, hadamard, True), both
    for name, tile in (("large", (64, 128, 4)), ("small", (64, 64, 4))):
        make = partial(weight_gradient, tile)
        yield f"wgrad {name} 1x32 1x32", make, both
        yield f"wgrad {name} 1x128 128x128", partial(make, a=(1, 128), b=(128, 128), out=tl.float32), both
    make = partial(weight_gradient, (64, 64, 4), high=tl.bfloat16, EVEN=False)
    yield "wgrad 1x32 bf16", make, both
    yield "ends", partial(around_torch, _grouped_exact._ends_kernel, {"GROUPS": 16}, r"STG\.E"), both
    yield "clear", partial(around_torch, _grouped_exact._clear_kernel, {"BM": 64, "BN": 512}, r"STG\.E\.128"), both
    if not HAVE_GLUON:
        return
    for block, x in itertools.product(((1, 32), (1, 128), (1, 256), (32, 32), (128, 128)), ("*bf16", "*fp32")):
        yield f"quantize_grouped hopper {block} {x}", partial(hopper_cast, block, x), (HOPPER,)
    for (along, block), x in itertools.product(BOTH, ("*bf16", "*fp32")):
        yield f"both_grouped hopper {along} {block} {x}", partial(hopper_cast, block, x, along), (HOPPER,)
    for tile in ("TALL", "WIDE", "SMALL"):
        yield f"wgrad hopper {tile}", partial(hopper_weight_gradient, tile), (HOPPER,)
    for tile in ("WIDE", "SMALL"):
        yield f"wgrad hopper {tile} fp32", partial(hopper_weight_gradient, tile, out="fp32"), (HOPPER,)
    for tile, along, out in (("TALL", 128, "bf16"), ("SMALL", 128, "fp32"), ("SMALL_PAIRS", 256, "bf16")):
        make = partial(hopper_weight_gradient, tile, (1, along), (1, along), out=out)
        yield f"wgrad hopper {tile} {along} on both sides {out}", make, (HOPPER,)


@pytest.mark.parametrize(
    "make, capability",
    [pytest.param(make, sm, id=f"{name}-sm_{sm}") for name, make, capabilities in versions() for sm in capabilities],
)
def test_machine_code_of_groups(make: Make, capability: int, tmp_path: Path) -> None:
    test_aot.test_machine_code(make, capability, tmp_path)


@counted
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_offsets_are_checked_by_an_assertion(capability: int, tmp_path: Path) -> None:
    """It is left out of kernels that are not launched as :func:`_groups.check_offsets` launches this one."""
    options = {"num_warps": 1, "debug": True, "sanitize_overflow": False}
    made = Version(
        kernel=_groups._check_kernel, constants={"GROUPS": 8}, types={"offs_ptr": "*i64"}, odd=("M", "G"),
        options=options, instruction={},
    )  # fmt: skip
    assert "__assertfail" in build(made, capability, tmp_path).ptx
    quiet = build(replace(made, options={"num_warps": 1}), capability, tmp_path)
    assert "__assertfail" not in quiet.ptx


@counted
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_tables_spill_nothing(capability: int, tmp_path: Path) -> None:
    for kernel, constants, types, warps in (
        (quantize_grouped_hopper._pieces_kernel, {"STEP": 32, "GROUPS": 64, "TRAILING": 1}, {"offs_ptr": "*i64"}, 1),
        (grouped_gemm_hopper._table_kernel, {"BM": 192, "GROUPS": 64}, {"offs_ptr": "*i64"}, 1),
        (
            grouped_gemm_hopper._divided_table_kernel,
            {"BM": 192, "STEP": 128, "GROUPS": 64, "RANKED": True},
            {"starts_ptr": "*i32"},
            4,
        ),
    ):
        made = Version(
            kernel=kernel, constants=constants, types={"starts_ptr": "*i32", "table_ptr": "*i32", **types},
            odd=("M", "N", "P", "G"), options={"num_warps": warps}, instruction={},
        )  # fmt: skip
        built = build(made, capability, tmp_path)
        assert built.stack == 0
        assert not SPILLS.search(built.sass)
