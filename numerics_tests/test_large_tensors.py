"""More elements than an int32 counts: the last rows (or columns) of a tensor give what they give alone, and the first
ones are not written by what wrapped round. On a CPU the same with few rows, which tests the tests."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

import mxfp8
from mxfp8 import RngKey, fused
from mxfp8.optim import AdamW, RowwiseAdagrad
from mxfp8.tensor import MXTensor

KEY = RngKey(seed=3)
WIDTH, TAIL = 4096, 256
"""``TAIL``: whole blocks of every shape."""

Results = Iterable[torch.Tensor | MXTensor | None]
Case = Callable[[torch.Tensor, RngKey], Results]
"""Of ``x`` and where it lies; the first dimension of every result is that of rows, or of groups of rows. One by one, so
that few of them take memory at a time."""


def weights(x: torch.Tensor, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randint(-3, 4, (n, k), device=x.device, generator=generator).bfloat16()


def blocks_of(cast: Callable[..., MXTensor]) -> Case:
    return lambda x, at: (cast(x, block=block) for block in ((1, 32), (1, 128), (1, 256), (32, 32), (128, 128)))


def columns(x: torch.Tensor, block: tuple[int, int]) -> MXTensor:
    return mxfp8.quantize(x, -2, block=block)


def both(x: torch.Tensor, at: RngKey) -> Results:
    pairs = (((1, 32), (1, 32)), ((1, 128), (128, 128)), ((32, 32), (32, 32)))
    return (q for a, b in pairs for q in mxfp8.quantize_both(x, block=a, column_block=b))


def stochastic(x: torch.Tensor, at: RngKey) -> Results:
    return (mxfp8.quantize(x, axis, rounding="stochastic", seed=at) for axis in (-1, -2))


def rotated(x: torch.Tensor, at: RngKey) -> Results:
    return (mxfp8.quantize(x, axis, block=(1, 128), hadamard=32) for axis in (-1, -2))


def views(x: torch.Tensor, at: RngKey) -> Results:
    """Few elements, far apart."""
    view = x[:, 1024:1280]
    yield from (mxfp8.quantize(view), mxfp8.quantize(view, -2), *mxfp8.quantize_both(view))
    yield from fused.activation_quantize(view, "relu")[:2]


def grouped_casts(x: torch.Tensor, at: RngKey) -> Results:
    offs = torch.tensor([len(x) - TAIL, len(x)], device=x.device, dtype=torch.int32)
    for block in ((1, 32), (128, 128)):
        rows, columns = mxfp8.quantize_both_grouped(x, offs, column_block=block)
        yield rows
        for q in (columns.q, mxfp8.quantize_grouped(x, offs, block=block).q):
            yield q.qdata.view(torch.uint8)[: len(x)]  # padding for other sizes of groups follows
            yield q.scale_bytes[: len(x) // block[1]]


def quantised_again(x: torch.Tensor, at: RngKey) -> Results:
    q, columns = mxfp8.quantize(x), mxfp8.quantize(x, -2)
    return [q.dequantize(torch.bfloat16), mxfp8.recoalesce(q, (1, 128)), mxfp8.recoalesce(columns, (128, 128))]


def norms(x: torch.Tensor, at: RngKey) -> Results:
    weight, outputs = weights(x, 1, WIDTH)[0], ("rows", "columns", "hp")
    for norm in ("rms", "layer"):
        y = fused.norm_quantize(x, weight, norm=norm, outputs=outputs)
        yield from (*y[:3], y.rstd)
        yield from fused.norm_quantize_backward(x, x, y.rstd, y.mean, weight, norm=norm, outputs=outputs)[:3]


def activation(x: torch.Tensor, at: RngKey) -> Results:
    yield from fused.activation_quantize(x, "silu", outputs=("rows", "columns", "hp"))[:3]


def activations(x: torch.Tensor, at: RngKey) -> Results:
    how = {"outputs": ("rows", "columns", "hp"), "block": (1, 128), "column_block": (128, 128)}
    yield from fused.activation_quantize(x, "silu", **how)[:3]
    yield from fused.activation_quantize(x, "swiglu", **how)[:3]
    yield from fused.activation_quantize_backward(x, x, "silu", **how)[:3]


PAIRS = (((1, 128), (128, 128)), ((32, 32), (32, 32)), ((1, 32), (1, 32)))


def products_of_many_operands(x: torch.Tensor, at: RngKey) -> Results:
    w = weights(x, 48, WIDTH)
    return (mxfp8.gemm(mxfp8.quantize(x, block=a), mxfp8.quantize(w, block=b)) for a, b in PAIRS)


def products_with_many_results(x: torch.Tensor, at: RngKey) -> Results:
    w, narrow = weights(x, WIDTH, 128), x[:, :128]
    return (mxfp8.gemm(mxfp8.quantize(narrow, block=a), mxfp8.quantize(w, block=b)) for a, b in PAIRS)


def products_in_float32_and_their_copies(x: torch.Tensor, at: RngKey) -> Results:
    a, b = mxfp8.quantize(x[:, :128], block=(1, 128)), mxfp8.quantize(weights(x, WIDTH, 128), block=(128, 128))
    yield mxfp8.gemm_quantize(a, b, activation="relu", block=(1, 128), outputs=("rows",)).rows
    yield mxfp8.gemm(a, b, out_dtype=torch.float32)


def weight_gradients(x: torch.Tensor, at: RngKey) -> Results:
    """Sums over all rows, of which only the last are not zero."""
    dy, blocks = x[:, :128].contiguous(), (((1, 128), (128, 128)), ((1, 32), (1, 32)))
    return (mxfp8.gemm(columns(dy, a).mT, columns(x, b).mT, out_dtype=torch.float32) for a, b in blocks)


def grouped_products(x: torch.Tensor, at: RngKey) -> Results:
    offs = torch.tensor([len(x) - TAIL, len(x)], device=x.device, dtype=torch.int32)
    w, narrow = torch.stack([weights(x, WIDTH, 128)] * 2), x[:, :128]
    return (mxfp8.grouped_gemm(mxfp8.quantize(narrow, block=a), mxfp8.quantize(w, block=b), offs) for a, b in PAIRS)


def optimisers(x: torch.Tensor, at: RngKey) -> Results:
    for optimiser in (AdamW, RowwiseAdagrad):
        p = torch.nn.Parameter(x.clone())
        p.grad = x
        optimiser([p], lr=0.1).step()
        yield p.detach()


CASTS: dict[str, Case] = {
    "rows": blocks_of(lambda x, block: mxfp8.quantize(x, block=block)),
    "columns": blocks_of(columns),
    "both": both,
    "stochastic": stochastic,
    "hadamard": rotated,
    "quantised_again": quantised_again,
    "activation": activation,
}
CASES: dict[str, Case] = CASTS | {
    "views": views,
    "grouped_casts": grouped_casts,
    "norms": norms,
    "activations": activations,
    "products_of_many_operands": products_of_many_operands,
    "products_with_many_results": products_with_many_results,
    "products_in_float32_and_their_copies": products_in_float32_and_their_copies,
    "weight_gradients": weight_gradients,
    "grouped_products": grouped_products,
    "optimisers": optimisers,
}


@pytest.fixture
def memory() -> Iterator[None]:
    """What a test took goes back to the device: others run beside it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parts(results: Results) -> Iterator[torch.Tensor]:
    for result in results:
        if isinstance(result, MXTensor):
            yield from (result.qdata.view(torch.uint8), result.scale_bytes)
        elif result is not None:
            yield result


