"""The public ops: contract, checks, then whatever backend can run it."""

from __future__ import annotations

import torch

from mxfp8 import dispatch
from mxfp8.dispatch import replays
from mxfp8.formats import (
    BlockShape,
    ElementFormat,
    Rounding,
    ScaleRule,
    get_block,
    get_format,
    get_rounding,
    get_scale_rule,
)
from mxfp8.reference.fused import ACTIVATIONS
from mxfp8.reference.hadamard import HADAMARD_SIZES
from mxfp8.rng import RngKey
from mxfp8.tensor import MXTensor, assembled, block_rc, check_axis

__all__ = ["gemm", "grouped_gemm", "hadamard", "quantize", "quantize_both"]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POINTWISE = tuple(name for name in ACTIVATIONS if name != "swiglu")


def quantize(
    x: torch.Tensor,
    axis: int = -1,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    scale_rule: str | ScaleRule = "rceil",
    rounding: str | Rounding = "nearest",
    seed: int | RngKey | None = None,
    backend: str = "auto",
    *,
    satfinite: bool = False,
    hadamard: int | None = None,
    hadamard_seed: int = 0,
) -> MXTensor:
    """Quantise ``x`` to MXFP8.

    Args:
        x: float32, bfloat16, float16 or float64, any shape with at least one dimension, any strides (empty, meta and
            fake tensors too). float64 is rounded to float32 first.
        axis: -1 or -2, the dimension along which blocks run; the one a later GEMM contracts over.
        fmt: ``"e4m3"`` or ``"e5m2"``.
        block: (across, along), one of (1, 32), (1, 128), (1, 256), (32, 32), (128, 128).
        scale_rule: ``"rceil"``, ``"floor"``, ``"ceil"`` or ``"even"``, see :class:`~mxfp8.ScaleRule`.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``, which needs ``seed``.
        seed: an int, or an :class:`~mxfp8.RngKey` with step, stream and the position of a shard.
        backend: ``"auto"``, or a name that must run or raise.
        satfinite: treat Inf as the largest finite value instead of making its block NaN.
        hadamard, hadamard_seed: size and seed of a random Hadamard transform along ``axis`` that goes first, in the
            same pass: the bits of :func:`hadamard` and then of this cast. The extent along ``axis`` is padded to a
            multiple of the size.

    Returns:
        An :class:`~mxfp8.MXTensor` with ``qdata`` of the shape of ``x`` and one scale byte per block.

    Raises:
        TypeError: ``x`` is not a floating-point tensor of a supported dtype.
        ValueError: unknown format, rule, rounding, block, axis or size of the transform; stochastic rounding without a
            seed.

    **Numerics.** With ``a`` the block's absolute maximum in float32, the scale byte follows ``scale_rule`` exactly and
    is clamped to 0..254; ``a = 0`` gives byte 0 and zeros that keep their signs; there is no epsilon. Elements are
    ``x * 2**(127 - byte)``, exact, then rounded and saturated to the largest finite element. A tail shorter than a
    block counts as padded with zeros; blocks never straddle rows. A block that holds NaN or Inf becomes NaN as a whole:
    byte 255, elements 0x7F. Stochastic bits are a function of (seed, step, stream, row, column) alone.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3 (``floor``); NVIDIA PTX ``cvt.rp.satfinite.ue8m0x2``
    (``rceil``).
    """
    block, known = get_block(block), None
    if seed is None and rounding == "nearest" and type(axis) is int and hadamard is None:
        known = replays.key("quantize", (x,), axis, fmt, block, scale_rule, satfinite, backend)
        if (made := replays.again(known, x)) is not None:
            return assembled(made[0], made[1], get_format(fmt), axis, block)
    check_float("quantize", x)
    check_axis(axis, x.ndim, block)
    form, rule, (mode, key) = get_format(fmt), get_scale_rule(scale_rule), get_rounding_key(rounding, seed)
    op, first = "quantize", {}
    if hadamard is not None:
        check_size(hadamard)
        op, first = "hadamard_quantize", {"size": hadamard, "signs": hadamard_seed}
    run, x = dispatch.resolve(op, backend, x.device), _detached(x)

    def cast() -> tuple[torch.Tensor, torch.Tensor]:
        return run(  # type: ignore[no-any-return]
            x, axis=axis, fmt=form, block=block, scale_rule=rule, rounding=mode, key=key, satfinite=satfinite, **first
        )

    qdata, scale = replays.run(known, cast, (x,))
    return MXTensor.trusted(qdata, scale, form, axis, block)


