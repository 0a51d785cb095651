"""Optimiser kernels against their formulas, each operation rounded, and their copies against the reference cast.

On a GPU the compiled kernels run here; in Triton's interpreter through ``interpreted/test_optim_triton.py``.
"""

from collections.abc import Callable

import pytest
import torch

import mxfp8
from mxfp8 import dispatch
from mxfp8.formats import get_format, get_scale_rule
from mxfp8.reference.optim import WeightCast
from numerics_tests import tolerances


def rounded(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return p.to(dtype).to(torch.float32)


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def weight_casts(*kinds: str) -> list[WeightCast]:
    known = {
        "row": (-1, (1, 32)), "column": (-2, (1, 32)), "square": (-1, (32, 32)), "row128": (-1, (1, 128)),
        "column128": (-2, (1, 128)), "square128": (-1, (128, 128)), "row256": (-1, (1, 256)),
        "column256": (-2, (1, 256)), "e5m2": (-2, (1, 32)), "square_column": (-2, (32, 32)),
    }  # fmt: skip
    return [
        WeightCast(
            axis=known[k][0],
            fmt=get_format("e5m2" if k == "e5m2" else "e4m3"),
            block=known[k][1],
            scale_rule=get_scale_rule("floor" if k == "e5m2" else "rceil"),
        )
        for k in kinds
    ]


def check_copies(made: list, casts: list[WeightCast], param: torch.Tensor) -> None:
    assert len(made) == len(casts)
    for (qdata, scale), c in zip(made, casts, strict=True):
        want = mxfp8.quantize(param.cpu(), c.axis, c.fmt, c.block, c.scale_rule, backend="reference")
        assert torch.equal(qdata.cpu().view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(scale.cpu(), want.scale_bytes)
        assert qdata.stride(c.axis) == 1 or qdata.shape[c.axis] == 1


KINDS = [
    (), ("row",), ("row", "column"), ("square",), ("row128", "column128"), ("square128",), ("row256", "column256"),
    ("row", "e5m2"), ("row", "column", "square"), ("column", "row"), ("square", "square_column"),
]  # fmt: skip


def check_adamw_kernel(
    shape: tuple[int, ...], kinds: tuple[str, ...], dtype: torch.dtype, master: bool, device: torch.device, **options
) -> None:
    run = dispatch.resolve("adamw", "triton", device)
    betas, eps, decay, maximize = options.get("betas", (0.9, 0.999)), 1e-8, 0.1, options.get("maximize", False)
    lr = 0.02
    p = torch.randn(shape).to(dtype)
    p.view(-1)[0] = 0.0
    m, v, w = torch.zeros(shape), torch.zeros(shape), p.float()
    param, *states = (t.to(device, copy=True) for t in (p, m, v))
    high = w.to(device, copy=True) if master else None
    for step in (1, 2):
        grad = (torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape))).to(dtype)
        if step == 2 and grad.numel() > 5:
            grad.view(-1)[5] = torch.nan
        layout = grad.to(device).mT.contiguous().mT if options.get("transposed") else grad.to(device)
        rate = torch.tensor(lr, device=device) if options.get("tensor") else lr
        made = run(
            param, layout, *states, high, step=step, lr=rate, beta1=betas[0], beta2=betas[1], eps=eps,
            weight_decay=decay, maximize=maximize, casts=weight_casts(*kinds),
        )  # fmt: skip
        g = -grad.float() if maximize else grad.float()
        fresh = scalar(1 - betas[0])
        near = m + fresh * (g - m)
        m = near if fresh < 0.5 else g - (g - m) * (scalar(1.0) - fresh)
        v = v * scalar(betas[1]) + scalar(1 - betas[1]) * g * g
        keep, size = scalar(1 - lr * decay), scalar(lr / (1 - betas[0] ** step))
        if options.get("tensor") and device.type == "cuda":
            keep = scalar(1.0) - scalar(lr) * scalar(decay)
            size = scalar(lr) / scalar(1 - betas[0] ** step)
        root = v.double().sqrt().float()  # torch's float32 root on CPU is not always the nearest number
        w = w * keep - size * m / (root * scalar((1 - betas[1] ** step) ** -0.5) + scalar(eps))
        for got, want in zip((*states, *([high] if master else [])), (m, v, w), strict=False):
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(param.cpu(), w.to(dtype), rtol=0, atol=0, equal_nan=True)
        w = w if master else rounded(w, dtype)
        check_copies(made, weight_casts(*kinds), param)


def check_rowwise_kernel(
    shape: tuple[int, ...], kinds: tuple[str, ...], dtype: torch.dtype, master: bool, device: torch.device, **options
) -> None:
    run = dispatch.resolve("rowwise_adagrad", "triton", device)
    reference = dispatch.resolve("rowwise_adagrad", "reference", device)
    args = {"lr": 0.1, "eps": 1e-8, "weight_decay": options.get("decay", 0.0), "maximize": bool(options)}
    param = torch.randn(shape, device=device).to(dtype)
    total, high = torch.rand((*shape[:-1], 1), device=device), param.float() if master else None
    largest = param.float().abs().max().item()
    for step in (1, 2):
        before = param.clone(), total.clone(), None if high is None else high.clone()
        grad = torch.randn(shape, device=device).to(dtype)
        layout = grad.mT.contiguous().mT if options.get("transposed") else grad
        made = run(param, layout, total, high, **args, casts=weight_casts(*kinds))
        reference(before[0], grad, before[1], before[2], **args, casts=())
        bound = tolerances.rowwise_adagrad_error(step, 0.1, shape[-1], largest)
        assert ((total - before[1]).abs() <= before[1] * (shape[-1] + 3) * tolerances.U32).all()
        if high is not None:
            assert (high - before[2]).abs().max() <= bound
            assert torch.equal(param, high.to(dtype))
        unit = 0.0 if dtype == torch.float32 else 2 * tolerances.OUT_UNIT[dtype]
        assert ((param.float() - before[0].float()).abs() <= bound + unit * before[0].float().abs()).all()
        check_copies(made, weight_casts(*kinds), param)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_adamw_kernel, check_rowwise_kernel])
@pytest.mark.parametrize("dtype, master", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(130, 70), (256, 256), (3, 40, 33)], ids=str)
def test_kernels_on_a_gpu(shape, kinds, dtype: torch.dtype, master: bool, check: Callable) -> None:
    check(shape, kinds, dtype, master, torch.device("cuda"))
    check(shape, kinds, dtype, master, torch.device("cuda"), maximize=True, transposed=True, betas=(0.3, 0.6))
    check(shape, kinds, dtype, master, torch.device("cuda"), tensor=True, decay=0.1)
