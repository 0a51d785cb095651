"""The sequence side of a layer, over packed event tokens: PFFN, self-attention, and the summary of a sequence.

A sequence is packed as [T, d] rows with offsets; nothing is padded. The n_sum tokens of X_sum are added to each sample
once, as CLS tokens at its newest end with time zero ("now"), not at the oldest: there a sliding window reaches the most
recent events, and causal windows stay useful. A user without history thus still has a sequence, of CLS tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_model.config import GEMConfig
from gem_model.layers.basic import Gating, RMSNorm, make_norm
from mxfp8.attention import block_attention, generalized_attention, jagged_attention


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a packed batch are. Built once per batch and stream, shared by all layers."""

    cu_seq: Tensor
    """int64 [B + 1]: events and CLS tokens of each sample, events first."""
    max_len: int
    source: Tensor
    """int64 [T + B n_cls]: row of [events | CLS tokens] that each packed row comes from."""
    picked_rows: Tensor
    """int64 [B, n_cls + n_recent]: packed rows of the CLS tokens, then of the latest events, oldest first."""
    picked_valid: Tensor
    """bool [B, n_cls + n_recent, 1]: False where a sample has fewer events; its row is then another sample's."""
    phases: Tensor
    """Rotary phases, complex64 [T + B n_cls, 1, head_dim / 2]."""

    @staticmethod
    def build(lengths: Tensor, seconds_ago: Tensor, config: GEMConfig) -> Layout:
        """`lengths` int64 [B] and `seconds_ago` float32 [T] of one event stream."""
        batch, device, n_cls = lengths.numel(), lengths.device, config.summary_tokens
        events, sample = seconds_ago.numel(), torch.arange(batch, device=device)
        end = lengths.cumsum(0)
        cu_seq = torch.cat([end.new_zeros(1), end + (sample + 1) * n_cls])
        event_rows = torch.arange(events, device=device) + n_cls * torch.repeat_interleave(
            sample, lengths, output_size=events
        )
        around_cls = torch.arange(-config.recent_tokens, n_cls, device=device).roll(-config.recent_tokens)
        picked = cu_seq[1:, None] - n_cls + around_cls
        source = torch.empty(events + batch * n_cls, dtype=torch.int64, device=device)
        source[torch.cat([event_rows, picked[:, :n_cls].flatten()])] = torch.arange(source.numel(), device=device)
        now = seconds_ago.new_zeros(batch * n_cls)
        return Layout(
            cu_seq=cu_seq,
            max_len=int(lengths.max()) + n_cls if batch else 0,
            source=source,
            picked_rows=picked.clamp(min=0),
            picked_valid=(picked >= cu_seq[:-1, None])[:, :, None],
            phases=rotary_phases(torch.cat([seconds_ago, now])[source], config),
        )

    def pack(self, events: Tensor, cls_tokens: Tensor) -> Tensor:
        """[T, d] events and [B, n_cls, d] CLS tokens -> packed [T + B n_cls, d]."""
        return torch.cat([events, cls_tokens.flatten(0, 1).to(events.dtype)]).index_select(0, self.source)

    def uniform(self, tokens: int) -> Tensor:
        """Offsets of a packed batch with the same number of tokens in each sample."""
        return torch.arange(self.cu_seq.numel(), device=self.cu_seq.device) * tokens


def rotary_phases(seconds: Tensor, config: GEMConfig) -> Tensor:
    """ROTE (Kunlun, arXiv 2602.10016): exp(i f_j log(1 + seconds / scale)), complex64 [T, 1, head_dim / 2].

    f_j = base^(-j / (head_dim / 2)). Log-time spans 0 to about 13 for a year at a minute's scale, so the base is far
    below that of token positions.
    """
    pairs = config.head_dim // 2
    position = torch.log1p(seconds / config.rotary_seconds)
    frequency = config.rotary_base ** -(torch.arange(pairs, device=seconds.device) / pairs)
    angle = (position[:, None] * frequency)[:, None, :]
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Rotate feature pairs (2 j, 2 j + 1) of [T, heads, dim] in fp32; the result has the dtype of `x`.

    As a complex product: one pass, several times faster on a CPU than sines and cosines on strided halves.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phases).flatten(-2).to(x.dtype)


