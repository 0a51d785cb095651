"""What activations and norms with MX casts are held against: inputs of many layouts, the bits of a result, and the
interval of values that a float32 computation may give.
"""

import math
from collections.abc import Callable

import torch

import mxfp8
from mxfp8 import fused
from mxfp8.formats import ElementFormat
from mxfp8.reference import fused as reference
from mxfp8.reference.quantize import scale_byte
from mxfp8.tensor import MXTensor, block_rc
from numerics_tests import tolerances

ALL = ("rows", "columns", "hp")
EXACT = ("relu", "hardswish")
SMOOTH = tuple(a for a in reference.ACTIVATIONS if a not in EXACT)
BLUNT = 1e-2
"""Elements for which an interval may leave a choice: more would hide what it is to find. gelu's tail comes closest."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def values(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 3.0) -> torch.Tensor:
    return (
        (torch.randn(shape) * torch.exp2(torch.randint(-3, 2, (*shape[:-1], 1)).float()) * spread).to(dtype).to(device)
    )


SMALL = not torch.cuda.is_available()
"""Whether kernels are interpreted, in tiles of 64x128 or of one block: a few programs with tails are enough there."""


def size(large: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, ...]:
    return small if SMALL else large


LAYOUTS: dict[str, Callable[[torch.dtype, torch.device], torch.Tensor]] = {
    "whole": lambda dt, dev: values(*size((128, 256), (64, 256)), dtype=dt, device=dev),
    "tails": lambda dt, dev: values(*size((129, 304), (70, 144)), dtype=dt, device=dev),
    "ragged": lambda dt, dev: values(33, 70, dtype=dt, device=dev),
    "transposed": lambda dt, dev: values(*size((160, 96), (144, 64)), dtype=dt, device=dev).t(),
    "slice": lambda dt, dev: values(*size((70, 320), (48, 192)), dtype=dt, device=dev)[:, 32:-32],
    "unaligned": lambda dt, dev: values(64, 131, dtype=dt, device=dev)[:, 1:],
    "batch": lambda dt, dev: values(*size((3, 40, 96), (2, 40, 96)), dtype=dt, device=dev),
    "one_row": lambda dt, dev: values(1, 128, dtype=dt, device=dev),
    "one_column_pair": lambda dt, dev: values(64, 2, dtype=dt, device=dev),
    "no_rows": lambda dt, dev: values(0, 64, dtype=dt, device=dev),
}


INPUTS = [(name, torch.bfloat16) for name in LAYOUTS]
INPUTS += [(name, dtype) for name in ("tails", "batch") for dtype in (torch.float32, torch.float16)]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with one pattern for every NaN."""
    if x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view(INTEGERS[x.dtype.itemsize])


def flat(result: tuple[object, ...]) -> list[torch.Tensor | None]:
    out: list[torch.Tensor | None] = []
    for part in result:
        out += [part.qdata, part.scale_bytes] if isinstance(part, MXTensor) else [part]  # type: ignore[list-item]
    return out


def same(got: tuple[object, ...], want: tuple[object, ...]) -> list[str]:
    """Which parts of two results differ, and in how many entries."""
    out = []
    for i, (g, w) in enumerate(zip(flat(got), flat(want), strict=True)):
        if g is None or w is None:
            out += [] if g is w else [f"part {i}: one is None"]
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype), i
        if wrong := int((bits(g) != bits(w)).sum()):
            out.append(f"part {i} ({g.dtype}, {tuple(g.shape)}): {wrong} differ")
    return out


def padding_is_zero(columns: MXTensor) -> bool:
    """The bytes between the columns of a column-major copy."""
    q = columns.qdata.view(torch.uint8)
    if q.stride(-2) != 1 or q.numel() == 0 or q.ndim != 2:
        return True
    pitch = q.stride(-1)
    return not torch.as_strided(q, (q.shape[1], pitch), (pitch, 1))[:, q.shape[0] :].any()


def grid(x: torch.Tensor, rc: tuple[int, int]) -> torch.Tensor:
    """``[..., R, C]`` as ``[..., R / r, r, C / c, c]``, padded with zeros."""
    r, c = rc
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % c, 0, -x.shape[-2] % r))
    return x.unflatten(-1, (-1, c)).unflatten(-3, (-1, r))


