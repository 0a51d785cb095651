"""Keys for stochastic rounding, and the step they depend on. A leaf module.

Random bits are a pure function of ``(seed, step, stream, row, column)``: no generator object holds state, so the bits
do not depend on tiling, device, call order or how a tensor is sharded, and recomputation gives the same bits again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = ["RngKey", "get_step", "set_step", "step_tensor"]

# One number, seen twice. As a tensor: torch.compile takes it as an input that changes, not as a constant that forces a
# recompilation every step. As an array: it is read and counted without torch, also inside fake-tensor modes.
_count = np.zeros((), dtype=np.int64)
_step = torch.from_numpy(_count)


@dataclass(frozen=True, kw_only=True, slots=True)
class RngKey:
    """Names one stream of random bits.

    Attributes:
        seed: 64-bit seed of the run.
        step: training step, an int or a 0-dim int64 tensor (32 bits are used).
        stream: tells apart tensors that are rounded in the same step (32 bits).
        row_offset, col_offset: position of this shard's first element in the global tensor, whose leading dimensions
            are flattened into rows. A shard quantised with its offsets has the bits of the whole.
    """

    seed: int
    step: int | torch.Tensor = 0
    stream: int = 0
    row_offset: int = 0
    col_offset: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "stream", "row_offset", "col_offset"):
            value = getattr(self, name)
            bits = 64 if name == "seed" else 32
            if not isinstance(value, int) or not 0 <= value < 2**bits:
                raise ValueError(f"RngKey.{name} is {value!r}: use an int in 0..2**{bits}-1")
        if not isinstance(self.step, (int, torch.Tensor)):
            raise ValueError(f"RngKey.step is {self.step!r}: use an int or a 0-dim int64 tensor")

    def at(self, row_offset: int, col_offset: int = 0) -> RngKey:
        """The key of a shard that starts at this position of the tensor that ``self`` names."""
        return replace(self, row_offset=self.row_offset + row_offset, col_offset=self.col_offset + col_offset)


def get_step() -> int:
    """The number of optimiser steps seen (or set): part of every stochastic-rounding key. Save it in checkpoints."""
    return int(_count)


def set_step(step: int) -> None:
    """Set the step, e.g. when a run resumes. ValueError if negative."""
    if step < 0:
        raise ValueError(f"step is {step}: use a step >= 0")
    _count[...] = step


def step_tensor() -> torch.Tensor:
    """The live 0-dim int64 counter itself, for keys built inside a compiled region."""
    return _step


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    set_step(get_step() + 1)


register_optimizer_step_post_hook(_count_step)
