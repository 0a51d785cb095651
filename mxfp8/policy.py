"""Carry out a precision policy: decide for every layer, check, then swap modules in place.

:func:`decide` changes nothing; :func:`convert` decides first and swaps afterwards, so that an error leaves the model as
it was. What was decided, and why, stays with each module (through ``deepcopy`` and ``pickle``, outside ``state_dict``)
for :func:`mxfp8.describe`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from mxfp8.grouped import MXFP8GroupedLinear
from mxfp8.linear import MXFP8Linear
from mxfp8.recipe import LinearRecipe, get_recipe
from mxfp8.rules import BF16, LastLinears, ModuleType, PrecisionPolicy, Rule, Shape, get_policy, name_matches

__all__ = ["Decision", "PrecisionPolicy", "Rule", "convert", "decide", "recorded_reason"]

FilterFn = Callable[[nn.Module, str], bool]
AnyPolicy = PrecisionPolicy | LinearRecipe | str | None
M = TypeVar("M", bound=nn.Module)

_RECORD = "_mxfp8_decision"
_LISTED = 12  # layers that an error message lists at most


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Site:
    """A module with parameters of its own, all names it goes by, and the modules that contain it."""

    names: tuple[str, ...]
    module: nn.Module
    around: tuple[nn.Module, ...]  # itself included

    @property
    def linear(self) -> nn.Linear | None:
        return self.module if isinstance(self.module, nn.Linear) else None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Decision:
    """What one module gets.

    Attributes:
        names: dotted names of the module, more than one if it is registered in several places.
        module: the module as it is now.
        recipe: its recipe, or None for ``"bf16"``.
        reason: which rule (by number and target) or which obstacle decided.
        touched: False if ``filter_fn`` left the module as it is.
    """

    names: tuple[str, ...]
    module: nn.Module
    recipe: LinearRecipe | None
    reason: str
    touched: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def precision(self) -> str:
        return BF16 if self.recipe is None else self.recipe.name


def decide(model: nn.Module, policy: AnyPolicy = None, filter_fn: FilterFn | None = None) -> list[Decision]:
    """One decision for each module that has parameters of its own, in the order of ``named_modules``; changes nothing.

    Raises:
        ValueError: a required rule covers nothing, or asks for MXFP8 and covers only what cannot be converted.
    """
    policy = get_policy(policy)
    sites = _sites(model)
    covered = [_covered(rule, sites) for rule in policy.ordered]
    for i, rule in enumerate(policy.ordered):
        if rule.required:
            _check_rule(i, rule, [s for s, hit in zip(sites, covered[i], strict=True) if hit], sites, model)
    decisions = []
    for at, site in enumerate(sites):
        first = next((i for i in range(len(covered)) if covered[i][at]), None)
        decisions.append(_decide_one(site, policy, first, filter_fn))
    return decisions


def _sites(model: nn.Module) -> list[_Site]:
    named = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, module in named.items():
        if isinstance(module, nn.Linear) or any(p is not None for p in module._parameters.values()):
            names.setdefault(id(module), []).append(name)
    return [
        _Site(
            names=tuple(known),
            module=named[known[0]],
            around=tuple(named[prefix] for name in known for prefix in _prefixes(name)),
        )
        for known in names.values()
    ]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _covered(rule: Rule, sites: Sequence[_Site]) -> list[bool]:
    """For each site, whether the rule's target covers it."""
    target = rule.target
    match target:
        case str():
            return [any(name_matches(target, name) for name in s.names) for s in sites]
        case ModuleType():
            return [any(target.covers(type(m)) for m in s.around) for s in sites]
        case Shape():
            return [s.linear is not None and target.covers(s.linear.in_features, s.linear.out_features) for s in sites]
        case LastLinears(count):
            last = [s for s in sites if s.linear is not None][-count:]
            return [s in last for s in sites]
        case _:
            return [bool(target(s.module, s.names[0])) for s in sites]


