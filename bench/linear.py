"""``python -m bench.linear``: forward + backward of ``MXFP8Linear`` beside torchao's emulated one and BF16.

Checked before timing: output and both gradients against ``nn.Linear`` in FP32. Each timed call follows a change of the
weights, as in training, so a layer that keeps its quantised weight between steps cannot skip that cast here.
"""

from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import mxfp8
from bench import _harness, _linear_cuda
from mxfp8.metrics import sqnr_db

# A GEMM of two E4M3 operands with rceil scales has 28.5 dB or more, whatever the distribution; less 1.5 dB.
MIN_SQNR_DB = 27.0
TORCHAO, BF16 = "torchao", "nn.Linear bf16"


def layers(reference: nn.Linear, recipe: str) -> dict[str, nn.Linear]:
    """The variants, each with its own bf16 copy of the reference's weight."""

    def copy() -> nn.Linear:
        weight = reference.weight
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(weight)
        return layer

    found = {"ours": mxfp8.MXFP8Linear.from_linear(copy(), recipe=recipe), BF16: copy()}
    if _harness.HAS_TORCHAO:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        plain = copy()
        theirs = MXFP8Linear(
            plain.in_features, plain.out_features, bias=False, kernel_preference=KernelPreference.EMULATED
        )
        theirs.weight = plain.weight
        found[TORCHAO] = theirs
    return found


def fwd_bwd(layer: nn.Linear, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    """One forward and one backward; output, input gradient and weight gradient."""
    y = layer(x)
    y.backward(grad_output)
    if x.grad is None or layer.weight.grad is None:
        raise RuntimeError(f"{type(layer).__name__} left a gradient unset")
    return {"output": y.detach(), "input gradient": x.grad, "weight gradient": layer.weight.grad}


def check(reference: nn.Linear, layer: nn.Linear, x: Tensor, grad_output: Tensor) -> None:
    """Raises RuntimeError if a result of ``layer`` is farther from FP32 than MXFP8 explains."""
    exact_x = x.detach().float().requires_grad_(True)
    exact = fwd_bwd(reference, exact_x, grad_output.float())
    for name, value in fwd_bwd(layer, x, grad_output).items():
        found = sqnr_db(exact[name], value)
        if not found >= MIN_SQNR_DB:  # a NaN fails too
            raise RuntimeError(
                f"{type(layer).__name__}: {name} has SQNR {found:.2f} dB, expected {MIN_SQNR_DB} dB or more"
            )
    _clear(reference, x)
    _clear(layer, x)


def _clear(layer: nn.Linear, x: Tensor) -> None:
    x.grad = layer.weight.grad = None


def _step(layer: nn.Linear, x: Tensor) -> None:
    """Between two timed calls: gradients cleared and the weights written, as an optimiser does."""
    _clear(layer, x)
    with torch.no_grad():
        layer.weight.mul_(1.0)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    save: Annotated[bool, typer.Option("--save", help="write the rows to bench/results/")] = False,
    seconds: Annotated[float, typer.Option(help="time to spend")] = 20.0,
    m: Annotated[int, typer.Option(help="rows of the input")] = 4096,
    k: Annotated[int, typer.Option(help="in_features, a multiple of 32")] = 1024,
    n: Annotated[int, typer.Option(help="out_features, a multiple of 32")] = 1024,
    recipe: Annotated[str, typer.Option(help="recipe of our layer")] = "mxfp8_rceil",
    peers: Annotated[bool, typer.Option(help="on a GPU: torchao's layers too, which take a while to compile")] = False,
    cases: Annotated[str, typer.Option(help="on a GPU: some of " + ", ".join(_linear_cuda.CASES))] = "",
) -> None:
    """Time one forward and backward in bf16 (ratio above 1: ours is faster)."""
    target = _harness.resolve_device(device)
    if target.type == "cuda":
        chosen = tuple(filter(None, cases.replace(" ", "").split(","))) or _linear_cuda.CASES
        _harness.report(_linear_cuda.cases(target, seconds, peers, chosen), target, save)
        return
    torch.manual_seed(0)
    reference = nn.Linear(k, n, bias=False, device=target)
    with torch.no_grad():  # bf16 values, so that the comparison holds no rounding of the weights
        reference.weight.copy_(reference.weight.bfloat16())
    x = torch.randn(m, k, device=target, dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn(m, n, device=target, dtype=torch.bfloat16)

    found = layers(reference, recipe)
    for layer in found.values():
        check(reference, layer, x, grad_output)
    variants = [
        _harness.Variant(
            name=name,
            call=partial(fwd_bwd, layer, x, grad_output),
            before=partial(_step, layer, x),
        )
        for name, layer in found.items()
    ]
    timings = _harness.time_variants(variants, target, seconds)

    rows = [
        _harness.time_row(
            bench="linear",
            case=f"{recipe} fwd+bwd",
            shape=f"{m}x{k}x{n} bf16",
            ours=timings["ours"],
            baseline=label,
            theirs=timings.get(name),
            device=target,
        )
        for name, label in ((TORCHAO, _harness.torchao_label("MXFP8Linear emulated")), (BF16, BF16))
    ]
    _harness.report(rows, target, save)


if __name__ == "__main__":
    typer.run(main)
