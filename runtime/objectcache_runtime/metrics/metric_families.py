"""From cells to what Prometheus reads. Imports prometheus-client, which only servers have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from objectcache_runtime.metrics.metric_cells import Histogram

PREFIX = "objectcache_"

Labelled = Iterable[tuple[tuple[str, ...], float]]  # values of the labels, and the number


def counter(name: str, text: str, labels: tuple[str, ...], values: Labelled) -> Metric:
    """A number that only grows; `name` ends with _total."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def gauge(name: str, text: str, labels: tuple[str, ...], values: Labelled) -> Metric:
    """A number as it is now."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str,
    text: str,
    labels: tuple[str, ...],
    cells: Iterable[tuple[tuple[str, ...], Histogram]],
) -> Metric:
    """How observations are distributed."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, cell in cells:
        buckets, total = cell.buckets()
        family.add_metric(label_values, buckets, total)
    return family


def total(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return counter(name, text, (), [((), value)])


def level(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return gauge(name, text, (), [((), value)])


class FamilyCollector(Collector):
    """Collects what a function yields, at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        return self._families()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not collect."""
        return ()


class MetricsPage:
    """One process's metrics as text: its own families, and what the process itself uses."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FamilyCollector(families))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def text(self) -> bytes:
        """The page, in Prometheus' text format. Blocks for milliseconds; from any thread."""
        return generate_latest(self._registry)
