"""Times the tiles of the FP8 product on the GPU at hand, for :mod:`_tuned_tiles`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.testing

from . import _tuned_tiles, gemm_hopper
from ._gemm_exact import Block, Operand
from ._gemm_hopper_epilogue import Epilogue
from ._gemm_tiles import TILES, factors, modelled

__all__ = ["Candidate", "tune"]

_WITHIN = 1.3  # candidates: at most so many times the modelled time of the best
_ROUNDS = 2


class Candidate(NamedTuple):
    """A way to form a product, and the median of its time."""

    tile: str
    split: int
    microseconds: float


def tune(M: int, N: int, K: int, a_block: Block, b_block: Block, device: torch.device) -> list[Candidate]:
    """Time ``a[M, K] @ b[N, K].T`` with every tile and split that the model holds for possible, in bfloat16, and store
    the fastest. The candidates, fastest first.

    Raises:
        ValueError: blocks that do not reach over 128 of K: BF16 tensor cores multiply those.
    """
    if min(a_block[1], b_block[1]) < 128:
        raise ValueError(f"blocks of {a_block} and {b_block} (rows, columns of K): only those of 128 of K have tiles")
    a, b = (_operand(rows, K, block, device) for rows, block in ((M, a_block), (N, b_block)))
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    sides, pairs = factors(a_block, b_block)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    names = {tile: name for name, tile in TILES.items()}
    ways = list(modelled(M, N, K, sides, pairs, sms))
    fastest = min(ways)[0]
    times: dict[tuple[str, int], float] = {}
    for _ in range(_ROUNDS):  # clocks change with what ran before
        for expected, tile, split in ways:
            if expected > _WITHIN * fastest:
                continue
            tma = gemm_hopper.tma_stores(out)
            plan = gemm_hopper.make_plan((M, N, K), a_block, b_block, Epilogue(), tma, sms, (tile, split))
            product = functools.partial(gemm_hopper.coalesced, a, b, None, out, Epilogue(), plan=plan)
            time = 1e3 * triton.testing.do_bench(product, return_mode="median")
            times[names[tile], split] = min(time, times.get((names[tile], split), time))
    found = sorted((Candidate(*way, time) for way, time in times.items()), key=lambda c: c.microseconds)
    best = (found[0].tile, found[0].split)
    _tuned_tiles.add({_tuned_tiles.product_key(M, N, K, sides, pairs): best}, torch.cuda.current_device())
    gemm_hopper._plan.cache_clear()
    return found


def _operand(rows: int, k: int, block: Block, device: torch.device) -> Operand:
    """Normal elements under scales between 2**-7 and 1. Power limits clocks: bits must be as random as in real ones."""
    values = torch.randn(rows, k, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
    scale = torch.randint(120, 128, (-(-k // block[1]), -(-rows // block[0])), dtype=torch.uint8, device=device)
    return values.to(torch.float8_e4m3fn), scale.mT, block
