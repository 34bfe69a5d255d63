"""What gets are served with."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.settings import Settings
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.counts.storage_counts import StorageCounts
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books
from objectcache_storage_server.scheduling.windows.find_windows import WindowFinder
from objectcache_storage_server.tracing.trace_book import TraceBook
from objectcache_storage_server.transports.targets import TargetRegistry


@dataclass(frozen=True, slots=True)
class GetMeans:
    """Of one storage server; `staging` is what fabrics write from."""

    settings: Settings
    calls: EngineCalls
    books: Books
    gates: Gates
    schedule: Schedule
    windows: WindowFinder
    targets: TargetRegistry
    staging: StagingMemory
    counts: StorageCounts
    traces: TraceBook
