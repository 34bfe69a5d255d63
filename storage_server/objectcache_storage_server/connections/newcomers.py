"""Connections to storage.listen that have not shown a certificate yet: few, short, and said once.

Whoever reaches the port can make them. So they have a bound of their own, at which the oldest goes:
a gateway's handshake takes milliseconds and is not among those that are old.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from objectcache_runtime.networking import tls_tunnel
from objectcache_runtime.networking.tls import ReloadingContext

NEWCOMERS_MAX = 64
HANDSHAKE_TIMEOUT_S = 3.0
LOG_PERIOD_S = 10.0

logger = logging.getLogger("objectcache.storage_server.server")


class Newcomers:
    """The handshakes that go on, and what is logged of those that fail."""

    def __init__(
        self,
        newcomers_max: int = NEWCOMERS_MAX,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        log_period_s: float = LOG_PERIOD_S,
    ) -> None:
        self._newcomers_max = newcomers_max
        self._timeout_s = timeout_s
        self._shaking: dict[asyncio.Task[object], None] = {}  # the oldest first
        self._refused = RefusedConnections(log_period_s)

    async def admit(
        self, connected: socket.socket, context: ReloadingContext
    ) -> tuple[socket.socket, asyncio.Future[None]] | None:
        """What `tls_tunnel.accept` returns; None for a connection that is no gateway's.

        Owns `connected`.
        """
        if len(self._shaking) >= self._newcomers_max:
            oldest = next(iter(self._shaking))
            del self._shaking[oldest]
            oldest.cancel()
        shaking = asyncio.ensure_future(tls_tunnel.accept(connected, context, self._timeout_s))
        self._shaking[shaking] = None
        try:
            await asyncio.wait({shaking})
        finally:
            self._shaking.pop(shaking, None)
            shaking.cancel()  # where the caller was
        if shaking.cancelled():
            connected.close()  # where it had not begun
            self._refused.add(f"{self._newcomers_max} handshakes went on at once")
        elif (error := shaking.exception()) is None:
            return shaking.result()
        elif isinstance(error, OSError | TimeoutError):
            self._refused.add(_cause(error))
        else:
            raise error
        return None

    def __repr__(self) -> str:
        return f"<Newcomers {len(self._shaking)}/{self._newcomers_max}>"


class RefusedConnections:
    """Logs the first at once, and then how many there were, at most once in a period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._count = 0
        self._last_cause = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, cause: str) -> None:
        """One more was refused."""
        self._count += 1
        self._last_cause = cause
        if self._timer is None:
            self._say()

    def _say(self) -> None:
        self._timer = None
        if self._count == 0:
            return
        logger.warning(
            "%d connections to storage.listen were no gateways; the last: %s",
            self._count,
            self._last_cause,
        )
        self._count = 0
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._say)

    def __repr__(self) -> str:
        return f"<RefusedConnections {self._count} not logged yet>"


def _cause(error: OSError | TimeoutError) -> str:
    """In words: many of these errors have none."""
    if isinstance(error, ConnectionAbortedError | TimeoutError):
        return "no TLS handshake in time"
    if isinstance(error, ConnectionError):
        return "it was closed before the TLS handshake"
    return str(error) or type(error).__name__
