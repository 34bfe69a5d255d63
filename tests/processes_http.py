"""HTTP over a unix socket, as the admin server speaks to gateways."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

TIMEOUT_S = 20.0


class UnixConnection(http.client.HTTPConnection):
    """A connection to a socket's path."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, resource: str, body: str | None = None) -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = UnixConnection(path)
    try:
        connection.request(method, resource, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
