"""Fused norms and activations as operators of torch: what a compiler is told of their results is what kernels make."""

import pytest
import torch

from mxfp8 import dispatch
from mxfp8.dispatch import compiled_fused

pytest.importorskip("triton")
from mxfp8.kernels._device import INTERPRETED

from mxfp8.formats import E4M3, ScaleRule
from mxfp8.reference.fused import Casts
from numerics_tests.test_compile import FUSED, activations, assert_same_bits, norms

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py with TRITON_INTERPRET=1")

NETS = {
    "relu": activations("relu", outputs=("rows", "columns", "hp"), backend="triton"),
    "swiglu": activations("swiglu", outputs=("columns",), block=(1, 128), column_block=(128, 128), backend="triton"),
    "layer": norms("layer", True, outputs=("rows", "columns", "hp"), backend="triton"),
    "block": norms("block", False, outputs=("rows",), round_first=True, backend="triton"),
}


@pytest.mark.parametrize("name", NETS)
def test_a_compiled_region_has_the_bits_and_strides_of_eager(name: str) -> None:
    assert name in FUSED
    torch._dynamo.reset()
    x, dy = torch.randn(2, 40, 96)
    assert_same_bits(torch.compile(NETS[name], fullgraph=True, backend="aot_eager")(x, dy), NETS[name](x, dy))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_operators_obey_the_rules_of_torch(rows: int, backend: str) -> None:
    """Schema, no aliases, and fake results like the real ones."""
    assert not dispatch.why_not("norm_quantize", backend, "cpu")
    casts = Casts(
        outputs=("rows", "columns", "hp"), round_first=False, fmt=E4M3, block=(1, 32), column_block=(1, 32),
        scale_rule=ScaleRule.RCEIL, satfinite=False,
    )  # fmt: skip
    how = (*map(_listed, compiled_fused._flat(casts)), backend)
    x, v = torch.randn(rows, 64), torch.randn(64)
    ops, known = torch.ops.mxfp8, {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(ops.activation_quantize, (x, v, "relu", *how), **known)
    torch.library.opcheck(ops.activation_quantize_backward, (x, x.clone(), v, "relu", *how), **known)
    torch.library.opcheck(ops.norm_quantize, (x, v, None, None, "rms", 256, 1e-5, *how), **known)
    torch.library.opcheck(ops.norm_quantize, (x, v, v.clone(), x.clone(), "layer", 256, 1e-5, *how), **known)
    rstd = torch.ones(rows, 2)
    rest = ("block", 32, True, *how)
    torch.library.opcheck(ops.norm_quantize_backward, (x, x.clone(), v, None, rstd, x.clone(), *rest), **known)


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
