"""What metrics are read from."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_storage_server.accounts.in_flight import InFlight
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.counts.storage_counts import StorageCounts
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.s3.lifecycle import LifecycleCounts
from objectcache_storage_server.transports.targets import TargetRegistry


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one storage server; `staging` is what fabrics write from and read into."""

    counts: StorageCounts
    engine: Engine
    gates: Gates
    schedule: Schedule
    in_flight: InFlight
    targets: TargetRegistry
    staging: StagingMemory
    lifecycle: LifecycleCounts
