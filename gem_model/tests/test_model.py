"""The whole model: samples do not see each other, empty histories work, precision and names are as promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gem_model.config import CONFIGS, EmbeddingBagConfig, GEMConfig, get_config, tables_for_schema
from gem_model.data import Batch, EventStream, Schema, SparseFeature, StreamSpec
from gem_model.layers.basic import BlockNorm, Gating, RMSNorm
from gem_model.layers.heads import Tower
from gem_model.model import GEM
from gem_model.tests.batches import CONFIG, LENGTHS, SCHEMA, make_batch, select

# Another batch composition changes only the order of fp32 sums: O(1000) operations of 2^-24 on O(1) logits.
REORDERED = {"rtol": 0, "atol": 2.0**-14}

VARIANTS = {
    "default": {},
    "block": {"attention": "block", "block": 4},
    "layer-norm": {"norm": "layer", "activation": "silu", "gate": "tanh"},
    "experts": {"experts": ("wukong", "dcn"), "gate": "sigmoid", "dense_tokens": 2},
    "biases": {"bias": True, "head_hidden": ()},
    "comp-skip": {"comp_skip": True, "layers": 3},
    "one-layer": {"layers": 1, "recent_tokens": 1, "window": (-1, 0)},
}


ONE_STREAM = replace(SCHEMA, streams=SCHEMA.streams[:1])


def build(config: GEMConfig = CONFIG, schema: Schema = SCHEMA, seed: int = 0) -> GEM:
    torch.manual_seed(seed)
    return GEM(config, schema)


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> GEM:
    return build(replace(CONFIG, **VARIANTS[request.param]))


def test_permuting_samples_permutes_logits(variant):
    batch, order = make_batch(), [5, 2, 7, 0, 1, 6, 4, 3]
    torch.testing.assert_close(variant(select(batch, order)), variant(batch)[order], **REORDERED)


def test_a_sample_alone_has_the_logits_it_has_in_a_batch(variant):
    batch = make_batch()
    alone = torch.cat([variant(select(batch, [row])) for row in range(batch.batch_size)])
    torch.testing.assert_close(alone, variant(batch), **REORDERED)


def test_every_weight_gets_a_finite_gradient(variant):
    batch = make_batch()
    variant.loss(variant(batch), batch.labels).backward()
    for name, parameter in variant.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


def test_each_event_reaches_its_own_sample_only():
    model, batch = build(), make_batch()
    before = model(batch)
    events = batch.streams["views"]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), events.lengths.cumsum(0)])
    for row, length in enumerate(LENGTHS["views"]):
        for part, change in (("item_ids", 1), ("action_ids", 1), ("seconds_ago", 1e5)):
            changed = {name: getattr(events, name).clone() for name in EventStream.__slots__}
            if length == 0:
                continue
            at = starts[row]
            changed[part][at] = (changed[part][at] + change) % (11 if part == "item_ids" else 3 if change == 1 else 1e9)
            streams = {**batch.streams, "views": EventStream(**changed)}
            moved = (model(replace(batch, streams=streams)) - before).abs().amax(1) > 0
            assert moved.nonzero()[:, 0].tolist() == [row], part


@pytest.mark.parametrize("views, clicks", [((0, 0, 0), (0, 0, 0)), ((0, 2, 0), (0, 0, 0)), ((9,), (9,))])
def test_empty_histories_train(views, clicks):
    model, batch = build(), make_batch(lengths={"views": views, "clicks": clicks})
    logits = model(batch)
    model.loss(logits, batch.labels).backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_batch_of_no_samples_gives_no_logits():
    batch = make_batch(lengths={"views": (), "clicks": ()})
    assert build()(batch).shape == (0, 2)


def test_schemas_without_streams_dense_or_sparse_features():
    no_streams = replace(SCHEMA, streams=(), tasks=("click",))
    batch = make_batch(no_streams, {"": [0] * 4})
    model = build(schema=no_streams)
    assert model(batch).shape == (4, 1)
    assert not any("sequence" in name or "cls" in name for name, _ in model.named_parameters())
    no_dense = replace(SCHEMA, dense=())
    assert build(schema=no_dense)(make_batch(no_dense)).shape == (8, 2)
    with pytest.raises(ValueError, match="no sparse and no dense feature"):
        GEM(CONFIG, Schema(dense=(), sparse=()))


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not():
    batch = make_batch()

    def run(seed: int) -> Iterator[Tensor]:
        model = build(seed=seed)
        loss = model.loss(model(batch), batch.labels)
        loss.backward()
        return loss, *(p.grad for p in model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(run(1), run(1), strict=True))
    assert not torch.equal(run(1)[0], run(2)[0])


def test_initial_weights_have_the_stated_spread():
    model = build(replace(CONFIG, dim=64, fm_hidden=(256,)))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() >= 4096:
            # Standard deviation of n normal numbers: relative error 1 / sqrt(2 n); five of these.
            bound = 5 / (2 * module.weight.numel()) ** 0.5
            assert abs(module.weight.std() * module.in_features**0.5 - 1) < bound, name
    assert (
        abs(torch.cat([bag.weight.flatten() for bag in model.embedding.embedding_bags.values()]).std() - 0.01) < 0.001
    )
    assert all(not tower.prediction.bias.any() for tower in model.head.towers.values())


def test_a_model_built_on_meta_is_ready_after_reset():
    with torch.device("meta"):
        model = GEM(CONFIG, SCHEMA)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.reset_parameters()
    same = build(seed=9)
    torch.manual_seed(5)
    same.reset_parameters()
    assert torch.equal(model(make_batch()), same(make_batch()))


def test_only_prediction_layers_have_a_bias():
    with_bias = [name for name, _ in build().named_parameters() if name.endswith("bias")]
    assert with_bias == ["head.towers.click.prediction.bias", "head.towers.conversion.prediction.bias"]
    biased = build(replace(CONFIG, bias=True))
    assert any(name.endswith("qkv.bias") for name, _ in biased.named_parameters())


def test_all_weights_are_in_plain_linears_tables_and_seeds():
    model = build()
    owners = {type(module) for module in model.modules() for _ in module.named_parameters(recurse=False)}
    assert {owner.__name__ for owner in owners} == {"Linear", "EmbeddingBag", "AttentionPooling"}
    assert not list(model.buffers())


def test_autocast_keeps_norms_gates_and_logits_in_fp32():
    model, batch = build(), make_batch()
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockNorm | RMSNorm | Gating | Tower | nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: dtypes.__setitem__(name, out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
        loss = model.loss(logits, batch.labels)
    loss.backward()
    for name, module in model.named_modules():
        if name in dtypes:
            high = not isinstance(module, nn.Linear) or ".gate." in name or name.endswith(".prediction")
            assert dtypes[name] == (torch.float32 if high else torch.bfloat16), name
    assert logits.dtype == loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    # bf16 carries 2^-9 per linear; about 20 in a row on O(1) features move a logit by well under a tenth.
    assert (logits - model(batch)).abs().max() < 0.1


def test_the_model_learns_what_only_the_history_tells():
    """Label: was the last event's action 1? Nothing else carries it; entropy of a fair coin is 0.693."""
    schema = Schema(
        dense=(), sparse=(SparseFeature(name="item", num_embeddings=11),),
        streams=(StreamSpec(name="views", num_items=11, num_actions=2, item_feature="item"),), tasks=("click",),
    )  # fmt: skip
    model = build(replace(CONFIG, layers=1), schema)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(40):
        batch = make_batch(schema, {"views": [1 + (7 * i + step) % 9 for i in range(64)]}, seed=step)
        events = batch.streams["views"]
        labels = events.action_ids[events.lengths.cumsum(0) - 1].float()[:, None]
        optimizer.zero_grad()
        loss = model.loss(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.35


def dense_parameters(name: str) -> int:
    with torch.device("meta"):
        model = GEM(name, ONE_STREAM)
    return sum(p.numel() for n, p in model.named_parameters() if not n.startswith("embedding."))


@pytest.mark.parametrize("name, low, high", [("tiny", 1e6, 3e6), ("small", 3e7, 1e8), ("base", 5e8, 6e8)])
def test_named_sizes(name, low, high):
    assert low < dense_parameters(name) < high


def test_large_has_billions_and_its_linears_fit_mx_blocks():
    with torch.device("meta"):
        model = GEM("large", ONE_STREAM)
    dense = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert sum(m.weight.numel() for m in dense.values()) > 5e9
    for name, module in dense.items():
        if name.endswith((".mlp.0", ".keys", ".values", ".qkv", ".out", ".mask")) and not name.startswith("dense."):
            assert module.in_features % 32 == 0 and module.out_features % 32 == 0, name  # noqa: PT018


def test_default_tables_share_items_with_their_stream():
    tables = {table.name: table for table in tables_for_schema(CONFIG, SCHEMA)}
    assert tables["t_item"].feature_names == ("item", "views.items")
    assert set(tables) == {"t_item", "t_user", "t_genres", "t_views_actions", "t_clicks_items", "t_clicks_actions"}
    assert tables["t_clicks_items"].num_embeddings == 6


def table(**change: object) -> EmbeddingBagConfig:
    given = {"num_embeddings": 11, "embedding_dim": 32, "name": "t", "feature_names": ("item",)}
    return EmbeddingBagConfig(**{**given, **change})  # type: ignore[arg-type]


ONE = Schema(dense=(), sparse=(SparseFeature(name="item", num_embeddings=11),))


@pytest.mark.parametrize(
    "tables, message",
    [
        ((table(), table(name="u")), "'item' must be read from exactly one table, found 2"),
        ((), "'item' must be read from exactly one table, found 0"),
        ((table(num_embeddings=10),), "table 't' has 10 rows but feature 'item' needs 11"),
        ((table(feature_names=("item", "price")),), r"'t' names unknown features \['price'\]; known are \['item'\]"),
        ((table(embedding_dim=64),), "embedding_dim 64 must equal dim 32"),
    ],
)
def test_tables_must_fit_the_schema(tables, message):
    with pytest.raises(ValueError, match=message):
        GEM(replace(CONFIG, tables=tables), ONE)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dim": 48}, "dim must be a multiple of 32"),
        ({"heads": 3}, "dim = 32 must split into 3 heads"),
        ({"heads": 32}, "must split into 32 heads of an even width"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"activation": "relu6"}, "activation must be one of .* got 'relu6'"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"gate": "softmax"}, "gate must be one of"),
        ({"attention": "full"}, "attention must be one of"),
        ({"experts": ()}, "experts is empty"),
        ({"experts": ("wukong", "moe")}, "experts must be one of .* got 'moe'"),
        ({"window": (-2, 0)}, r"window must be .* got \(-2, 0\)"),
        ({"tau": 0.0}, "tau must be positive and finite, got 0.0"),
        ({"rotary_seconds": float("inf")}, "rotary_seconds must be positive"),
        ({"fm_hidden": (64, 0)}, r"fm_hidden must hold positive widths, got \(64, 0\)"),
    ],
)
def test_config_names_the_wrong_field(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_configs_and_tables_refuse_bad_names():
    with pytest.raises(ValueError, match=r"'tyni'; choose one of \['base', 'large', 'small', 'tiny'\]"):
        get_config("tyni")
    assert get_config("tiny", layers=3).layers == 3
    assert all(config.name == name and hash(config) for name, config in CONFIGS.items())
    with pytest.raises(ValueError, match="without dots"):
        table(name="a.b")
    with pytest.raises(ValueError, match="table 't' serves no feature"):
        table(feature_names=())
    with pytest.raises(ValueError, match=r"pooling must be one of \['mean', 'sum'\], got 'max'"):
        table(pooling="max")
    with pytest.raises(ValueError, match=r"one weight >= 0, .* \('click', 'conversion'\), got \(1.0,\)"):
        GEM(replace(CONFIG, task_weights=(1.0,)), SCHEMA)


def test_batches_that_do_not_fit_are_named():
    model, batch = build(), make_batch()
    long = make_batch(lengths={"views": (1, 10), "clicks": (0, 0)})
    with pytest.raises(ValueError, match=r"stream 'views', row 1: 10 events exceed max_history = 9"):
        model(long)
    with pytest.raises(ValueError, match=r"the batch lacks the features \['clicks'\]"):
        model(replace(batch, streams={"views": batch.streams["views"]}))
    with pytest.raises(ValueError, match="dense has 1 columns, the schema has 2"):
        model(replace(batch, dense=batch.dense[:, :1]))
    batch.streams["views"].item_ids[0] = 11
    with pytest.raises(ValueError, match=r"feature 'views.items': id 11 is outside table 't_item'"):
        model(batch)


def test_batch_helper_selects_whole_samples():
    batch: Batch = make_batch()
    assert torch.equal(select(batch, range(8)).sparse.values, batch.sparse.values)
    assert torch.equal(select(batch, range(8)).streams["clicks"].item_ids, batch.streams["clicks"].item_ids)
