"""Hopper's products whose programs take several tiles with other bounds along K each: parts of a split K, and groups
that divide it. A program that kept the first tile's bounds would wait for slots that nobody fills."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _gemm_tiles, gemm_hopper
from mxfp8.kernels._device import INTERPRETED
from mxfp8.kernels._gluon import HAVE_GLUON

from numerics_tests import test_aot
from numerics_tests.operands import integers, operand
from numerics_tests.test_aot import HOPPER, Make, coalesced, counted
from numerics_tests.test_aot_grouped import hopper_weight_gradient

pytestmark = pytest.mark.skipif(INTERPRETED or not HAVE_GLUON, reason="needs Gluon, which is not interpreted")

CASES = [
    *((tile, "1x128-128x128") for tile in ("TALL", "WIDE", "SMALL")),
    *((tile, pair) for tile in ("TALL", "SMALL") for pair in ("1x128-1x128", "32x32-32x32")),
    *((tile, pair) for tile in ("TALL_PAIRS", "SMALL_PAIRS") for pair in ("1x256-128x128", "1x256-1x256")),
]


def block(name: str) -> tuple[int, int]:
    rows, cols = name.split("x")
    return int(rows), int(cols)


# In the compiler


def versions() -> list[object]:
    rows: list[tuple[str, Make]] = []
    for tile, pair in CASES:
        make = partial(coalesced, tile, *map(block, pair.split("-")), out="fp32", split=3)
        rows.append((f"{tile} {pair} parts", make))
    rows += [(f"{tile} groups divide K", partial(hopper_weight_gradient, tile)) for tile in ("TALL", "WIDE", "SMALL")]
    rows += [(f"{tile} groups", partial(coalesced, tile, groups=8)) for tile in ("TALL", "WIDE", "SMALL")]
    return [pytest.param(make, id=name) for name, make in rows]


FOR = re.compile(r"^(\s*)(.*)scf\.for (%\w+) = (%\w+) to (%\w+) step")
MADE = re.compile(r"(%\w+)(?::\d+)? = ")


def loops_with_foreign_bounds(ttgir: str) -> list[str]:
    """Inner loops of which a bound is neither a constant nor made in the loop around them."""
    found, around, own = [], None, set[str]()
    for line in ttgir.splitlines():
        inner = FOR.match(line)
        if around is None:
            if inner and "iter_args" in line:  # of the loops over tiles, and of nothing outside them
                around, own = len(inner[1]), set(MADE.findall(line[line.index("iter_args") :])) | {inner[3]}
            continue
        if line.startswith(" " * around + "}"):
            around = None
            continue
        if inner:
            bounds = [name for name in inner.group(4, 5) if not re.match(r"%c-?\d+", name)]
            found += [line.strip()[:160] for name in bounds if name not in own]
        own |= set(MADE.findall(line))
    return found


@counted
@pytest.mark.skipif(not (test_aot.TOOLS / "cuobjdump").exists(), reason="this triton brings no cuobjdump")
@pytest.mark.parametrize("make", versions())
def test_bounds_along_k_change_from_tile_to_tile(make: Make, tmp_path: Path) -> None:
    """Triton 3.6 takes what a loop carries for dead where it is but a bound of a loop inside, and puts the first value
    in its place. A second use prevents that."""
    ttgir = test_aot.build(make(), HOPPER, tmp_path).ttgir
    assert ttgir.count("scf.for") >= 4
    assert loops_with_foreign_bounds(ttgir) == []


def test_what_the_search_above_finds() -> None:
    good = """
    %first = arith.divsi %a, %b : i32
    %out:2 = scf.for %unit = %0 to %1 step %2 iter_args(%x = %c0_i32, %bound = %first) -> (i32, i32)  : i32 {
      %last = arith.addi %bound, %c1_i32 : i32
      %y = scf.for %k = BOUND to %last step %c1_i32 iter_args(%z = %x) -> (i32)  : i32 {
      }
      scf.yield %y, %last : i32, i32
    }
    %other = scf.for %i = %0 to %1 step %2 iter_args(%x = %c0_i32) -> (i32)  : i32 {
    }
"""
    assert loops_with_foreign_bounds(good.replace("BOUND", "%bound")) == []
    assert loops_with_foreign_bounds(good.replace("BOUND", "%c0_i32")) == []
    assert len(loops_with_foreign_bounds(good.replace("BOUND", "%first"))) == 1


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tile, pair", CASES)
def test_a_program_takes_several_parts_of_different_lengths(tile: str, pair: str) -> None:
    if (why := gemm_hopper.why_not("cuda")) is not None:
        pytest.skip(why)
    chosen, device = getattr(_gemm_tiles, tile), torch.device("cuda")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    shape = M, N, K = 2000, 1100, 1280 * chosen.pair
    kinds = pair.split("-")
    a, b = (operand(integers(rows, K, device=device), kind) for rows, kind in zip((M, N), kinds, strict=True))
    rest = (gemm_hopper.Epilogue(), True, sms, (chosen, 3))
    if kinds[0] == "32x32":
        plan = gemm_hopper.make_square_plan(shape, *rest)
    else:
        plan = gemm_hopper.make_plan(shape, block(kinds[0]), block(kinds[1]), *rest)
    assert plan.grid[0] == sms < plan.split * -(-M // chosen.height) * -(-N // 128)
    want = a.exact @ b.exact.mT
    for _ in range(3):
        out = torch.full((M, N), torch.nan, device=device)
        gemm_hopper.coalesced(a.parts, b.parts, None, out, rest[0], plan=plan)
        assert torch.equal(out.double(), want)
