"""How long an engine's calls take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from objectcache_runtime.metrics.metric_cells import SHORT_SECONDS, Cells, Counts, Histogram
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.passing_engine import PassingEngine

T = TypeVar("T")

# Of the contract, by method; `read` is what deliveries read, a fragment each.
TIMED = frozenset(
    (
        *("stage", "stage_prefix", "commit", "delete"),
        *("stat", "match", "open_many", "read_small", "scan"),
    )
)
READ = "read"


class EngineTimes:
    """Seconds and failures by operation."""

    def __init__(self) -> None:
        self.seconds: Cells[str, Histogram] = Cells(lambda: Histogram(SHORT_SECONDS))
        self.failures: Counts[str] = Counts()
        self.reads = self.seconds[READ]


class TimedEngine(PassingEngine):
    """Counts its calls in `times`."""

    def __init__(self, inner: Engine, times: EngineTimes) -> None:
        super().__init__(inner)
        self._times = times

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        if operation not in TIMED:
            return action()
        begun_s = time.perf_counter()
        try:
            return action()
        except BaseException:
            self._times.failures.add(operation)
            raise
        finally:
            self._times.seconds[operation].observe(time.perf_counter() - begun_s)
