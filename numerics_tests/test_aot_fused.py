"""The fused kernels compiled for sm_90 (and the portable ones for sm_100) without a GPU: that they compile, how much
they spill, and that a transposed store is still one of 16 bytes. The launch plans are the real ones.
"""

import dataclasses
import itertools
import os
import re
import subprocess
from typing import Any

import pytest
import torch

from mxfp8.formats import BLOCK_SHAPES, get_format, get_scale_rule
from mxfp8.reference.fused import Casts

pytest.importorskip("triton", reason="compiles Triton kernels")
import triton
from mxfp8.kernels import _parts
from mxfp8.kernels import activation_quantize_hopper as activation_hopper
from mxfp8.kernels import activation_quantize_triton as activation_triton
from mxfp8.kernels import norm_quantize_hopper as norm_hopper
from mxfp8.kernels import norm_quantize_triton as norm_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled here"
)
COUNTED = triton.__version__.startswith("3.6.")
"""Whether registers were counted with this Triton: with others kernels compile to the same instructions, and a few may
spill more."""

FLOATS = {"w_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "part_ptr", "dw_ptr", "db_ptr", "sum_ptr"}
COUNTS = {"count_ptr", "next_ptr"}
CODES = {"q_ptr", "s_ptr", "t_ptr", "u_ptr"}
ROWS, COLUMNS = 4096, 1024
WIDE_STORES = {
    "rows": r"st\.global\.v4\.b32",
    "columns": r"st\.global\.L1::evict_last\.L2::cache_hint\.v4\.b32",
}
"""16 codes of a row or of a column at a time; those of columns stay in the second-level cache."""
BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


def casts(block: tuple[int, int], column_block: tuple[int, int], outputs: tuple[str, ...]) -> Casts:
    return Casts(
        outputs=outputs, round_first=False, fmt=get_format("e4m3"), block=block, column_block=column_block,
        scale_rule=get_scale_rule("rceil"), satfinite=False,
    )  # fmt: skip


def compiled(kernel: Any, plan: Any, gluon: bool, arch: int = 90, dtype: str = "bf16") -> Any:
    """``kernel`` as a launch with ``plan`` on tensors of ``dtype`` would compile it: all pointers and sizes aligned."""
    signature, constants, names = {}, dict(plan.constants), kernel.arg_names
    for name in names:
        if name in plan.constants:
            signature[name] = "constexpr"
        elif name.endswith("_c"):
            signature[name], constants[name] = "constexpr", 1
        elif name.endswith("_ptr"):
            other = "*fp32" if name in FLOATS else "*i32" if name in COUNTS else "*" + dtype
            signature[name] = "*u8" if name in CODES else other
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
    aligned = [n for n in names if signature[n] not in ("constexpr", "fp32")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = (GluonASTSource if gluon else ASTSource)(
        fn=kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()}, attrs=attrs
    )  # fmt: skip
    options = {**plan.options, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(kernel: Any, tmp_path: Any) -> tuple[int, int]:
    """``(registers, bytes of stack)`` of a compiled kernel."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    run = subprocess.run(
        [os.path.join(BIN, "cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout + run.stderr)
    assert found is not None
    return int(found[1]), int(found[2])


BLOCKS = [
    ((1, 32), (1, 32)), ((1, 128), (128, 128)), ((32, 32), (32, 32)), ((1, 128), (1, 128)), ((1, 256), (1, 32)),
    ((1, 32), (1, 256)), ((128, 128), (128, 128)),
]  # fmt: skip


def activation_made(
    activation: str, backward: bool, asked: Casts, bias: bool, dtype: str = "bf16", rows: int = ROWS
) -> tuple[Any, Any]:
    """A plan of an activation on Hopper, and what it compiles to."""
    width = COLUMNS * 2 if activation == "swiglu" else COLUMNS
    plan = activation_hopper._plan(
        (rows, width), (width, 1), (COLUMNS, 1) if backward else None, 2 if dtype == "bf16" else 4, bias, activation,
        asked,
    )  # fmt: skip
    kernel = activation_hopper._backward_kernel if backward else activation_hopper._forward_kernel
    return plan, compiled(kernel, plan, gluon=True, dtype=dtype)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_activations_for_hopper(activation: str, blocks: Any, backward: bool, tmp_path: Any) -> None:
    plan, made = activation_made(activation, backward, casts(*blocks, ("rows", "columns")), backward, rows=ROWS - 36)
    tile = plan.constants["BM"] * plan.constants["BK"]
    for store in WIDE_STORES.values():
        assert len(re.findall(store, made.asm["ptx"])) >= tile // (16 * 32 * plan.options["num_warps"])
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]
    registers, stack = resources(made, tmp_path)
    assert registers * plan.options["num_warps"] * 32 <= 65536
    assert stack == 0 or not COUNTED, f"{registers} registers, {stack} bytes spilled"


ONE_WAY = [(name, block) for name in ("rows", "columns") for block in BLOCK_SHAPES]


@pytest.mark.parametrize("output, block", ONE_WAY, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "swiglu"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_activations_one_way_for_hopper(
    activation: str, backward: bool, output: str, block: Any, tmp_path: Any
) -> None:
    """With a bias and a tail, which cost registers; and nothing more goes through shared memory than has to."""
    plan, made = activation_made(activation, backward, casts(block, block, (output,)), True, rows=ROWS - 36)
    registers, stack = resources(made, tmp_path)
    assert registers * plan.options["num_warps"] * 32 <= 65536
    assert stack == 0 or not COUNTED, f"{registers} registers, {stack} bytes spilled"
    tile = plan.constants["BM"] * plan.constants["BK"]
    if not backward:  # which stores sums as well
        stores = len(re.findall(WIDE_STORES[output], made.asm["ptx"]))
        assert stores == tile // (16 * 32 * plan.options["num_warps"])
    if output == "rows" and block[0] == 1 and not backward:
        assert made.metadata.shared == 0  # no thread waits for another
    elif output == "columns" and block[0] > 1:
        assert made.metadata.shared <= tile  # codes alone are turned
    elif output == "columns" and not backward and activation != "swiglu":
        assert made.metadata.shared <= 2 * tile  # the input is turned, not the value


@pytest.mark.parametrize("blocks", BLOCKS[:3], ids=str)
@pytest.mark.parametrize("outputs", [("rows",), ("columns",), ("rows", "columns"), ("rows", "columns", "hp")], ids=str)
def test_float32_activations_for_hopper(outputs: tuple[str, ...], blocks: Any, tmp_path: Any) -> None:
    for activation, backward in (("silu", False), ("silu", True), ("swiglu", True)):
        _, made = activation_made(activation, backward, casts(*blocks, outputs), backward, dtype="fp32")
        registers, stack = resources(made, tmp_path)
        assert stack == 0 or not COUNTED, f"{activation}: {registers} registers, {stack} bytes spilled"


def test_pairs_of_codes_in_the_other_format() -> None:
    asked = dataclasses.replace(casts((32, 32), (32, 32), ("rows", "columns")), fmt=get_format("e5m2"))
    ptx = activation_made("silu", False, asked, True)[1].asm["ptx"]
    assert "cvt.rn.satfinite.e5m2x2.f32" in ptx
    assert "e4m3" not in ptx


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("norm", ["rms", "layer", "block"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_norms_for_hopper(norm: str, blocks: Any, backward: bool, residual: bool, tmp_path: Any) -> None:
    strides = ((COLUMNS, 1),) * (3 if backward else 2)
    flags, asked = (residual, True, norm == "layer"), casts(*blocks, ("rows", "columns"))
    if backward or norm == "block":
        plan = norm_hopper._plan((ROWS, COLUMNS), strides, 2, norm, 256, flags, backward, asked)
        kernel = norm_hopper._backward_kernel if backward else norm_hopper._block_kernel
    else:
        plan = norm_hopper._rows_plan((ROWS, COLUMNS), strides, 2, norm == "layer", flags, asked)
        kernel = norm_hopper.forward_kernel
    if plan is None:  # the portable kernels take it
        assert max(*blocks[0], *blocks[1]) >= 128
        assert norm == "block" or (backward and (residual or norm == "layer"))
        return
    made = compiled(kernel, plan, gluon=True)
    assert "st.global.v4.b32" in made.asm["ptx"]
    registers, stack = resources(made, tmp_path)
    assert stack == 0 or not COUNTED, f"{registers} registers, {stack} bytes spilled"


@pytest.mark.parametrize(
    "outputs", [("rows",), ("columns",), ("columns", "hp"), ("rows", "columns", "hp")], ids="+".join
)
@pytest.mark.parametrize("blocks", BLOCKS[:3], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_over_rows_for_hopper_by_output(
    norm: str, residual: bool, blocks: Any, outputs: tuple[str, ...], tmp_path: Any
) -> None:
    flags = (residual, True, norm == "layer")
    plan = norm_hopper._rows_plan((ROWS, 1024), ((1024, 1),) * 2, 2, norm == "layer", flags, casts(*blocks, outputs))
    assert plan is not None
    registers, stack = resources(compiled(norm_hopper.forward_kernel, plan, gluon=True), tmp_path)
    assert stack == 0 or not COUNTED, f"{registers} registers, {stack} bytes spilled"


def launches(asked: Casts, group: int) -> list[tuple[Casts, bool]]:
    """What the portable host functions launch for ``asked``: casts, and whether statistics are given."""
    seen = []

    def compute(casts: Casts, first: Any = None, dtype: Any = None) -> tuple[Any, ...]:
        seen.append((casts, first is not None))
        return (*[None] * 4, torch.empty(0, 64), *[None] * 3)

    _parts.in_parts(compute, asked, torch.bfloat16, group)
    return seen


@pytest.mark.parametrize("group", [1, 32, 256, 1024])
def test_portable_tiles_fit_registers(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: 16 elements a thread, or 32 in rows alone, which need no second layout."""
    monkeypatch.setattr(_parts, "_cast", lambda value, casts: (None,) * 4)
    names = ("rows", "columns", "hp")
    for outputs in (c for n in (1, 2, 3) for c in itertools.combinations(names, n)):
        for block, column_block in itertools.product(BLOCK_SHAPES, BLOCK_SHAPES):
            for asked, _ in launches(casts(block, column_block, outputs), group):
                copies = activation_triton.Copies.of((ROWS, COLUMNS), asked, True)
                each = 32 if copies.across is None and all(rows == 1 for rows, _ in copies.blocks) else 16
                tiles = [norm_triton.tile(copies, COLUMNS, group)]
                tiles += [activation_triton.tile(copies)] if group == 1 else []
                for bm, bk, warps in tiles:
                    assert bm * bk <= each * 32 * warps, (asked, bm, bk, warps)


def portable_plans(asked: Casts, given: bool) -> dict[str, tuple[Any, Any]]:
    shape, strides, all_three = (ROWS, COLUMNS), (COLUMNS, 1), (True,) * 3
    halves = (ROWS, 2 * COLUMNS), (2 * COLUMNS, 1)
    flags = (not given, True, True, given)
    return {
        "swiglu backward": (
            activation_triton._backward_kernel,
            activation_triton._plan(*halves, strides, True, "swiglu", asked, True),
        ),
        "layer backward": (
            norm_triton._backward_kernel,
            norm_triton._plan(shape, (strides,) * 3, "layer", 256, all_three, asked, True),
        ),
        "block backward": (
            norm_triton._backward_kernel,
            norm_triton._plan(shape, (strides,) * 3, "block", 256, all_three, asked, True),
        ),
        "gelu forward": (
            activation_triton._forward_kernel,
            activation_triton._plan(shape, strides, None, True, "gelu", asked, True),
        ),
        "layer forward": (
            norm_triton._forward_kernel,
            norm_triton._plan(shape, (strides,) * 2, "layer", 256, flags, asked, True),
        ),
    }


EXACT, COARSE, SQUARE = ((1, 32), (1, 32)), ((1, 128), (1, 128)), ((32, 32), (1, 32))
PORTABLE = [
    (*EXACT, ("rows", "columns", "hp"), ("swiglu backward", "layer backward", "gelu forward", "layer forward")),
    (*EXACT, ("columns",), ("block backward",)),
    (*COARSE, ("rows", "hp"), ("swiglu backward", "layer backward", "block backward")),
    (*COARSE, ("columns",), ("swiglu backward", "layer backward", "layer forward")),
    (*SQUARE, ("rows", "columns"), ("swiglu backward", "layer backward")),
    ((32, 32), (1, 256), ("rows",), ("layer backward", "block backward")),
    ((32, 32), (1, 256), ("columns",), ("swiglu backward", "layer backward")),
    (*EXACT, ("hp",), ("gelu forward", "layer forward")),
]
"""Blocks, outputs, and the kernels that need most registers with them."""


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("block, column_block, outputs, names", PORTABLE, ids=str)
def test_the_portable_kernels_do_not_spill(
    block: Any, column_block: Any, outputs: tuple[str, ...], names: tuple[str, ...], arch: int, tmp_path: Any
) -> None:
    asked = casts(block, column_block, outputs)
    plans = portable_plans(asked, given=outputs == ("columns",))
    for name in names:
        made = compiled(*plans[name], gluon=False, arch=arch)
        assert ("cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]) == (outputs != ("hp",))
        registers, stack = resources(made, tmp_path)
        assert stack == 0 or not COUNTED, f"{name}: {registers} registers, {stack} bytes spilled"


def test_contraction_is_off() -> None:
    """``x * rstd * weight + bias`` must round after each operation: no fused multiply-add of a value may appear. The
    sum of squares is one on purpose; so BlockNorm, which has none, is looked at."""
    asked = casts((1, 32), (1, 32), ("rows", "columns"))
    plan = norm_hopper._plan((ROWS, COLUMNS), ((COLUMNS, 1),) * 2, 2, "block", 256, (False, True, True), False, asked)
    ptx = compiled(norm_hopper._block_kernel, plan, gluon=True).asm["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
