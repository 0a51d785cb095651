"""MXFP8: microscaling FP8 training for PyTorch, with the same bits on CPU, Hopper and Blackwell."""

# Which layer gets which recipe, and what it does to the values
from mxfp8 import policies
from mxfp8.audit import audit, watch
from mxfp8.description import describe

# Formats and casts
from mxfp8.dispatch import explain, is_available
from mxfp8.formats import E4M3, E5M2, ElementFormat, Rounding, ScaleRule

# Modules and recipes
from mxfp8.linear import MXFP8GroupedLinear, MXFP8Linear
from mxfp8.ops import gemm, grouped_gemm, hadamard, quantize
from mxfp8.policy import convert
from mxfp8.recipe import RECIPES, CastSpec, GemmSpec, LinearRecipe, get_recipe
from mxfp8.rng import RngKey, get_step, set_step
from mxfp8.rules import LastLinears, PrecisionPolicy, Rule, Shape
from mxfp8.tensor import MXTensor, cat

__version__ = "0.1.0"

__all__ = [
    "E4M3",
    "E5M2",
    "RECIPES",
    "CastSpec",
    "ElementFormat",
    "GemmSpec",
    "LastLinears",
    "LinearRecipe",
    "MXFP8GroupedLinear",
    "MXFP8Linear",
    "MXTensor",
    "PrecisionPolicy",
    "RngKey",
    "Rounding",
    "Rule",
    "ScaleRule",
    "Shape",
    "audit",
    "cat",
    "convert",
    "describe",
    "explain",
    "gemm",
    "get_recipe",
    "get_step",
    "grouped_gemm",
    "hadamard",
    "is_available",
    "policies",
    "quantize",
    "set_step",
    "watch",
]
