"""What puts are served with, and whatever else changes objects, buckets or accounts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.settings import Settings
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.counts.storage_counts import StorageCounts
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books
from objectcache_storage_server.transports.targets import TargetRegistry


@dataclass(frozen=True, slots=True)
class StoreMeans:
    """Of one storage server; `staging` is what fabrics read into."""

    settings: Settings
    calls: EngineCalls
    books: Books
    gates: Gates
    targets: TargetRegistry
    staging: StagingMemory
    counts: StorageCounts
    # no part is counted while another one is; between a look at a configuration and its change
    counting_parts: threading.Lock = field(default_factory=threading.Lock)
    configuring: threading.Lock = field(default_factory=threading.Lock)
