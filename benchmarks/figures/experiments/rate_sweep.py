"""Figure 15: TTFT against the rate of a delivery, as `objectcache calibrate` sweeps it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.paper_data import MARGIN_GBPS, NUM_LAYERS, REQUESTS, PaperRequest
from benchmarks.figures.plots import COLORS, panels
from benchmarks.figures.scaled import QUICK_LAYERS
from benchmarks.figures.served import CACHED
from objectcache_laboratory.calibration.geometry import ModelGeometry
from objectcache_laboratory.calibration.knee import (
    Knee,
    RateReading,
    find_stall_knee,
    find_ttft_knee,
    stalling,
)
from objectcache_laboratory.calibration.measure import Measurement
from objectcache_schemas.limits import BYTES_PER_GBIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_REQUESTS = ("16K, 50%", "16K, 87.5%", "64K, 50%", "64K, 87.5%")
QUICK_REQUESTS = ("16K, 87.5%",)
# Of r*; the last is what the paper's runs at 100 Gbps are.
FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.5, math.inf)
QUICK_FACTORS = (0.5, 1.0, 1.5, math.inf)
LONG_S, LONG_SLOWEST = 5.0, 0.5  # of what is computed for longer, less is swept: time is short
BUCKET = "rate-sweep"


@dataclass(frozen=True, slots=True)
class RateRow:
    """One rate of one request. Rates are the machine's; times `scale` they are the paper's."""

    request: str
    rate_gbps: float | None  # None: no bound
    of_zero_stall: float | None
    ttft_ms: float
    increase_percent: float  # over the request's best
    stalling_percent: float  # of the time from its first layer on, over the best
    zero_stall_gbps: float
    margin_gbps: float  # the paper's, scaled
    ttft_knee_gbps: float | None
    ttft_knee_remark: str
    stall_knee_gbps: float | None  # without the first layer's own transfer
    stall_knee_remark: str


class RateExperiment(Experiment[RateRow]):
    """Figure 15."""

    name: ClassVar[str] = "rate_sweep"
    title: ClassVar[str] = "Figure 15: TTFT against rate"
    conditions: ClassVar[str] = (
        "Bytes and rates are the paper's over the scale, times are not scaled. The GPU is "
        "emulated; the scheduler paces shared memory on one host."
    )

    def run(self, context: Context) -> list[RateRow]:
        layers = QUICK_LAYERS if context.is_quick else NUM_LAYERS
        factors = QUICK_FACTORS if context.is_quick else FACTORS
        rows: list[RateRow] = []
        with context.bench.server(CACHED) as server, server.client("shared_memory") as client:
            client.create_bucket(BUCKET)
            measurement = Measurement(client, BUCKET)
            for name in QUICK_REQUESTS if context.is_quick else FIGURE_REQUESTS:
                context.say(name)
                geometry = scaled(REQUESTS[name], context.scale, layers)
                slowest = LONG_SLOWEST if geometry.compute_s > LONG_S else 0.0
                of_zero_stall = [factor for factor in factors if factor >= slowest]
                rates = [factor * geometry.zero_stall_rate for factor in of_zero_stall]
                readings = measurement.readings(measurement.store(geometry), rates, repeats=1)
                rows += rows_of(geometry, readings, context.scale)
        return rows

    def plot(self, rows: Sequence[RateRow]) -> Figure:
        requests = list(dict.fromkeys(row.request for row in rows))
        figure, axes = panels(-(-len(requests) // 2), 2)
        for request, panel in zip(requests, axes, strict=False):
            own = [row for row in rows if row.request == request and row.rate_gbps is not None]
            first = own[0]
            panel.plot(
                [row.rate_gbps or 0.0 for row in own],
                [row.increase_percent for row in own],
                marker="o",
                markersize=3,
                color=COLORS[0],
            )
            panel.axvline(first.zero_stall_gbps, linestyle="--", color=COLORS[2], label="r*")
            target = first.zero_stall_gbps + first.margin_gbps
            panel.axvline(target, linestyle="-.", color=COLORS[1], label="r* + margin")
            panel.set_title(request)
            panel.set_xlabel("rate, Gbps (scaled)")
            panel.set_ylabel("TTFT above the best, %")
            panel.grid(alpha=0.3)
            panel.legend(loc="upper left", fontsize=7)
        return figure

    def notes(self, rows: Sequence[RateRow]) -> list[str]:
        """Where each curve has its knees."""
        firsts = {row.request: row for row in reversed(rows)}
        return [
            f"{request}: r* {row.zero_stall_gbps:.3f} Gbps; knee of TTFT "
            f"{_place(row, row.ttft_knee_gbps, row.ttft_knee_remark)}; without the first layer's "
            f"own transfer {_place(row, row.stall_knee_gbps, row.stall_knee_remark)}"
            for request, row in sorted(firsts.items())
        ]


def _place(row: RateRow, knee_gbps: float | None, remark: str) -> str:
    if knee_gbps is None:
        return remark
    at = f"at {knee_gbps / row.zero_stall_gbps:.2f} r*"
    return f"{at} ({remark})" if remark else at


def scaled(request: PaperRequest, scale: int, num_layers: int) -> ModelGeometry:
    """A request of the paper with its bytes over `scale`."""
    return ModelGeometry(
        request.name, max(1, request.layer_bytes // scale), request.window_s, num_layers
    )


def rows_of(geometry: ModelGeometry, readings: Sequence[RateReading], scale: int) -> list[RateRow]:
    """A row for each reading."""
    ttft, stall = find_ttft_knee(readings), find_stall_knee(readings)
    best_s = min(reading.ttft_s for reading in readings)
    return [
        RateRow(
            geometry.name,
            _gbps(reading.rate_bytes_per_s),
            _finite(reading.rate_bytes_per_s / geometry.zero_stall_rate),
            reading.ttft_s * 1e3,
            100 * (reading.ttft_s / best_s - 1),
            100 * stalls,
            geometry.zero_stall_rate / BYTES_PER_GBIT,
            MARGIN_GBPS / scale,
            _knee_gbps(ttft),
            ttft.remark,
            _knee_gbps(stall),
            stall.remark,
        )
        for reading, stalls in zip(readings, stalling(readings), strict=True)
    ]


def _knee_gbps(knee: Knee) -> float | None:
    return None if knee.rate_bytes_per_s is None else _gbps(knee.rate_bytes_per_s)


def _gbps(rate_bytes_per_s: float) -> float | None:
    return _finite(rate_bytes_per_s / BYTES_PER_GBIT)


def _finite(number: float) -> float | None:
    return None if number == math.inf else number
