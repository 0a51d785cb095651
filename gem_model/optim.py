"""Optimisers of a GEM: row-wise Adagrad for the embedding tables, Adam for everything else, one global clip.

An embedding row is read by few samples, so its step size must follow how often it was read; one accumulator per row
(instead of one per element, as Adam would keep two) is what makes that affordable on tables of many gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

TABLES, DENSE = "tables", "dense"


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row of a 2-D parameter (FBGEMM's `EXACT_ROWWISE_ADAGRAD`).

        s[r] += mean_d g[r, d]^2;     w[r, :] -= lr * g[r, :] / (sqrt(s[r]) + eps)

    Dense and sparse gradients give the same result; a row whose gradient is zero does not move. State: `sum`, float32
    [rows]. Raises ValueError for a parameter that is not 2-D, or for `lr` < 0 or `eps` <= 0.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float = 1e-8) -> None:
        if not (lr >= 0 and eps > 0):
            raise ValueError(f"lr must be >= 0 and eps > 0, got lr={lr}, eps={eps}")
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"RowWiseAdagrad needs parameters [rows, dim], got shape {tuple(p.shape)}")
                self.state[p]["sum"] = torch.zeros(p.shape[0], dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a parameter without a gradient is left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _adagrad_rows(p, p.grad, self.state[p]["sum"], group["lr"], group["eps"])
        return loss


def _adagrad_rows(p: Tensor, grad: Tensor, accumulated: Tensor, lr: float, eps: float) -> None:
    if not grad.is_sparse:
        accumulated += grad.square().mean(dim=1)
        p -= lr * grad / (accumulated.sqrt() + eps)[:, None]
        return
    grad = grad.coalesce()  # sums repeated ids, in a fixed order, before squaring: duplicates are one gradient
    rows, values = grad.indices()[0], grad.values()
    updated = accumulated[rows] + values.square().mean(dim=1)
    accumulated[rows] = updated
    p.index_add_(0, rows, values / (updated.sqrt() + eps)[:, None], alpha=-lr)


def make_optimizers(
    model: nn.Module, *, table_lr: float, dense_lr: float, weight_decay: float = 0.0
) -> dict[str, Optimizer]:
    """Row-wise Adagrad over the weights of every `nn.EmbeddingBag`, AdamW (decoupled decay) over the rest."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
    ids = {id(p) for p in tables}
    dense = [p for p in model.parameters() if id(p) not in ids and p.requires_grad]
    optimizers: dict[str, Optimizer] = {}
    if tables:
        optimizers[TABLES] = RowWiseAdagrad(tables, lr=table_lr)
    if dense:
        optimizers[DENSE] = AdamW(dense, lr=dense_lr, weight_decay=weight_decay)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, total: int, warmup: float) -> float:
    """Share of the peak learning rate at `step` of `total`: linear warm-up over the first `warmup` of the run, then a
    cosine to zero. A pure function of the step: a resumed run needs no scheduler state."""
    warm = max(1, round(warmup * total))
    if step < warm:
        return (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    return 0.5 * (1.0 + math.cos(math.pi * done))


def set_lr(optimizers: dict[str, Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def gradient_norm(params: Iterable[Tensor]) -> Tensor:
    """Global L2 norm of all gradients, tables included, float32 scalar (NaN or Inf if any gradient is)."""
    grads = [p.grad for p in params if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in grads]
    if not values:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v.float()) for v in values]))
    return norm


def scale_gradients(params: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm is at most `max_norm`, given that it is `norm` now."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)
