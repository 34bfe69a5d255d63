"""A bounded pool of HTTP connections to one gateway."""

from __future__ import annotations

import http.client
import select
import ssl
import threading
import time
from dataclasses import dataclass

from objectcache.channel.endpoint import Endpoint
from objectcache_schemas.errors import Busy, Unavailable


@dataclass(slots=True, eq=False)
class Connection:
    """One connection. `reused` has carried a request before, so the server may just close it."""

    http: http.client.HTTPConnection
    reused: bool = False

    def set_timeout(self, timeout_s: float) -> None:
        """Bound the connecting, and every wait for the socket from now on."""
        self.http.timeout = timeout_s
        if self.http.sock is not None:
            self.http.sock.settimeout(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether an idle connection can carry a request: it is open, and nothing came unasked."""
        if self.http.sock is None:
            return False
        poll = select.poll()
        poll.register(self.http.sock, select.POLLIN)
        return not poll.poll(0)


class ConnectionPool:
    """Connections are reused last in, first out, so that spare ones go stale and are closed.

    At most `connections_max` are open; whoever needs one more waits. Thread-safe.
    """

    def __init__(
        self, endpoint: Endpoint, connections_max: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._endpoint = endpoint
        self._connections_max = connections_max
        is_https = endpoint.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if is_https else None
        self.tls = self._tls
        self.url = endpoint.url  # of whom the connections are to
        self._idle: list[Connection] = []
        self._open_count = 0
        self._closed = False
        self._condition = threading.Condition()

    def take(self, timeout_s: float) -> Connection:
        """An idle connection, or one that will connect when it is used.

        The caller gives it to `give_back` or `discard`. Raises `Busy` when none came free within
        `timeout_s`, `Unavailable` once the pool is closed.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while not self._closed:
                while self._idle:
                    connection = self._idle.pop()
                    if connection.is_alive:
                        connection.set_timeout(timeout_s)
                        return connection
                    self._drop(connection)
                if self._open_count < self._connections_max:
                    self._open_count += 1
                    return Connection(self._new(timeout_s))
                if not self._condition.wait(deadline_s - time.monotonic()):
                    raise Busy(
                        f"no connection came free within {timeout_s} s; connections_max is "
                        f"{self._connections_max}, and an open delivery holds one"
                    )
            raise Unavailable("the client is closed")

    def give_back(self, connection: Connection) -> None:
        """The connection's last response was read to its end."""
        connection.reused = True
        with self._condition:
            if self._closed or connection.http.sock is None:
                self._drop(connection)
            else:
                self._idle.append(connection)
            self._condition.notify()

    def discard(self, connection: Connection) -> None:
        """The connection is in no state to be used again."""
        with self._condition:
            self._drop(connection)
            self._condition.notify()

    def close(self) -> None:
        """Close idle connections now and others as they come back. Repeating has no effect."""
        with self._condition:
            self._closed = True
            while self._idle:
                self._drop(self._idle.pop())
            self._condition.notify_all()

    def _drop(self, connection: Connection) -> None:
        self._open_count -= 1
        connection.http.close()

    def _new(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._endpoint.host, self._endpoint.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)

    def __repr__(self) -> str:
        return (
            f"<ConnectionPool {self._open_count}/{self._connections_max} open, "
            f"{len(self._idle)} idle>"
        )
