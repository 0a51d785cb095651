"""The exact meaning of jagged attention, in plain torch and without padding.

A batch is packed: the rows of all samples one after the other, with offsets saying where each sample starts. Samples
with the same (query length, key length) form a *bucket*, and a bucket is one dense batched matmul. Rows are permuted
once into bucket order (heads split off by the same permutation), so nothing is padded, no loop runs over samples, and
the cost is that of the real tokens.

Everything between the inputs and the output is computed in fp32 (fp64 for fp64 inputs), also under autocast; the
result is rounded once, to the dtype of `v`. Arguments are taken as checked: `mxfp8.attention` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "relu": F.relu,
}


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + bias) v inside each sample; see `mxfp8.attention.jagged_attention` for the contract."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def weights(logits: Tensor) -> Tensor:
        len_q, len_k = logits.shape[-2:]
        if bias is not None:
            logits = logits + bias[:, :len_q, :len_k].to(logits.dtype)
        if _covers(window_size, len_q, len_k):
            return logits.softmax(-1)
        allowed = _window(len_q, len_k, window_size, logits.device)
        alive = allowed.any(-1, keepdim=True)
        # A row that sees no key would be softmax of all -inf, hence NaN: it is left unmasked and zeroed afterwards.
        logits = logits.masked_fill(~allowed & alive, -torch.inf)
        return logits.softmax(-1).masked_fill(~alive, 0.0)

    return _attend(q, k, v, cu_seq_q, cu_seq_k, factor, weights)


def generalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
) -> Tensor:
    """activation(scale * q k^T) v inside each sample; see `mxfp8.attention.generalized_attention` for the contract."""
    return _attend(q, k, v, cu_seq_q, cu_seq_k, scale, ACTIVATIONS[activation])


def block_attention(q: Tensor, k: Tensor, v: Tensor, cu_seq: Tensor, max_len: int, block: int = 64) -> Tensor:
    """Softmax attention inside blocks of `block` tokens; see `mxfp8.attention.block_attention` for the contract."""
    cu_block = block_offsets(cu_seq, block)
    longest = min(block, max_len)
    return jagged_attention(q, k, v, cu_block, cu_block, longest, longest)


def block_offsets(cu_seq: Tensor, block: int) -> Tensor:
    """Offsets [B + 1] of samples -> offsets of their blocks of `block` rows; the last one may be short."""
    lengths = cu_seq.diff()
    blocks = (lengths + block - 1).div(block, rounding_mode="floor")
    first = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
    sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=cu_seq.device), blocks)
    nth = torch.arange(sample.numel(), device=cu_seq.device) - first[sample]
    return torch.cat([cu_seq[:-1][sample] + nth * block, cu_seq[-1:]]).to(cu_seq.dtype)


def _covers(window_size: tuple[int, int], len_q: int, len_k: int) -> bool:
    """Whether every query sees every key, so that no mask is needed."""
    left, right = window_size
    return (left < 0 or left >= len_k - 1) and (right < 0 or right >= len_q - 1)


def _window(len_q: int, len_k: int, window_size: tuple[int, int], device: torch.device) -> Tensor:
    """bool [len_q, len_k], True where a query sees a key; the last query is aligned with the last key."""
    left, right = window_size
    query = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    distance = torch.arange(len_k, device=device)[None, :] - query
    allowed = torch.ones(len_q, len_k, dtype=torch.bool, device=device)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    factor: float,
    weights: Callable[[Tensor], Tensor],
) -> Tensor:
    """sum_j weights(factor * q_i . k_j) v_j, bucket by bucket; `weights` maps logits [n, heads, len_q, len_k]."""
    heads, dim_v = v.shape[1:]
    compute = torch.promote_types(v.dtype, torch.float32)
    plan = _Plan.build(cu_seq_q.to(q.device), cu_seq_k.to(q.device), heads)
    queries, keys = plan.queries.pack(q).to(compute) * factor, plan.keys.pack(k).to(compute)
    values = keys if v is k else plan.keys.pack(v).to(compute)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for bucket, q_b, k_b, v_b in plan.split(queries, keys, values):
            logits = torch.bmm(q_b, k_b.mT).unflatten(0, (bucket.samples, heads))
            outputs.append(torch.bmm(weights(logits).flatten(0, 1), v_b).reshape(-1, dim_v))
    packed = torch.cat(outputs) if outputs else queries.new_empty(0, dim_v)
    return plan.queries.unpack(packed.to(v.dtype)).view(q.shape[0], heads, dim_v)


@dataclass(frozen=True, slots=True)
class _Bucket:
    samples: int
    len_q: int
    len_k: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """A permutation of (token, head) rows: [tokens, heads, dim] <-> bucket order [sample, head, position]."""

    order: Tensor
    inverse: Tensor

    @staticmethod
    def build(starts: Tensor, lengths: Tensor, heads: int) -> _Rows:
        """`starts` and `lengths` [B] of the samples, in bucket order."""
        size = lengths * heads
        end = size.cumsum(0)
        total = int(end[-1]) if end.numel() else 0
        sample = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size, output_size=total)
        order = torch.arange(total, device=size.device)
        within, length = order - (end - size)[sample], lengths[sample]
        head = within.div(length, rounding_mode="floor")
        source = (starts[sample] + within - head * length) * heads + head
        inverse = torch.empty_like(source)
        inverse[source] = order
        return _Rows(order=source, inverse=inverse)

    def pack(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> [tokens * heads, dim] in bucket order."""
        return _permute(x.reshape(self.order.numel(), x.shape[-1]), self.order, self.inverse)

    def unpack(self, rows: Tensor) -> Tensor:
        """Inverse of `pack`, without splitting heads off."""
        return _permute(rows, self.inverse, self.order)


