"""The kernels of optimisers, dequantisation and re-coalescing compiled for Hopper and Blackwell without a GPU.

Nothing spills, nothing exceeds the registers of a block, and memory is read and written 16 bytes at a time.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
import triton
import triton.language as tl
from mxfp8.kernels import dequantize_triton, optim_triton, quantize_tiled_triton, recoalesce_triton, scale_layout
from mxfp8.kernels._device import INTERPRETED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from numerics_tests.test_optim_kernels import weight_casts

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted process cannot compile")
COUNTED = triton.__version__.startswith("3.6.")
"""Whether registers were counted with this Triton: with others kernels compile to the same instructions, and a few may
spill a little."""
targets = pytest.mark.parametrize("capability", [90, 100])

SASS = {"spilled": r"\b(LDL|STL)\b", "wide_loads": r"LDG\.E\.128", "wide_stores": r"STG\.E\.128"}


def compiled(kernel, types: dict[str, str], constants: dict, capability: int, warps: int, folder: Path) -> dict:
    """Registers, shared memory and counts of instructions; ints that are not in ``types`` are multiples of 16, or 1
    where ``constants`` says so."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    divisible = [n for n in names if signature[n] == "i32" or signature[n].startswith("*")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    path = folder / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this triton brings no cuobjdump")

    def dump(what: str) -> str:
        done = subprocess.run(
            [str(tools / "cuobjdump"), what, str(path)], capture_output=True, text=True, check=True,
            env={"PATH": str(tools)},
        )  # fmt: skip
        return done.stdout + done.stderr

    found = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
    assert found is not None
    sass = dump("-sass")
    counts = {name: len(re.findall(pattern, sass)) for name, pattern in SASS.items()}
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": built.metadata.shared, **counts}


def assert_lean(built: dict, warps: int, shared: int = 64 * 1024) -> None:
    assert built["spilled"] == built["stack"] == 0 or not COUNTED, built
    assert built["registers"] * warps * 32 <= 65536, built
    assert built["shared"] <= shared, built
    assert built["wide_loads"] > 0
    assert built["wide_stores"] > 0


