"""A network link in front of the server: a relay on this host that passes bytes at a given rate.

On one host a prefix arrives at the speed of memory, which leaves little to hide behind compute.
Storage is elsewhere as a rule, and then the link decides. The kernel paces the relay's sockets
(SO_MAX_PACING_RATE), and the bytes pass through pipes, so the link costs the two cores little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Generator
from urllib.parse import urlsplit

SO_MAX_PACING_RATE = 47  # Linux, asm-generic/socket.h; Python's socket module has no name for it
PIPE_BYTES = 1 << 20  # what an unprivileged process may ask for


@contextlib.contextmanager
def paced_link(endpoint: str, rate_bytes_per_s: int) -> Generator[str]:
    """A URL behind which `endpoint` is reached, with answers at `rate_bytes_per_s` a connection.

    Requests pass unpaced.
    """
    server = urlsplit(endpoint)
    assert server.hostname is not None
    assert server.port is not None
    relay = _Relay((server.hostname, server.port), rate_bytes_per_s)
    try:
        yield relay.url
    finally:
        relay.close()


class _Relay:
    def __init__(self, server: tuple[str, int], rate_bytes_per_s: int) -> None:
        self._server = server
        self._rate_bytes_per_s = rate_bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = _started(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._accepting.join()
        for open_socket in self._sockets:
            with contextlib.suppress(OSError):  # the peer may have closed it
                open_socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for open_socket in (self._listener, *self._sockets):
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._sockets.append(client)
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()  # as a server that is not there would
            else:
                self._connect(client, server)

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        self._sockets.append(server)
        rate = self._rate_bytes_per_s.to_bytes(8, "little")
        client.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        for source, target in ((client, server), (server, client)):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._threads.append(_started(_pass_on, source, target))


def _started(work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="paced-link", daemon=True)
    thread.start()
    return thread


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes until either side ends, then end the other."""
    pipe_end, pipe_start = os.pipe()
    fcntl.fcntl(pipe_start, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    try:
        with contextlib.suppress(OSError):  # a reset ends a connection like a close
            while taken := os.splice(source.fileno(), pipe_start, PIPE_BYTES):
                while taken:
                    taken -= os.splice(pipe_end, target.fileno(), taken)
    finally:
        os.close(pipe_end)
        os.close(pipe_start)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
