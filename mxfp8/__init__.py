"""MXFP8: microscaling FP8 training for PyTorch, with the same bits on CPU, Hopper and Blackwell."""

from mxfp8 import policies
from mxfp8.attention import block_attention, generalized_attention, jagged_attention
from mxfp8.audit import audit, watch
from mxfp8.coalesce import recoalesce, recoalesce_loss
from mxfp8.description import describe
from mxfp8.dispatch import explain, is_available
from mxfp8.epilogue import gemm_quantize
from mxfp8.formats import E4M3, E5M2, ElementFormat, Rounding, ScaleRule
from mxfp8.grouped import MXFP8GroupedLinear
from mxfp8.grouped_ops import MXGroups, grouped_wgrad, quantize_both_grouped, quantize_grouped
from mxfp8.linear import MXFP8Linear
from mxfp8.mlp import MXFP8MLP
from mxfp8.ops import gemm, grouped_gemm, hadamard, quantize, quantize_both
from mxfp8.policy import convert
from mxfp8.recipe import RECIPES, CastSpec, GemmSpec, LinearRecipe, get_recipe
from mxfp8.rng import RngKey, get_step, set_step
from mxfp8.rules import LastLinears, PrecisionPolicy, Rule, Shape
from mxfp8.tensor import MXTensor, cat

__version__ = "0.1.0"

# fmt: off
__all__ = [  # noqa: RUF022  (grouped by what one does with them)
    # formats and casts
    "E4M3", "E5M2", "ElementFormat", "MXGroups", "MXTensor", "RngKey", "Rounding", "ScaleRule", "cat", "hadamard",
    "quantize", "quantize_both", "quantize_both_grouped", "quantize_grouped", "recoalesce", "recoalesce_loss",
    # matrix products and attention
    "block_attention", "gemm", "gemm_quantize", "generalized_attention", "grouped_gemm", "grouped_wgrad",
    "jagged_attention",
    # modules and their recipes
    "CastSpec", "GemmSpec", "LinearRecipe", "MXFP8GroupedLinear", "MXFP8Linear", "MXFP8MLP", "RECIPES", "get_recipe",
    "get_step", "set_step",
    # which layer gets which recipe
    "LastLinears", "PrecisionPolicy", "Rule", "Shape", "convert", "describe", "policies",
    # what it does to the values, and what runs where
    "audit", "explain", "is_available", "watch",
]
# fmt: on
