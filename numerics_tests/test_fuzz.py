"""Fuzzing whatever reads outside data: files, dictionaries, parts. It succeeds, or raises an error that says what is
wrong; it never crashes in another way, and never leaves a half-changed object behind."""

from __future__ import annotations

import copy
import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mxfp8
from gem_model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gem_model.config import get_config
from gem_model.data import KeyedJaggedTensor, load
from gem_model.data.criteo import CSV_HEADER, load_criteo
from gem_model.data.movielens import INTER_HEADER, ITEM_HEADER, USER_HEADER, read_ml_100k, read_ml_latest
from gem_model.jobs import build_model
from gem_model.train import TrainConfig, Trainer
from mxfp8 import MXTensor, PrecisionPolicy
from mxfp8.recipe import LinearRecipe, get_recipe

FUZZ = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)

# Plain data as JSON or YAML could hold it, and what Python callers might pass by mistake.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-2, -1, 0, 1, 16, 32, 64, 128, 256, 2**63, 2**64]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["e4m3", "rceil", "nearest", "stochastic", "bf16", "mxfp8_rceil", "1x32", "-1", "head.*", ""]),
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def refused_or_made(call: Callable[[], Any], *words: str) -> Any:
    """The result, or None after a ValueError or TypeError of ours: subclasses like UnicodeError are not, and neither
    is a message that Python wrote (`words`: one of them must be in ours)."""
    error = error_of(call)
    if not isinstance(error, Exception):
        return error
    assert type(error) in (ValueError, TypeError, json.JSONDecodeError), repr(error)
    assert isinstance(error, json.JSONDecodeError) or any(word in str(error) for word in words), repr(error)
    return None