def get_rounding_key(rounding: str | Rounding, seed: int | RngKey | None) -> tuple[Rounding, RngKey | None]:
    """A mode of rounding and the key of its random bits; TypeError or ValueError for a wrong or a missing seed."""
    mode, key = get_rounding(rounding), RngKey(seed=seed) if isinstance(seed, int) else seed
    if key is not None and not isinstance(key, RngKey):
        raise TypeError(f"seed is {seed!r}: use an int or an RngKey")
    if mode is Rounding.STOCHASTIC and key is None:
        raise ValueError("stochastic rounding needs seed=<int or RngKey>: bits are a function of the seed")
    return mode, key


def quantize_both(
    x: torch.Tensor,
    fmt: str | ElementFormat = "e4m3",
    block: BlockShape = (1, 32),
    column_block: BlockShape | None = None,
    scale_rule: str | ScaleRule = "rceil",
    backend: str = "auto",
    *,
    satfinite: bool = False,
) -> tuple[MXTensor, MXTensor]:
    """Quantise ``x`` along its rows and along its columns, reading it once: what a training step needs of a tensor that
    is multiplied in two directions.

    Args:
        x: as :func:`quantize`, with at least two dimensions.
        block: of the copy along axis -1.
        column_block: of the copy along axis -2; default: ``block``.
        fmt, scale_rule, backend, satfinite: of both, as :func:`quantize`.

    Returns:
        ``(quantize(x, -1, ..., block), quantize(x, -2, ..., column_block))``, bit for bit.

    Raises:
        TypeError, ValueError: as :func:`quantize`; a tensor of fewer than two dimensions.

    **Numerics.** As :func:`quantize`, to nearest.
    """
    block = get_block(block)
    column_block = block if column_block is None else get_block(column_block)
    known = replays.key("quantize_both", (x,), fmt, block, column_block, scale_rule, satfinite, backend)
    if (made := replays.again(known, x)) is not None:
        q, s, t, u = made
        form = get_format(fmt)
        return assembled(q, s, form, -1, block), assembled(t, u, form, -2, column_block)
    check_float("quantize_both", x)
    if x.ndim < 2:
        raise ValueError(f"quantize_both takes at least two dimensions, not shape {tuple(x.shape)}: use quantize")
    form, rule = get_format(fmt), get_scale_rule(scale_rule)
    run, x = dispatch.resolve("quantize_both", backend, x.device), _detached(x)

    def cast() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return run(  # type: ignore[no-any-return]
            x, fmt=form, block=block, column_block=column_block, scale_rule=rule, satfinite=satfinite
        )

    q, s, t, u = replays.run(known, cast, (x,))
    return MXTensor.trusted(q, s, form, -1, block), MXTensor.trusted(t, u, form, -2, column_block)


def hadamard(x: torch.Tensor, axis: int = -1, size: int = 32, seed: int = 0, backend: str = "auto") -> torch.Tensor:
    """Randomised Hadamard transform of runs of ``size`` (16, 32, 64 or 128) entries along ``axis`` (-1 or -2).

    Returns float32 with the extent along ``axis`` padded to a multiple of ``size``. Transform both operands of a
    product over ``axis`` with the same seed: the exact product does not change, outliers spread over ``size`` entries.
    Gradients flow through the plain-torch reference, which ``backend="auto"`` takes where one is asked for.

    Raises:
        TypeError: ``x`` is not a floating-point tensor of a supported dtype, or wants a gradient of a kernel.
        ValueError: size or axis not allowed.

    **Numerics.** ``(x * signs) @ H / sqrt(size)`` by float32 butterflies in a fixed order; no rounding before the last
    multiplication other than that of the additions. Source: Tseng et al., "Training LLMs with MXFP4", 2025.
    """
    check_float("hadamard", x)
    check_size(size)
    check_axis(axis, x.ndim, (1, 32))
    if _wants_grad(x) and backend == "auto":
        backend = "reference"  # kernels record no gradient
    elif backend != "reference":
        _check_no_grad("hadamard", "x", x)
    transformed: torch.Tensor = dispatch.resolve("hadamard", backend, x.device)(x, axis=axis, size=size, seed=seed)
    return transformed


