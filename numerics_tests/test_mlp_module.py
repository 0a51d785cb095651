"""``MXFP8MLP`` as a module like any other: parameters, copies, policies, hooks, audits, optimisers, bad input."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import MXFP8MLP
from mxfp8.recipe import GemmSpec, LinearRecipe
from numerics_tests.composition import ALL_RECIPES
from numerics_tests.mlp_composition import (
    HIDDEN,
    IN,
    OUT,
    Composition,
    data,
    differing,
    make,
    recipes,
    run,
    sequential,
)


def test_from_modules_shares_parameters(device: torch.device) -> None:
    norm, fc1, fc2 = nn.LayerNorm(IN), nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT, bias=False)
    mlp = MXFP8MLP.from_modules(norm, fc1, nn.GELU(approximate="tanh"), fc2, "mxfp8_square", fqn="net.mlp").to(device)
    assert mlp.fc1.weight is fc1.weight
    assert mlp.fc2.weight is fc2.weight
    assert mlp.norm is norm
    assert (mlp.activation, mlp.fc1.fqn, mlp.fc2.fqn) == ("gelu_tanh", "net.mlp.fc1", "net.mlp.fc2")
    assert list(mlp.state_dict()) == ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight"]
    assert [p.name for p in (mlp.fc1.recipe, mlp.fc2.recipe)] == ["mxfp8_square"] * 2
    text = repr(mlp)
    assert all(word in text for word in ("gelu_tanh", "mxfp8_square", "LayerNorm", "recompute=True"))
    found = {type(m).__name__ for m in mlp.modules()}
    assert found == {"MXFP8MLP", "LayerNorm", "MXFP8Linear"}
    for module, name in ((nn.ReLU(), "relu"), (nn.SiLU(), "silu"), (nn.Hardswish(), "hardswish"), (nn.GELU(), "gelu")):
        assert MXFP8MLP.from_modules(None, fc1, module, fc2).activation == name


def test_eps_of_rms_norm_is_torchs_where_it_is_not_given(device: torch.device) -> None:
    tiny = torch.full((32, IN), 2.0**-10, device=device).bfloat16()  # its square is of the size of float32's epsilon
    norm = nn.RMSNorm(IN, device=device)
    hp = next(r for r in ALL_RECIPES if r.name == "hp_everywhere")
    mlp = MXFP8MLP.from_modules(norm, nn.Linear(IN, IN, bias=False), "relu", nn.Linear(IN, IN, bias=False), hp).to(
        device
    )
    with torch.no_grad():
        for part in (mlp.fc1, mlp.fc2):
            part.weight.copy_(torch.eye(IN))
    assert torch.allclose(mlp(tiny), norm(tiny.float()).bfloat16(), rtol=2.0**-7, atol=0)


def test_state_dicts_load_strictly_both_ways() -> None:
    mlp = make(norm="layernorm")
    plain = sequential(mlp)  # loads strictly
    make(norm="layernorm").load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_share_nothing(copied: Any) -> None:
    mlp, (x, dy) = make("mxfp8_square"), data(33, torch.bfloat16, torch.device("cpu"))
    want = run(mlp, x, dy)
    twin = copied(mlp)
    assert differing(run(twin, x, dy), want) == []
    with torch.no_grad():
        twin.fc2.weight.mul_(2)
    assert differing(run(mlp, x, dy), want) == []
    assert not torch.equal(run(twin, x, dy)["y"], want["y"])


@recipes
def test_meta_and_fake_inputs_give_shapes(recipe: LinearRecipe) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mlp = MXFP8MLP(IN, HIDDEN, OUT, recipe=recipe, device="meta")
    assert mlp(torch.empty(33, IN, device="meta")).shape == (33, OUT)
    with FakeTensorMode():
        fake = MXFP8MLP(IN, HIDDEN, OUT, recipe=recipe)
        grads = run(fake, torch.randn(33, IN))
        assert {n: g.shape for n, g in grads.items() if n != "y"} == {
            "x": (33, IN), **{n: p.shape for n, p in fake.named_parameters()}
        }  # fmt: skip


def test_policies_reach_its_layers(device: torch.device) -> None:
    model = nn.ModuleDict({"mlp": make(device=device)})
    mxfp8.convert(model, mxfp8.PrecisionPolicy(rules=[("mlp.fc1", "mxfp8_square")], default="mxfp8_coalesced"))
    mlp = model["mlp"]
    assert isinstance(mlp, MXFP8MLP)
    assert (mlp.fc1.recipe.name, mlp.fc2.recipe.name) == ("mxfp8_square", "mxfp8_coalesced")
    assert (mlp.fc1.fqn, mlp.fc2.fqn) == ("mlp.fc1", "mlp.fc2")
    x, dy = data(48, torch.bfloat16, device)
    assert differing(run(mlp, x, dy), Composition(mlp)(x, dy)) == []


def test_a_part_left_in_bf16_is_multiplied_in_bf16(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(48, torch.bfloat16, device)
    hp = next(r for r in ALL_RECIPES if r.name == "hp_everywhere")
    for part in ("fc1", "fc2"):
        expected = copy.deepcopy(mlp)
        expected.get_submodule(part).recipe = hp
        changed = copy.deepcopy(mlp)
        mxfp8.convert(nn.ModuleDict({"m": changed}), mxfp8.PrecisionPolicy(rules=[(f"m.{part}", "bf16")]))
        assert type(changed.get_submodule(part)) is nn.Linear
        assert differing(run(changed, x, dy), run(expected, x, dy)) == []


def test_hooks_of_parts_run(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(48, torch.bfloat16, device)
    fused_result, calls = run(mlp, x, dy), []
    handles = [part.register_forward_hook(lambda *a: calls.append(1)) for part in (mlp.norm, mlp.fc1, mlp.fc2)]
    unfused = run(mlp, x, dy)
    assert calls == [1, 1, 1]
    for name, value in unfused.items():
        assert mxfp8.metrics.sqnr_db(value, fused_result[name]) > 20, name  # roundings to bfloat16 in between
    for handle in handles:
        handle.remove()
    assert differing(run(mlp, x, dy), fused_result) == []
    seen = mxfp8.describe(nn.ModuleDict({"m": mlp})["m"], example_inputs=(x,))
    assert {row.name: row.rows for row in seen.rows if row.flops} == {"fc1": 48, "fc2": 48}


def test_audit_sees_all_six_products() -> None:
    model = nn.Sequential(make("mxfp8_rceil"), nn.Linear(OUT, 32))
    batches = [torch.randn(64, IN) for _ in range(2)]
    report = mxfp8.audit(model, batches, lambda m, b: m(b).square().mean(), policy="mxfp8_rceil")
    seen = {(row.layer, row.gemm) for row in report.rows}
    assert seen >= {(f"0.{part}", gemm) for part in ("fc1", "fc2") for gemm in ("fprop", "dgrad", "wgrad")}
    assert report.unseen == ()
    assert min(row.sqnr_db for row in report.rows) > 20


def test_it_trains_with_an_optimiser_that_fills_its_weight_caches(device: torch.device) -> None:
    from mxfp8.optim import AdamW

    mlp = make("mxfp8_rceil", activation="silu", device=device)
    twin = copy.deepcopy(mlp)
    x, target = torch.randn(128, IN, device=device), torch.randn(128, OUT, device=device)
    losses: list[list[float]] = []
    for module, optimizer in ((mlp, AdamW(mlp, lr=1e-2)), (twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))):
        losses.append([])
        for _ in range(12):
            loss = (module(x) - target).square().mean()
            losses[-1].append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert math.isclose(losses[0][-1], losses[1][-1], rel_tol=0.05)


def test_weights_are_cast_once_a_step(device: torch.device) -> None:
    mlp, (x, dy) = make(device=device), data(33, torch.bfloat16, device)
    run(mlp, x, dy)
    before = [dict(part._cache._copies) for part in (mlp.fc1, mlp.fc2)]
    assert [len(copies) for copies in before] == [2, 2]
    run(mlp, x, dy)
    after = [part._cache._copies for part in (mlp.fc1, mlp.fc2)]
    assert all(after[i][key] is q for i in (0, 1) for key, q in before[i].items())
    mlp.clear_cache()
    assert [part._cache._copies for part in (mlp.fc1, mlp.fc2)] == [{}, {}]


def test_a_skipped_wgrad_leaves_no_gradient() -> None:
    mlp = make(LinearRecipe(name="skip", wgrad=GemmSpec(skip=True)))
    grads = run(mlp, torch.randn(33, IN))
    assert sorted(grads) == ["fc1.bias", "fc2.bias", "norm.weight", "x", "y"]


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ValueError, r"layer 'fc1': input has shape \(3, 65\), its last", lambda: make()(torch.ones(3, 65))),
        (TypeError, "layer 'fc1': input is torch.float64", lambda: make()(torch.ones(3, IN).double())),
        (TypeError, "layer 'fc1': weight is torch.float64", lambda: make().double()(torch.ones(3, IN))),
        (ValueError, "weights are on the meta device", lambda: make().to("meta")(torch.ones(3, IN))),
        (ValueError, "unknown recipe 'fp4'", lambda: make("fp4")),
        (ValueError, "norm is 'batch': use one of rmsnorm, layernorm, or None", lambda: make(norm="batch")),
        (ValueError, "activation is 'tanh': use one of relu, gelu", lambda: make(activation="tanh")),
        (ValueError, "activation is 'Tanh': use one of", lambda: from_parts(activation=nn.Tanh())),
        (TypeError, "norm is a GroupNorm: use nn.RMSNorm, nn.LayerNorm", lambda: from_parts(norm=nn.GroupNorm(2, IN))),
        (ValueError, r"norm is over \(32,\): the input of fc1 needs \(64,\)", lambda: from_parts(norm=nn.RMSNorm(32))),
        (ValueError, "96 outputs, which swiglu makes 48; fc2 takes 96", lambda: from_parts(activation="swiglu")),
        (TypeError, "from_linear takes an nn.Linear, not Bilinear", lambda: from_parts(fc1=nn.Bilinear(2, 2, 2))),
    ],
)  # fmt: skip
def test_bad_inputs_are_named(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


def from_parts(**changes: Any) -> MXFP8MLP:
    parts = {"norm": None, "fc1": nn.Linear(IN, HIDDEN), "activation": "relu", "fc2": nn.Linear(HIDDEN, OUT)}
    return MXFP8MLP.from_modules(**parts | changes)


def test_non_finite_values_are_not_hidden(device: torch.device) -> None:
    mlp, x = make(norm="layernorm", device=device), torch.randn(4, IN, device=device)
    x[1, 5] = torch.inf
    found = run(mlp, x)
    assert found["y"].isnan().all(1).tolist() == [False, True, False, False]
    assert found["x"].isnan().any(1).tolist() == [False, True, False, False]


def test_save_activations_does_not_change_gradients() -> None:
    x, dy = data(33, torch.bfloat16, torch.device("cpu"))
    mlp = make("mxfp8_square", recompute=False)
    first = run(mlp, x, dy)
    for part in (mlp.fc1, mlp.fc2):
        part.recipe = dataclasses.replace(part.recipe, save_activations="high_precision")
    assert differing(run(mlp, x, dy), first) == []