def outward(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 bounds as float32 numbers that are not inside them."""
    below, above = low.to(torch.float32), high.to(torch.float32)
    inf = torch.tensor(torch.inf, device=low.device)
    below = torch.where(below.to(torch.float64) > low, torch.nextafter(below, -inf), below)
    return below, torch.where(above.to(torch.float64) < high, torch.nextafter(above, inf), above)


def outside(q: MXTensor, low: torch.Tensor, high: torch.Tensor, rule: str = "rceil") -> tuple[int, int, float]:
    """How many scale bytes and how many elements no value in ``[low, high]`` gives; and for what part of the elements
    the interval leaves a choice, which is how blunt the check is."""
    rc, fmt, rule_ = block_rc(q.block, q.axis), q.fmt, mxfp8.ScaleRule(rule)
    least = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
    most = torch.maximum(low.abs(), high.abs())
    byte = q.scale_bytes.to(torch.int32)
    lo, hi = (scale_byte(grid(v, rc).amax((-3, -1)).view(torch.int32), fmt, rule_) for v in (least, most))
    inverse = torch.where(byte == 254, 0x00400000, (254 - byte) << 23).view(torch.float32)[..., :, None, :, None]
    floor, ceiling = (rounded(grid(v, rc) * inverse, fmt) for v in (low, high))
    element = grid(q.qdata.to(torch.float32), rc)
    wrong = (element < floor) | (element > ceiling)
    return int(((byte < lo) | (byte > hi)).sum()), int(wrong.sum()), float((floor != ceiling).float().mean())


def rounded(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype).to(torch.float32)


def check_inside(
    result: tuple[object, ...], exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype, round_first: bool
) -> None:
    """Every part of a result is one of ``exact +- error``; and the interval decides nearly every element."""
    low, high = outward(exact - error, exact + error)
    near = (low.to(dtype), high.to(dtype))
    for part in result[:2]:
        if isinstance(part, MXTensor):
            bounds = (n.to(torch.float32) for n in near) if round_first else (low, high)
            scales, elements, blunt = outside(part, *bounds)
            assert (scales, elements) == (0, 0), (part.axis, part.block)
            assert blunt < BLUNT or exact.numel() < 10_000, "the bound decides too little"
    hp = result[2]
    if isinstance(hp, torch.Tensor):
        assert hp.dtype == dtype
        assert ((hp >= near[0]) & (hp <= near[1])).all()


def exact_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Independent of the reference: torch's own functions in float64. Its gelu by tanh cancels in float64 too."""
    functional = torch.nn.functional
    if activation == "swiglu":
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return getattr(functional, activation)(x)


def widened(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the activation is taken of, in float64: the float32 sum."""
    return (x.float() if bias is None else x.float() + bias.float()).double()


def value_error(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != "swiglu":
        return tolerances.activation_error(activation, x)
    gate, up = x.chunk(2, -1)
    product = torch.nn.functional.silu(gate) * up
    return tolerances.activation_error("silu", gate) * up.abs() + tolerances.U32 * product.abs()


def gradient_bounds(x: torch.Tensor, dy: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact gradient by autograd in float64, and the error of a float32 one."""
    x = x.clone().requires_grad_()
    exact_activation(x, activation).backward(dy)
    exact, x = x.grad, x.detach()
    assert exact is not None
    if activation != "swiglu":
        error = dy.abs() * tolerances.activation_gradient_error(activation, x)
    else:
        gate, up = x.chunk(2, -1)
        through_gate = (dy * up).abs() * tolerances.activation_gradient_error("silu", gate)
        error = torch.cat([through_gate, dy.abs() * tolerances.activation_error("silu", gate)], -1)
    return exact, error * 1.01 + 3 * tolerances.U32 * exact.abs() + tolerances.SMALLEST[torch.float32]


def recomputed(
    result: fused.Normalized, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, norm: str,
    norm_block: int, kw: dict[str, object],
) -> tuple[object, ...]:  # fmt: skip
    """What the returned sum and statistics say that the copies must be."""
    h, size = result.h.float(), norm_block if norm == "block" else max(1, result.h.shape[-1])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(size, -1)[..., : h.shape[-1]]

    y = h if result.mean is None else h - spread(result.mean)
    y = y * spread(result.rstd)
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    outputs, hp = kw.get("outputs", ("rows", "columns")), y.to(dtype)
    casts = {k: v for k, v in kw.items() if k in ("fmt", "scale_rule", "block", "column_block")}
    value = hp if kw.get("round_first") else y
    rows, columns = mxfp8.ops.quantize_both(value, backend="reference", **casts)  # type: ignore[arg-type]
    made = {"rows": rows, "columns": columns, "hp": hp}
    return tuple(made[name] if name in outputs else None for name in ALL)  # type: ignore[operator]
