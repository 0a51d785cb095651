"""A linear layer's three GEMMs, composed anew from ``quantize`` and float64 products as docs/numerics.md states."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

import mxfp8
from mxfp8.recipe import HP, RECIPES, CastSpec, GemmSpec, LinearRecipe, get_recipe
from mxfp8.rng import RngKey, get_step
from numerics_tests import tolerances

# Which stream of random bits an operand has, beside the checksum of the layer's name.
STREAMS = {("dgrad", "lhs"): 0, ("wgrad", "lhs"): 1, ("fprop", "lhs"): 2, ("wgrad", "rhs"): 3}

_SQUARE, _SR = CastSpec(block=(32, 32)), CastSpec(rounding="stochastic")
SPECIAL_RECIPES = (
    LinearRecipe.from_operands(name="all_square", input=_SQUARE, weight=_SQUARE, grad_output=_SQUARE),
    LinearRecipe.from_operands(name="stochastic_input", input=_SR, seed=2**40 + 1),
    LinearRecipe.from_operands(
        name="square_stochastic", input=CastSpec(block=(32, 32), rounding="stochastic"), grad_output=_SR
    ),
    LinearRecipe.from_operands(
        name="mixed", input=CastSpec(fmt="e5m2", scale_rule="even"), weight=CastSpec(scale_rule="ceil")
    ),
    LinearRecipe.from_operands(
        name="wide_blocks", input=CastSpec(block=(1, 256)), grad_output=CastSpec(block=(1, 128))
    ),
    LinearRecipe(name="hp_fprop", fprop=HP),
    LinearRecipe(name="hp_dgrad", dgrad=HP),
    LinearRecipe(name="hp_everywhere", fprop=HP, dgrad=HP, wgrad=HP),
    LinearRecipe(name="weight_only", fprop=GemmSpec(lhs=None), dgrad=GemmSpec(lhs=None), wgrad=HP),
    LinearRecipe(name="grad_only", fprop=HP, dgrad=GemmSpec(rhs=None), wgrad=GemmSpec(rhs=None)),
    LinearRecipe(name="input_hp_saved", save_activations="high_precision"),
    LinearRecipe(name="hadamard_128", wgrad=GemmSpec(lhs=CastSpec(hadamard=128), rhs=CastSpec(hadamard=128)), seed=7),
)
ALL_RECIPES = (*map(get_recipe, RECIPES), *SPECIAL_RECIPES)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Exact result of a GEMM on the operands as cast, and the largest error that its contract allows."""

    value: torch.Tensor
    error: torch.Tensor

    def assert_equals(self, got: torch.Tensor) -> None:
        assert got.shape == self.value.shape
        assert ((got.double() - self.value).abs() <= self.error).all()


@dataclass(frozen=True, kw_only=True)
class LinearReference:
    """What a layer called ``name`` must compute; ``row`` is the place of the first row in the batch."""

    recipe: LinearRecipe
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = ""
    row: int = 0

    def cast(self, x: torch.Tensor, gemm: str, side: str, axis: int) -> torch.Tensor:
        spec: CastSpec | None = getattr(getattr(self.recipe, gemm), side)
        if spec is None:
            return x.double()
        if spec.hadamard is not None:
            x = mxfp8.hadamard(x, axis, spec.hadamard, self.recipe.seed)
        key = None
        if spec.rounding == "stochastic":
            stream = (zlib.crc32(self.name.encode()) + STREAMS[gemm, side]) % 2**32
            key = RngKey(seed=self.recipe.seed, step=get_step(), stream=stream, row_offset=self.row)
        q = mxfp8.quantize(x, axis, spec.fmt, spec.block, spec.scale_rule, spec.rounding, key)
        return q.dequantize(torch.float64)

    def fprop(self, x: torch.Tensor, out_dtype: torch.dtype) -> Expected:
        """Y = X W^T, blocks along K."""
        a, b = self.cast(x, "fprop", "lhs", -1), self.cast(self.weight, "fprop", "rhs", -1)
        return self._product("fprop", a, b, out_dtype, self.bias)

    def dgrad(self, dy: torch.Tensor, out_dtype: torch.dtype) -> Expected:
        """dX = dY W, blocks along N."""
        a, b = self.cast(dy, "dgrad", "lhs", -1), self.cast(self.weight, "dgrad", "rhs", -2)
        return self._product("dgrad", a, b.mT, out_dtype)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype) -> Expected:
        """dW = dY^T X, blocks along M."""
        a, b = self.cast(dy, "wgrad", "lhs", -2), self.cast(x, "wgrad", "rhs", -2)
        return self._product("wgrad", a.mT, b.mT, out_dtype)

    def _product(
        self, gemm: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> Expected:
        spec: GemmSpec = getattr(self.recipe, gemm)
        blocks = (spec.lhs.block if spec.lhs else None, spec.rhs.block if spec.rhs else None)
        bias = None if bias is None else bias.detach().double()
        value = a @ b.mT if bias is None else a @ b.mT + bias
        return Expected(value=value, error=tolerances.product_error(a, b, blocks, out_dtype, bias))
