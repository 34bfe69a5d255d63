"""One storage server as a gateway knows it: its connections, and what it last said of itself."""

from __future__ import annotations

from objectcache_gateway.storage.storage_pool import StoragePool
from objectcache_schemas.operators.server_list import ServerState

LOCAL_LEAD = 1  # requests that a server of this host may have more: its bodies pass nobody else


class KnownServer:
    """`answers` is None before it was asked, and false while it does not answer."""

    def __init__(self, pool: StoragePool, *, is_configured: bool) -> None:
        """`is_configured`: whether the settings name it; others are forgotten in the end."""
        self.pool = pool
        self.is_configured = is_configured
        self.answers: bool | None = None
        self.state: ServerState | None = None
        self.in_use = 0  # requests of this gateway
        self._in_use_then = 0  # when it last told its load
        self._requests_since = 0  # that went there from here since it told of itself
        self._sessions_since = 0  # that went there from here since it told how many it has

    @property
    def name(self) -> str:
        """Where this gateway reaches it."""
        return str(self.pool.address)

    @property
    def is_local(self) -> bool:
        """Whether it is on this host, and takes file descriptors."""
        return self.pool.address.passes_descriptors

    @property
    def is_draining(self) -> bool:
        """Whether it takes no more work."""
        return self.state is not None and self.state.draining

    @property
    def takes_work(self) -> bool:
        """Whether it has answered, and takes work."""
        return self.answers is True and not self.is_draining

    @property
    def serves(self) -> bool:
        """Whether it takes work, and can reach its store."""
        return self.takes_work and not (self.state is not None and self.state.store_failure)

    @property
    def load(self) -> int:
        """Requests that it has, as it last said, and those that went there from here since."""
        told = self.state.load if self.state is not None else 0
        lead = LOCAL_LEAD if self.is_local else 0
        return max(0, told + self.in_use - self._in_use_then) - lead

    def begun_request(self) -> None:
        """A request of this gateway has gone there; `in_use` is the caller's."""
        self._requests_since += 1

    @property
    def recent(self) -> tuple[int, float]:
        """Bytes of gets and puts that it began lately, as it last said, and how many these are."""
        state = self.state
        return (state.recent_bytes, state.recent_requests) if state is not None else (0, 0.0)

    def work_bytes(self, request_bytes: float) -> float:
        """What it has moved lately and has to do: requests that it has, or that went there from
        here since it told, count as `request_bytes` each, those that it has as 1 at least.
        """
        moved_bytes = self.recent[0] + request_bytes * self._requests_since
        return moved_bytes + max(1.0, request_bytes) * self.load

    @property
    def sessions(self) -> int:
        """Those that it has, as it last said, and those that were begun there from here since."""
        told = self.state.sessions if self.state is not None else 0
        return told + self._sessions_since

    def begun_session(self) -> None:
        """A session was begun there, or a ticket for one was given."""
        self._sessions_since += 1

    def heard(self, state: ServerState) -> None:
        """It has told of itself."""
        self.answers, self.state = True, state
        self._sessions_since = self._requests_since = 0
        self._in_use_then = self.in_use
        if state.draining:
            self.pool.close_idle()

    def lost(self) -> None:
        """It takes no connections."""
        self.answers = False
        self.pool.close_idle()

    def stands_still(self) -> None:
        """It takes connections and answers nothing: whoever waits for it is told."""
        self.answers = False
        self.pool.cut()

    def is_called(self, state: ServerState, host_id: str) -> bool:
        """Whether that is this server, told of by another one, on the host with `host_id`. Servers
        of several hosts, or of containers of one, can have the same path for their sockets.
        """
        own = self.state
        if own is not None and own.server_id == state.server_id:
            return True
        address = own.address if own is not None else ""
        if state.address and state.address in (self.name, address):
            return True
        is_on_its_socket = self.is_local and self.name == state.socket_path
        is_other = own is not None and address != state.address
        return is_on_its_socket and state.host_id == host_id and not is_other

    def has_socket(self, path: str, host_id: str) -> bool:
        """Whether the socket with this path, on the host with `host_id`, is known as this one's."""
        if self.is_local and self.name == path:
            return True
        own = self.state
        return own is not None and (own.host_id, own.socket_path) == (host_id, path)

    def __repr__(self) -> str:
        return f"<KnownServer {self.name}, answers {self.answers}, {self.in_use} in use>"
