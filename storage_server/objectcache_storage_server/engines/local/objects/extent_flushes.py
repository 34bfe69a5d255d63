"""Flushes of extents, and what the page cache need not keep of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from objectcache_storage_server.engines.disk.flush_latch import Flushes, FlushLatch
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Volume


class ExtentFlushes:
    """Safe to use from any thread."""

    def __init__(self, volume: Volume, holdings: Holdings, latch: FlushLatch) -> None:
        self._volume = volume
        self._holdings = holdings
        self._flushes = Flushes(latch, "the data")

    def flush(self, numbers: Sequence[int]) -> None:
        """Return when the bytes of these extents survive a power loss. Raises `Unavailable` where
        this flush or any other has failed.
        """
        with self._flushes.one():
            self._volume.flush(self._holdings.ranges(numbers))

    def direct_ranges(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(offset, length) of extents that are read directly, where the page cache could have
        them all the same.
        """
        if len(self._volume.paths) < len(IoPath):
            return []
        return self._holdings.ranges(numbers, path=IoPath.DIRECT)

    def drop_from_cache(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Let the page cache forget flushed (offset, length) ranges. What lies there by now may be
        another extent, or nothing: then a page is read from the device once more, and no harm done.
        """
        for offset_bytes, length_bytes in ranges:
            with contextlib.suppress(OSError):
                self._volume.drop_cache(offset_bytes, length_bytes)
