"""Kernels compiled ahead of time, without a GPU, for Hopper and Blackwell: the instruction that does the work is there,
nothing spills, and the registers and the shared memory of a block fit.

One table: a kernel, the constants and argument types of one version, and what its machine code must hold. Resources are
read from the binary with the ``cuobjdump`` that comes with Triton.
"""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
import triton
import triton.language as tl
from mxfp8.kernels import (
    _gemm_tiles,
    gemm_hopper,
    gemm_triton,
    grouped_gemm_triton,
    quantize_hopper,
    quantize_triton,
)
from mxfp8.kernels._device import INTERPRETED
from mxfp8.kernels._gluon import HAVE_GLUON, swizzled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COUNTED = triton.__version__.startswith("3.6.")
"""Whether registers were counted with this Triton: with others kernels compile to the same instructions, and a few may
spill a little."""
counted = pytest.mark.skipif(not COUNTED, reason="registers were counted with triton 3.6")
HOPPER, BLACKWELL = 90, 100

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="an interpreted process cannot compile"),
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton brings no cuobjdump"),
]

WIDE = (4096, 4096)
REGISTER_FILE, SHARED_MEMORY = 65536, 227 * 1024  # of a multiprocessor; what one block may use
SERIALISED = re.compile(r"C75\d\d.*", re.I)  # ptxas: wgmma instructions that had to wait for each other
SPILLS = re.compile(r"\b(LDL|STL)\b")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of a kernel. ``types``: of parameters that are neither constants nor int32; pointers are to bytes
    unless it says otherwise. Pointers and ints are multiples of 16, but for those in ``odd``. ``instruction``: what
    the machine code must hold, by compute capability."""

    kernel: Any
    constants: dict[str, Any]
    instruction: dict[int, str]
    types: dict[str, str] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    registers: int = 255
    gluon: bool = False


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was found in the binary."""

    registers: int
    stack: int
    shared: int
    sass: str
    ptx: str
    ttgir: str