class PFFN(nn.Module):
    """The personalised feed-forward network as generalised dot-product attention, with its norms and residuals.

        q = Norm(S);  p = act(q K^T / tau) V;  out = RMSNorm(p + q) + S

    K and V, `pffn_tokens` of them for each sample, are generated from X_sum by two linears (InterFormer's PFFN in the
    form of Kunlun; block order and missing affine parts as deployed: Norm is LayerNorm, or BlockNorm when
    `norm="block"`).
    """

    def __init__(self, config: GEMConfig) -> None:
        super().__init__()
        self.config = config
        generated = config.pffn_tokens * config.dim
        self.norm_in = make_norm(config.norm)
        self.keys = nn.Linear(config.summary_tokens * config.dim, generated, bias=config.bias)
        self.values = nn.Linear(config.summary_tokens * config.dim, generated, bias=config.bias)
        self.norm_out = RMSNorm()

    def forward(self, tokens: Tensor, x_sum: Tensor, layout: Layout) -> Tensor:
        """[T', d] packed tokens and [B, n_sum, d] -> [T', d]."""
        config, heads = self.config, (self.config.heads, self.config.head_dim)
        q = self.norm_in(tokens)
        keys, values = (f(x_sum.flatten(1)).view(-1, *heads) for f in (self.keys, self.values))
        attended = generalized_attention(
            q.to(keys.dtype).unflatten(-1, heads),
            keys,
            values,
            layout.cu_seq,
            layout.uniform(config.pffn_tokens),
            layout.max_len,
            config.pffn_tokens,
            activation=config.pffn_activation,
            scale=config.logit_scale,
        )
        out: Tensor = self.norm_out(attended.flatten(1) + q) + tokens
        return out


class SelfAttention(nn.Module):
    """Pre-norm jagged self-attention with rotary time encoding: S + W_o Attention(Norm(S)), windowed or in blocks."""

    def __init__(self, config: GEMConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = make_norm(config.norm)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        """[T', d] -> [T', d]."""
        config = self.config
        qkv = self.qkv(self.norm(tokens)).unflatten(-1, (3 * config.heads, config.head_dim))
        q, k, v = qkv.chunk(3, dim=1)
        q, k = rotate(q, layout.phases), rotate(k, layout.phases)
        cu_seq, max_len = layout.cu_seq, layout.max_len
        if config.attention == "block":
            attended = block_attention(q, k, v, cu_seq, max_len, block=config.block)
        else:
            attended = jagged_attention(q, k, v, cu_seq, cu_seq, max_len, max_len, window_size=config.window)
        out: Tensor = tokens + self.out(attended.flatten(1))
        return out


class AttentionPooling(nn.Module):
    """PMA: multi-head attention of learned seeds over a packed sequence, [T', d] -> [B, n_pma, d].

    Queries are constants, so the key map folds into them (q . W_k s = (W_k^T q) . s), and the value and output maps
    commute with the weighted sum. What remains of multi-head attention is one seed in token space per head, K = V = S,
    and one linear on the pooled heads: no linear runs over the long sequence.
    """

    def __init__(self, config: GEMConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.seeds = nn.Parameter(torch.empty(config.pma_tokens * config.heads, config.dim))
        self.out = nn.Linear(config.heads * config.dim, config.dim, bias=config.bias)

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        count, dim = self.seeds.shape
        batch = layout.cu_seq.numel() - 1
        seeds = self.seeds.to(tokens.dtype).expand(batch, count, dim).reshape(-1, 1, dim)
        rows = tokens[:, None, :]
        pooled = jagged_attention(seeds, rows, rows, layout.uniform(count), layout.cu_seq, count, layout.max_len)
        out: Tensor = self.out(pooled.view(batch, count // self.heads, self.heads * dim))
        return out.float()


class SequenceSummary(nn.Module):
    """S_sum = Norm(Gating(Norm([CLS | PMA | recent]))): packed [T', d] -> float32 [B, n_cls + n_pma + n_recent, d].

    A sample with fewer events than `recent_tokens` has zeros in the places of the missing ones.
    """

    def __init__(self, config: GEMConfig) -> None:
        super().__init__()
        self.config = config
        self.pma = AttentionPooling(config)
        self.norm_in = make_norm(config.norm)
        self.gate = Gating(config.dim, config.gate, config.bias)
        self.norm_out = make_norm(config.norm)

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        picked = tokens.index_select(0, layout.picked_rows.flatten()).view(*layout.picked_rows.shape, tokens.shape[-1])
        picked = picked.masked_fill(~layout.picked_valid, 0.0)
        cls_tokens, recent = picked.split([self.config.summary_tokens, self.config.recent_tokens], dim=1)
        summary = torch.cat([cls_tokens, self.pma(tokens, layout), recent], dim=1)
        out: Tensor = self.norm_out(self.gate(self.norm_in(summary)))
        return out


class SequenceLayer(nn.Module):
    """S' = SelfAttention(PFFN(X_sum, S)), and its summary: returns packed [T', d] and S_sum [B, n, d].

    With `comp_skip` an even layer has the PFFN only, and an odd one, which needs no X_sum, the self-attention only.
    """

    def __init__(self, index: int, config: GEMConfig) -> None:
        super().__init__()
        self.pffn = PFFN(config) if has_pffn(index, config) else None
        self.attention = SelfAttention(config) if not config.comp_skip or index % 2 else None
        self.summary = SequenceSummary(config)

    def forward(self, tokens: Tensor, x_sum: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        if self.pffn is not None:
            assert x_sum is not None
            tokens = self.pffn(tokens, x_sum, layout)
        if self.attention is not None:
            tokens = self.attention(tokens, layout)
        return tokens, self.summary(tokens, layout)


def has_pffn(index: int, config: GEMConfig) -> bool:
    """Whether layer `index` runs the PFFN, and so needs X_sum."""
    return not config.comp_skip or index % 2 == 0
