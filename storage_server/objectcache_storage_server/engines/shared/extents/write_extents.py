"""Extents on their way into the store: a bounded number of objects at a time, and what becomes of
them.

An object is stored under a name that nobody used before and that no record names yet. An extent
that is given up is removed in the background, once nothing of its put is being written any more;
what cannot be removed is a leftover, swept when its writer is dead.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from objectcache_schemas.errors import ObjectCacheError, StorageFull
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.puts.put_buffers import PutBuffers
from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
from objectcache_storage_server.engines.shared.versions import ExtentName
from objectcache_storage_server.engines.stores.shared_store import SharedStore

CHECKSUM_BYTES = 8  # of a block, in the record that names it
REST_BYTES = 256 * KIB  # of that record: key, attributes, sizes of parts

log = logging.getLogger("objectcache.storage_server.engines.shared")


class StoreRoom(ABC):
    """What puts may take of the store. From any thread."""

    @abstractmethod
    def take(self, size_bytes: int) -> None:
        """So much more is being put, which no record names yet."""

    @abstractmethod
    def give_back(self, size_bytes: int) -> None:
        """Of it: a record names it, or it is given up."""

    @abstractmethod
    def check(self, deadline_s: float) -> None:
        """Raise `StorageFull` where what is stored and what was taken is over the store's share."""

    @abstractmethod
    def make(self, size_bytes: int, deadline_s: float) -> None:
        """The store itself has no room for so much of what was taken: have something go, where that
        can be.
        """


class ObjectWriter:
    """Writes objects of the store in threads, as many at a time as the store wants."""

    def __init__(
        self,
        store: SharedStore,
        buffers: PutBuffers,
        writer: Callable[[], int],
        call_s_max: float,
        room: StoreRoom,
        cache: ExtentCache | None = None,
    ) -> None:
        """`writer` is the number under which this server names its objects now."""
        self.object_bytes_max = store.capabilities.object_bytes_max
        self.depth = store.capabilities.put_depth
        self.blocks_max = (store.capabilities.record_bytes_max - REST_BYTES) // CHECKSUM_BYTES
        self.buffers = buffers
        self._store = store
        self._writer = writer
        self.call_s_max = call_s_max
        self.room = room
        self._cache = cache
        self._numbers = itertools.count(1)
        self._pool = ThreadPoolExecutor(self.depth, "shared-put")

    def deadline_s(self) -> float:
        """Of a call of the store that begins now."""
        return time.monotonic() + self.call_s_max

    def new_name(self) -> ExtentName:
        """A name that no extent had before."""
        return ExtentName(self._writer(), next(self._numbers))

    def submit(self, action: Callable[[], None]) -> Future[None]:
        """Have a thread do this, after what it was given before."""
        return self._pool.submit(action)

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store an object. Raises as `SharedStore.put`."""
        self.room.check(self.deadline_s())
        try:
            self._store.put(name, parts, self.deadline_s())
        except StorageFull:
            self.room.make(sum(part.nbytes for part in parts), self.deadline_s())
            self._store.put(name, parts, self.deadline_s())
        if self._cache is not None:
            self._cache.keep_put(name, parts)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects that no record names. Raises nothing that a store may fail with."""
        try:
            self._store.delete(names, self.deadline_s())
        except ObjectCacheError as error:
            log.warning("%d objects stay until their writer is dead: %s", len(names), error)

    def close(self) -> None:
        """Once nobody puts any more; what is begun is ended."""
        self._pool.shutdown()


class PutWrites:
    """What one put has under way."""

    def __init__(self, writer: ObjectWriter) -> None:
        self.writer = writer
        self._count = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<PutWrites {self._count} under way>"

    def begin(
        self, name: str, parts: Sequence[memoryview], release: Callable[[], None] | None = None
    ) -> Future[None]:
        """Begin to store an object. The parts must stay as they are until it has ended, when
        `release` is called.
        """
        with self._changed:
            self._count += 1
        return self.writer.submit(lambda: self._put(name, parts, release))

    def _put(
        self, name: str, parts: Sequence[memoryview], release: Callable[[], None] | None
    ) -> None:
        failure: BaseException | None = None
        try:
            self.writer.put(name, parts)
        except BaseException as error:
            failure = error
            raise
        finally:
            if release is not None:
                release()
            with self._changed:
                self._failure = self._failure or failure  # before the count, see `settle`
                self._count -= 1
                self._changed.notify_all()

    def wait_below(self, count: int) -> None:
        """Return when fewer than `count` are under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._count < count)

    def is_any_under_way(self) -> bool:
        """Whether something is being written."""
        return self._count > 0

    def wait_for_one(self) -> None:
        """Return when one of those that are under way has ended."""
        self.wait_below(max(self._count, 1))

    def check(self) -> None:
        """Raise what an object failed with, every time."""
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Wait until all is stored that was begun. Raises as `check`. Each chunk of a put asks."""
        if self._count:
            self.wait_below(1)
        self.check()


class WrittenExtent:
    """One extent of a put: the objects that were begun, and whether a record names it."""

    def __init__(self, writes: PutWrites) -> None:
        self.name = writes.writer.new_name()
        self._writes = writes
        self._names: list[str] = []  # of objects that are stored, or may be
        self._size_bytes = 0  # of them
        self._is_ended = False

    def __repr__(self) -> str:
        return f"<WrittenExtent {self.name.number}, {len(self._names)} objects begun>"

    def put(
        self, piece: int, parts: Sequence[memoryview], release: Callable[[], None] | None = None
    ) -> Future[None]:
        """Begin to store one of its objects, as `PutWrites.begin` does."""
        name = self.name.object_name(piece)
        size_bytes = sum(part.nbytes for part in parts)
        self._names.append(name)
        self._size_bytes += size_bytes
        self._writes.writer.room.take(size_bytes)
        return self._writes.begin(name, parts, release)

    def end(self, *, keep: bool) -> None:
        """Nothing more is written. Without `keep` it is removed."""
        if not self._is_ended:
            self._is_ended = True
            self._writes.writer.room.give_back(self._size_bytes)
            if self._names and not keep:
                self._writes.writer.submit(self._remove)

    def _remove(self) -> None:
        self._writes.wait_below(1)  # begun before this was: they have threads, or had
        self._writes.writer.remove(self._names)
