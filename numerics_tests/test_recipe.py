"""Recipes: what the named ones say, that they survive storage, and that impossible ones name the GEMM."""

import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from mxfp8.formats import BLOCK_SHAPES, Rounding, ScaleRule
from mxfp8.recipe import HP, RECIPES, CastSpec, GemmSpec, LinearRecipe, get_recipe
from numerics_tests.composition import ALL_RECIPES

DEFAULT = CastSpec()
SR = CastSpec(rounding="stochastic")
ROW, TILE = CastSpec(block=(1, 128)), CastSpec(block=(128, 128))
FLOOR = CastSpec(scale_rule="floor")
H = CastSpec(hadamard=32)

# name: fprop input, fprop weight, dgrad grad, dgrad weight, wgrad grad, wgrad input
NAMED = {
    "mxfp8_rceil": (DEFAULT,) * 6,
    "mxfp8_floor": (FLOOR,) * 6,
    "mxfp8_square": (DEFAULT, CastSpec(block=(32, 32)), DEFAULT, CastSpec(block=(32, 32)), DEFAULT, DEFAULT),
    "mxfp8_coalesced": (ROW, TILE, ROW, TILE, ROW, TILE),
    "mxfp8_rceil_wgrad_with_hp": (DEFAULT, DEFAULT, DEFAULT, DEFAULT, None, None),
    "mxfp8_robust": (DEFAULT, DEFAULT, SR, DEFAULT, replace(SR, hadamard=32), H),
}


def test_named_recipes_are_what_they_say() -> None:
    assert set(NAMED) == set(RECIPES)
    for name, casts in NAMED.items():
        r = get_recipe(name)
        assert (r.fprop.lhs, r.fprop.rhs, r.dgrad.lhs, r.dgrad.rhs, r.wgrad.lhs, r.wgrad.rhs) == casts
        assert r.name == name == str(r)


def test_defaults_of_a_cast() -> None:
    assert CastSpec(fmt="e4m3", scale_rule="rceil", block=(1, 32), rounding="nearest", hadamard=None) == DEFAULT


def test_names_and_enum_members_are_one_spec() -> None:
    a = CastSpec(scale_rule=ScaleRule.EVEN, rounding=Rounding.STOCHASTIC, block=[1, 128])  # type: ignore[arg-type]
    b = CastSpec(scale_rule="even", rounding="stochastic", block=(1, 128))
    assert a == b
    assert hash(a) == hash(b)
    assert repr(a) == repr(b)


def test_recipes_hash_compare_pickle_and_do_not_change() -> None:
    assert len({*ALL_RECIPES, *ALL_RECIPES}) == len(ALL_RECIPES)
    for recipe in ALL_RECIPES:
        assert pickle.loads(pickle.dumps(recipe)) == recipe
        assert hash(replace(recipe)) == hash(recipe)
        assert replace(recipe, seed=99) != recipe
        with pytest.raises(FrozenInstanceError):
            recipe.seed = 1  # type: ignore[misc]
        assert get_recipe(recipe) is recipe


def test_dictionaries_round_trip_through_json() -> None:
    for recipe in (*ALL_RECIPES, LinearRecipe(name="skip", wgrad=GemmSpec(skip=True))):
        assert LinearRecipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert LinearRecipe.from_dict({"name": "short"}) == LinearRecipe(name="short")


