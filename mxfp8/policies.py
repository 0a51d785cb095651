"""Built-in precision policies. Rules are names and numbers only, so every policy can be saved, read and changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxfp8.recipe import LinearRecipe
from mxfp8.rules import BF16, LastLinears, ModuleType, PrecisionPolicy, Rule, Shape, Target

__all__ = ["EMBEDDING_TYPES", "GATE_NAMES", "HEAD_NAMES", "NORM_TYPES", "recsys"]

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


def recsys(
    recipe: str | LinearRecipe = "mxfp8_rceil",
    *,
    min_dim: int = 1024,
    last_layers: int = 1,
    rules: Sequence[Rule | tuple[Any, Any]] = (),
) -> PrecisionPolicy:
    """The policy for recommenders: ``recipe`` for the wide matrix products, BF16 for everything fragile or small.

    Kept in BF16, each with its reason: embeddings, norms, gates and routers, prediction heads and logits, the last
    layers, layers whose K or N is not a multiple of 32, and layers whose K or N is below ``min_dim``.

    Args:
        recipe: of all other linear layers.
        min_dim: where MX begins to pay. A prototype on an H200 (65,536 rows, forward and backward of a D x D layer,
            casts not fused) ran at 0.71x the speed of BF16 at D = 512, 0.98x at 1024, 1.2x to 1.3x at 2048 and 1.45x at
            4096: below 1024 the casts cost more than the products save. Lower it (to 32 at least) to study the
            numerics of a small model.
        last_layers: how many linear layers at the end of the registration order to keep; 0 for none. With several
            heads, each is already kept by its name.
        rules: your own rules, asked before the built-in ones: ``("*.gate_proj", "mxfp8_rceil")`` takes SwiGLU's large
            ``gate_proj`` back from the rule on gates.

    Raises:
        ValueError: ``min_dim`` below 32, ``last_layers`` negative, unknown recipe.
    """
    if min_dim < 32:
        raise ValueError(f"min_dim is {min_dim}: use at least 32, the size of one block")
    if last_layers < 0:
        raise ValueError(f"last_layers is {last_layers}: use 0 or more")
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
