"""``python -m bench.gemm``: MXFP8 matrix products beside torch's in BF16 and in FP8 with float32 scales.

All products of a shape are timed in turn, each on data that the last-level cache no longer holds. Checked before that:
every product of ours against float64 on the same quantised operands, on the first and the last rows. Operands are
normal random elements under random scales, made as such, in the layout that ``mxfp8.quantize`` gives; where equal
scales of neighbours make a product faster, a second case has scales that mostly differ.

===============  ==========================================================================================
case             blocks of ``a`` x ``b``
===============  ==========================================================================================
g128             1x128 x 128x128
g256             1x256 x 128x128, where two blocks of ``b`` in a row agree, as those of a fresh weight do
g256_apart       the same where they are random and mostly differ: a promotion each 128 of K
two_sided        1x128 x 1x128
square           32x32 x 32x32, casts of a normalised activation (normal, of deviation 1) and of a weight (0.02)
square_apart     the same with random scales, which nearly all differ from their neighbours
exact            1x32 x 1x32: neither side gives anything up for speed
grouped_g128     g128, with the rows in 8 groups of random sizes and a matrix for each
grouped_exact    the same with the blocks of exact
===============  ==========================================================================================
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
from mxfp8 import dispatch
from mxfp8.formats import BlockShape
from mxfp8.metrics import sqnr_db
from mxfp8.tensor import MXTensor

CASES: dict[str, tuple[BlockShape, BlockShape]] = {
    "g128": ((1, 128), (128, 128)),
    "g256": ((1, 256), (128, 128)),
    "g256_apart": ((1, 256), (128, 128)),
    "two_sided": ((1, 128), (1, 128)),
    "square": ((32, 32), (32, 32)),
    "square_apart": ((32, 32), (32, 32)),
    "exact": ((1, 32), (1, 32)),
    "grouped_g128": ((1, 128), (128, 128)),
    "grouped_exact": ((1, 32), (1, 32)),
}
"""Blocks of ``a`` and ``b``."""

SHAPES = {
    "cuda": "8192x8192x8192,4096x4096x4096,2048x2048x2048,65536x4096x4096,65536x2048x2048,65536x1024x1024,"
    "65536x512x512,16384x1024x4096,16384x4096x1024,1024x1024x65536,2048x2048x65536,4096x4096x65536",
    "cpu": "256x256x256",
}
"""MxNxK. The last three are weight gradients."""

GROUPED_SHAPES = {"cuda": "65536x2048x2048,65536x1024x1024", "cpu": "256x256x256"}
GROUPS = 8

# Rounding to bf16 leaves about 55.4 dB (a relative error of 1.7e-3); a product that is 1.4 dB worse is broken.
MIN_SQNR_DB = 54.0
CHECKED_ROWS = 256
COARSE = 128  # the block of torch's FP8 products, whose scales are float32


def operand(rows: int, k: int, block: BlockShape, device: torch.device, alike: int = 1) -> MXTensor:
    """Normal elements whose largest are near 448, under scales of 2**-7 to 2**0, the same for ``alike`` blocks of K."""
    values = torch.randn(rows, k, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
    down, across = -(-rows // block[0]), -(-k // block[1])
    scale = torch.randint(120, 128, (-(-across // alike), down), dtype=torch.uint8, device=device)
    return MXTensor(values.to(torch.float8_e4m3fn), scale.repeat_interleave(alike, 0)[:across].mT, "e4m3", -1, block)


def normal(rows: int, k: int, sigma: float, device: torch.device) -> Tensor:
    return torch.randn(rows, k, device=device, dtype=torch.bfloat16).mul_(sigma)


def check(a: MXTensor, b: MXTensor, out: Tensor, what: str, first: int = 0, last: int | None = None) -> None:
    """RuntimeError if rows ``first`` to ``last`` of a product are farther from float64 than their last rounding
    explains: the first and the last ones among them."""
    right = b.dequantize(torch.float64).mT
    last = a.shape[0] if last is None else last
    for part in (slice(first, min(first + CHECKED_ROWS, last)), slice(max(first, last - CHECKED_ROWS), last)):
        part = slice(part.start // a.block[0] * a.block[0], part.stop)
        if part.start >= part.stop:
            continue
        scales = a.scale_bytes[part.start // a.block[0] : -(-part.stop // a.block[0])]
        top = MXTensor(a.qdata[part], scales, a.fmt, -1, a.block)
        found = sqnr_db(top.dequantize(torch.float64) @ right, out[part])
        if not found >= MIN_SQNR_DB:  # a NaN fails too
            raise RuntimeError(
                f"{what}, rows from {part.start}: SQNR {found:.1f} dB, expected {MIN_SQNR_DB} dB or more"
            )


def those_that_run(calls: dict[str, Callable[[], object]], shape: str) -> dict[str, Callable[[], object]]:
    """``calls`` without those that this torch or this GPU refuses, which are named on stderr."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = call
        except (RuntimeError, ValueError, NotImplementedError) as error:
            said = str(error).splitlines()[0]
            Console(stderr=True).print(f"{shape}: {name} does not run here: {said}", markup=False)
    return found


