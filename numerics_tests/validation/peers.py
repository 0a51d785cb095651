"""Other libraries that run on a CPU: torchao, ml_dtypes and gfloat. Each is imported when it is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import numpy as np
import torch

from mxfp8.formats import BlockShape, get_format
from numerics_tests import oracles
from numerics_tests.validation.implementation import Capabilities, Operand, UnavailableError

_NO_PART_OF = {
    "columns": "casts along the last axis only",
    "square": "1x32 blocks only",
    "stochastic": "no stochastic rounding to MXFP8",
    "hadamard": "no Hadamard transform",
}


def require(name: str, module: str, install: str) -> Any:
    """Import a module or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{name}: {error}. Install it: pip install {install}") from error


class TorchAO:
    """torchao's prototype ``to_mx``, ``MXTensor.dequantize``, and its matrix product in emulation."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._mx = require(name, "torchao.prototype.mx_formats.mx_tensor", "torchao==0.18.0")
        self._modes = require(name, "torchao.prototype.mx_formats.config", "torchao==0.18.0").ScaleCalculationMode
        self.name, self.device = name, device
        self.capabilities = Capabilities(
            blocks=((1, 32),),
            lacks=_NO_PART_OF
            | {
                "tails": "asserts that the last dimension is a multiple of 32",
                "strides": "asserts that the input is contiguous",
                "float16": "asserts that the input is float32 or bfloat16",
            },
        )

    def versions(self) -> dict[str, str]:
        return {"torchao": importlib.metadata.version("torchao")}

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, data = self._mx.to_mx(x.to(self.device), get_format(fmt).dtype, block[1], self._modes(rule))
        return scale.view(torch.uint8), data.view(torch.uint8)

    def _tensor(self, x: Operand, dtype: torch.dtype) -> Any:
        return self._mx.MXTensor.from_qdata_and_scales(
            x.elements.to(self.device).view(get_format(x.fmt).dtype),
            x.scales.to(self.device).view(torch.float8_e8m0fnu),
            dtype,
            kernel_preference=self._mx.KernelPreference.EMULATED,
            act_quant_kwargs=self._mx.QuantizeTensorToMXKwargs(),
        )

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        out: torch.Tensor = self._tensor(Operand(elements=elements, scales=scales, fmt=fmt), dtype).dequantize(dtype)
        return out

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        return torch.mm(self._tensor(a, out_dtype), self._tensor(b, out_dtype).t())


class MLDtypes:
    """ml_dtypes' element casts under the exact rceil scale, and its decoding of elements and scale bytes."""

    def __init__(self, name: str, device: torch.device) -> None:
        if device.type != "cpu":
            raise UnavailableError(f"{name} on {device}: it runs on NumPy arrays, so on cpu only")
        ml = require(name, "ml_dtypes", "ml_dtypes")
        self._elements = {"e4m3": ml.float8_e4m3fn, "e5m2": ml.float8_e5m2}
        self._scale = ml.float8_e8m0fnu
        self.name, self.device = name, device
        self.capabilities = Capabilities(
            rules=("floor", "rceil"),
            blocks=((1, 32),),
            lacks=_NO_PART_OF
            | {
                "scale": "no scale rule: its E8M0 cast rounds to nearest, 1 / 448 to 0x76 where rceil has 0x77",
                "gemm": "no matrix product",
                "tails": "no blocks: the adapter makes whole ones",
            },
        )

    def versions(self) -> dict[str, str]:
        return {"ml_dtypes": importlib.metadata.version("ml_dtypes")}

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.double().numpy().reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
        amax = np.abs(np.where(np.isfinite(blocks).all(-1, keepdims=True), blocks, 0.0)).max(axis=-1, initial=0.0)
        scale = np.where(np.isfinite(blocks).all(-1), oracles.scale_byte(amax, fmt, rule), 255).astype(np.uint8)
        with np.errstate(all="ignore"):
            scaled = (blocks / scale.view(self._scale).astype(np.float64)[..., None]).astype(np.float32)
            codes = scaled.astype(self._elements[fmt]).view(np.uint8)
        return torch.from_numpy(scale), torch.from_numpy(codes.reshape(x.shape))

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        values = elements.numpy().view(self._elements[fmt]).astype(np.float32)
        factors = scales.numpy().view(self._scale).astype(np.float32)
        with np.errstate(all="ignore"):
            out = values.reshape(*scales.shape, 32) * factors[..., None]
        return torch.from_numpy(out.reshape(values.shape)).to(dtype)

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        raise UnavailableError(self.capabilities.lacks["gemm"])


class GFloat:
    """gfloat's ``compute_scale_amax`` (the floor rule) and its array twins of rounding, encoding and decoding."""

    def __init__(self, name: str, device: torch.device) -> None:
        if device.type != "cpu":
            raise UnavailableError(f"{name} on {device}: it runs on NumPy arrays, so on cpu only")
        self._gf = require(name, "gfloat", "gfloat")
        formats = require(name, "gfloat.formats", "gfloat")
        self._info = {"e4m3": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2}
        self._e8m0 = formats.format_info_ocp_e8m0
        self.name, self.device = name, device
        self.capabilities = Capabilities(
            rules=("floor",),
            blocks=((1, 32),),
            lacks=_NO_PART_OF | {"gemm": "no matrix product", "tails": "the adapter makes whole blocks"},
        )

    def versions(self) -> dict[str, str]:
        return {"gfloat": importlib.metadata.version("gfloat")}

    def _encode(self, info: Any, values: np.ndarray) -> np.ndarray:
        gf = self._gf
        rounded = gf.round_ndarray(info, values, gf.RoundMode.TiesToEven, True)
        return np.asarray(gf.encode_ndarray(info, rounded)).astype(np.uint8)

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        info, blocks = self._info[fmt], x.double().numpy().reshape(-1, 32)
        with np.errstate(all="ignore"):
            scale = np.array([self._gf.compute_scale_amax(info.emax, row) for row in blocks], dtype=np.float64)
            codes = self._encode(info, blocks / scale[:, None])
        scales = self._encode(self._e8m0, scale).reshape(*x.shape[:-1], x.shape[-1] // 32)
        return torch.from_numpy(scales), torch.from_numpy(codes.reshape(x.shape))

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        values = self._gf.decode_ndarray(self._info[fmt], elements.numpy().astype(np.int64))
        factors = self._gf.decode_ndarray(self._e8m0, scales.numpy().astype(np.int64))
        out = values.reshape(*scales.shape, 32) * factors[..., None]
        return torch.from_numpy(out.reshape(values.shape)).float().to(dtype)

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        raise UnavailableError(self.capabilities.lacks["gemm"])
