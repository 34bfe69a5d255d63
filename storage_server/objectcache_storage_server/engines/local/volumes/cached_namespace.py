"""The page-cache path of a namespace beside the direct one: no stale page is ever read.

Commands of the direct path go around the block device's page cache. So a page that came there
before such a write is older than the device, and a dirty one would be written over it. What holds:

- A range is read through the cache only while it is *fresh*: no page of it is older than the
  device. It becomes so where it is written through the cache (whole pages), or by `enter`, which
  has the cache forget the range and makes sure that no page of it is left. Nothing is fresh when
  the namespace is opened, and whatever is not fresh is read over the direct path.
- It ceases to be fresh before anything is written to it past the cache, or it is discarded.
- What was written through the cache may be *dirty* until a flush. Before the direct path reads,
  writes or discards it, it is written back.

Who else has the device open can bring pages into the cache at any time. They are as young as their
reading, so they are no older than the device as long as a range is fresh.

Offsets are those of the namespace. Any thread may call; as the volume says, nobody writes to what
another call reads or writes, except that `enter` and `prefetch` may meet whatever happens to a
range.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Sequence

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.direct.alignment import split_at
from objectcache_storage_server.engines.local.direct.block_device import BlockDevice
from objectcache_storage_server.engines.local.volumes.byte_ranges import ByteRanges
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

ENTER_BYTES = 4 * MIB  # that become fresh at once, or not: one page that stays keeps the rest out

log = logging.getLogger("objectcache.storage_server.engines.local.volumes.cached_namespace")

Range = tuple[int, int]  # begin and end


class _Entering:
    """A range that is about to be fresh, unless it is written to meanwhile."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.is_valid = True


