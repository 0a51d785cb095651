"""``describe``: which layer runs in which precision, why, and how much of the model's work that is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parameter import is_lazy

from mxfp8 import report
from mxfp8.grouped import MXFP8GroupedLinear
from mxfp8.linear import MXFP8Linear
from mxfp8.policy import AnyPolicy, Decision, FilterFn, decide, recorded_reason
from mxfp8.recipe import LinearRecipe
from mxfp8.rules import BF16, get_policy

__all__ = ["Description", "LayerDescription", "Total", "describe", "render"]

COLUMNS = ("layer", "type", "shape", "precision", "parameters", "FLOPs %", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDescription:
    """One module with parameters of its own.

    Attributes:
        name: its dotted name; further names of a module registered several times stand in ``aliases``.
        type: its class.
        shape: of its weight (N, K for a linear layer), or of its first parameter.
        precision: a recipe's name, or ``"bf16"``: left in its own (or autocast's) dtype.
        reason: the rule or the obstacle that decided.
        parameters: elements of its parameters, those counted in an earlier row excepted (see ``tied_to``).
        tied_to: name of the parameter that this module shares with an earlier one, or "".
        rows: rows that its GEMMs see: 1 (a token) unless ``describe`` was told or measured.
        flops: forward multiplications and additions of its GEMM: ``2 * rows * N * K``; 0 if it has none.
        flops_frac: its share of the model's.
    """

    name: str
    aliases: tuple[str, ...]
    type: str
    shape: tuple[int, ...]
    precision: str
    reason: str
    parameters: int
    tied_to: str
    rows: int
    flops: int
    flops_frac: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What one precision amounts to; tied parameters count once."""

    layers: int
    parameters: int
    parameters_frac: float
    flops: int
    flops_frac: float


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Description:
    """The rows and totals of :func:`describe`; prints as a table."""

    title: str
    rows: tuple[LayerDescription, ...]

    @property
    def totals(self) -> dict[str, Total]:
        """Per precision, in the order of appearance."""
        parameters, flops = sum(r.parameters for r in self.rows), sum(r.flops for r in self.rows)
        out = {}
        for precision in dict.fromkeys(r.precision for r in self.rows):
            mine = [r for r in self.rows if r.precision == precision]
            p, f = sum(r.parameters for r in mine), sum(r.flops for r in mine)
            out[precision] = Total(
                layers=len(mine),
                parameters=p,
                parameters_frac=p / parameters if parameters else 0.0,
                flops=f,
                flops_frac=f / flops if flops else 0.0,
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        totals = {precision: asdict(total) for precision, total in self.totals.items()}
        rows = [{**asdict(r), "shape": list(r.shape), "aliases": list(r.aliases)} for r in self.rows]
        return {"title": self.title, "totals": totals, "layers": rows}

    def __rich__(self) -> Table:
        caption = "\n".join(
            f"{precision}: {t.layers} modules, {t.parameters:,} parameters ({report.percent(t.parameters_frac)}), "
            f"{report.percent(t.flops_frac)} of GEMM FLOPs"
            for precision, t in self.totals.items()
        )
        return report.table(self.title, COLUMNS, [_cells(r) for r in self.rows], caption=caption)

    def __str__(self) -> str:
        return render(self)


def _cells(row: LayerDescription) -> list[report.Cell]:
    name = " = ".join((row.name or "(root)", *row.aliases))
    shape = " x ".join(map(str, row.shape))
    why = row.reason + (f"; tied to {row.tied_to}" if row.tied_to else "")
    share = report.percent_number(row.flops_frac) if row.flops else None
    return [name, row.type, shape, row.precision, row.parameters, share, why]


def render(renderable: object, width: int = 180) -> str:
    """The plain text of something rich can print: no colours, no trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def describe(
    model: nn.Module,
    policy: AnyPolicy = None,
    *,
    filter_fn: FilterFn | None = None,
    rows: Mapping[str, int] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
) -> Description:
    """Every module with parameters: its precision, why, its parameters and its share of FLOPs.

    Args:
        model: converted or not; it is not changed.
        policy: what ``convert`` would do with this policy (a dry run); None describes the model as it is.
        filter_fn: with ``policy``, as in :func:`mxfp8.convert`.
        rows: rows that each layer's GEMM sees, by name, to weight FLOPs by; layers not named count one row.
        example_inputs: positional arguments of one forward call, from which ``rows`` are measured (in eval mode,
            without gradients; modes and random state are restored).

    Raises:
        ValueError: ``rows`` names a layer that does not exist, or both ``rows`` and ``example_inputs`` are given; a
            rule that covers nothing.
    """
    if rows is not None and example_inputs is not None:
        raise ValueError("rows and example_inputs both say how many rows a layer sees: give one of them")
    if policy is None and filter_fn is not None:
        raise ValueError("filter_fn belongs to a policy: give the policy that would be used with it")
    planned = decide(model, BF16 if policy is None else policy, filter_fn)
    decisions = [_as_it_is(d) for d in planned] if policy is None else planned
    if example_inputs is not None:
        rows = _measure_rows(model, example_inputs, [d.module for d in decisions])
    else:
        rows = {} if rows is None else rows
        known = {name for d in decisions for name in d.names}
        if unknown := sorted(set(rows) - known):
            raise ValueError(f"rows names {unknown[0]!r}, which is no module with parameters of this model")
    suffix = f" under policy {get_policy(policy).name or 'given'}" if policy is not None else ""
    return Description(title=f"{type(model).__name__}{suffix}", rows=tuple(_rows(decisions, rows)))


def _as_it_is(decision: Decision) -> Decision:
    """The precision that a module has now and, if ``convert`` left one, the reason."""
    module = decision.module
    recipe: LinearRecipe | None = module.recipe if isinstance(module, MXFP8Linear | MXFP8GroupedLinear) else None
    reason = recorded_reason(module, recipe.name if recipe else BF16)
    if reason is None and isinstance(module, nn.Linear | MXFP8GroupedLinear):
        reason = "not converted" if recipe is None else "made by hand, no policy"
    fallback = "only linear layers have an MXFP8 form"
    return Decision(names=decision.names, module=module, recipe=recipe, reason=reason or fallback)


def _rows(decisions: list[Decision], rows: Mapping[str, int]) -> Iterator[LayerDescription]:
    seen: dict[int, str] = {}
    gemms = [_gemm(d.module) * next((rows[n] for n in d.names if n in rows), 1) for d in decisions]
    total = sum(gemms)
    for d, flops in zip(decisions, gemms, strict=True):
        own = {name: p for name, p in d.module._parameters.items() if p is not None}
        tied = next((seen[id(p)] for p in own.values() if id(p) in seen), "")
        fresh = {name: p for name, p in own.items() if id(p) not in seen}
        seen |= {id(p): f"{d.name}.{name}" if d.name else name for name, p in fresh.items()}
        sized = {name: p for name, p in own.items() if not is_lazy(p)}
        first = sized.get("weight", next(iter(sized.values()), None))
        yield LayerDescription(
            name=d.name,
            aliases=d.names[1:],
            type=type(d.module).__name__,
            shape=tuple(first.shape) if first is not None else (),
            precision=d.precision,
            reason=d.reason,
            parameters=sum(p.numel() for name, p in fresh.items() if name in sized),
            tied_to=tied,
            rows=next((rows[n] for n in d.names if n in rows), 1),
            flops=flops,
            flops_frac=flops / total if total else 0.0,
        )


def _gemm(module: nn.Module) -> int:
    """Forward FLOPs per row: multiplications and additions of N dot products of length K."""
    if isinstance(module, nn.Linear | MXFP8GroupedLinear):
        return 2 * module.in_features * module.out_features
    return 0


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """The GPUs that hold parameters: those whose random state a forward pass may move."""
    return sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)


def _measure_rows(model: nn.Module, inputs: tuple[Any, ...], modules: list[nn.Module]) -> dict[str, int]:
    """Rows that each linear layer saw in one forward call; a layer that did not run has 0."""
    if not isinstance(inputs, tuple):
        raise TypeError(f"example_inputs is a {type(inputs).__name__}: use a tuple of positional arguments")
    names = {id(module): name for name, module in model.named_modules()}
    counted = {names[id(m)]: 0 for m in modules if _gemm(m)}

    def counter(name: str) -> Callable[..., None]:
        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            counted[name] += x.numel() // module.in_features if module.in_features else 0

        return count

    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices=cuda_devices(model)))
        undo.enter_context(torch.no_grad())
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        for m in modules:
            if _gemm(m):
                hook = m.register_forward_pre_hook(counter(names[id(m)]), with_kwargs=True)
                undo.callback(hook.remove)
        model(*inputs)
    return counted
