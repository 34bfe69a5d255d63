"""Deletes the objects of extents that no version names any more, when their grace has passed.

The objects go first, then a record says so: what a crash leaves undone is done again. An extent in
the graveyard never comes back, so a server that has lost the lease and does not know it yet does no
harm here either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from objectcache_storage_server.engines.shared.index.extent_rows import BuriedExtent
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.lead_upkeep import UpkeepLead
from objectcache_storage_server.engines.shared.versions import ExtentName
from objectcache_storage_server.engines.stores.shared_store import SharedStore

PAGE_EXTENTS = 256  # looked at, and deleted, at once
CALL_S = 60.0  # for their objects, and for a record
NAMES_MAX = 1000  # of one call


class Graveyard:
    """Used by one thread."""

    def __init__(self, catalog: LogCatalog, store: SharedStore, lead: UpkeepLead) -> None:
        self._catalog = catalog
        self._store = store
        self._lead = lead

    def empty(self, end: int) -> int:
        """Delete what records below number `end` have buried; returns the bytes that came free.

        Raises `NotLeading`, `StoreTimeout`, `Unavailable`; the rest goes the next time.
        """
        freed_bytes = 0
        for due in self._due(end):
            if not self._lead.is_ours:
                break
            freed_bytes += self._delete(due)
        return freed_bytes

    def delete_objects(self, end: int) -> None:
        """The same objects, without a record: where the store has no room for one, this makes some,
        and needs no lease. Raises `StoreTimeout`, `Unavailable`.
        """
        for due in self._due(end):
            self._delete_objects(due)

    def _due(self, end: int) -> Iterator[list[BuriedExtent]]:
        """Pages of what records below number `end` have buried."""
        after: ExtentName | None = None
        while True:
            with self._catalog.reading() as view:
                page = view.graveyard(after, PAGE_EXTENTS)
            if not page:
                return
            after = page[-1].name
            if due := [extent for extent in page if extent.emptied_by < end]:
                yield due

    def _delete_objects(self, due: Sequence[BuriedExtent]) -> None:
        deadline_s = time.monotonic() + CALL_S
        names = list(_object_names(due))
        for begin in range(0, len(names), NAMES_MAX):
            self._store.delete(names[begin : begin + NAMES_MAX], deadline_s)

    def _delete(self, due: Sequence[BuriedExtent]) -> int:
        self._delete_objects(due)

        def act(change: ReplayedChange) -> int:
            there = [extent for extent in due if change.is_buried(extent.name)]
            if there:
                change.bury([extent.name for extent in there])
            return sum(extent.shape.size_bytes for extent in there)

        return self._lead.change(act, time.monotonic() + CALL_S)


def _object_names(extents: Sequence[BuriedExtent]) -> Iterator[str]:
    for extent in extents:
        for piece in range(extent.shape.object_count):
            yield extent.name.object_name(piece)
