"""How far a low-precision tensor is from the tensor it stands for.

Plain tensors in, plain Python numbers out. Sums are taken in float64, so the numbers do not depend on the device's
reduction order in any digit that is worth printing. Each call waits for the device once: meant for audits and tests,
not for the inner loop of a training step.

Two conventions hold everywhere here:

- A NaN is never dropped. It makes ``sqnr_db``, ``rel_rms`` and ``amax`` NaN, and it counts as saturated.
- An empty tensor has no error: ``sqnr_db`` is +inf, every fraction and ``amax`` are 0.
"""

import math

import torch
from torch import Tensor

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Largest finite code, sign bit cleared: 448 is S.1111.110 in E4M3, 57344 is S.11110.11 in E5M2.
_MAX_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
_MAGNITUDE_BITS = 0x7F


def _check_float(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}; convert it with .float() first")


def _check_pair(name_a: str, a: Tensor, name_b: str, b: Tensor) -> None:
    _check_float(name_a, a)
    _check_float(name_b, b)
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} and {name_b} must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}; "
            "slice padding away before measuring (padding never counts)"
        )


def _magnitude_code(q: Tensor) -> Tensor:
    # fp8 dtypes have no comparison or reduction kernels: work on their bytes.
    return q.contiguous().view(torch.uint8) & _MAGNITUDE_BITS


def _is_zero(x: Tensor) -> Tensor:
    return _magnitude_code(x) == 0 if x.dtype in _FP8_DTYPES else x == 0


def energies(reference: Tensor, x: Tensor) -> tuple[float, float]:
    """``(sum ref^2, sum (x - ref)^2)``, both in float64. Add them over tensors, then take :func:`sqnr_from_energies`:
    a mean of dB would weigh a quiet tensor as much as a loud one.

    Raises:
        TypeError: not floating-point tensors. ValueError: shapes differ.
    """
    _check_pair("reference", reference, "x", x)
    ref64 = reference.detach().to(torch.float64)
    noise = x.detach().to(device=ref64.device, dtype=torch.float64) - ref64
    signal_energy, noise_energy = torch.stack([ref64.square().sum(), noise.square().sum()]).tolist()
    return signal_energy, noise_energy


def sqnr_db(reference: Tensor, x: Tensor) -> float:
    """Signal to quantisation noise ratio, ``10 log10(sum ref^2 / sum (x - ref)^2)``, in dB.

    Args:
        reference: what ``x`` should be; any floating dtype and shape.
        x: the approximation, same shape, any floating dtype (dequantised: a scale is not applied here).

    Returns:
        +inf when ``x`` equals ``reference`` everywhere (also when both are empty or all zero); -inf when the reference
        is all zero and ``x`` is not, or when ``x`` holds an Inf where the reference is finite; NaN when either tensor
        holds a NaN, or the reference an Inf.

    Raises:
        TypeError: not floating-point tensors. ValueError: shapes differ.
    """
    return sqnr_from_energies(*energies(reference, x))


def sqnr_from_energies(signal: float, noise: float) -> float:
    """:func:`sqnr_db` from the two sums of :func:`energies`, with the same special values."""
    if math.isnan(signal) or math.isnan(noise) or math.isinf(signal):
        return math.nan
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or math.isinf(noise):
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


def rel_rms(reference: Tensor, x: Tensor) -> float:
    """Relative root-mean-square error ``sqrt(sum (x - ref)^2 / sum ref^2)``, which is ``10^(-sqnr_db / 20)``.

    0 where ``sqnr_db`` is +inf, +inf where it is -inf, NaN where it is NaN. Same arguments and errors.
    """
    return math.pow(10.0, -sqnr_db(reference, x) / 20.0)


def underflow_frac(x: Tensor, q: Tensor) -> float:
    """Share of the non-zero elements of ``x`` whose counterpart in ``q`` is zero, in [0, 1].

    -0.0 is zero on both sides. A NaN is not zero: it counts among the inputs and is not an underflow. The zeros of
    ``x`` are in neither count, so the share does not shrink for sparse tensors. 0.0 when ``x`` has no non-zero element.

    Args:
        x: what was quantised; any floating dtype and shape.
        q: same shape: the fp8 elements themselves, or the dequantised values.

    Raises:
        TypeError: not floating-point tensors. ValueError: shapes differ.
    """
    _check_pair("x", x, "q", q)
    nonzero = ~_is_zero(x.detach())
    lost = nonzero & _is_zero(q.detach()).to(nonzero.device)
    n_lost, n_nonzero = torch.stack([lost.sum(), nonzero.sum()]).tolist()
    return n_lost / n_nonzero if n_nonzero else 0.0


def saturated_frac(qdata: Tensor, max_code: int | None = None) -> float:
    """Share of fp8 elements at the largest finite magnitude or beyond it, in [0, 1].

    An element at the largest code either was clipped or rounded there, so this is an upper bound on what was clipped.
    Codes beyond it (Inf, NaN) count too: they never hide.

    Args:
        qdata: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``; any shape.
        max_code: bits of the largest finite magnitude, sign cleared; default 0x7E (E4M3, 448) or 0x7B (E5M2, 57344).

    Raises:
        TypeError: another dtype. ValueError: ``max_code`` outside 1..127.
    """
    if not isinstance(qdata, Tensor) or qdata.dtype not in _FP8_DTYPES:
        got = qdata.dtype if isinstance(qdata, Tensor) else type(qdata).__name__
        raise TypeError(f"qdata must be a float8_e4m3fn or float8_e5m2 tensor, got {got}")
    code = _MAX_CODE[qdata.dtype] if max_code is None else max_code
    if not 1 <= code <= _MAGNITUDE_BITS:
        raise ValueError(f"max_code must be in 1..127 (sign bit cleared), got {code}")
    if qdata.numel() == 0:
        return 0.0
    return int((_magnitude_code(qdata.detach()) >= code).sum()) / qdata.numel()


def amax(x: Tensor) -> float:
    """Largest magnitude of ``x`` (any floating dtype and shape): 0.0 when empty, NaN when it holds a NaN."""
    _check_float("x", x)
    if x.numel() == 0:
        return 0.0
    wide = x.detach().float() if x.dtype in _FP8_DTYPES else x.detach()
    return float(wide.abs().amax())


def scale_histogram(scale: Tensor) -> Tensor:
    """How often each E8M0 scale byte occurs.

    Args:
        scale: ``torch.float8_e8m0fnu`` or its ``torch.uint8`` view; any shape. Byte c means 2^(c - 127), 255 is NaN.

    Returns:
        int64 [256] on the device of ``scale``; entry 255 counts the NaN blocks. All zero for an empty tensor.

    Raises:
        TypeError: another dtype.
    """
    if not isinstance(scale, Tensor) or scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"scale must be a float8_e8m0fnu tensor or its uint8 view, got {got}")
    return torch.bincount(scale.detach().contiguous().view(torch.uint8).flatten().long(), minlength=256)
