"""Replayed calls: the bits of the call itself for every tensor of that kind, and no replay where one would be wrong.

Kernels are played by functions of addresses, so that what is recorded and repeated can be checked without a GPU.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import mxfp8
from mxfp8 import MXFP8Linear, dispatch, observe
from mxfp8.dispatch import replays
from numerics_tests.test_linear import make, same

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _launch, _replay
from mxfp8.kernels._device import INTERPRETED
from triton import knobs

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted process launches nothing")

N = 64


class Kernel:
    """What ``launch_version`` needs of a compiled kernel: ``out[i] = in[i] + addend`` on ``N`` bytes."""

    def __init__(self, scratch: int = 0) -> None:
        self.run = SimpleNamespace(
            launch=self.launch, global_scratch_size=scratch, profile_scratch_size=0, launch_cooperative_grid=False,
            launch_pdl=False,
        )  # fmt: skip
        self.function, self.packed_metadata = "function", "metadata"
        self.direct = 0
        self.device: int | None = None  # the current one

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., "Kernel"]:
        def first(source: torch.Tensor, target: torch.Tensor, size: int, ADD: int) -> Kernel:
            for hook in knobs.runtime.launch_enter_hook.calls:
                hook(None)
            target.copy_(source + ADD)
            return self

        return lambda *args, num_warps, **constants: _outside(lambda: first(*args, **constants))

    def launch(self, x, y, z, stream, function, coop, pdl, scratch, profile, meta, a, b, c, source, target, size, ADD):  # type: ignore[no-untyped-def]
        assert (x, y, z, stream, function, meta, size) == (2, 1, 1, "stream", "function", "metadata", N)
        self.direct += 1
        source, target = (p.data_ptr() if isinstance(p, torch.Tensor) else p for p in (source, target))
        for i in range(size):
            at = ctypes.c_uint8.from_address(target + i)
            at.value = (ctypes.c_uint8.from_address(source + i).value + ADD) % 256


def _outside(f: Callable[[], Kernel]) -> Kernel:
    """A kernel's own work, which dispatch modes do not see."""
    with torch.utils._python_dispatch._disable_current_modes():
        return f()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The CPU as a device on which calls are recorded."""
    monkeypatch.setattr(replays, "_RECORDED", ("cpu",))
    monkeypatch.setattr(replays, "_seen", {})
    monkeypatch.setattr(replays, "_replays", {})
    monkeypatch.setattr(_launch, "_DIRECT", True)
    monkeypatch.setattr(_launch, "allocate", torch._C._dynamo.guards._empty_strided_cpu)
    played = Kernel()
    for module in (_launch, _replay):
        monkeypatch.setattr(module, "_get_device", lambda: played.device)
        monkeypatch.setattr(module, "_get_stream", lambda index: "stream")
    return played


def add(kernel: Kernel, source: torch.Tensor, amount: int, versions: dict) -> torch.Tensor:
    out = _launch.empty((N,), (1,), source.device)
    _launch.launch_version(
        kernel, versions, "key", (2, 1, 1), (source, out, N), {"ADD": amount}, source.device, num_warps=1
    )
    return out


def call(op: Callable[[torch.Tensor], object], *inputs: torch.Tensor) -> object:
    """As the public ops do it."""
    key = replays.key("op", inputs)
    made = replays.again(key, *inputs)
    return made if made is not None else replays.run(key, lambda: op(*inputs), inputs)


def bytes_(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (N,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_replay_reads_and_writes_the_tensors_of_its_own_call(kernel: Kernel) -> None:
    first, second, runs = {}, {}, []

    def op(x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
        """An intermediate, a result that is a view, one in another dtype, and the input itself."""
        runs.append(1)
        between = add(kernel, x, 3, first)
        out = add(kernel, between, 4, second)
        return out.view(torch.int8), None, x, between.view(8, 8)[:5].t()

    results = []
    for seed in range(5):
        x = bytes_(seed)
        out, nothing, same, between = call(op, x)
        assert nothing is None
        assert same is x or same.data_ptr() == x.data_ptr()
        assert torch.equal(between, (x + 3).view(8, 8)[:5].t())
        assert between.stride() == (1, 8)
        assert between.untyped_storage().nbytes() == N  # what the kernel writes
        assert out.dtype == torch.int8
        assert torch.equal(out.view(torch.uint8), x + 7)
        results.append((x, out))
    assert len(runs) == 2  # once as it is, once recorded
    assert kernel.direct == 2 * 3
    for x, out in results:  # nothing was written twice
        assert torch.equal(out.view(torch.uint8), x + 7)


def test_two_inputs_keep_their_places(kernel: Kernel) -> None:
    versions = ({}, {})

    def op(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add(kernel, y, 1, versions[0]), add(kernel, x, 2, versions[1])

    same = bytes_(9)
    call(op, same, same)
    call(op, same, same)  # whose address is whose cannot be told: not recorded
    assert not replays._replays
    for seed in range(4):
        x, y = bytes_(seed), bytes_(seed + 50)
        left, right = call(op, x, y)
        assert torch.equal(left, y + 1)
        assert torch.equal(right, x + 2)
    assert len(replays._replays) == 1
    left, right = call(op, same, same)
    assert torch.equal(left, same + 1)
    assert torch.equal(right, same + 2)


@pytest.mark.parametrize("why", ["operator", "other kernel", "scratch", "slice", "inside", "nothing launched"])
def test_what_cannot_be_repeated_runs_every_time(kernel: Kernel, why: str) -> None:
    runs = []
    if why == "scratch":
        kernel.run.global_scratch_size = 16
    wide = torch.zeros(2 * N, dtype=torch.uint8)

    def op(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if why == "nothing launched":
            return _launch.empty((N,), (1,), x.device)
        if why == "operator":
            x = x.clone()
        if why == "other kernel":
            kernel[2, 1, 1](x, torch.empty_like(x), N, num_warps=1, ADD=0)
        if why == "slice":
            return add(kernel, wide[16 : 16 + N], 1, {})
        out = add(kernel, x, 1, {})
        return out[1:] if why == "inside" else out

    for seed in range(4):
        x = bytes_(seed)
        out = call(op, x)
        if why not in ("slice", "nothing launched"):
            assert torch.equal(out, (x + 1)[1:] if why == "inside" else x + 1)
    assert len(runs) == 4
    assert not replays._replays


def test_profilers_and_other_devices_get_the_call_itself(kernel: Kernel) -> None:
    versions: dict = {}
    seen: list[object] = []
    for seed in range(3):
        call(lambda x: add(kernel, x, 1, versions), bytes_(seed))
    assert kernel.direct == 1
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert torch.equal(call(lambda x: add(kernel, x, 1, versions), bytes_(3)), bytes_(3) + 1)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert seen == [None]
    kernel.device = 1
    assert torch.equal(call(lambda x: add(kernel, x, 1, versions), bytes_(4)), bytes_(4) + 1)
    assert kernel.direct == 1


def test_a_recorder_leaves_nothing_behind(kernel: Kernel) -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    for _ in range(3):
        with pytest.raises(ArithmeticError):
            call(op, bytes_(0))
    assert _launch.watcher.active is None
    assert not knobs.runtime.launch_enter_hook.calls


def test_keys_tell_apart_what_kernels_do() -> None:
    x = torch.zeros(64, 64)
    different = [
        x, x.to(torch.bfloat16), x[:32], x[:, :32], x.t()[:32], torch.zeros(64 * 64 + 1)[1:].view(64, 64),
        torch.zeros(64, 64, device="meta"),
    ]  # fmt: skip
    keys = [replays.key("op", (y,), -1, "e4m3") for y in different]
    keys += [replays.key("op", (x,), -2, "e4m3"), replays.key("op", (x,), -1), replays.key("other", (x,), -1, "e4m3")]
    assert len(set(keys)) == len(keys)
    assert replays.key("op", (torch.ones(64, 64),), -1, "e4m3") == keys[0]
    for strange in (
        torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 4), check_invariants=True),
        type("T", (torch.Tensor,), {})(),
    ):
        assert replays.key("op", (strange,)) is None


def test_forgotten_before_they_become_a_leak(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_LIMIT", 4)
    for n in range(1, 20):
        call(lambda x: x, torch.zeros(n))
    assert len(replays._seen) <= 4


def test_forgotten_when_something_else_is_decided(kernel: Kernel) -> None:
    versions = ({}, {})
    for seed in range(4):
        call(lambda x: add(kernel, x, 1, versions[0]), bytes_(seed))
    replays.forget()
    for seed in range(4):
        assert torch.equal(call(lambda x: add(kernel, x, 2, versions[1]), bytes_(seed)), bytes_(seed) + 2)


@pytest.mark.parametrize("block", [[1, 32], (1.0, 32), "1x32"])
def test_arguments_are_checked_as_before(block: object) -> None:
    x = torch.randn(4, 64)
    for _ in range(3):
        mxfp8.quantize(x)
    if isinstance(block, list):
        assert mxfp8.quantize(x, block=block).block == (1, 32)
        return
    with pytest.raises(ValueError, match="unknown block shape"):
        mxfp8.quantize(x, block=block)
    with pytest.raises(ValueError, match="unknown element format"):
        mxfp8.quantize(x, fmt=["e4m3"])
    with pytest.raises(ValueError, match=r"axis is -1\.0"):
        mxfp8.quantize(x, axis=-1.0)


# Whole layers


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

        return lambda *tensors, num_warps: _outside(lambda: first(*tensors))

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
    results = _outside(lambda: op(*tensors))
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
def layers(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts and products of the reference as kernels that can be recorded."""
    table = dispatch._functions
    plain = {op: table[op, "reference"] for op in ("quantize", "quantize_both", "gemm")}

    def gemm(a, a_scale, a_block, b, b_scale, b_block, *, bias, **how):  # type: ignore[no-untyped-def]
        def product(a, s, b, t, *bias):  # type: ignore[no-untyped-def]
            return (plain["gemm"](a, s, a_block, b, t, b_block, bias=bias[0] if bias else None, **how),)

        return played(product, a, a_scale, b, b_scale, *(() if bias is None else (bias,)))[0]

    monkeypatch.setitem(table, ("gemm", "reference"), gemm)
    for op in ("quantize", "quantize_both"):

        def cast(x, op=op, **how):  # type: ignore[no-untyped-def]
            return tuple(played(lambda y: plain[op](y, **how), x))

        monkeypatch.setitem(table, (op, "reference"), cast)
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


