"""Policies: which layer gets which recipe and why, what a description says of a model, and files."""

import copy
import csv
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import LastLinears, PrecisionPolicy, Rule, Shape, policies
from mxfp8.policy import decide
from mxfp8.recipe import HP, CastSpec, LinearRecipe
from mxfp8.rules import ModuleType, name_matches
from numerics_tests.policy_models import LINEARS, Block, Ranker, converted, recipes

# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("head", "head", True),
        ("head", "head.0.proj", True),
        ("head", "overhead", False),
        ("head", "heads", False),
        ("head", "blocks.head", False),
        ("head.*", "head", False),
        ("head.*", "head.0", True),
        ("head.*", "head.0.proj", True),
        ("head.*", "overhead.0", False),
        ("*.experts.*", "layers.0.interaction.experts.1.up", True),
        ("*.experts.*", "experts.1", False),
        ("*.experts.*", "layers.0.experts", False),
        ("*.experts.*", "layers.0.coexperts.1", False),
        ("**.experts", "experts.1", True),
        ("**.experts", "a.b.experts", True),
        ("*.gate*", "layers.0.gate_proj", True),
        ("*.gate*", "layers.0.aggregate", False),
        ("**.*_gate", "x_gate.linear", True),
        ("layers.*.proj", "layers.0.attn.proj", True),
        ("layers.?*.proj", "layers.0.attn.proj", False),
        ("layers.?*.proj", "layers.10.proj", True),
        ("layers.[01].proj", "layers.1.proj", True),
        ("layers.[01].proj", "layers.2.proj", False),
        ("Head", "head", False),
        ("*", "a.b", True),
        ("*", "", False),
        ("**", "", True),
    ],
)
def test_names_match_by_whole_components(pattern: str, name: str, expected: bool) -> None:
    assert name_matches(pattern, name) is expected


# --- deciding --------------------------------------------------------------------------------------------------------


