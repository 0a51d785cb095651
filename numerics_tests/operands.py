"""What kernels are given: operands with given scale bytes and the values they stand for, ends of groups, other strides;
and which backends take them here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mxfp8 import dispatch
from mxfp8.formats import BLOCK_SHAPES

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HIGH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUT = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = {f"{r}x{c}": (r, c) for r, c in BLOCK_SHAPES}

Backend = tuple[str, torch.device]


@dataclass(frozen=True)
class Operand:
    """What a backend gets, and the values it stands for."""

    x: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] | None = None

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int] | None]:
        return self.x, self.scale, self.block

    @property
    def exact(self) -> torch.Tensor:
        if self.scale is None or self.block is None:
            return self.x.double()
        factors = torch.where(self.scale == 255, torch.nan, torch.exp2(self.scale.double() - 127))
        factors = factors.repeat_interleave(self.block[0], -2)[..., : self.x.shape[-2], :]
        return self.x.double() * factors.repeat_interleave(self.block[1], -1)[..., : self.x.shape[-1]]


def operand(values: torch.Tensor, kind: str, fmt: str = "e4m3", low: int = 125, high: int = 130) -> Operand:
    """``values`` as they are, cast to what ``kind`` says, with random scale bytes in ``low`` to ``high - 1``."""
    if kind in HIGH:
        return Operand(values.to(HIGH[kind]))
    r, c = BLOCKS[kind]
    *lead, rows, cols = values.shape
    scale = torch.randint(low, high, (*lead, -(-rows // r), -(-cols // c)), device=values.device, dtype=torch.uint8)
    return Operand(values.to(ELEMENTS[fmt]), scale, (r, c))


def integers(*shape: int, device: torch.device) -> torch.Tensor:
    """-3 to 3: with scales of 2**-2 to 2**2 every partial sum is exact in float32 and on FP8 tensor cores."""
    return torch.randint(-3, 4, shape, device=device).float()


def spread_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in other strides, amid NaN bytes: what is read beside them shows."""
    rows, cols = x.shape
    sizes = {"transposed": (cols, rows), "slice": (rows + 3, cols + 32), "odd_pitch": (rows, cols + 1),
             "steps": (2 * rows, 3 * cols), "unaligned": (rows, cols + 16)}  # fmt: skip
    bytes_ = torch.full((*sizes[how], x.element_size()), 0x7F, dtype=torch.uint8, device=x.device)
    space = bytes_.view(x.dtype).squeeze(-1)
    view = {"transposed": lambda: space.mT, "slice": lambda: space[1 : rows + 1, 16 : cols + 16],
            "odd_pitch": lambda: space[:, :cols], "steps": lambda: space[::2, 1::3],
            "unaligned": lambda: space[:, 1 : cols + 1]}[how]()  # fmt: skip
    assert view.shape == x.shape
    return view.copy_(x)


def ends(sizes: list[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Ends of groups of so many rows."""
    return torch.tensor(sizes, device=device, dtype=torch.int64).cumsum(0).to(dtype)


def available(request: pytest.FixtureRequest, op: str) -> Backend:
    """The fixture's parameter, a backend, and the device where it runs; skips with dispatch's reason if it cannot."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := dispatch.why_not(op, request.param, device):
        pytest.skip(f"{request.param}: {reason}")
    return request.param, device
