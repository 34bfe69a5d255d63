"""Deletes what dead writers have left behind: objects that no extent of the index names.

A writer that was fenced names nothing new, from the record on that says so. So an object of it
whose extent is named neither by a version nor by the graveyard, in an index that has this record,
will never be named. Its server may yet have been about to store some, and may wake up and do so:
the writer is forgotten only when a search that began a grace after the fencing found nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.lead_upkeep import UpkeepLead
from objectcache_storage_server.engines.shared.upkeep.object_names import (
    DATA_PREFIX,
    DataObject,
    data_object,
    pages,
)
from objectcache_storage_server.engines.shared.versions import writer_prefix
from objectcache_storage_server.engines.stores.shared_store import SharedStore

LISTING_S = 1800.0  # that a search may take
CALL_S = 60.0  # for a page of deletions, and for a record


class LeftoverSweep:
    """Used by one thread."""

    def __init__(self, catalog: LogCatalog, store: SharedStore, lead: UpkeepLead) -> None:
        self._catalog = catalog
        self._store = store
        self._lead = lead
        self.deleted_objects = 0  # since the start

    def sweep(self, end: int) -> None:
        """Delete leftovers of writers that records below number `end` have fenced, and forget those
        that have none. Raises `NotLeading`, `StoreTimeout`, `Unavailable`.
        """
        with self._catalog.reading() as view:
            dead = {
                writer
                for writer, row in view.writers().items()
                if row.fenced_by is not None and row.fenced_by < end
            }
        if not dead:
            return
        left_by = set[int]()
        for page in self._listed(dead):
            if not self._lead.is_ours:
                return
            with self._catalog.reading() as view:
                leftovers = unnamed(view, [each for each in page if each.extent.writer in dead])
            left_by.update(each.extent.writer for each in leftovers)
            self._delete(leftovers)
        clean = sorted(dead - left_by)
        if clean:
            self._lead.change(lambda change: _forget(change, clean), time.monotonic() + CALL_S)

    def _listed(self, dead: Collection[int]) -> Iterator[list[DataObject]]:
        """Objects of these writers, and of others where one listing does for several."""
        prefix = writer_prefix(*dead) if len(dead) == 1 else DATA_PREFIX
        listing = self._store.list_objects(prefix, time.monotonic() + LISTING_S)
        return pages(each for each in map(data_object, listing) if each is not None)

    def _delete(self, leftovers: Sequence[DataObject]) -> None:
        if leftovers:
            names = [each.name for each in leftovers]
            self._store.delete(names, time.monotonic() + CALL_S)
            self.deleted_objects += len(names)


def unnamed(view: ReplayedView, objects: Sequence[DataObject]) -> list[DataObject]:
    """Those whose extent is named neither by a version nor by the graveyard."""
    extents = {each.extent for each in objects}
    named = {name for name in extents if view.extent(name) is not None or view.is_buried(name)}
    return [each for each in objects if each.extent not in named]


def _forget(change: ReplayedChange, writers: Sequence[int]) -> None:
    for writer in writers:
        row = change.writer_row(writer)
        if row is not None and row.fenced_by is not None:
            change.forget_writer(writer)
