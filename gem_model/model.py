"""GEM: sparse, dense and event features to one logit per task.

    X   tokens [B, n, d] from embedding tables and dense features
    S_k packed tokens [T', d] of event stream k, with X_sum appended as CLS tokens

    each layer:   X_sum = Norm(Gating(LCE(X)))                       `layers.<i>.x_summary`
                  S_k   = SelfAttention(PFFN(X_sum, S_k))            `layers.<i>.sequence.<stream>`
                  S_sum = Norm(Gating([CLS | PMA | recent](S_k)))
                  X     = Norm(sum of experts([X | S_sum]) + shortcut)  `layers.<i>.interaction`
    output:       logits = towers([X_sum | S_sum])                   `head`

InterFormer's alternation of sequence and interaction (arXiv 2411.09852) with the sequence side first, so that the
interaction of a layer already sees what the sequence of the same layer found; Wukong experts (arXiv 2403.02545) and the
PFFN as generalised attention (Kunlun, arXiv 2602.10016). `docs/gem.md` is the guide.

Every weight is a plain `nn.Linear` or `nn.EmbeddingBag`, so a precision policy can address it by its dotted name.
Weights are fp32. Under `torch.autocast` linears run in bf16; norms, gates, softmax and logits stay in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_model.config import GEMConfig, get_config, tables_for_schema
from gem_model.data.batching import Batch, Schema
from gem_model.layers.basic import TokenSummary
from gem_model.layers.embedding import TABLE_STD, DenseTokens, EmbeddingTables, EventTokens
from gem_model.layers.experts import InteractionExperts
from gem_model.layers.heads import MultiTaskHead, multi_task_loss
from gem_model.layers.sequence import AttentionPooling, Layout, SequenceLayer, has_pffn


class GEMLayer(nn.Module):
    """One layer: X-summary, one sequence layer per event stream, interaction experts."""

    def __init__(self, index: int, tokens: int, streams: tuple[str, ...], config: GEMConfig) -> None:
        super().__init__()
        self.x_summary = _token_summary(tokens, config) if streams and has_pffn(index, config) else None
        self.sequence = nn.ModuleDict({stream: SequenceLayer(index, config) for stream in streams})
        self.interaction = InteractionExperts(tokens + len(streams) * config.sequence_summary_tokens, config)

    def forward(
        self, x: Tensor, sequences: dict[str, Tensor], layouts: dict[str, Layout]
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """X, packed sequences -> X', packed sequences', the S_sum of each stream."""
        updated, summaries = {}, []
        x_sum = self.x_summary(x) if self.x_summary is not None else None
        for stream, layer in self.sequence.items():
            updated[stream], summary = layer(sequences[stream], x_sum, layouts[stream])
            summaries.append(summary)
        return self.interaction(torch.cat([x, *summaries], dim=1)), updated, summaries


class GEM(nn.Module):
    """The recommender. Initialised from torch's global generator: seed it for the same weights.

    Args: `config` (a GEMConfig or the name of one), `schema` of the data it is fed.
    Raises ValueError when the tables do not fit the schema, or the schema has neither sparse nor dense features.
    """

    def __init__(self, config: GEMConfig | str, schema: Schema) -> None:
        super().__init__()
        config = get_config(config)
        if not schema.sparse and not schema.dense:
            raise ValueError("the schema has no sparse and no dense feature: X would have no token")
        weights = config.task_weights
        if weights is not None and (len(weights) != len(schema.tasks) or min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(
                f"GEMConfig.task_weights must hold one weight >= 0, not all 0, for each of {schema.tasks}, "
                f"got {weights}"
            )
        self.config, self.schema = config, schema
        streams = schema.stream_names
        tokens = len(schema.sparse) + (config.dense_tokens if schema.dense else 0)
        self.embedding = EmbeddingTables(tables_for_schema(config, schema), config.sparse_grad)
        if schema.dense:
            self.dense = DenseTokens(len(schema.dense), config)
        self.events = nn.ModuleDict({stream: EventTokens(stream, config) for stream in streams})
        if streams:
            self.cls = _token_summary(tokens, config)
        widths = [tokens] + [config.interaction_tokens] * config.layers
        self.layers = nn.ModuleList(GEMLayer(i, width, streams, config) for i, width in enumerate(widths[:-1]))
        self.x_summary = _token_summary(widths[-1], config)
        summary = config.summary_tokens + len(streams) * config.sequence_summary_tokens
        self.head = MultiTaskHead(summary * config.dim, schema.tasks, config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew: linears N(0, 1 / fan_in), tables N(0, 0.01^2), biases 0, PMA seeds N(0, 1).

        Every buffer-free parameter is set here, so a model built on the meta device is ready after
        `model.to_empty(device=...)` and this call. The prediction layers start at a tenth, near the base rate's logit.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5 * (0.1 if name.endswith(".prediction") else 1.0)
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.EmbeddingBag):
                nn.init.normal_(module.weight, std=TABLE_STD)
            elif isinstance(module, AttentionPooling):
                nn.init.normal_(module.seeds)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float32 [B, n_tasks], tasks in the order of the schema.

        Raises ValueError naming the offender: a batch that does not match the schema, an id outside its table, a
        history longer than `max_history`.
        """
        self._check(batch)
        x = self._tokens(batch)
        sequences, layouts = {}, {}
        for stream, embed in self.events.items():
            events = batch.streams[stream]
            layouts[stream] = Layout.build(events.lengths, events.seconds_ago, self.config)
            sequences[stream] = layouts[stream].pack(embed(self.embedding, events).float(), self.cls(x))
        summaries: list[Tensor] = []
        for layer in self.layers:
            x, sequences, summaries = layer(x, sequences, layouts)
        logits: Tensor = self.head(torch.cat([self.x_summary(x), *summaries], dim=1).flatten(1))
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Task-weighted binary cross-entropy in fp32: [B, n_tasks] twice -> scalar, nats."""
        return multi_task_loss(logits, labels, self.config.task_weights)

    def _tokens(self, batch: Batch) -> Tensor:
        """X [B, n, d], float32."""
        parts = []
        if self.schema.sparse:
            parts.append(self.embedding.pooled(batch.sparse, self.schema.sparse_names))
        if self.schema.dense:
            parts.append(self.dense(batch.dense).float())
        return torch.cat(parts, dim=1)

    def _check(self, batch: Batch) -> None:
        schema = self.schema
        if batch.dense.shape[1] != len(schema.dense):
            raise ValueError(f"batch.dense has {batch.dense.shape[1]} columns, the schema has {len(schema.dense)}")
        missing = [name for name in schema.sparse_names if name not in batch.sparse.keys]
        missing += [name for name in schema.stream_names if name not in batch.streams]
        if missing:
            raise ValueError(f"the batch lacks the features {missing} of the schema")
        for name in schema.stream_names:
            lengths = batch.streams[name].lengths
            if lengths.numel() and (longest := int(lengths.max())) > self.config.max_history:
                row = int(lengths.argmax())
                raise ValueError(
                    f"stream {name!r}, row {row}: {longest} events exceed max_history = {self.config.max_history}; "
                    "cap the history or raise max_history in the configuration"
                )
        self.embedding.check_ids(batch, schema)


def _token_summary(tokens: int, config: GEMConfig) -> TokenSummary:
    return TokenSummary(tokens, config.summary_tokens, config.dim, gate=config.gate, norm=config.norm, bias=config.bias)