@pytest.mark.parametrize("recipe", ["mxfp8_robust", "mxfp8_rceil_wgrad_with_hp"])
def test_random_bits_and_high_precision_are_never_replayed_as_a_whole(recipe: str, layers: None) -> None:
    layer = make(recipe)
    seen = []
    for step in range(4):
        mxfp8.rng.set_step(step)
        seen.append(passes(layer, 0))
    assert not {"linear forward", "linear backward"} & set(kinds())
    assert torch.equal(seen[2][0], seen[3][0])
    assert torch.equal(seen[2][1], seen[3][1]) == (recipe != "mxfp8_robust")  # other bits in every step


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8_coalesced", "mxfp8_rceil"])
@pytest.mark.parametrize("rows", [256, 8192])
def test_whole_passes_on_a_gpu(rows: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where wgrad's sum is split along K, and in a CUDA graph."""
    monkeypatch.setattr(replays, "_seen", {})
    monkeypatch.setattr(replays, "_replays", {})
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


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_replayed_casts_and_products_have_the_bits_of_the_reference(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(replays, "_seen", {})
    monkeypatch.setattr(replays, "_replays", {})
    for seed in range(5):
        x = torch.randn(272, 384, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()
        w = torch.randn(256, 384, device=device).bfloat16().requires_grad_(grad)
        for got, want in (
            ([mxfp8.quantize(x)], [mxfp8.quantize(x, backend="reference")]),
            ([mxfp8.quantize(x, -2, block=(1, 128))], [mxfp8.quantize(x, -2, block=(1, 128), backend="reference")]),
            (mxfp8.quantize_both(x), mxfp8.quantize_both(x, backend="reference")),
            (
                mxfp8.quantize_both(w, block=(128, 128)),
                mxfp8.quantize_both(w, block=(128, 128), backend="reference"),
            ),
        ):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
                assert torch.equal(a.scale_bytes, b.scale_bytes)
                assert (a.qdata.dtype, a.axis, a.block) == (b.qdata.dtype, b.axis, b.block)
        a, b = mxfp8.quantize(x, block=(1, 128)), mxfp8.quantize(w, block=(128, 128))
        bias = torch.randn(256, device=device)
        want = mxfp8.gemm(a, b, bias, torch.float32, backend="reference")
        torch.testing.assert_close(mxfp8.gemm(a, b, bias, torch.float32), want, rtol=0, atol=0.02 * want.abs().max())
    assert replays._replays


@pytest.mark.gpu
def test_replays_in_a_cuda_graph() -> None:
    x = torch.randn(64, 256, device="cuda")
    for _ in range(3):
        mxfp8.quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = mxfp8.quantize(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(q.dequantize(), mxfp8.quantize(x, backend="reference").dequantize())
