"""Feature interaction on tokens [B, n, d]: the Wukong expert (FMB and LCB) and a low-rank DCNv2 expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_model.config import GEMConfig
from gem_model.layers.basic import TokenMix, make_norm, mlp


class FactorizationMachineBlock(nn.Module):
    """FMB(X) = reshape(MLP(Norm(flatten(FM(X))))) with the optimised FM(X) = X (X^T Y) (Wukong, arXiv 2403.02545).

    [B, n, d] -> [B, fm_tokens, d]. Y is learned, [n, k]: O(n d k) in place of the O(n^2 d) of X X^T.
    """

    def __init__(self, tokens: int, config: GEMConfig) -> None:
        super().__init__()
        self.shape = (config.fm_tokens, config.dim)
        self.project = nn.Linear(tokens, config.fm_rank, bias=config.bias)
        self.norm = make_norm(config.norm)
        widths = (tokens * config.fm_rank, *config.fm_hidden, config.fm_tokens * config.dim)
        self.mlp = mlp(widths, config.activation, config.bias)

    def interact(self, x: Tensor) -> Tensor:
        """FM(X) = X (X^T Y): [B, n, d] -> [B, n, k]."""
        projected: Tensor = self.project(x.mT)
        product: Tensor = torch.bmm(x.to(projected.dtype), projected)
        return product

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.mlp(self.norm(self.interact(x).flatten(1)))
        return tokens.view(-1, *self.shape)


class WukongExpert(nn.Module):
    """concat(FMB(X), LCB(X)): [B, n, d] -> [B, fm_tokens + linear_tokens, d]; residual and norm are the ensemble's."""

    def __init__(self, tokens: int, config: GEMConfig) -> None:
        super().__init__()
        self.fmb = FactorizationMachineBlock(tokens, config)
        self.lcb = TokenMix(tokens, config.linear_tokens, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.fmb(x), self.lcb(x)], dim=1)


class CrossExpert(nn.Module):
    """DCNv2's low-rank cross X * (U V X) + X on flattened tokens, then a linear on the token axis.

    [B, n, d] -> [B, fm_tokens + linear_tokens, d] (arXiv 2008.13535).
    """

    def __init__(self, tokens: int, config: GEMConfig) -> None:
        super().__init__()
        width = tokens * config.dim
        self.down = nn.Linear(width, config.cross_rank, bias=False)
        self.up = nn.Linear(config.cross_rank, width, bias=config.bias)
        self.compress = TokenMix(tokens, config.interaction_tokens, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        crossed = flat * self.up(self.down(flat)) + flat
        compressed: Tensor = self.compress(crossed.view_as(x))
        return compressed