def _decide_one(site: _Site, policy: PrecisionPolicy, first: int | None, filter_fn: FilterFn | None) -> Decision:
    module, names = site.module, site.names
    # Made by hand as what they are: not ours to change.
    if isinstance(module, MXFP8GroupedLinear) or (isinstance(module, MXFP8Linear) and type(module) is not MXFP8Linear):
        return Decision(names=names, module=module, recipe=module.recipe, reason="keeps the recipe it was built with")
    if site.linear is not None and filter_fn is not None and not filter_fn(module, names[0]):
        current = module.recipe if isinstance(module, MXFP8Linear) else None
        return Decision(names=names, module=module, recipe=current, reason="left out by filter_fn", touched=False)
    wanted, reason = policy.default, "default"
    if first is not None:
        rule = policy.ordered[first]
        wanted, reason = rule.recipe, f"rule {first} {_target_text(rule)}" + (f": {rule.reason}" if rule.reason else "")
    obstacle = _obstacle(module)
    if isinstance(wanted, str) and wanted == BF16 and (site.linear is not None or first is not None):
        return Decision(names=names, module=module, recipe=None, reason=reason)
    if obstacle is not None:
        return Decision(names=names, module=module, recipe=None, reason=obstacle)
    recipe = get_recipe(wanted)
    return Decision(names=names, module=module, recipe=recipe, reason=reason + _tail_note(site.linear))


def _target_text(rule: Rule) -> str:
    if isinstance(rule.target, str):
        return repr(rule.target)
    return getattr(rule.target, "__qualname__", None) or str(rule.target)


def _obstacle(module: nn.Module) -> str | None:
    """Why the module cannot run in MXFP8, one reason a line; None if it can."""
    if not isinstance(module, nn.Linear):
        return "only linear layers have an MXFP8 form"
    if type(module) not in (nn.Linear, MXFP8Linear):
        return f"{type(module).__name__} is a subclass of nn.Linear: its own forward would be lost"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance: a new layer would not run it"
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return "it has no weight tensor"
    if module.in_features == 0 or module.out_features == 0:
        return f"it is empty: K={module.in_features}, N={module.out_features}"
    if module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {module.weight.dtype}: MXFP8 takes float32, bfloat16 or float16"
    return None


def _tail_note(linear: nn.Linear | None) -> str:
    assert linear is not None
    k, n = linear.in_features, linear.out_features
    ragged = [f"{name}={size}" for name, size in (("K", k), ("N", n)) if size % 32]
    return f"; {' and '.join(ragged)} not a multiple of 32: last blocks are short" if ragged else ""


def _check_rule(index: int, rule: Rule, covered: list[_Site], sites: list[_Site], model: nn.Module) -> None:
    where = f"rule {index} ({rule})"
    if not covered:
        raise ValueError(f"{where} covers nothing in this model. {_closest(rule, sites, model)}")
    if not rule.is_bf16 and all(_obstacle(s.module) is not None for s in covered):
        listed = _listed([f"{s.names[0] or '(root)'}: {_obstacle(s.module)}" for s in covered])
        raise ValueError(f"{where} covers only modules that cannot be converted: {listed}")


def _closest(rule: Rule, sites: list[_Site], model: nn.Module) -> str:
    """What the user may have meant."""
    match rule.target:
        case str() as wanted:
            known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        case ModuleType(wanted):
            wanted = wanted.rsplit(".", 1)[-1]
            known = sorted({type(m).__name__ for m in model.modules()})
        case Shape():
            wanted = ""
            sizes = {(s.linear.in_features, s.linear.out_features) for s in sites if s.linear is not None}
            known = [f"K={k} N={n}" for k, n in sorted(sizes)]
        case _:
            wanted, known = "", [s.names[0] for s in sites]
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) if wanted else []
    if close:
        return f"Closest: {', '.join(close)}"
    return f"The model has: {_listed(known)}" if known else "The model has no such modules at all"


def _listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(items[:_LISTED]) + more


