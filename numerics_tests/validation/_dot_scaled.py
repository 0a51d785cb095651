"""A plain kernel around ``tl.dot_scaled``: imports Triton, so only its adapter imports it."""

import triton
import triton.language as tl


@triton.jit
def product(
    a, a_scale, b, b_scale, out, M, N, K,
    A_FMT: tl.constexpr, B_FMT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``out[M, N] = a[M, K] @ b[N, K].T``; uint8 codes and scale bytes, contiguous, K a multiple of 32."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        i, j = k + tl.arange(0, BK)[None, :], k // 32 + tl.arange(0, BK // 32)[None, :]
        x = tl.load(a + m * K + i, mask=(m < M) & (i < K), other=0)
        y = tl.load(b + n * K + i, mask=(n < N) & (i < K), other=0)
        sx = tl.load(a_scale + m * (K // 32) + j, mask=(m < M) & (j < K // 32), other=127)
        sy = tl.load(b_scale + n * (K // 32) + j, mask=(n < N) & (j < K // 32), other=127)
        acc = tl.dot_scaled(x, sx, A_FMT, tl.trans(y), sy, B_FMT, acc)
    tl.store(out + m * N + tl.trans(n), acc, mask=(m < M) & (tl.trans(n) < N))
