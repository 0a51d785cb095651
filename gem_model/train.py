"""Training one GEM: mixed precision, clipping, and an error that says where a run stopped being finite.

Master weights and optimiser state are fp32. The forward pass runs under `torch.autocast(bfloat16)`; a model converted
by `mxfp8.convert` runs its linears in MXFP8 inside the same autocast, so the two precisions differ in nothing else.
A run is a pure function of (weights, source, `TrainConfig`): nothing else is drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import mxfp8
from gem_model.data import Batch, Loader, SampleSource
from gem_model.metrics import NormalizedEntropy
from gem_model.model import GEM
from gem_model.optim import gradient_norm, lr_factor, make_optimizers, scale_gradients, set_lr

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a GEM is trained. Defaults: see docs/gem_compare.md."""

    epochs: int = 1
    batch_size: int = 512
    table_lr: float = 0.01
    dense_lr: float = 3e-3
    weight_decay: float = 1.0
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises to its peak; a cosine to zero follows."""
    clip_norm: float = 1.0
    """Largest global gradient norm; tables count too."""
    seed: int = 0
    """Order of the samples, and the seed of a new model's weights."""
    autocast: bool = True
    """bfloat16 autocast; off trains in fp32."""
    window: int = 10
    """Steps per point of the training curve."""

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size", "window"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in ("table_lr", "dense_lr", "weight_decay"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be >= 0 and finite, got {getattr(self, field)}")
        if not self.clip_norm > 0 or not 0 <= self.warmup < 1 or self.seed < 0:
            raise ValueError(
                f"clip_norm must be > 0, warmup in [0, 1) and seed >= 0, got clip_norm={self.clip_norm}, "
                f"warmup={self.warmup}, seed={self.seed}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """Training NE per task over the `TrainConfig.window` steps that end at `step`; NaN where all labels were equal."""

    step: int
    ne: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a progress display shows: steps done of `total`, the latest mean NE over tasks, speed since the start."""

    step: int
    total: int
    ne: float
    samples_per_s: float


class NonFiniteError(ArithmeticError):
    """A loss, activation or gradient became NaN or Inf. `step` counts from 0; `layer` is a dotted module name."""

    def __init__(self, step: int, layer: str, what: str) -> None:
        super().__init__(
            f"step {step}: {what}; lower the learning rate, keep this layer in BF16, or look at its inputs"
        )
        self.step, self.layer = step, layer


class Trainer:
    """One training run over `source`. `gem_model.checkpoint` saves and resumes it bit for bit.

    Every run has its own value of `mxfp8`'s global step counter (part of every stochastic-rounding key), from 0 on.
    """

    def __init__(self, model: GEM, source: SampleSource, config: TrainConfig, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.config = config
        self.device = torch.device(device)
        self.loader = Loader(source, config.batch_size, seed=config.seed)
        self.total = config.epochs * len(self.loader)
        self.optimizers = make_optimizers(
            model, table_lr=config.table_lr, dense_lr=config.dense_lr, weight_decay=config.weight_decay
        )
        self.step = 0
        self.losses: list[float] = []
        self.curve: list[CurvePoint] = []
        self.window = NormalizedEntropy(model.schema.tasks)
        self.seconds = 0.0
        self.samples = 0
        self.mxfp8_step = 0

    def run(
        self,
        until: int | None = None,
        on_step: Callable[[Progress], object] | None = None,
        on_batch: Callable[[Batch], object] | None = None,
    ) -> None:
        """Train up to step `until` (default: the end). Raises NonFiniteError before the step that would spread it.

        `on_batch` sees every batch (on the CPU) before it is used, `on_step` the progress after each step.
        """
        end = self.total if until is None else min(until, self.total)
        self.model.train()
        batches = self._batches()
        mxfp8.set_step(self.mxfp8_step)
        while self.step < end:
            batch = next(batches)
            if on_batch is not None:
                on_batch(batch)
            start = time.perf_counter()
            self._step(batch.to(self.device))
            self.seconds += time.perf_counter() - start
            self.mxfp8_step = mxfp8.get_step()
            if on_step is not None:
                on_step(self.progress())

    def progress(self) -> Progress:
        """Where the run is."""
        ne = self.curve[-1].ne if self.curve else self._window_ne()
        speed = self.samples / self.seconds if self.seconds else 0.0
        return Progress(step=self.step, total=self.total, ne=sum(ne) / len(ne), samples_per_s=speed)

    def _window_ne(self) -> tuple[float, ...]:
        sums = self.window.sums
        if not self.window.samples or bool((sums["positives"] % self.window.samples == 0).any()):
            return (float("nan"),) * len(self.window.tasks)
        return tuple(self.window.compute().values())

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def _step(self, batch: Batch) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        set_lr(self.optimizers, lr_factor(self.step, self.total, self.config.warmup))
        logits = self._forward(batch)
        loss = self.model.loss(logits, batch.labels)
        loss.backward()
        parameters = list(self.model.parameters())
        norm = gradient_norm(parameters)
        # One transfer for both: on a GPU each one waits for the device.
        loss_value, norm_value = torch.stack([loss.detach(), norm]).tolist()
        if not (np.isfinite(loss_value) and np.isfinite(norm_value)):
            raise find_nonfinite(self.model, batch, self.step, self._forward)
        scale_gradients(parameters, norm, self.config.clip_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        self.losses.append(loss_value)
        self.samples += batch.batch_size
        self._record(logits.detach(), batch.labels)

    def _forward(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast):
            logits: Tensor = self.model(batch)
        return logits

    def _record(self, logits: Tensor, labels: Tensor) -> None:
        self.window.update(logits, labels)
        if self.step % self.config.window == 0 or self.step == self.total:
            self.curve.append(CurvePoint(step=self.step, ne=self._window_ne()))
            self.window = NormalizedEntropy(self.model.schema.tasks)


def find_nonfinite(model: nn.Module, batch: Batch, step: int, forward: Callable[[Batch], Tensor]) -> NonFiniteError:
    """The first place, in forward order, of a NaN or Inf: a parameter or output of the forward pass, else a gradient.

    Runs the forward pass once more with hooks. Gradients are examined as they are now. When a gradient is at fault,
    the message also names the last layer in forward order with a bad one, the first that backward reached: the origin.
    """
    order: list[str] = []
    bad_outputs: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, args: object, output: object) -> None:
            order.append(name)
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                bad_outputs.append(name)

        return note

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    if bad_outputs:
        layer = bad_outputs[0]
        weights = [n for n, p in model.get_submodule(layer).named_parameters() if not bool(p.isfinite().all())]
        because = f", its parameter {weights[0]!r} is not finite" if weights else ""
        return NonFiniteError(
            step, layer, f"the output of layer {layer!r} is not finite (first in forward order{because})"
        )
    return _bad_gradient(model, step, order)


def _bad_gradient(model: nn.Module, step: int, order: list[str]) -> NonFiniteError:
    position = {name: i for i, name in enumerate(dict.fromkeys(order))}
    found = []
    for name, p in model.named_parameters():
        values = None if p.grad is None else p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        if values is not None and not bool(values.isfinite().all()):
            layer = name.rpartition(".")[0]
            found.append((position.get(layer, -1), layer, name))
    if not found:
        return NonFiniteError(step, "", "the loss or the global gradient norm overflowed, every gradient is finite")
    found.sort()
    first, origin = found[0], found[-1]
    text = f"the gradient of {first[2]!r} is not finite (first in forward order"
    text += f"; {len(found)} parameters have one, backward met {origin[2]!r} first)" if len(found) > 1 else ")"
    return NonFiniteError(step, first[1], text)


@torch.no_grad()
def predict(model: GEM, source: SampleSource, *, batch_size: int = 1024, autocast: bool = True) -> Logits:
    """Logits float32 [N, n_tasks] of `source` in its own order, under the same autocast as training."""
    device = next(model.parameters()).device
    model.eval()
    out = []
    for batch in Loader(source, batch_size, shuffle=False):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out.append(model(batch.to(device)).float().cpu())
    return torch.cat(out).numpy()
