"""Where peers are known to differ from the contract, and why. Each entry must show, and nothing beyond it may.

Found with torchao 0.18.0, ml_dtypes 0.6.0, gfloat 0.5.2, and Triton 3.6.0 on an H200. An entry that no longer shows is
a failure, so that the table follows its subjects.
"""

from __future__ import annotations

import numpy as np
import torch

from numerics_tests.validation.case import Agreed, Case


def just_above_m(case: Case) -> bool:
    """An rceil block whose maximum is up to 64 ulps above M 2^k: 1.75 is the significand of M in either format."""
    significand = 2.0 * float(np.frexp(case.amax)[0])
    return case.rule == "rceil" and 1.75 < significand <= 1.75 + 64 * 2.0**-23


def _byte_zero(*rules: str) -> Agreed:
    flushed = "rceil" in rules
    what = "multiplied by 1 instead of 2^127, which flushes them" if flushed else "divided by 2^-126: half the value"
    return Agreed(
        implementation="torchao",
        property="byte_zero",
        reason=f"{', '.join(rules)}: under scale byte 0 elements are {what}",
        covers=lambda case: case.rule in rules,
    )


def _torchao(prop: str, reason: str, rules: tuple[str, ...]) -> Agreed:
    return Agreed(implementation="torchao", property=prop, reason=reason, covers=lambda case: case.rule in rules)


def emulated(device: torch.device) -> bool:
    """Whether ``tl.dot_scaled`` has no instruction of its own there and goes through bfloat16."""
    return torch.cuda.get_device_capability(device)[0] < 10


_OTHERS = ("floor", "ceil", "even")
_LOG2 = "rceil takes ceil(log2(a / M)) in float32, which rounds to the integer below for maxima just above M 2^k"
_NAN_ELEMENTS = "floor, ceil, even: byte 255 alone says NaN; elements other than the NaN itself become x / Inf = 0"
_NO_SATURATION = "casts do not saturate: beyond M an element becomes NaN (E4M3) or Inf (E5M2); callers clip first"

AGREED: tuple[Agreed, ...] = (
    *(
        Agreed(implementation="torchao", property=prop, reason=_LOG2, covers=just_above_m)
        for prop in ("scale_rceil_limits", "power_of_two", "rceil_never_clips")
    ),
    _byte_zero("rceil"),
    _byte_zero(*_OTHERS),
    *(
        entry
        for prop in ("inf_block", "minus_inf_block")
        for entry in (
            _torchao(prop, "rceil: an Inf gets byte 254 and saturates, as the hardware's conversion does", ("rceil",)),
            _torchao(prop, "floor, ceil, even: an Inf counts as 2^128, byte 247 (E5M2: 240), and saturates", _OTHERS),
        )
    ),
    _torchao("nan_block", _NAN_ELEMENTS, _OTHERS),
    _torchao("nan_code", _NAN_ELEMENTS, _OTHERS),
    *(
        Agreed(
            implementation="ml_dtypes", property=prop, reason=_NO_SATURATION, covers=lambda case: case.rule == "floor"
        )
        for prop in (
            "elements_saturate",
            "elements_random",
            "byte_top",
            "idempotence",
            "monotonicity",
            "whole_blocks",
            "strides",
            "bfloat16_input",
            "float16_input",
        )
    ),
    *(
        Agreed(implementation="gfloat", property=prop, reason="an Inf gets byte 254 and saturates")
        for prop in ("inf_block", "minus_inf_block")
    ),
    Agreed(implementation="gfloat", property="nan_code", reason="NaN is written as 0xFF"),
    Agreed(
        implementation="dot_scaled",
        property="gemm_nan",
        reason="before Blackwell: an E5M2 NaN is lost on its way to bfloat16",
        covers=lambda case: case.fmt == "e5m2" and case.note.startswith("NaN element"),
        on=emulated,
    ),
    Agreed(
        implementation="dot_scaled",
        property="gemm_extreme_scales",
        reason="before Blackwell: scale byte 0 reads as 0 instead of 2^-127, which bfloat16 keeps only as a subnormal",
        on=emulated,
    ),
)


def agreed_for(implementation: str, prop: str, device: torch.device) -> tuple[Agreed, ...]:
    """The entries of one implementation and property on a device."""
    return tuple(a for a in AGREED if (a.implementation, a.property) == (implementation, prop) and a.on(device))