def on(cpu: int, cuda: int) -> pytest.MarkDecorator:
    """The size of a test on each device."""
    return pytest.mark.parametrize("device, size", [("cpu", cpu), pytest.param("cuda", cuda, marks=pytest.mark.gpu)])


def assert_same(case: Case, x: torch.Tensor, last: torch.Tensor, at: RngKey, dim: int) -> None:
    """``x`` is zero but for ``last`` at the end of ``dim``."""
    alone = [t.clone() for t in parts(case(last, at))]
    nothing = [t.clone() for t in parts(case(torch.zeros_like(last), KEY))]
    assert alone
    for i, (got, end, start) in enumerate(zip(parts(case(x, KEY)), alone, nothing, strict=True)):
        n, m = got.shape[dim], end.shape[dim]
        assert torch.equal(got.narrow(dim, n - m, m), end), f"end of result {i}"
        if n > m:
            assert torch.equal(got.narrow(dim, 0, m), start), f"start of result {i}"


@on(4 * TAIL, 2049 * TAIL)  # times 4096: 2**31 + 2**20
@pytest.mark.parametrize("name", CASES)
def test_last_rows_are_as_they_are_alone(name: str, device: str, size: int, memory: None) -> None:
    """Small integers of mean 0, whose products and sums are exact in any order."""
    half = torch.randint(-3, 4, (TAIL, WIDTH // 2))
    last = torch.cat((half, -half), dim=1).to(device, torch.bfloat16)
    x = torch.zeros(size, WIDTH, dtype=last.dtype, device=device)
    x[-TAIL:] = last
    assert_same(CASES[name], x, last, KEY.at(size - TAIL), 0)


@on(4 * TAIL, 2**23 + TAIL)  # times 257: over 2**31
@pytest.mark.parametrize("name", CASTS)
def test_last_columns_are_as_they_are_alone(name: str, device: str, size: int, memory: None) -> None:
    last = torch.randn(257, TAIL).to(device, torch.bfloat16)
    x = torch.zeros(257, size, dtype=last.dtype, device=device)
    x[:, -TAIL:] = last
    assert_same(CASTS[name], x, last, KEY.at(0, size - TAIL), 1)
