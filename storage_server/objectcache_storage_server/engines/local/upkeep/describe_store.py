"""What operators see of the local stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from objectcache_schemas.operators.engine_status import EngineStatus, ExtentClass, PathStatus
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.reads.device_sharing import Sharing
from objectcache_storage_server.engines.local.upkeep.evict_chunks import Evictor
from objectcache_storage_server.engines.local.upkeep.upkeep_thread import Upkeep
from objectcache_storage_server.engines.local.volumes.volume import IoPath

PATH_NAMES = {IoPath.PAGE_CACHE: "page_cache", IoPath.DIRECT: "direct"}


def engine_status(
    name: str,
    stored: StoredObjects,
    evictor: Evictor,
    upkeep: Upkeep,
    *,
    with_extents: bool = True,
) -> EngineStatus:
    """The state of now; the extents are counted one by one."""
    holdings = stored.holdings
    with holdings.lock:
        extents = holdings.extents.used[: None if with_extents else 0].copy()
        free_bytes = holdings.allocator.free_bytes
        largest_free_bytes = holdings.allocator.largest_free_bytes
        encoded_bytes, decoded_bytes = holdings.encoded_bytes, holdings.decoded_bytes
        objects, live_bytes = len(holdings.objects), sum(holdings.stored_bytes.values())
    extents = extents[extents["is_used"] & ~extents["is_freed"]]
    return EngineStatus(
        engine=name,
        objects=objects,
        damaged=stored.damage.total,
        flush_failure=stored.flush_latch.failure,
        capacity_bytes=holdings.capacity_bytes(),
        allocated_bytes=holdings.allocated_bytes,
        live_bytes=live_bytes,
        encoded_bytes=encoded_bytes,
        decoded_bytes=decoded_bytes,
        free_bytes=free_bytes,
        largest_free_bytes=largest_free_bytes,
        data_files=len(stored.volume.segments()),
        extents=extent_classes(extents),
        page_cache_budget_bytes=upkeep.budget.bytes,
        page_cache_budget_source=upkeep.budget.source,
        paths=tuple(_path_status(stored, extents, path) for path in sorted(stored.volume.paths)),
        device_path=stored.volume.device_path,
        cache_path=stored.volume.cache_path,
        stale_reads=stored.path_use.stale_reads,
        unflushed_extents=len(stored.flusher),
        evicted_objects=evictor.evicted_objects,
        evicted_bytes=evictor.evicted_bytes,
        expired_objects=upkeep.expired_objects,
        compacted_objects=upkeep.compactor.moved_objects,
        compacted_bytes=upkeep.compactor.moved_bytes,
        compaction=upkeep.compactor.state,
        compaction_candidates=upkeep.compactor.candidates,
        encoding_waiting_bytes=upkeep.compactor.waiting_bytes,
        reencoded_objects=upkeep.compactor.reencoded_objects,
        reencoded_bytes=upkeep.compactor.reencoded_bytes,
        when_full=upkeep.settings.when_full,
    )


def extent_classes(extents: npt.NDArray[np.void]) -> tuple[ExtentClass, ...]:
    """Extents by their number of slots."""
    classes: list[ExtentClass] = []
    for slots in np.unique(extents["slots"]).tolist():
        of_class = extents[extents["slots"] == slots]
        classes.append(
            ExtentClass(
                slots=slots,
                count=len(of_class),
                live_slots=int(of_class["live_slots"].sum()),
                bytes=int(of_class["length_bytes"].sum()),
            )
        )
    return tuple(classes)


def _path_status(stored: StoredObjects, extents: npt.NDArray[np.void], path: IoPath) -> PathStatus:
    counts, chooser = stored.path_use.counts[path], stored.path_use.devices[path].chooser
    on_path = extents[extents["path"] == path]
    return PathStatus(
        name=PATH_NAMES[path],
        extents=len(on_path),
        extent_bytes=int(on_path["length_bytes"].sum()),
        read_bytes=counts.read_bytes,
        hit_bytes=counts.hit_bytes,
        overlap=chooser.state,
        intra_bytes_per_s=chooser.rates_bytes_per_s[Sharing.INTRA],
        cross_bytes_per_s=chooser.rates_bytes_per_s[Sharing.CROSS],
    )
