"""What a storage server says of itself to gateways, and to the other servers of its store."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import Settings
from objectcache_schemas.operators.server_list import GetServers, Servers, ServerState
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.fleet.server_directory import ServerDirectory

LEAVE_S = 2.5  # gateways ask every second how the server is
FOLLOWED_S = 10.0  # a gateway that has not asked for so long does not ask any more
_ANY_HOST = ("", "0.0.0.0", "::", "*")  # noqa: S104 - of what others cannot connect to


def advertised_address(settings: Settings) -> str:
    """Where gateways of other hosts reach this server; empty where none may."""
    storage = settings.storage
    if storage.advertised_address or not storage.listen:
        return storage.advertised_address
    address = HostPort.parse("storage.listen", storage.listen)
    return "" if address.host in _ANY_HOST or not address.port else storage.listen


def no_log() -> tuple[int, int | None]:
    """Of a store that is this server's own."""
    return 0, 0


class OwnState:
    """This server among those of its store. `leaving` is set before it stops."""

    def __init__(
        self,
        settings: Settings,
        server_id: bytes,
        gates: Gates,
        directory: ServerDirectory,
        log: Callable[[], tuple[int, int | None]],
        sessions: Callable[[], int] = lambda: 0,
        store_failure: Callable[[], str] = lambda: "",
    ) -> None:
        """`log` tells the number under which this server writes to a shared store, and how many
        records of its log it has not replayed, None where nobody knows; `sessions` how many are
        open; `store_failure` why a shared store cannot be asked. None of them blocks.
        """
        self.server_id = server_id
        self.host_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.leaving = False
        self.could_be_left_s = -math.inf  # when a gateway last said so, by time.monotonic
        self.directory = directory
        self._gates = gates
        self._log = log
        self._sessions = sessions
        self._store_failure = store_failure
        self._socket_path = str(settings.storage_socket)
        self._address = advertised_address(settings)

    def state(self) -> ServerState:
        """As of now."""
        writer, lag_records = self._log()
        gates = self._gates
        recent_bytes, recent_requests = gates.recent.at(time.monotonic())
        return ServerState(
            server_id=self.server_id,
            host_id=self.host_id,
            socket_path=self._socket_path,
            address=self._address,
            load=gates.entrance.running + gates.waiting + gates.slots.puts + gates.puts.waiting,
            in_flight_bytes=gates.pool.promised_bytes,
            recent_bytes=recent_bytes,
            recent_requests=recent_requests,
            sessions=self._sessions(),
            draining=self.leaving or gates.takes_no_work,
            writer=writer,
            lag_records=lag_records or 0,
            lag_is_known=lag_records is not None,
            store_failure=self._store_failure(),
        )

    async def answer(self, request: GetServers) -> Servers:
        """What gateways ask: answered in the event loop, whose standing still is to be noticed."""
        if request.knows_others:
            self.could_be_left_s = time.monotonic()
        state = self.announce()
        return Servers(answering=state, others=tuple(self.directory.others()))

    def announce(self) -> ServerState:
        """Tell the others of this server, which serves by now: gateways hear of it from them."""
        state = self.state()
        self.directory.tell(state)
        return state

    def is_first(self) -> bool:
        """Whether this server does what one of all does: two may, while they hear of each other."""
        return all(self.server_id < other.server_id for other in self.directory.others())

    async def leave(self) -> None:
        """Serve on until gateways have heard that the server goes, where they can go elsewhere:
        they begin nothing new here, and no request meets a connection that closes.
        """
        self.leaving = True
        self.announce()
        if time.monotonic() - self.could_be_left_s < FOLLOWED_S:
            await asyncio.sleep(LEAVE_S)

    def __repr__(self) -> str:
        return f"<OwnState {self.server_id.hex()}>"