@pytest.mark.parametrize(
    "data, match",
    [
        ({}, "'name' is missing"),
        ({"name": "x", "fprob": {}}, "recipe: unknown field 'fprob'"),
        ({"name": "x", "dgrad": {"left": None}}, "dgrad: unknown field 'left'"),
        ({"name": "x", "wgrad": {"lhs": {"format": "e4m3"}}}, "wgrad.lhs: unknown field 'format'"),
        ({"name": "x", "fprop": {"rhs": {"fmt": "fp4"}}}, "unknown element format 'fp4'"),
        ({"name": "x", "fprop": {"rhs": {"block": [1, 64]}}}, r"\(1, 64\)"),
    ],
)
def test_bad_dictionaries_are_named(data: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LinearRecipe.from_dict(data)


def both(**kw: Any) -> GemmSpec:
    return GemmSpec(lhs=CastSpec(**kw), rhs=CastSpec(**kw))


@pytest.mark.parametrize(
    "match, build",
    [
        (r"bad\.fprop: the Hadamard transform is for wgrad", lambda: LinearRecipe(name="bad", fprop=both(hadamard=32))),
        (r"bad\.dgrad: the Hadamard transform is for wgrad", lambda: LinearRecipe(name="bad", dgrad=GemmSpec(lhs=H))),
        (r"bad\.wgrad: both operands need the same Hadamard", lambda: LinearRecipe(name="bad", wgrad=GemmSpec(lhs=H))),
        (
            r"bad\.wgrad: both operands need the same Hadamard.*'32', '64'",
            lambda: LinearRecipe(name="bad", wgrad=GemmSpec(lhs=H, rhs=CastSpec(hadamard=64))),
        ),
        (r"bad\.wgrad: both operands", lambda: LinearRecipe(name="bad", wgrad=GemmSpec(lhs=H, rhs=None))),
        (r"bad\.fprop: only wgrad can be skipped", lambda: LinearRecipe(name="bad", fprop=GemmSpec(skip=True))),
        (r"bad\.dgrad: only wgrad can be skipped", lambda: LinearRecipe(name="bad", dgrad=GemmSpec(skip=True))),
        (r"bad\.fprop: weights are rounded to nearest", lambda: LinearRecipe(name="bad", fprop=GemmSpec(rhs=SR))),
        (r"bad\.dgrad: weights are rounded to nearest", lambda: LinearRecipe(name="bad", dgrad=GemmSpec(rhs=SR))),
        ("save_activations is 'bf16'", lambda: LinearRecipe(name="bad", save_activations="bf16")),
        ("seed is -1", lambda: LinearRecipe(name="bad", seed=-1)),
        ("seed is 1.5", lambda: LinearRecipe(name="bad", seed=1.5)),  # type: ignore[arg-type]
        ("hadamard is 48: use None or one of 16, 32, 64, 128", lambda: CastSpec(hadamard=48)),
        ("unknown element format", lambda: CastSpec(fmt="e4m3fn")),
        ("unknown scale rule", lambda: CastSpec(scale_rule="up")),
        ("unknown rounding", lambda: CastSpec(rounding="up")),
        ("unknown block shape", lambda: CastSpec(block=(32, 1))),
        ("unknown recipe 'fp8': use one of mxfp8_rceil", lambda: get_recipe("fp8")),
    ],
)
def test_impossible_recipes_name_the_gemm(match: str, build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize(
    "match, build",
    [
        ("lhs is 'e4m3': use a CastSpec", lambda: GemmSpec(lhs="e4m3")),  # type: ignore[arg-type]
        ("rhs is .*: use a CastSpec", lambda: GemmSpec(rhs=GemmSpec())),  # type: ignore[arg-type]
        (r"bad\.dgrad is None: use a GemmSpec", lambda: LinearRecipe(name="bad", dgrad=None)),  # type: ignore[arg-type]
        (r"bad\.fprop is CastSpec.*: use a GemmSpec", lambda: LinearRecipe(name="bad", fprop=DEFAULT)),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_named(match: str, build: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=match):
        build()


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_e5m2_gradients_are_warned_of(gemm: str) -> None:
    with pytest.warns(UserWarning, match="'hybrid' casts gradients to E5M2"):
        LinearRecipe(name="hybrid", **{gemm: GemmSpec(lhs=CastSpec(fmt="e5m2"))})


def test_what_can_be_shared() -> None:
    square = CastSpec(block=(32, 32))
    assert get_recipe("mxfp8_square").shares_weight
    assert get_recipe("mxfp8_coalesced").shares_weight
    assert not get_recipe("mxfp8_rceil").shares_weight
    other = replace(square, scale_rule="floor")
    assert not LinearRecipe(name="x", fprop=GemmSpec(rhs=square), dgrad=GemmSpec(rhs=other)).shares_weight
    assert LinearRecipe.from_operands(name="x", input=square).shares_input
    # Two stochastic casts draw different bits, so that one cannot stand for the other.
    assert not LinearRecipe.from_operands(name="x", input=replace(square, rounding="stochastic")).shares_input
    assert not LinearRecipe.from_operands(name="x", input=square, wgrad=HP).shares_input


def test_bits_kept_per_activation() -> None:
    for block in BLOCK_SHAPES:
        recipe = LinearRecipe.from_operands(name="x", input=CastSpec(block=block))
        assert recipe.saved_bits_per_element() == 8 + 8 / (block[0] * block[1])
    assert get_recipe("mxfp8_rceil").saved_bits_per_element() == 8.25
    assert get_recipe("mxfp8_rceil_wgrad_with_hp").saved_bits_per_element() == 16
    assert LinearRecipe(name="x", save_activations="high_precision").saved_bits_per_element(32) == 32
