"""One prediction head per task, and their loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.config import GEMConfig
from gem_model.layers.basic import ACTIVATION_MODULES, make_norm, mlp


class Tower(nn.Module):
    """MLP -> activation -> prediction layer: [B, width] -> float32 [B, 1].

    The prediction layer has the model's only bias and runs in fp32, also under autocast: it is the layer the papers
    name as most sensitive.
    """

    def __init__(self, width: int, config: GEMConfig) -> None:
        super().__init__()
        widths = (width, *config.head_hidden)
        last: list[nn.Module] = [ACTIVATION_MODULES[config.activation]()] if config.head_hidden else []
        hidden = [mlp(widths, config.activation, config.bias)] if config.head_hidden else []
        self.hidden = nn.Sequential(*hidden, *last)
        self.prediction = nn.Linear(widths[-1], 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        with torch.autocast(x.device.type, enabled=False):
            logit: Tensor = self.prediction(hidden.float())
        return logit


class MultiTaskHead(nn.Module):
    """Norm, then one tower per task: [B, width] -> logits float32 [B, n_tasks]."""

    def __init__(self, width: int, tasks: Sequence[str], config: GEMConfig) -> None:
        super().__init__()
        self.norm = make_norm(config.norm)
        self.towers = nn.ModuleDict({task: Tower(width, config) for task in tasks})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([tower(x) for tower in self.towers.values()], dim=1)


def multi_task_loss(logits: Tensor, labels: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted mean over tasks of binary cross-entropy with logits, in fp32: [B, n_tasks] twice -> scalar, nats.

    sum_t w_t mean_b CE(logits_bt, labels_bt) / sum_t w_t. Raises ValueError for shapes that differ or an empty batch.
    """
    if logits.ndim != 2 or logits.shape != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must both be [B, n_tasks]")
    if logits.shape[0] == 0:
        raise ValueError("the mean loss of an empty batch is undefined")
    with torch.autocast(logits.device.type, enabled=False):
        per_task = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(0)
        if weights is None:
            return per_task.mean()
        weight = per_task.new_tensor(weights)
        return (per_task * weight).sum() / weight.sum()
