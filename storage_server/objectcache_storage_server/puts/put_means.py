"""What puts are served with."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.settings import Settings
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.counts.storage_counts import StorageCounts
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.transports.targets import TargetRegistry


@dataclass(frozen=True, slots=True)
class PutMeans:
    """Of one storage server; `staging` is what fabrics read into."""

    settings: Settings
    calls: EngineCalls
    gates: Gates
    targets: TargetRegistry
    staging: StagingMemory
    counts: StorageCounts
