"""Which arithmetic a recipe's matrix products take on a device, and what that costs: what ``mxfp8 info`` shows.

A recipe says the numerics and nothing about hardware; a backend of ``gemm`` picks its way by its operands' blocks. The
choice is told again here in words, and a test compares it with what the kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from mxfp8 import dispatch
from mxfp8.recipe import GEMMS, RECIPES, CastSpec, GemmSpec

__all__ = ["LAYER_RATIOS", "MEASURED", "Mode", "RecipeModes", "gemm_backend", "gemm_mode", "recipe_modes"]


class Mode(StrEnum):
    """How the products of one GEMM are formed."""

    FP8 = "fp8"
    FP8_256 = "fp8/256"
    FP8_32 = "fp8/32"
    BLOCK_SCALED = "block-scaled"
    BF16 = "bf16"
    FLOAT32 = "float32"
    HIGH_PRECISION = "not cast"
    SKIPPED = "skipped"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Mode.FP8: "FP8 tensor cores, a float32 sum every 128 of K",
    Mode.FP8_256: "FP8 tensor cores, a float32 sum at least every 256 of K",
    Mode.FP8_32: "FP8 tensor cores, a float32 sum every 32 of K, or up to 128 as scales agree",
    Mode.BLOCK_SCALED: "tensor cores that take MX elements and scales as they are",
    Mode.BF16: "BF16 tensor cores: the dequantised operands, which BF16 holds exactly",
    Mode.FLOAT32: "plain torch on dequantised operands in float32: the reference",
    Mode.HIGH_PRECISION: "no MX operand: torch's own product, in the layer's precision",
    Mode.SKIPPED: "not computed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Time of BF16 over ours, smallest and largest of the saved rows: above 1 ours is faster."""

    low: float
    high: float
    source: str

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"


_H200 = "one H200, bench/results/h200"
MEASURED = {
    ("hopper", Mode.FP8): Range(low=1.36, high=1.75, source=f"{_H200}/gemm.csv, case g128"),
    ("hopper", Mode.FP8_256): Range(low=1.41, high=1.84, source=f"{_H200}/gemm.csv, case g256"),
    ("hopper", Mode.FP8_32): Range(low=0.87, high=1.12, source=f"{_H200}/gemm.csv, case square"),
    ("hopper", Mode.BF16): Range(low=0.66, high=0.96, source=f"{_H200}/gemm.csv, case exact"),
}
"""A product alone, its operands quantised, beside torch's in BF16. By backend and mode; absent: not measured."""

LAYER_SIZES = (1024, 2048, 4096)
LAYER_SOURCE = f"{_H200}/linear.csv"
LAYER_RATIOS = {
    ("hopper", "mxfp8_coalesced"): (1.12, 1.42, 1.69),
    ("hopper", "mxfp8_rceil"): (0.64, 0.77, 0.86),
    ("hopper", "mxfp8_floor"): (0.64, 0.77, 0.86),  # the same blocks and kernels as mxfp8_rceil
    ("hopper", "mxfp8_square"): (0.64, 0.77, 0.87),
}
"""Forward and backward of an ``MXFP8Linear`` of D x D, D in ``LAYER_SIZES``, on 65,536 rows with every cast counted and
as a CUDA graph, beside ``nn.Linear`` in BF16. By backend of gemm and recipe; absent: not measured."""


def gemm_backend(device: str | torch.device | None = None) -> str:
    """The backend that ``auto`` takes for ``gemm`` on ``device`` (default: CUDA if present)."""
    cells = [cell for cell in dispatch.explain(device) if cell.op == "gemm"]
    if cells[0].device != "cuda":
        return "reference"  # on a CPU kernels run in Triton's interpreter only
    return next(cell.backend for cell in cells if cell.available)


def gemm_mode(spec: GemmSpec, backend: str) -> Mode:
    """How ``backend`` forms the products of a GEMM whose operands are cast as ``spec`` says.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in dispatch.BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(dispatch.BACKENDS)}")
    if spec.skip:
        return Mode.SKIPPED
    if spec.is_hp:
        return Mode.HIGH_PRECISION
    if backend == "reference":
        return Mode.FLOAT32
    if spec.lhs is None or spec.rhs is None or backend == "triton":
        return Mode.BF16
    return Mode.BLOCK_SCALED if backend == "blackwell" else _on_hopper(spec.lhs, spec.rhs)


def _on_hopper(lhs: CastSpec, rhs: CastSpec) -> Mode:
    along = lhs.block[1], rhs.block[1]
    if lhs.block == rhs.block == (32, 32):
        return Mode.FP8_32
    if min(along) < 128:
        return Mode.BF16
    return Mode.FP8_256 if along[0] == 256 else Mode.FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeModes:
    """The modes of a recipe's three GEMMs and the speed of its layers beside BF16, at each of ``LAYER_SIZES``."""

    recipe: str
    fprop: Mode
    dgrad: Mode
    wgrad: Mode
    layer_ratios: tuple[float, ...] | None


def recipe_modes(backend: str) -> list[RecipeModes]:
    """One row for each named recipe. ValueError if the backend is unknown."""
    rows = []
    for name, make in RECIPES.items():
        recipe = make()
        modes = {gemm: gemm_mode(getattr(recipe, gemm), backend) for gemm in GEMMS}
        rows.append(RecipeModes(recipe=name, layer_ratios=LAYER_RATIOS.get((backend, name)), **modes))
    return rows