def convert(
    model: M,
    policy: AnyPolicy = None,
    filter_fn: FilterFn | None = None,
    *,
    module_filter_fn: FilterFn | None = None,
) -> M:
    """Give every linear layer the precision that the policy says, in place.

    Layers become :class:`~mxfp8.MXFP8Linear` around the *same* parameter objects (ties, optimiser state, hooks, mode,
    ``state_dict`` keys survive). Converting again with another policy changes recipes; a layer that turns bf16 becomes
    a plain ``nn.Linear`` again. Converting twice is a no-op.

    Args:
        model: any module; on the meta device too.
        policy: a :class:`~mxfp8.PrecisionPolicy`; a recipe or its name for every linear layer; None is
            ``"mxfp8_rceil"`` for every linear layer; ``"bf16"`` undoes a conversion.
        filter_fn: ``filter_fn(module, name) -> bool``, asked about each linear layer; those with False are left
            as they are, also if an earlier call converted them. ``module_filter_fn`` is the same (torchao's name).

    Returns:
        ``model``; the new layer if ``model`` itself is a linear layer.

    Raises:
        TypeError: not a module, not a policy.
        ValueError: a rule that covers nothing; no layer converted although the policy asks for MXFP8, with the reason
            for each layer. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes an nn.Module, not {type(model).__name__}")
    if filter_fn is not None and module_filter_fn is not None:
        raise ValueError("filter_fn and module_filter_fn are two names of one argument: give one of them")
    policy = get_policy(policy)
    decisions = decide(model, policy, filter_fn or module_filter_fn)
    if not policy.is_all_bf16 and not any(d.touched and d.recipe is not None for d in decisions):
        linears = [f"{d.name or '(root)'}: {d.reason}" for d in decisions if isinstance(d.module, nn.Linear)]
        why = _listed(linears) if linears else "the model has no nn.Linear"
        raise ValueError(
            f"no layer would be converted to MXFP8, the model is unchanged. {why}. "
            'Change the policy or the filter; policy="bf16" says that nothing is to be converted'
        )
    _warn_fast_path(model, decisions)
    # Every new layer is made before the first one is put in place.
    replacements = {id(d.module): _carried_out(d) if d.touched else d.module for d in decisions}
    for d in decisions:
        if d.touched or recorded_reason(d.module, d.precision) is None:
            setattr(replacements[id(d.module)], _RECORD, (d.precision, d.reason))
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[name] = replacements[id(child)]
    return replacements.get(id(model), model)  # type: ignore[return-value]


def _carried_out(decision: Decision) -> nn.Module:
    """The module that stands in for the decided one: itself, if nothing changes but its recipe or name."""
    module, recipe = decision.module, decision.recipe
    if isinstance(module, MXFP8Linear) and recipe is not None:
        if module.recipe != recipe:
            module.recipe = recipe
            module.clear_cache()
        module.fqn = decision.name
    elif isinstance(module, MXFP8Linear):
        module = module.to_linear()
    elif recipe is not None and isinstance(module, nn.Linear):
        module = MXFP8Linear.from_linear(module, recipe, fqn=decision.name)
    elif isinstance(module, MXFP8GroupedLinear):
        module.fqn = decision.name
    return module


def recorded_reason(module: nn.Module, precision: str) -> str | None:
    """The reason that :func:`convert` left with ``module``; None if there is none, or precision has changed since."""
    record = getattr(module, _RECORD, None)
    return record[1] if isinstance(record, tuple) and record[0] == precision else None


def _warn_fast_path(model: nn.Module, decisions: Sequence[Decision]) -> None:
    inside = {id(child) for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer) for child in m.children()}
    if torch.backends.mha.get_fastpath_enabled() and any(d.recipe and id(d.module) in inside for d in decisions):
        warnings.warn(
            "nn.TransformerEncoderLayer in eval mode without gradients takes torch's fused path, which reads "
            "weights directly and skips MXFP8; torch.backends.mha.set_fastpath_enabled(False) turns that path off",
            stacklevel=3,
        )