@dataclass(frozen=True, slots=True)
class _Plan:
    buckets: tuple[_Bucket, ...]
    heads: int
    queries: _Rows
    keys: _Rows

    @staticmethod
    def build(cu_seq_q: Tensor, cu_seq_k: Tensor, heads: int) -> _Plan:
        len_q, len_k = cu_seq_q.diff().long(), cu_seq_k.diff().long()
        shape = len_q * (len_k.max() + 1 if len_k.numel() else 1) + len_k
        shape, order = shape.sort(stable=True)
        counts = torch.unique_consecutive(shape, return_counts=True)[1]
        first = counts.cumsum(0) - counts
        len_q, len_k = len_q[order], len_k[order]
        table = torch.stack([counts, len_q[first], len_k[first]], dim=1).tolist()
        queries = _Rows.build(cu_seq_q[:-1].long()[order], len_q, heads)
        shared = cu_seq_k is cu_seq_q
        keys = queries if shared else _Rows.build(cu_seq_k[:-1].long()[order], len_k, heads)
        return _Plan(buckets=tuple(_Bucket(*row) for row in table), heads=heads, queries=queries, keys=keys)

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[_Bucket, Tensor, Tensor, Tensor]]:
        """Each bucket with its rows as [samples * heads, length, dim]."""
        size_q = [bucket.samples * self.heads * bucket.len_q for bucket in self.buckets]
        size_k = [bucket.samples * self.heads * bucket.len_k for bucket in self.buckets]
        parts = zip(self.buckets, q.split(size_q), k.split(size_k), v.split(size_k), strict=True)
        for bucket, q_b, k_b, v_b in parts:
            batch = bucket.samples * self.heads
            yield (
                bucket,
                q_b.view(batch, bucket.len_q, q.shape[-1]),
                k_b.view(batch, bucket.len_k, k.shape[-1]),
                v_b.view(batch, bucket.len_k, v.shape[-1]),
            )


class _Permute(torch.autograd.Function):
    """Rows by a permutation. Its gradient is the inverse permutation: a gather, where indexing would scatter-add."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        return _permute(grad, inverse, order), None, None


def _permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted
