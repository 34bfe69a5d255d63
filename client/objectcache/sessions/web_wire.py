"""A session over a WebSocket to a gateway: for clients that the storage server's socket is not
near.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import join_session
from objectcache.channel.responses import parse_error
from objectcache.sessions.session_wire import EVENT_BYTES_MAX, SessionWire
from objectcache_schemas import headers
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.frames import FrameError
from objectcache_schemas.messages.message import Message

PING_INTERVAL_S = 10.0  # a gateway that answers none for as long again is gone
LEAVE_TIMEOUT_S = 1.0  # for the gateway to answer a Close; it is told, whether it does or not
LATER_MAX = 64  # small messages that wait to be sent; more find no room


class WebWire(SessionWire):
    """A joined WebSocket. The library's thread answers the gateway's pings.

    What must not wait for the connection is done by a thread of the wire's own.
    """

    name = "the session"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._later: deque[bytes] = deque()
        self._condition = threading.Condition()
        self._leaving = False
        self._ended = False
        self._thread = threading.Thread(
            target=self._send_later, name="objectcache-session", daemon=True
        )
        self._thread.start()

    @classmethod
    def join(
        cls,
        endpoint: Endpoint,
        sign: Callable[[Any], dict[str, str]],
        tls: ssl.SSLContext | None,
        timeout_s: float,
        server_id: bytes | None = None,
    ) -> WebWire:
        """Open a session, with this storage server or any. Raises the gateway's refusal, and
        `Unavailable` where it is out of reach or the package websockets is missing.
        """
        try:
            from websockets.exceptions import InvalidStatus, WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise Unavailable(
                "a session through a gateway needs the package websockets; "
                "pip install 'objectcache[nixl]'"
            ) from error
        request = join_session(server_id)
        signed = {name: value for name, value in sign(request).items() if name != "host"}
        try:
            connection = connect(
                f"{'wss' if endpoint.scheme == 'https' else 'ws'}://{endpoint.host_header}"
                f"{request.path}?{request.query}",
                additional_headers=signed,
                subprotocols=[headers.SESSION_PROTOCOL],  # type: ignore[list-item]
                ssl=tls,
                open_timeout=timeout_s,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=PING_INTERVAL_S,
                close_timeout=LEAVE_TIMEOUT_S,
                max_size=EVENT_BYTES_MAX,
                compression=None,
                proxy=None,
                user_agent_header=None,
            )
        except InvalidStatus as error:
            response = error.response
            body = bytes(response.body or b"")
            raise parse_error(
                response.status_code, response.headers.get, body, endpoint.url
            ) from error
        except (OSError, WebSocketException) as error:
            raise Unavailable(f"{endpoint.url}: no session: {error}") from error
        # Entered, never left: newer versions of the library warn of connections used without.
        return cls(connection.__enter__())

    def send(self, message: Message, fd: int | None = None) -> None:
        assert fd is None, "a file descriptor cannot leave this host"
        with _os_errors():
            self._connection.send(msgspec.msgpack.encode(message))

    def send_now(self, message: Message) -> None:
        with self._condition:
            if self._ended:
                raise ConnectionError("it was closed")
            if len(self._later) >= LATER_MAX:
                raise BlockingIOError("the connection takes no more now")
            self._later.append(msgspec.msgpack.encode(message))
            self._condition.notify()

    def _send_later(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._later or self._leaving or self._ended)
                if self._leaving or self._ended:
                    break
                data = self._later.popleft()
            with suppress(OSError), _os_errors():
                self._connection.send(data)
        if not self._ended:
            with suppress(OSError):
                self._connection.close()

    def receive(self) -> Iterator[bytes]:
        from websockets.exceptions import ConnectionClosedOK

        with _os_errors():
            while True:
                try:
                    data = self._connection.recv()
                except ConnectionClosedOK:
                    return
                if not isinstance(data, bytes):
                    raise FrameError("a text message")
                yield data

    def leave(self) -> None:
        with self._condition:
            self._leaving = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_TIMEOUT_S)

    def shut_down(self) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify()
        with suppress(OSError):  # whoever is in the middle of sending holds up the rest
            socket.socket.shutdown(self._connection.socket, socket.SHUT_RDWR)
        with suppress(OSError), _os_errors():
            self._connection.close_socket()

    def close(self) -> None:
        self.shut_down()


@contextmanager
def _os_errors() -> Generator[None]:
    """The library's errors of a connection that has ended become `ConnectionError`."""
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except ConnectionClosed as error:
        raise ConnectionError(f"it was closed ({error})") from error
