"""A payload over a fabric: staging memory is filled, and the fabric writes it into the client's.

A piece is in place when its write is done, which is after it was read. So layers are announced when
the writes before them are, and the transport is quiet when none is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from objectcache_fabrics.leased_memory import FabricLease
from objectcache_fabrics.ring_room import RingRoom
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.sessions import DeliveryFailure


class StagedWrites:
    """Writes under a lease. `wake` is called, from any thread, when room has come back; `broken`
    once, when a write has failed, so that reading stops.
    """

    def __init__(
        self,
        lease: FabricLease,
        tag: int,
        pool: StagingMemory,
        reserved: ReservedMemory,
        wake: Callable[[], None],
        broken: Callable[[ObjectCacheError], None],
        first_layer: int,
        ring: RingRoom | None = None,
    ) -> None:
        """Takes the lease and the memory over; both end when it is quiet. With a `ring` layers wait
        until there is room in it.
        """
        memory = lease.remote
        self.name = memory.transport
        self._lease = lease
        self._memory = memory.remote
        self._peer = memory.peer
        self._post = memory.post
        self._tag = tag
        self._pool = pool
        self._reserved = reserved
        self._wake = wake
        self._broken = broken
        self._ring = ring
        self._lock = threading.Lock()
        self._room_bytes = reserved.reserved_bytes
        self._buffers: dict[int, memoryview] = {}  # by offset in the payload
        self._writing: dict[int, int] = {}  # number of each write under way: its offset
        self._write_count = 0
        self._due: deque[tuple[int, int]] = deque()  # announcements: after which write, end layer
        self._end_layer = first_layer
        self._error: ObjectCacheError | None = None
        self._failure: ObjectCacheError | None = None  # of the delivery, told when it is quiet
        self._closed = False
        self._quiet = False
        self._when_quiet: list[Callable[[], None]] = []

    @property
    def undelivered(self) -> tuple[int, ObjectCacheError] | None:
        """The first layer that is not in place and why, known for good when it is quiet."""
        return None if self._error is None else (self._end_layer, self._error)

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        """Claim a buffer for a piece of the payload; false if none is free now, or the piece has no
        room in the client's ring.
        """
        if self._ring is not None and not self._ring.has_room(offset_bytes):
            return False
        charged_bytes = self._pool.charged_bytes(length_bytes)
        with self._lock:
            if self._error is not None or charged_bytes > self._room_bytes:
                return False
            self._room_bytes -= charged_bytes
            self._buffers[offset_bytes] = self._pool.take(length_bytes)
        return True

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """The buffer of a reserved piece, the caller's until `written` or `close`."""
        return self._buffers[offset_bytes]

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        """The piece is in its buffer: begin to write it. Pieces come in any order."""
        with self._lock:
            if self._error is not None:
                return
            number = self._write_count
            self._write_count += 1
            self._writing[number] = offset_bytes
        source = self._buffers[offset_bytes]
        remote_bytes = self._lease.offset_bytes + self._lease.place_bytes(offset_bytes)
        self._peer.write(
            self._memory, remote_bytes, source, lambda error: self._done(number, error)
        )

    def _done(self, number: int, error: ObjectCacheError | None) -> None:
        """A write has ended; in the fabric's thread."""
        with self._lock:
            buffer = self._buffers.pop(self._writing.pop(number))
            self._pool.put(buffer)
            buffer_bytes = self._pool.charged_bytes(len(buffer))
            if not self._reserved.shrink_if_wanted(buffer_bytes, self._pool.buffer_bytes):
                self._room_bytes += buffer_bytes
            is_first_error = error is not None and self._error is None
            if is_first_error:
                self._error = error
            self._announce_due()
        if error is not None and is_first_error:
            self._broken(error)
        self._wake()
        self._settle()

    def announce(self, end_layer: int) -> None:
        """The layers below `end_layer` were `written`; tell the client when they are in place."""
        with self._lock:
            self._due.append((self._write_count, end_layer))
            self._announce_due()

    def _announce_due(self) -> None:
        """Under the lock, so that watermarks leave in their order."""
        first_open = next(iter(self._writing), self._write_count)
        end_layer = None
        while self._due and self._due[0][0] <= first_open:
            end_layer = self._due.popleft()[1]
        if end_layer is not None and self._error is None:
            self._end_layer = end_layer
            if self._ring is not None:
                self._ring.announced(end_layer)
            self._peer.announce(self._tag, end_layer)

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        """Told when it is quiet: layers that were read whole are announced before it."""
        self._failure = error

    def close(self) -> None:
        """Nothing comes any more. Repeating has no effect."""
        with self._lock:
            self._closed = True
        self._settle()

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, from any thread, when it is closed and no write is left."""
        with self._lock:
            if not self._quiet:
                self._when_quiet.append(callback)
                return
        callback()

    def _settle(self) -> None:
        """Let everything go once reading has ended and no write is left."""
        with self._lock:
            if self._quiet or not self._closed or self._writing:
                return
            self._quiet = True
            for buffer in self._buffers.values():
                self._pool.put(buffer)
            self._buffers.clear()
            callbacks, self._when_quiet = self._when_quiet, []
        if self._failure is not None:
            self._tell(self._failure)
        self._lease.end()
        self._reserved.release()
        self._wake = self._ignored  # they hold the delivery
        self._broken = _ignored_error
        for callback in callbacks:
            callback()

    def _tell(self, error: ObjectCacheError) -> None:
        wire = error.to_wire()
        self._post(DeliveryFailure(tag=self._tag, failed_layer=self._end_layer, error=wire))

    @staticmethod
    def _ignored() -> None:
        """Nobody waits for room any more."""

    def __repr__(self) -> str:
        return f"<StagedWrites {self.name}, {len(self._writing)} writes under way>"


def _ignored_error(_: ObjectCacheError) -> None:
    """The delivery has ended."""
