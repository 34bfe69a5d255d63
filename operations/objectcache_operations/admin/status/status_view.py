"""The engine's status on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from objectcache_operations.admin.tables import facts_of
from objectcache_runtime.amounts import rate_text, share_text, size_text
from objectcache_schemas.operators.engine_status import (
    CacheStatus,
    EngineStatus,
    ExtentClass,
    SharedStatus,
)

EXTENT_ROWS_MAX = 6  # the extents left over by puts may have any number of slots up to 256
BAR_CELLS = 12
NAME_CELLS = 11


def status_view(status: EngineStatus) -> RenderableType:
    """All that the engine says; an engine without extents has little to say."""
    parts: list[RenderableType] = [facts_of(_head(status), NAME_CELLS)]
    if status.shared is not None:
        parts.append(facts_of(_shared(status, status.shared), NAME_CELLS))
        return Group(*parts)
    if not status.capacity_bytes:
        parts.append(Text("Capacity, extents and paths are known of engine local only."))
        return Group(*parts)
    parts.append(facts_of(_space(status), NAME_CELLS))
    if status.extents:
        parts.append(_extents_table(status.extents))
    if status.paths:
        parts.append(_paths_table(status))
    parts.append(facts_of(_background(status), NAME_CELLS))
    return Group(*parts)


def _head(status: EngineStatus) -> Iterator[tuple[str, str]]:
    yield "engine", status.engine
    if status.objects or status.capacity_bytes:
        yield "objects", f"{status.objects:,}"
    yield "damaged", f"{status.damaged:,} dropped since the start"
    if status.flush_failure:
        yield "read only", f"{status.flush_failure}; see to the device, then restart"


def _shared(status: EngineStatus, shared: SharedStatus) -> Iterator[tuple[str, str]]:
    """A store that several servers share, as one of them knows it."""
    limit = f" of {size_text(status.capacity_bytes)}" if status.capacity_bytes else ""
    yield (
        "space",
        f"{size_text(status.allocated_bytes)}{limit}, {size_text(status.live_bytes)} live, "
        f"in {shared.extents:,} extents",
    )
    yield (
        "graveyard",
        f"{size_text(shared.buried_bytes)} in {shared.buried_extents:,} extents, kept for readers",
    )
    if shared.failure:
        yield "degraded", shared.failure
    lag = f"{shared.lag_records:,} records" if shared.lag_is_known else "unknown how many"
    yield (
        "log",
        f"replayed up to record {shared.log_end:,}, {lag} to replay, "
        f"last reached {shared.behind_s:.0f} s ago; "
        f"checkpoint {shared.checkpoint:,}; {shared.lost_races:,} races lost",
    )
    yield (
        "servers",
        f"{shared.writers:,} alive, {shared.fenced_writers:,} dead with leftovers; "
        f"upkeep is {'this' if shared.leads_upkeep else 'another'} server's",
    )
    yield (
        "eviction",
        f"when full: {status.when_full}; evicted {status.evicted_objects:,} objects "
        f"({size_text(status.evicted_bytes)}), expired {status.expired_objects:,}",
    )
    yield (
        "removed",
        f"{size_text(shared.freed_bytes)} of the graveyard, {shared.swept_objects:,} leftovers",
    )
    if shared.cache is not None:
        yield "cache", _cache(shared.cache)


def _cache(cache: CacheStatus) -> str:
    """The shared store's objects on a device of this server."""
    if cache.failure:
        return f"off, {cache.failure}; see to the device, then restart"
    asked_bytes = cache.hit_bytes + cache.miss_bytes
    return (
        f"{size_text(cache.used_bytes)} of {size_text(cache.capacity_bytes)}; answered "
        f"{size_text(cache.hit_bytes)} of {size_text(asked_bytes)} "
        f"({share_text(cache.hit_bytes, asked_bytes)}), dropped {cache.damaged_objects:,} objects"
    )


