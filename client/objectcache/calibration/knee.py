"""The knee of a TTFT curve: from which rate more bandwidth brings nothing (paper, figure 15). Pure.

A rate does two things to TTFT. It bounds how fast layers follow each other, which may leave the GPU
waiting for each of them, and it delays the first layer, which no overlap can hide. The first is
what a scheduler's margin is for. So the knee is sought in the time from the first layer's arrival.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
class Reading:
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
    """The lowest rate without stalls; None where the curve shows none, and why."""

    rate_bytes_per_s: float | None
    remark: str = ""


def stalling(readings: Sequence[Reading]) -> list[float]:
    """By reading, how far its time from the first layer on lies above the best, as a part of it."""
    best_s = min(reading.after_first_s for reading in readings)
    return [reading.after_first_s / best_s - 1 for reading in readings]


def find_knee(readings: Sequence[Reading], tolerance: float = TOLERANCE) -> Knee:
    """The lowest rate whose time from the first layer on is within `tolerance` of the best; between
    two rates by the straight line in 1/rate, as times of stalled deliveries are.

    At least two readings, of different rates.
    """
    assert len(readings) > 1
    ordered = sorted(readings, key=lambda reading: reading.rate_bytes_per_s)
    excess = stalling(ordered)
    first = next(index for index, part in enumerate(excess) if part <= tolerance)
    if first == 0:
        return Knee(None, "flat: no layer is late at the lowest rate already")
    fast, slow = ordered[first], ordered[first - 1]
    if fast.rate_bytes_per_s == math.inf:
        return Knee(None, "no knee: layers are late at the highest rate still")
    part = (tolerance - excess[first]) / (excess[first - 1] - excess[first])
    fast_x, slow_x = 1 / fast.rate_bytes_per_s, 1 / slow.rate_bytes_per_s
    return Knee(1 / (fast_x + part * (slow_x - fast_x)), _noise(readings, tolerance))


def margin_bytes_per_s(knees: Sequence[tuple[Knee, float]]) -> float | None:
    """What to add to the zero-stall rate so that no geometry stalls: the most that any needs.

    `knees` come with their zero-stall rates. None where there is no knee at all.
    """
    above = [
        knee.rate_bytes_per_s - zero_stall
        for knee, zero_stall in knees
        if knee.rate_bytes_per_s is not None
    ]
    return max(0.0, *above) if above else None


def _noise(readings: Sequence[Reading], tolerance: float) -> str:
    spread = statistics.median(reading.spread for reading in readings)
    if spread <= tolerance:
        return ""
    return f"noisy: repetitions lie {100 * spread:.0f} % apart"
