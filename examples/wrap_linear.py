"""Wrap the linear layers of a model: convert it, see what was done and why, and train it beside its BF16 twin.

python examples/wrap_linear.py
"""

import copy

import torch
from torch import nn

import mxfp8


class Ranker(nn.Module):
    """Ids to an embedding, two wide layers, one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(1000, 64)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
        self.head = nn.Linear(256, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logit: torch.Tensor = self.head(self.body(self.embedding(ids))).squeeze(-1)
        return logit


def train(model: nn.Module, steps: int = 20) -> list[float]:
    """Binary cross-entropy per step on a planted rule; FP32 master weights, BF16 autocast."""
    data = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 1000, (256, 8), generator=data)
        labels = (ids % 7 == 0).any(dim=1).float()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    bf16 = Ranker()
    # recsys() also keeps layers too small to gain speed in BF16; a model this small is all of that kind.
    model = mxfp8.convert(copy.deepcopy(bf16), policy=mxfp8.policies.recsys(min_dim=64))
    print(mxfp8.describe(model))
    for step, (a, b) in enumerate(zip(train(bf16), train(model), strict=True)):
        if step % 5 == 4:
            print(f"step {step + 1:2d}   BF16 {a:.4f}   MXFP8 {b:.4f}")
    bf16.load_state_dict(model.state_dict(), strict=True)  # the same keys and plain tensors: it loads back