def test_first_rule_wins_over_every_kind_of_target() -> None:
    recipe = LinearRecipe.from_operands(name="mine", wgrad=HP)
    policy = PrecisionPolicy(
        rules=[
            ("blocks.1.experts.0", "mxfp8_floor"),
            Rule("*.experts.*", recipe),
            (lambda module, name: name.endswith("down"), "mxfp8_square"),
            Rule(Shape(not_multiple_of=32), "bf16"),
            Rule(LastLinears(1), "bf16"),
            Rule(Block, "mxfp8_coalesced"),
        ],
        default="mxfp8_rceil",
    )
    model = mxfp8.convert(Ranker(), policy)
    expected = dict.fromkeys(LINEARS, "mxfp8_rceil")
    for b in (0, 1):
        expected[f"blocks.{b}.gate"] = "mxfp8_coalesced"
        expected[f"blocks.{b}.down"] = "mxfp8_square"
        expected[f"blocks.{b}.experts.0.0"] = expected[f"blocks.{b}.experts.1.0"] = "mine"
    expected["blocks.1.experts.0.0"] = "mxfp8_floor"
    expected["odd"] = expected["head.0"] = expected["head.2"] = "bf16"
    assert recipes(model) == expected
    assert model.blocks[0].experts[0][0].recipe == recipe


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(min_k=65), {"blocks.0.down", "blocks.1.down"}),
        (Shape(max_k=63), {"head.0"}),
        (Shape(min_n=65), {f"blocks.{b}.experts.{e}.0" for b in (0, 1) for e in (0, 1)}),
        (Shape(max_n=36), {"odd", "head.2"}),
        (Shape(max_n=36, min_k=64), {"odd", "head.2"}),
        (Shape(max_n=36, max_k=63), set()),
        (Shape(smaller_than=37), {"odd", "head.0", "head.2"}),
        (Shape(not_multiple_of=32), {"odd", "head.0", "head.2"}),
    ],
)
def test_shape_covers(shape: Shape, expected: set[str]) -> None:
    policy = PrecisionPolicy(rules=[Rule(shape, "mxfp8_rceil", required=False)], default="bf16")
    got = {d.name for d in decide(Ranker(), policy) if d.recipe is not None}
    assert got == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("haed.*", "bf16"), r"rule 1 \('haed\.\*' -> bf16\) covers nothing.*Closest: head"),
        (("blocks.0.gates", "bf16"), r"Closest: blocks\.0\.gate"),
        (("zzz", "bf16"), r"The model has: embedding; blocks; .*and \d+ more"),
        ((nn.EmbeddingBag, "bf16"), r"EmbeddingBag' -> bf16\) covers nothing.*Closest: Embedding"),
        ((Shape(min_k=4096), "mxfp8_rceil"), r"K=36 N=64"),
        ((lambda m, n: False, "bf16"), r"lambda.*covers nothing"),
        (("embedding", "mxfp8_rceil"), r"only modules that cannot be converted: embedding: only linear layers"),
    ],
)
def test_rule_without_effect_is_an_error_and_changes_nothing(rule: object, message: str) -> None:
    model = Ranker()
    before = list(model.modules())
    with pytest.raises(ValueError, match=message):
        mxfp8.convert(model, PrecisionPolicy(rules=[("overhead", "bf16"), rule]))
    assert [id(m) for m in model.modules()] == [id(m) for m in before]
    assert not any("_mxfp8_decision" in m.__dict__ for m in before)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rule("head", "mxfp9"), ValueError, "rule 'head': unknown recipe 'mxfp9'.*mxfp8_rceil.*bf16"),
        (lambda: Rule("head..x", "bf16"), ValueError, "empty component"),
        (lambda: Rule("", "bf16"), ValueError, "empty component"),
        (lambda: Rule(3, "bf16"), TypeError, "rule target is a int"),
        (lambda: Rule(int, "bf16"), TypeError, "not an nn.Module"),
        (lambda: Rule("head", 8), TypeError, "recipe is a int"),
        (lambda: Shape(), ValueError, "no condition"),
        (lambda: Shape(min_k=-1), ValueError, "Shape.min_k is -1"),
        (lambda: LastLinears(0), ValueError, "LastLinears.count is 0"),
        (lambda: PrecisionPolicy(default="fp8"), ValueError, "default: unknown recipe 'fp8'"),
        (lambda: PrecisionPolicy(rules=["head"]), TypeError, "rule 0 is 'head'"),
        (lambda: PrecisionPolicy(rules=[("a", "bf16"), ("b", "x")]), ValueError, "rule 1: rule 'b': unknown recipe"),
        (lambda: PrecisionPolicy(rules={"a": "bf16"}), TypeError, "use a list"),
        (lambda: mxfp8.convert(Ranker(), 3), TypeError, "policy is a int"),
        (lambda: mxfp8.convert([nn.Linear(32, 32)]), TypeError, "takes an nn.Module, not list"),
        (lambda: policies.recsys(min_dim=16), ValueError, "min_dim is 16"),
        (lambda: policies.recsys(last_layers=-1), ValueError, "last_layers is -1"),
    ],
)
def test_bad_input_says_what_to_do(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --- recsys ----------------------------------------------------------------------------------------------------------


def test_recsys_keeps_what_is_fragile_or_small_and_says_why() -> None:
    model = mxfp8.convert(Ranker(), policies.recsys(min_dim=64))
    assert converted(model) == {n for n in LINEARS if "experts" in n or "down" in n or n == "overhead"}
    why = {row.name: row.reason for row in mxfp8.describe(model).rows}
    assert "looked up, not multiplied" in why["embedding"]
    assert "sets the scale" in why["blocks.0.norm"]
    assert "multiplies whole features" in why["blocks.1.gate"]
    assert "prediction head" in why["head.0"]
    assert "not_multiple_of=32" in why["odd"]
    assert why["overhead"] == "default"


def test_recsys_min_dim_and_last_layers() -> None:
    body = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    assert converted(mxfp8.convert(copy.deepcopy(body), policies.recsys())) == {"1", "2"}
    assert converted(mxfp8.convert(copy.deepcopy(body), policies.recsys(last_layers=0))) == {"1", "2", "3"}
    assert converted(mxfp8.convert(copy.deepcopy(body), policies.recsys(last_layers=2, min_dim=32))) == {"0", "1"}
    mine = policies.recsys("mxfp8_square", rules=[("0", "mxfp8_rceil")])
    assert recipes(mxfp8.convert(body, mine)) == {
        "0": "mxfp8_rceil",
        "1": "mxfp8_square",
        "2": "mxfp8_square",
        "3": "bf16",
    }


@pytest.mark.parametrize("name", ["aggregate", "overhead", "navigate", "headroom", "prediction_free", "output_norm_in"])
def test_recsys_does_not_match_parts_of_words(name: str) -> None:
    outer = nn.Module()
    outer.body = nn.ModuleDict({name: nn.Linear(64, 64)})
    assert converted(mxfp8.convert(outer, policies.recsys(min_dim=32, last_layers=0))) == {f"body.{name}"}


@pytest.mark.parametrize(
    "name", ["gate", "gating", "x_gate", "gate0", "router", "head", "click_head", "heads", "classifier", "logits"]
)
def test_recsys_finds_gates_and_heads_at_any_depth(name: str) -> None:
    inner = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 64)), "body": nn.Linear(64, 64)})
    outer = nn.ModuleDict({"deep": nn.ModuleDict({"deeper": inner})})
    assert converted(mxfp8.convert(outer, policies.recsys(min_dim=32, last_layers=0))) == {"deep.deeper.body"}


