"""Peers that need a GPU: Triton's ``dot_scaled``, torch's 1x32 ``scaled_mm``, Transformer Engine.

Only the first was run by us.
"""

from __future__ import annotations

import importlib.metadata

import torch

from mxfp8.formats import BlockShape, get_format
from numerics_tests.validation.implementation import FEATURES, Capabilities, Operand, UnavailableError
from numerics_tests.validation.peers import MLDtypes, require

_NO_CAST = "a matrix product only: it has no cast"
_GEMM_ONLY = {feature: _NO_CAST for feature in FEATURES if feature != "gemm"}


def need_capability(name: str, device: torch.device, major: int, what: str) -> None:
    """UnavailableError unless ``device`` is a CUDA GPU of compute capability ``major``.0 or later."""
    if device.type != "cuda":
        raise UnavailableError(f"{name} on {device}: {what} needs a CUDA GPU of compute capability {major}.0 or later")
    have = torch.cuda.get_device_capability(device)
    if have[0] < major:
        found = f"{torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}"
        raise UnavailableError(f"{name}: {what} needs compute capability {major}.0 or later; {found}")


class DotScaled:
    """Triton's ``tl.dot_scaled`` in a plain kernel, accumulating in float32."""

    def __init__(self, name: str, device: torch.device) -> None:
        need_capability(name, device, 8, "dot_scaled")
        self._kernel = require(name, "numerics_tests.validation._dot_scaled", "triton").product
        self.name, self.device = name, device
        self.capabilities = Capabilities(lacks=_GEMM_ONLY)

    def versions(self) -> dict[str, str]:
        return {"triton": importlib.metadata.version("triton")}

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnavailableError(_NO_CAST)

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        raise UnavailableError(_NO_CAST)

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        (m, k), n = a.elements.shape, b.elements.shape[0]
        out = torch.zeros(m, n, device=self.device)
        parts = [t.to(self.device).contiguous() for t in (a.elements, a.scales, b.elements, b.scales)]
        if m and n:
            self._kernel[(-(-m // 128), -(-n // 128))](*parts, out, m, n, k, a.fmt, b.fmt, 128, 128, 128)
        return out.to(out_dtype)


class ScaledMM:
    """``torch.nn.functional.scaled_mm`` with 1x32 block scales in the 128x4 layout."""

    def __init__(self, name: str, device: torch.device) -> None:
        need_capability(name, device, 10, "the 1x32 recipe of scaled_mm")
        self.name, self.device = name, device
        self.capabilities = Capabilities(lacks=_GEMM_ONLY)

    def versions(self) -> dict[str, str]:
        return {"cuda": str(torch.version.cuda)}

    quantize = DotScaled.quantize
    dequantize = DotScaled.dequantize

    def _ready(self, x: Operand) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements with zero rows up to a multiple of 128, and the scales in tiles of 128x4."""
        rows, cols = x.elements.shape[0], x.scales.shape[1]
        elements = torch.nn.functional.pad(x.elements.to(self.device), (0, 0, 0, -rows % 128))
        scales = torch.nn.functional.pad(x.scales.to(self.device), (0, -cols % 4, 0, -rows % 128))
        tiles = scales.view(scales.shape[0] // 128, 4, 32, scales.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
        return elements.view(get_format(x.fmt).dtype), tiles.contiguous().flatten().view(torch.float8_e8m0fnu)

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        f, (m, n) = torch.nn.functional, (a.elements.shape[0], b.elements.shape[0])
        if m == 0 or n == 0 or a.elements.shape[1] == 0:
            return torch.zeros(m, n, dtype=out_dtype, device=self.device)  # no kernel to ask
        (x, sx), (y, sy) = self._ready(a), self._ready(b)
        recipe, swizzle = f.ScalingType.BlockWise1x32, f.SwizzleType.SWIZZLE_32_4_4
        out: torch.Tensor = f.scaled_mm(x, y.t(), sx, recipe, sy, recipe, swizzle, swizzle, output_dtype=out_dtype)
        return out[:m, :n]


class TransformerEngine:
    """Transformer Engine's ``MXFP8Quantizer``, row by row: rceil only."""

    def __init__(self, name: str, device: torch.device) -> None:
        need_capability(name, device, 10, "its MXFP8 quantiser")
        self._tex = require(name, "transformer_engine_torch", "transformer-engine[pytorch]")
        module = "transformer_engine.pytorch.tensor.mxfp8_tensor"
        self._quantizer = require(name, module, "transformer-engine[pytorch]").MXFP8Quantizer
        self.name, self.device = name, device
        missing = ("dequantize", "gemm", "tails", "columns", "square", "stochastic", "hadamard")
        self.capabilities = Capabilities(
            rules=("rceil",),
            blocks=((1, 32),),
            lacks=dict.fromkeys(missing, "the adapter covers the row-wise cast only"),
        )

    def versions(self) -> dict[str, str]:
        return {"transformer_engine": importlib.metadata.version("transformer_engine")}

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, cols = x.shape
        padded = torch.nn.functional.pad(x.to(self.device), (0, 0, 0, -rows % 32))  # it takes multiples of 32 rows
        kind = {"e4m3": self._tex.DType.kFloat8E4M3, "e5m2": self._tex.DType.kFloat8E5M2}[fmt]
        q = self._quantizer(kind, rowwise=True, columnwise=False)(padded)
        return q._rowwise_scale_inv[:rows, : cols // 32], q._rowwise_data[:rows]

    dequantize = DotScaled.dequantize
    gemm = MLDtypes.gemm