class CachedNamespace:
    """Which ranges are fresh, which are dirty, and what is done about it."""

    def __init__(self, block_device: BlockDevice, capacity_bytes: int) -> None:
        """`block_device` stays the caller's to close."""
        self.refused_count = 0  # ranges that could not be made fresh
        self._block_device = block_device
        self._lock = threading.Lock()
        self._fresh = ByteRanges()
        self._dirty = ByteRanges()  # written since the last flush began
        self._flushing: list[ByteRanges] = []  # written before it, for each that has not ended
        self._entering: list[_Entering] = []
        self._settle_last_use(capacity_bytes)

    def __repr__(self) -> str:
        with self._lock:
            return f"<CachedNamespace fresh: {self._fresh}, dirty: {self._dirty}>"

    def _settle_last_use(self, capacity_bytes: int) -> None:
        """What a process before this one left dirty is written now, and not over later writes."""
        try:
            self._block_device.write_back(0, capacity_bytes)
        except OSError as error:  # was acknowledged by nobody: checksums will tell
            log.warning("%s: earlier writes failed: %s", self._block_device.name, error)

    # --- through the cache ---

    def is_fresh(self, begin: int, end: int) -> bool:
        """Whether the range may be read through the cache, as long as nobody writes to it."""
        with self._lock:
            return self._fresh.covers(begin, end)

    def read(self, begin: int, memory: memoryview) -> int:
        """Fill the memory from a fresh range; returns the bytes that were found in the cache."""
        found_bytes = self._block_device.read_resident(begin, memory)
        if found_bytes < len(memory):
            self._block_device.read(begin + found_bytes, memory[found_bytes:])
        return found_bytes

    def read_resident(self, begin: int, memory: memoryview) -> bool:
        """Fill the memory if all of it is fresh and in the cache."""
        if not self.is_fresh(begin, begin + len(memory)):
            return False
        return self._block_device.read_resident(begin, memory) == len(memory)

    def write(self, begin: int, memory: memoryview) -> None:
        """Write whole pages, or parts of fresh ones."""
        end = begin + len(memory)
        first, last = _outward(begin, end)
        with self._lock:  # a write that fails half-way has made pages dirty, too
            self._dirty.add(first, last)
        try:
            self._block_device.write(begin, memory)
        finally:
            with self._lock:  # again: a flush may have begun and ended before the write
                self._dirty.add(first, last)
        with self._lock:
            self._fresh.add(first, last)

    def enter(self, begin: int, end: int) -> bool:
        """Make a range of whole pages fresh; whether it is."""
        parts = [
            (at, at + length)
            for first, last in self._missing(begin, end)
            for at, length in split_at(first, last - first, ENTER_BYTES)
        ]
        entered = [self._enter(*part) for part in parts]
        return all(entered)

    def prefetch(self, begin: int, end: int) -> None:
        """Have the cache read what of the range is fresh, or can be made so."""
        self.enter(begin, end)
        with self._lock:
            fresh = self._fresh.within(begin, end)
        for first, last in fresh:
            self._block_device.prefetch(first, last - first)

    def _missing(self, begin: int, end: int) -> list[Range]:
        with self._lock:
            return self._fresh.missing(begin, end)

    def _enter(self, begin: int, end: int) -> bool:
        entering = _Entering(begin, end)
        with self._lock:
            self._entering.append(entering)
        is_gone = False
        try:
            self._write_back(begin, end)
            is_gone = self._block_device.drop(begin, end - begin)
        except OSError as error:
            log.warning("%s: cannot tell what is cached: %s", self._block_device.name, error)
        with self._lock:
            self._entering.remove(entering)
            is_fresh = is_gone and entering.is_valid
            if is_fresh:
                self._fresh.add(begin, end)
            else:
                self.refused_count += 1
        return is_fresh

    # --- around the cache ---

    def before_direct_read(self, ranges: Sequence[Range]) -> None:
        """Have the device hold what was written to these ranges; raises `OSError`."""
        for begin, end in ranges:
            self._write_back(begin, end)

    @contextlib.contextmanager
    def passed_by(self, ranges: Sequence[Range]) -> Generator[None, None, None]:
        """The body writes to these ranges past the cache. Raises `OSError` before it begins."""
        for begin, end in ranges:
            self._write_back(begin, end)
        self._leave(ranges)
        try:
            yield
        finally:
            self._leave(ranges)  # what became fresh meanwhile may have been read too early

    def leave(self, begin: int, end: int) -> None:
        """Read the range over the direct path from here on; the cache may forget it."""
        first, last = _outward(begin, end)
        self._leave([(first, last)])
        self._block_device.forget(first, last - first)

    def discard(self, begin: int, end: int) -> None:
        """The range is nobody's any more: nothing will be written to it that was written before.

        Raises nothing.
        """
        with self._lock:
            was_fresh = self._fresh.overlaps(begin, end)
        try:
            self._write_back(begin, end)
            if was_fresh:
                self._block_device.forget(begin, end - begin)
        except OSError as error:  # the kernel does not try again: nothing is dirty now either
            log.warning("%d bytes at %d were not written back: %s", end - begin, begin, error)
        self._leave([(begin, end)])
        with self._lock:
            self._dirty.remove(begin, end)

    def _leave(self, ranges: Sequence[Range]) -> None:
        with self._lock:
            for begin, end in ranges:
                self._fresh.remove(begin, end)
                for entering in self._entering:
                    entering.is_valid &= entering.end <= begin or end <= entering.begin

    def _write_back(self, begin: int, end: int) -> None:
        if self._is_dirty(begin, end):
            first, last = _outward(begin, end)
            self._block_device.write_back(first, last - first)

    def _is_dirty(self, begin: int, end: int) -> bool:
        with self._lock:
            return any(each.overlaps(begin, end) for each in (self._dirty, *self._flushing))

    # --- durability ---

    def flush(self, ranges: Sequence[Range]) -> bool:
        """Have what was written to these ranges through the cache survive a power loss; whether
        that is all of them. Raises `OSError`.
        """
        with self._lock:
            written = (self._dirty, *self._flushing)
            if not any(each.overlaps(*one) for each in written for one in ranges):
                return False
            is_all = all(self._dirty.covers(*one) for one in ranges)
            flushing, self._dirty = self._dirty, ByteRanges()
            self._flushing.append(flushing)
        try:
            self._block_device.flush()
        except BaseException:
            with self._lock:
                self._flushing.remove(flushing)
                self._dirty.add_all(flushing)
            raise
        with self._lock:
            self._flushing.remove(flushing)
        return is_all


def _outward(begin: int, end: int) -> Range:
    """The pages that hold a range."""
    return begin - begin % BLOCK_BYTES, end + -end % BLOCK_BYTES
