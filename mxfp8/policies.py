"""Built-in precision policies. Rules are names and numbers only, so every policy can be saved, read and changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxfp8.recipe import GEMMS, LinearRecipe, get_recipe
from mxfp8.rules import BF16, LastLinears, ModuleType, PrecisionPolicy, Rule, Shape, Target, recipe_name

__all__ = ["EMBEDDING_TYPES", "GATE_NAMES", "GPUS", "HEAD_NAMES", "NORM_TYPES", "pays_from", "recsys"]

EMBEDDING_TYPES = ("Embedding", "EmbeddingBag", "EmbeddingCollection", "EmbeddingBagCollection")
"""torch's classes, and TorchRec's collections."""

NORM_TYPES = ("LayerNorm", "RMSNorm", "GroupNorm", "_NormBase")
"""torch's normalisations; batch and instance norms derive from ``_NormBase``."""

GATE_NAMES = ("gate", "gates", "gate_*", "gate[0-9]*", "*_gate", "*_gates", "gating", "gating_*", "*_gating", "router")
"""Name components of gates and routers. Not ``*gate*``: that would take ``aggregate`` too."""

HEAD_NAMES = (
    *("head", "heads", "head_*", "*_head", "*_heads", "classifier", "*_classifier"),
    *("logit", "logits", "*_logits", "softmax", "predict", "prediction", "predictions", "predictor", "*_prediction"),
)
"""Name components of prediction heads, at any depth."""

TOP_LEVEL_HEAD_NAMES = ("output", "output_*", "out", "final", "final_*")
"""Names of heads only at the top level of a model: deeper, ``attention.output`` is an ordinary projection."""


MIN_DIM = 1024
"""Where MX begins to pay, at the earliest seen: the casts grow with D, the products with D squared."""

GPUS = ("hopper",)
"""GPUs whose layers were timed against BF16 with every cast counted: ``bench/results/h200/linear.csv``."""


def pays_from(recipe: str | LinearRecipe, gpu: str) -> int | None:
    """The smallest D for which a D x D layer in ``recipe`` was timed no slower than in BF16 on ``gpu`` (65,536 rows,
    forward and backward, every cast counted), None if at no D.

    On an H200, in units of BF16's speed: blocks of 128 or 256 along K in all three GEMMs run on FP8 tensor cores, 1.12
    at D = 1024, 1.42 at 2048, 1.69 at 4096, 0.84 at 512; all other blocks run on BF16 ones, 0.64, 0.77
    and 0.86.

    Raises:
        ValueError: a GPU that was not timed (:data:`GPUS` are), an unknown recipe.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: layers were timed on {', '.join(GPUS)} only; give min_dim= for another one")
    recipe = get_recipe(recipe)
    sides = [side for gemm in GEMMS for side in (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs)]
    return MIN_DIM if all(side is not None and side.block[1] >= 128 for side in sides) else None


def recsys(
    recipe: str | LinearRecipe = "mxfp8_rceil",
    *,
    min_dim: int = MIN_DIM,
    last_layers: int = 1,
    rules: Sequence[Rule | tuple[Any, Any]] = (),
    gpu: str | None = None,
) -> PrecisionPolicy:
    """The policy for recommenders: ``recipe`` for the wide matrix products, BF16 for everything fragile or small.

    Kept in BF16, each with its reason: embeddings, norms, gates and routers, prediction heads and logits, the last
    layers, layers whose K or N is not a multiple of 32, and layers whose K or N is below ``min_dim``.

    Args:
        recipe: of all other linear layers.
        min_dim: where MX begins to pay, see :func:`pays_from`. Lower it (to 32 at least) to study the numerics of a
            small model.
        last_layers: how many linear layers at the end of the registration order to keep; 0 for none. With several
            heads, each is already kept by its name.
        rules: your own rules, asked before the built-in ones: ``("*.gate_proj", "mxfp8_rceil")`` takes SwiGLU's large
            ``gate_proj`` back from the rule on gates.
        gpu: the GPU that is to be faster for it, one of :data:`GPUS`; a recipe that pays at no size there is refused.
            None: speed is not asked for. Which layers get which recipe does not depend on it.

    Raises:
        ValueError: ``min_dim`` below 32, ``last_layers`` negative, unknown recipe or GPU; ``recipe`` makes no layer
            faster on ``gpu``.
    """
    if min_dim < 32:
        raise ValueError(f"min_dim is {min_dim}: use at least 32, the size of one block")
    if last_layers < 0:
        raise ValueError(f"last_layers is {last_layers}: use 0 or more")
    if gpu is not None and pays_from(recipe, gpu) is None:
        raise ValueError(
            f"recipe {recipe_name(recipe)!r} makes no layer faster on {gpu}: its products take as long as in BF16, its "
            "casts come on top. Use blocks of 128 along K (mxfp8_coalesced), or leave gpu out to train with it anyway"
        )
    kept: list[Rule] = []

    def keep(targets: Sequence[Target], reason: str) -> None:
        # Not required: a policy for any model cannot know which of these a model has.
        kept.extend(Rule(target, BF16, reason=reason, required=False) for target in targets)

    keep([ModuleType(name) for name in EMBEDDING_TYPES], "looked up, not multiplied")
    keep([ModuleType(name) for name in NORM_TYPES], "sets the scale of everything after it")
    keep([f"**.{name}" for name in GATE_NAMES], "a gate: its error multiplies whole features")
    keep([f"**.{name}" for name in HEAD_NAMES], "a prediction head: its error goes straight into the logit")
    keep(TOP_LEVEL_HEAD_NAMES, "a prediction head: its error goes straight into the logit")
    if last_layers:
        keep([LastLinears(last_layers)], "nothing after it averages its error away")
    keep([Shape(not_multiple_of=32)], "K or N would end in a short block")
    if min_dim > 32:
        keep([Shape(smaller_than=min_dim)], "its casts would cost more than its products save")
    return PrecisionPolicy(rules=[*rules, *kept], default=recipe, name="recsys")
