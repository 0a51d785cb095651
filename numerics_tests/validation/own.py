"""Our own backends. Ops for which a backend has no kernel are reported as not applicable, with dispatch's reason."""

from __future__ import annotations

import torch

import mxfp8
from mxfp8.dispatch import why_not
from mxfp8.formats import BlockShape, get_format
from numerics_tests.validation.implementation import Capabilities, Operand, UnavailableError


class Backend:
    """One backend of ``mxfp8``, named explicitly so that it runs or raises."""

    def __init__(self, name: str, device: torch.device) -> None:
        lacks = {op: reason for op in ("quantize", "gemm", "hadamard") if (reason := why_not(op, name, device))}
        if "quantize" in lacks and "gemm" in lacks:
            raise UnavailableError(f"{name} on {device}: {lacks['quantize']}; {lacks['gemm']}")
        if "quantize" in lacks:
            lacks |= dict.fromkeys(("scale", "stochastic"), lacks["quantize"])
        self.name, self.device, self.capabilities = name, device, Capabilities(lacks=lacks)

    def versions(self) -> dict[str, str]:
        return {"mxfp8": mxfp8.__version__}

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = mxfp8.quantize(x.to(self.device), axis, fmt, block, rule, backend=self.name)
        return q.scale_bytes, q.qdata.view(torch.uint8)

    def stochastic(self, x: torch.Tensor, fmt: str, key: mxfp8.RngKey) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``quantize``, rounded stochastically under ``key``."""
        q = mxfp8.quantize(x.to(self.device), fmt=fmt, rounding="stochastic", seed=key, backend=self.name)
        return q.scale_bytes, q.qdata.view(torch.uint8)

    def hadamard(self, x: torch.Tensor, size: int, seed: int) -> torch.Tensor:
        return mxfp8.hadamard(x.to(self.device), size=size, seed=seed, backend=self.name)

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self._mx(Operand(elements=elements, scales=scales, fmt=fmt)).dequantize(dtype)

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        return mxfp8.gemm(self._mx(a), self._mx(b), out_dtype=out_dtype, backend=self.name)

    def _mx(self, x: Operand) -> mxfp8.MXTensor:
        form = get_format(x.fmt)
        return mxfp8.MXTensor(x.elements.to(self.device).view(form.dtype), x.scales.to(self.device), form)
