"""Round tick marks for a time axis."""

from __future__ import annotations

import math


def ticks(end: float, count_max: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `end`, at most `count_max` + 1."""
    step = _round_step(end / count_max)
    return [step * index for index in range(math.floor(end / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
