"""What operators see of a shared store, as one of its servers knows it."""

from __future__ import annotations

from objectcache_schemas.operators.engine_status import CacheStatus, EngineStatus, SharedStatus
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import SharedUpkeep


def shared_status(
    name: str,
    catalog: LogCatalog,
    upkeep: SharedUpkeep,
    damaged: int,
    flush_failure: str,
    cache: CacheStatus | None,
) -> EngineStatus:
    """The state of what this server has replayed."""
    with catalog.reading() as view:
        state, totals = view.state, view.all_totals()
        writers = view.writers()
    lag_records = catalog.lag_records
    evictor, rules = upkeep.evictor, upkeep.rules
    fenced = sum(row.fenced_by is not None for row in writers.values())
    return EngineStatus(
        engine=name,
        objects=totals.object_count,
        damaged=damaged,
        flush_failure=flush_failure,
        capacity_bytes=evictor.capacity_bytes,
        allocated_bytes=state.allocated_bytes,
        live_bytes=totals.stored_bytes,
        evicted_objects=evictor.evicted_objects,
        evicted_bytes=evictor.evicted_bytes,
        expired_objects=upkeep.expiry.expired_objects,
        when_full="evict" if rules.evicts else "refuse",
        shared=SharedStatus(
            extents=state.extent_count,
            buried_extents=state.buried_count,
            buried_bytes=state.buried_bytes,
            freed_bytes=upkeep.freed_bytes,
            swept_objects=upkeep.sweep.deleted_objects,
            log_end=state.end,
            lag_records=lag_records or 0,
            lag_is_known=lag_records is not None,
            failure=catalog.store_failure,
            behind_s=catalog.behind_s,
            lost_races=catalog.lost_races,
            checkpoint=state.checkpoint or 0,
            writers=len(writers) - fenced,
            fenced_writers=fenced,
            leads_upkeep=upkeep.lead.is_leading(),
            cache=cache,
        ),
    )
