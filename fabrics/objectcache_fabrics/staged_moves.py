"""Moves between staging memory and a client's memory, for whoever has or wants the bytes here.

A put reads them out of the client's memory, the Buffer path writes what a gateway sent. Both go
piece after piece, in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from objectcache_fabrics.leased_memory import FabricLease
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.errors import ObjectCacheError


class StagedMoves:
    """Under a lease, within reserved memory, whole buffers of it. Used by one task at a time.

    The first error ends it: the fabric's, the target's release, or what `fail` is given. What is
    under way then is waited for, because the client's memory is not its own before. `broken` is
    called for the fabric's alone: the peer is of no use any more then.
    """

    def __init__(
        self,
        lease: FabricLease,
        pool: StagingMemory,
        reserved: ReservedMemory,
        broken: Callable[[], None],
    ) -> None:
        """Takes the lease and the memory over; both end once it is closed and nothing moves."""
        memory = lease.remote
        self.length_bytes = lease.length_bytes
        self.buffer_bytes = pool.buffer_bytes
        self._lease = lease
        self._remote = memory.remote
        self._peer = memory.peer
        self._pool = pool
        self._reserved = reserved
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._taken: dict[int, memoryview] = {}  # by offset in the staging memory
        self._under_way = 0
        self._error: Exception | None = None
        self._closed = False
        self._quiet = False
        lease.on_release(self.fail)

    # --- buffers ---

    @property
    def has_room(self) -> bool:
        """Whether `take` may be called: fewer buffers are out than were reserved."""
        return (len(self._taken) + 1) * self._pool.buffer_bytes <= self._reserved.reserved_bytes

    def take(self, length_bytes: int) -> memoryview:
        """A buffer, cut to `length_bytes`, which is at most a buffer's."""
        assert self.has_room
        view = self._pool.take(length_bytes)
        self._taken[self._pool.offset_of(view)] = view
        return view

    def give_back(self, view: memoryview) -> None:
        """The buffer is not used any more."""
        self._pool.put(self._taken.pop(self._pool.offset_of(view)))
        self._reserved.shrink_if_wanted(self.buffer_bytes, self.buffer_bytes)
        self._changed.set()

    # --- moves ---

    def read(self, offset_bytes: int, into: memoryview) -> asyncio.Future[None]:
        """Begin to read the payload's bytes from `offset_bytes` on into a buffer that was taken.

        The result is there when they are; where that fails, `until` raises why.
        """
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._begin(self._peer.read, offset_bytes, into, lambda: arrived.set_result(None))
        return arrived

    def write(self, offset_bytes: int, source: memoryview) -> None:
        """Begin to write a buffer that was taken, which comes back when it was written."""
        self._begin(self._peer.write, offset_bytes, source, lambda: self.give_back(source))

    def _begin(
        self,
        move: Callable[..., None],
        offset_bytes: int,
        view: memoryview,
        moved: Callable[[], None],
    ) -> None:
        assert offset_bytes + len(view) <= self.length_bytes
        self._under_way += 1

        def done(error: ObjectCacheError | None) -> None:
            self._loop.call_soon_threadsafe(self._done, moved, error)

        move(self._remote, self._lease.offset_bytes + offset_bytes, view, done)

    def _done(self, moved: Callable[[], None], error: ObjectCacheError | None) -> None:
        self._under_way -= 1
        if error is None:
            moved()
        else:
            self._set_error(error)
            self._broken()
        self._changed.set()
        self._settle()

    def announce(self, tag: int, end_layer: int) -> None:
        """Tell the client that its layers below `end_layer` are in place: all was written."""
        self._peer.announce(tag, end_layer)

    # --- waiting ---

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; raises the first error instead, once there is one."""
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            if is_so():
                return
            await self._changed.wait()

    async def written(self) -> None:
        """Wait until nothing is under way; raises the first error."""
        await self.until(lambda: self._under_way == 0)

    async def quiet(self) -> None:
        """Wait until nothing is under way, whatever the errors are: never longer than one move may
        take.
        """
        while self._under_way:
            self._changed.clear()
            await self._changed.wait()

    # --- the end ---

    def fail(self, error: Exception) -> None:
        """End it with this error, from any thread."""
        self._loop.call_soon_threadsafe(partial(self._set_error, error))

    def _set_error(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        """Begin nothing more, and let all go when nothing is under way. Nobody uses a buffer that
        was taken. Repeating has no effect.
        """
        self._closed = True
        self._settle()

    def _settle(self) -> None:
        if self._quiet or not self._closed or self._under_way:
            return
        self._quiet = True
        for view in self._taken.values():
            self._pool.put(view)
        self._taken.clear()
        self._lease.end()
        self._reserved.release()

    def __repr__(self) -> str:
        return f"<StagedMoves {self._under_way} under way, {len(self._taken)} buffers out>"
