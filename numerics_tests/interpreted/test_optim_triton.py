"""The optimiser kernels in Triton's interpreter: their formulas, each operation rounded, and the bits of copies."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import optim_triton as kernel
from mxfp8.kernels._device import INTERPRETED

import mxfp8
from mxfp8 import MXFP8Linear
from mxfp8.optim import AdamW, RowwiseAdagrad
from numerics_tests.test_optim import assert_is_cast_of, copies
from numerics_tests.test_optim_kernels import KINDS, check_adamw_kernel, check_rowwise_kernel

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy, at the NaN that a test puts in
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # in Triton's own loops
]
CPU = torch.device("cpu")
checks = pytest.mark.parametrize("check", [check_adamw_kernel, check_rowwise_kernel], ids=["adamw", "rowwise_adagrad"])
dtypes = pytest.mark.parametrize(
    "dtype, master",
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=["float32", "bfloat16", "bfloat16-master", "float16"],
)


@checks
@dtypes
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_copies_of_every_kind(kinds: tuple[str, ...], dtype: torch.dtype, master: bool, check: Callable) -> None:
    check((70, 130), kinds, dtype, master, CPU)


@checks
@pytest.mark.parametrize("kinds", [(), ("row", "column"), ("square128",)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40, 33), (128, 128), (2, 3, 32, 64), (16, 300)], ids=str)
def test_shapes(shape: tuple[int, ...], kinds: tuple[str, ...], check: Callable) -> None:
    check(shape, kinds, torch.float32, False, CPU)


@checks
@pytest.mark.parametrize("options", [{"maximize": True, "betas": (0.3, 0.6)}, {"transposed": True}, {"tensor": True}])
def test_options(options: dict, check: Callable) -> None:
    for kinds in ((), ("row", "column")):
        check((70, 40), kinds, torch.float32, False, CPU, **options)
    check((70, 40), (), torch.float32, False, CPU, decay=0.1)


@checks
def test_a_row_alone(check: Callable) -> None:
    check((300,), (), torch.float32, False, CPU)


@pytest.mark.parametrize("make_optimizer", [AdamW, RowwiseAdagrad])
def test_an_optimiser_on_the_kernel_backend(make_optimizer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of ``step``: caches are filled, and the version of what the kernel wrote goes up."""
    model = nn.Sequential(*(MXFP8Linear.from_linear(nn.Linear(64, 64)) for _ in range(2)))
    optimizer = make_optimizer(model, backend="triton")
    for step in range(2):
        model.zero_grad()
        model(torch.randn(5, 64)).square().sum().backward()
        versions = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        for layer, n in zip(model, (1, 2), strict=True):
            assert len(copies(layer)) == n, step
            for (spec, axis), q in copies(layer).items():
                assert_is_cast_of(q, layer.weight, spec, axis)


def test_what_kernels_do_not_take_is_refused() -> None:
    state = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0, "maximize": False}
    p, m, v = torch.ones(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    with pytest.raises(TypeError, match="float64"):
        kernel.adamw(p.double(), p, m, v, None, casts=(), **state)
    with pytest.raises(ValueError, match="of shape"):
        kernel.adamw(p, p[0], m, v, None, casts=(), **state)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.adamw(torch.ones(4, 8)[:, ::2], p, m, v, None, casts=(), **state)
    with pytest.raises(ValueError, match="float32 states"):
        kernel.adamw(p, p, m.half(), v, None, casts=(), **state)


def test_empty_parameters_have_empty_copies() -> None:
    p = torch.ones(0, 64)
    cast = mxfp8.reference.optim.WeightCast(axis=-1, fmt=mxfp8.E4M3, block=(1, 32), scale_rule=mxfp8.ScaleRule.RCEIL)
    ((qdata, scale),) = kernel.rowwise_adagrad(
        p, p, torch.zeros(0, 1), None, lr=0.1, eps=0.0, weight_decay=0.0, maximize=False, casts=[cast]
    )
    assert (tuple(qdata.shape), tuple(scale.shape)) == ((0, 64), (0, 2))
