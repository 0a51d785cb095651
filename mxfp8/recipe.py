"""Recipes: the numerics of one linear layer, as frozen data.

A recipe says, for each of the three GEMMs of a layer, how each operand is cast. It says nothing about which layers use
it (that is a policy) nor how it runs (that is a backend).

==========  ===========================  =================  ================
GEMM        operands                     lhs / rhs          blocks along
==========  ===========================  =================  ================
``fprop``   ``Y[M,N]  = X W^T``          input / weight     K
``dgrad``   ``dX[M,K] = dY W``           grad / weight      N
``wgrad``   ``dW[N,K] = dY^T X``         grad / input       M
==========  ===========================  =================  ================
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mxfp8.formats import BlockShape, Rounding, ScaleRule, get_block, get_format, get_rounding, get_scale_rule
from mxfp8.reference.hadamard import HADAMARD_SIZES

__all__ = [
    "GEMMS",
    "RECIPES",
    "CastSpec",
    "GemmSpec",
    "LinearRecipe",
    "get_recipe",
    "mxfp8_coalesced",
    "mxfp8_floor",
    "mxfp8_rceil",
    "mxfp8_rceil_wgrad_with_hp",
    "mxfp8_robust",
    "mxfp8_square",
]

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True, slots=True)
class CastSpec:
    """How one operand is quantised.

    Attributes:
        fmt: element format, ``"e4m3"`` or ``"e5m2"``.
        scale_rule: ``"rceil"``, ``"floor"``, ``"ceil"`` or ``"even"``.
        block: (across, along) the contraction axis.
        rounding: ``"nearest"`` or ``"stochastic"``.
        hadamard: size of the random Hadamard transform before the cast, or None.
    """

    fmt: str = "e4m3"
    scale_rule: str = "rceil"
    block: BlockShape = (1, 32)
    rounding: str = "nearest"
    hadamard: int | None = None

    def __post_init__(self) -> None:
        # Enum members are accepted and stored as their names, so that equal specs compare, hash and print alike.
        object.__setattr__(self, "fmt", get_format(self.fmt).name)
        object.__setattr__(self, "scale_rule", ScaleRule(get_scale_rule(self.scale_rule)).value)
        object.__setattr__(self, "rounding", Rounding(get_rounding(self.rounding)).value)
        object.__setattr__(self, "block", get_block(self.block))
        if self.hadamard is not None and not (type(self.hadamard) is int and self.hadamard in HADAMARD_SIZES):
            raise ValueError(f"hadamard is {self.hadamard!r}: use None or one of {', '.join(map(str, HADAMARD_SIZES))}")

    @property
    def is_square(self) -> bool:
        return self.block[0] == self.block[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSpec:
    """Casts of the two operands of one GEMM; None leaves that operand in high precision.

    Attributes:
        lhs, rhs: see the table at the top of this module.
        skip: do not run this GEMM at all; its gradient is None. Only wgrad can be skipped.
    """

    lhs: CastSpec | None = field(default_factory=CastSpec)
    rhs: CastSpec | None = field(default_factory=CastSpec)
    skip: bool = False

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            spec = getattr(self, side)
            if spec is not None and not isinstance(spec, CastSpec):
                raise TypeError(f"{side} is {spec!r}: use a CastSpec, or None for high precision")
        if not isinstance(self.skip, bool):
            raise TypeError(f"skip is {self.skip!r}: use True or False")

    @property
    def is_hp(self) -> bool:
        """True if both operands stay in high precision."""
        return self.lhs is None and self.rhs is None


HP = GemmSpec(lhs=None, rhs=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRecipe:
    """The casts of a linear layer's three GEMMs.

    Attributes:
        name: shown by ``print(model)`` and in reports.
        fprop, dgrad, wgrad: casts per operand.
        seed: seed of stochastic rounding and of Hadamard signs.
        save_activations: ``"mxfp8"`` keeps the input between forward and backward as the very bytes that wgrad will
            multiply (8.25 bit an element instead of 16, same gradients bit for bit); ``"high_precision"`` keeps the
            input itself and casts it in backward. A wgrad whose input is not cast always keeps high precision.

    Raises:
        ValueError: combinations that cannot be computed: Hadamard outside wgrad or on one of its operands only,
            ``skip`` outside wgrad, stochastic rounding of a weight.
    """

    name: str
    fprop: GemmSpec = field(default_factory=GemmSpec)
    dgrad: GemmSpec = field(default_factory=GemmSpec)
    wgrad: GemmSpec = field(default_factory=GemmSpec)
    seed: int = 0
    save_activations: str = "mxfp8"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"recipe name is {self.name!r}: use text")
        for gemm in GEMMS:
            self._check(gemm, getattr(self, gemm))
        if self.save_activations not in ("mxfp8", "high_precision"):
            raise ValueError(f"save_activations is {self.save_activations!r}: use 'mxfp8' or 'high_precision'")
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed!r}: use an int in 0..2**64-1")
        if any(s is not None and s.fmt == "e5m2" for s in (self.dgrad.lhs, self.wgrad.lhs)):
            warnings.warn(
                f"recipe {self.name!r} casts gradients to E5M2, which has made MXFP8 training diverge elsewhere: "
                "with a scale per 32 elements, E4M3's extra mantissa bit is worth more than E5M2's range",
                stacklevel=3,
            )

    def _check(self, gemm: str, spec: GemmSpec) -> None:
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name}.{gemm} is {spec!r}: use a GemmSpec")
        sizes = {s.hadamard if s is not None else None for s in (spec.lhs, spec.rhs)}
        if gemm != "wgrad":
            if sizes != {None}:
                raise ValueError(f"{self.name}.{gemm}: the Hadamard transform is for wgrad only")
            if spec.skip:
                raise ValueError(f"{self.name}.{gemm}: only wgrad can be skipped")
            if spec.rhs is not None and spec.rhs.rounding == "stochastic":
                raise ValueError(f"{self.name}.{gemm}: weights are rounded to nearest (one copy serves many steps)")
        elif len(sizes) > 1:
            raise ValueError(
                f"{self.name}.wgrad: both operands need the same Hadamard size, not {sorted(map(str, sizes))}; "
                "otherwise the transforms do not cancel"
            )

    @classmethod
    def from_operands(
        cls,
        *,
        name: str,
        input: CastSpec | None = CastSpec(),
        weight: CastSpec | None = CastSpec(),
        grad_output: CastSpec | None = CastSpec(),
        wgrad: GemmSpec | None = None,
        seed: int = 0,
        save_activations: str = "mxfp8",
    ) -> LinearRecipe:
        """A recipe with one cast per operand, used in both GEMMs that read it; ``wgrad`` may override the third."""
        return cls(
            name=name,
            fprop=GemmSpec(lhs=input, rhs=weight),
            dgrad=GemmSpec(lhs=grad_output, rhs=weight),
            wgrad=wgrad if wgrad is not None else GemmSpec(lhs=grad_output, rhs=input),
            seed=seed,
            save_activations=save_activations,
        )

    @property
    def shares_weight(self) -> bool:
        """True if one quantised weight serves fprop and dgrad (square blocks, same cast)."""
        return self.fprop.rhs is not None and self.fprop.rhs == self.dgrad.rhs and self.fprop.rhs.is_square

    @property
    def shares_input(self) -> bool:
        """True if one quantised input serves fprop and wgrad (square blocks, same cast, no random bits of its own)."""
        spec = self.fprop.lhs
        return spec is not None and spec == self.wgrad.rhs and spec.is_square and spec.rounding == "nearest"

    @property
    def saves_mx_activations(self) -> bool:
        return self.save_activations == "mxfp8" and self.wgrad.rhs is not None

    def saved_bits_per_element(self, hp_bits: int = 16) -> float:
        """Bits kept per input element between forward and backward (8.25 for 1x32 blocks, ``hp_bits`` otherwise)."""
        if not self.saves_mx_activations or self.wgrad.rhs is None:
            return float(hp_bits)
        across, along = self.wgrad.rhs.block
        return 8.0 + 8.0 / (across * along)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form; ``from_dict`` inverts it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LinearRecipe:
        """Inverse of :meth:`to_dict`. TypeError names what is no mapping, ValueError unknown or missing fields."""
        values = _checked_fields(cls, data, "recipe")
        for gemm in GEMMS:
            if gemm in values:
                spec = _checked_fields(GemmSpec, values[gemm], gemm)
                for side in ("lhs", "rhs"):
                    if spec.get(side) is not None:
                        spec[side] = CastSpec(**_checked_fields(CastSpec, spec[side], f"{gemm}.{side}"))
                values[gemm] = GemmSpec(**spec)
        return cls(**values)

    def __str__(self) -> str:
        return self.name


def _checked_fields(cls: type[Any], values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{where} is {values!r}: use a mapping of the fields of {cls.__name__}")
    known = {f.name for f in fields(cls)}
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if cls is LinearRecipe and "name" not in values:
        raise ValueError(f"{where}: field 'name' is missing")
    return dict(values)


def mxfp8_rceil() -> LinearRecipe:
    """E4M3, 1x32 blocks, round-up scales, everywhere: the default."""
    return LinearRecipe.from_operands(name="mxfp8_rceil")


def mxfp8_floor() -> LinearRecipe:
    """As ``mxfp8_rceil`` with the OCP v1.0 scale rule, which clips: for comparison."""
    cast = CastSpec(scale_rule="floor")
    return LinearRecipe.from_operands(name="mxfp8_floor", input=cast, weight=cast, grad_output=cast)


def mxfp8_square() -> LinearRecipe:
    """32x32 weight blocks: one quantised weight serves fprop and dgrad, which then see the same weight."""
    return LinearRecipe.from_operands(name="mxfp8_square", weight=CastSpec(block=(32, 32)))


def mxfp8_coalesced() -> LinearRecipe:
    """1x128 activations and gradients, 128x128 weights: what lets Hopper's FP8 tensor cores run at full rate.

    One operand of each GEMM has a scale for every 128x128 tile, so that a partial sum takes one multiplication; in
    wgrad that is the input. On gradients of real training neither it nor the 1x128 blocks changes the error of dW
    (``bench/coalescing.py``).
    """
    row, tile = CastSpec(block=(1, 128)), CastSpec(block=(128, 128))
    wgrad = GemmSpec(lhs=row, rhs=tile)
    return LinearRecipe.from_operands(name="mxfp8_coalesced", input=row, weight=tile, grad_output=row, wgrad=wgrad)


def mxfp8_rceil_wgrad_with_hp() -> LinearRecipe:
    """As ``mxfp8_rceil`` with the weight gradient in high precision."""
    return LinearRecipe.from_operands(name="mxfp8_rceil_wgrad_with_hp", wgrad=HP)


def mxfp8_robust() -> LinearRecipe:
    """Stochastically rounded gradients, and a random Hadamard transform of both wgrad operands."""
    grad = CastSpec(rounding="stochastic")
    wgrad = GemmSpec(lhs=replace(grad, hadamard=32), rhs=CastSpec(hadamard=32))
    return LinearRecipe.from_operands(name="mxfp8_robust", grad_output=grad, wgrad=wgrad)


RECIPES: dict[str, Callable[[], LinearRecipe]] = {
    f.__name__: f
    for f in (mxfp8_rceil, mxfp8_floor, mxfp8_square, mxfp8_coalesced, mxfp8_rceil_wgrad_with_hp, mxfp8_robust)
}


def get_recipe(recipe: str | LinearRecipe) -> LinearRecipe:
    """The recipe named ``recipe``, or ``recipe`` itself. ValueError lists the known names."""
    if isinstance(recipe, LinearRecipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: use one of {', '.join(RECIPES)}, or a LinearRecipe")
    return RECIPES[recipe]()
