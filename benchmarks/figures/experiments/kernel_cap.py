"""A cross-check of the cap: the kernel's traffic control and the scheduler bound the same delivery.

The server runs in a network namespace behind a link of its own; the payload goes over TCP. The cap
is once the link's (tc, a token bucket on the server's side) and once the scheduler's, at the same
rate of payload bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.basis.server import Server, running_server
from benchmarks.basis.storage_socket import StorageSocket
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.experiments.rate_sweep import scaled
from benchmarks.figures.paper_data import NUM_LAYERS, REQUESTS
from benchmarks.figures.plots import lines, panels
from benchmarks.figures.served import CACHED
from benchmarks.figures.shaped_link import ShapedLink, shaped_link
from objectcache_laboratory.calibration.measure import Measurement, StoredGeometry
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REQUEST = REQUESTS["16K, 87.5%"]
SCALE_MIN = 64  # what a link between two namespaces and one Python client carry with ease
FACTORS = (0.5, 1.0, 1.5)  # of r*
REPEATS, QUICK_REPEATS = 5, 1
BUCKET = "kernel-cap"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One rate; medians."""

    request: str
    rate_gbps: float | None  # None: no cap
    of_zero_stall: float | None
    samples: int
    kernel_ttft_ms: float
    scheduler_ttft_ms: float
    ratio: float  # scheduler over kernel


class KernelCapExperiment(Experiment[KernelRow]):
    """The scheduler's cap against the kernel's."""

    name: ClassVar[str] = "kernel_cap"
    title: ClassVar[str] = "Cross-check: TTFT under the kernel's cap and under the scheduler's"
    conditions: ClassVar[str] = (
        "Bytes and rates are the paper's over the scale or over 64, times are not scaled. Bytes go "
        "in HTTP bodies over a link between two network namespaces of one host."
    )

    def run(self, context: Context) -> list[KernelRow]:
        geometry = scaled(REQUEST, max(SCALE_MIN, context.scale), NUM_LAYERS)
        repeats = QUICK_REPEATS if context.is_quick else REPEATS
        with (
            shaped_link() as link,
            context.bench.place() as folder,
            running_server(
                folder / "data", CACHED, host=link.address, within=link.within
            ) as server,
            server.client("body") as client,
        ):
            client.create_bucket(BUCKET)
            measurement = Measurement(client, BUCKET, tells_window=True)
            stored = measurement.store(geometry)
            rows: list[KernelRow] = []
            for factor in FACTORS:
                context.say(f"at {factor} r*")
                rate = factor * geometry.zero_stall_rate
                rows.append(_measure(server, link, measurement, stored, rate, repeats))
            rows.append(_measure(server, link, measurement, stored, None, repeats))
        return rows

    def plot(self, rows: Sequence[KernelRow]) -> Figure:
        figure, (panel,) = panels(1, 1)
        capped = [row for row in rows if row.rate_gbps is not None]
        rates = [row.rate_gbps or 0.0 for row in capped]
        series = {
            "kernel": (rates, [row.kernel_ttft_ms for row in capped]),
            "scheduler": (rates, [row.scheduler_ttft_ms for row in capped]),
        }
        lines(panel, series)
        panel.set_xlabel("cap, Gbps (scaled)")
        panel.set_ylabel("TTFT, ms")
        panel.set_ylim(bottom=0)
        panel.legend(loc="upper left", fontsize=7)
        return figure

    def notes(self, rows: Sequence[KernelRow]) -> list[str]:
        """How far the two lie apart."""
        ratios = [row.ratio for row in rows if row.rate_gbps is not None]
        return [f"scheduler over kernel: {min(ratios):.3f} to {max(ratios):.3f}"]


def _measure(
    server: Server,
    link: ShapedLink,
    measurement: Measurement,
    stored: StoredGeometry,
    rate_bytes_per_s: float | None,
    repeats: int,
) -> KernelRow:
    """Both caps in turn, so that a slow spell of the machine hits each of them."""
    by_kernel: list[float] = []
    by_scheduler: list[float] = []
    for _ in range(repeats):
        link.shape(rate_bytes_per_s)
        by_kernel.append(measurement.layerwise(stored).ttft_s)
        link.shape(None)
        _set_cap(server, rate_bytes_per_s)
        by_scheduler.append(measurement.layerwise(stored).ttft_s)
        _set_cap(server, None)
    kernel_s, scheduler_s = statistics.median(by_kernel), statistics.median(by_scheduler)
    geometry, rate = stored.geometry, rate_bytes_per_s
    return KernelRow(
        geometry.name,
        None if rate is None else rate / BYTES_PER_GBIT,
        None if rate is None else rate / geometry.zero_stall_rate,
        repeats,
        kernel_s * 1e3,
        scheduler_s * 1e3,
        scheduler_s / kernel_s,
    )


def _set_cap(server: Server, rate_bytes_per_s: float | None) -> None:
    cap_gbps = (rate_bytes_per_s or 0.0) / BYTES_PER_GBIT
    with closing(StorageSocket(server.settings)) as storage:
        storage.ask(SetSchedule(changes=ScheduleChanges(cap_gbps=cap_gbps)), ScheduleState)
