"""``python -m bench.quantize``: the MXFP8 cast against torchao's ``to_mx``, and on a GPU against a copy of its bytes.

Checked before timing: the SQNR of the cast, and every byte against torchao where it is installed; on a GPU every byte
against the reference.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

import mxfp8
from bench import _harness, _quantize_cuda
from mxfp8.metrics import sqnr_db

BLOCK = 32
# Measured SQNR of E4M3 with blocks of 32 on N(0, 1), in dB (docs/numerics.md); a cast 1.5 dB under it is broken.
EXPECTED_SQNR_DB = {"rceil": 31.53, "floor": 30.65, "ceil": 31.52, "even": 31.17}
SQNR_SLACK_DB = 1.5

ToMX = Callable[[Tensor], tuple[Tensor, Tensor]]


def torchao_to_mx(scale_rule: str) -> ToMX | None:
    """torchao's cast to ``(scale, qdata)`` under one scale rule, or None where torchao is not installed."""
    if not _harness.HAS_TORCHAO:
        return None
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode[scale_rule.upper()]
    return lambda x: to_mx(x, torch.float8_e4m3fn, BLOCK, mode)


def compiled_peers() -> dict[str, Callable[[Tensor], object]]:
    """The fastest casts of others that run on this GPU, by label."""
    peers: dict[str, Callable[[Tensor], object]] = {}
    if (theirs := torchao_to_mx("rceil")) is not None:
        peers[_harness.torchao_label("to_mx, compiled")] = torch.compile(theirs)
    if (version := _harness.package_version("triton_kernels")) is not None:
        from triton_kernels.numerics_details.mxfp import downcast_to_mxfp  # type: ignore[import-not-found]

        peers[f"triton_kernels {version} downcast_to_mxfp"] = lambda x: downcast_to_mxfp(x, torch.float8_e4m3fn, axis=1)
    return peers


def check(x: Tensor, scale_rule: str, theirs: ToMX | None) -> None:
    """Raises RuntimeError if the cast under test is wrong."""
    q = mxfp8.quantize(x, scale_rule=scale_rule)
    found = sqnr_db(x, q.dequantize(torch.float32))
    if found < EXPECTED_SQNR_DB[scale_rule] - SQNR_SLACK_DB:
        raise RuntimeError(f"{scale_rule}: SQNR {found:.2f} dB, expected about {EXPECTED_SQNR_DB[scale_rule]} dB")
    if theirs is None:
        return
    scale, qdata = theirs(x)
    for name, a, b in (("scale", q.scale, scale), ("element", q.qdata, qdata)):
        differing = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
        if differing:
            raise RuntimeError(f"{scale_rule}: {differing} of {a.numel()} {name} bytes differ from torchao's")


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    save: Annotated[bool, typer.Option("--save", help="write the rows to bench/results/")] = False,
    seconds: Annotated[float, typer.Option(help="time to spend on each scale rule")] = 5.0,
    rows: Annotated[int, typer.Option(help="rows of the bf16 input")] = 4096,
    columns: Annotated[int, typer.Option(help="columns of the bf16 input, a multiple of 32")] = 1024,
    peers: Annotated[bool, typer.Option(help="on a GPU: others' casts too, which take a while to compile")] = True,
) -> None:
    """Time ``mxfp8.quantize`` beside torchao's ``to_mx`` (ratio above 1: ours is faster)."""
    target = _harness.resolve_device(device)
    if target.type == "cuda":
        _harness.report(_quantize_cuda.cases(target, seconds, compiled_peers if peers else dict), target, save)
        return
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(target, torch.bfloat16)
    baseline = _harness.torchao_label("to_mx")
    table = []
    for rule in EXPECTED_SQNR_DB:
        theirs = torchao_to_mx(rule)
        check(x, rule, theirs)
        variants = [_harness.Variant(name="ours", call=partial(mxfp8.quantize, x, scale_rule=rule))]
        if theirs is not None:
            variants.append(_harness.Variant(name="torchao", call=partial(theirs, x)))
        timings = _harness.time_variants(variants, target, seconds)
        table.append(
            _harness.time_row(
                bench="quantize",
                case=f"e4m3 {rule} 1x{BLOCK}",
                shape=f"{rows}x{columns} bf16",
                ours=timings["ours"],
                baseline=baseline,
                theirs=timings.get("torchao"),
                device=target,
            )
        )
    _harness.report(table, target, save)


if __name__ == "__main__":
    typer.run(main)
