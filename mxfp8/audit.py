"""What MXFP8 does to the values of a model: per layer and GEMM, from a few batches of real training.

:func:`audit` runs forward and backward on a copy of the model and watches every cast and every GEMM. Each GEMM's output
is held against the float64 product of the very operands that were cast, so the figure contains the error of both casts,
of the accumulation and of the rounding of the output. Energies and counts are added over batches; a ratio is taken
once, at the end. Non-finite values make their row NaN and the worst of all: nothing is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from mxfp8 import metrics, observe, report
from mxfp8.description import cuda_devices, render
from mxfp8.grouped import MXFP8GroupedLinear
from mxfp8.linear import MXFP8Linear
from mxfp8.policy import AnyPolicy, convert
from mxfp8.recipe import GEMMS
from mxfp8.rng import get_step
from mxfp8.tensor import MXTensor

__all__ = ["AuditReport", "AuditRow", "CastStats", "WatchLog", "audit", "watch"]

COLUMNS = ("layer", "GEMM", "recipe", "calls", "SQNR dB", "casts, dB", "underflow %", "saturated %", "amax")


@dataclass(frozen=True, kw_only=True, slots=True)
class CastStats:
    """One operand's cast; see :mod:`mxfp8.metrics` for each number."""

    sqnr_db: float
    underflow_frac: float
    saturated_frac: float
    amax: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """One GEMM of one layer, over all batches.

    Attributes:
        layer, gemm, recipe: where; gemm is ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        calls: how often it ran.
        sqnr_db: of the output against the float64 product of the operands before their casts (bias excluded).
        casts: per operand (``"input"``, ``"weight"``, ``"grad_output"``) that was cast for this GEMM; an operand left
            in high precision, or taken over from fprop (square blocks), has no entry.
    """

    layer: str
    gemm: str
    recipe: str
    calls: int
    sqnr_db: float
    casts: dict[str, CastStats]

    @property
    def underflow_frac(self) -> float:
        """Of the operand that lost most."""
        return max((c.underflow_frac for c in self.casts.values()), default=0.0)

    @property
    def saturated_frac(self) -> float:
        """Of the operand that saturated most."""
        return max((c.saturated_frac for c in self.casts.values()), default=0.0)

    @property
    def amax(self) -> float:
        """Largest magnitude of any operand that was cast; NaN if one held a NaN."""
        return _sticky_max(c.amax for c in self.casts.values())


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AuditReport:
    """The rows of an audit, in the order of the model; prints as a table.

    Attributes:
        losses: the loss of each batch, non-finite ones included.
        unseen: converted layers that did not run.
    """

    title: str
    rows: tuple[AuditRow, ...]
    losses: tuple[float, ...] = ()
    unseen: tuple[str, ...] = ()

    def row(self, layer: str, gemm: str) -> AuditRow:
        """The row of one GEMM. KeyError if it did not run."""
        for row in self.rows:
            if (row.layer, row.gemm) == (layer, gemm):
                return row
        raise KeyError(f"no {gemm} of layer {layer!r} was seen")

    def worst(self, k: int = 5, gemm: str | None = None) -> list[AuditRow]:
        """The ``k`` rows of lowest SQNR (of one GEMM, if given); NaN is worse than any number."""
        rows = [row for row in self.rows if gemm in (None, row.gemm)]
        return sorted(rows, key=lambda row: -math.inf if math.isnan(row.sqnr_db) else row.sqnr_db)[:k]

    def flat(self) -> list[dict[str, Any]]:
        """One dict for each GEMM output and each cast, with the fields of :class:`mxfp8.drift.LayerHealth`."""
        out: list[dict[str, Any]] = []
        for row in self.rows:
            where = {"layer": row.layer, "gemm": row.gemm}
            out.append({**where, "operand": "output", "sqnr_db": row.sqnr_db})
            out += [{**where, "operand": operand, **asdict(cast)} for operand, cast in row.casts.items()]
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; :meth:`write_json` spells NaN and Inf as strings."""
        rows = [
            {**asdict(r), "underflow_frac": r.underflow_frac, "saturated_frac": r.saturated_frac, "amax": r.amax}
            for r in self.rows
        ]
        return {"title": self.title, "losses": list(self.losses), "unseen": list(self.unseen), "rows": rows}

    def write_json(self, path: str | Path) -> Path:
        return report.write_json(path, self.to_dict())

    def write_html(self, path: str | Path, worst: int = 20) -> Path:
        """One self-contained file: the rows of lowest SQNR as figures, then all rows."""
        rows = self.worst(worst)
        names = [f"{row.layer} · {row.gemm}" for row in rows]
        page = report.HtmlReport(self.title, self._caption())
        page.figure(report.plot_layer_sqnr([(n, r.sqnr_db) for n, r in zip(names, rows, strict=True)]))
        health = [(n, r.underflow_frac, r.saturated_frac) for n, r in zip(names, rows, strict=True)]
        page.figure(report.plot_health(health))
        return page.heading("All layers").table(COLUMNS, [_cells(row) for row in self.rows]).write(path)

    def _caption(self) -> str:
        bad = [i for i, loss in enumerate(self.losses) if not math.isfinite(loss)]
        count = len(self.losses)
        parts = [f"{count} batch{'es' if count > 1 else ''}"] if count else []
        parts += [f"loss not finite in batch {', '.join(map(str, bad))}"] if bad else []
        parts += [f"did not run: {', '.join(self.unseen)}"] if self.unseen else []
        return "; ".join(parts)

    def __rich__(self) -> Table:
        return report.table(self.title, COLUMNS, [_cells(row) for row in self.rows], caption=self._caption())

    def __str__(self) -> str:
        return render(self)


def _cells(row: AuditRow) -> list[report.Cell]:
    casts = ", ".join(f"{operand} {cast.sqnr_db:.1f}" for operand, cast in row.casts.items())
    shares = [report.percent_number(row.underflow_frac), report.percent_number(row.saturated_frac)]
    amax = row.amax if row.casts else None
    return [row.layer or "(root)", row.gemm, row.recipe, row.calls, row.sqnr_db, casts or None, *shares, amax]


def _sticky_max(values: Iterable[float]) -> float:
    known = list(values)
    return math.nan if any(math.isnan(v) for v in known) else max(known, default=0.0)


@dataclass
class _Energy:
    signal: float = 0.0
    noise: float = 0.0

    def add(self, reference: torch.Tensor, x: torch.Tensor) -> None:
        signal, noise = metrics.energies(reference, x)
        self.signal, self.noise = self.signal + signal, self.noise + noise

    @property
    def sqnr_db(self) -> float:
        return metrics.sqnr_from_energies(self.signal, self.noise)


@dataclass
class _CastSums:
    energy: _Energy = field(default_factory=_Energy)
    lost: float = 0.0
    nonzero: int = 0
    saturated: float = 0.0
    elements: int = 0
    amax: float = 0.0

    def add(self, x: torch.Tensor, q: MXTensor) -> None:
        nonzero = int(torch.count_nonzero(x))
        self.energy.add(x, q.dequantize())
        self.lost += metrics.underflow_frac(x, q.qdata) * nonzero
        self.nonzero += nonzero
        self.saturated += metrics.saturated_frac(q.qdata) * x.numel()
        self.elements += x.numel()
        self.amax = _sticky_max((self.amax, metrics.amax(x)))

    def stats(self) -> CastStats:
        return CastStats(
            sqnr_db=self.energy.sqnr_db,
            underflow_frac=self.lost / self.nonzero if self.nonzero else 0.0,
            saturated_frac=self.saturated / self.elements if self.elements else 0.0,
            amax=self.amax,
        )


@dataclass
class _RowSums:
    output: _Energy = field(default_factory=_Energy)
    calls: int = 0
    casts: dict[str, _CastSums] = field(default_factory=dict)


class _Collector:
    """An observer that adds up what it sees of the layers in ``recipes`` (name -> recipe)."""

    def __init__(self, recipes: dict[str, str]) -> None:
        self.recipes = recipes
        self._rows: dict[tuple[str, str], _RowSums] = {}
        # What was cast, by the memory that holds the result: a GEMM's operand is a view of it. The result is kept too,
        # so that no other tensor can get the same memory meanwhile.
        self._cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, event: observe.Event) -> None:
        if event.layer not in self.recipes:
            return
        row = self._rows.setdefault((event.layer, event.gemm), _RowSums())
        if isinstance(event, observe.CastEvent):
            row.casts.setdefault(event.operand, _CastSums()).add(event.x, event.q)
            self._cast[event.q.qdata.data_ptr()] = (event.x, event.q.qdata)
        else:
            row.calls += 1
            out = event.out.double()
            reference = _product(self._before_cast(event.a, event), self._before_cast(event.b, event), event.offs)
            row.output.add(reference, out if event.bias is None else out - event.bias.double())

    def _before_cast(self, operand: MXTensor | torch.Tensor, event: observe.GemmEvent) -> torch.Tensor:
        """The high-precision tensor behind an operand, transposed if the operand is."""
        if not isinstance(operand, MXTensor):
            return operand
        if operand.qdata.numel() == 0:
            return operand.dequantize()  # empty tensors share the null address
        if operand.qdata.data_ptr() not in self._cast:
            raise RuntimeError(
                f"layer {event.layer!r}, {event.gemm}: an operand was not seen being cast. Start watching before the "
                "forward pass, and take off hooks that move saved tensors (offloading) while auditing"
            )
        x, q = self._cast[operand.qdata.data_ptr()]
        same = operand.qdata.shape == q.shape and operand.qdata.stride() == q.stride()
        return x if same else x.mT

    def forget_tensors(self) -> None:
        """Let go of the tensors of the step that is over."""
        self._cast.clear()

    def report(self, title: str, losses: Iterable[float] = ()) -> AuditReport:
        rows = []
        for layer, recipe in self.recipes.items():
            for gemm in GEMMS:
                sums = self._rows.get((layer, gemm))
                if sums is not None and sums.calls:
                    casts = {operand: c.stats() for operand, c in sums.casts.items()}
                    sqnr = sums.output.sqnr_db
                    rows.append(
                        AuditRow(layer=layer, gemm=gemm, recipe=recipe, calls=sums.calls, sqnr_db=sqnr, casts=casts)
                    )
        unseen = tuple(layer for layer in self.recipes if not any(row.layer == layer for row in rows))
        return AuditReport(title=title, rows=tuple(rows), losses=tuple(losses), unseen=unseen)


def _product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """``a @ b.T`` in float64, group by group if there are groups."""
    a, b = a.double(), b.double()
    if offs is None:
        return a @ b.mT
    out, start = a.new_zeros(a.shape[0], b.shape[1]), 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = a[start:stop] @ b[group].mT
        start = stop
    return out


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    policy: AnyPolicy = None,
) -> AuditReport:
    """Forward and backward on each batch; how MXFP8 treats every GEMM of every converted layer.

    The work is done on a copy: the parameters, gradients, buffers and modes of ``model`` and torch's random state are
    left as they are. The operands of one batch are kept in high precision until its backward is over. A compiled model
    runs eagerly.

    Args:
        model: converted, or not: then a converted copy is audited.
        batches: any iterable of what ``loss_fn`` takes.
        loss_fn: ``loss_fn(model, batch)`` gives a scalar loss; autocast, if any, belongs in here.
        policy: what to convert the copy with, see :func:`mxfp8.convert`; None takes a converted model as it is, and
            gives every linear layer of a plain one ``"mxfp8_rceil"``.

    Raises:
        TypeError: the loss is not a tensor.
        ValueError: no batches; the loss is no scalar that depends on the parameters (the batch is named); no converted
            layer ran; whatever ``convert`` raises.
    """
    model = copy.deepcopy(model)
    if policy is not None or not _mx_layers(model):
        model = convert(model, policy)
    for name, layer in _mx_layers(model).items():
        layer.fqn = name  # layers converted by hand may lack a name, or share one
    collector = _Collector({name: layer.recipe.name for name, layer in _mx_layers(model).items()})
    losses = []
    with contextlib.ExitStack() as around:
        around.enter_context(torch.random.fork_rng(devices=cuda_devices(model)))
        around.enter_context(torch.enable_grad())
        around.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled model has nothing to show inside
        around.enter_context(observe.subscribe(collector))
        for i, batch in enumerate(batches):
            loss = loss_fn(model, batch)
            _check_loss(loss, i)
            loss.backward()
            losses.append(float(loss.detach()))
            model.zero_grad(set_to_none=True)
            collector.forget_tensors()
    if not losses:
        raise ValueError("there are no batches to audit")
    result = collector.report(f"Audit of {type(model).__name__}", losses)
    if not result.rows:
        raise ValueError(
            f"none of the {len(result.unseen)} converted layers ran: loss_fn must use the model that it is given"
        )
    return result


def _check_loss(loss: Any, batch: int) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"batch {batch}: loss_fn returned a {type(loss).__name__}, not a tensor")
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"batch {batch}: loss_fn returned a tensor of shape {tuple(loss.shape)} with requires_grad="
            f"{loss.requires_grad}: it must be one number that depends on the model's parameters"
        )


def _mx_layers(model: nn.Module) -> dict[str, MXFP8Linear | MXFP8GroupedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, MXFP8Linear | MXFP8GroupedLinear)}


class WatchLog:
    """Audit reports of a training run by step, filled while :func:`watch` is on."""

    def __init__(self, model: nn.Module, every: int) -> None:
        layers = _mx_layers(model)
        if not layers:
            raise ValueError("the model has no MXFP8 layer to watch: convert it first")
        if wrong := [name for name, layer in layers.items() if layer.fqn != name]:
            raise ValueError(f"layer {wrong[0]!r} does not know its name: mxfp8.convert(model) tells it")
        if every < 1:
            raise ValueError(f"every is {every}: use 1 or more")
        self._recipes = {name: layer.recipe.name for name, layer in layers.items()}
        self._every, self._start = every, get_step()
        self._collectors: dict[int, _Collector] = {}

    def __call__(self, event: observe.Event) -> None:
        step = get_step() - self._start
        if step not in self._collectors:
            for collector in self._collectors.values():
                collector.forget_tensors()
            if step % self._every:
                return
            self._collectors[step] = _Collector(self._recipes)
        self._collectors[step](event)

    @property
    def reports(self) -> dict[int, AuditReport]:
        """Steps (optimiser steps since ``watch`` began, the first is 0) and what was seen in each."""
        return {step: collector.report(f"Step {step}") for step, collector in self._collectors.items()}


@contextlib.contextmanager
def watch(model: nn.Module, *, every: int = 100) -> Iterator[WatchLog]:
    """Audit a converted model in training, every ``every``-th optimiser step: ``with watch(model) as log: train()``.

    Results do not change. While it is on, weights are cast on every use instead of once a step.

    Raises:
        ValueError: no MXFP8 layer, a layer without its name, ``every`` below 1.
    """
    log = WatchLog(model, every)
    with observe.subscribe(log):
        yield log
