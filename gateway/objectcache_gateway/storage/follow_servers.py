"""Keeps what a gateway knows of the storage servers: who there is, what they have to do, and
whether they still move.

Every server is asked once a second over a connection of its own. One that answers nothing for a few
seconds stands still (its process is stopped, its host hangs, the network is gone): its connections
are cut, so that whoever waits for it is answered, by another server where that may be. Where there
is one server only it is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_address import StorageAddress, UnixAddress
from objectcache_gateway.storage.storage_connection import StorageConnection, Unreachable
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_runtime.first_of import end
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.operators.server_list import GetServers, Servers, ServerState

ASK_INTERVAL_S = 1.0
SILENCE_S_MAX = 5.0
GONE_AFTER_S = 60.0  # of one that the settings do not name
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger("objectcache.gateway.follow_servers")


class ServerFollower:
    """Follows all servers of a fleet from `start` to `close`."""

    def __init__(
        self, fleet: StorageFleet, remote: Callable[[str], StorageAddress] | None = None
    ) -> None:
        """`remote` makes the address of a server on another host; it raises `InvalidRequest` where
        this process shows no certificate.
        """
        self._fleet = fleet
        self._remote = remote
        self._host_id = _BOOT_ID.read_text().strip()
        self._tasks: dict[KnownServer, asyncio.Task[None]] = {}
        self._not_reached: set[str] = set()

    def start(self) -> None:
        """Follow from now on."""
        for server in self._fleet.servers:
            self._follow(server)

    async def close(self) -> None:
        """Follow no more."""
        tasks, self._tasks = self._tasks, {}
        await end(*tasks.values())

    def _follow(self, server: KnownServer) -> None:
        self._tasks[server] = asyncio.create_task(self._ask_again_and_again(server))

    async def _ask_again_and_again(self, server: KnownServer) -> None:
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        while server.is_configured or now_s() - heard_s < GONE_AFTER_S:
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    connection = await server.pool.connect(waits=False)
                heard_s = await self._ask(server, connection)
            except Unreachable:
                server.lost()
            except (TimeoutError, ObjectCacheError) as error:
                self._stands_still(server, error)
            await asyncio.sleep(ASK_INTERVAL_S)
        logger.info("storage server %s is gone", server.name)
        self._tasks.pop(server, None)
        self._fleet.remove(server)

    async def _ask(self, server: KnownServer, connection: StorageConnection) -> float:
        """Ask until the connection ends; returns when it last answered. Raises `TimeoutError`
        where it stands still.
        """
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S_MAX):
                        told = await connection.ask(self._question(), Servers)
                except ObjectCacheError:
                    server.lost()
                    return heard_s
                heard_s = now_s()
                server.heard(told.answering)
                self._drop_second(server)
                for other in told.others:
                    self._meet(other)
                await asyncio.sleep(ASK_INTERVAL_S)
        finally:
            connection.close()

    def _question(self) -> GetServers:
        return GetServers(knows_others=self._fleet.has_several)

    def _stands_still(self, server: KnownServer, error: BaseException) -> None:
        if not self._fleet.has_several:
            return
        if server.answers is not False:
            logger.warning("storage server %s stands still: %r", server.name, error)
        server.stands_still()

    def _meet(self, state: ServerState) -> None:
        """Know a server from now on that another one tells of."""
        if any(server.is_called(state, self._host_id) for server in self._fleet.servers):
            return
        address = self._address(state)
        if address is not None:
            logger.info("storage server %s is there", state.name)
            self._follow(self._fleet.add(address))

    def _drop_second(self, server: KnownServer) -> None:
        """A server that is known twice, by two addresses, is kept as the settings name it; where
        they name it by both, as the one that is on this host.
        """
        assert server.state is not None
        for other in list(self._fleet.servers):
            is_same = other.state is not None and other.state.server_id == server.state.server_id
            if other is server or not is_same:
                continue
            is_nearer = server.is_local and not other.is_local
            if not other.is_configured or (server.is_configured and is_nearer):
                self._fleet.remove(other)
                self._tasks.pop(other).cancel()

    def _address(self, state: ServerState) -> StorageAddress | None:
        path = state.socket_path
        is_here = state.host_id == self._host_id and bool(path) and Path(path).exists()
        # Containers of one host can each have another server there.
        if is_here and not any(one.has_socket(path, self._host_id) for one in self._fleet.servers):
            return UnixAddress(Path(path))
        if not state.address or self._remote is None:
            self._cannot(state, "it says no address; set storage.advertised_address there")
            return None
        try:
            return self._remote(state.address)
        except InvalidRequest as error:
            self._cannot(state, error.message)
            return None

    def _cannot(self, state: ServerState, why: str) -> None:
        if state.name not in self._not_reached:
            logger.warning("storage server %s cannot be reached from here: %s", state.name, why)
            self._not_reached.add(state.name)

    def __repr__(self) -> str:
        return f"<ServerFollower of {len(self._tasks)}>"
