"""A Triton release that Hopper's kernels do not know: they say so, and the portable ones go on."""

import importlib.util
import subprocess
import sys

import pytest

CODE = """

import triton
triton.__version__ = "3.99.0"
from mxfp8 import dispatch
for op in ("gemm", "grouped_gemm", "quantize", "quantize_both", "norm_quantize", "activation_quantize"):
    print(op, dispatch.why_not(op, "hopper", "cuda"))
from mxfp8.kernels import gemm_triton, quantize_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mxfp8.kernels.scale_layout import _copy_kernel as kernel
constants = {"TC": 4, "JAGGED": False, "TO_TILED": True}
types = {n: "*u8" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
source = ASTSource(fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print("compiled")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_an_unknown_release_is_named_and_portable_kernels_compile() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *reasons, last = done.stdout.splitlines()
    assert last == "compiled"
    assert len(reasons) == 6
    for reason in reasons:
        assert "needs Gluon as in triton 3.6, 3.7, 3.8, 3.9; this is triton 3.99.0" in reason
