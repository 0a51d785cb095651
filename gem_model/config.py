"""What a GEM is made of: embedding tables and one frozen `GEMConfig`, with the named sizes in `CONFIGS`.

| name  | meant for               | dense parameters |
|-------|-------------------------|------------------|
| tiny  | two CPU cores, minutes  | about 1.7 M      |
| small | one GPU, quick runs     | about 50 M       |
| base  | one GPU                 | about 0.55 B     |
| large | many GPUs               | about 9 B        |

The counts are for one event stream; each further one has its own sequence layers. A configuration is independent of the
data; `tables_for_schema` binds it to the features of one `Schema`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_model.data.batching import Schema

ACTIVATIONS = ("gelu", "hardswish", "relu", "silu")
PFFN_ACTIVATIONS = (*ACTIVATIONS, "gelu_tanh", "identity")
NORMS = ("block", "layer")
GATES = ("identity", "sigmoid", "tanh")
EXPERTS = ("dcn", "wukong")
SEQUENCE_ATTENTION = ("block", "window")
POOLINGS = ("mean", "sum")
POSITIVE_SIZES = (
    "dim",
    "layers",
    "heads",
    "dense_hidden",
    "dense_tokens",
    "max_history",
    "summary_tokens",
    "pma_tokens",
    "recent_tokens",
    "pffn_tokens",
    "block",
    "fm_rank",
    "fm_tokens",
    "linear_tokens",
    "cross_rank",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingBagConfig:
    """One embedding table, with TorchRec's field names.

    `feature_names` are the sparse features that read it, or `<stream>.items` / `<stream>.actions` for the ids of an
    event stream; features that share an id space may share a table.
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: tuple[str, ...]
    pooling: str = "sum"

    def __post_init__(self) -> None:
        if not self.name or "." in self.name:
            raise ValueError(f"table name {self.name!r} must be a non-empty name without dots (it names a module)")
        for field in ("num_embeddings", "embedding_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"table {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")
        if not self.feature_names:
            raise ValueError(f"table {self.name!r} serves no feature: name at least one in feature_names")
        _require_choice(f"table {self.name!r}: pooling", self.pooling, POOLINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class GEMConfig:
    """Size and options of a GEM. Raises ValueError naming the field that is wrong, its value and what is allowed."""

    name: str
    dim: int
    """Width d of every token, a multiple of 32 (one MX block)."""
    layers: int
    heads: int
    dense_hidden: int
    """Hidden width of the MLP that turns the dense features into tokens."""
    dense_tokens: int = 1
    max_history: int = 32
    """Longest event stream accepted; also the default of `tau`."""
    summary_tokens: int = 4
    """n_sum: tokens of X_sum, which are also the CLS tokens of each sequence."""
    pma_tokens: int = 2
    recent_tokens: int = 2
    pffn_tokens: int = 8
    """Keys and values that X_sum generates per sample for the PFFN."""
    pffn_activation: str = "gelu"
    tau: float | None = None
    """Logit divisor of the PFFN; None means `max_history`, as in Kunlun."""
    comp_skip: bool = False
    """Kunlun's CompSkip: even layers run the PFFN and odd layers the self-attention, instead of both in each layer."""
    attention: str = "window"
    window: tuple[int, int] = (64, 64)
    block: int = 64
    rotary_seconds: float = 60.0
    """`scale` of the rotary time encoding log(1 + dt / scale), in seconds."""
    rotary_base: float = 100.0
    experts: tuple[str, ...] = ("wukong", "wukong")
    fm_rank: int = 16
    """k of the optimised factorisation machine X (X^T Y)."""
    fm_hidden: tuple[int, ...] = (256,)
    fm_tokens: int = 8
    linear_tokens: int = 8
    """n_L, the tokens of the linear compression; a layer puts out fm_tokens + linear_tokens tokens."""
    cross_rank: int = 64
    """Rank of the cross matrix of a `dcn` expert."""
    head_hidden: tuple[int, ...] = (128,)
    task_weights: tuple[float, ...] | None = None
    activation: str = "hardswish"
    norm: str = "block"
    gate: str = "identity"
    bias: bool = False
    """Biases outside the prediction layer, which always has one. LoKA drops them: they grow, and FP8 suffers."""
    sparse_grad: bool = False
    """Sparse gradients for the embedding tables; worth it when tables have far more rows than a batch reads."""
    tables: tuple[EmbeddingBagConfig, ...] | None = None
    """Embedding tables; None makes one per feature, shared where a stream names its `item_feature`."""

    def __post_init__(self) -> None:
        self._check_sizes()
        for field, allowed in (
            ("activation", ACTIVATIONS),
            ("pffn_activation", PFFN_ACTIVATIONS),
            ("norm", NORMS),
            ("gate", GATES),
            ("attention", SEQUENCE_ATTENTION),
        ):
            _require_choice(f"GEMConfig.{field}", getattr(self, field), allowed)
        for kind in self.experts:
            _require_choice("GEMConfig.experts", kind, EXPERTS)
        if not self.experts:
            raise ValueError(f"GEMConfig.experts is empty: list at least one of {list(EXPERTS)}")
        if len(self.window) != 2 or min(self.window) < -1:
            raise ValueError(f"GEMConfig.window must be (left, right), each -1 or at least 0, got {self.window}")
        for field in ("rotary_seconds", "rotary_base", "tau"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"GEMConfig.{field} must be positive and finite, got {value}")

    def _check_sizes(self) -> None:
        for field in POSITIVE_SIZES:
            if getattr(self, field) < 1:
                raise ValueError(f"GEMConfig.{field} must be at least 1, got {getattr(self, field)}")
        if self.dim % 32:
            raise ValueError(f"GEMConfig.dim must be a multiple of 32 (one MX block), got {self.dim}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"GEMConfig.dim = {self.dim} must split into {self.heads} heads of an even width (rotary pairs)"
            )
        for field in ("fm_hidden", "head_hidden"):
            if any(width < 1 for width in getattr(self, field)):
                raise ValueError(f"GEMConfig.{field} must hold positive widths, got {getattr(self, field)}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def logit_scale(self) -> float:
        """1 / tau of the PFFN."""
        return 1.0 / (self.tau if self.tau is not None else self.max_history)

    @property
    def sequence_summary_tokens(self) -> int:
        """Tokens of S_sum per event stream: CLS, PMA and recent."""
        return self.summary_tokens + self.pma_tokens + self.recent_tokens

    @property
    def interaction_tokens(self) -> int:
        """Tokens a layer puts out."""
        return self.fm_tokens + self.linear_tokens


def tables_for_schema(config: GEMConfig, schema: Schema) -> tuple[EmbeddingBagConfig, ...]:
    """The embedding tables of `config` for `schema`: `config.tables` checked against it, or one table per feature.

    The items of a stream that names an `item_feature` read that feature's table, so that a candidate and the same item
    in the history have one embedding. Raises ValueError naming the feature without a table, with two, or with one of
    the wrong size.
    """
    rows = {feature.name: feature.num_embeddings for feature in schema.sparse}
    for stream in schema.streams:
        rows[f"{stream.name}.items"] = stream.num_items
        rows[f"{stream.name}.actions"] = stream.num_actions
    tables = config.tables if config.tables is not None else _default_tables(config, schema, rows)
    served = [feature for table in tables for feature in table.feature_names]
    for feature, count in rows.items():
        if served.count(feature) != 1:
            raise ValueError(f"feature {feature!r} must be read from exactly one table, found {served.count(feature)}")
        table = next(table for table in tables if feature in table.feature_names)
        if table.num_embeddings < count:
            raise ValueError(
                f"table {table.name!r} has {table.num_embeddings} rows but feature {feature!r} needs {count}"
            )
    for table in tables:
        unknown = [feature for feature in table.feature_names if feature not in rows]
        if unknown:
            raise ValueError(f"table {table.name!r} names unknown features {unknown}; known are {sorted(rows)}")
        if table.embedding_dim != config.dim:
            raise ValueError(f"table {table.name!r}: embedding_dim {table.embedding_dim} must equal dim {config.dim}")
    return tables


def _default_tables(config: GEMConfig, schema: Schema, rows: dict[str, int]) -> tuple[EmbeddingBagConfig, ...]:
    readers = {feature.name: [feature.name] for feature in schema.sparse}
    for stream in schema.streams:
        items = f"{stream.name}.items"
        if stream.item_feature is None:
            readers[items] = [items]
        else:
            readers[stream.item_feature].append(items)
        readers[f"{stream.name}.actions"] = [f"{stream.name}.actions"]
    return tuple(
        EmbeddingBagConfig(
            num_embeddings=rows[first],
            embedding_dim=config.dim,
            name="t_" + first.replace(".", "_"),
            feature_names=tuple(features),
        )
        for first, features in readers.items()
    )


def get_config(name_or_config: str | GEMConfig, **overrides: object) -> GEMConfig:
    """A named configuration, or one given as is, with fields replaced by `overrides`.

    Raises ValueError listing the known names, and TypeError for an unknown field.
    """
    if isinstance(name_or_config, GEMConfig):
        config = name_or_config
    elif name_or_config in CONFIGS:
        config = CONFIGS[name_or_config]
    else:
        raise ValueError(f"unknown configuration {name_or_config!r}; choose one of {sorted(CONFIGS)}")
    return replace(config, **overrides)  # type: ignore[arg-type]


def _require_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {list(allowed)}, got {value!r}")


CONFIGS: dict[str, GEMConfig] = {
    config.name: config
    for config in (
        GEMConfig(
            name="tiny",
            dim=64,
            layers=2,
            heads=2,
            dense_hidden=128,
            dense_tokens=2,
            comp_skip=True,
            fm_rank=32,
            fm_hidden=(128,),
            gate="tanh",
        ),
        GEMConfig(
            name="small",
            dim=128,
            layers=3,
            heads=4,
            dense_hidden=256,
            max_history=256,
            summary_tokens=8,
            pma_tokens=4,
            recent_tokens=4,
            pffn_tokens=32,
            fm_rank=32,
            fm_hidden=(1024,),
            fm_tokens=16,
            linear_tokens=16,
            head_hidden=(512, 256),
        ),
        GEMConfig(
            name="base",
            dim=256,
            layers=4,
            heads=4,
            dense_hidden=1024,
            dense_tokens=4,
            max_history=1024,
            window=(128, 128),
            summary_tokens=16,
            pma_tokens=8,
            recent_tokens=8,
            pffn_tokens=32,
            fm_rank=64,
            fm_hidden=(2048, 2048),
            fm_tokens=32,
            linear_tokens=32,
            head_hidden=(1024, 512, 256),
        ),
        GEMConfig(
            name="large",
            dim=512,
            layers=8,
            heads=4,
            dense_hidden=4096,
            dense_tokens=8,
            max_history=8192,
            attention="block",
            summary_tokens=16,
            pma_tokens=16,
            recent_tokens=16,
            pffn_tokens=32,
            experts=("wukong",) * 4,
            fm_rank=96,
            fm_hidden=(4096, 4096),
            fm_tokens=64,
            linear_tokens=64,
            head_hidden=(2048, 1024, 512),
        ),
    )
}
