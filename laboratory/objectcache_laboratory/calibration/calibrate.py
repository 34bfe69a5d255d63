"""A calibration: the sweep of each geometry, its knee, and what follows for the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from objectcache_laboratory.calibration.geometry import ModelGeometry
from objectcache_laboratory.calibration.knee import (
    Knee,
    RateReading,
    find_stall_knee,
    find_ttft_knee,
    margin_bytes_per_s,
    plateau_rate,
    stalling,
)
from objectcache_laboratory.calibration.measure import Measurement
from objectcache_laboratory.calibration.threshold import ModeReading, Threshold, find_threshold
from objectcache_schemas.limits import BYTES_PER_GBIT, CAP_GBPS_MAX, KIB, MIB
from objectcache_schemas.operators.schedule import ScheduleChanges

# Of the zero-stall rate. Close together where the knee is expected.
RATE_FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, math.inf)
PAYLOADS_BYTES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True)
class Curve:
    """TTFT by rate of one geometry."""

    geometry: ModelGeometry
    readings: tuple[RateReading, ...]

    @property
    def stall_knee(self) -> Knee:
        """Without the first layer's own transfer."""
        return find_stall_knee(self.readings)

    @property
    def ttft_knee(self) -> Knee:
        """Of the curve itself."""
        return find_ttft_knee(self.readings)

    @property
    def plateau_rate(self) -> float | None:
        """See `knee.plateau_rate`."""
        return plateau_rate(self.readings, self.geometry.zero_stall_rate)

    @property
    def best_ttft_s(self) -> float:
        """The best at any rate."""
        return min(reading.ttft_s for reading in self.readings)

    @property
    def stalling(self) -> list[float]:
        """By reading, see `knee.stalling`."""
        return stalling(self.readings)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and what is proposed; None where nothing can be.

    The bytes of the curves' geometries are those of a deployment over `scale`; payloads of `modes`
    are what they are.
    """

    curves: tuple[Curve, ...]
    modes: tuple[ModeReading, ...]
    threshold: Threshold
    scale: float = 1.0

    @property
    def measured_margin_gbps(self) -> float | None:
        """What the measured geometries need, at their size."""
        margin = margin_bytes_per_s(
            [(curve.plateau_rate, curve.geometry.zero_stall_rate) for curve in self.curves]
        )
        return None if margin is None else margin / BYTES_PER_GBIT

    @property
    def margin_gbps(self) -> float | None:
        """For `scheduler.margin_gbps`, at real sizes: what makes a layer late is a time, so the
        rate that makes up for it grows with the bytes, as r* does.
        """
        measured = self.measured_margin_gbps
        return None if measured is None else min(CAP_GBPS_MAX, measured * self.scale)

    @property
    def changes(self) -> ScheduleChanges:
        """What to write; None in it leaves a setting as it is."""
        return ScheduleChanges(
            margin_gbps=self.margin_gbps,
            layerwise_threshold_bytes=self.threshold.payload_bytes,
        )


def calibrate(
    measurement: Measurement,
    geometries: Sequence[ModelGeometry],
    scale: float,
    repeats: int,
    say: Callable[[str], None],
) -> Calibration:
    """Measure all of it, with bytes over `scale`; `say` is told what is being measured."""
    scaled = [geometry.scaled(scale) for geometry in geometries]
    curves = [_curve(measurement, geometry, repeats, say) for geometry in scaled]
    modes = list(_modes(measurement, scaled, repeats, say))
    return Calibration(tuple(curves), tuple(modes), find_threshold(modes), scale)


def expected_s(geometries: Sequence[ModelGeometry], repeats: int) -> float:
    """How long it takes about: below the zero-stall rate the transfer counts, above the compute."""
    rates = sum(max(1.0, 1 / factor) for factor in RATE_FACTORS)
    modes_s = len(PAYLOADS_BYTES) * 2 * _quickest(geometries).compute_s
    return repeats * (rates * sum(geometry.compute_s for geometry in geometries) + modes_s)


def _quickest(geometries: Sequence[ModelGeometry]) -> ModelGeometry:
    return min(geometries, key=lambda geometry: geometry.compute_s)


def _curve(
    measurement: Measurement, geometry: ModelGeometry, repeats: int, say: Callable[[str], None]
) -> Curve:
    say(f"{geometry.name}: TTFT by rate")
    rates = [factor * geometry.zero_stall_rate for factor in RATE_FACTORS]
    readings = measurement.readings(measurement.store(geometry), rates, repeats)
    return Curve(geometry, tuple(readings))


def _modes(
    measurement: Measurement,
    geometries: Sequence[ModelGeometry],
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[ModeReading]:
    """With the compute of the quickest geometry: the longer it is, the less a mode matters."""
    like = _quickest(geometries)
    for payload_bytes in PAYLOADS_BYTES:
        layer_bytes = payload_bytes // like.num_layers
        if not layer_bytes:
            continue
        say(f"modes: {payload_bytes // KIB} KiB")
        name = f"{payload_bytes} bytes"
        stored = measurement.store(
            ModelGeometry(name, layer_bytes, like.compute_window_s, like.num_layers)
        )
        pairs = [
            (measurement.chunkwise(stored).ttft_s, measurement.layerwise(stored).ttft_s)
            for _ in range(repeats)
        ]
        chunkwise, layerwise = zip(*pairs, strict=True)
        delivered_bytes = stored.geometry.delivered_layer_bytes * like.num_layers
        yield ModeReading(delivered_bytes, min(chunkwise), min(layerwise))
