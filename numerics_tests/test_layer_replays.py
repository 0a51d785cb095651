"""Whole passes of layers that are replayed: the bits of what they consist of, on every input, and none where a replay
would be wrong. Kernels are played by functions of addresses, so that this can be checked without a GPU.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import mxfp8
from mxfp8 import MXFP8GroupedLinear, MXFP8Linear, dispatch, observe
from mxfp8.dispatch import replays
from mxfp8.rng import get_step, set_step
from numerics_tests.operands import ends
from numerics_tests.test_linear import make, same

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _launch
from mxfp8.kernels._device import INTERPRETED
from triton import knobs

from numerics_tests.recording import forgotten, outside, recorded

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted process launches nothing")


class Played:
    """A kernel that finds its tensors by their addresses: ``body`` of them all; a form is size, stride and dtype."""

    direct = 0

    def __init__(self, forms: list[tuple[torch.Size, tuple[int, ...], torch.dtype]], body: Callable[..., None]) -> None:
        self.run = SimpleNamespace(
            launch=self.launch, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
            launch_pdl=False,
        )  # fmt: skip
        self.function, self.packed_metadata = "function", "metadata"
        self.forms, self.body = forms, body

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., "Played"]:
        def first(*tensors: torch.Tensor) -> "Played":
            for hook in knobs.runtime.launch_enter_hook.calls:
                hook(None)
            self.body(*tensors)
            return self

        return lambda *tensors, num_warps: outside(lambda: first(*tensors))

    def launch(self, x, y, z, stream, function, coop, pdl, scratch, profile, meta, a, b, c, *addresses):  # type: ignore[no-untyped-def]
        Played.direct += 1
        tensors = []
        for address, (size, stride, dtype) in zip(addresses, self.forms, strict=True):
            last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
            tensors.append(torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(size, stride))
        self.body(*tensors)


def played(op: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """``op(*tensors)`` as a kernel would do it: what it makes is allocated, then written by a launch."""
    results = outside(lambda: op(*tensors))
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in results]

    def body(*places: torch.Tensor) -> None:
        for place, result in zip(places[len(tensors) :], op(*places[: len(tensors)]), strict=True):
            place.copy_(result)

    forms = [(t.shape, t.stride(), t.dtype) for t in (*tensors, *made)]
    _launch.launch_version(
        Played(forms, body), {}, "key", (1, 1, 1), (*tensors, *made), {}, tensors[0].device, num_warps=1
    )
    return made


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts and products of the reference as kernels that can be recorded."""
    recorded(monkeypatch)
    groups = ("check_offsets", "quantize_grouped", "quantize_both_grouped", "grouped_gemm", "grouped_wgrad")
    for op in ("quantize", "quantize_both", "gemm", *groups):
        plain = dispatch._functions[op, "reference"]

        def run(*args, plain=plain, **kwargs):  # type: ignore[no-untyped-def]
            """Tensors are a kernel's arguments, all else is compiled in."""
            names = [*range(len(args)), *kwargs]
            values = dict(zip(names, (*args, *kwargs.values()), strict=True))
            at = [name for name in names if isinstance(values[name], torch.Tensor)]

            def kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                given = {**values, **dict(zip(at, tensors, strict=True))}
                out = plain(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
                return (out,) if isinstance(out, torch.Tensor) else tuple(out or ())

            made = played(kernel, *(values[name] for name in at))
            return made[0] if len(made) == 1 else tuple(made)

        monkeypatch.setitem(dispatch._functions, (op, "reference"), run)
    monkeypatch.setattr(Played, "direct", 0)


def passes(layer: MXFP8Linear, seed: int, rows: int = 64, grad: bool = True, wide: int = 0) -> list[torch.Tensor]:
    """Output and gradients for inputs of ``seed``, rows ``wide`` elements apart; weights that change in between."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=random))
    x = torch.randn(rows, 64 + wide, generator=random).bfloat16()[:, :64].requires_grad_(grad)
    dy = torch.randn(rows, 96 + wide, generator=random).bfloat16()[:, :96]
    y = layer(x)
    wanted = [p for p in (x, *layer.parameters()) if p.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy)]


def kinds() -> dict[str, int]:
    return dict(Counter(key[0] for key in replays._replays))


@pytest.mark.parametrize("grads", ["input and weight", "weight", "input"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil", "mxfp8_square"])
def test_whole_passes_are_replayed_with_the_same_bits(recipe: str, bias: bool, grads: str, layers: None) -> None:
    layer = make(recipe, bias=bias)
    layer.weight.requires_grad_("weight" in grads)
    unseen = MXFP8Linear.from_linear(torch.nn.Linear(64, 96, bias=bias), recipe)
    unseen.load_state_dict(layer.state_dict())
    unseen.weight.requires_grad_("weight" in grads)
    for seed in range(5):
        before = Played.direct
        got = passes(layer, seed, grad="input" in grads)
        if seed >= 2:
            products = 1 + len(grads.split(" and "))
            assert Played.direct - before == 3 + products  # casts of the weight, the input, the gradient
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replays, "key", lambda *args: None)
            assert same(got, passes(unseen, seed, grad="input" in grads))
    assert kinds()["linear forward"] == kinds()["linear backward"] == 1
    two = "input" in grads and not layer.recipe.shares_weight  # copies of the weight
    assert kinds() == {"linear forward": 1, "linear backward": 1, "quantize_both" if two else "quantize": 1}


def test_calls_of_other_kinds_are_not_those_that_were_recorded(layers: None) -> None:
    """Other rows, strides, gradients, dtypes, recipes: each has its own bits while another one is replayed."""
    layer, narrow = make("mxfp8_coalesced"), make("mxfp8_coalesced").bfloat16()
    calls = [
        (layer, {}), (layer, {"rows": 48}), (layer, {"wide": 32}), (layer, {"grad": False}), (narrow, {}),
        (make("mxfp8_rceil"), {}), (make("mxfp8_floor"), {}),
    ]  # fmt: skip
    for seed in range(4):
        for module, how in calls:
            got = passes(module, seed, **how)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(replays, "key", lambda *args: None)
                module.clear_cache()
                assert same(got, passes(module, seed, **how))
    assert kinds()["linear forward"] == kinds()["linear backward"] == len(calls)


def test_what_is_kept_may_come_back_elsewhere_in_memory(layers: None) -> None:
    """Hooks on saved tensors may move them, as those do that keep them on another device."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(t.numel() + 5, dtype=torch.uint8)[5:]
        return room.view(t.dtype).as_strided(t.shape, t.contiguous().stride()).copy_(t)

    layer = make("mxfp8_coalesced")
    want = [passes(layer, seed) for seed in range(4)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, moved):
        for seed in range(4):
            assert same(passes(layer, seed), want[seed])


def test_what_is_replayed_can_be_watched_and_not_differentiated_twice(layers: None) -> None:
    layer = make("mxfp8_coalesced")
    want = [passes(layer, seed) for seed in range(4)]
    events: list[object] = []
    with observe.subscribe(events.append):
        assert same(passes(layer, 3), want[3])
    assert len([e for e in events if isinstance(e, observe.CastEvent)]) == 5  # one copy of the weight on a CPU
    assert [e.gemm for e in events if isinstance(e, observe.GemmEvent)] == ["fprop", "dgrad", "wgrad"]
    x = torch.randn(64, 64).bfloat16().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.fixture
def steps() -> Iterator[Callable[[int], None]]:
    """Sets the step that random bits depend on; afterwards it is what it was."""
    before = get_step()
    yield set_step
    set_step(before)


@pytest.mark.parametrize("recipe", ["mxfp8_robust", "mxfp8_rceil_wgrad_with_hp"])
def test_random_bits_and_high_precision_are_never_replayed_as_a_whole(
    recipe: str, layers: None, steps: Callable[[int], None]
) -> None:
    layer = make(recipe)
    seen = []
    for step in range(4):
        steps(step)
        seen.append(passes(layer, 0))
    assert not {"linear forward", "linear backward"} & set(kinds())
    assert torch.equal(seen[2][0], seen[3][0])
    assert torch.equal(seen[2][1], seen[3][1]) == (recipe != "mxfp8_robust")  # other bits in every step


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
@pytest.mark.parametrize("rows", [256, 8192])
def test_whole_passes_on_a_gpu(rows: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where wgrad's sum is split along K, and in a CUDA graph."""
    forgotten(monkeypatch)
    layer = MXFP8Linear(384, 256, device="cuda", dtype=torch.bfloat16, recipe=recipe)

    def both(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)]

    for seed in range(5):
        random = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, 384, device="cuda", generator=random).bfloat16().requires_grad_()
        dy = torch.randn(rows, 256, device="cuda", generator=random).bfloat16()
        got = both(x, dy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replays, "key", lambda *args: None)
            layer.clear_cache()
            assert same(got, both(x, dy))
    if recipe == "mxfp8_coalesced" and torch.cuda.get_device_capability() == (9, 0):
        assert kinds()["linear forward"] == kinds()["linear backward"] == 1
    del got  # its leaves' nodes belong to the stream they were made on, and would be used again while capturing
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both(x, dy)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    assert same(kept, both(x, dy))