def error_of(call: Callable[[], Any]) -> Any:
    """The error that ``call`` raises, if it is one that callers may expect; else its result."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        return error


@st.composite
def damaged(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples with one to three entries replaced, renamed or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        at = tree
        while isinstance(at, dict) and at:
            key = draw(st.sampled_from(sorted(at, key=str)))
            if isinstance(at[key], dict) and at[key] and draw(st.integers(0, 3)):
                at = at[key]
                continue
            value = at.pop(key)
            match draw(st.sampled_from(["replace", "rename", "remove"])):
                case "replace":
                    at[key] = draw(PLAIN)
                case "rename":
                    at[draw(st.text(max_size=5) | st.integers())] = value
            break
    return tree


# Recipes and policies


@FUZZ
@given(damaged(get_recipe("mxfp8_robust").to_dict()) | PLAIN)
@example({"name": "x", "fprop": {"lhs": {"block": 5}}})
@example({1: 2, "name": "x", "seed": 0, "a": 3})
@example({"name": "x", "wgrad": {"skip": "yes"}})
@example({"name": "x", "fprop": {"lhs": ""}})
@example({"name": "x", "seed": True})
@example({"name": 5})
@pytest.mark.filterwarnings("ignore:recipe .* casts gradients to E5M2")
def test_recipes_from_dictionaries(data: Any) -> None:
    words = ("use ", "known:", "is missing", "only", "for wgrad", "rounded to nearest", "need the same")
    recipe = refused_or_made(lambda: LinearRecipe.from_dict(data), *words)
    if recipe is not None:  # then it is whole: it prints, hashes and survives JSON
        assert str(recipe) == recipe.name
        assert LinearRecipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        assert hash(recipe) == hash(copy.deepcopy(recipe))


POLICY = {
    "name": "p",
    "default": get_recipe("mxfp8_floor").to_dict(),
    "rules": [
        {"target": "head.*", "recipe": "bf16", "reason": "r", "required": False},
        {"target": {"type": "Linear"}, "recipe": "mxfp8_rceil"},
        {"target": {"shape": {"smaller_than": 64}}, "recipe": get_recipe("mxfp8_square").to_dict()},
        {"target": {"last_linears": 2}, "recipe": "bf16"},
    ],
}
POLICY_WORDS = ("use ", "known:", "is missing", "must be", "not YAML", "a policy", "rule ", "default", "condition")


@st.composite
def policies(draw: st.DrawFn) -> Any:
    rules = [draw(damaged(rule)) if draw(st.booleans()) else rule for rule in POLICY["rules"]]
    return draw(damaged({**POLICY, "rules": rules}) | PLAIN)


@FUZZ
@given(policies())
@pytest.mark.filterwarnings("ignore:recipe .* casts gradients to E5M2")
def test_policies_from_json_and_yaml(data: Any) -> None:
    text = json.dumps(data)
    for read in (PrecisionPolicy.from_json, PrecisionPolicy.from_yaml):
        policy = refused_or_made(lambda read=read: read(text), *POLICY_WORDS)
        if policy is not None:
            again = PrecisionPolicy.from_json(policy.to_json())
            assert again == policy
            assert PrecisionPolicy.from_yaml(policy.to_yaml()) == policy


@FUZZ
@given(st.text(alphabet="[]{}:,-!&*<>|?'\"\n #0123456789.eabrulest_", max_size=60))
@example("[" * 100_000)
@example("[" * 3000)
@example("!!timestamp x")
@example("!!bool x")
@example("!!int x")
@example("2001-99-99")
@example("rules: &a [*a]")
@example("{[]: 1}")
@example("<<: 1")
@example("\x00")
def test_policies_from_any_text(text: str) -> None:
    for read in (PrecisionPolicy.from_json, PrecisionPolicy.from_yaml):
        got = error_of(lambda read=read: read(text))
        assert isinstance(got, PrecisionPolicy | ValueError)  # a plain ValueError of json or PyYAML is passed on


# MX tensors


@cache
def parts() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return mxfp8.quantize(torch.arange(128.0).view(2, 64)).to_parts()


TENSORS = st.builds(
    lambda shape, dtype, layout: torch.zeros(shape).to(dtype) if layout else torch.zeros(shape).to_sparse(),
    st.lists(st.integers(0, 3) | st.sampled_from([32, 64]), max_size=3),
    st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float8_e8m0fnu]),
    st.booleans() | st.just(True),
)
MX_WORDS = ("use ", "needs", "missing", "stored as", "0-dim", "1-D")


@FUZZ
@given(
    st.dictionaries(st.sampled_from(["qdata", "scale", "other"]), TENSORS | SCALARS, max_size=2) | PLAIN,
    st.dictionaries(st.sampled_from(["fmt", "axis", "block", "other"]), PLAIN, max_size=2) | PLAIN,
    st.booleans(),
)
@example({}, {"axis": float("inf")}, True)
@example({}, {"block": [1, 32]}, True)
def test_mx_tensors_from_parts(tensors: Any, metadata: Any, patch: bool) -> None:
    good_tensors, good_metadata = parts()
    if patch and isinstance(tensors, dict):
        tensors = good_tensors | tensors
    if patch and isinstance(metadata, dict):
        metadata = good_metadata | metadata
    q = refused_or_made(lambda: MXTensor.from_parts(tensors, metadata), *MX_WORDS)
    if q is not None:
        assert q.dequantize().shape == q.shape
        assert q.expanded_scale().ndim == q.ndim


@FUZZ
@given(
    TENSORS | SCALARS | st.just(None),
    TENSORS | SCALARS,
    st.sampled_from(["e4m3", "e5m2"]) | PLAIN,
    st.sampled_from([-1, -2]) | PLAIN,
    st.sampled_from([(1, 32), (32, 32), (128, 128)]) | PLAIN | st.tuples(SCALARS, SCALARS),
)
@example(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 2, dtype=torch.uint8), "e4m3", -1.0, (1, 32))
@example(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 2, dtype=torch.uint8), "e4m3", -1, (1.0, 32.0))
def test_mx_tensors_from_anything(qdata: Any, scale: Any, fmt: Any, axis: Any, block: Any) -> None:
    q = refused_or_made(lambda: MXTensor(qdata, scale, fmt, axis, block), *MX_WORDS)
    if q is not None:
        assert type(q.axis) is int
        assert all(type(n) is int for n in q.block)
        assert q.dequantize().shape == q.shape


# Batches


IDS = st.lists(st.integers(-2, 9), max_size=8)


@FUZZ
@given(
    st.lists(st.sampled_from("abc"), max_size=4) | PLAIN,
    IDS,
    IDS,
    st.none() | IDS | PLAIN,
    st.booleans(),
)
@example(["a", "b"], [1, 2], [1, 1], [2], False)
@example(["a", "b"], [], [], None, False)
@example(["a"], [1], [1], [float("inf")], False)
def test_keyed_jagged_tensors(keys: Any, values: list[int], lengths: list[int], per_key: Any, strided: bool) -> None:
    value, length = torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    if strided:
        length = length.repeat_interleave(2)[::2]

    def make() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, value, length, per_key)

    if per_key is not None and not isinstance(per_key, list):
        per_key = [per_key]
    kjt = refused_or_made(make, "KeyedJaggedTensor")
    if kjt is not None:
        assert len(repr(kjt)) > 0
        assert kjt.to("cpu").stride() * len(kjt.keys) == len(lengths)
        if all(n >= 0 for n in kjt.length_per_key):
            assert torch.cat([kjt[key].values for key in kjt.keys]).tolist() == values


# Text files: whole lines of junk, and good lines with one field replaced


JUNK = st.text(max_size=12) | st.sampled_from(
    [
        "",
        "-1",
        "1_0",
        " 1",
        "1e3",
        "nan",
        "inf",
        "0x1",
        "9" * 30,
        "1" * 5000,
        "٣",
        "\x00",
        '"',
        "a\rb",
        "\ufeff",
        "x" * 200_000,
    ]
)
FILES: dict[str, tuple[str, str, list[list[str]]]] = {
    "ml-100k.inter": (INTER_HEADER, "\t", [["7", "20", "4", "1000"], ["8", "10", "5", "1001"]]),
    "ml-100k.user": (USER_HEADER, "\t", [["7", "24", "M", "writer", "85711"], ["8", "53", "F", "artist", "V3N4P"]]),
    "ml-100k.item": (ITEM_HEADER, "\t", [["10", "Toy Story", "1995", "Animation"], ["20", "unknown", "V", "unknown"]]),
    "ratings.csv": ("userId,movieId,rating,timestamp", ",", [["3", "10", "0.5", "1000"], ["1", "20", "4.5", "900"]]),
    "movies.csv": ("movieId,title,genres", ",", [["10", "Net (1995)", "Action|Crime"], ["20", "Hyena Road", "None"]]),
}


@st.composite
def spoilt(draw: st.DrawFn, header: str, separator: str, rows: list[list[str]]) -> bytes:
    """A file with one thing wrong (or, by chance, nothing)."""
    rows = copy.deepcopy(rows)
    match draw(st.sampled_from(["field", "field", "line", "bytes", "truncated", "header"])):
        case "field":
            row = draw(st.sampled_from(rows))
            row[draw(st.integers(0, len(row) - 1))] = draw(JUNK)
        case "line":
            rows.insert(draw(st.integers(0, len(rows))), [draw(JUNK)])
        case "header":
            header = draw(JUNK)
        case kind:
            whole = bytearray("\n".join([header, *map(separator.join, rows), ""]).encode())
            at = draw(st.integers(0, len(whole) - 1))
            if kind == "truncated":
                return bytes(whole[:at])
            whole[at] = draw(st.integers(0, 255))
            return bytes(whole)
    return "\n".join([header, *map(separator.join, rows), ""]).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", sorted(FILES))
@settings(FUZZ, max_examples=80)
@given(data=st.data())
def test_movielens_files(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for other, (header, separator, rows) in FILES.items():
            lines = [header, *map(separator.join, rows), ""]
            (Path(folder) / other).write_bytes("\n".join(lines).encode())
        (Path(folder) / name).write_bytes(data.draw(spoilt(*FILES[name])))
        read = read_ml_100k if name.startswith("ml-100k") else read_ml_latest
        log = refused_or_made(lambda: read(Path(folder)), f"{folder}/")
    if log is not None:
        assert len(log.user) == len(log.item) == len(log.level) == len(log.seconds)
        assert ((log.level >= 1) & (log.level <= log.levels)).all()
        assert ((log.user >= 0) & (log.user < log.num_users)).all()


CRITEO = [["1", *["3"] * 13, *["05db9164"] * 26], ["0", *[""] * 13, *["ff"] * 26], ["0", *["-2"] * 13, *[""] * 26]]


@settings(FUZZ, max_examples=80)
@given(data=st.data(), csv=st.booleans())
def test_criteo_files(data: st.DataObject, csv: bool) -> None:
    header, separator = (CSV_HEADER, ",") if csv else ("\t".join(CRITEO[0]), "\t")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data.draw(spoilt(header, separator, CRITEO)))
        dataset = refused_or_made(
            lambda: load_criteo(path=path, num_embeddings=9, holdout_frac=0.5), str(path), "split"
        )
    if dataset is not None:
        assert len(dataset.train) + len(dataset.test) in (2, 3, 4)


# Checkpoints


@cache
def trained() -> tuple[Trainer, bytes]:
    """A trainer two steps in, and the bytes of its checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dataset = load("synthetic", num_samples=120, num_users=10, num_ads=10, max_history=4)
        config = get_config("tiny", dim=32, heads=1, layers=1, fm_hidden=(32,), head_hidden=(32,), max_history=4)
        trainer = Trainer(build_model(config, dataset, 0), dataset.train, TrainConfig(batch_size=16, window=1))
        trainer.run(until=2)
    with tempfile.TemporaryDirectory() as folder:
        return trainer, save_checkpoint(Path(folder) / "c.pt", trainer).read_bytes()


