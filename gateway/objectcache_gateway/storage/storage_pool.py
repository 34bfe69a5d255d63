"""The connections to one storage server, and what one request does with one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Self, TypeVar
from weakref import WeakSet

from objectcache_gateway.storage.storage_address import StorageAddress, UnixAddress
from objectcache_gateway.storage.storage_connection import (
    ConnectionLost,
    StorageConnection,
    Unreachable,
)
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy, Unsupported
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.message import Message, is_repeatable

R = TypeVar("R", bound=Message)

RECONNECT_WAIT_S = 5.0  # above what a restart takes, below what clients wait for an answer
RECONNECT_PAUSE_S = 0.05
GATEWAY = "(gateway)"  # whoever asks for no tenant; no user is called so

_waits_for_restart: ContextVar[bool] = ContextVar("waits_for_restart", default=True)


def waits_for_restart() -> bool:
    """Whether a request that nobody takes may wait until somebody does."""
    return _waits_for_restart.get()


@contextmanager
def without_waiting() -> Generator[None]:
    """What the block asks of a storage server that nobody can connect to fails at once."""
    before = _waits_for_restart.set(False)
    try:
        yield
    finally:
        _waits_for_restart.reset(before)


class StorageConversation:
    """The use of one connection for one request; its first message may need another connection.

    Entering it counts the connection; leaving gives an idle one back and closes any other.
    """

    _waits = True  # for a server that is being started again: there is no other

    def __init__(self, pool: StoragePool, tenant: str = GATEWAY) -> None:
        self._pool = pool
        self._tenant = tenant
        self._connection: StorageConnection | None = None

    async def __aenter__(self) -> Self:
        self._pool.count_use(self._tenant)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.uncount_use(self._tenant)
        self.end()

    @property
    def connection(self) -> StorageConnection:
        """The connection, once the first message was sent."""
        assert self._connection is not None
        return self._connection

    async def begin(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """Send the first message and return the reply; `timeout_s` as in `StorageConnection.ask`.

        A pooled connection that ended before a byte of the reply is replaced once, if the request
        may be carried out twice: most likely the storage server was restarted and did not see it,
        but it may have died after it did. Raises `ConnectionLost` where it may not.
        """
        pooled = self._pool.take_idle()
        if pooled is not None:
            self._connection = pooled
            try:
                return await pooled.ask(request, reply_type, timeout_s=timeout_s)
            except ConnectionLost as error:
                if not self._waits or not error.unheard or not self._pool.may_repeat(request):
                    raise
                pooled.close()
        self._connection = await self._pool.connect(waits=self._waits)
        return await self._connection.ask(request, reply_type, timeout_s=timeout_s)

    async def begin_with_descriptor(
        self, request: Message, reply_type: type[R]
    ) -> tuple[R, int | None]:
        """Send a first message that must not be repeated; see `ask_for_descriptor`."""
        self._connection = self._pool.take_idle()
        if self._connection is None:
            self._connection = await self._pool.connect(waits=self._waits)
        if not self._connection.passes_descriptors:
            raise Unsupported(
                "the path through the gateway's memory needs a storage server on the gateway's host"
            )
        return await self._connection.ask_for_descriptor(request, reply_type)

    def end(self) -> None:
        """Give an idle connection back, close any other."""
        if self._connection is None:
            return
        if self._connection.idle:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()


class StoragePool:
    """At most `connections_max` connections to one storage server; the last used is used next.

    While the server cannot be reached requests wait for it, until RECONNECT_WAIT_S after the first
    failure: it is being started again more often than not. After that they fail at once, and
    `without_waiting` they always do.
    """

    def __init__(
        self,
        address: Path | StorageAddress,
        limits: Limits,
        connections_max: int | FairShares,
        timeout_s: float,
    ) -> None:
        """`connections_max` may be what several pools share."""
        self.address = UnixAddress(address) if isinstance(address, Path) else address
        self._unreachable_since_s: float | None = None
        self._limits = limits
        if isinstance(connections_max, int):
            connections_max = FairShares(connections_max)
        self._uses = connections_max
        self._timeout_s = timeout_s
        self._idle: list[StorageConnection] = []
        self._opened: WeakSet[StorageConnection] = WeakSet()
        self._closed = False

    def conversation(self) -> StorageConversation:
        """A connection for one request. Entering raises `Busy` where all are in use."""
        return StorageConversation(self)

    def count_use(self, tenant: str = GATEWAY) -> None:
        """Count a connection as in use. Raises `Busy` where all are, or the tenant has its share;
        the gateway itself has what is free.
        """
        uses = self._uses
        if uses.free <= 0 or (tenant != GATEWAY and not uses.may_take(tenant, 1)):
            raise Busy(
                f"{uses.taken} connections to the storage server are in use, {uses.held(tenant)} "
                f"of them for this user; gateway.storage_connections_max is {uses.total}",
                retry_after_s=1.0,
            )
        uses.take(tenant, 1)

    def uncount_use(self, tenant: str = GATEWAY) -> None:
        """Count it no more."""
        self._uses.give_back(tenant, 1)

    async def call(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """A conversation of one request and one reply; `timeout_s` as in `ask`."""
        async with self.conversation() as conversation:
            return await conversation.begin(request, reply_type, timeout_s=timeout_s)

    @property
    def in_use(self) -> int:
        """Requests that have, or are getting, a connection."""
        return self._uses.taken

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    def take_idle(self) -> StorageConnection | None:
        """A live idle connection, or None."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        return None

    def may_repeat(self, request: Message) -> bool:
        """Whether a request whose reply was lost may be sent again."""
        return is_repeatable(request, self._limits)

    async def connect(self, *, waits: bool = True) -> StorageConnection:
        """A connection of its own; raises `Unavailable` or `Busy`. Without `waits` it is tried
        once.
        """
        while True:
            try:
                opened = await StorageConnection.open(self.address, self._limits, self._timeout_s)
            except Unreachable:
                if self._closed or not waits or not self._is_worth_waiting():
                    raise
                await asyncio.sleep(RECONNECT_PAUSE_S)
            else:
                self._unreachable_since_s = None
                self._opened.add(opened)
                return opened

    def _is_worth_waiting(self) -> bool:
        """Whether to try again, after nobody took a connection."""
        now_s = asyncio.get_running_loop().time()
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        away_s = now_s - self._unreachable_since_s
        return waits_for_restart() and away_s < RECONNECT_WAIT_S

    def give_back(self, connection: StorageConnection) -> None:
        """Keep an idle connection for the next request."""
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def close_idle(self) -> None:
        """Close what is idle: the server goes, and would close it under a request."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def cut(self) -> None:
        """End every connection, whatever it is used for."""
        self.close_idle()
        for connection in list(self._opened):
            connection.cut()

    def close(self) -> None:
        """Close what is idle; what is in use closes when its request ends."""
        self._closed = True
        self.close_idle()

    def __repr__(self) -> str:
        return f"<StoragePool {self.in_use}/{self._uses.total} in use, {len(self._idle)} idle>"
