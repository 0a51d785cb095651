"""``python -m bench.gemm``: MXFP8 matrix products beside torch's in BF16 and in FP8 with float32 scales.

All products of a shape are timed in turn, each on data that the last-level cache no longer holds. Checked before that:
every product of ours against float64 on the same quantised operands, on the first and the last rows. Operands are
normal random elements under random scales, made as such, in the layout that ``mxfp8.quantize`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

import mxfp8
from bench import _harness
from mxfp8.formats import BlockShape
from mxfp8.metrics import sqnr_db
from mxfp8.tensor import MXTensor

CASES: dict[str, tuple[BlockShape, BlockShape]] = {
    "g128": ((1, 128), (128, 128)),
    "g256": ((1, 256), (128, 128)),
    "two_sided": ((1, 128), (1, 128)),
    "square": ((32, 32), (32, 32)),
    "exact": ((1, 32), (1, 32)),
}
"""Blocks of ``a`` and ``b``; "exact" because neither side gives anything up for speed."""

SHAPES = {
    "cuda": "8192x8192x8192,4096x4096x4096,2048x2048x2048,65536x4096x4096,65536x2048x2048,65536x1024x1024,"
    "65536x512x512,16384x1024x4096,16384x4096x1024,1024x1024x65536,2048x2048x65536,4096x4096x65536",
    "cpu": "256x256x256",
}
"""MxNxK. The last three are weight gradients."""

# Rounding to bf16 leaves about 55.4 dB (a relative error of 1.7e-3); a product that is 1.4 dB worse is broken.
MIN_SQNR_DB = 54.0
CHECKED_ROWS = 256
COARSE = 128  # the block of torch's FP8 products, whose scales are float32


def operand(rows: int, k: int, block: BlockShape, device: torch.device) -> MXTensor:
    """Normal elements whose largest are near 448, under scales of 2**-7 to 2**0."""
    values = torch.randn(rows, k, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
    down, across = -(-rows // block[0]), -(-k // block[1])
    scale = torch.randint(120, 128, (across, down), dtype=torch.uint8, device=device).mT
    return MXTensor(values.to(torch.float8_e4m3fn), scale, "e4m3", -1, block)


def check(a: MXTensor, b: MXTensor, out: Tensor, what: str) -> None:
    """RuntimeError if the product is farther from float64 than its last rounding explains."""
    right = b.dequantize(torch.float64).mT
    rows = a.shape[0]
    for part in (slice(0, CHECKED_ROWS), slice(max(0, rows - CHECKED_ROWS) // COARSE * COARSE, rows)):
        top = MXTensor(a.qdata[part], a.scale_bytes[part.start // a.block[0] : -(-min(part.stop, rows) // a.block[0])],
                       a.fmt, -1, a.block)  # fmt: skip
        found = sqnr_db(top.dequantize(torch.float64) @ right, out[part])
        if not found >= MIN_SQNR_DB:  # a NaN fails too
            raise RuntimeError(
                f"{what}, rows from {part.start}: SQNR {found:.1f} dB, expected {MIN_SQNR_DB} dB or more"
            )


def baselines(m: int, n: int, k: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """torch's own products by name: BF16, and on a GPU those FP8 ones that run there."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    if device.type == "cpu":
        return {"torch.mm bf16": partial(torch.mm, x, w.mT)}
    x8, w8 = (t.mul(100).clamp_(-448, 448).to(torch.float8_e4m3fn) for t in (x, w))
    scales = partial(torch.ones, device=device)
    scaled = partial(torch._scaled_mm, x8, w8.mT, out_dtype=torch.bfloat16)
    found: dict[str, Callable[[], object]] = {
        "cublas_bf16": partial(torch.mm, x, w.mT),
        "cublas_fp8_rowwise": partial(scaled, scales(m, 1), scales(1, n)),
        "cublas_fp8_1x128_128x128": partial(scaled, scales(k // COARSE, m).mT, scales(n // COARSE, k // COARSE).mT),
    }
    for name, call in list(found.items()):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            del found[name]
            said = str(error).splitlines()[0]
            Console(stderr=True).print(f"{m}x{n}x{k}: {name} does not run here: {said}", markup=False)
    return found


def products(
    m: int, n: int, k: int, cases: list[str], backend: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Our products by case, each checked."""
    found: dict[str, Callable[[], object]] = {}
    for case in cases:
        a, b = (operand(rows, k, block, device) for rows, block in zip((m, n), CASES[case], strict=True))
        call = partial(mxfp8.gemm, a, b, backend=backend)
        check(a, b, call(), f"{case} {m}x{n}x{k}")
        found[case] = call
    return found


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    """``"MxNxK,..."`` as tuples.

    Raises:
        ValueError: for anything else.
    """
    shapes = []
    for word in text.split(","):
        sizes = word.strip().split("x")
        if len(sizes) != 3 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise ValueError(f"--shapes takes MxNxK separated by commas, not {word!r}")
        shapes.append((int(sizes[0]), int(sizes[1]), int(sizes[2])))
    return shapes


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    save: Annotated[bool, typer.Option("--save", help="write the rows to bench/results/")] = False,
    seconds: Annotated[float, typer.Option(help="time to spend on each shape")] = 1.0,
    shapes: Annotated[str, typer.Option(help="MxNxK, separated by commas; default: a set for the device")] = "",
    cases: Annotated[str, typer.Option(help="separated by commas")] = "g128,g256,square,exact",
    backend: Annotated[str, typer.Option(help="auto, or the backend that must run")] = "auto",
) -> None:
    """Time ``mxfp8.gemm`` beside torch's products (ratio above 1: ours is faster)."""
    target = _harness.resolve_device(device)
    names = [name.strip() for name in cases.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"--cases takes {', '.join(CASES)}, not {', '.join(unknown)}")
    torch.manual_seed(0)
    table = []
    for m, n, k in parse_shapes(shapes or SHAPES[target.type]):
        ours, theirs = products(m, n, k, names, backend, target), baselines(m, n, k, target)
        variants = [_harness.Variant(name=name, call=call) for name, call in (ours | theirs).items()]
        timings = _harness.time_variants(variants, target, seconds)
        table += [
            _harness.time_row(
                bench="gemm",
                case=case if backend == "auto" else f"{case} {backend}",
                shape=f"{m}x{n}x{k}",
                ours=timings[case],
                baseline=name,
                theirs=timings[name],
                device=target,
            )
            for case in ours
            for name in theirs
        ]
        del ours, theirs, variants
    _harness.report(table, target, save)


if __name__ == "__main__":
    typer.run(main)