def state_of(trainer: Trainer) -> tuple[list[torch.Tensor], Any]:
    tensors = [x.clone() for x in trainer.model.state_dict().values()]
    for optimizer in trainer.optimizers.values():
        tensors += [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]
    rest = trainer.step, list(trainer.losses), list(trainer.curve), trainer.loader.state_dict(), trainer.mxfp8_step
    return [*tensors, torch.get_rng_state(), *trainer.window.sums.values()], rest


def assert_loads_or_changes_nothing(content: bytes) -> None:
    trainer, _ = trained()
    before, rest = state_of(trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.pt"
        path.write_bytes(content)
        error = error_of(lambda: load_checkpoint(path, trainer))
        if error is None:  # it loaded: what it changed is put back for the next example
            path.write_bytes(trained()[1])
            load_checkpoint(path, trainer)
            return
    assert isinstance(error, CheckpointError)
    assert str(path) in str(error)
    after, rest_after = state_of(trainer)
    assert rest_after == rest
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@FEW
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_checkpoints_with_flipped_bytes(flips: list[tuple[float, int]]) -> None:
    content = bytearray(trained()[1])
    for where, mask in flips:
        content[int(where * len(content))] ^= mask
    assert_loads_or_changes_nothing(bytes(content))


@FEW
@given(st.data())
@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Defining your `__torch_function__`")
def test_checkpoints_whose_pickle_is_damaged_under_a_right_checksum(data: st.DataObject) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(trained()[1])) as source, zipfile.ZipFile(out, "w") as target:
        for item in source.infolist():
            content = bytearray(source.read(item))
            if item.filename.endswith("data.pkl"):
                for _ in range(data.draw(st.integers(1, 4))):
                    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
            target.writestr(item.filename, bytes(content))
    assert_loads_or_changes_nothing(out.getvalue())


@FEW
@given(st.data())
def test_checkpoints_with_other_parts(data: st.DataObject) -> None:
    state = torch.load(io.BytesIO(trained()[1]), weights_only=True)
    state = {**state, "model": dict(state["model"])}
    out = io.BytesIO()
    torch.save(data.draw(damaged(state)), out)
    assert_loads_or_changes_nothing(out.getvalue())
