"""The connector's counters in vLLM's own log line and among its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from objectcache_schemas.limits import MIB

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as kv_metrics  # pyright: ignore[reportMissingImports]

    KVConnectorPromMetrics: Any = kv_metrics.KVConnectorPromMetrics
    KVConnectorStats: Any = kv_metrics.KVConnectorStats
except ImportError:
    KVConnectorPromMetrics = KVConnectorStats = object

PREFIX = "vllm:objectcache_"
# Those of workers are sums over the ranks, each of which has its part of every block.
COUNTERS: Mapping[str, str] = {
    "lookups": "Prompts that the store was asked about.",
    "failed_lookups": "Lookups that failed; they count as nothing stored.",
    "hits": "Requests that the store had a prefix of which was loaded.",
    "hit_tokens": "Tokens of those prefixes.",
    "parked_hits": "Of those requests, the ones that were parked until it was loaded.",
    "loads": "Loads that ended, one for each hit and rank.",
    "failed_loads": "Loads that failed, or were cut short; what they lack is computed.",
    "loaded_blocks": "Blocks that were loaded, on each rank.",
    "loaded_bytes": "Bytes of these blocks.",
    "load_seconds": "Time of loads, from when they are asked for until the last layer is there.",
    "wait_seconds": "Time that steps waited for layers.",
    "saved_blocks": "Blocks that were put, on each rank.",
    "saved_bytes": "Bytes of these blocks.",
    "dropped_blocks": "Blocks that were not put, for lack of staging memory or after failed loads.",
    "failed_puts": "Puts of up to 64 blocks that failed.",
}


class Increments:
    """What totals have grown by since they were last looked at."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The growth of each; without those that have not grown."""
        grown = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._before = dict(totals)
        return {name: count for name, count in grown.items() if count}


@dataclass
class ObjectCacheStats(KVConnectorStats):
    """Increments of `COUNTERS`, from a worker or the scheduler, on their way to vLLM's loggers."""

    data: dict[str, Any] = field(default_factory=dict[str, Any])

    def reset(self) -> None:
        """Begin at nothing."""
        self.data = {}

    def aggregate(self, other: ObjectCacheStats) -> ObjectCacheStats:
        """Both together."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows of an interval."""
        shown: dict[str, int | float] = {}
        for name in COUNTERS:
            count = self.data.get(name, 0)
            if count and name.endswith("_bytes"):
                shown[f"{name.removesuffix('_bytes')}_mib"] = round(count / MIB, 1)
            elif count:
                shown[name] = round(count, 3)
        return shown


class ObjectCachePromMetrics(KVConnectorPromMetrics):
    """A counter for each of `COUNTERS`, labelled by vLLM with the model and the engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._of_engines = {
            name: self._per_engine(name, meaning) for name, meaning in COUNTERS.items()
        }

    def _per_engine(self, name: str, meaning: str) -> dict[int, Any]:
        counter = self._counter_cls(
            name=PREFIX + name,
            documentation=meaning,
            labelnames=self._labelnames,
        )
        labels = self.per_engine_labelvalues
        return {engine: counter.labels(*values) for engine, values in labels.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine has counted."""
        for name, count in transfer_stats_data.items():
            if name in self._of_engines:
                self._of_engines[name][engine_idx].inc(count)
