"""Norms, activations, MLPs and gates: the small pieces every other layer is built from.

No norm has an affine part and no linear has a bias unless asked: quantised affine weights clamp or round together
(arXiv 2506.20752), and biases grow until they hurt FP8 training (LoKA, arXiv 2605.10886).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

EPS = 1e-5
NORM_BLOCK = 256

ACTIVATION_MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
GATE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class BlockNorm(nn.Module):
    """Parameter-free RMS norm over fixed blocks of 256 features (LoKA): x / sqrt(mean(x^2 over the block) + eps).

    A row of fewer than 256 features is one block, and the last block of a row may be shorter. [..., d] of any float
    dtype -> [..., d] float32: it is computed, and returned, in fp32.
    """

    def __init__(self, block: int = NORM_BLOCK) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if x.shape[-1] <= self.block:
            return _rms_normalize(x)
        if x.shape[-1] % self.block == 0:
            return _rms_normalize(x.unflatten(-1, (-1, self.block))).flatten(-2)
        return torch.cat([_rms_normalize(part) for part in x.split(self.block, dim=-1)], dim=-1)

    def extra_repr(self) -> str:
        return f"block={self.block}"


class RMSNorm(BlockNorm):
    """Parameter-free RMS norm over the whole last axis, [..., d] -> float32 [..., d]."""

    def forward(self, x: Tensor) -> Tensor:
        return _rms_normalize(x.float())

    def extra_repr(self) -> str:
        return ""


class PlainLayerNorm(nn.Module):
    """LayerNorm over the last axis without affine part, [..., d] -> float32 [..., d]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], eps=EPS)


class _RMSNormalize(torch.autograd.Function):
    """y = x r with r = (mean(x^2) + eps)^(-1/2), and dx = r (dy - y mean(dy y)): both in few passes over memory."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        inverse_rms = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1] + EPS)
        y = x * inverse_rms
        ctx.save_for_backward(y, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        y, inverse_rms = ctx.saved_tensors  # type: ignore[attr-defined]
        projection = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, projection, value=-1.0).mul_(inverse_rms)


def _rms_normalize(x: Tensor) -> Tensor:
    normalized: Tensor = _RMSNormalize.apply(x)  # type: ignore[no-untyped-call]
    return normalized


def make_norm(kind: str) -> nn.Module:
    """The norm of `GEMConfig.norm`: "block" (LoKA) or "layer" (as in the Wukong and GDPA texts)."""
    return BlockNorm() if kind == "block" else PlainLayerNorm()


def mlp(widths: Sequence[int], activation: str, bias: bool) -> nn.Sequential:
    """Linear layers between consecutive `widths`, with the activation between them and none after the last."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths[:-1]):
        layers += [nn.Linear(width_in, width_out, bias=bias), ACTIVATION_MODULES[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))


class Gating(nn.Module):
    """InterFormer's gate on [B, n, d] tokens: sigma(X * MLP(X)), sigma identity, tanh or sigmoid; float32 out.

    The MLP is one linear on the features. It runs in fp32, also under autocast: the gate multiplies its own input, so
    a relative error of the linear is added to that of the token.
    """

    def __init__(self, dim: int, function: str, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=bias)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            return GATE_FUNCTIONS[self.function](x * self.linear(x))


class TokenMix(nn.Module):
    """A linear map on the token axis, [B, n_in, d] -> [B, n_out, d]: Wukong's LCB W_L X and InterFormer's LCE."""

    def __init__(self, tokens_in: int, tokens_out: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(tokens_in, tokens_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.linear(x.mT)
        return mixed.mT


class TokenSummary(nn.Module):
    """X_sum = Norm(Gating(LCE(X))): [B, n, d] -> float32 [B, n_sum, d], n_sum << n (InterFormer, arXiv 2411.09852)."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, *, gate: str, norm: str, bias: bool) -> None:
        super().__init__()
        self.compress = TokenMix(tokens_in, tokens_out, bias)
        self.gate = Gating(dim, gate, bias)
        self.norm = make_norm(norm)

    def forward(self, x: Tensor) -> Tensor:
        summary: Tensor = self.norm(self.gate(self.compress(x)))
        return summary
