"""Flushes of the data that come after their commit.

What buckets with asynchronous durability have written is flushed soon after. Until then the index
marks the extents, so that a store that opens after a power loss knows whose bytes to check.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.local.index.lmdb_index import LocalIndex
from objectcache_storage_server.engines.local.objects.extent_flushes import ExtentFlushes
from objectcache_storage_server.engines.local.space.holdings import Holdings


class Flusher:
    """What waits to be flushed. Safe to use from any thread."""

    def __init__(
        self, index: LocalIndex, holdings: Holdings, flushes: ExtentFlushes, latch: FlushLatch
    ) -> None:
        self._index = index
        self._holdings = holdings
        self._flushes = flushes
        self._latch = latch
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._written: set[int] = set()
        self._emptied: list[int] = []

    def __len__(self) -> int:
        return len(self._written)

    def add(self, written: Iterable[int], emptied: Iterable[int]) -> None:
        """Extents that wait for a flush, and others whose space may be given out again after it."""
        with self._lock:
            self._written.update(written)
            self._emptied.extend(emptied)

    def drop(self, emptied: Iterable[int]) -> None:
        """The index durably names these extents no more: give their space back, that of extents
        which still wait for a flush after it, so that it is not another's that is unmarked then.
        """
        with self._lock:
            at_once: list[int] = []
            for number in emptied:
                (self._emptied if number in self._written else at_once).append(number)
        self._holdings.drop_extents(at_once)

    def flush(self) -> None:
        """Make all that waits durable; raises our errors, and then it waits on."""
        self._latch.check()
        with self._flushing:
            with self._lock:
                written, emptied = sorted(self._written), self._emptied
                self._emptied = []
            if not written and not emptied:
                return
            direct_ranges = self._flushes.direct_ranges(written)
            try:
                self._flushes.flush(written)
                with self._index.writing() as change:
                    change.unmark_unflushed(written)
            except BaseException:
                with self._lock:
                    self._emptied += emptied
                raise
            with self._lock:
                self._written.difference_update(written)
            self._holdings.drop_extents(emptied)
            self._flushes.drop_from_cache(direct_ranges)