def gemm(
    a: MXTensor | torch.Tensor,
    b: MXTensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """``activation(a[M, K] @ b[N, K].T + bias[N])``, with one or both operands in MX. The only orientation is NT.

    Args:
        a, b: 2-D; an :class:`~mxfp8.MXTensor` scaled along its last (contraction) axis, or a float32, bfloat16 or
            float16 tensor. At least one is MX. Element formats and blocks may differ.
        bias: ``[N]``, added in float32 before the one rounding.
        out_dtype: float32, bfloat16 or float16.
        activation: None, ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"`` or ``"hardswish"``.
        out: where to write, contiguous ``[M, N]`` that shares no memory with other arguments. Its dtype takes the place
            of ``out_dtype``.
        accumulate: add to ``out``, which must then be float32 (gradient accumulation); without an activation.

    Returns:
        ``out``, or a new ``[M, N]`` of ``out_dtype``. ``K = 0`` gives zeros (plus bias); ``M = 0`` or ``N = 0`` the
        empty result.

    Raises:
        ValueError: shapes that do not fit; an operand scaled along the wrong axis; an activation that is unknown, or
            with ``accumulate``; an ``out`` that cannot be written or added to.
        TypeError: operand or output dtype not supported; no MX operand; a gradient would be needed (use MXFP8Linear).

    **Numerics.** Exact products of dequantised operands accumulated in float32, rounded once to ``out_dtype``:
    ``|error| <= c K 2**-24 sum|a||b|`` plus half an ulp of ``out_dtype``. NaN blocks make their rows NaN. The
    activation is computed in float32 before that rounding, as in :func:`mxfp8.fused.activation_quantize`. On Hopper,
    operands whose blocks reach over 128 of K or more, or are 32x32 on both sides, run on FP8 tensor cores, which keep
    14 bits of a sum over 128 (up to 256 where ``a`` is in 1x256; over 32 to 128 for 32x32) before it is added in
    float32; every backend's deviation is stated in its file.
    """
    known: object = None
    inputs: tuple[torch.Tensor, ...] = ()
    if type(a) is MXTensor and type(b) is MXTensor and not _wants_grad(bias) and not _wants_grad(out):
        inputs = (a.qdata, a.scale_bytes, b.qdata, b.scale_bytes)
        inputs += () if bias is None else (bias,)
        inputs += () if out is None else (out,)
        how = (out_dtype, backend, activation, bias is None, out is None, accumulate)
        known = replays.key("gemm", inputs, a.axis, a.block, b.axis, b.block, *how)
        if (made := replays.again(known, *inputs)) is not None:
            return made  # type: ignore[no-any-return]
    out_dtype = out.dtype if isinstance(out, torch.Tensor) else out_dtype
    check_product("gemm", a, b, bias, out_dtype)
    if activation is not None and activation not in POINTWISE:
        raise ValueError(
            f"gemm: activation is {activation!r}: use None or one of {', '.join(POINTWISE)} (swiglu: gemm_quantize)"
        )
    _check_out(out, (a.shape[0], b.shape[0]), a.device, activation, accumulate)
    run = dispatch.resolve("gemm", backend, a.device)
    bias = None if bias is None else _detached(bias)
    rest = {"activation": activation, "out": out, "accumulate": accumulate}

    def product() -> torch.Tensor:
        return run(*parts_of(a), *parts_of(b), bias=bias, out_dtype=out_dtype, **rest)  # type: ignore[no-any-return]

    return replays.run(known, product, inputs)  # type: ignore[no-any-return]


def check_product(
    op: str, a: MXTensor | torch.Tensor, b: MXTensor | torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> None:
    """TypeError or ValueError unless ``a[M, K] @ b[N, K].T + bias[N]`` can be computed."""
    _check_operands(op, a, b, out_dtype)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"{op} takes a[M, K] and b[N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    if bias is not None:
        _check_bias(op, bias, b)


def _check_out(
    out: torch.Tensor | None, shape: tuple[int, int], device: torch.device, activation: str | None, accumulate: bool
) -> None:
    if out is None:
        if accumulate:
            raise ValueError("gemm: accumulate=True needs the tensor to add to: pass out=")
        return
    if tuple(out.shape) != shape or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"gemm: out has shape {tuple(out.shape)}, strides {out.stride()} on {out.device}: needs contiguous {shape} "
            f"on {device}"
        )
    if accumulate and out.dtype != torch.float32:
        raise ValueError(f"gemm: accumulate=True adds in float32, but out is {out.dtype}")
    if accumulate and activation is not None:
        raise ValueError(f"gemm: accumulate=True adds products, not {activation} of them: use one of the two")
    _check_no_grad("gemm", "out", out)


def grouped_gemm(
    a: MXTensor | torch.Tensor,
    b: MXTensor | torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Rows of each group of ``a`` times that group's matrix: ``out[s:e] = a[s:e] @ b[g].T``.

    Args:
        a: ``[M, K]``, MX scaled along -1, or high precision.
        b: ``[G, N, K]``, likewise.
        offs: int32 or int64 ``[G]``, end of each group's rows, not decreasing; group g is
            ``offs[g-1]..offs[g]`` (torch's convention). Groups may be empty, ``offs[-1]`` may be less than M.

    Returns:
        ``[M, N]`` of ``out_dtype``; rows past ``offs[-1]`` are zero.

    Raises:
        ValueError: shapes that do not fit, wrong scaled axis, offsets negative, decreasing or beyond M (the first bad
            one is named). On a GPU, where the host does not read offsets, bad ones stop the device with an assertion,
            as an index out of bounds does; they never lead outside memory.
        TypeError: as :func:`gemm`.

    **Numerics.** As :func:`gemm`, group by group.
    """
    known: object = None
    inputs: tuple[torch.Tensor, ...] = ()
    if type(a) is MXTensor and type(b) is MXTensor:
        inputs = (a.qdata, a.scale_bytes, b.qdata, b.scale_bytes, offs)
        known = replays.key("grouped_gemm", inputs, a.axis, a.block, b.axis, b.block, out_dtype, backend)
        if (made := replays.again(known, *inputs)) is not None:
            return made  # type: ignore[no-any-return]
    _check_operands("grouped_gemm", a, b, out_dtype)
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(f"grouped_gemm takes a[M, K] and b[G, N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    run = dispatch.resolve("grouped_gemm", backend, a.device)

    def product() -> torch.Tensor:
        ends = check_offsets(offs, b.shape[0], a)
        with torch.no_grad():
            return run(*parts_of(a), *parts_of(b), offs=ends, out_dtype=out_dtype)  # type: ignore[no-any-return]

    return replays.run(known, product, inputs)  # type: ignore[no-any-return]


def check_offsets(offs: torch.Tensor, groups: int | None, x: MXTensor | torch.Tensor) -> torch.Tensor:
    """``offs``; ValueError unless it holds ``groups`` non-decreasing group ends within the rows of ``x``. On a GPU the
    ends are checked there, by an assertion that the host does not wait for."""
    if not isinstance(offs, torch.Tensor):
        raise TypeError(f"offs is {type(offs).__name__}: use an int32 or int64 tensor on the device of the rows")
    wanted = "[G]" if groups is None else f"({groups},)"
    right = offs.ndim == 1 if groups is None else tuple(offs.shape) == (groups,)
    if offs.dtype not in (torch.int32, torch.int64) or not right:
        raise ValueError(f"offs is {offs.dtype} of shape {tuple(offs.shape)}: use int32 or int64 of shape {wanted}")
    if offs.device != x.device:
        raise ValueError(f"offs is on {offs.device}, the rows it divides on {x.device}")
    checked: torch.Tensor = dispatch.resolve("check_offsets", "auto", offs.device)(offs, x.shape[0])
    return checked


def _detached(x: torch.Tensor) -> torch.Tensor:
    """``x`` outside the graph: a cast has no gradient of its own. Cheaper than entering ``no_grad``."""
    return x.detach() if x.requires_grad else x


def check_float(op: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOAT_DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{op} takes a float32, bfloat16, float16 or float64 tensor, not {got}")


def _check_bias(op: str, bias: torch.Tensor, b: MXTensor | torch.Tensor) -> None:
    check_float(f"{op}'s bias", bias)
    if tuple(bias.shape) != (b.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: b of shape {tuple(b.shape)} needs ({b.shape[0]},)")
    if bias.device != b.device:
        raise ValueError(f"{op}: bias is on {bias.device}, b on {b.device}")
    _check_no_grad(op, "bias", bias)


def check_size(size: int) -> None:
    if size not in HADAMARD_SIZES:
        raise ValueError(
            f"Hadamard size is {size}: use {', '.join(map(str, HADAMARD_SIZES[:-1]))} or {HADAMARD_SIZES[-1]}"
        )


def _wants_grad(x: torch.Tensor | None) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def _check_no_grad(op: str, name: str, x: torch.Tensor) -> None:
    if _wants_grad(x):
        raise TypeError(f"{op} has no backward, but {name} requires grad: use MXFP8Linear, or {name}.detach()")


def _check_operands(op: str, a: MXTensor | torch.Tensor, b: MXTensor | torch.Tensor, out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, use float32, bfloat16 or float16")
    if not isinstance(a, MXTensor) and not isinstance(b, MXTensor):
        raise TypeError(f"{op} needs at least one MXTensor: quantise an operand, or use torch.matmul")
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, MXTensor):
            if not x.scales_along(-1):
                raise ValueError(
                    f"{op}: {name} is scaled along axis -2, but the product contracts over axis -1. Quantise the "
                    "high-precision tensor along the contraction axis, or pass the transpose if that is meant"
                )
        elif not isinstance(x, torch.Tensor) or x.dtype not in OUT_DTYPES:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{op}: {name} is {got}, use an MXTensor or a float32, bfloat16 or float16 tensor")
        else:
            _check_no_grad(op, name, x)
    if a.device != b.device:
        raise ValueError(f"{op}: a is on {a.device}, b on {b.device}")


def parts_of(x: MXTensor | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int] | None]:
    """Plain tensors for a backend: data, scale bytes, (rows, columns) of a block; the last two None if not MX."""
    if isinstance(x, MXTensor):
        return x.qdata, x.scale_bytes, block_rc(x.block, x.axis)
    return x, None, None
