"""DHEN-style experts: several interactions of the same tokens, summed with a shortcut (arXiv 2203.11014)."""

from __future__ import annotations

from torch import Tensor, nn

from gem_model.config import GEMConfig
from gem_model.layers.basic import TokenMix, make_norm
from gem_model.layers.interaction import CrossExpert, WukongExpert

EXPERT_MODULES: dict[str, type[CrossExpert] | type[WukongExpert]] = {"dcn": CrossExpert, "wukong": WukongExpert}


class InteractionExperts(nn.Module):
    """X' = Norm(sum of experts(X) + shortcut(X)): [B, n, d] -> float32 [B, interaction_tokens, d].

    The experts are dense, not routed: each sees every sample, so each may live on its own rank. The shortcut is the
    identity, or a linear on the token axis where the number of tokens changes.
    """

    def __init__(self, tokens: int, config: GEMConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList(EXPERT_MODULES[kind](tokens, config) for kind in config.experts)
        same = tokens == config.interaction_tokens
        self.shortcut = nn.Identity() if same else TokenMix(tokens, config.interaction_tokens, config.bias)
        self.norm = make_norm(config.norm)

    def forward(self, x: Tensor) -> Tensor:
        total = self.shortcut(x)
        for expert in self.experts:
            total = total + expert(x)
        out: Tensor = self.norm(total)
        return out
