"""Attacks on a gateway's own room: its connections, and the requests that it serves at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from benchmarks.victim.attacks import NewTenant, Peer, ThreeBytePut
from benchmarks.victim.signed_http import Signer
from objectcache_schemas.limits import KIB

CONNECTIONS = 4100  # more than gateway.connections_max
SMALL_PUTS, SMALL_PUT_BYTES = 600, 32 * KIB  # more than gateway.requests_in_flight_max


class Silent(Peer):
    """Connects and sends nothing."""

    def begin(self, connected: socket.socket) -> None:
        """Nothing."""

    def go_on(self, connected: socket.socket, now_s: float) -> None:
        if not connected.recv(4 * KIB):
            raise ConnectionError("cut")


class HalfHead(Silent):
    """Sends the head of a request byte by byte."""

    def begin(self, connected: socket.socket) -> None:
        connected.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        self._last_s = time.monotonic()

    def go_on(self, connected: socket.socket, now_s: float) -> None:
        if now_s - self._last_s >= 1.0:
            self._last_s = now_s
            connected.send(b"x")
        super().go_on(connected, now_s)


class Refused(Silent):
    """Asks without a signature, and keeps the connection."""

    def begin(self, connected: socket.socket) -> None:
        connected.sendall(b"GET /nobody/signs HTTP/1.1\r\nHost: x\r\n\r\n")


class Idle(Silent):
    """Asks once with a good signature, and keeps the connection."""

    def __init__(self, signer: Signer) -> None:
        super().__init__(signer.address)
        self._signer = signer

    def begin(self, connected: socket.socket) -> None:
        connected.sendall(self._signer.head("GET", "/"))


def strangers(kind: type[Silent]) -> Callable[[NewTenant], list[Peer]]:
    """4,100 connections of whoever has no key."""

    def peers(new_tenant: NewTenant) -> list[Peer]:
        signer, _ = new_tenant()  # its address alone is used
        return [kind(signer.address) for _ in range(CONNECTIONS)]

    return peers


def idle_connections(new_tenant: NewTenant) -> list[Peer]:
    """4,100 connections of one tenant, which has asked once on each."""
    signer, _ = new_tenant()
    return [Idle(signer) for _ in range(CONNECTIONS)]


def small_puts(new_tenant: NewTenant, tenant_count: int = 2) -> list[Peer]:
    """600 puts of 32 KiB by two tenants, which stand still in the gateway."""
    tenants = [new_tenant() for _ in range(tenant_count)]
    return [
        ThreeBytePut(*_path_of(tenants[number % tenant_count], number), SMALL_PUT_BYTES)
        for number in range(SMALL_PUTS)
    ]


def _path_of(tenant: tuple[Signer, str], number: int) -> tuple[Signer, str]:
    signer, path = tenant
    return signer, f"{path}-{number}"


CONNECTION_ATTACKS: dict[str, Callable[[NewTenant], list[Peer]]] = {
    "silent-connections": strangers(Silent),
    "half-heads": strangers(HalfHead),
    "refused-connections": strangers(Refused),
    "idle-connections": idle_connections,
    "small-puts": small_puts,
}
