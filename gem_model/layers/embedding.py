"""From ids and numbers to tokens: embedding tables, dense features, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.config import EmbeddingBagConfig, GEMConfig
from gem_model.data.batching import Batch, EventStream, KeyedJaggedTensor, Schema
from gem_model.layers.basic import make_norm, mlp

TABLE_STD = 0.01
"""Of new embedding rows: small, so that a row says little before it has learned something."""
TIME_SCALE = 0.05


class EmbeddingTables(nn.Module):
    """One `nn.EmbeddingBag` per table, named as TorchRec's EmbeddingBagCollection: `embedding_bags.<table>.weight`."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], sparse_grad: bool = False) -> None:
        super().__init__()
        self.tables = tuple(tables)
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=table.pooling,
                    include_last_offset=True,
                    sparse=sparse_grad,
                )
                for table in tables
            }
        )
        self.table_of = {feature: table.name for table in tables for feature in table.feature_names}

    def bag(self, feature: str) -> nn.EmbeddingBag:
        """The table that `feature` reads."""
        bag = self.embedding_bags[self.table_of[feature]]
        assert isinstance(bag, nn.EmbeddingBag)
        return bag

    def pooled(self, sparse: KeyedJaggedTensor, features: Sequence[str]) -> Tensor:
        """Sum (or mean) of the rows of each feature: float32 [B, len(features), d]; an empty list gives zeros."""
        tokens = []
        for feature in features:
            ids = sparse[feature]
            tokens.append(self.bag(feature)(ids.values, ids.offsets()))
        return torch.stack(tokens, dim=1)

    def rows(self, feature: str, ids: Tensor) -> Tensor:
        """One row per id, [T] -> float32 [T, d]."""
        bag = self.bag(feature)
        return F.embedding(ids, bag.weight, sparse=bag.sparse)

    def check_ids(self, batch: Batch, schema: Schema) -> None:
        """Raise ValueError naming the feature, the id and the table if any id of `batch` is outside its table."""
        ids = {name: batch.sparse[name].values for name in schema.sparse_names}
        for name in schema.stream_names:
            ids[f"{name}.items"] = batch.streams[name].item_ids
            ids[f"{name}.actions"] = batch.streams[name].action_ids
        ids = {feature: values for feature, values in ids.items() if values.numel()}
        if not ids:
            return
        # One transfer for all features: on a GPU each one waits for the device.
        extremes = torch.stack([torch.stack(values.aminmax()) for values in ids.values()]).tolist()
        for feature, (low, high) in zip(ids, extremes, strict=True):
            size = self.bag(feature).num_embeddings
            if low < 0 or high >= size:
                raise ValueError(
                    f"feature {feature!r}: id {low if low < 0 else high} is outside table "
                    f"{self.table_of[feature]!r}, whose ids are 0 to {size - 1}"
                )


class DenseTokens(nn.Module):
    """Numbers to tokens by an MLP (Wukong): float32 [B, n_dense] -> [B, dense_tokens, d]."""

    def __init__(self, num_dense: int, config: GEMConfig) -> None:
        super().__init__()
        self.shape = (config.dense_tokens, config.dim)
        widths = (num_dense, config.dense_hidden, config.dense_tokens * config.dim)
        self.mlp = mlp(widths, config.activation, config.bias)

    def forward(self, dense: Tensor) -> Tensor:
        tokens: Tensor = self.mlp(dense)
        return tokens.view(-1, *self.shape)


class EventTokens(nn.Module):
    """Events to tokens, packed [T, d], through InterFormer's MaskNet: S = LCE(E * mask(E)).

    E = Norm(item row + action row + time features), the last scaled to the initial size of a table row.
    """

    def __init__(self, stream: str, config: GEMConfig) -> None:
        super().__init__()
        self.stream = stream
        self.norm = make_norm(config.norm)
        self.mask = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.compress = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, tables: EmbeddingTables, events: EventStream) -> Tensor:
        rows = tables.rows(f"{self.stream}.items", events.item_ids)
        rows = rows + tables.rows(f"{self.stream}.actions", events.action_ids)
        tokens = self.norm(rows + TIME_SCALE * time_features(events.seconds_ago, rows.shape[-1]))
        compressed: Tensor = self.compress(tokens * self.mask(tokens))
        return compressed


def time_features(seconds: Tensor, width: int) -> Tensor:
    """Sines and cosines of log(1 + seconds): float32 [T] -> [T, width], mean square 1.

    Periods run, geometrically, from all of log(1 + 30 years) = 21 down to one unit of log-time, a factor e in time.
    """
    waves = 2 * torch.pi * 21 ** torch.linspace(-1, 0, width // 2, device=seconds.device)
    angle = torch.log1p(seconds)[:, None] * waves
    return 2**0.5 * torch.cat([angle.sin(), angle.cos()], dim=-1)
