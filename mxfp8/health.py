"""Is a cast as good as its format allows? Floors that follow from the format alone, and who falls below. A leaf."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# What rounding to nearest in E4M3 can do to a tensor, in dB. With three mantissa bits an element in [2^e, 2^(e+1)) is
# off by at most 2^(e-4): the error energy of *any* tensor is at most 2^-8 of its own. (Subnormal elements add at most
# 31 * (2^-10 / 224)^2 per block, under -90 dB.) Less than this is clipping or a wrong scale, not rounding.
WORST_CAST_DB = 80 * math.log10(2)  # 24.08
# With errors spread evenly over the rounding interval, of width 2^(e-3), their energy is 2^(2e-6) / 12 and that of the
# elements at least 2^(2e): a tensor reaches 10 log10(12 * 2^6). A few tensors with little in them may not; half of all
# casts may not fall short. E5M2, with one bit less, cannot reach it: its tensors lie between 22.8 and 28.9 dB.
TYPICAL_CAST_DB = 10 * math.log10(12 * 2**6)  # 28.85


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHealth:
    """How one cast (or GEMM result) of one layer fared; see ``mxfp8.metrics`` for the exact meaning of each number."""

    layer: str
    #: ``fprop``, ``dgrad`` or ``wgrad``.
    gemm: str
    #: ``input``, ``weight``, ``grad_output``, or ``output`` for the result of the GEMM.
    operand: str = "output"
    sqnr_db: float
    underflow_frac: float = 0.0
    saturated_frac: float = 0.0
    amax: float | None = None

    @property
    def rank(self) -> float:
        """SQNR for sorting: NaN is worse than any number."""
        return -math.inf if math.isnan(self.sqnr_db) else self.sqnr_db

    def __str__(self) -> str:
        return f"{self.layer} {self.gemm} {self.operand} {self.sqnr_db:.1f} dB"


def unhealthy(
    rows: Sequence[LayerHealth], worst_db: float = WORST_CAST_DB, typical_db: float = TYPICAL_CAST_DB
) -> list[LayerHealth]:
    """Casts that lost more than rounding to E4M3 can explain, worst first; empty when all is well.

    Every cast under ``worst_db``; and, when the median over all casts is under ``typical_db``, every cast under that. A
    NaN is under everything. Outputs of GEMMs are not judged: a sum that cancels has a low SQNR without any fault. For
    stochastic rounding, which errs by up to twice as much with twice the energy, lower the floors by 6.02 and 3.01 dB.
    """
    casts = sorted((row for row in rows if row.operand != "output"), key=lambda row: row.rank)
    if not casts:
        return []
    floor = worst_db if casts[len(casts) // 2].rank >= typical_db else typical_db
    return [row for row in casts if row.rank < floor]
