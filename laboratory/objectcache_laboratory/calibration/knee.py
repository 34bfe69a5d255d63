"""The knee of a TTFT curve: from which rate more bandwidth brings nothing (paper, figure 15). Pure.

A rate does two things to TTFT. It bounds how fast layers follow each other, which may leave the GPU
waiting for each of them, and it delays the first layer, which no overlap can hide. The first is
what a scheduler's margin is for. So the stall knee is sought in the time from the first layer's
arrival, and the margin goes by it. The TTFT knee, that of the curve itself, lies higher: at 32
layers and 2 % the first layer alone can put it at up to 1.56 r*.

What a margin must reach is the plateau (paper, section 3.6). A knee is where a curve comes within
the tolerance of it, found between two rates that were measured. So the margin goes to a rate that
was measured to be on the plateau, above r* also where the knee is not: then r* is within what the
sweep can tell apart from its slope, and a margin of 0 would make calibrated_stall_opt stall_opt.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 0.02  # of the best TTFT


class Sample(NamedTuple):
    """One delivery: its TTFT, and when its first layer was there."""

    ttft_s: float
    first_layer_s: float

    @property
    def after_first_s(self) -> float:
        """From the first layer's arrival on: all computing, and the stalls between."""
        return self.ttft_s - self.first_layer_s


@dataclass(frozen=True, slots=True)
class RateReading:
    """Deliveries at one rate, infinity for no bound. What disturbs a measurement only ever adds to
    it, so the best of them counts.
    """

    rate_bytes_per_s: float
    samples: tuple[Sample, ...]

    @property
    def ttft_s(self) -> float:
        """The best TTFT."""
        return min(sample.ttft_s for sample in self.samples)

    @property
    def after_first_s(self) -> float:
        """The best time from the first layer's arrival on."""
        return min(sample.after_first_s for sample in self.samples)

    @property
    def spread(self) -> float:
        """How far repetitions lie apart, over the best."""
        return max(sample.ttft_s for sample in self.samples) / self.ttft_s - 1


@dataclass(frozen=True, slots=True)
class Knee:
    """The lowest rate on the plateau; None where the curve shows none, and why."""

    rate_bytes_per_s: float | None
    remark: str = ""


def stalling(readings: Sequence[RateReading]) -> list[float]:
    """By reading, how far its time from the first layer on lies above the best, as a part of it."""
    best_s = min(reading.after_first_s for reading in readings)
    return [reading.after_first_s / best_s - 1 for reading in readings]


def above_best(readings: Sequence[RateReading]) -> list[float]:
    """By reading, how far its TTFT lies above the best, as a part of it."""
    best_s = min(reading.ttft_s for reading in readings)
    return [reading.ttft_s / best_s - 1 for reading in readings]


def find_stall_knee(readings: Sequence[RateReading], tolerance: float = TOLERANCE) -> Knee:
    """The lowest rate whose time from the first layer on is within `tolerance` of the best; between
    two rates by the straight line in 1/rate, as times of stalled deliveries are.

    At least two readings, of different rates.
    """
    return _find(
        readings,
        stalling,
        tolerance,
        flat="flat: no layer is late at the lowest rate already",
        steep="no knee: layers are late at the highest rate still",
    )


def find_ttft_knee(readings: Sequence[RateReading], tolerance: float = TOLERANCE) -> Knee:
    """The same of the TTFT itself, as in the paper's figure 15: the first layer counts."""
    return _find(
        readings,
        above_best,
        tolerance,
        flat="flat: TTFT is the best at the lowest rate already",
        steep="no knee: TTFT falls at the highest rate still",
    )


def plateau_rate(
    readings: Sequence[RateReading], zero_stall_rate: float, tolerance: float = TOLERANCE
) -> float | None:
    """The lowest rate that was measured to be on the plateau, at or above the stall knee and above
    `zero_stall_rate`, bytes per second; None where there is no such knee or rate.
    """
    knee = find_stall_knee(readings, tolerance).rate_bytes_per_s
    if knee is None:
        return None
    rates = [
        reading.rate_bytes_per_s
        for reading, stalls in zip(readings, stalling(readings), strict=True)
        if stalls <= tolerance
        and reading.rate_bytes_per_s >= knee
        and zero_stall_rate < reading.rate_bytes_per_s < math.inf
    ]
    return min(rates, default=None)


def margin_bytes_per_s(plateaus: Sequence[tuple[float | None, float]]) -> float | None:
    """What to add to zero-stall rates so that all are on their plateaus: the most that any needs.

    By geometry its `plateau_rate` and zero-stall rate. None where no plateau was found, else above
    0.
    """
    above = [plateau - zero_stall for plateau, zero_stall in plateaus if plateau is not None]
    return max(above, default=None)


def _find(
    readings: Sequence[RateReading],
    excess_of: Callable[[Sequence[RateReading]], list[float]],
    tolerance: float,
    flat: str,
    steep: str,
) -> Knee:
    assert len(readings) > 1
    ordered = sorted(readings, key=lambda reading: reading.rate_bytes_per_s)
    excess = excess_of(ordered)
    first = next(index for index, part in enumerate(excess) if part <= tolerance)
    if first == 0:
        return Knee(None, flat)
    fast, slow = ordered[first], ordered[first - 1]
    if fast.rate_bytes_per_s == math.inf:
        return Knee(None, steep)
    part = (tolerance - excess[first]) / (excess[first - 1] - excess[first])
    fast_x, slow_x = 1 / fast.rate_bytes_per_s, 1 / slow.rate_bytes_per_s
    return Knee(1 / (fast_x + part * (slow_x - fast_x)), _noise(readings, tolerance))


def _noise(readings: Sequence[RateReading], tolerance: float) -> str:
    spread = statistics.median(reading.spread for reading in readings)
    if spread <= tolerance:
        return ""
    return f"noisy: repetitions lie {100 * spread:.0f} % apart"
