"""Certify a backend: its casts bit for bit and its GEMM exactly, against values that none of this code computed.

python examples/certify_backend.py             # what "auto" takes here
python examples/certify_backend.py hopper      # this one or nothing: if it cannot run, the reason is printed
"""

import math
import sys

import torch

import mxfp8


def expected_bits(x: torch.Tensor) -> tuple[list[int], list[float]]:
    """Scale bytes and values of E4M3 in 1x32 blocks, rule rceil, from the definition, in Python's float64."""
    scales, values = [], []
    for block in x.double().reshape(-1, 32).tolist():
        peak = max(map(abs, block))
        byte = max(0, min(254, math.ceil(math.log2(peak / 448)) + 127)) if peak else 0
        scales.append(byte)
        for v in block:
            scaled = math.ldexp(v, 127 - byte)
            step = math.ldexp(1.0, max(math.frexp(scaled)[1] - 4, -9))  # 3 mantissa bits; subnormals step by 2**-9
            values.append(math.ldexp(max(-448.0, min(448.0, round(scaled / step) * step)), byte - 127))
    return scales, values


def certify(backend: str, device: str) -> dict[str, bool]:
    """Each check by name; a named backend that cannot run raises RuntimeError with the reason."""
    wide = torch.randn(64, 128) * torch.exp2(torch.randint(-30, 30, (64, 1)))
    q = mxfp8.quantize(wide.to(device), backend=backend)
    scales, values = expected_bits(wide)
    # Integers up to 8 are exact in E4M3 and their sums stay below 2**24: the product has no rounding at all.
    a, b = torch.randint(-8, 9, (96, 160)).float(), torch.randint(-8, 9, (64, 160)).float()
    qa, qb = (mxfp8.quantize(t.to(device), backend=backend) for t in (a, b))
    product = mxfp8.gemm(qa, qb, out_dtype=torch.float32, backend=backend).double().cpu()
    return {
        "quantize: scale bytes": q.scale.view(torch.uint8).flatten().tolist() == scales,
        "quantize: values": q.dequantize().flatten().tolist() == values,
        "gemm: exact on integers": torch.equal(product, a.double() @ b.double().T),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    backend, device = (sys.argv[1:] or ["auto"])[0], "cuda" if torch.cuda.is_available() else "cpu"
    for cell in mxfp8.explain(device):
        if cell.op in ("quantize", "gemm"):
            print(f"{cell.op:9} {cell.backend:10} {'can run' if cell.available else cell.reason}")
    try:
        checks = certify(backend, device)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"no certificate: {error}")
    for name, passed in checks.items():
        print(f"{'ok  ' if passed else 'FAIL'} {name}")
    print(f"backend {backend!r} on {device}: {'certified' if all(checks.values()) else 'NOT certified'}")
    sys.exit(0 if all(checks.values()) else 1)
