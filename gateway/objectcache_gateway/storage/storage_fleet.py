"""The storage servers of one store, as the gateway reaches them.

A request goes to whichever of two servers, drawn at random, has moved less lately and has less to
do; a session to whichever of the two has fewer of them. One that names a target goes to the
server that holds it. A request moves on to another server where nothing of it can have been
carried out: nobody took a connection, or the server refused because it goes; and where it may be
carried out twice, as it is declared. With one server everything is as if there could be no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_address import StorageAddress
from objectcache_gateway.storage.storage_connection import (
    ConnectionLost,
    NotConnected,
    StorageConnection,
    Unreachable,
)
from objectcache_gateway.storage.storage_pool import (
    GATEWAY,
    RECONNECT_PAUSE_S,
    RECONNECT_WAIT_S,
    StorageConversation,
    StoragePool,
    waits_for_restart,
)
from objectcache_gateway.storage.target_server import target_server
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.message import Message, is_repeatable
from objectcache_schemas.messages.sessions import CreateSession, JoinForClient

R = TypeVar("R", bound=Message)
T = TypeVar("T")

DRAINING = "Draining"  # the code of a refusal after which nothing was done
FEW_SESSIONS = 0.8  # of the mean: whoever has less, a server that was added, is drawn before others
Prefer = Callable[[KnownServer], bool]


def nobody(server: KnownServer) -> bool:
    """No server before others."""
    return False


def on_this_host(server: KnownServer) -> bool:
    """Those that the gateway shares a host with."""
    return server.is_local


def on_host(host_id: str) -> Prefer:
    """Those of the host with this boot id; where it is empty, those of this host."""
    if not host_id:
        return on_this_host
    return lambda server: server.state is not None and server.state.host_id == host_id


def called(server_id: bytes) -> Prefer:
    """The one with this id."""
    return lambda server: server.state is not None and server.state.server_id == server_id


class FleetConversation(StorageConversation):
    """The use of one connection for one request, to whichever server takes it."""

    def __init__(self, fleet: StorageFleet, tenant: str = GATEWAY, prefer: Prefer = nobody) -> None:
        super().__init__(fleet.first.pool, tenant)
        self._fleet = fleet
        self._prefer = prefer
        self._server: KnownServer | None = None

    async def begin(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """As `StorageConversation.begin`, over all servers."""

        async def at(server: KnownServer) -> R:
            self._turn_to(server)
            begin = super(FleetConversation, self).begin
            return await begin(request, reply_type, timeout_s=timeout_s)

        return await self._fleet.moving(request, self._prefer, at)

    async def begin_with_descriptor(
        self, request: Message, reply_type: type[R]
    ) -> tuple[R, int | None]:
        """As `StorageConversation.begin_with_descriptor`."""

        async def at(server: KnownServer) -> tuple[R, int | None]:
            self._turn_to(server)
            begin = super(FleetConversation, self).begin_with_descriptor
            return await begin(request, reply_type)

        return await self._fleet.moving(request, self._prefer, at)

    def _turn_to(self, server: KnownServer) -> None:
        """Let go of the server that was tried before."""
        self.end()
        self._waits = not self._fleet.has_several
        self._pool = server.pool
        self._server = server
        server.in_use += 1
        server.begun_request()

    def end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.in_use -= 1
        super().end()
        self._connection = None


class StorageFleet:
    """At most `connections_max` connections, to all storage servers together."""

    def __init__(
        self,
        addresses: Sequence[StorageAddress],
        limits: Limits,
        connections_max: int,
        timeout_s: float,
        choose: Callable[[Sequence[KnownServer], int], list[KnownServer]] = random.sample,
        *,
        is_steady: bool = False,
    ) -> None:
        """`choose` draws from the servers that may be asked. With `is_steady` one is asked for as
        long as it serves, so that what it was told is in what it answers.
        """
        self._is_steady = is_steady
        self._limits = limits
        self._uses = FairShares(connections_max)
        self._timeout_s = timeout_s
        self._choose = choose
        self._closed = False
        self.servers: list[KnownServer] = []
        for address in addresses:
            self.add(address, is_configured=True)

    # --- who there is ---

    @property
    def first(self) -> KnownServer:
        """The one that the settings name first."""
        return self.servers[0]

    @property
    def has_several(self) -> bool:
        """Whether a request could go elsewhere."""
        return len(self.servers) > 1

    def add(self, address: StorageAddress, *, is_configured: bool = False) -> KnownServer:
        """One more server."""
        pool = StoragePool(address, self._limits, self._uses, self._timeout_s)
        server = KnownServer(pool, is_configured=is_configured)
        self.servers.append(server)
        return server

    def remove(self, server: KnownServer) -> None:
        """A server is known no more; its connections end with their requests."""
        self.servers.remove(server)
        server.pool.close()

    # --- requests ---

    def conversation(self, tenant: str = GATEWAY, prefer: Prefer = nobody) -> StorageConversation:
        """A connection for one request. Entering raises `Busy` where all are in use, or the tenant
        has its share.
        """
        return FleetConversation(self, tenant, prefer)

    async def call(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """A conversation of one request and one reply; `timeout_s` as in
        `StorageConnection.ask`.
        """
        async with self.conversation() as conversation:
            return await conversation.begin(request, reply_type, timeout_s=timeout_s)

    async def connect(self) -> StorageConnection:
        """A connection of its own, to a server of this host where there is one. Raises
        `Unavailable` or `Busy`.
        """
        waits = not self.has_several
        return await self.moving(None, on_this_host, lambda one: one.pool.connect(waits=waits))

    async def connect_with(
        self, request: Message, reply_type: type[Message], prefer: Prefer = nobody
    ) -> StorageConnection:
        """A connection of its own that begins with this request, which was answered."""
        waits = not self.has_several

        async def at(server: KnownServer) -> StorageConnection:
            connection = await server.pool.connect(waits=waits)
            try:
                await connection.ask(request, reply_type)
            except BaseException:
                connection.close()
                raise
            return connection

        return await self.moving(request, prefer, at)

    async def moving(
        self, request: Message | None, prefer: Prefer, at: Callable[[KnownServer], Awaitable[T]]
    ) -> T:
        """What `at` returns for the first server that takes the request."""
        holder = self._holder(request)
        if holder is not None or not self.has_several:
            return await at(holder or self.first)
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + RECONNECT_WAIT_S
        tried: set[KnownServer] = set()
        is_session = isinstance(request, CreateSession | JoinForClient)
        has_failed_there = False  # after which it moves on once
        while True:
            server = self._next(prefer, tried, is_session)
            try:
                answer = await at(server)
            except Unavailable as error:
                tried.add(server)
                if not self._may_move(error, server, request):
                    if has_failed_there or not self._is_failure_there(error, request):
                        raise
                    has_failed_there = True
                if len(tried) < len(self.servers):
                    continue
                is_away = isinstance(error, Unreachable)
                if not is_away or not waits_for_restart() or self._closed or now_s() > until_s:
                    raise
            else:
                if is_session:
                    server.begun_session()
                return answer
            tried.clear()
            await asyncio.sleep(RECONNECT_PAUSE_S)

    def _may_move(self, error: Unavailable, server: KnownServer, request: Message | None) -> bool:
        """Whether another server may be asked after this."""
        if isinstance(error, Unreachable):
            server.lost()
            return True
        if isinstance(error, NotConnected) or error.code == DRAINING or request is None:
            return True
        is_lost = isinstance(error, ConnectionLost) and error.unheard
        return is_lost and is_repeatable(request, self._limits)

    def _is_failure_there(self, error: Unavailable, request: Message | None) -> bool:
        """Whether the server itself answered that it cannot, its store say, and another one may be
        asked, which may have another way there.
        """
        is_answer = type(error) is Unavailable and error.code == Unavailable.default_code
        return is_answer and request is not None and is_repeatable(request, self._limits)

    def _holder(self, request: Message | None) -> KnownServer | None:
        """The server of the target that a request names; None where it names none. Raises
        `Unavailable` where that server is not known: with one server it says itself what it has.
        """
        server_id = target_server(request) if request is not None and self.has_several else None
        if server_id is None:
            return None
        for server in self.servers:
            if server.state is not None and server.state.server_id == server_id:
                return server
        raise Unavailable("the storage server that holds the target is not there any more")

    def _next(self, prefer: Prefer, tried: set[KnownServer], is_session: bool) -> KnownServer:
        """The server to ask: of those that serve, those that are preferred, the one of two with
        less work, or with fewer sessions; where none is left, one that was not heard of yet, and
        then one that cannot reach its store, and then one that is away or goes.
        """
        left = [one for one in self.servers if one not in tried]
        serving = [one for one in left if one.serves]
        serving = serving or [one for one in left if one.answers is None]
        serving = serving or [one for one in left if one.takes_work] or left
        wanted = [one for one in serving if prefer(one)] or serving
        if self._is_steady:
            return wanted[0]
        request_bytes = self._request_bytes()
        if is_session:
            few = FEW_SESSIONS * sum(one.sessions for one in wanted) / len(wanted)
            wanted = [one for one in wanted if one.sessions < few] or wanted
        drawn = self._choose(wanted, min(2, len(wanted)))
        if is_session:
            return min(drawn, key=lambda one: (one.sessions, one.work_bytes(request_bytes)))
        return min(drawn, key=lambda one: one.work_bytes(request_bytes))

    def _request_bytes(self) -> float:
        """Of a get or put, on average over all servers lately; 0 where there were none: servers
        are chosen by how many requests they have then.
        """
        recent = [one.recent for one in self.servers]
        count = sum(requests for _, requests in recent)
        return sum(size for size, _ in recent) / count if count else 0.0

    # --- counts ---

    @property
    def in_use(self) -> int:
        """Requests that have, or are getting, a connection."""
        return self._uses.taken

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return sum(server.pool.idle for server in self.servers)

    def close(self) -> None:
        """Close what is idle; what is in use closes when its request ends."""
        self._closed = True
        for server in self.servers:
            server.pool.close()

    def __repr__(self) -> str:
        return f"<StorageFleet {self.servers}>"
