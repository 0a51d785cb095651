"""Every bound that is not equality, with its derivation. Tests hold no tolerance of their own."""

from __future__ import annotations

import math

import torch

from mxfp8 import dispatch

U32 = 2.0**-24
"""Unit roundoff of float32."""

GEMM_C = 1.0
"""The constant of the GEMM bound, see :func:`gemm_error`."""

OUT_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of the output dtypes: half the distance from 1 to the next number."""

SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""Smallest subnormals: half of one is the rounding error where the relative bound stops to hold."""

SIGMAS = 5.0
"""Standard errors allowed to a mean of random roundings: a right generator misses with probability 6e-7, and the seeds
are fixed, so a pass is a pass for ever."""

REFERENCE_SQNR_DB = {"rceil": 31.53, "ceil": 31.52, "even": 31.17, "floor": 30.65}
"""Measured on N(0,1), E4M3, blocks of 32, 2**20 values."""

SQNR_SLACK_DB = 0.05
"""Sampling: of 2**20 values' noise power, whose relative standard error is about 2 / sqrt(2**20) = 0.2 % = 0.01 dB."""


def gemm_error(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Largest ``|gemm - exact|`` for float64 operands ``a[M, K]``, ``b[N, K]`` as multiplied (quantised), per entry.

    Products of two MX elements are exact in float32; one with a float32 operand costs one rounding. K terms and the
    bias take K roundings in any order of summation, each at most u of a partial sum that is at most sum|a||b| + |bias|
    to first order: (K + 1) u in all, times c for the second order and a split accumulator. Then one rounding to
    ``out_dtype``. (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.)
    """
    size, exact = a.abs() @ b.abs().mT, a @ b.mT
    if bias is not None:
        size, exact = size + bias.abs(), exact + bias
    accumulated = GEMM_C * (a.shape[1] + 1) * U32 * size
    return accumulated + OUT_UNIT[out_dtype] * (exact.abs() + accumulated) + SMALLEST[out_dtype]


FP8_FRACTION_BITS = 13
"""What Hopper's FP8 tensor core keeps of a term while it adds, relative to the largest one: at least so many bits after
the leading one. (Ours, measured: of one product of 2^17 and 127 of 1/4, all of the latter are lost.)"""

FP8_STEP, FP8_CHAIN = 32, 128
"""Terms of one FP8 tensor-core instruction, and mostly of all that add to one running sum before it goes to float32."""


def fp8_gemm_error(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    chain: int = FP8_CHAIN,
) -> torch.Tensor:
    """As :func:`gemm_error`, for products on Hopper's FP8 tensor cores with a float32 sum every ``chain`` of K.

    One instruction aligns 32 products and the running sum to the largest of these 33 terms, ``t``, and cuts each at
    ``FP8_FRACTION_BITS`` below: by less than ``q = 2^(floor(log2 t) - 13)``, by no more than the whole term, and not at
    all if it is a multiple of q. The sum leaves it with as many bits after its leading one: another cut, at most
    ``2^(floor(log2 |sum|) - 13)``, which counts where a sum is much larger than its terms. These cuts add up over K;
    scales do not matter, as they are powers of two that all terms of a chain share. Everything after a chain is float32
    and in :func:`gemm_error`. (DeepSeek-V3, section 3.5.2, on the alignment; Zhang et al., SageAttention2, on the 13
    bits of the sum; Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", 2025.)
    """
    (m, k), n = a.shape, b.shape[0]
    cut = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    for first in range(0, k, chain):
        exact = torch.zeros_like(cut)
        before = cut.clone()
        for at in range(first, min(first + chain, k), FP8_STEP):
            part = slice(at, min(at + FP8_STEP, first + chain))
            terms = (a[:, None, part] * b[None, :, part]).abs()
            running = exact.abs() + (cut - before)
            largest = torch.maximum(terms.amax(-1), running)
            quantum = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 1 - FP8_FRACTION_BITS)
            whole = terms.remainder(quantum[..., None]) == 0
            cut = cut + terms.minimum(quantum[..., None]).masked_fill(whole, 0).sum(-1) + quantum.minimum(running)
            exact += a[:, part] @ b[:, part].mT
            left = exact.abs() + (cut - before)
            cut += torch.ldexp((left > 0).double(), left.frexp().exponent - 1 - FP8_FRACTION_BITS)
    return gemm_error(a, b, out_dtype, bias) + cut * (1 + OUT_UNIT[out_dtype])


def fp8_pair_error(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As :func:`fp8_gemm_error` where a chain spans 256 of K if the scales of both halves agree and else 128: for each
    256 of K what is cut in the worse of the two."""
    total = gemm_error(a, b, out_dtype, bias)
    for first in range(0, a.shape[1], 2 * FP8_CHAIN):
        left, right = (x[:, first : first + 2 * FP8_CHAIN] for x in (a, b))
        bounds = [fp8_gemm_error(left, right, out_dtype, chain=chain) for chain in (FP8_CHAIN, 2 * FP8_CHAIN)]
        total = total + torch.maximum(*bounds) - gemm_error(left, right, out_dtype)
    return total


def fp8_square_error(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As :func:`fp8_gemm_error` where a chain spans 32 of K, or up to 128 as scales of 32x32 blocks agree. Sums of
    magnitudes in place of sums are no smaller for any chain, nor is what is cut relative to them."""
    magnitudes = fp8_gemm_error(a.abs(), b.abs(), torch.float32) - gemm_error(a.abs(), b.abs(), torch.float32)
    return gemm_error(a, b, out_dtype, bias) + magnitudes * (1 + OUT_UNIT[out_dtype])


SQUARE = (32, 32)


def product_error(
    a: torch.Tensor,
    b: torch.Tensor,
    blocks: tuple[tuple[int, int] | None, tuple[int, int] | None],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bound of whatever backend ``auto`` took for products: that of FP8 tensor cores where they may have been used.
    ``blocks`` of ``a`` and ``b``: across and along K, None for an operand in high precision."""
    taken = {dispatch.chosen().get((op, "cuda")) for op in ("gemm", "grouped_gemm", "grouped_wgrad")}
    if a.is_cuda and "hopper" in taken:
        return hopper_error(a, b, blocks, out_dtype, bias)
    return gemm_error(a, b, out_dtype, bias)


def hopper_error(
    a: torch.Tensor,
    b: torch.Tensor,
    blocks: tuple[tuple[int, int] | None, tuple[int, int] | None],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bound of Hopper's backend for operands in these blocks."""
    if blocks == (SQUARE, SQUARE):
        return fp8_square_error(a, b, out_dtype, bias)
    along = [0 if block is None else block[1] for block in blocks]
    if min(along) < FP8_CHAIN:
        return gemm_error(a, b, out_dtype, bias)
    return (fp8_pair_error if along[0] == 256 else fp8_gemm_error)(a, b, out_dtype, bias)


def sum_error(rows: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Largest error of a float32 column sum of ``rows[M, N]`` rounded to ``out_dtype``: a GEMM with ones."""
    ones = torch.ones(1, rows.shape[0], dtype=torch.float64, device=rows.device)
    return gemm_error(ones, rows.mT, out_dtype)[0]


def stochastic_mean_error(distance: float, gap: float, n: int) -> float:
    """Bound on the mean error of ``n`` independent roundings of one value that lies ``distance`` (0..1) into a gap:
    the variance of one is gap^2 p (1 - p). The probability itself is off by at most 2^-32."""
    return SIGMAS * gap * math.sqrt(distance * (1 - distance) / n) + gap * 2.0**-32


def hadamard_error(size: int, amax: float) -> float:
    """Error of one transformed entry: log2(n) additions, one multiplication and the rounded 1/sqrt(n), each u of at
    most sqrt(n) amax (Cauchy: n entries of amax, divided by sqrt(n))."""
    return (math.log2(size) + 2) * U32 * math.sqrt(size) * amax * 1.01


def adamw_error(steps: int, lr: float, betas: tuple[float, float], largest_param: float, weight_decay: float) -> float:
    """Largest difference of a parameter between two float32 evaluations of AdamW with the same gradients.

    Step t moves a parameter by ``lr m / (sqrt(v) + eps)``, bias corrected. With G the largest gradient of an entry so
    far, ``|m| <= G`` and ``v >= G^2 (1 - b2) b2^(t-1) / (1 - b2^t)``, so the ratio is at most k(t), the root of the
    inverse; G divides out. Rounding: a step of m errs by at most 7u G and m forgets by b1, hence 8u G / (1 - b1) after
    correction; the terms of v are positive, its relative error grows by 5u a step and is halved by the root; ten
    operations and constants follow. Decay and subtraction round twice at the size of the parameter. Both evaluations
    err, hence twice.
    """
    total = 0.0
    for t in range(1, steps + 1):
        ratio = math.sqrt((1 - betas[1] ** t) / ((1 - betas[1]) * betas[1] ** (t - 1)))
        total += lr * ratio * (8 / (1 - betas[0]) + 2.5 * t + 10)
        total += (2 + 2 * lr * weight_decay) * (largest_param + lr * ratio * t)
    return 2 * U32 * total * 1.01


def rowwise_adagrad_error(steps: int, lr: float, columns: int, largest_param: float) -> float:
    """Largest difference of a parameter between two float32 evaluations of row-wise Adagrad with the same gradients.

    The row's sum has positive terms: summed in any order, and over steps, its relative error is at most
    (columns + steps + 3) u, halved by the root. A step moves an entry by ``lr g / sqrt(sum)``, at most
    ``lr sqrt(columns)``; six operations, then the subtraction at the size of the parameter. Twice, as both err.
    """
    moved = lr * math.sqrt(columns)
    each = moved * ((columns + steps + 3) / 2 + 6) + largest_param + moved * steps
    return 2 * U32 * steps * each * 1.01


def activation_error(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Largest error of a float32 activation of ``x`` (float64 values of float32 numbers), per entry; swiglu is silu.

    silu: the argument of the power of two takes two roundings (2u |x| of the power), the power 4u, the sum and the
    reciprocal 3u, the product 1u: (2 |x| + 8) u, rounded up for the second order. gelu_tanh: its argument z takes five
    roundings more. Reciprocals of 2**126 and above count as zero. gelu: the argument costs u, erf 4u, ``1 + erf`` 2u of
    at most 2, times |x| / 2, and one product: 5u |x| in all.
    """
    if activation in ("relu", "hardswish"):
        return torch.zeros_like(x)  # the same operations everywhere
    if activation == "gelu":
        return 5 * U32 * x.abs() + SMALLEST[torch.float32]
    z = x if activation != "gelu_tanh" else x * math.sqrt(8 / math.pi) * (1 + 0.044715 * x * x)
    roundings = 2 * x.abs() + 10 if activation != "gelu_tanh" else 7 * z.abs() + 11
    return roundings * U32 * (x * torch.sigmoid(z)).abs() + x.abs() * 2.0**-126


def activation_gradient_error(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Largest error of a float32 derivative of an activation, per entry; what multiplies it rounds once more each.

    silu, ``s (1 + x (1 - s))``: with the error of s as above, s u (2 |x| + 10)(|x| + 2). gelu: 3.5u of the cumulative
    part, the density's 1.5 x^2 + 6 roundings times |x| phi(x), at most 2.2u, and the sum: 8u. gelu_tanh:
    ``s + x s (1 - s) w`` with 7 |z| + 9 roundings of s, twice and 6 more in the second term.
    """
    if activation in ("relu", "hardswish"):
        return torch.zeros_like(x)
    if activation == "gelu":
        return torch.full_like(x, 8 * U32)
    if activation == "gelu_tanh":
        z = x * math.sqrt(8 / math.pi) * (1 + 0.044715 * x * x)
        s, w = torch.sigmoid(z), math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
        second = (x * s * (1 - s) * w).abs()
        return U32 * (s * (7 * z.abs() + 11) + second * (14 * z.abs() + 26)) + x.abs() * w * 2.0**-126
    s = torch.sigmoid(x)
    return U32 * s * (2 * x.abs() + 10) * (x.abs() + 2) + (1 + x.abs()) * 2.0**-126


def rms_error(width: int) -> float:
    """Relative error of ``1 / sqrt(mean(x^2) + eps)`` in float32: width + 2 roundings of a sum of positive terms, 4 of
    the division and one of eps, halved by the root, then root and reciprocal."""
    return ((width + 7) / 2 + 2.5) * U32


def layer_error(width: int, mean_over_sigma: float) -> float:
    """Relative error of LayerNorm's ``rstd``. Every mean is off by at most (width + 4) u of mean|x|, and a deviation
    from a wrong mean by as much: twice that, relative to sigma, beside :func:`rms_error`."""
    return rms_error(width) + 2 * (width + 4) * U32 * mean_over_sigma


def norm_gradient_error(
    g: torch.Tensor, normed: torch.Tensor, factor: torch.Tensor, group: int, centred: bool
) -> torch.Tensor:
    """Largest error of ``factor (g - n mean(g n) - mean(g))`` for float64 ``[..., C]`` operands with ``group`` columns
    to a mean: n takes 2 roundings, g one, a mean of products group + 5 of the mean of magnitudes, one of g group + 3,
    the differences and products 4 of each term."""

    def mean(v: torch.Tensor) -> torch.Tensor:
        parts = [p.mean(-1, keepdim=True).expand_as(p) for p in v.split(group, -1)]
        return torch.cat(parts, -1)

    along, size = mean(g * normed).abs(), mean((g * normed).abs())
    inner = 6 * (g.abs() + normed.abs() * along) + normed.abs() * (group + 6) * size
    if centred:
        inner = inner + 4 * mean(g).abs() + (group + 4) * mean(g.abs())
    return 1.01 * U32 * factor * inner + SMALLEST[torch.float32]
