"""Faults that other MX and FP8 projects had, tried on ours: those kinds that no other file has a test of, and a check
that the table in known_faults.md names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import mxfp8
from mxfp8 import MXFP8GroupedLinear, MXTensor
from mxfp8.recipe import RECIPES
from mxfp8.reference.random import random_bits
from mxfp8.rng import RngKey
from numerics_tests import oracles
from numerics_tests.test_linear import make, run, same

TABLE = "numerics_tests/known_faults.md"
NO_TEST = "cannot apply: "


# The table


def rows(root: Path) -> list[tuple[str, str, str]]:
    """(seen in, what went wrong, tests or why there is none) of each row."""
    lines = [line for line in (root / TABLE).read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [row for row in cells if row[0] != "Seen in" and not set(row[0]) <= set("-")]  # type: ignore[misc]


def defined_tests(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_fault_has_a_test_that_exists_or_a_reason(repo_root: Path) -> None:
    table = rows(repo_root)
    assert len(table) > 90
    for row in table:
        assert len(row) == 3, row
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])
        assert named or row[2].startswith(NO_TEST), f"{row[0]}: neither a test nor '{NO_TEST}...'"
        for file, test in named:
            folder = repo_root if "/" in file else repo_root / "numerics_tests"
            assert test in defined_tests(folder / file), f"{row[0]}: {file} has no {test}"


def test_the_table_names_public_projects(repo_root: Path) -> None:
    """owner/project, with a number where there is one; nothing that a reader could not look up."""
    for seen_in, fault, _ in rows(repo_root):
        assert re.match(r"[\w.-]+/[\w.-]+|torch$|torch\b", seen_in), seen_in
        assert len(fault) > 20, seen_in


# Kinds that have no test elsewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nan_scale_survives_constant_folding(dtype: torch.dtype, device: torch.device) -> None:
    """Compilers have folded an E8M0 NaN to Inf. Here the byte is a constant of the graph, and x != x must stay true."""
    data = torch.full((1, 64), 1.0, device=device).to(torch.float8_e4m3fn)
    scale = torch.tensor([[255, 127]], dtype=torch.uint8, device=device)
    q = MXTensor(data, scale, "e4m3")

    def decode(shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = q.dequantize(dtype) + shift
        return value, value != value

    torch._dynamo.reset()
    value, differs = torch.compile(decode, backend="aot_eager", fullgraph=True)(torch.zeros((), device=device))
    torch._dynamo.reset()
    assert value.dtype == dtype
    assert differs[0].tolist() == [True] * 32 + [False] * 32
    assert (value[0, 32:] == 1).all()


@pytest.fixture
def poisoned_allocator() -> Iterator[None]:
    """torch fills every uninitialised tensor with NaN (the largest integer, 0x7F or 0xFF, for bytes)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    assert torch.empty(8).isnan().all()
    assert torch.empty(8, dtype=torch.uint8).all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[assignment]


def ops_with_room_for_rubbish() -> list[torch.Tensor]:
    """Results of every op at sizes with tails, empty groups, trailing rows and empty dimensions."""
    torch.manual_seed(0)
    out = []
    for m in (0, 1, 31, 32, 33):
        x, w = torch.randn(m, 40), mxfp8.quantize(torch.randn(17, 40))
        for block in ((1, 32), (32, 32), (128, 128)):
            q = mxfp8.quantize(x, block=block)
            out += [q.qdata.view(torch.uint8), q.scale_bytes, q.expanded_scale().view(torch.uint8), q.dequantize()]
            out += [mxfp8.gemm(q, w), mxfp8.gemm(w, q)]
        q = mxfp8.quantize(x, rounding="stochastic", seed=1)
        out += [q.qdata.view(torch.uint8), q.scale_bytes, mxfp8.hadamard(x)]
    out.append(mxfp8.gemm(mxfp8.quantize(torch.randn(3, 0)), mxfp8.quantize(torch.randn(4, 0))))
    for sizes in ([32, 0, 30], [0, 0, 0], [5, 0, 27]):
        layer = MXFP8GroupedLinear(3, 40, 24)
        x = torch.randn(64, 40, requires_grad=True)
        y = layer(x, torch.tensor(sizes).cumsum(0).int())
        y.backward(torch.randn(64, 24))
        out += [y.detach(), x.grad, layer.weight.grad]
        assert not y[sum(sizes) :].any()
        assert not layer.weight.grad[1].any()
    for recipe in RECIPES:
        out += run(make(recipe, K=40, N=24), torch.randn(33, 40))
    return out


def test_no_result_depends_on_uninitialised_memory(request: pytest.FixtureRequest) -> None:
    clean = ops_with_room_for_rubbish()
    request.getfixturevalue("poisoned_allocator")
    assert same(ops_with_room_for_rubbish(), clean)


def test_counters_of_random_bits_pass_the_int32_limit(device: torch.device) -> None:
    """Offsets of 32 bits have turned negative in many kernels."""
    got = random_bits(RngKey(seed=5, step=1, stream=2, row_offset=2**31 - 2, col_offset=2**31 - 3), 4, 6, device)
    rows, cols = range(2**31 - 2, 2**31 + 2), range(2**31 - 3, 2**31 + 3)
    assert got.tolist() == [[oracles.random_word(5, 1, 2, r, c) for c in cols] for r in rows]


@pytest.mark.parametrize("m, k, n", [(130, 2880, 70), (33, 544, 768), (257, 96, 33)])
def test_sizes_that_broke_tiled_kernels(m: int, k: int, n: int, device: torch.device) -> None:
    """K = 2880 and N = 768 are models' sizes that no tile of 128 or 512 divides; integers make the products exact."""
    a, b = torch.randint(-3, 4, (m, k), device=device).float(), torch.randint(-3, 4, (n, k), device=device).float()
    qa, qb = mxfp8.quantize(a), mxfp8.quantize(b)
    assert qa.scale.shape == qa.expanded_scale().shape == (m, k // 32)
    assert torch.equal(mxfp8.gemm(qa, qb, out_dtype=torch.float32).double(), a.double() @ b.double().mT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fifty_repeats_have_the_same_bits(recipe: str, device: torch.device) -> None:
    """Races show as bits that differ from run to run."""
    layer = make(recipe, device=device)
    x, dy = torch.randn(65, 64, device=device), torch.randn(65, 96, device=device)
    first = run(layer, x, dy)
    assert all(same(run(layer, x, dy), first) for _ in range(50))


def converted() -> nn.Module:
    torch.manual_seed(1)
    return mxfp8.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 33)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_hold_plain_tensors(tmp_path: Path) -> None:
    """Saved by torch.distributed.checkpoint from a converted model, loaded into a converted and into a plain one."""
    import torch.distributed.checkpoint as dcp

    model, x = converted(), torch.randn(5, 64)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    for other in (converted(), nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 33))):
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
        assert torch.equal(mxfp8.convert(other)(x), model(x))


@pytest.mark.parametrize("assign", [False, True])
def test_a_step_after_loading_is_the_step_that_was_not_taken(assign: bool) -> None:
    """Loading weights under a filled cache of quantised ones: nothing of the old weights may be used."""

    def step(model: nn.Module) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.linspace(-1, 1, 320).view(5, 64)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    whole, other = converted(), converted()
    step(whole)
    saved = {name: value.clone() for name, value in whole.state_dict().items()}
    step(other)
    step(other)
    other.load_state_dict(saved, assign=assign)
    whole.zero_grad()
    other.zero_grad()
    assert step(other) == step(whole)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), whole.parameters(), strict=True))
