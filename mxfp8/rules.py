"""Precision policies as data: ordered rules that say which layer gets which recipe.

A rule covers modules by one *target*:

==================  ====================================================================================
target              covers
==================  ====================================================================================
``"head.*"``        names, see :func:`name_matches`; a named module and everything inside it
``nn.Embedding``    modules of that class or a subclass, and everything inside them
:class:`Shape`      linear layers by K = in_features and N = out_features
:class:`LastLinears`  the last linear layers in the order of registration
a function          modules with parameters of their own for which ``target(module, name)`` is true
==================  ====================================================================================

The first rule that covers a layer decides; a layer that none covers gets the policy's default. ``"bf16"`` means *left
as it is*: the layer computes in its own dtype, or in autocast's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import yaml
from torch import nn

from mxfp8.recipe import LinearRecipe, get_recipe

__all__ = ["BF16", "LastLinears", "ModuleType", "PrecisionPolicy", "Rule", "Shape", "get_policy", "name_matches"]

BF16 = "bf16"

Predicate = Callable[[nn.Module, str], bool]


def name_matches(pattern: str, name: str) -> bool:
    """True if ``pattern`` names the module called ``name`` (dotted) or a module that contains it.

    Components (what stands between dots) match as a whole, with ``*``, ``?`` and ``[...]`` inside a component as in a
    shell: ``head`` covers ``head`` and ``head.0.proj``, never ``overhead``; ``*_head`` covers ``click_head``. A
    component that is just ``*`` stands for one or more components, ``**`` for any number, none included, and ``?*``
    for exactly one: ``head.*`` is everything inside ``head``, ``*.experts.*`` everything inside any ``experts``
    that is itself inside something, ``**.gate`` every ``gate`` at any depth, top level included.
    """
    return _covers(tuple(pattern.split(".")), tuple(name.split(".")) if name else ())


def _covers(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern:
        return True  # the pattern is used up: the rest of the name is inside what it names
    first, rest = pattern[0], pattern[1:]
    if first in ("*", "**"):
        fewest = 1 if first == "*" else 0
        return any(_covers(rest, parts[i:]) for i in range(fewest, len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], first) and _covers(rest, parts[1:])


@dataclass(frozen=True, slots=True)
class ModuleType:
    """A module class by name: ``"Embedding"`` or, to be exact, ``"torch.nn.modules.sparse.Embedding"``."""

    name: str

    def __str__(self) -> str:
        return f"type {self.name}"

    @classmethod
    def of(cls, kind: type[Any]) -> ModuleType:
        return cls(f"{kind.__module__}.{kind.__qualname__}")

    def covers(self, kind: type[Any]) -> bool:
        """True if ``kind`` is that class or derives from it."""
        return any(self.name in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in kind.__mro__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Linear layers by size; all conditions given must hold.

    Attributes:
        min_k, max_k, min_n, max_n: bounds (inclusive) of K = in_features and N = out_features.
        smaller_than: K or N (at least one) is below this.
        not_multiple_of: K or N (at least one) is not a multiple of this.
    """

    min_k: int | None = None
    max_k: int | None = None
    min_n: int | None = None
    max_n: int | None = None
    smaller_than: int | None = None
    not_multiple_of: int | None = None

    def __post_init__(self) -> None:
        given = self.to_dict()
        if not given:
            raise ValueError(f"Shape() has no condition: give one of {', '.join(f.name for f in fields(self))}")
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Shape.{name} is {value!r}: use an int of at least 1")

    def to_dict(self) -> dict[str, int]:
        """The conditions that are given."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def covers(self, k: int, n: int) -> bool:
        return (
            (self.min_k is None or k >= self.min_k)
            and (self.max_k is None or k <= self.max_k)
            and (self.min_n is None or n >= self.min_n)
            and (self.max_n is None or n <= self.max_n)
            and (self.smaller_than is None or min(k, n) < self.smaller_than)
            and (self.not_multiple_of is None or k % self.not_multiple_of != 0 or n % self.not_multiple_of != 0)
        )

    def __str__(self) -> str:
        return "shape " + ", ".join(f"{name}={value}" for name, value in self.to_dict().items())


@dataclass(frozen=True, slots=True)
class LastLinears:
    """The last ``count`` linear layers of the model, in the order in which they were registered."""

    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ValueError(f"LastLinears.count is {self.count!r}: use an int of at least 1")

    def __str__(self) -> str:
        return f"last {self.count} linear layer(s)"


Target = str | ModuleType | Shape | LastLinears | Predicate


@dataclass(frozen=True, slots=True, init=False)
class Rule:
    """Modules covered by ``target`` get ``recipe``.

    Args:
        target: see the top of this module. A class is stored as its :class:`ModuleType`.
        recipe: ``"bf16"``, a name from :data:`mxfp8.RECIPES`, or a :class:`~mxfp8.LinearRecipe`.
        reason: why, for :func:`mxfp8.describe`.
        required: a rule that covers nothing in the model is an error (a misspelt name must not pass unnoticed).
            Policies written for any model set it to False.

    Raises:
        ValueError: unknown recipe, malformed pattern. TypeError: a target of another kind.
    """

    target: Target
    recipe: str | LinearRecipe = BF16
    reason: str = field(default="", kw_only=True)
    required: bool = field(default=True, kw_only=True)

    def __init__(
        self,
        target: Target | type[Any],
        recipe: str | LinearRecipe = BF16,
        *,
        reason: str = "",
        required: bool = True,
    ) -> None:
        if isinstance(target, type):
            if not issubclass(target, nn.Module):
                raise TypeError(f"rule target {target.__name__} is a class but not an nn.Module")
            target = ModuleType.of(target)
        elif isinstance(target, str):
            if not target or "" in target.split("."):
                raise ValueError(f"rule target {target!r} has an empty component: write names like 'head.*'")
        elif not isinstance(target, ModuleType | Shape | LastLinears) and not callable(target):
            raise TypeError(
                f"rule target is a {type(target).__name__}: use a name pattern, an nn.Module class, Shape(...), "
                "LastLinears(...) or a function (module, name) -> bool"
            )
        check_recipe(recipe, f"rule {target!r}")
        for name, value in (("target", target), ("recipe", recipe), ("reason", reason), ("required", required)):
            object.__setattr__(self, name, value)

    @property
    def is_bf16(self) -> bool:
        return self.recipe == BF16

    def __str__(self) -> str:
        target = getattr(self.target, "__qualname__", None) or str(self.target)
        return f"{target!r} -> {recipe_name(self.recipe)}"

    def to_dict(self, index: int = 0) -> dict[str, Any]:
        """JSON-able form. ValueError for a function as target: it cannot be written to a file."""
        match self.target:
            case str():
                target: Any = self.target
            case ModuleType(name):
                target = {"type": name}
            case Shape():
                target = {"shape": self.target.to_dict()}
            case LastLinears(count):
                target = {"last_linears": count}
            case _:
                raise ValueError(
                    f"rule {index} ({self}) has a function as target and cannot be saved: use a name pattern, a class, "
                    "Shape or LastLinears, or save the policy without it"
                )
        out: dict[str, Any] = {"target": target, "recipe": _recipe_to_data(self.recipe)}
        if self.reason:
            out["reason"] = self.reason
        if not self.required:
            out["required"] = False
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], index: int = 0) -> Rule:
        """Inverse of :meth:`to_dict`. ValueError names the rule and the field."""
        where = f"rule {index}"
        _check_keys(data, {"target", "recipe"}, {"reason", "required"}, where)
        reason, required = data.get("reason", ""), data.get("required", True)
        if not isinstance(reason, str) or not isinstance(required, bool):
            raise ValueError(f"{where}: reason must be text and required true or false, got {reason!r}, {required!r}")
        target = _target_from_data(data["target"], where)
        return cls(target, _recipe_from_data(data["recipe"], where), reason=reason, required=required)


def _target_from_data(data: Any, where: str) -> Target:
    if isinstance(data, str):
        return data
    if isinstance(data, Mapping) and len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "type" and isinstance(value, str):
            return ModuleType(value)
        if kind == "shape" and isinstance(value, Mapping):
            _check_keys(value, set(), {f.name for f in fields(Shape)}, f"{where}, shape")
            return Shape(**value)
        if kind == "last_linears":
            return LastLinears(value)
    raise ValueError(
        f"{where}: target is {data!r}: use a name pattern, {{type: ClassName}}, {{shape: {{...}}}} or "
        "{last_linears: 1}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """Ordered rules and a default: which layer runs in which precision.

    Args:
        rules: :class:`Rule` objects or ``(target, recipe)`` pairs; the first that covers a layer decides.
        default: recipe of linear layers that no rule covers: ``"bf16"``, a recipe's name, or a LinearRecipe.
        name: shown by :func:`mxfp8.describe`.

    Raises:
        ValueError: unknown recipe or malformed target. TypeError: a rule of another kind. Both name the rule.
    """

    rules: Sequence[Rule | tuple[Any, Any]] = ()
    default: str | LinearRecipe = "mxfp8_rceil"
    name: str = ""

    def __post_init__(self) -> None:
        check_recipe(self.default, "default")
        if isinstance(self.rules, (str, Mapping, Rule)) or not isinstance(self.rules, Sequence):
            raise TypeError(f"rules is a {type(self.rules).__name__}: use a list of Rule or (target, recipe)")
        object.__setattr__(self, "rules", tuple(_as_rule(rule, i) for i, rule in enumerate(self.rules)))

    @property
    def ordered(self) -> tuple[Rule, ...]:
        """The rules, all as :class:`Rule`."""
        return tuple(rule for rule in self.rules if isinstance(rule, Rule))

    @property
    def is_all_bf16(self) -> bool:
        """True if no rule and no default asks for MXFP8."""
        return self.default == BF16 and all(rule.is_bf16 for rule in self.ordered)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; recipes by name, custom ones in full. ValueError if a target is a function."""
        out: dict[str, Any] = {"name": self.name} if self.name else {}
        out["default"] = _recipe_to_data(self.default)
        out["rules"] = [rule.to_dict(i) for i, rule in enumerate(self.ordered)]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Inverse of :meth:`to_dict`. ValueError names what is unknown, missing or malformed."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a policy is a mapping with 'rules' and 'default', not {type(data).__name__}")
        _check_keys(data, set(), {"name", "default", "rules"}, "policy")
        rules, name = data.get("rules", []), data.get("name", "")
        if not isinstance(rules, Sequence) or isinstance(rules, str) or not isinstance(name, str):
            raise ValueError(f"policy: rules must be a list and name text, got {rules!r} and {name!r}")
        for i, rule in enumerate(rules):
            if not isinstance(rule, Mapping):
                raise ValueError(f"rule {i} is {rule!r}: use a mapping with 'target' and 'recipe'")
        default = _recipe_from_data(data.get("default", "mxfp8_rceil"), "default")
        return cls(rules=[Rule.from_dict(rule, i) for i, rule in enumerate(rules)], default=default, name=name)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPolicy:
        """ValueError for malformed JSON too, with line and column."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("not a policy: the JSON is nested too deeply") from None
        return cls.from_dict(data)

    def to_yaml(self) -> str:
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, text: str) -> PrecisionPolicy:
        """ValueError for malformed YAML too, with line and column."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            # PyYAML's constructors raise these for "!!timestamp x", "!!bool x", numbers out of range and deep nesting.
            raise ValueError(f"not YAML: a value cannot be read ({type(error).__name__}: {error})") from error
        return cls.from_dict(data)


