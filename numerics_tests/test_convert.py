"""Converting a model: what changes, what stays the same object, and what is left with its reason."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import MXFP8Linear, PrecisionPolicy
from numerics_tests.policy_models import LINEARS, Ranker, converted, recipes


def test_parameters_hooks_and_modes_are_the_same_objects() -> None:
    model = Ranker()
    model.blocks[0].eval()
    model.overhead.weight.requires_grad_(False)
    seen = []
    model.overhead.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    assert mxfp8.convert(model) is model
    assert converted(model) == set(LINEARS)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert list(model.state_dict()) == state
    assert not model.blocks[0].down.training
    assert model.blocks[1].down.training
    assert not model.overhead.weight.requires_grad
    model(torch.tensor([[1, 2, 3]]))
    assert seen == [(1, 3, 64)]
    assert {n: m.fqn for n, m in model.named_modules() if isinstance(m, MXFP8Linear)} == {n: n for n in LINEARS}


def test_twice_is_a_no_op_and_another_policy_takes_over() -> None:
    model = mxfp8.convert(Ranker(), "mxfp8_rceil")
    ids, text = {n: id(m) for n, m in model.named_modules()}, str(mxfp8.describe(model))
    mxfp8.convert(model, "mxfp8_rceil")
    assert {n: id(m) for n, m in model.named_modules()} == ids
    assert str(mxfp8.describe(model)) == text

    x = torch.randn(5, 64)
    fresh = MXFP8Linear.from_linear(nn.Linear(64, 64), "mxfp8_floor")
    fresh.weight, fresh.bias = model.overhead.weight, model.overhead.bias
    before = model.overhead(x)
    mxfp8.convert(model, PrecisionPolicy(rules=[("head.*", "bf16")], default="mxfp8_floor"))
    assert torch.equal(model.overhead(x), fresh(x))
    assert not torch.equal(model.overhead(x), before)
    assert type(model.head[0]) is nn.Linear
    assert type(model.head[2]) is nn.Linear
    y = torch.randn(4, 36)
    assert torch.equal(model.head[0](y), nn.functional.linear(y, model.head[0].weight, model.head[0].bias))
    assert {type(m) for m in mxfp8.convert(model, "bf16").modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_state_dict_loads_strictly_both_ways() -> None:
    plain, other = Ranker(), mxfp8.convert(Ranker(), PrecisionPolicy(rules=[("head", "bf16")]))
    other.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), plain.state_dict().values(), strict=True))
    with torch.no_grad():
        other.overhead.weight.add_(1.0)
    plain.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(plain.overhead.weight, other.overhead.weight)


def test_root_linear_is_returned_new() -> None:
    linear = nn.Linear(64, 32)
    out = mxfp8.convert(linear)
    assert isinstance(out, MXFP8Linear)
    assert out.weight is linear.weight
    assert type(linear) is nn.Linear
    assert mxfp8.convert(out) is out
    assert type(mxfp8.convert(out, "bf16")) is nn.Linear


class TinyLM(nn.Module):
    """The Hugging Face way of tying: keys listed, `tie_weights` called after loading, getters for both ends."""

    _tied_weights_keys = ("lm_head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(96, 64)
        self.layer = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 96, bias=False)
        self.tie_weights()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def tie_weights(self) -> None:
        self.get_output_embeddings().weight = self.get_input_embeddings().weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.layer(self.embed_tokens(ids)))
        return out


def test_tied_weights_stay_tied_through_training_and_copies() -> None:
    model = mxfp8.convert(TinyLM())
    assert isinstance(model.lm_head, MXFP8Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 96, (4, 8))
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), mxfp8.convert(model, "bf16")):
        assert each.lm_head.weight is each.embed_tokens.weight
    TinyLM().load_state_dict(model.state_dict(), strict=True)
    model.tie_weights()
    rows = {row.name: row for row in mxfp8.describe(model).rows}
    assert (rows["lm_head"].parameters, rows["lm_head"].tied_to) == (0, "embed_tokens.weight")
    assert sum(row.parameters for row in rows.values()) == sum(p.numel() for p in model.parameters())


def test_one_module_under_two_names_stays_one_module() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"left": shared, "right": nn.ModuleDict({"inner": shared})})
    mxfp8.convert(model)
    assert isinstance(model["left"], MXFP8Linear)
    assert model["left"] is model["right"]["inner"]
    assert [(r.name, r.aliases) for r in mxfp8.describe(model).rows] == [("left", ("right.inner",))]
    # A rule on any of its names counts.
    mxfp8.convert(model, PrecisionPolicy(rules=[("right.*", "mxfp8_floor")]))
    assert model["left"].recipe.name == "mxfp8_floor"


def test_meta_device_then_materialised_then_trained() -> None:
    with torch.device("meta"):
        model = Ranker()
    mxfp8.convert(model, PrecisionPolicy(rules=[("head", "bf16")]))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    source = Ranker()
    model.load_state_dict(source.state_dict())
    expected = mxfp8.convert(source, PrecisionPolicy(rules=[("head", "bf16")]))
    ids = torch.tensor([[3, 1]])
    assert torch.equal(model(ids), expected(ids))


class Lora(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_cannot_be_converted_is_left_with_its_reason() -> None:
    model = nn.ModuleDict(
        {
            "mha": nn.MultiheadAttention(64, 2),
            "lora": Lora(64, 64),
            "wide": nn.Linear(64, 64, dtype=torch.float64),
            "empty": nn.Linear(64, 0),
            "patched": nn.Linear(64, 64),
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "odd": nn.Linear(33, 64),
        }
    )
    model["patched"].forward = lambda x: x
    kinds = {name: type(m) for name, m in model.named_modules()}
    mxfp8.convert(model)
    assert converted(model) == {"odd"}
    assert {n: type(m) for n, m in model.named_modules() if n != "odd"} == {
        n: kind for n, kind in kinds.items() if n != "odd"
    }
    why = {row.name: row.reason for row in mxfp8.describe(model).rows}
    assert "NonDynamicallyQuantizableLinear is a subclass" in why["mha.out_proj"]
    assert "Lora is a subclass" in why["lora"]
    assert "ParametrizedLinear" in why["normed"]
    assert "float64" in why["wide"]
    assert "N=0" in why["empty"]
    assert "forward was replaced" in why["patched"]
    assert "K=33 not a multiple of 32" in why["odd"]


def test_ragged_layers_run_forward_and_backward() -> None:
    """Nothing that was converted fails later."""
    model = mxfp8.convert(nn.Sequential(nn.Linear(33, 50), nn.Linear(50, 7)))
    x = torch.randn(5, 33, requires_grad=True)
    model(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_filter_is_used_and_an_excluded_layer_is_left_as_it_is() -> None:
    model = mxfp8.convert(Ranker(), filter_fn=lambda module, name: name.startswith("blocks.0"))
    assert converted(model) == {n for n in LINEARS if n.startswith("blocks.0")}
    mxfp8.convert(model, "mxfp8_floor", module_filter_fn=lambda module, name: name == "overhead")
    assert recipes(model)["overhead"] == "mxfp8_floor"
    assert recipes(model)["blocks.0.down"] == "mxfp8_rceil"
    why = {row.name: row.reason for row in mxfp8.describe(model).rows}
    assert (why["odd"], why["blocks.0.down"]) == ("left out by filter_fn", "default")
    with pytest.raises(ValueError, match="two names of one argument"):
        mxfp8.convert(model, filter_fn=bool, module_filter_fn=bool)


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (nn.Sequential(nn.ReLU()), {}, "the model has no nn.Linear"),
        (Ranker(), {"filter_fn": lambda m, n: False}, "overhead: left out by filter_fn"),
        (nn.ModuleDict({"lora": Lora(64, 64)}), {}, "lora: Lora is a subclass"),
        (nn.Sequential(nn.Linear(64, 64)), {"policy": PrecisionPolicy(rules=[("0", "bf16")])}, "0: rule 0 '0'"),
    ],
)
def test_converting_nothing_is_an_error_with_the_reasons(model: nn.Module, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"no layer would be converted.*{message}"):
        mxfp8.convert(model, **kwargs)


def test_fused_encoder_layer_warns() -> None:
    """torch's fused inference path reads weights directly: eval would silently skip MXFP8."""
    with pytest.warns(UserWarning, match="set_fastpath_enabled"):
        mxfp8.convert(nn.TransformerEncoderLayer(64, 2, 64, batch_first=True))


def test_grouped_linear_keeps_its_recipe_and_gets_its_name() -> None:
    model = nn.ModuleDict(
        {"experts": mxfp8.MXFP8GroupedLinear(2, 64, 32, recipe="mxfp8_floor"), "up": nn.Linear(64, 64)}
    )
    mxfp8.convert(model)
    row = mxfp8.describe(model).rows[0]
    assert (row.name, row.precision, row.flops, model["experts"].fqn) == ("experts", "mxfp8_floor", 4096, "experts")
