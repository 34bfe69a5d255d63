"""Figure 14: what a tenth of the bandwidth costs the S3 paths.

64K tokens at 12.5 % are left out: they compute for 12 s, and hide their transfer at either rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.experiments.overhead import (
    AGG,
    BATCH,
    EPOCH_S,
    is_long,
    requests_of,
)
from benchmarks.figures.gpu import Prefill
from benchmarks.figures.paper_data import LINK_GBPS
from benchmarks.figures.plots import grouped_bars, legend_above, panels
from benchmarks.figures.scaled import ScaledRequest, schedule
from benchmarks.figures.served import Served, served
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.scheduling.ttft_model import ttft_at_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPPED_GBPS = LINK_GBPS / 10
LEFT_OUT = "64K, 12.5%"
PATHS = (BATCH, AGG)
REPEATS_SHORT = 3  # in a full run


@dataclass(frozen=True, slots=True)
class TenthRow:
    """One path for one request at both rates; times are medians."""

    request: str
    chunk_tokens: int
    path: str
    samples: int
    full_ms: float  # TTFT at 100 Gbps
    capped_ms: float  # at 10 Gbps
    increase_percent: float
    model_increase_percent: float  # by the overlap model
    is_transfer_bound: bool  # a layer takes longer than its compute window at 10 Gbps


class TenthExperiment(Experiment[TenthRow]):
    """Figure 14."""

    name: ClassVar[str] = "tenth"
    title: ClassVar[str] = "Figure 14: TTFT increase at a tenth of the bandwidth"
    conditions: ClassVar[str] = (
        "Bytes and rates are the paper's over the scale, times are not scaled. The GPU is "
        "emulated; the scheduler paces shared memory on one host to 100 and 10 Gbps over the scale."
    )

    def run(self, context: Context) -> list[TenthRow]:
        rows: list[TenthRow] = []
        with served(context.bench) as store:
            for request in requests_of(context):
                if request.paper.name == LEFT_OUT:
                    continue
                store.load(request)
                context.say(str(request))
                is_short = not (context.is_quick or is_long(request.paper))
                rows += _measure(store, request, REPEATS_SHORT if is_short else 1)
        return rows

    def plot(self, rows: Sequence[TenthRow]) -> Figure:
        chunk_tokens = sorted({row.chunk_tokens for row in rows})
        figure, axes = panels(len(chunk_tokens), 1)
        for tokens, panel in zip(chunk_tokens, axes, strict=True):
            mine = [row for row in rows if row.chunk_tokens == tokens]
            requests = list(dict.fromkeys(row.request for row in mine))
            series = {
                path: [row.increase_percent for row in mine if row.path == path] for path in PATHS
            }
            bound = {row.request for row in mine if row.is_transfer_bound}
            names = [f"{name}{'*' if name in bound else ''}" for name in requests]
            grouped_bars(panel, names, series)
            panel.set_title(f"G={tokens} (* transfer-bound at {CAPPED_GBPS:g} Gbps)")
            panel.set_ylabel("TTFT increase, %")
            panel.tick_params(axis="x", labelsize=6)
        legend_above(figure, axes[0])
        return figure


def _measure(store: Served, request: ScaledRequest, repeats: int) -> list[TenthRow]:
    gpu, whole_gpu = store.gpu(request), store.gpu(request, whole=True)
    ways: dict[str, Callable[[], Prefill]] = {
        BATCH: lambda: store.prefill_whole(request, whole_gpu).prefill,
        AGG: lambda: store.prefill(request, gpu).prefill,
    }
    samples: dict[tuple[str, float], list[float]] = {}
    for _ in range(repeats):
        for rate_gbps in (LINK_GBPS, CAPPED_GBPS):
            store.schedule(schedule("stall_dynamic", rate_gbps, request.scale, EPOCH_S))
            for path, prefill in ways.items():
                samples.setdefault((path, rate_gbps), []).append(prefill().ttft_s)
    return [_row(request, path, samples) for path in PATHS]


def _row(
    request: ScaledRequest, path: str, samples: dict[tuple[str, float], list[float]]
) -> TenthRow:
    full_s = statistics.median(samples[path, LINK_GBPS])
    capped_s = statistics.median(samples[path, CAPPED_GBPS])
    model = model_ttft_s(request, path, CAPPED_GBPS) / model_ttft_s(request, path, LINK_GBPS)
    transfer_s = request.layer_bytes / rate_bytes_per_s(request, CAPPED_GBPS)
    return TenthRow(
        request=request.paper.name,
        chunk_tokens=request.chunk_tokens,
        path=path,
        samples=len(samples[path, LINK_GBPS]),
        full_ms=1000 * full_s,
        capped_ms=1000 * capped_s,
        increase_percent=100 * (capped_s / full_s - 1),
        model_increase_percent=100 * (model - 1),
        is_transfer_bound=transfer_s > request.paper.window_s,
    )


def rate_bytes_per_s(request: ScaledRequest, rate_gbps: float) -> float:
    """The paper's rate, scaled."""
    return rate_gbps / request.scale * BYTES_PER_GBIT


def model_ttft_s(request: ScaledRequest, path: str, rate_gbps: float) -> float:
    """By equation 3; chunkwise, everything is transferred before anything is computed."""
    rate = rate_bytes_per_s(request, rate_gbps)
    if path == AGG:
        return ttft_at_rate(request.demand, rate)
    demand = request.demand
    return demand.payload_bytes / rate + demand.num_layers * request.paper.window_s
