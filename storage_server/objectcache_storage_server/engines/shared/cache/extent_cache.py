"""Objects of the store on a device of this server: what it has put, and what it has read.

An object never changes, and its name is nobody else's, so nothing here can be out of date. What is
kept was compared with its checksums, or is what was put; what is read from here is compared by
whoever reads it, as what the store answers is, and `drop`ped where it does not match. So the cache
answers for nothing: it may lose anything at any time.

One thread writes copies, which take a bounded amount of memory: what finds none is not kept, so
that neither a put nor a delivery ever waits for the device to write. The first error of
the device turns the cache off.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB
from objectcache_schemas.operators.engine_status import CacheStatus
from objectcache_storage_server.engines.shared.cache.cache_file import CacheFile
from objectcache_storage_server.engines.shared.cache.cache_index import CacheIndex
from objectcache_storage_server.engines.stores.shared_store import ObjectRead

WAITING_BYTES_MAX = 64 * MIB  # copied, and not written yet
KEPT_PART = 64  # of a slot, that is worth one

log = logging.getLogger("objectcache.storage_server.engines.shared.cache")


class CachedRange(NamedTuple):
    """A range of an object in memory of the cache's own."""

    name: str
    offset_bytes: int
    memory: memoryview


class _Write(NamedTuple):
    buffer: memoryview
    copied: Sequence[CachedRange]
    is_read: bool


class ExtentCache:
    """One server's; safe to use from any thread."""

    def __init__(self, folder: Path, size_bytes: int, slot_bytes: int) -> None:
        """`slot_bytes`: of the largest object. Raises `InvalidRequest` where not one fits, and
        `Unavailable` where another server has its cache there.
        """
        self._slot_count, self._slot_bytes = size_bytes // slot_bytes, slot_bytes
        if not self._slot_count:
            raise InvalidRequest(
                f"storage.cache_bytes is {size_bytes}: a cache of this store has at least "
                f"{slot_bytes} bytes; 0 is none"
            )
        self._changed = threading.Condition()  # and the lock of everything here
        self._waiting_bytes = 0
        self._writes = deque[_Write]()
        self._is_writing = False
        self._is_closed = False
        self._failure = ""
        self._hits = self._hit_bytes = self._misses = self._miss_bytes = 0
        self._written_bytes = self._passed_over_bytes = self._damaged = 0
        self._file: CacheFile | None = None
        try:
            self._file = CacheFile(folder, self._slot_count, slot_bytes)
        except OSError as error:
            self._turn_off("opened", error)
        self._thread = threading.Thread(target=self._run, name="shared-cache", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ExtentCache {self._failure or (self._file and self._file.index)}>"

    def _open_file(self) -> CacheFile | None:
        """Under the lock: the file, while the cache is on."""
        return None if self._failure else self._file

    # --- reading ---

    def read(self, reads: Iterable[ObjectRead]) -> list[ObjectRead]:
        """Fill the landings of those that are here; returns the others. Blocks while it reads."""
        return [read for read in reads if not self._read(read)]

    def _read(self, read: ObjectRead) -> bool:
        name, begin, landing = read
        with self._changed:
            file, cached = self._open_file(), None
            if file is not None:
                cached = file.index.find(name, begin, begin + landing.nbytes)
            if file is None or cached is None:
                self._count_miss(landing.nbytes)
                return False
        try:
            file.read(cached.slot, begin, landing)
        except OSError as error:
            self._turn_off("read", error)
        with self._changed:  # the slot may have become another object's meanwhile
            if self._failure or file.index.get(name) is not cached:
                self._count_miss(landing.nbytes)
                return False
            self._hits += 1
            self._hit_bytes += landing.nbytes
            return True

    def _count_miss(self, size_bytes: int) -> None:
        self._misses += 1
        self._miss_bytes += size_bytes

    def drop(self, names: Iterable[str]) -> None:
        """What was read of these did not match its checksums, perhaps because of what is here."""
        with self._changed:
            file = self._open_file()
            if file is not None:
                self._damaged += sum(map(file.index.remove, set(names)))

    # --- keeping ---

    def buffer(self, size_bytes: int) -> memoryview | None:
        """Memory of so many bytes for what is to be kept; None where so much is not worth a slot,
        or there is no memory. It goes to `keep`, or to `give_back`.
        """
        with self._changed:
            if self._open_file() is None or size_bytes * KEPT_PART < self._slot_bytes:
                return None
            if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
                self._passed_over_bytes += size_bytes
                return None
            self._waiting_bytes += size_bytes
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Nothing of it is kept."""
        with self._changed:
            self._waiting_bytes -= len(buffer)

    def keep(self, buffer: memoryview, copied: Sequence[CachedRange], *, is_read: bool) -> None:
        """Have these ranges written, which lie in a `buffer`: they were put, or read and compared
        with their checksums.
        """
        with self._changed:
            self._writes.append(_Write(buffer, copied, is_read))
            self._changed.notify_all()

    def keep_put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Have an object written that the store has now; the parts are copied."""
        size_bytes = sum(part.nbytes for part in parts)
        buffer = self.buffer(size_bytes)
        if buffer is None:
            return
        end = 0
        for part in parts:
            buffer[end : end + part.nbytes] = part
            end += part.nbytes
        self.keep(buffer, [CachedRange(name, 0, buffer)], is_read=False)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._is_closed)
                if not self._writes:
                    return
                self._is_writing = True
                write = self._writes.popleft()
            try:
                for each in write.copied:
                    self._write(each, write.is_read)
            except OSError as error:
                self._turn_off("written", error)
            self.give_back(write.buffer)

    def _write(self, copied: CachedRange, is_read: bool) -> None:
        """No other thread gives slots away, so this one stays the object's while it is written."""
        name, begin, memory = copied
        end = begin + memory.nbytes
        with self._changed:
            file = self._open_file()
            if file is None:
                return
            cached = file.index.place(name, is_read=is_read)
            if cached.has(begin, end):
                return
        file.write(cached.slot, begin, memory)
        with self._changed:
            self._written_bytes += memory.nbytes
            if file.index.get(name) is cached:
                cached.add(begin, end)

    def settle(self) -> None:
        """Wait until all is written that was to be kept."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writes and not self._is_writing)

    # --- the cache itself ---

    def status(self) -> CacheStatus:
        """What it holds, and what it has done since the start."""
        with self._changed:
            index = self._file.index if self._file is not None else CacheIndex(0)
            return CacheStatus(
                failure=self._failure,
                capacity_bytes=self._slot_count * self._slot_bytes,
                used_bytes=len(index) * self._slot_bytes,
                hits=self._hits,
                hit_bytes=self._hit_bytes,
                misses=self._misses,
                miss_bytes=self._miss_bytes,
                written_bytes=self._written_bytes,
                passed_over_bytes=self._passed_over_bytes,
                evicted_objects=index.evicted_objects,
                damaged_objects=self._damaged,
            )

    def close(self) -> None:
        """Once nobody reads or puts. What is cached is there again at the next start."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close(keep=not self._failure)
            except OSError as error:
                log.warning("the cache will be empty at the next start: %s", error)

    def _turn_off(self, done: str, error: OSError) -> None:
        with self._changed:
            if self._failure:
                return
            self._failure = f"it could not be {done}: {error.strerror or error}"
        log.warning("the cache of the shared store is off until the next start: %s", self._failure)