def _space(status: EngineStatus) -> Iterator[tuple[str, str]]:
    share = share_text(status.allocated_bytes, status.capacity_bytes)
    yield (
        "capacity",
        f"{_bar(status.allocated_bytes / status.capacity_bytes)} "
        f"{size_text(status.allocated_bytes)} of {size_text(status.capacity_bytes)} "
        f"({share}), {size_text(status.live_bytes)} live",
    )
    yield (
        "free runs",
        f"{size_text(status.free_bytes)} between extents, the largest "
        f"{size_text(status.largest_free_bytes)}; {status.data_files:,} data files",
    )
    if status.encoded_bytes or status.encoding_waiting_bytes:
        ratio = status.decoded_bytes / status.encoded_bytes if status.encoded_bytes else 1
        yield (
            "encoded",
            f"{size_text(status.decoded_bytes)} of slices in {size_text(status.encoded_bytes)} "
            f"(1/{ratio:.2f}), {size_text(status.encoding_waiting_bytes)} to change",
        )
    in_cache_bytes = sum(path.extent_bytes for path in status.paths if path.name == "page_cache")
    budget_bytes = status.page_cache_budget_bytes
    source = f" ({status.page_cache_budget_source})" if status.page_cache_budget_source else ""
    yield (
        "residency",
        f"{size_text(in_cache_bytes)} of {size_text(budget_bytes)} page cache "
        f"({share_text(in_cache_bytes, budget_bytes)}){source}",
    )
    yield "device path", status.device_path or "-"
    yield "cache path", status.cache_path or "-"
    yield "unflushed", f"{status.unflushed_extents:,} extents"


def _bar(share: float) -> str:
    full = min(BAR_CELLS, max(0, round(share * BAR_CELLS)))
    return "[" + "#" * full + "." * (BAR_CELLS - full) + "]"


def _extents_table(extents: Sequence[ExtentClass]) -> Table:
    """The classes that hold most bytes, by slots; the others in one row."""
    by_bytes = sorted(extents, key=lambda one: one.bytes, reverse=True)
    shown = sorted(by_bytes[:EXTENT_ROWS_MAX], key=lambda one: one.slots)
    rest = by_bytes[EXTENT_ROWS_MAX:]
    table = _table("slots (M)", "extents", "bytes", "slots taken")
    for one in shown:
        taken = share_text(one.live_slots, one.slots * one.count)
        table.add_row(f"{one.slots:,}", f"{one.count:,}", size_text(one.bytes), taken)
    if rest:
        slots = sum(one.slots * one.count for one in rest)
        table.add_row(
            f"{len(rest):,} others",
            f"{sum(one.count for one in rest):,}",
            size_text(sum(one.bytes for one in rest)),
            share_text(sum(one.live_slots for one in rest), slots),
        )
    return table


def _paths_table(status: EngineStatus) -> Table:
    columns = ("extents", "bytes", "read", "hits", "overlap", "intra", "cross")
    table = _table("path", *columns, gap_cells=1)  # all of it in 80 cells
    for path in status.paths:
        is_cached = path.name == "page_cache"
        table.add_row(
            path.name.replace("_", " "),
            f"{path.extents:,}",
            size_text(path.extent_bytes),
            size_text(path.read_bytes),
            share_text(path.hit_bytes, path.read_bytes) if is_cached else "-",
            path.overlap,
            rate_text(path.intra_bytes_per_s),
            rate_text(path.cross_bytes_per_s),
        )
    return table


def _table(first: str, *others: str, gap_cells: int = 2) -> Table:
    table = Table(box=None, padding=(0, gap_cells, 0, 0), header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _background(status: EngineStatus) -> Iterator[tuple[str, str]]:
    yield (
        "eviction",
        f"when full: {status.when_full or '-'}; evicted {status.evicted_objects:,} objects "
        f"({size_text(status.evicted_bytes)}), expired {status.expired_objects:,}",
    )
    yield (
        "compaction",
        f"{status.compaction or '-'}; moved {status.compacted_objects:,} objects "
        f"({size_text(status.compacted_bytes)}), {status.compaction_candidates:,} could lie better",
    )