def _as_rule(rule: Any, index: int) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise TypeError(f"rule {index} is {rule!r}: use Rule(target, recipe) or a pair (target, recipe)")
    try:
        return Rule(*rule)
    except (TypeError, ValueError) as error:
        raise type(error)(f"rule {index}: {error}") from error


def get_policy(policy: PrecisionPolicy | LinearRecipe | str | None) -> PrecisionPolicy:
    """The policy itself; for a recipe (or its name, or ``"bf16"``) the policy that gives it to every linear layer."""
    if isinstance(policy, PrecisionPolicy):
        return policy
    if policy is None:
        return PrecisionPolicy()
    if not isinstance(policy, str | LinearRecipe):
        raise TypeError(
            f"policy is a {type(policy).__name__}: use a PrecisionPolicy, a recipe, a recipe's name or 'bf16'"
        )
    return PrecisionPolicy(default=policy)


def recipe_name(recipe: str | LinearRecipe) -> str:
    return recipe if isinstance(recipe, str) else recipe.name


def check_recipe(recipe: Any, where: str) -> None:
    """ValueError or TypeError that says where an unknown recipe stands."""
    if recipe == BF16 or isinstance(recipe, LinearRecipe):
        return
    if not isinstance(recipe, str):
        raise TypeError(f"{where}: recipe is a {type(recipe).__name__}, use 'bf16', a recipe's name or a LinearRecipe")
    try:
        get_recipe(recipe)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; 'bf16' leaves a layer as it is") from error


def _recipe_to_data(recipe: str | LinearRecipe) -> str | dict[str, Any]:
    return recipe if isinstance(recipe, str) else json.loads(json.dumps(recipe.to_dict()))


def _recipe_from_data(data: Any, where: str) -> str | LinearRecipe:
    if isinstance(data, str):
        check_recipe(data, where)
        return data
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: recipe is {data!r}, use a name or the fields of a LinearRecipe")
    try:
        return LinearRecipe.from_dict(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}, recipe: {error}") from error


def _check_keys(data: Mapping[str, Any], needed: set[str], optional: set[str], where: str) -> None:
    if unknown := [key for key in data if key not in needed | optional]:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(needed | optional))}")
    if missing := sorted(needed - set(data)):
        raise ValueError(f"{where}: field {missing[0]!r} is missing")
