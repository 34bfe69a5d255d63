"""The client's side of a ring: what it frees, and a client that frees nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from objectcache_fabrics.ring_room import RingRoom
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_schemas.messages.sessions import LayersFreed
from objectcache_storage_server.transports.targets import TargetOwner


class RingWatch:
    """Hears of one delivery what its client frees, until it is closed. All in the event loop."""

    def __init__(
        self,
        room: RingRoom,
        session: TargetOwner,
        tag: int,
        stall_timeout_s: float,
        wake: Callable[[], None],
        fail: Callable[[ObjectCacheError], None],
    ) -> None:
        """`wake` is called where there is room again, `fail` where the client frees what it was not
        told of, or nothing for `stall_timeout_s` while a layer is without room that it could free.
        """
        self._room = room
        self._session = session
        self._tag = tag
        self._stall_timeout_s = stall_timeout_s
        self._wake = wake
        self._fail = fail
        self._callback = self._freed  # one object, by which it is known
        session.watch_freed(tag, self._callback)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(stall_timeout_s, self._look)

    def _freed(self, message: LayersFreed) -> None:
        try:
            self._room.freed(message.end_layer)
        except ObjectCacheError as error:
            self._fail(error)
        else:
            self._wake()

    def _look(self) -> None:
        since_s = self._room.lacking_since_s
        lacking_s = 0.0 if since_s is None else time.monotonic() - since_s
        if lacking_s < self._stall_timeout_s:
            self._timer = self._loop.call_later(self._stall_timeout_s - lacking_s, self._look)
            return
        self._fail(
            DeliveryFailed(
                f"the client freed no layer of its ring for {self._stall_timeout_s:g} s "
                "(storage.send_stall_timeout_s)"
            )
        )

    def close(self) -> None:
        """Nothing is written any more."""
        self._session.forget_freed(self._tag, self._callback)
        self._timer.cancel()
