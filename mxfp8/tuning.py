"""Which tiles are fastest for the products of a layer on this GPU: measured, and kept on disk for later processes.

Nothing is measured while a model runs: tiles come from a model of the GPU, or from what was stored here. A tile changes
no product's value but where it splits the contraction differently, and then only in the order of float32 sums.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch

from mxfp8 import dispatch
from mxfp8.dispatch import replays
from mxfp8.recipe import GEMMS, LinearRecipe, get_recipe
from mxfp8.tensor import block_rc

__all__ = ["TileTime", "cache_path", "tune_linear", "why_not"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTime:
    """One way to form a product ``M x N x K`` of a layer, and the median of its time in microseconds. ``split``: parts
    of K that are summed afterwards. ``kept``: it was the fastest and is stored."""

    gemm: str
    shape: tuple[int, int, int]
    tile: str
    split: int
    microseconds: float
    kept: bool


def tune_linear(
    rows: int, in_features: int, out_features: int, recipe: str | LinearRecipe = "mxfp8_coalesced"
) -> list[TileTime]:
    """Time the three products of an :class:`~mxfp8.MXFP8Linear` with an input of so many rows on the current GPU, with
    every tile that may be the fastest, and store those that are.

    Returns:
        All that was timed, GEMM by GEMM, fastest first. GEMMs whose blocks reach over less than 128 of the contraction
        have no tiles of their own and are left out.

    Raises:
        ValueError: sizes below 1, an unknown recipe, or one none of whose GEMMs has tiles.
        RuntimeError: the Hopper kernels cannot run here; the message says why.
    """
    if min(rows, in_features, out_features) < 1:
        raise ValueError(f"rows, in_features and out_features are {rows}, {in_features}, {out_features}: use 1 or more")
    recipe = get_recipe(recipe)
    shapes = {
        "fprop": (rows, out_features, in_features),
        "dgrad": (rows, in_features, out_features),
        "wgrad": (out_features, in_features, rows),
    }
    blocks = {gemm: found for gemm in GEMMS if (found := _blocks(recipe, gemm)) is not None}
    if not blocks:
        raise ValueError(f"recipe {recipe.name!r}: none of its products has blocks of 128 of the contraction or more")
    if (reason := why_not()) is not None:
        raise RuntimeError(f"nothing to tune: {reason}")
    kernels = importlib.import_module("mxfp8.kernels.gemm_tuning")
    device = torch.device("cuda", torch.cuda.current_device())
    out = []
    for gemm, (a_block, b_block) in blocks.items():
        for place, (tile, split, time) in enumerate(kernels.tune(*shapes[gemm], a_block, b_block, device)):
            made = {"tile": tile, "split": split, "microseconds": time, "kept": place == 0}
            out.append(TileTime(gemm=gemm, shape=shapes[gemm], **made))
    replays.forget()  # they launch the tiles of before
    return out


def why_not() -> str | None:
    """Why there is nothing to tune here, or None: tiles are those of the Hopper kernels."""
    return dispatch.why_not("gemm", "hopper", "cuda")


def cache_path() -> Path:
    """Where tiles are stored: ``gemm_tiles.json`` in ``$MXFP8_CACHE_DIR``, or in the user's cache folder."""
    path: Path = importlib.import_module("mxfp8.kernels._tuned_tiles").path()
    return path


def _blocks(recipe: LinearRecipe, gemm: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(rows, columns) of the blocks of both operands, columns along the contraction; None for products without
    tiles."""
    spec = getattr(recipe, gemm)
    if spec.skip or spec.lhs is None or spec.rhs is None or min(spec.lhs.block[1], spec.rhs.block[1]) < 128:
        return None
    return block_rc(spec.lhs.block, -1), block_rc(spec.rhs.block, -1)
