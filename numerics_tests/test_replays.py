"""Replayed calls: the bits of the call itself for every tensor of that kind, and no replay where one would be wrong.

Kernels are played by functions of addresses, so that what is recorded and repeated can be checked without a GPU.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import mxfp8
from mxfp8.dispatch import replays

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import _launch
from mxfp8.kernels._device import INTERPRETED
from triton import knobs

from numerics_tests.recording import forgotten, outside, recorded

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

        return lambda *args, num_warps, **constants: outside(lambda: first(*args, **constants))

    def launch(self, x, y, z, stream, function, coop, pdl, scratch, profile, meta, a, b, c, source, target, size, ADD):  # type: ignore[no-untyped-def]
        assert (x, y, z, stream, function, meta, size) == (2, 1, 1, "stream", "function", "metadata", N)
        self.direct += 1
        source, target = (p.data_ptr() if isinstance(p, torch.Tensor) else p for p in (source, target))
        for i in range(size):
            at = ctypes.c_uint8.from_address(target + i)
            at.value = (ctypes.c_uint8.from_address(source + i).value + ADD) % 256


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    played = Kernel()
    recorded(monkeypatch, lambda: played.device)
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


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_replayed_casts_and_products_have_the_bits_of_the_reference(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    forgotten(monkeypatch)
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