STEPS = {
    "none": (), "row": ("row",), "column": ("column",), "both": ("row", "column"), "square": ("square",),
    "square128": ("square128",), "row128_square128": ("row128", "square128"), "both128": ("row128", "column128"),
    "column256": ("column256",),
}  # fmt: skip
FLOATS = dict.fromkeys(("decay", "rate", "fresh", "beta2", "square", "root", "eps", "lr", "weight_decay"), "fp32")
POINTERS = dict.fromkeys(("m_ptr", "v_ptr", "w_ptr", "a_ptr", "lr_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("q_ptr", "s_ptr", "t_ptr", "u_ptr"), "*u8")


def step_constants(kinds: tuple[str, ...], *largest: int) -> tuple[dict, tuple[int, int]]:
    """The constants that the host function would pass, and strides of 1 that it would specialise on."""
    plan = optim_triton._plan(torch.empty(512, 512, device="meta"), weight_casts(*kinds), *largest)
    ones = {"g_c": 1}
    for i, names in enumerate((("q_r", "q_c", "s_r", "s_c"), ("t_r", "t_c", "u_r", "u_c"))):
        strides = (*plan.strides[7 * i + 2 : 7 * i + 4], *plan.strides[7 * i + 5 : 7 * i + 7])
        ones |= {n: 1 for n, stride in zip(names, strides, strict=True) if stride == 1}
    flags = {"MASTER": False, "MAXIMIZE": False, "LR_TENSOR": False, "HARDWARE": True}
    return {**plan.constants, **flags, **ones}, plan.tile


@targets
@pytest.mark.parametrize(
    "param, master, whole", [("*fp32", False, True), ("*fp32", False, False), ("*bf16", True, True)]
)
@pytest.mark.parametrize("kinds", STEPS)
def test_adamw(kinds: str, whole: bool, param: str, master: bool, capability: int, tmp_path: Path) -> None:
    if capability == 100 and (not whole or master):
        return  # one variant of each is enough for the second target
    constants, (bm, bk) = step_constants(STEPS[kinds])
    assert constants["COPIES"] == len(STEPS[kinds])
    if not STEPS[kinds]:
        bm, bk = 1, 4096
    constants |= {"BM": bm, "BK": bk, "MASTER": master, "WHOLE": whole, "STRIP": min(bm, max(1, 4096 // bk))}
    warps = 16 if bm * bk > 8192 and len(STEPS[kinds]) > 1 else 8
    types = {**POINTERS, **FLOATS, "p_ptr": param, "g_ptr": param}
    assert_lean(compiled(optim_triton._adamw_kernel, types, constants, capability, warps, tmp_path), warps)


@targets
@pytest.mark.parametrize("kinds", STEPS)
def test_rowwise_adagrad(kinds: str, capability: int, tmp_path: Path) -> None:
    constants, (bm, bk) = step_constants(STEPS[kinds], optim_triton._LARGEST_TILE // 2)
    if not STEPS[kinds]:
        bm, bk = optim_triton._rows_tile(512, 512)
    constants |= {"BM": bm, "BK": bk, "DECAY": False}
    types = {**POINTERS, **FLOATS, "p_ptr": "*fp32", "g_ptr": "*fp32"}
    assert_lean(compiled(optim_triton._rowwise_adagrad_kernel, types, constants, capability, 8, tmp_path), 8)


@targets
@pytest.mark.parametrize("dtype, pointer", [(tl.bfloat16, "*bf16"), (tl.float32, "*fp32")], ids=["bf16", "fp32"])
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 1), (32, 32), (128, 128)], ids=str)
def test_dequantize(block: tuple[int, int], dtype: tl.dtype, pointer: str, capability: int, tmp_path: Path) -> None:
    bm, bk = dequantize_triton._tile(block, 4096, 4096)
    constants = {
        "BM": bm, "BK": bk, "RB": block[0], "CB": block[1], "FMT": 0, "DTYPE": dtype, "LIMIT": 0.0,
        "HARDWARE": True, "WHOLE": True, "q_c": 1, "s_r": 1,
    }  # fmt: skip
    types = {"q_ptr": "*u8", "s_ptr": "*u8", "o_ptr": pointer}
    built = compiled(dequantize_triton._dequantize_kernel, types, constants, capability, 4, tmp_path)
    assert_lean(built, 4)
    assert built["registers"] <= 64  # eight blocks to a multiprocessor: it lives on bytes in flight


@targets
@pytest.mark.parametrize(
    "block, new_block", [((1, 32), (1, 128)), ((1, 32), (32, 32)), ((32, 32), (128, 128)), ((32, 1), (128, 1))]
)
def test_recoalesce(block: tuple[int, int], new_block: tuple[int, int], capability: int, tmp_path: Path) -> None:
    bm, bk = recoalesce_triton._tile(*new_block, 4096, 4096)
    constants = {
        "BM": bm, "BK": bk, "RB": block[0], "CB": block[1], "NRB": new_block[0], "NCB": new_block[1], "FMT": 0,
        "HARDWARE": True, "q_c": 1, "s_r": 1,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "s_ptr", "o_ptr", "t_ptr"), "*u8")
    warps = 8 if bm * bk > 4096 else 4
    assert_lean(compiled(recoalesce_triton._recoalesce_kernel, types, constants, capability, warps, tmp_path), warps)


@targets
def test_quantising_straight_into_tiles(capability: int, tmp_path: Path) -> None:
    constants = {"BM": 32, "BK": 128, "FMT": 0, "RULE": 0, "SATFINITE": False, "HARDWARE": True, "x_c": 1}
    types = {"x_ptr": "*bf16", "q_ptr": "*u8", "s_ptr": "*u8"}
    kernel = quantize_tiled_triton._quantize_tiled_kernel
    assert_lean(compiled(kernel, types, constants, capability, 4, tmp_path), 4)


@targets
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("to_tiled", [False, True])
def test_scale_layout(to_tiled: bool, jagged: bool, capability: int, tmp_path: Path) -> None:
    """Bytes are gathered one by one (rows run fastest in linear scales); only spills would matter."""
    constants = {"TC": 4, "JAGGED": jagged, "TO_TILED": to_tiled, "l_r": 1}
    types = {"linear_ptr": "*u8", "tiled_ptr": "*u8", "first_ptr": "*i64", "stop_ptr": "*i64"}
    built = compiled(scale_layout._copy_kernel, types, constants, capability, 4, tmp_path)
    assert built["spilled"] == built["stack"] == 0