# Groups of rows


def grouped_passes(
    layer: MXFP8GroupedLinear, seed: int, sizes: list[int], rows: int, grad: bool = True
) -> list[torch.Tensor]:
    """As ``passes``; rows of no group hold NaN, which nothing may read."""
    device = layer.weight.device
    random = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, device=device, generator=random))
    x, dy = (
        torch.randn(rows, n, device=device, generator=random).bfloat16()
        for n in (layer.in_features, layer.out_features)
    )
    x[sum(sizes) :] = dy[sum(sizes) :] = torch.nan
    y = layer(x.requires_grad_(grad), ends(sizes, device))
    wanted = [p for p in (x, layer.weight) if p.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy)]


def unseen(layer: MXFP8GroupedLinear, *args: object) -> list[torch.Tensor]:
    """The same without a replay of anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "key", lambda *args: None)
        layer.clear_cache()
        return grouped_passes(layer, *args)  # type: ignore[arg-type]


SIZES = [[5, 0, 27, 64], [96, 0, 0, 0], [0, 0, 0, 0], [0, 31, 1, 0], [24, 24, 24, 24], [1, 2, 3, 4]]


@pytest.mark.parametrize("grads", ["input and weight", "weight", "input"])
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
def test_grouped_passes_are_replayed_whatever_the_groups_are(recipe: str, grads: str, layers: None) -> None:
    layer = MXFP8GroupedLinear(4, 64, 96, recipe=recipe)
    layer.weight.requires_grad_("weight" in grads)
    for seed, sizes in enumerate(SIZES):
        before = Played.direct
        got = grouped_passes(layer, seed, sizes, 96, "input" in grads)
        if seed >= 2:
            wanted = len(grads.split(" and "))
            # The check of the groups, casts of the weight (once), the input and the gradient, and the products.
            assert Played.direct - before == 1 + 3 + 1 + wanted
        assert same(got, unseen(layer, seed, sizes, 96, "input" in grads))
    assert kinds()["grouped forward"] == kinds()["grouped backward"] == 1


def test_grouped_passes_of_other_kinds_are_not_those_that_were_recorded(layers: None) -> None:
    """Other rows, numbers of groups and dtypes of what holds their ends."""
    calls = [(MXFP8GroupedLinear(g, 64, 96, recipe="mxfp8_coalesced"), rows) for g in (1, 4) for rows in (96, 64)]
    for seed in range(4):
        for layer, rows in calls:
            sizes = [5 * seed] * layer.num_groups
            sizes[-1] += seed
            got = grouped_passes(layer, seed, sizes, rows)
            assert same(got, unseen(layer, seed, sizes, rows))
    assert kinds()["grouped forward"] == kinds()["grouped backward"] == len(calls)
    x, layer = torch.randn(64, 64), calls[-1][0]
    for dtype in (torch.int32, torch.int64) * 3:
        assert torch.equal(layer(x, ends([3, 0, 7, 9], x.device, dtype)), layer(x, ends([3, 0, 7, 9], x.device)))


def test_bad_groups_are_refused_beside_replays(layers: None) -> None:
    layer = MXFP8GroupedLinear(4, 64, 96, recipe="mxfp8_coalesced")
    for seed in range(4):
        grouped_passes(layer, seed, [5, 0, 27, 64], 96)
    a, b = mxfp8.quantize(torch.randn(96, 64)), mxfp8.quantize(torch.randn(4, 32, 64))
    x = torch.randn(96, 64).bfloat16()
    calls = (
        lambda offs: layer(x, offs), lambda offs: mxfp8.grouped_gemm(a, b, offs),
        lambda offs: mxfp8.quantize_grouped(x, offs), lambda offs: mxfp8.quantize_both_grouped(x, offs),
    )  # fmt: skip
    for call in calls:
        for _ in range(4):
            call(torch.tensor([5, 5, 32, 96], dtype=torch.int32))
        for offs in ([5, 4, 27, 64], [-1, 5, 27, 64], [5, 6, 27, 97]):
            with pytest.raises(ValueError, match="offs"):
                call(torch.tensor(offs, dtype=torch.int32))
        for offs in (torch.tensor([5.0, 5.0, 32.0, 96.0]), torch.tensor([[5, 5, 32, 96]])):
            with pytest.raises(ValueError, match="offs is"):
                call(offs)
    assert kinds().keys() >= {"grouped forward", "grouped_gemm", "quantize_grouped", "quantize_both_grouped"}


@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
def test_ops_on_groups_are_replayed(block: tuple[int, int], layers: None) -> None:
    assert_ops_replayed(torch.device("cpu"), block)
    assert kinds() == OPS


OPS = dict.fromkeys(("quantize", "quantize_grouped", "quantize_both_grouped", "grouped_gemm", "grouped_wgrad"), 1)


def assert_ops_replayed(device: torch.device, block: tuple[int, int]) -> None:
    square = (128, 128) if block == (1, 128) else block

    def ops(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> list[torch.Tensor]:
        rows, right = mxfp8.quantize_both_grouped(x, offs, block=block)
        columns = [mxfp8.quantize_grouped(dy, offs, block=block), right]
        out = mxfp8.grouped_gemm(rows, mxfp8.quantize(w, block=square), offs)
        parts = [t for c in columns for t in (c.q.qdata.view(torch.uint8), c.q.scale_bytes, c.starts)]
        return [*parts, out, mxfp8.grouped_wgrad(*columns)]

    for seed, sizes in enumerate(SIZES):
        random = torch.Generator(device).manual_seed(seed)
        x, dy, w = (
            torch.randn(n, device=device, generator=random).bfloat16() for n in ((96, 128), (96, 256), (4, 256, 128))
        )
        got = ops(x, dy, w, ends(sizes, device))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replays, "key", lambda *args: None)
            assert same(got, ops(x, dy, w, ends(sizes, device)))


def test_replayed_groups_can_be_watched_and_not_differentiated_twice(layers: None) -> None:
    layer = MXFP8GroupedLinear(4, 64, 96, recipe="mxfp8_coalesced")
    want = [grouped_passes(layer, seed, SIZES[seed], 96) for seed in range(4)]
    events: list[object] = []
    with observe.subscribe(events.append):
        assert same(grouped_passes(layer, 3, SIZES[3], 96), want[3])
    assert {e.gemm for e in events if isinstance(e, observe.GemmEvent)} == {"fprop", "dgrad", "wgrad"}
    x = torch.randn(96, 64).bfloat16().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x, ends(SIZES[0], x.device)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8_robust", "mxfp8_rceil_wgrad_with_hp"])
def test_random_bits_of_groups_are_never_replayed(recipe: str, layers: None, steps: Callable[[int], None]) -> None:
    layer, seen = MXFP8GroupedLinear(4, 64, 96, recipe=recipe), []
    for step in range(4):
        steps(step)
        seen.append(grouped_passes(layer, 0, SIZES[0], 96))
    assert not {"grouped forward", "grouped backward"} & set(kinds())
    assert torch.equal(seen[2][0], seen[3][0])
    assert torch.equal(seen[2][1], seen[3][1]) == (recipe != "mxfp8_robust")  # other bits in every step


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 128), (1, 32)])
def test_ops_on_groups_are_replayed_on_a_gpu(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten(monkeypatch)
    assert_ops_replayed(torch.device("cuda"), block)
    if block == (1, 128) and torch.cuda.get_device_capability() == (9, 0):
        assert kinds() == OPS


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
@pytest.mark.parametrize("rows", [96, 4096])
def test_grouped_passes_on_a_gpu(rows: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten(monkeypatch)
    layer = MXFP8GroupedLinear(4, 384, 256, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    for seed, sizes in enumerate(SIZES):
        sizes = [n * rows // 96 for n in sizes]
        assert same(grouped_passes(layer, seed, sizes, rows), unseen(layer, seed, sizes, rows))
    if recipe == "mxfp8_coalesced" and torch.cuda.get_device_capability() == (9, 0):
        assert kinds()["grouped forward"] == kinds()["grouped backward"] == 1
