"""Audit a model before converting it: which GEMM of which layer loses most, and what a policy makes of that.

python examples/audit_model.py
mxfp8 audit audit_model:factory --html audit.html      # the same from the command line, in this folder
"""

from collections.abc import Iterator

import torch
from torch import nn

import mxfp8


class Ranker(nn.Module):
    """A body, and a `spiky` layer whose input has a few huge features: hard on any 8-bit format."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
        self.spiky = nn.Linear(128, 128)
        self.head = nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = torch.ones(128, device=x.device)
        spikes[::32] = 1e6
        logit: torch.Tensor = self.head(self.body(x) + self.spiky(x * spikes) * 1e-6)
        return logit


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    features, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(features).squeeze(-1), labels)


def factory() -> tuple[nn.Module, Iterator[tuple[torch.Tensor, torch.Tensor]], object]:
    """What `mxfp8 audit` asks for: model, batches, loss_fn."""
    torch.manual_seed(0)
    return Ranker(), ((torch.randn(512, 128), (torch.rand(512) < 0.3).float()) for _ in range(3)), loss_fn


if __name__ == "__main__":
    model, batches, _ = factory()
    report = mxfp8.audit(model, batches, loss_fn)  # on a copy: `model` stays as it is
    print(report)

    # Where most small values vanish beside an outlier, keep the layer in BF16. Its name is the rule.
    fragile = sorted({row.layer for row in report.rows if row.underflow_frac > 0.1})
    policy = mxfp8.PrecisionPolicy(rules=[(layer, "bf16") for layer in fragile], default="mxfp8_rceil")
    print(f"\nkept in BF16: {', '.join(fragile)}\n")
    print(mxfp8.describe(mxfp8.convert(model, policy=policy)))
    print(policy.to_yaml())
