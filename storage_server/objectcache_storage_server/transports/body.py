"""Into a connected socket, in payload order: the client's own, or the gateway's.

Readers fill buffers of the memory that is reserved, in any order; a coroutine sends them in order.
How much is reserved bounds how far reading runs ahead of a slow client.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_storage_server.admission.client_pace import ClientPace
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport


class BodyTransport(Transport):
    """Carries a delivery into a socket; `send` is the sending side, and whoever calls it calls
    `release` in the end.

    A fragment at least is reserved. `wake` is called, in the event loop, whenever room has come
    back.
    """

    name = "body"

    def __init__(
        self,
        pool: BufferPool,
        reserved: ReservedMemory,
        pace: ClientPace,
        wake: Callable[[], None],
        recorder: DeliveryRecorder,
    ) -> None:
        self._pool = pool
        self._recorder = recorder
        self._reserved = reserved
        self._pace = pace
        self._piece_bytes = 0  # the largest that was sent, as the pool charges it
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._room_bytes = reserved.reserved_bytes
        self._buffers: dict[int, memoryview] = {}  # by offset in the payload
        self._complete: set[int] = set()
        self._changed = asyncio.Event()
        self._error: ObjectCacheError | None = None

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        charged_bytes = self._pool.charged_bytes(length_bytes)
        with self._lock:
            if charged_bytes > self._room_bytes:
                return False
            self._room_bytes -= charged_bytes
        self._buffers[offset_bytes] = self._pool.take(length_bytes)
        return True

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return self._buffers[offset_bytes]

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        self._complete.add(offset_bytes)
        self._notify()

    def announce(self, end_layer: int) -> None:
        """Layer boundaries of a body are arithmetic; the bytes themselves announce."""

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        self._error = error
        self._notify()

    def close(self) -> None:
        """Reading has ended; what was read may still be on its way, so `release` gives it back."""

    def release(self) -> None:
        """Nothing reads or sends any more: give the memory back. A second call has no effect."""
        self._reserved.release()
        for view in self._buffers.values():
            self._pool.put(view)
        self._buffers.clear()
        self._wake = _nobody  # it holds the delivery

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    async def send(self, socket: StreamSocket, payload_bytes: int, stall_timeout_s: float) -> None:
        """Send the whole payload. Runs in the event loop.

        Raises the delivery's error if it failed, and `DeliveryFailed` when the socket's peer is
        gone or did not take a piece within `stall_timeout_s`; `Busy` where it was too slow while
        others waited.
        """
        position_bytes = 0
        self._pace.unsent_bytes = socket.unsent_bytes
        while position_bytes < payload_bytes:
            while position_bytes not in self._complete:
                if self._error is not None:
                    raise self._error
                await self._changed.wait()
                self._changed.clear()
            view = self._buffers[position_bytes]
            await self._send_piece(socket, view, stall_timeout_s)
            self._complete.discard(position_bytes)
            del self._buffers[position_bytes]
            position_bytes += len(view)
            self._pool.put(view)
            self._room_came_back(self._pool.charged_bytes(len(view)))
            self._wake()

    def _room_came_back(self, length_bytes: int) -> None:
        """It is read into again, unless somebody who holds less waits for memory."""
        self._piece_bytes = max(self._piece_bytes, length_bytes)
        if not self._reserved.shrink_if_wanted(length_bytes, self._piece_bytes):
            with self._lock:
                self._room_bytes += length_bytes

    async def _send_piece(
        self, socket: StreamSocket, view: memoryview, stall_timeout_s: float
    ) -> None:
        self._recorder.sending_begun(time.monotonic())
        try:
            sending = socket.send_all(view, self._pace.moved)
            await self._pace.wait_for(sending, stall_timeout_s)
        except TimeoutError as error:
            raise DeliveryFailed(
                f"the client did not take {len(view)} bytes in {stall_timeout_s:g} s "
                "(storage.send_stall_timeout_s)"
            ) from error
        except OSError as error:
            raise DeliveryFailed(f"the client is gone: {error.strerror}") from error
        finally:
            self._recorder.sending_ended(time.monotonic())


def _nobody() -> None:
    """Nobody waits for room any more."""
