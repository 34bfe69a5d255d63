"""An engine's metrics by name."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from objectcache_runtime.metrics.metric_families import counter, histogram, level, total
from objectcache_schemas.operators.engine_status import CacheStatus, EngineStatus, SharedStatus
from objectcache_storage_server.counts.engine_times import EngineTimes

# By the field of `EngineStatus` that is told.
_LEVELS = {
    "objects": "Objects that are stored.",
    "capacity_bytes": "Bytes that objects may take.",
    "allocated_bytes": "Bytes that extents take.",
    "live_bytes": "Bytes of objects.",
    "encoded_bytes": "Bytes that extents with encoded slices take.",
    "decoded_bytes": "Bytes of the slices in them.",
    "free_bytes": "Bytes between extents.",
    "largest_free_bytes": "The longest run of free bytes.",
    "page_cache_budget_bytes": "Page cache that extents may take.",
    "unflushed_extents": "Extents that a power loss would lose.",
    "compaction_candidates": "Objects that could lie better.",
    "encoding_waiting_bytes": "Bytes of chunks that are to be encoded, or decoded, where they lie.",
}
_TOTALS = {
    "stale_reads": (
        "Pieces that the page cache had otherwise than the device, which had them right."
    ),
    "evicted_objects": "Objects that went for want of space.",
    "evicted_bytes": "Bytes of objects that went for want of space.",
    "expired_objects": "Objects that went because of their bucket's ttl_s.",
    "compacted_objects": "Objects that were moved together.",
    "compacted_bytes": "Bytes of objects that were moved together.",
    "reencoded_objects": "Chunks that were encoded, or decoded, because of a bucket's policy.",
    "reencoded_bytes": "Decoded bytes of them.",
}
# By the field of `SharedStatus`.
_SHARED_LEVELS = {
    "buried_extents": "Deleted extents whose bytes are kept for readers.",
    "buried_bytes": "Bytes of them.",
    "log_end": "Number of the next record of the shared store's log.",
    "lag_records": "Records that this server has heard of and not replayed.",
    "behind_s": "Seconds since this server was last known to be at the log's end.",
    "checkpoint": "Number of the first record that the newest checkpoint lacks.",
    "writers": "Servers of the shared store that live.",
    "fenced_writers": "Dead servers whose leftovers are not deleted yet.",
    "leads_upkeep": "1 where this server evicts and deletes for all.",
}
_SHARED_TOTALS = {
    "freed_bytes": "Bytes of deleted extents that this server has removed.",
    "swept_objects": "Leftovers of dead servers that this server has removed.",
    "lost_races": "Records that this server made again because another's came first.",
}
# By the field of `CacheStatus`.
_CACHE_LEVELS = {
    "capacity_bytes": "Bytes that the cache of the shared store may take.",
    "used_bytes": "Bytes that it takes.",
}
_CACHE_TOTALS = {
    "hits": "Reads of the store's objects that the cache answered.",
    "hit_bytes": "Bytes of them.",
    "misses": "Reads of the store's objects that the store was asked for.",
    "miss_bytes": "Bytes of them.",
    "written_bytes": "Bytes that were written into the cache.",
    "passed_over_bytes": "Bytes that the cache would have kept, and had no memory for.",
    "evicted_objects": "The store's objects that left the cache for others.",
    "damaged_objects": "The store's objects that left it because what was read did not match.",
}


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
    for field, text in _LEVELS.items():
        yield level(f"engine_{field}", text, getattr(status, field))
    yield level(
        "engine_flush_failed",
        "1 from a flush that failed until a restart: nothing is stored.",
        bool(status.flush_failure),
    )
    yield total(
        "engine_damaged_objects_total",
        "Objects that were dropped because their bytes failed a checksum.",
        status.damaged,
    )
    for field, text in _TOTALS.items():
        yield total(f"engine_{field}_total", text, getattr(status, field))
    yield from _shared_families(status.shared or SharedStatus())


def _shared_families(status: SharedStatus) -> Iterator[Metric]:
    for field, text in _SHARED_LEVELS.items():
        yield level(f"shared_{field}", text, getattr(status, field))
    for field, text in _SHARED_TOTALS.items():
        yield total(f"shared_{field}_total", text, getattr(status, field))
    yield from _cache_families(status.cache or CacheStatus())


def _cache_families(status: CacheStatus) -> Iterator[Metric]:
    yield level(
        "shared_cache_failed",
        "1 from an error of the cache's device until a restart: the store is asked for everything.",
        bool(status.failure),
    )
    for field, text in _CACHE_LEVELS.items():
        yield level(f"shared_cache_{field}", text, getattr(status, field))
    for field, text in _CACHE_TOTALS.items():
        yield total(f"shared_cache_{field}_total", text, getattr(status, field))