def test_recsys_raises_where_nothing_is_left() -> None:
    with pytest.raises(
        ValueError, match=r"no layer would be converted.*overhead: rule \d+ shape smaller_than=1024: its casts"
    ):
        mxfp8.convert(Ranker(), policies.recsys())


def test_recsys_knows_what_does_not_pay_on_a_gpu() -> None:
    body = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 512), nn.Linear(512, 1024), nn.Linear(1024, 2048))
    fast = policies.recsys("mxfp8_coalesced", gpu="hopper", last_layers=0)
    why = {row.name: (row.precision, row.reason) for row in mxfp8.describe(body, fast).rows}
    assert [why[name][0] for name in "0123"] == ["bf16", "bf16", "bf16", "mxfp8_coalesced"]
    assert "casts would cost more than its products save" in why["1"][1]
    assert fast == policies.recsys("mxfp8_coalesced", last_layers=0), "a GPU decides whether, not what"
    for recipe in ("mxfp8_rceil", "mxfp8_square", "mxfp8_robust", "mxfp8_rceil_wgrad_with_hp"):
        assert policies.pays_from(recipe, "hopper") is None
        with pytest.raises(ValueError, match=f"recipe '{recipe}' makes no layer faster on hopper"):
            policies.recsys(recipe, gpu="hopper")
    with pytest.raises(ValueError, match="gpu is 'ampere': layers were timed on hopper only"):
        policies.recsys(gpu="ampere")


def test_what_pays_is_what_was_measured(repo_root: Path) -> None:
    """The committed rows of bench.linear do not contradict ``pays_from``; if new ones do, change it there."""
    with (repo_root / "bench" / "results" / "h200" / "linear.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["baseline"] == "bf16" and row["metric"] == "time"]
    recipe_of = {"coalesced": "mxfp8_coalesced", "small": "mxfp8_coalesced", "square": "mxfp8_square",
                 "exact": "mxfp8_rceil"}  # fmt: skip
    checked = 0
    for row in rows:
        if row["case"] in recipe_of:
            pays = policies.pays_from(recipe_of[row["case"]], "hopper")
            width = int(row["shape"].split("x")[1])
            ratio = float(row["ratio"])
            assert ratio >= 1.0 if pays is not None and width >= pays else ratio < 1.1, row
            checked += 1
    assert checked >= 9


# --- describing ------------------------------------------------------------------------------------------------------


def test_describe_counts_parameters_and_flops() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 32, bias=False))
    mxfp8.convert(
        model,
        PrecisionPolicy(
            rules=[
                (
                    "2",
                    "bf16",
                )
            ]
        ),
    )
    got = mxfp8.describe(model)
    assert [(r.name, r.precision, r.parameters, r.flops) for r in got.rows] == [
        ("0", "mxfp8_rceil", 64 * 128 + 128, 2 * 64 * 128),
        ("1", "bf16", 256, 0),
        ("2", "bf16", 128 * 32, 2 * 128 * 32),
    ]
    total = got.totals["mxfp8_rceil"]
    assert (total.layers, total.parameters, total.flops_frac) == (1, 8320, 8192 / 12288)
    assert got.totals["bf16"].parameters_frac == (256 + 4096) / (8320 + 256 + 4096)
    json.dumps(got.to_dict())
    text = str(got)
    assert "rule 0 '2'" in text
    assert "66.7 % of GEMM FLOPs" in text
    assert "8,320" in text


