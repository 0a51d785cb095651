"""A small ranking model for tests of policies, and what a conversion made of one."""

import torch
from torch import nn

from mxfp8 import MXFP8Linear


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, dim)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU()) for _ in range(2))
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        mixed = sum(expert(h) for expert in self.experts)
        return x + torch.sigmoid(self.gate(h)) * self.down(mixed)


class Ranker(nn.Module):
    """Embedding, two blocks with a gate and experts, an `overhead` layer to catch substring matching, and a head."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.overhead = nn.Linear(dim, dim)
        self.odd = nn.Linear(dim, 36)
        self.head = nn.Sequential(nn.Linear(36, dim), nn.ReLU(), nn.Linear(dim, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.odd(self.overhead(x)))
        return out


LINEARS = [
    *(f"blocks.{b}.{name}" for b in (0, 1) for name in ("gate", "experts.0.0", "experts.1.0", "down")),
    *("overhead", "odd", "head.0", "head.2"),
]


def recipes(model: nn.Module) -> dict[str, str]:
    """Precision of every linear layer, by what the modules are and not by what describe says."""
    return {
        name: m.recipe.name if isinstance(m, MXFP8Linear) else "bf16"
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }


def converted(model: nn.Module) -> set[str]:
    return {name for name, recipe in recipes(model).items() if recipe != "bf16"}