def baselines(m: int, n: int, k: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """torch's own products by name: BF16, and on a GPU those in FP8."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    if device.type == "cpu":
        return {"torch.mm bf16": partial(torch.mm, x, w.mT)}
    x8, w8 = (t.mul(100).clamp_(-448, 448).to(torch.float8_e4m3fn) for t in (x, w))
    scales = partial(torch.ones, device=device)
    scaled = partial(torch._scaled_mm, x8, w8.mT, out_dtype=torch.bfloat16)
    return {
        "cublas_bf16": partial(torch.mm, x, w.mT),
        "cublas_fp8_rowwise": partial(scaled, scales(m, 1), scales(1, n)),
        "cublas_fp8_1x128_128x128": partial(scaled, scales(k // COARSE, m).mT, scales(n // COARSE, k // COARSE).mT),
    }


def grouped_baselines(m: int, n: int, k: int, offs: Tensor) -> dict[str, Callable[[], object]]:
    """torch's grouped products by name."""
    x = torch.randn(m, k, device=offs.device, dtype=torch.bfloat16)
    w = torch.randn(len(offs), n, k, device=offs.device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {"torch_grouped_bf16": partial(torch._grouped_mm, x, w.mT, offs=offs)}
    if offs.is_cuda:
        x8, w8 = (t.mul(100).clamp_(-448, 448).to(torch.float8_e4m3fn) for t in (x, w))
        scales = partial(torch.ones, device=offs.device)
        calls["torch_grouped_fp8_rowwise"] = partial(
            torch._scaled_grouped_mm, x8, w8.mT, scales(m), scales(len(offs), n), offs=offs, out_dtype=torch.bfloat16
        )
    return calls


def products(
    m: int, n: int, k: int, cases: list[str], backend: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Our products by case, each checked."""
    found: dict[str, Callable[[], object]] = {}
    for case in cases:
        if case == "square":
            a, b = (
                mxfp8.quantize(normal(rows, k, sigma, device), block=(32, 32)) for rows, sigma in ((m, 1), (n, 0.02))
            )
        else:
            a = operand(m, k, CASES[case][0], device)
            b = operand(n, k, CASES[case][1], device, alike=2 if case == "g256" else 1)
        call = partial(mxfp8.gemm, a, b, backend=backend)
        check(a, b, call(), f"{case} {m}x{n}x{k}")
        found[case] = call
    return found


def grouped_products(
    m: int, n: int, k: int, cases: list[str], backend: str, offs: Tensor
) -> dict[str, Callable[[], object]]:
    """Our grouped products by case, each group checked. They are timed without the launch by which the public name
    checks ``offs`` on the GPU; torch's names make none."""
    found: dict[str, Callable[[], object]] = {}
    for case in cases:
        a = operand(m, k, CASES[case][0], offs.device)
        experts = [operand(n, k, CASES[case][1], offs.device) for _ in offs]
        b, b_scale = (torch.stack([getattr(x, part) for x in experts]) for part in ("qdata", "scale_bytes"))
        run = dispatch.resolve("grouped_gemm", backend, offs.device)
        call = partial(
            run, a.qdata, a.scale_bytes, a.block, b, b_scale, CASES[case][1], offs=offs, out_dtype=torch.bfloat16
        )
        out, first = call(), 0
        for g, last in enumerate(offs.tolist()):
            check(a, experts[g], out, f"{case} {m}x{n}x{k} group {g}", first, last)
            first = last
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
    cases: Annotated[
        str, typer.Option(help="separated by commas")
    ] = "g128,g256,square,square_apart,exact,grouped_g128,grouped_exact",
    backend: Annotated[str, typer.Option(help="auto, or the backend that must run")] = "auto",
) -> None:
    """Time ``mxfp8.gemm`` and ``grouped_gemm`` beside torch's products (ratio above 1: ours is faster)."""
    target = _harness.resolve_device(device)
    names = [name.strip() for name in cases.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"--cases takes {', '.join(CASES)}, not {', '.join(unknown)}")
    torch.manual_seed(0)
    table = []
    for grouped in (False, True):
        chosen = [name for name in names if name.startswith("grouped") == grouped]
        defaults = GROUPED_SHAPES if grouped else SHAPES
        for m, n, k in parse_shapes(shapes or defaults[target.type]) if chosen else ():
            if grouped:
                offs = _harness.jagged(m, GROUPS, target)
                ours, theirs = grouped_products(m, n, k, chosen, backend, offs), grouped_baselines(m, n, k, offs)
            else:
                ours, theirs = products(m, n, k, chosen, backend, target), baselines(m, n, k, target)
            rows = timed_rows(ours, those_that_run(theirs, f"{m}x{n}x{k}"), f"{m}x{n}x{k}", backend, target, seconds)
            if save:  # at once: a run over all shapes takes minutes and may be cut short
                _harness.save_rows(_harness.results_folder(target) / "gemm.csv", rows)
            table += rows
            del ours, theirs
    _harness.report(table, target, save)


def timed_rows(
    ours: dict[str, Callable[[], object]],
    theirs: dict[str, Callable[[], object]],
    shape: str,
    backend: str,
    device: torch.device,
    seconds: float,
) -> list[_harness.Row]:
    """One row for each of our cases and each baseline, all timed in turn."""
    variants = [_harness.Variant(name=name, call=call) for name, call in (ours | theirs).items()]
    timings = _harness.time_variants(variants, device, seconds)
    return [
        _harness.time_row(
            bench="gemm",
            case=case if backend == "auto" else f"{case} {backend}",
            shape=shape,
            ours=timings[case],
            baseline=name,
            theirs=timings[name],
            device=device,
        )
        for case in ours
        for name in theirs
    ]


if __name__ == "__main__":
    typer.run(main)
