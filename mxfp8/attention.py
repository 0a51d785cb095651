"""Attention over packed, jagged batches: softmax, generalised dot-product (GDPA) and block-diagonal.

Layout, in all three: `q` [rows_q, heads, dim], `k` [rows_k, heads, dim], `v` [rows_k, heads, dim_v], the rows of all B
samples one after the other; `cu_seq_*` int32 or int64 [B + 1], sample b owning rows cu_seq[b] to cu_seq[b + 1]; `max_*`
an upper bound on the lengths. Names and the meaning of `window_size` are those of torch's variable-length attention.
A sample of length zero is legal, and so is an empty batch. The output is [rows_q, heads, dim_v] in the dtype of `v`.

Numerics: high precision only. Logits, softmax and sums are fp32 (fp64 for fp64 inputs), also under autocast. The one
value of `recipe` is None. `backend` is "auto", or a name that runs or raises RuntimeError with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp8 import dispatch
from mxfp8.reference.attention import ACTIVATIONS

__all__ = ["block_attention", "generalized_attention", "jagged_attention"]


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
    recipe: None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention inside each sample: out_i = sum_j softmax_j(scale * q_i . k_j + bias_ij) v_j.

    Query and key lengths may differ. `scale` is 1/sqrt(dim) by default. `window_size` = (left, right) lets query i
    see the keys j with i' - left <= j <= i' + right, where i' = i + len_k - len_q aligns the last query with the
    last key; -1 is unbounded, so (-1, 0) is causal. `bias` [heads, >= max_q, >= max_k] is added by position inside
    the sample. A query that sees no key (empty key list, or window off the end) gives zeros.

    Raises TypeError or ValueError for wrong dtypes, shapes or offsets, naming the argument and the first bad index.
    """
    _check_recipe(recipe)
    _check_operands(q, k, v)
    _check_offsets("q", cu_seq_q, q.shape[0], max_q)
    _check_offsets("k", cu_seq_k, k.shape[0], max_k)
    _check_same_batch(cu_seq_q, cu_seq_k)
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"window_size must be (left, right), each -1 (unbounded) or at least 0, got {window_size}")
    left, right = window_size
    if bias is not None:
        _check_bias(bias, q.shape[1], max_q, max_k)
    run = dispatch.resolve("jagged_attention", backend, q.device)
    out: Tensor = run(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=(left, right), bias=bias)
    return out


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
    recipe: None = None,
    backend: str = "auto",
) -> Tensor:
    """Generalised dot-product attention inside each sample: out_i = sum_j activation(scale * q_i . k_j) v_j.

    No softmax and no normalisation over j. `scale` multiplies the logits *before* the activation (Kunlun's 1/tau,
    arXiv 2602.10016); kernels that scale after it, as HSTU's 1/N does, compute something else. `activation` is one of
    identity, gelu, gelu_tanh, silu, hardswish, relu. A sample without keys gives zeros.

    Raises TypeError or ValueError for wrong dtypes, shapes, offsets or an unknown activation.
    """
    _check_recipe(recipe)
    _check_operands(q, k, v)
    _check_offsets("q", cu_seq_q, q.shape[0], max_q)
    _check_offsets("k", cu_seq_k, k.shape[0], max_k)
    _check_same_batch(cu_seq_q, cu_seq_k)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose one of {sorted(ACTIVATIONS)}")
    run = dispatch.resolve("generalized_attention", backend, q.device)
    out: Tensor = run(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, activation=activation, scale=scale)
    return out


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq: Tensor,
    max_len: int,
    block: int = 64,
    recipe: None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax self-attention inside fixed blocks of `block` tokens, counted from the start of each sample.

    Token i sees token j of its sample when i // block == j // block; the last block may be shorter. The logits are
    scaled by 1/sqrt(dim). q, k and v have the same rows.

    Raises TypeError or ValueError for wrong dtypes, shapes, offsets or block.
    """
    _check_recipe(recipe)
    _check_operands(q, k, v)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"block_attention is self-attention: q has {q.shape[0]} rows but k has {k.shape[0]}")
    _check_offsets("", cu_seq, q.shape[0], max_len)
    if block < 1:
        raise ValueError(f"block must be at least 1 token, got {block}")
    run = dispatch.resolve("block_attention", backend, q.device)
    out: Tensor = run(q, k, v, cu_seq, max_len, block=block)
    return out


def _check_recipe(recipe: object) -> None:
    if recipe is not None:
        raise ValueError(f"attention has no recipe {recipe!r}; the only one available is None (high precision)")


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {got}")
        if x.ndim != 3:
            raise ValueError(f"{name} must be [rows, heads, dim], got shape {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if not q.shape[1] == k.shape[1] == v.shape[1] or q.shape[2] != k.shape[2] or k.shape[0] != v.shape[0]:
        raise ValueError(
            "expected q [rows_q, heads, dim], k [rows_k, heads, dim] and v [rows_k, heads, dim_v], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _check_offsets(side: str, cu_seq: Tensor, rows: int, longest: int) -> None:
    """Offsets start at 0, never fall, end at `rows`, and no sample is longer than `longest`."""
    name, bound = (f"cu_seq_{side}", f"max_{side}") if side else ("cu_seq", "max_len")
    if not isinstance(cu_seq, Tensor) or cu_seq.dtype not in (torch.int32, torch.int64):
        got = cu_seq.dtype if isinstance(cu_seq, Tensor) else type(cu_seq).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    if cu_seq.ndim != 1 or cu_seq.numel() == 0:
        raise ValueError(f"{name} must be [batch + 1], got shape {tuple(cu_seq.shape)}")
    offsets = cu_seq.cpu()
    lengths = offsets.diff()
    if offsets[0] != 0:
        raise ValueError(f"{name}[0] must be 0, got {offsets[0].item()}")
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0]) + 1
        raise ValueError(f"{name} must not fall: {name}[{at}] = {offsets[at]} follows {offsets[at - 1]}")
    if offsets[-1] != rows:
        raise ValueError(f"{name}[-1] must equal the {rows} packed rows, got {offsets[-1].item()}")
    if (lengths > longest).any():
        at = int((lengths > longest).nonzero()[0])
        raise ValueError(f"sample {at} has {lengths[at]} rows, more than {bound} = {longest}")


def _check_same_batch(cu_seq_q: Tensor, cu_seq_k: Tensor) -> None:
    if cu_seq_q.numel() != cu_seq_k.numel():
        raise ValueError(
            f"cu_seq_q describes {cu_seq_q.numel() - 1} samples but cu_seq_k describes {cu_seq_k.numel() - 1}"
        )


def _check_bias(bias: Tensor, heads: int, max_q: int, max_k: int) -> None:
    if bias.ndim != 3 or bias.shape[0] != heads or bias.shape[1] < max_q or bias.shape[2] < max_k:
        raise ValueError(
            f"bias must be [heads={heads}, >= max_q={max_q}, >= max_k={max_k}], got shape {tuple(bias.shape)}"
        )