class PooledOnce(nn.Module):
    """Its first layer sees every token, its second one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.pooled, self.unused = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.pooled(self.drop(self.norm(self.token(input=x).mean(1))))
        return out


def test_describe_weighs_flops_by_real_rows_and_leaves_the_model_alone() -> None:
    model = mxfp8.convert(PooledOnce(), PrecisionPolicy(rules=[("pooled", "bf16")]))
    model.drop.eval()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    got = mxfp8.describe(model, example_inputs=(torch.randn(3, 7, 32),))
    torch.set_rng_state(rng)
    assert {r.name: r.rows for r in got.rows if r.flops or r.name == "unused"} == {
        "token": 21,
        "pooled": 3,
        "unused": 0,
    }
    assert got.totals["mxfp8_rceil"].flops_frac == 21 / 24
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert model.training
    assert model.norm.training
    assert not model.drop.training
    assert not any(m._forward_pre_hooks for m in model.modules())
    by_hand = mxfp8.describe(model, rows={"token": 21, "pooled": 3, "unused": 0})
    assert by_hand.totals == got.totals
    with pytest.raises(ValueError, match="rows names 'tokens'"):
        mxfp8.describe(model, rows={"tokens": 1})


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_have_no_size_yet_and_convert_once_they_do() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 32))
    mxfp8.convert(model)
    assert next((r.type, r.shape, r.parameters) for r in mxfp8.describe(model).rows) == ("LazyLinear", (), 0)
    model(torch.randn(2, 96))
    assert converted(mxfp8.convert(model)) == {"0", "1"}


def test_describe_is_a_dry_run_with_a_policy() -> None:
    model = Ranker()
    policy = policies.recsys(min_dim=64)
    plan = mxfp8.describe(model, policy)
    assert converted(model) == set()
    assert {r.reason for r in mxfp8.describe(model).rows if r.type == "Linear"} == {"not converted"}
    mxfp8.convert(model, policy)
    done = mxfp8.describe(model)
    assert [(r.name, r.precision, r.reason) for r in plan.rows] == [(r.name, r.precision, r.reason) for r in done.rows]
    assert [(r.name, r.precision, r.reason) for r in mxfp8.describe(copy.deepcopy(model)).rows] == [
        (r.name, r.precision, r.reason) for r in done.rows
    ]


# --- files -----------------------------------------------------------------------------------------------------------

CUSTOM = LinearRecipe.from_operands(name="mine", weight=CastSpec(block=(32, 32)), wgrad=HP, seed=7)
FULL = PrecisionPolicy(
    rules=[
        Rule("head.*", "bf16", reason="because: it's the head"),
        Rule(nn.Embedding, required=False),
        Rule(Shape(smaller_than=64, min_n=8), CUSTOM),
        Rule(LastLinears(2), "mxfp8_square"),
    ],
    default=CUSTOM,
    name="mine",
)


@pytest.mark.parametrize("policy", [FULL, PrecisionPolicy(), policies.recsys(CUSTOM, min_dim=64)])
def test_json_and_yaml_round_trip(policy: PrecisionPolicy) -> None:
    assert PrecisionPolicy.from_json(policy.to_json()) == policy
    assert PrecisionPolicy.from_yaml(policy.to_yaml()) == policy
    assert hash(PrecisionPolicy.from_json(policy.to_json())) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, default="bf16").rules == policy.rules


def test_hand_written_yaml() -> None:
    text = """
    default: mxfp8_rceil
    rules:
      - {target: head.*, recipe: bf16, reason: calibrated}
      - {target: {type: Embedding}, recipe: bf16}
      - {target: {shape: {smaller_than: 64}}, recipe: bf16}
    """
    expected = [Rule("head.*", reason="calibrated"), Rule(ModuleType("Embedding")), Rule(Shape(smaller_than=64))]
    assert PrecisionPolicy.from_yaml(text) == PrecisionPolicy(rules=expected)
    assert ModuleType("Embedding").covers(nn.Embedding)
    assert not ModuleType("Embedding").covers(nn.EmbeddingBag)


def test_function_cannot_be_saved() -> None:
    def wide(module: nn.Module, name: str) -> bool:
        return True

    with pytest.raises(ValueError, match=r"rule 1 .*wide.*function as target and cannot be saved"):
        PrecisionPolicy(rules=[("head", "bf16"), (wide, "bf16")]).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{target: head}]", "rule 0: field 'recipe' is missing"),
        ("rules: [{target: head, recipe: bf16, why: x}]", "rule 0: unknown field 'why'; known:"),
        ("rules: [{target: head, recipe: bf17}]", "rule 0: unknown recipe 'bf17'"),
        ("rules: [{target: {shape: {min: 3}}, recipe: bf16}]", "rule 0, shape: unknown field 'min'"),
        ("rules: [{target: {kind: x}, recipe: bf16}]", "rule 0: target is"),
        ("rules: [{target: head, recipe: {nam: x}}]", "rule 0, recipe: recipe: unknown field 'nam'"),
        ("rules: [head]", "rule 0 is 'head'"),
        ("defaults: bf16", "policy: unknown field 'defaults'"),
        ("[1, 2]", "a policy is a mapping"),
        ("rules: [", "not YAML"),
    ],
)
def test_bad_file_names_the_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy.from_yaml(text)
