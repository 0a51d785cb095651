"""How the FP8 product on Hopper is cut into tiles: what there is, and which takes the least time, by a model, or as it
was measured on the machine at hand (:mod:`_tuned_tiles`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from . import _tuned_tiles
from ._gemm_exact import Block

TILE_BLOCK = (128, 128)


class Tile(NamedTuple):
    """A way to compute a tile: ``consumers`` warpgroups with ``rows`` sub-tiles of 64 x 128 each, a ring of ``stages``
    slots (one more where the output is not staged in shared memory), registers of their threads and of the others',
    and how many slots of K a promotion may span."""

    consumers: int
    rows: int
    stages: int
    registers: int
    spare: int
    pair: int = 1

    @property
    def height(self) -> int:
        return 64 * self.consumers * self.rows


TALL = Tile(consumers=3, rows=1, stages=4, registers=160, spare=32)
WIDE = Tile(consumers=2, rows=2, stages=3, registers=224, spare=40)
SMALL = Tile(consumers=2, rows=1, stages=5, registers=216, spare=40)
TALL_PAIRS, SMALL_PAIRS = TALL._replace(pair=2), SMALL._replace(pair=2)
TILES = {"tall": TALL, "wide": WIDE, "small": SMALL, "tall_pairs": TALL_PAIRS, "small_pairs": SMALL_PAIRS}

# Microseconds of a step of 128 along K, and of the rest of a tile, while all SMs of an H200 are at work: lines through
# the times at K = 1024 and 8192 (many tiles). By kind of factors (for rows; for rows and columns) and by whether they
# hold for 256 of K. TALL with factors for columns was timed at one K only.
_TIMES = {
    (1, False): {TALL: (0.584, 1.14), WIDE: (0.765, 1.84), SMALL: (0.436, 1.15)},
    (1, True): {TALL_PAIRS: (0.549, 1.01), WIDE: (0.76, 1.84), SMALL_PAIRS: (0.406, 0.50)},
    (2, False): {TALL: (0.80, 1.24), SMALL: (0.594, 0.88)},
    (2, True): {TALL_PAIRS: (0.631, 1.32), SMALL_PAIRS: (0.473, 0.76)},
}
_REDUCE = 4.0, 3.5e6  # of a split along K: microseconds to start the sum, bytes a microsecond
_MAX_SPLIT = 32


_L2_BYTES = 2**26  # of operands that a second-level cache of 50 MB does not hold, with room for what stays by chance


def span(M: int, N: int, K: int, groups: int = 0) -> int:
    """How many rows of tiles are computed together, before the next ones to the right. Where the cache does not hold
    the operands, the tiles in flight should be about as many rows of A as of B: 12 rows of 192 by 11 of 128. A narrow
    output is as fast either way, or faster in smaller steps, and so are groups, each with a matrix of its own."""
    return 12 if groups == 0 and N >= 4096 and (M + N) * K > _L2_BYTES else 4


def factors(a_block: Block, b_block: Block) -> tuple[int, bool]:
    """``(sides, pairs)``: whether factors belong to rows (1) or to rows and columns (2), and whether they hold for 256
    of K."""
    return 1 if b_block == TILE_BLOCK else 2, a_block[1] == 256 and (b_block == TILE_BLOCK or b_block[1] == 256)


def modelled(
    M: int, N: int, K: int, sides: int, pairs: bool, sms: int, groups: int = 0
) -> Iterator[tuple[float, Tile, int]]:
    """``(microseconds, tile, parts of K)`` of every way, by a model of waves of tiles over the SMs. Of ``groups`` of
    rows, each leaves half a tile empty; their K is not split."""
    steps = -(-K // 128)
    for tile, (step, rest) in _TIMES[sides, pairs].items():
        tiles = (-(-M // tile.height) + groups // 2) * -(-N // 128)
        for split in range(1, min(_MAX_SPLIT, max(1, steps // 8)) + 1):
            if split > 1 and (groups or tiles * split > 4 * sms):
                break
            time = -(-tiles * split // sms) * (-(-steps // split) * step + rest)
            if split > 1:
                time += _REDUCE[0] + split * M * N * 8 / _REDUCE[1]
            yield time, tile, split


@functools.lru_cache(maxsize=4096)
def choose(M: int, N: int, K: int, sides: int, pairs: bool, sms: int, groups: int = 0) -> tuple[Tile, int]:
    """The tile and the number of parts of K with the least time by the model."""
    _, tile, split = min(modelled(M, N, K, sides, pairs, sms, groups), key=lambda way: way[0])
    return tile, split


def measured(M: int, N: int, K: int, sides: int, pairs: bool, device: int) -> tuple[Tile, int] | None:
    """What ``mxfp8 tune`` found for a product on a GPU, if it did."""
    found = _tuned_tiles.find(_tuned_tiles.product_key(M, N, K, sides, pairs), device)
    if found is None or TILES.get(found[0]) not in _TIMES[sides, pairs]:
        return None
    return TILES[found[0]], found[1]
