"""How long an engine's calls take.

Its methods are replaced on the object itself. A wrapper of another class would have to name every
method of the contract: one that it forgot would run the contract's slow default instead of the
engine's own, and nobody would see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from objectcache_runtime.metrics.metric_cells import SHORT_SECONDS, Cells, Counts, Histogram
from objectcache_storage_server.engines.base import Engine

P = ParamSpec("P")
T = TypeVar("T")

# Of the contract, by method; `read` is what deliveries read, a fragment each.
TIMED = (
    *("stage", "stage_prefix", "commit", "delete"),
    *("stat", "match", "open_many", "read_small", "scan"),
)
READ = "read"


class EngineTimes:
    """Seconds and failures by operation."""

    def __init__(self) -> None:
        self.seconds: Cells[str, Histogram] = Cells(lambda: Histogram(SHORT_SECONDS))
        self.failures: Counts[str] = Counts()
        self.reads = self.seconds[READ]

    def timed(self, operation: str, method: Callable[P, T]) -> Callable[P, T]:
        """The method, with its calls counted."""
        observe = self.seconds[operation].observe
        failures, clock = self.failures, time.perf_counter

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begun_s = clock()
            try:
                result = method(*args, **kwargs)
            except BaseException:
                failures.add(operation)
                observe(clock() - begun_s)
                raise
            observe(clock() - begun_s)
            return result

        return call


def time_engine(engine: Engine, times: EngineTimes) -> None:
    """Have the engine's calls counted from now on."""
    for operation in TIMED:
        setattr(engine, operation, times.timed(operation, getattr(engine, operation)))
