"""Each layer against its equation, written out with loops or plain matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.config import EmbeddingBagConfig
from gem_model.data import JaggedTensor
from gem_model.layers.basic import EPS, BlockNorm, Gating, PlainLayerNorm, RMSNorm, TokenMix, mlp
from gem_model.layers.embedding import DenseTokens, EmbeddingTables, EventTokens, time_features
from gem_model.layers.experts import InteractionExperts
from gem_model.layers.heads import multi_task_loss
from gem_model.layers.interaction import CrossExpert, FactorizationMachineBlock, WukongExpert
from gem_model.layers.sequence import (
    PFFN,
    AttentionPooling,
    Layout,
    SelfAttention,
    SequenceSummary,
    rotary_phases,
    rotate,
)
from gem_model.tests.batches import CONFIG, SCHEMA, make_batch

# fp32 against the same formula in another order: O(100) operations on O(1) numbers, each 2^-24 relative.
CLOSE = {"rtol": 2.0**-16, "atol": 2.0**-16}


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("width", [1, 32, 256, 384, 512, 700])
def test_block_norm_is_rms_over_blocks_of_256(width):
    x = torch.randn(3, width, dtype=torch.float64) * torch.arange(1, width + 1)
    expected = torch.cat([rms(part) for part in x.split(256, dim=-1)], dim=-1)
    torch.testing.assert_close(BlockNorm()(x.float()).double(), expected, **CLOSE)


@pytest.mark.parametrize("norm", [BlockNorm(block=8), RMSNorm(), PlainLayerNorm()])
def test_norm_gradients(norm):
    x = torch.randn(4, 24, requires_grad=True)
    cotangent = torch.randn(4, 24)
    exact = x.detach().double().requires_grad_()
    if isinstance(norm, PlainLayerNorm):
        centred = exact - exact.mean(-1, keepdim=True)
        expected = rms(centred)
    elif isinstance(norm, RMSNorm):
        expected = rms(exact)
    else:
        expected = torch.cat([rms(part) for part in exact.split(8, dim=-1)], dim=-1)
    torch.testing.assert_close(norm(x).double(), expected, **CLOSE)
    (grad,) = torch.autograd.grad(norm(x), x, cotangent)
    (exact_grad,) = torch.autograd.grad(expected, exact, cotangent.double())
    torch.testing.assert_close(grad.double(), exact_grad, **CLOSE)


def test_norms_return_fp32_and_have_no_parameters():
    for norm in (BlockNorm(), RMSNorm(), PlainLayerNorm()):
        assert not list(norm.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.float32
        zero = torch.zeros(1, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(norm(zero).sum(), zero)
        assert torch.isfinite(grad).all()


def test_mlp_with_hardswish_is_x_relu6():
    torch.manual_seed(1)
    layers = mlp((5, 7, 3), "hardswish", bias=False)
    first, last = (layer.weight for layer in layers if isinstance(layer, nn.Linear))
    hidden = 4 * torch.randn(6, 5) @ first.T
    expected = (hidden * (hidden + 3).clamp(0, 6) / 6) @ last.T
    torch.testing.assert_close(layers[1:](hidden), expected, **CLOSE)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Hardswish, nn.Linear]


@pytest.mark.parametrize("function", ["identity", "tanh", "sigmoid"])
def test_gate_is_sigma_of_x_times_mlp_and_stays_fp32(function):
    gate = Gating(8, function, bias=False)
    x = torch.randn(2, 3, 8)
    sigma = {"identity": lambda y: y, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[function]
    expected = sigma(x * (x @ gate.linear.weight.T))
    torch.testing.assert_close(gate(x), expected, **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(gate(x), expected, **CLOSE)  # also checks the dtype


def test_token_mix_is_w_x():
    mix = TokenMix(5, 3, bias=False)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(mix(x), mix.linear.weight @ x, **CLOSE)


def test_factorization_machine_is_x_xt_y():
    block = FactorizationMachineBlock(6, CONFIG)
    x, y = torch.randn(3, 6, CONFIG.dim), block.project.weight.T  # y [n, k]
    naive = torch.zeros(3, 6, CONFIG.fm_rank)
    for b in range(3):
        for i in range(6):
            for j in range(6):
                naive[b, i] += x[b, i].dot(x[b, j]) * y[j].detach()
    torch.testing.assert_close(block.interact(x), naive, rtol=1e-4, atol=1e-4)  # sums of 6 x 32 products, |x|^2 ~ 32
    out = block(x)
    expected = block.mlp(rms(naive.flatten(1))).view(3, CONFIG.fm_tokens, CONFIG.dim)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_wukong_expert_concatenates_fmb_and_lcb():
    expert = WukongExpert(6, CONFIG)
    x = torch.randn(3, 6, CONFIG.dim)
    out = expert(x)
    assert torch.equal(out[:, : CONFIG.fm_tokens], expert.fmb(x))
    torch.testing.assert_close(out[:, CONFIG.fm_tokens :], expert.lcb.linear.weight @ x, **CLOSE)


def test_cross_expert_is_low_rank_dcn():
    expert = CrossExpert(6, CONFIG)
    x = torch.randn(3, 6, CONFIG.dim)
    flat = x.flatten(1)
    crossed = flat * (flat @ (expert.up.weight @ expert.down.weight).T) + flat
    torch.testing.assert_close(expert(x), expert.compress.linear.weight @ crossed.view_as(x), **CLOSE)


@pytest.mark.parametrize("tokens", [6, CONFIG.interaction_tokens])
def test_experts_are_summed_with_the_shortcut_and_normed(tokens):
    experts = InteractionExperts(tokens, replace(CONFIG, experts=("wukong", "dcn", "wukong")))
    x = torch.randn(3, tokens, CONFIG.dim)
    shortcut = x if tokens == CONFIG.interaction_tokens else experts.shortcut.linear.weight @ x
    expected = rms(shortcut + sum(expert(x) for expert in experts.experts))
    torch.testing.assert_close(experts(x), expected, **CLOSE)
    assert [type(e) for e in experts.experts] == [WukongExpert, CrossExpert, WukongExpert]


def tables(sparse_grad: bool = False) -> EmbeddingTables:
    shared = EmbeddingBagConfig(num_embeddings=11, embedding_dim=32, name="t", feature_names=("item", "views.items"))
    other = EmbeddingBagConfig(num_embeddings=5, embedding_dim=32, name="g", feature_names=("genres",), pooling="mean")
    user = EmbeddingBagConfig(num_embeddings=7, embedding_dim=32, name="u", feature_names=("user", "views.actions"))
    return EmbeddingTables((shared, other, user), sparse_grad)


def test_pooling_multi_hot_and_empty_lists_and_shared_tables():
    embedding, batch = tables(), make_batch()
    pooled = embedding.pooled(batch.sparse, ("item", "genres"))
    genres: JaggedTensor = batch.sparse["genres"]
    offsets, weight = genres.offsets().tolist(), embedding.embedding_bags["g"].weight
    for row in range(batch.batch_size):
        ids = genres.values[offsets[row] : offsets[row + 1]].tolist()
        expected = sum(weight[i] for i in ids) / len(ids) if ids else torch.zeros(32)
        torch.testing.assert_close(pooled[row, 1], expected, **CLOSE)
    assert torch.equal(pooled[:, 0], embedding.embedding_bags["t"].weight[batch.sparse["item"].values])
    assert embedding.bag("item") is embedding.bag("views.items")
    assert set(embedding.state_dict()) == {f"embedding_bags.{name}.weight" for name in "tgu"}


def test_sparse_and_dense_table_gradients_agree():
    batch, grads = make_batch(), []
    for sparse_grad in (False, True):
        torch.manual_seed(3)
        embedding = tables(sparse_grad)
        rows = embedding.rows("views.items", batch.streams["views"].item_ids)
        (embedding.pooled(batch.sparse, ("item",)).square().sum() + rows.square().sum()).backward()
        grads.append(embedding.embedding_bags["t"].weight.grad)
    assert grads[1].is_sparse
    torch.testing.assert_close(grads[1].to_dense(), grads[0], **CLOSE)


def test_dense_tokens_are_an_mlp_of_the_numbers():
    dense = DenseTokens(2, replace(CONFIG, dense_tokens=3))
    x = torch.randn(4, 2)
    first, last = dense.mlp[0].weight, dense.mlp[2].weight
    torch.testing.assert_close(dense(x), (F.hardswish(x @ first.T) @ last.T).view(4, 3, CONFIG.dim), **CLOSE)


def test_event_tokens_are_masknet_of_the_three_parts():
    embedding, events = tables(), make_batch().streams["views"]
    part = EventTokens("views", CONFIG)
    embedded = embedding.embedding_bags["t"].weight[events.item_ids] + embedding.bag("user").weight[events.action_ids]
    e = rms(embedded + 0.05 * time_features(events.seconds_ago, 32))
    expected = (e * (e @ part.mask.weight.T)) @ part.compress.weight.T
    torch.testing.assert_close(part(embedding, events), expected, rtol=1e-4, atol=1e-4)


def test_time_features_are_bounded_and_tell_seconds_from_years():
    features = time_features(torch.tensor([0.0, 1.0, 60.0, 86400.0, 3e7, 9e8]), 32)
    assert features.shape == (6, 32)
    torch.testing.assert_close(features.square().mean(1), torch.ones(6), **CLOSE)
    distance = torch.cdist(features, features) + 10 * torch.eye(6)
    assert distance.min() > 1.1  # a tenth of the largest possible distance, 2 sqrt(32)


def layout(lengths=(4, 0, 1, 7), seconds: Tensor | None = None) -> Layout:
    seconds = torch.rand(sum(lengths)) * 1e5 if seconds is None else seconds
    return Layout.build(torch.tensor(lengths, dtype=torch.int64), seconds, CONFIG)


def test_layout_appends_cls_tokens_to_each_sample():
    lengths = (4, 0, 1, 7)
    where = layout(lengths)
    events = torch.arange(12.0)[:, None].expand(12, 3)
    cls_tokens = 100 + torch.arange(8.0).view(4, 2, 1).expand(4, 2, 3)
    expected = [0, 1, 2, 3, 100, 101, 102, 103, 4, 104, 105, 5, 6, 7, 8, 9, 10, 11, 106, 107]
    assert where.pack(events, cls_tokens)[:, 0].tolist() == expected
    assert where.cu_seq.tolist() == [0, 6, 8, 11, 20]
    assert where.max_len == 9
    rows, valid = where.picked_rows.tolist(), where.picked_valid[..., 0].tolist()
    picked = [[expected[rows[b][i]] for i in range(5) if valid[b][i]] for b in range(4)]
    assert picked == [[100, 101, 1, 2, 3], [102, 103], [104, 105, 4], [106, 107, 9, 10, 11]]
    now = [row for row, value in enumerate(expected) if value >= 100]
    assert torch.equal(where.phases[now], torch.ones_like(where.phases[now]))


def test_rotary_keeps_norms_and_depends_on_the_ratio_of_times_only():
    x, y = torch.randn(1, 2, 16), torch.randn(1, 2, 16)

    def at(seconds: float) -> Tensor:
        return rotary_phases(torch.tensor([seconds]), CONFIG)

    torch.testing.assert_close(rotate(x, at(1e6)).norm(dim=-1), x.norm(dim=-1), **CLOSE)
    torch.testing.assert_close(rotate(x, at(0.0)), x, **CLOSE)
    # log(1 + dt / 60) of these pairs differ by the same amount: (dt + 60) doubles in both.
    near = (rotate(x, at(60.0)) * rotate(y, at(0.0))).sum(-1)
    far = (rotate(x, at(7140.0)) * rotate(y, at(3540.0))).sum(-1)
    torch.testing.assert_close(near, far, **CLOSE)
    assert not torch.allclose(near, (x * y).sum(-1), atol=1e-2)
    assert rotate(x.bfloat16(), at(60.0)).dtype == torch.bfloat16


@pytest.mark.parametrize("norm", ["block", "layer"])
def test_pffn_follows_the_gdpa_block_order(norm):
    config = replace(CONFIG, norm=norm, tau=3.0, pffn_activation="silu")
    pffn, where = PFFN(config), layout()
    tokens, x_sum = torch.randn(20, config.dim), torch.randn(4, config.summary_tokens, config.dim)
    keys = (x_sum.flatten(1) @ pffn.keys.weight.T).view(4, config.pffn_tokens, config.heads, config.head_dim)
    values = (x_sum.flatten(1) @ pffn.values.weight.T).view(4, config.pffn_tokens, config.heads, config.head_dim)
    for b in range(4):
        rows = slice(*where.cu_seq[b : b + 2].tolist())
        q = rms(tokens[rows]) if norm == "block" else F.layer_norm(tokens[rows], (config.dim,), eps=EPS)
        heads = q.view(-1, config.heads, config.head_dim)
        p = F.silu(torch.einsum("ihd,jhd->hij", heads, keys[b]) / 3.0)
        g = torch.einsum("hij,jhd->ihd", p, values[b]).flatten(1) + q
        torch.testing.assert_close(pffn(tokens, x_sum, where)[rows], rms(g) + tokens[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["window", "block"])
def test_self_attention_of_each_sample_alone(attention):
    config = replace(CONFIG, attention=attention, window=(2, 1), block=4)
    layer, where = SelfAttention(config), layout()
    tokens = torch.randn(20, config.dim)
    out = layer(tokens, where)
    for b in range(4):
        rows = torch.arange(*where.cu_seq[b : b + 2].tolist())
        at = torch.arange(len(rows))
        qkv = (rms(tokens[rows]) @ layer.qkv.weight.T).view(len(rows), 3, config.heads, config.head_dim)
        q, k = (rotate(qkv[:, i], where.phases[rows]) for i in (0, 1))
        logits = torch.einsum("ihd,jhd->hij", q, k) / config.head_dim**0.5
        distance = at[None, :] - at[:, None]
        seen = (distance >= -2) & (distance <= 1) if attention == "window" else at[None] // 4 == at[:, None] // 4
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, qkv[:, 2]).flatten(1)
        torch.testing.assert_close(out[rows], tokens[rows] + attended @ layer.out.weight.T, rtol=1e-4, atol=1e-4)


def test_attention_pooling_is_multi_head_attention_with_folded_maps():
    """Multi-head attention with query, key, value and output maps gives what the folded form gives."""
    pool, where = AttentionPooling(CONFIG), layout()
    heads, dim, width = CONFIG.heads, CONFIG.dim, CONFIG.head_dim
    tokens, seeds = torch.randn(20, dim), torch.randn(CONFIG.pma_tokens, dim)
    w_q, w_k, w_v, w_o = (torch.randn(dim, dim) / dim**0.5 for _ in range(4))
    with torch.no_grad():
        q = (seeds @ w_q.T).view(-1, heads, width)
        folded = torch.einsum("phw,hwd->phd", q, w_k.view(heads, width, dim))
        pool.seeds.copy_(folded.flatten(0, 1) * (dim / width) ** 0.5)  # pooling scales by 1/sqrt(dim), not head width
        value_out = torch.einsum("ohw,hwd->ohd", w_o.view(dim, heads, width), w_v.view(heads, width, dim))
        pool.out.weight.copy_(value_out.reshape(dim, heads * dim))
    out = pool(tokens, where)
    for b in range(4):
        rows = tokens[where.cu_seq[b] : where.cu_seq[b + 1]]
        k, v = ((rows @ w.T).view(-1, heads, width) for w in (w_k, w_v))
        weights = (torch.einsum("phw,jhw->hpj", q, k) / width**0.5).softmax(-1)
        expected = torch.einsum("hpj,jhw->phw", weights, v).flatten(1) @ w_o.T
        torch.testing.assert_close(out[b], expected, rtol=1e-4, atol=1e-4)


def test_sequence_summary_is_the_gate_of_cls_pma_and_recent():
    summary, where = SequenceSummary(CONFIG), layout()
    nn.init.normal_(summary.pma.seeds)
    tokens = torch.randn(20, CONFIG.dim)
    pooled = summary.pma(tokens, where)
    for b, n in enumerate((4, 0, 1, 7)):
        rows = tokens[where.cu_seq[b] : where.cu_seq[b + 1]]
        recent = torch.zeros(3, CONFIG.dim)
        recent[3 - min(n, 3) :] = rows[max(n - 3, 0) : n]
        x = rms(torch.cat([rows[n:], pooled[b], recent]))
        expected = rms(x * (x @ summary.gate.linear.weight.T))
        torch.testing.assert_close(summary(tokens, where)[b], expected, **CLOSE)


def test_multi_task_loss_is_weighted_cross_entropy():
    logits, labels = torch.randn(5, 2, dtype=torch.float64), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]])
    p = 1 / (1 + (-logits).exp())
    entropy = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean(0)
    expected = (3 * entropy[0] + entropy[1]) / 4
    with torch.autocast("cpu", torch.bfloat16):
        loss = multi_task_loss(logits.float(), labels.float(), (3, 1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, **CLOSE)
    torch.testing.assert_close(multi_task_loss(logits, labels).double(), entropy.mean(), **CLOSE)
    # Far out, where a sigmoid would round to 0 or 1.
    assert multi_task_loss(torch.tensor([[200.0]]), torch.tensor([[0.0]])) == 200
    with pytest.raises(ValueError, match=r"logits \(5, 2\) and labels \(5, 1\) must both be"):
        multi_task_loss(logits, labels[:, :1])
    with pytest.raises(ValueError, match="empty batch"):
        multi_task_loss(logits[:0], labels[:0])


def test_ids_out_of_range_name_feature_and_table():
    embedding, batch = tables(), make_batch()
    schema = replace(SCHEMA, streams=SCHEMA.streams[:1])
    batch.streams["views"].action_ids[2] = 2
    embedding.check_ids(batch, schema)
    batch.streams["views"].item_ids[5] = 11
    with pytest.raises(ValueError, match=r"feature 'views.items': id 11 is outside table 't', whose ids are 0 to 10"):
        embedding.check_ids(batch, schema)
    batch.streams["views"].item_ids[5] = 0
    batch.sparse["genres"].values[0] = -1
    with pytest.raises(ValueError, match=r"feature 'genres': id -1 is outside table 'g', whose ids are 0 to 4"):
        embedding.check_ids(batch, schema)
