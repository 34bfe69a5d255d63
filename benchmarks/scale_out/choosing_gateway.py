"""A gateway that chooses servers by the project's own code, and moves on where one is gone.

Nothing is connected: what would be asked of a server is answered by the simulation at once.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_address import StorageAddress
from objectcache_gateway.storage.storage_connection import Unreachable
from objectcache_gateway.storage.storage_fleet import StorageFleet, nobody
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.sessions import JoinForClient
from objectcache_schemas.operators.server_list import ServerState

CONNECTIONS_MAX = 1 << 20  # no limit here
TIMEOUT_S = 10.0
JOIN = JoinForClient(identity="engine")
T = TypeVar("T")


class NamedAddress(StorageAddress):
    """A server of the simulation, which is on another host."""

    passes_descriptors = False

    def __init__(self, name: str) -> None:
        self._name = name

    async def connect(self) -> socket.socket:
        raise ConnectionRefusedError(f"{self._name} is simulated")

    def __str__(self) -> str:
        return self._name


class ServerFacts:
    """What a gateway finds of a server: whether it takes connections, and what it says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False

    @property
    def sessions(self) -> int:
        """That it has."""
        return 0

    @property
    def load(self) -> int:
        """Deliveries and puts that run."""
        return 0

    @property
    def recent(self) -> tuple[int, float]:
        """Bytes of those that began lately, and how many these are."""
        return 0, 0.0

    def state(self) -> ServerState:
        """As of now."""
        recent_bytes, recent_requests = self.recent
        return ServerState(
            server_id=self.name.encode(),
            host_id=self.name,
            address=self.name,
            load=self.load,
            recent_bytes=recent_bytes,
            recent_requests=recent_requests,
            sessions=self.sessions,
        )


class ChoosingGateway:
    """Within a running event loop, in which nothing waits."""

    def __init__(self, servers: Iterable[ServerFacts], chooser: random.Random) -> None:
        self._facts = {one.name: one for one in servers}
        addresses = [NamedAddress(name) for name in self._facts]
        self._fleet = StorageFleet(addresses, Limits(), CONNECTIONS_MAX, TIMEOUT_S, chooser.sample)

    def hear(self, servers: Iterable[ServerFacts]) -> None:
        """Ask all how they are, and meet those that are there now."""
        for one in servers:
            if one.name not in self._facts:
                self._facts[one.name] = one
                self._fleet.add(NamedAddress(one.name))
        for known in self._fleet.servers:
            facts = self._facts[known.name]
            if facts.is_lost:
                known.lost()
            else:
                known.heard(facts.state())

    def choose(self) -> KnownServer:
        """The server for a get or put without a target; it is in use until `release`."""
        server = _at_once(self._fleet.moving(None, nobody, self._ask))
        server.in_use += 1
        server.begun_request()
        return server

    def choose_for_session(self) -> KnownServer:
        """The server for a session."""
        return _at_once(self._fleet.moving(JOIN, nobody, self._ask))

    def release(self, server: KnownServer) -> None:
        """The request has ended."""
        server.in_use -= 1

    async def _ask(self, server: KnownServer) -> KnownServer:
        if self._facts[server.name].is_lost:
            raise Unreachable(f"{server.name} is lost")
        return server

    def close(self) -> None:
        """Let go of the fleet."""
        self._fleet.close()


def _at_once(asked: Coroutine[object, object, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    try:
        asked.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    asked.close()
    raise AssertionError("no server is there, and a gateway would wait")