def build(version: Version, capability: int, folder: Path) -> Built:
    kernel, constants = version.kernel, version.constants
    types = {n: "*u8" for n in kernel.arg_names if n.endswith("_ptr")} | version.types
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    plain = [n for n in kernel.arg_names if signature[n].startswith(("*", "i")) and n not in version.odd]
    attrs = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in plain}
    source = ASTSource
    if version.gluon:
        source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    parts = source(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(parts, target=GPUTarget("cuda", capability, 32), options=version.options)
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", path))
    assert found is not None
    return Built(
        registers=int(found[1]), stack=int(found[2]), shared=compiled.metadata.shared,
        sass=tool("cuobjdump", "-sass", path), ptx=compiled.asm["ptx"], ttgir=compiled.asm["ttgir"],
    )  # fmt: skip


def tool(name: str, *arguments: object) -> str:
    command = [str(TOOLS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": str(TOOLS)})
    return done.stdout + done.stderr


# Matrix products

POINTER = {tl.bfloat16: "*bf16", tl.float16: "*fp16", tl.float32: "*fp32"}
RUN_TIME = ("M", "K", "G", "sa_r", "sa_k", "sb_r", "sb_k", "sb_g")  # not specialised


def portable_gemm(
    kernel: Any, tile: tuple[int, int, int], *, a: tuple[int, int] = (1, 32), b: tuple[int, int] = (1, 32),
    high: tl.dtype | None = None, out: tl.dtype = tl.bfloat16, **constants: Any,
) -> Version:  # fmt: skip
    """MX in block ``a`` times MX in block ``b``, or times an operand of dtype ``high``. Products of bfloat16 or float16
    and float32 sums: TF32, which Triton takes for float32 on Blackwell whatever one asks for, would not do."""
    dot = tl.float16 if high is tl.float16 else tl.bfloat16
    bk = min(a[1], 1 << 20 if high else b[1], 32 if high is tl.float32 else 64)
    fmt = 1 if high is None else gemm_triton.FLOAT32 if high is tl.float32 else gemm_triton.HP
    if kernel is gemm_triton._gemm_kernel:
        constants = {"ACT": -1, "ADD": False, **constants}
    suffix = r"F32\s" if dot is tl.float16 else r"F32\.BF16\s"
    return Version(
        kernel=kernel,
        constants={
            "BM": tile[0], "BN": tile[1], "BK": bk, "A_R": a[0], "A_K": a[1], "B_R": b[0], "B_K": b[1], "FMT_A": 0,
            "FMT_B": fmt, "DOT": dot, "OUT": out, "EVEN": True, "HARDWARE": True, "STEPS": -1, "a_k": 1, "b_k": 1,
            **constants,
        },
        types={
            "out_ptr": POINTER[out], "bias_ptr": "*fp32", "offs_ptr": "*i32", "b_ptr": POINTER[high] if high else "*u8",
        },
        odd=RUN_TIME,
        options={"num_warps": tile[2], "num_stages": 3},
        instruction={HOPPER: rf"HGMMA\S*\.{suffix}", BLACKWELL: "UTCHMMA"},
    )  # fmt: skip


Make = Callable[[], Version]


def gemm_versions() -> Iterator[tuple[str, Make]]:
    kernel = gemm_triton._gemm_kernel
    for name, tile in (("large", (64, 128, 4)), ("small", (64, 64, 4))):
        make = partial(portable_gemm, kernel, tile)
        yield f"gemm_triton {name} 1x32 1x32", partial(make, BIAS=False)
        yield f"gemm_triton {name} 1x128 128x128", partial(make, a=(1, 128), b=(128, 128), BIAS=False)
        yield f"gemm_triton {name} ragged bias", partial(make, EVEN=False, BIAS=True, out=tl.float32)
        yield f"gemm_triton {name} 32x32 bf16", partial(make, a=(32, 32), high=tl.bfloat16, BIAS=True)
        yield f"gemm_triton {name} 1x32 fp16", partial(make, high=tl.float16, out=tl.float16, BIAS=False)
        make = partial(portable_gemm, grouped_gemm_triton._grouped_kernel, tile)
        yield f"grouped_gemm_triton {name} 1x32 1x32", partial(make, GROUPS=16)
        yield f"grouped_gemm_triton {name} 1x128 128x128", partial(make, a=(1, 128), b=(128, 128), GROUPS=128)
    make = partial(portable_gemm, kernel, (64, 64, 4))
    yield "gemm_triton fp32", partial(make, high=tl.float32, out=tl.float32, BIAS=False)


def test_the_tiles_of_the_table_are_those_in_use() -> None:
    q, scale = torch.empty(8192, 64, dtype=torch.float8_e4m3fn), torch.empty(8192, 2, dtype=torch.uint8)
    mx = gemm_triton.side("a", q, scale, (1, 32))
    assert gemm_triton.tile(8192, 8192, mx, mx) == (64, 128, 4)
    assert gemm_triton.tile(256, 256, mx, mx) == (64, 64, 4)
    assert gemm_triton.tile(8192, 8192, mx, gemm_triton.side("b", q.float(), None, None)) == (64, 64, 4)


def coalesced(
    tile: str, a_block: tuple[int, int] = (1, 128), b_block: tuple[int, int] = (128, 128), *,
    a: str = "fp8e4nv", b: str = "fp8e4nv", out: str = "bf16", split: int = 1, groups: int = 0, **how: Any,
) -> Version:  # fmt: skip
    """The FP8 product of ``gemm_hopper``, as its host function would launch it, or that of ``grouped_gemm_hopper``;
    float32 is written without TMA. ``how``: of the epilogue."""
    forced, epilogue = (getattr(_gemm_tiles, tile), split), gemm_hopper.Epilogue(**how)
    if a_block == (32, 32):
        plan = gemm_hopper.make_square_plan((*WIDE, 4096), epilogue, out != "fp32", 132, forced)
    else:
        plan = gemm_hopper.make_plan(
            (*WIDE, 4096), a_block, b_block, epilogue, out != "fp32", 132, forced, groups=groups
        )
    kernel = plan.kernel
    run_time = [n for n in kernel.arg_names if n.isupper() and n not in plan.constants]  # sizes, not specialised
    absent = {"c_desc": not plan.constants["TMA_STORE"], "bias_ptr": not plan.constants["HOW"].bias}
    absent["table_ptr"] = not plan.constants.get("GROUPED")
    absent["q_ptr"] = absent["s_ptr"] = not plan.constants["HOW"].block
    types = {
        "a_desc": f"tensordesc<{a}[64, 128],{swizzled(8)!r}>", "b_desc": f"tensordesc<{b}[128, 128],{swizzled(8)!r}>",
        "c_desc": f"tensordesc<{out}[64, 128],{swizzled(16)!r}>", "out_ptr": f"*{out}", "bias_ptr": "*fp32",
        "table_ptr": "*i32",
    }  # fmt: skip
    formats = r"\.".join("E4M3" if x == "fp8e4nv" else "E5M2" for x in (a, b))
    return Version(
        kernel=kernel,
        constants={**plan.constants, **{n: None for n, missing in absent.items() if missing}, "sa_r": 1},
        types=types,
        odd=("sb_r", *run_time),
        instruction={HOPPER: rf"QGMMA\S*\.{formats}"},
        gluon=True,
    )


def hopper_versions() -> Iterator[tuple[str, Make]]:
    for tile in ("TALL", "WIDE", "SMALL"):
        make = partial(coalesced, tile)
        yield f"gemm_hopper {tile}", make
        yield f"gemm_hopper {tile} 128x128 e5m2 fp16", partial(make, (128, 128), a="fp8e5", out="fp16")
        yield f"gemm_hopper {tile} bias e5m2", partial(make, b="fp8e5", bias=True)
        yield f"gemm_hopper {tile} parts", partial(make, out="fp32", split=4)
        yield f"gemm_hopper {tile} fp32 bias", partial(make, out="fp32", bias=True)
        yield f"grouped_gemm_hopper {tile}", partial(make, groups=8)
    for tile in ("TALL", "SMALL"):
        make = partial(coalesced, tile, (32, 32), (32, 32))
        yield f"gemm_hopper {tile} 32x32", make
        yield f"gemm_hopper {tile} 32x32 bias e5m2", partial(make, b="fp8e5", bias=True)
        yield f"gemm_hopper {tile} 32x32 parts", partial(make, out="fp32", split=4)
        yield f"gemm_hopper {tile} 32x32 fp32 bias", partial(make, out="fp32", bias=True)
    for tile, blocks in itertools.product(("TALL", "SMALL"), (((1, 128), (1, 128)), ((1, 256), (1, 256)))):
        pairs = "_PAIRS" if blocks[0] == (1, 256) else ""
        yield f"gemm_hopper {tile}{pairs} {blocks[1][1]} on both sides", partial(coalesced, tile + pairs, *blocks)
    for tile in ("TALL_PAIRS", "SMALL_PAIRS"):
        make = partial(coalesced, tile, (1, 256))
        yield f"gemm_hopper {tile}", make
        yield f"gemm_hopper {tile} bias e5m2", partial(make, b="fp8e5", bias=True)
        yield f"gemm_hopper {tile} parts", partial(make, out="fp32", split=4)
        yield f"gemm_hopper {tile} fp32 bias", partial(make, out="fp32", bias=True)
        yield f"grouped_gemm_hopper {tile}", partial(make, groups=8)


# Casts

CAST = {HOPPER: r"F2FP\S*E4M3", BLACKWELL: r"F2FP\S*E4M3"}
QUANTIZE_PAIRS = [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((1, 128), (1, 128)), ((32, 32), (32, 32)),
                  ((128, 128), (128, 128))]  # fmt: skip


def planned(kernel: Any, plan: Any, ints: tuple[str, ...], **more: Any) -> Version:
    """A quantise kernel as its host function would launch it: constants, warps and strides of 1 from the plan."""
    ones = {n: 1 for n, value in zip(ints, plan.ints, strict=True) if value == 1}
    odd = tuple(n for n, value in zip(ints, plan.ints, strict=True) if value % 16)
    types = {"x_ptr": "*bf16", "step_ptr": "*i64"}
    types |= dict.fromkeys(("seed_lo", "seed_hi", "step", "stream", "row_offset", "col_offset"), "i64")
    odd += tuple(n for n, t in types.items() if t == "i64")
    return Version(
        kernel=kernel, constants={**plan.constants, **ones}, types=types, odd=odd, options=plan.options, **more
    )


def cast(axis: int, block: tuple[int, int], mode: int) -> Version:
    kernel = quantize_triton._quantize_kernel
    plan = quantize_triton._plan(WIDE, (4096, 1), axis, block, 0, 0, False, mode, True)
    return planned(kernel, plan, kernel.arg_names[4 : kernel.arg_names.index("seed_lo")], instruction=CAST)


def cast_both(pair: tuple[tuple[int, int], tuple[int, int]]) -> Version:
    kernel = quantize_triton._both_kernel
    plan = quantize_triton._plan_both(WIDE, (4096, 1), *pair, 0, 0, False, True)
    return planned(kernel, plan, kernel.arg_names[5 : kernel.arg_names.index("BM")], instruction=CAST)


def cast_hopper(pair: tuple[tuple[int, int] | None, tuple[int, int]]) -> Version:
    kernel = quantize_hopper._kernel
    plan = quantize_hopper._plan(WIDE, (4096, 1), 2, *pair, 0, 0, False)
    names = kernel.arg_names[5 : kernel.arg_names.index("BM")]
    return planned(kernel, plan, names, instruction={HOPPER: CAST[HOPPER]}, gluon=True)


def quantize_versions() -> Iterator[tuple[str, Make]]:
    blocks = ((1, 32), (1, 128), (1, 256), (32, 32), (128, 128))
    for (r, c), axis in itertools.product(blocks, (-1, -2)):
        yield f"quantize_triton {r}x{c} axis {axis}", partial(cast, axis, (r, c), 0)
    stochastic = [((1, 32), -1), ((1, 32), -2), ((1, 128), -1), ((1, 256), -2), ((32, 32), -1), ((128, 128), -1)]
    for (r, c), axis in (*stochastic, ((128, 128), -2)):
        yield f"quantize_triton {r}x{c} axis {axis} stochastic", partial(cast, axis, (r, c), 2)
        yield f"quantize_triton {r}x{c} axis {axis} stochastic within fours", partial(cast, axis, (r, c), 4)
    for pair in QUANTIZE_PAIRS:
        yield f"quantize_triton both {pair}", partial(cast_both, pair)


def quantize_hopper_versions() -> Iterator[tuple[str, Make]]:
    for pair in [*QUANTIZE_PAIRS, (None, (1, 32)), (None, (1, 256))]:
        yield f"quantize_hopper {pair}", partial(cast_hopper, pair)


def table() -> list[Any]:
    rows = [(*row, (HOPPER, BLACKWELL)) for row in (*gemm_versions(), *quantize_versions())]
    if HAVE_GLUON:
        rows += [(*row, (HOPPER,)) for row in (*hopper_versions(), *quantize_hopper_versions())]
    return [pytest.param(make, sm, id=f"{name}-sm_{sm}") for name, make, capabilities in rows for sm in capabilities]


@pytest.mark.parametrize("make, capability", table())
def test_machine_code(make: Make, capability: int, tmp_path: Path) -> None:
    version = make()
    built = build(version, capability, tmp_path)
    assert re.search(version.instruction[capability], built.sass), "the instruction that should do the work is missing"
    assert "tf32" not in built.ptx
    assert version.gluon or built.registers * 32 * version.options["num_warps"] <= REGISTER_FILE
    assert built.shared <= SHARED_MEMORY
    if not COUNTED:
        return
    assert built.stack == 0
    assert not SPILLS.search(built.sass)
    assert built.registers <= version.registers
    if capability == HOPPER and "GMMA" in version.instruction[capability]:
        (tmp_path / "kernel.ptx").write_text(built.ptx)
        said = tool("ptxas", "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", "/dev/null")
        assert not SERIALISED.search(said), said


@counted
def test_a_spill_would_show(tmp_path: Path) -> None:
    """A tile that is too large for its warps, on purpose: what the test above reads does see it."""
    version = portable_gemm(gemm_triton._gemm_kernel, (128, 128, 4), a=(1, 128), b=(1, 128), BIAS=False)
    built = build(version, HOPPER, tmp_path)
    assert built.stack > 0
    assert SPILLS.search(built.sass)
