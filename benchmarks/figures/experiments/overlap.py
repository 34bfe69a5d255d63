"""Figures 12, A4 and A7: what a prefix needs to be hidden under its prefill, and what we give.

The times of prefills are the paper's own (tables A1, A2 and A8: there is no GPU here); what they
need follows by arithmetic. What this machine gives is measured: one delivery, layer by layer, out
of memory and off the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.basis.prefix import Geometry, check_delivery, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.deliveries.cold import SETTINGS as DIRECT
from benchmarks.figures.carriers import CARRIERS, HTTP, SHARED_MEMORY
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.paper_gpus import MODELS, PREFILLS, Prefill
from benchmarks.figures.plots import heatmap, panels
from benchmarks.figures.served import CACHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WARM = f"{CARRIERS[SHARED_MEMORY]}, out of the page cache"
BODY = f"{HTTP}, out of the page cache"
COLD = f"{CARRIERS[SHARED_MEMORY]}, off the device"
CHUNK_TOKENS = 64  # of which the paper's main configuration is
REPEATS, QUICK_REPEATS = 5, 1


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One prefill of the paper, beside the rates of this machine."""

    gpu: str
    model: str
    context_tokens: int
    hit_percent: float
    cached_gib: float
    layer_compute_ms: float  # the paper's prefill over the model's layers
    required_gbytes_per_s: float
    warm_gbytes_per_s: float  # measured here
    body_gbytes_per_s: float
    cold_gbytes_per_s: float

    @property
    def measured(self) -> dict[str, float]:
        """What this machine gives, by what carried it."""
        return {
            WARM: self.warm_gbytes_per_s,
            BODY: self.body_gbytes_per_s,
            COLD: self.cold_gbytes_per_s,
        }


class OverlapExperiment(Experiment[OverlapRow]):
    """Figures 12, A4 and A7."""

    name: ClassVar[str] = "overlap"
    title: ClassVar[str] = "Figures 12, A4 and A7: throughput that hides a prefix, and ours"
    conditions: ClassVar[str] = (
        "Nothing is scaled. Times of prefills are the paper's, of its A100 and H100; rates are "
        "this machine's, of one delivery on one host, none over RDMA."
    )

    def run(self, context: Context) -> list[OverlapRow]:
        geometry = Geometry(16, context.bench.scale.chunk_count).in_chunks_of(CHUNK_TOKENS)
        repeats = QUICK_REPEATS if context.is_quick else REPEATS
        context.say("out of the page cache")
        with context.bench.server(CACHED) as server:
            warm = _gbytes_per_s(server, geometry, repeats, "shared_memory", "body")
        context.say("off the device")
        with context.bench.server(DIRECT) as server:
            cold = _gbytes_per_s(server, geometry, repeats, "shared_memory")
        rates = (warm["shared_memory"], warm["body"], cold["shared_memory"])
        return list(overlap_rows(*rates))

    def plot(self, rows: Sequence[OverlapRow]) -> Figure:
        kinds = list(dict.fromkeys((row.gpu, row.model) for row in rows))
        models = list(dict.fromkeys(row.model for row in rows))
        figure, axes = panels(3, len(models))
        for number, (gpu, model) in enumerate(kinds):
            mine = [row for row in rows if (row.gpu, row.model) == (gpu, model)]
            _draw(axes[number], mine, lambda row: row.required_gbytes_per_s)
            axes[number].set_title(f"{model}, {gpu}: required GB/s", fontsize=8)
        for model, panel in zip(models, axes[2 * len(models) :], strict=True):
            mine = [row for row in rows if row.model == model and row.gpu == rows[0].gpu]
            _draw(panel, mine, lambda row: row.cached_gib)
            panel.set_title(f"{model}: cached GiB", fontsize=8)
        return figure

    def notes(self, rows: Sequence[OverlapRow]) -> list[str]:
        """How many prefills each rate hides, and what the most demanding asks for."""
        most = max(rows, key=lambda row: row.required_gbytes_per_s)
        lines = [
            f"{name}: {rate:.2f} GB/s hide "
            f"{sum(row.required_gbytes_per_s <= rate for row in rows)} of {len(rows)} prefills"
            for name, rate in rows[0].measured.items()
        ]
        return [
            *lines,
            f"the most is asked by {most.model} on {most.gpu}, {most.context_tokens} tokens at "
            f"{most.hit_percent:g} %: {most.required_gbytes_per_s:.2f} GB/s",
        ]


def overlap_rows(warm: float, body: float, cold: float) -> Iterator[OverlapRow]:
    """A row for each prefill of the paper's tables, beside rates in GB/s."""
    for prefill in PREFILLS:
        yield OverlapRow(
            gpu=prefill.gpu,
            model=prefill.model,
            context_tokens=prefill.context_tokens,
            hit_percent=100 * prefill.hit_rate,
            cached_gib=prefill.cached_bytes / 2**30,
            layer_compute_ms=prefill.total_ms / MODELS[prefill.model].num_layers,
            required_gbytes_per_s=required_gbytes_per_s(prefill),
            warm_gbytes_per_s=warm,
            body_gbytes_per_s=body,
            cold_gbytes_per_s=cold,
        )


def required_gbytes_per_s(prefill: Prefill) -> float:
    """A layer's bytes over a layer's time, which is all bytes over all of the time."""
    return prefill.cached_bytes / prefill.total_ms / 1e6


def _draw(panel: Axes, rows: Sequence[OverlapRow], value: Callable[[OverlapRow], float]) -> None:
    contexts = sorted({row.context_tokens for row in rows})
    hits = sorted({row.hit_percent for row in rows})
    by_place = {(row.context_tokens, row.hit_percent): value(row) for row in rows}
    heatmap(
        panel,
        [f"{context // 1024}K" for context in contexts],
        [f"{hit:g}%" for hit in hits],
        [[by_place.get((context, hit)) for hit in hits] for context in contexts],
    )


def _gbytes_per_s(
    server: Server, geometry: Geometry, repeats: int, *transports: str
) -> dict[str, float]:
    """Of one delivery at a time by each transport, in turn; medians."""
    keys = geometry.keys()
    times_s: dict[str, list[float]] = {transport: [] for transport in transports}
    with server.client() as client, ExitStack() as stack:
        bucket = client.kv_bucket("overlap", geometry.layout(), create=True)
        target = client.shared_memory_target(geometry.payload_bytes)
        stack.callback(target.close)
        chunks = target.chunks(geometry.chunk_count, geometry.layout())
        fill_chunks(chunks, geometry, keys)
        bucket.put(keys, chunks)
        for transport in transports:
            check_delivery(bucket, geometry, keys, transport)
        for _ in range(repeats):
            for transport in transports:
                begun_s = time.monotonic()
                with bucket.fetch(
                    keys, delivery="layerwise", transport=transport, target=target
                ) as delivery:
                    delivery.wait()
                times_s[transport].append(time.monotonic() - begun_s)
    return {
        transport: geometry.payload_bytes / statistics.median(taken_s) / 1e9
        for transport, taken_s in times_s.items()
    }
