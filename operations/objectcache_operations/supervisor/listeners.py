"""The listening sockets that a supervisor keeps for its gateways."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from objectcache_runtime.networking.listening import (
    HostPort,
    adopt_listeners,
    open_listeners,
    passed_descriptors,
    port_of,
)
from objectcache_runtime.settings import Settings


@dataclass(frozen=True, slots=True)
class Served:
    """Open sockets, and the URL at which they are reached."""

    url: str
    sockets: tuple[socket.socket, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Their numbers, for the gateways."""
        return tuple(listener.fileno() for listener in self.sockets)


def find(settings: Settings, environment: MutableMapping[str, str]) -> Served:
    """The sockets that systemd passed, else new ones on gateway.listen.

    Raises `InvalidRequest` for an address or a descriptor that is none, `Unavailable` where it
    cannot be listened on.
    """
    given = passed_descriptors(environment, os.getpid())
    if given:
        sockets = adopt_listeners(given)
        address = HostPort(*sockets[0].getsockname()[:2])
    else:
        wanted = HostPort.parse("gateway.listen", settings.gateway.listen)
        sockets = open_listeners(wanted, "gateway.listen")
        address = wanted.with_port(port_of(sockets[0]))
    scheme = "https" if settings.gateway.tls_certificate else "http"
    return Served(f"{scheme}://{address}", tuple(sockets))
