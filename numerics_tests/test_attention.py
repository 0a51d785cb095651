"""Jagged, generalised and block attention against one sample at a time, in fp64 and written out with plain matmuls."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from mxfp8 import attention, dispatch
from mxfp8.attention import block_attention, generalized_attention, jagged_attention
from mxfp8.reference import attention as reference

LEN_Q = (5, 0, 33, 1, 9, 31, 12, 9, 0, 2)
LEN_K = (5, 3, 7, 40, 0, 31, 1, 9, 0, 2)
HEADS, DIM, DIM_V = 3, 8, 4

# fp64 against fp64: the same sums in another order. A logit or output sums at most 40 products of O(1) numbers, so the
# difference is within a few hundred ulps of 2^-53; 2^-40 leaves a margin of 8000 ulps and no room for a wrong term.
EXACT = 2.0**-40

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (2, 5), (0, -1), (64, 64)]


def offsets(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def operands(len_q=LEN_Q, len_k=LEN_K, dtype=torch.float64, scale=1.0) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(sum(len_q), HEADS, DIM, dtype=torch.float64) * scale
    k = torch.randn(sum(len_k), HEADS, DIM, dtype=torch.float64) * scale
    v = torch.randn(sum(len_k), HEADS, DIM_V, dtype=torch.float64)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v))


def visible(i: int, j: int, len_q: int, len_k: int, window: tuple[int, int]) -> bool:
    at = i + len_k - len_q
    return (window[0] < 0 or j >= at - window[0]) and (window[1] < 0 or j <= at + window[1])


def softmax_oracle(q, k, v, len_q, len_k, scale, window=(-1, -1), bias=None) -> Tensor:
    """Row by row: no batching, no masking by infinity, fp64."""
    q, k, v = q.double(), k.double(), v.double()
    rows, start_q, start_k = [], 0, 0
    for n_q, n_k in zip(len_q, len_k, strict=True):
        for i in range(n_q):
            seen = [j for j in range(n_k) if visible(i, j, n_q, n_k, window)]
            if not seen:
                rows.append(q.new_zeros(q.shape[1], v.shape[2]))
                continue
            keys, values = k[start_k : start_k + n_k][seen], v[start_k : start_k + n_k][seen]
            logits = scale * torch.einsum("hd,jhd->jh", q[start_q + i], keys)
            if bias is not None:
                logits = logits + bias[:, i, seen].T
            weights = (logits - logits.amax(0)).exp()
            rows.append(torch.einsum("jh,jhd->hd", weights / weights.sum(0), values))
        start_q, start_k = start_q + n_q, start_k + n_k
    return torch.stack(rows)


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients under a fixed random cotangent."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, inputs, cotangent)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float = EXACT) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone(window, index_dtype):
    q, k, v = operands()
    cu_q, cu_k = offsets(LEN_Q, index_dtype), offsets(LEN_K, index_dtype)
    out = jagged_attention(q, k, v, cu_q, cu_k, max(LEN_Q), max(LEN_K), window_size=window)
    expected = softmax_oracle(q, k, v, LEN_Q, LEN_K, DIM**-0.5, window)
    assert_same((out,), (expected,))
    assert_same(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))


def test_jagged_attention_with_bias_and_scale():
    q, k, v = operands()
    bias = torch.randn(HEADS, 40, 41, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = offsets(LEN_Q), offsets(LEN_K)
    out = jagged_attention(q, k, v, cu_q, cu_k, 40, 41, scale=0.7, window_size=(4, 2), bias=bias)
    expected = softmax_oracle(q, k, v, LEN_Q, LEN_K, 0.7, (4, 2), bias)
    assert_same((out,), (expected,))
    assert_same(gradients(out, (q, k, v, bias)), gradients(expected, (q, k, v, bias)))


@pytest.mark.parametrize("activation", sorted(reference.ACTIVATIONS))
def test_generalized_attention_activates_the_scaled_logits(activation):
    act = {
        "identity": lambda x: x,
        "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + torch.exp(-x)),
        "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
        "relu": lambda x: x.clamp(min=0),
    }[activation]
    q, k, v = operands()
    out = generalized_attention(q, k, v, offsets(LEN_Q), offsets(LEN_K), 33, 40, activation=activation, scale=0.3)
    parts, start_q, start_k = [], 0, 0
    for n_q, n_k in zip(LEN_Q, LEN_K, strict=True):
        logits = torch.einsum("ihd,jhd->hij", q[start_q : start_q + n_q], k[start_k : start_k + n_k])
        parts.append(torch.einsum("hij,jhd->ihd", act(0.3 * logits), v[start_k : start_k + n_k]))
        start_q, start_k = start_q + n_q, start_k + n_k
    expected = torch.cat(parts)
    assert_same((out,), (expected,), atol=64 * EXACT)  # unnormalised sums: weights up to |logit| ~ 10, 40 terms
    assert_same(gradients(out, (q, k, v)), gradients(expected, (q, k, v)), atol=64 * EXACT)


@pytest.mark.parametrize("block", [1, 4, 9, 64])
def test_block_attention_sees_its_own_block_only(block):
    q, k, v = operands(LEN_Q, LEN_Q)
    out = block_attention(q, k, v, offsets(LEN_Q), max(LEN_Q), block=block)
    split = tuple(min(block, n - start) for n in LEN_Q for start in range(0, n, block))
    expected = softmax_oracle(q, k, v, split, split, DIM**-0.5)
    assert_same((out,), (expected,))
    assert_same(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))


def test_second_derivatives_exist():
    q, k, v = operands((2, 0, 3), (1, 2, 3))
    cu_q, cu_k = offsets((2, 0, 3)), offsets((1, 2, 3))
    assert torch.autograd.gradgradcheck(lambda *x: jagged_attention(*x, cu_q, cu_k, 3, 3), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_cost_one_rounding_of_the_output(dtype):
    q, k, v = operands(dtype=dtype)
    out = jagged_attention(q, k, v, offsets(LEN_Q), offsets(LEN_K), 33, 40)
    expected = softmax_oracle(q, k, v, LEN_Q, LEN_K, DIM**-0.5)
    assert out.dtype == dtype
    # Half an ulp of the output, plus fp32 arithmetic: logits |q.k| <= ~10 carry (DIM + 2) 2^-24 each into an exponent,
    # twice that in a ratio of exponentials, and the weighted sum of at most 40 values below ~4 adds 40 2^-24.
    fp32 = (2 * 10 * (DIM + 2) + 40) * 2.0**-24 * float(v.detach().abs().max())
    bound = torch.finfo(dtype).eps / 2 * expected.abs() + fp32
    assert ((out.double() - expected).abs() <= bound).all()


def test_autocast_changes_no_bit():
    q, k, v = operands(dtype=torch.float32)
    args = (offsets(LEN_Q), offsets(LEN_K), 33, 40)
    plain = jagged_attention(q, k, v, *args), generalized_attention(q, k, v, *args)
    with torch.autocast("cpu", torch.bfloat16):
        cast = jagged_attention(q, k, v, *args), generalized_attention(q, k, v, *args)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_views_into_a_fused_buffer_equal_contiguous_copies():
    buffer = torch.randn(sum(LEN_Q), 3 * HEADS, DIM, dtype=torch.float64, requires_grad=True)
    q, k, v = buffer.chunk(3, dim=1)
    cu = offsets(LEN_Q)
    out = jagged_attention(q, k, v, cu, cu, 33, 33)
    copies = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    expected = jagged_attention(*copies, cu, cu, 33, 33)
    assert torch.equal(out, expected)
    cotangent = torch.randn(HEADS, sum(LEN_Q), DIM, dtype=torch.float64).transpose(0, 1)  # not contiguous
    (fused,) = torch.autograd.grad(out, buffer, cotangent)
    assert torch.equal(fused, torch.cat(torch.autograd.grad(expected, copies, cotangent), dim=1))


def test_equal_scores_over_many_keys_do_not_underflow():
    q, k = torch.ones(1, 1, 8), torch.ones(4096, 1, 8)
    v = torch.randn(4096, 1, 4)
    out = jagged_attention(q, k, v, offsets((1,)), offsets((4096,)), 1, 4096)
    torch.testing.assert_close(out[0, 0].double(), v.double().mean(0)[0], rtol=0, atol=4096 * 2.0**-24 * 4 / 64)


@pytest.mark.parametrize("scale", [80.0, -80.0])
def test_large_and_very_negative_logits_stay_exact(scale):
    q, k, v = operands()
    out = jagged_attention(q, k, v, offsets(LEN_Q), offsets(LEN_K), 33, 40, scale=scale)
    assert_same((out,), (softmax_oracle(q, k, v, LEN_Q, LEN_K, scale),), atol=1024 * EXACT)  # |logit| up to ~1000


@pytest.mark.parametrize("len_q, len_k", [((), ()), ((0, 0), (0, 0)), ((3, 1), (0, 0)), ((0, 0), (2, 5))])
def test_nothing_in_gives_zeros_out_and_zero_gradients(len_q, len_k):
    q, k, v = operands(len_q, len_k)
    for function in (jagged_attention, generalized_attention):
        out = function(q, k, v, offsets(len_q), offsets(len_k), 3, 5)
        assert out.shape == (sum(len_q), HEADS, DIM_V)
        assert not out.any()
        if out.requires_grad:
            grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
            assert not any(g.any() for g in grads if g is not None)


def test_a_nan_stays_in_its_own_sample():
    q, k, v = operands()
    start, end = offsets(LEN_K)[5:7].tolist()
    with torch.no_grad():
        v[start] = torch.nan
    out = jagged_attention(q, k, v, offsets(LEN_Q), offsets(LEN_K), 33, 40)
    bad = out.isnan().any(-1).any(-1).nonzero()[:, 0].tolist()
    start, end = offsets(LEN_Q)[5:7].tolist()
    assert bad == list(range(start, end))


@pytest.mark.parametrize("name", ["jagged_attention", "generalized_attention", "block_attention"])
def test_contract_and_reference_agree_on_names_and_defaults(name):
    public = inspect.signature(getattr(attention, name)).parameters.values()
    meaning = inspect.signature(getattr(reference, name)).parameters.values()
    shared = [(p.name, p.default) for p in public if p.name not in ("recipe", "backend")]  # not a backend's business
    assert shared == [(p.name, p.default) for p in meaning]


GOOD = {"cu_seq_q": [0, 2, 5], "cu_seq_k": [0, 4, 4], "max_q": 3, "max_k": 4}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"cu_seq_q": [0, 5, 3]}, ValueError, r"cu_seq_q\[2\] = 3 follows 5"),
        ({"cu_seq_q": [0, -1, 5]}, ValueError, r"cu_seq_q\[1\] = -1 follows 0"),
        ({"cu_seq_q": [1, 2, 5]}, ValueError, r"cu_seq_q\[0\] must be 0, got 1"),
        ({"cu_seq_k": [0, 4, 5]}, ValueError, r"cu_seq_k\[-1\] must equal the 4 packed rows, got 5"),
        ({"cu_seq_k": [0, 4]}, ValueError, "2 samples but cu_seq_k describes 1"),
        ({"cu_seq_q": []}, ValueError, r"must be \[batch \+ 1\]"),
        ({"max_q": 2}, ValueError, "sample 1 has 3 rows, more than max_q = 2"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size must be .* got \(-2, 0\)"),
        ({"bias": torch.zeros(2, 3, 4)}, ValueError, r"bias must be \[heads=3, >= max_q=3, >= max_k=4\]"),
        ({"recipe": "mxfp8_rceil"}, ValueError, "no recipe 'mxfp8_rceil'; the only one available is None"),
        ({"q": torch.zeros(5, 3, 8).long()}, TypeError, "q must be a floating-point tensor, got torch.int64"),
        ({"q": torch.zeros(5, 24)}, ValueError, r"q must be \[rows, heads, dim\], got shape \(5, 24\)"),
        ({"k": torch.zeros(4, 3, 9)}, ValueError, r"got \(5, 3, 8\), \(4, 3, 9\)"),
        ({"v": torch.zeros(4, 3, 8).half()}, TypeError, "q, k and v must share a dtype"),
    ],
)
def test_bad_input_is_named(change, error, message):
    given = {"q": torch.zeros(5, 3, 8), "k": torch.zeros(4, 3, 8), "v": torch.zeros(4, 3, 8), **GOOD, **change}
    given |= {name: torch.tensor(given[name], dtype=torch.int64) for name in ("cu_seq_q", "cu_seq_k")}
    with pytest.raises(error, match=message):
        jagged_attention(**given)


def test_offsets_must_be_integers_and_activation_and_block_known():
    x = torch.zeros(2, 1, 4)
    cu = torch.tensor([0, 2])
    with pytest.raises(TypeError, match="cu_seq_q must be an int32 or int64"):
        jagged_attention(x, x, x, cu.float(), cu, 2, 2)
    with pytest.raises(ValueError, match=r"unknown activation 'tanh'; choose one of"):
        generalized_attention(x, x, x, cu, cu, 2, 2, activation="tanh")
    with pytest.raises(ValueError, match="block must be at least 1 token, got 0"):
        block_attention(x, x, x, cu, 2, block=0)
    with pytest.raises(ValueError, match="self-attention: q has 2 rows but k has 1"):
        block_attention(x, x[:1], x[:1], cu, 2)


def test_samples_may_come_in_any_order():
    """Permuting the sequences permutes outputs and gradients with them."""
    q, k, v = operands()
    cu = offsets(LEN_Q), offsets(LEN_K)
    out = jagged_attention(q, k, v, *cu, 33, 40, window_size=(4, 3))
    order = torch.randperm(len(LEN_Q), generator=torch.Generator().manual_seed(3)).tolist()

    def rows(cu_seq):
        return torch.cat([torch.arange(cu_seq[i], cu_seq[i + 1]) for i in order])

    at_q, at_k = rows(cu[0]), rows(cu[1])
    moved = tuple(x.detach()[at].requires_grad_() for x, at in ((q, at_q), (k, at_k), (v, at_k)))
    len_q, len_k = (tuple(lengths[i] for i in order) for lengths in (LEN_Q, LEN_K))
    got = jagged_attention(*moved, offsets(len_q), offsets(len_k), 33, 40, window_size=(4, 3))
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    assert_same((got,), (out[at_q],))
    expected = torch.autograd.grad(out, (q, k, v), cotangent)
    grads = torch.autograd.grad(got, moved, cotangent[at_q])
    assert_same(grads, tuple(g[at] for g, at in zip(expected, (at_q, at_k, at_k), strict=True)))


# One less than, equal to and one more than the tiles of 64 and 128 that kernels use, and of block_attention's default.
AT_TILES = (63, 64, 65, 1, 127, 128, 129)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (63, 0), (64, 64)])
def test_lengths_around_tile_sizes(window):
    len_k = AT_TILES[::-1]  # so that query and key lengths meet a tile's edge from different sides
    q, k, v = operands(AT_TILES, len_k)
    out = jagged_attention(q, k, v, offsets(AT_TILES), offsets(len_k), 129, 129, window_size=window)
    expected = softmax_oracle(q, k, v, AT_TILES, len_k, DIM**-0.5, window)
    assert_same((out,), (expected,))
    assert_same(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))


def test_default_blocks_around_their_size():
    q, k, v = operands(AT_TILES, AT_TILES)
    out = block_attention(q, k, v, offsets(AT_TILES), 129)
    split = tuple(min(64, n - start) for n in AT_TILES for start in range(0, n, 64))
    expected = softmax_oracle(q, k, v, split, split, DIM**-0.5)
    assert_same((out,), (expected,))
    assert_same(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))


@pytest.mark.parametrize("shift", [-30000.0, 30000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_logits_are_all_far_from_zero(shift, dtype):
    """Softmax does not see a shift of a whole row: without subtracting the row's own maximum it would be 0/0 or
    Inf/Inf. Queries and keys are multiples of 2^-2, logits of 2^-6: exact beside the shift in float32 (ulp 2^-9)."""
    q, k, v = operands(dtype=dtype)
    with torch.no_grad():
        q.copy_((q * 2).round().clamp(-4, 4) / 4)
        k.copy_((k * 2).round().clamp(-4, 4) / 4)
    cu = offsets(LEN_Q), offsets(LEN_K)
    bias = torch.full((HEADS, 33, 40), shift)
    out = jagged_attention(q, k, v, *cu, 33, 40, scale=0.25, bias=bias)
    plain = jagged_attention(q, k, v, *cu, 33, 40, scale=0.25)
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients(out, (q, k, v)), gradients(plain, (q, k, v)), strict=True))
    assert out.any()


def honest(q, k, v, len_q, len_k):
    """Attention sample by sample in the dtype of the inputs, each operation rounded to it."""
    parts = []
    for a, b, c in zip(q.split(len_q), k.split(len_k), v.split(len_k), strict=True):
        logits = torch.einsum("ihd,jhd->hij", a, b) * DIM**-0.5
        parts.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), c))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_twice_those_of_the_honest_computation(dtype):
    """The rule of FlashAttention's tests: against fp64 on the same inputs, the largest error of outputs and gradients
    may be twice that of plain attention in the same dtype. Ours computes in fp32 inside, so it is far below."""
    len_q = len_k = (5, 33, 64, 1, 31, 65)
    q, k, v = operands(len_q, len_k, dtype=dtype)
    cu = offsets(len_q)
    ours = jagged_attention(q, k, v, cu, cu, 65, 65)
    plain = honest(q, k, v, len_q, len_k)
    wide = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    exact = honest(*wide, len_q, len_k)
    got, same_dtype = ((x, *gradients(x, (q, k, v))) for x in (ours, plain))
    # One cotangent for all: the one the low-precision runs got, widened.
    cotangent = torch.randn(exact.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    want = (exact, *torch.autograd.grad(exact, wide, cotangent.double()))
    for a, b, e in zip(got, same_dtype, want, strict=True):
        ours_error, honest_error = (a.double() - e).abs().max(), (b.double() - e).abs().max()
        # Half a unit in the last place is the error of the answer itself, which no computation avoids.
        assert ours_error <= 2 * honest_error + torch.finfo(dtype).eps / 2 * e.abs().max()


def test_backends_are_chosen_by_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend` reaches the dispatch table: the function found there runs, and its result comes back."""
    q, k, v = operands()
    cu_q, cu_k, longest = offsets(LEN_Q), offsets(LEN_K), max(*LEN_Q, *LEN_K)
    calls = {
        "jagged_attention": lambda b: jagged_attention(q, k, v, cu_q, cu_k, longest, longest, backend=b),
        "generalized_attention": lambda b: generalized_attention(q, k, v, cu_q, cu_k, longest, longest, backend=b),
        "block_attention": lambda b: block_attention(q, q, q, cu_q, longest, backend=b),
    }
    for op, call in calls.items():
        planted = torch.full((1,), 7.0)
        assert torch.equal(call("auto"), call("reference"))
        assert dispatch.chosen()[op, "cpu"] == "reference"
        with pytest.raises(RuntimeError, match=f"{op}: backend 'hopper' cannot run on cpu: no hopper kernel"):
            call("hopper")
        monkeypatch.setitem(dispatch._functions, (op, "reference"), lambda *args, planted=planted, **kw: planted)
        assert call("auto") is planted
