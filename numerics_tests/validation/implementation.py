"""What a library has to offer to be held against the contract, and the table of those we know by name.

An adapter translates names and layouts and nothing else: what it returns are the bytes that the library made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mxfp8.formats import BLOCK_SHAPES, BlockShape
from numerics_tests.oracles import RULES

FEATURES = (
    "quantize",
    "scale",  # scale bytes of its own; without them elements are cast under the exact scale
    "dequantize",
    "gemm",
    "tails",  # lengths that are no multiple of the block
    "strides",  # views that are not contiguous
    "columns",  # axis=-2
    "square",  # 32x32 blocks
    "float16",
    "stochastic",
    "hadamard",
)


class UnavailableError(RuntimeError):
    """The implementation cannot run here; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an implementation says it can do. ``lacks`` maps each missing feature of FEATURES to the reason."""

    formats: tuple[str, ...] = ("e4m3", "e5m2")
    rules: tuple[str, ...] = RULES
    blocks: tuple[BlockShape, ...] = BLOCK_SHAPES
    lacks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.lacks) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown feature {sorted(unknown)[0]!r}: use one of {', '.join(FEATURES)}")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One MX matrix ``[rows, K]`` in 1x32 blocks along K, all uint8: elements as x, scales ``[rows, ceil(K/32)]``."""

    elements: torch.Tensor
    scales: torch.Tensor
    fmt: str


class Implementation(Protocol):
    """The interface of every adapter. Scales and elements are uint8 tensors; everything else as in ``mxfp8``."""

    name: str
    device: torch.device
    capabilities: Capabilities

    def versions(self) -> dict[str, str]:
        """The library and its version, as the certificate shows them."""

    def quantize(
        self, x: torch.Tensor, fmt: str, rule: str, block: BlockShape = (1, 32), axis: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(scale bytes, element bytes)`` of ``x``."""

    def dequantize(
        self, elements: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Values of 1x32 blocks along the last axis."""

    def gemm(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        """``a[M, K] @ b[N, K].T`` rounded once to ``out_dtype``."""


_TABLE = {
    "reference": "own:Backend",
    "triton": "own:Backend",
    "hopper": "own:Backend",
    "blackwell": "own:Backend",
    "torchao": "peers:TorchAO",
    "ml_dtypes": "peers:MLDtypes",
    "gfloat": "peers:GFloat",
    "dot_scaled": "gpu_peers:DotScaled",
    "scaled_mm": "gpu_peers:ScaledMM",
    "transformer_engine": "gpu_peers:TransformerEngine",
}
NAMES = tuple(_TABLE)


def load(name: str, device: str | torch.device = "cpu") -> Implementation:
    """The adapter of that name on a device; the library behind it is imported now and not earlier.

    Raises:
        ValueError: unknown name.
        UnavailableError: it cannot run here, with the reason.
    """
    if name not in _TABLE:
        raise ValueError(f"unknown implementation {name!r}: use one of {', '.join(NAMES)}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"{name} on {where}: torch sees no CUDA GPU here")
    module, attribute = _TABLE[name].split(":")
    adapter = getattr(importlib.import_module(f"numerics_tests.validation.{module}"), attribute)
    made: Implementation = adapter(name, where)
    return made
