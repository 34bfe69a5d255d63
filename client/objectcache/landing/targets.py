"""Memory that a caller provides for deliveries and reuses."""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import numpy as np

from objectcache.landing.regions import Landing, Region, SharedRegion, nothing
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.layout import KvLayout

CLOSE_TIMEOUT_S = 60.0  # above a server's storage.fabric_timeout_s, after which it has given up


class _Use(enum.Enum):
    FREE = "free"
    IN_USE = "in use"
    LOST = "lost"
    CLOSED = "closed"


class Target(ABC):
    """Memory for one delivery at a time, until its last byte has arrived or it was closed.

    The views that a delivery gave stay valid as memory, but the next delivery into the target
    overwrites them. What lies in a `SessionTarget` is put from there.
    """

    transport: str | None = None  # the one that alone can fill it

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._use = _Use.FREE
        self._closing = False
        self._puts = 0  # that read the memory now
        self._condition = threading.Condition()

    @property
    @abstractmethod
    def array(self) -> Bytes:
        """The whole memory: uint8[length_bytes]."""

    def chunks(self, chunk_count: int, layout: KvLayout, offset_bytes: int = 0) -> Bytes:
        """View as uint8[chunk_count, num_layers, per_layer_chunk_bytes] from `offset_bytes` on.

        Raises `InvalidRequest` where the memory ends before.
        """
        end_bytes = offset_bytes + chunk_count * layout.chunk_bytes
        if not 0 <= offset_bytes <= end_bytes <= self.length_bytes:
            raise InvalidRequest(
                f"{chunk_count} chunks from {offset_bytes} on end at {end_bytes}, "
                f"the target holds {self.length_bytes} bytes"
            )
        shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
        return self.array[offset_bytes:end_bytes].reshape(shape)

    def claim(self, timeout_s: float) -> Landing:
        """Take the memory for one delivery.

        Waits up to `timeout_s` for the server to let go of a delivery that was closed early. Raises
        `InvalidRequest` while another delivery is open or a put reads it, `Unavailable` when the
        memory was lost with the session that used it.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._closing, timeout_s)
            if self._use is _Use.LOST:
                raise Unavailable(
                    "the target's session ended while the server used it; create a new target"
                )
            if self._use is _Use.CLOSED:
                raise InvalidRequest("the target is closed")
            if self._use is _Use.IN_USE:
                raise InvalidRequest("the target is in use by another delivery; close that first")
            if self._puts:
                raise InvalidRequest("the target is in use by a put; wait for that first")
            self._use = _Use.IN_USE
        return Landing(self.array, self._region(), self._settled)

    def closing(self) -> None:
        """The open delivery was closed, so that the target is about to be free."""
        with self._condition:
            self._closing = self._use is _Use.IN_USE

    def _settled(self, quiet: bool) -> None:
        with self._condition:
            if self._use is _Use.IN_USE:
                self._use = _Use.FREE if quiet else _Use.LOST
            self._closing = False
            self._condition.notify_all()

    def _region(self) -> Region | None:
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.length_bytes} bytes, {self._use.value}>"


class PlainTarget(Target):
    """Any writable C-contiguous buffer. Only the body transport can fill it."""

    def __init__(self, buffer: Any) -> None:
        """Raises `InvalidRequest` for an object without such a buffer."""
        try:
            view = memoryview(buffer)
        except TypeError as error:
            raise InvalidRequest(f"target: {error}") from error
        if view.readonly or not view.c_contiguous:
            raise InvalidRequest("target: the buffer must be writable and C-contiguous")
        super().__init__(view.nbytes)
        self._array: Bytes = np.frombuffer(view, np.uint8)

    @property
    def array(self) -> Bytes:
        return self._array


class SessionTarget(Target):
    """Memory that the server writes to by itself."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.length_bytes)
        self._registered = region
        self._array = region.array()

    @property
    def array(self) -> Bytes:
        return self._array

    @property
    def address(self) -> int:
        """Where the memory begins, in this process or in a GPU."""
        return self._registered.address

    @property
    def is_lost(self) -> bool:
        """Whether the session ended before the server could say that it is through with it: a
        buffer of the caller's must not be used for anything else then.
        """
        return self._use is _Use.LOST

    @property
    def is_read(self) -> bool:
        """Whether the server may still read it for a put, even one that has raised."""
        return self._puts > 0

    def _region(self) -> Region:
        return self._registered

    def close(self) -> None:
        """Take the memory away from the server; arrays over it stay valid.

        Cancels what the server does with it. The target cannot be used again. Repeating has no
        effect.
        """
        with self._condition:
            self._use = _Use.CLOSED
        self._registered.unregister(nothing)

    def claim_for_put(self) -> Landing | None:
        """Hold the memory for a put out of it: puts share it, and no delivery begins meanwhile.

        None where the target was closed or lost.
        """
        with self._condition:
            if self._use in (_Use.LOST, _Use.CLOSED):
                return None
            self._puts += 1
        return Landing(self.array, self._registered, self._put_settled)

    def _put_settled(self, quiet: bool) -> None:
        with self._condition:
            self._puts -= 1
            if not quiet and self._use is not _Use.CLOSED:
                self._use = _Use.LOST
            self._condition.notify_all()


class SharedMemoryTarget(SessionTarget):
    """Shared memory, made by `Client.shared_memory_target`. Its payload may also come by body."""

    def __init__(self, region: SharedRegion) -> None:
        super().__init__(region)
        self.file = region.file


class FabricTarget(SessionTarget):
    """Memory that a fabric reaches, made by `Client.fabric_target`."""

    def __init__(self, region: Region, transport: str) -> None:
        super().__init__(region)
        self.transport = transport

    def close(self) -> None:
        """Take the memory away from the server, and wait until that writes to it no more.

        Cancels what the server does with it. Afterwards the memory is the caller's, unless
        `is_lost`. The target cannot be used again. Repeating has no effect.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._closing, CLOSE_TIMEOUT_S)
            was_lost = self._closing or self.is_lost
            self._use = _Use.LOST if was_lost else _Use.CLOSED
        ended: Future[bool] = Future()
        self._registered.unregister(ended.set_result)
        try:
            is_quiet = ended.result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            is_quiet = False
        if not is_quiet:
            self._use = _Use.LOST
