"""An engine's metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from objectcache_runtime.metrics.metric_families import alone, counter, gauge, histogram
from objectcache_schemas.operators.engine_status import EngineStatus
from objectcache_storage_server.counts.engine_times import EngineTimes

_Numbers = tuple[tuple[str, str, Callable[[EngineStatus], float]], ...]

_LEVELS: _Numbers = (
    ("engine_objects", "Objects that are stored.", lambda status: status.objects),
    (
        "engine_capacity_bytes",
        "Bytes that objects may take.",
        lambda status: status.capacity_bytes,
    ),
    (
        "engine_allocated_bytes",
        "Bytes that extents take.",
        lambda status: status.allocated_bytes,
    ),
    ("engine_live_bytes", "Bytes of objects.", lambda status: status.live_bytes),
    ("engine_free_bytes", "Bytes between extents.", lambda status: status.free_bytes),
    (
        "engine_largest_free_bytes",
        "The longest run of free bytes.",
        lambda status: status.largest_free_bytes,
    ),
    (
        "engine_page_cache_budget_bytes",
        "Page cache that extents may take.",
        lambda status: status.page_cache_budget_bytes,
    ),
    (
        "engine_unflushed_extents",
        "Extents that a power loss would lose.",
        lambda status: status.unflushed_extents,
    ),
    (
        "engine_flush_failed",
        "1 from a flush that failed until a restart: nothing is stored.",
        lambda status: bool(status.flush_failure),
    ),
    (
        "engine_compaction_candidates",
        "Objects that could lie better.",
        lambda status: status.compaction_candidates,
    ),
)
_TOTALS: _Numbers = (
    (
        "engine_damaged_objects_total",
        "Objects that were dropped because their bytes failed a checksum.",
        lambda status: status.damaged,
    ),
    (
        "engine_stale_reads_total",
        "Pieces that the page cache had otherwise than the device, which had them right.",
        lambda status: status.stale_reads,
    ),
    (
        "engine_evicted_objects_total",
        "Objects that went for want of space.",
        lambda status: status.evicted_objects,
    ),
    (
        "engine_evicted_bytes_total",
        "Bytes of objects that went for want of space.",
        lambda status: status.evicted_bytes,
    ),
    (
        "engine_expired_objects_total",
        "Objects that went because of their bucket's ttl_s.",
        lambda status: status.expired_objects,
    ),
    (
        "engine_compacted_objects_total",
        "Objects that were moved together.",
        lambda status: status.compacted_objects,
    ),
    (
        "engine_compacted_bytes_total",
        "Bytes of objects that were moved together.",
        lambda status: status.compacted_bytes,
    ),
)


def engine_call_families(times: EngineTimes) -> Iterator[Metric]:
    """How long its calls take, and which failed."""
    yield histogram(
        "engine_operation_seconds",
        "How long the engine's calls took.",
        ("operation",),
        [((operation,), cell) for operation, cell in times.seconds.items()],
    )
    yield counter(
        "engine_operation_failures_total",
        "Calls of the engine that raised an error, a missing object included.",
        ("operation",),
        [((operation,), count) for operation, count in times.failures.items()],
    )


def engine_families(status: EngineStatus) -> Iterator[Metric]:
    """What it holds and what it has done."""
    paths = status.paths
    yield counter(
        "engine_read_bytes_total",
        "Bytes that were read, by the path that their extent is on.",
        ("path",),
        [((path.name,), path.read_bytes) for path in paths],
    )
    yield counter(
        "engine_hit_bytes_total",
        "Of them, bytes that were found in memory.",
        ("path",),
        [((path.name,), path.hit_bytes) for path in paths],
    )
    for name, text, level in _LEVELS:
        yield gauge(name, text, (), alone(level(status)))
    for name, text, total in _TOTALS:
        yield counter(name, text, (), alone(total(status)))
