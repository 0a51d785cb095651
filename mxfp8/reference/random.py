"""Philox4x32-10 in plain torch: counter-based random bits that every backend can reproduce.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

from mxfp8.rng import RngKey

__all__ = ["philox", "random_bits", "random_signs"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    seed: int, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words (as int64 tensors in 0..2**32-1) for each 128-bit counter, given as four int64 tensors."""
    k0, k1 = seed & _MASK, seed >> 32
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which keeps the bits of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(key: RngKey, rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """Uniform 32-bit words ``[rows, cols]`` (int64): word ``c % 4`` of counter ``(c // 4, r, step, stream)`` at global
    row ``r`` and column ``c``, each modulo 2**32."""
    first = key.col_offset // 4
    groups = -(-(key.col_offset + cols) // 4) - first
    c0 = torch.arange(first, first + groups, device=device)[None, :] & _MASK
    c1 = torch.arange(key.row_offset, key.row_offset + rows, device=device)[:, None] & _MASK
    step = torch.as_tensor(key.step, dtype=torch.int64).to(device) & _MASK
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox(key.seed, (c0 + 0 * c1, c1 + 0 * c0, zero + step, zero + key.stream))
    skip = key.col_offset - 4 * first
    return torch.stack(words, dim=-1).reshape(rows, 4 * groups)[:, skip : skip + cols]


def random_signs(seed: int, n: int, device: torch.device) -> torch.Tensor:
    """``n`` signs (+-1.0, float32) from the top bit of the words of ``seed``, for the randomised Hadamard transform."""
    bits = random_bits(RngKey(seed=seed), 1, n, device)[0]
    return 1.0 - 2.0 * (bits >> 31).to(torch.float32)
