"""Addresses of settings, and the listening sockets behind them.

A server's sockets are its own, or were opened by whoever started it: systemd (LISTEN_FDS) or the
supervisor. Those live on when the server ends, so that connections wait for the next one and are
not refused.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from objectcache_schemas.errors import InvalidRequest, Unavailable

BACKLOG = 1024  # connections that wait while no process accepts; the system may allow fewer
FIRST_PASSED_DESCRIPTOR = 3  # of systemd's protocol, sd_listen_fds(3)
PORT_MAX = 65_535
PORT_DIGITS_MAX = 5
_HOST = re.compile(r"[\w.-]*")  # empty is every interface


@dataclass(frozen=True, slots=True)
class HostPort:
    """An address as settings give it. `host` is without brackets; empty is every interface."""

    host: str
    port: int

    @classmethod
    def parse(cls, name: str, text: str, other_words: Sequence[str] = ()) -> HostPort:
        """Parse the setting `name`, host:port or [IPv6]:port.

        `other_words` are what the setting may be beside an address, for the error. Raises
        `InvalidRequest` that says which part is wrong.
        """
        host, colon, port = text.rpartition(":")
        fault = _fault(host, port) if colon else "there is no port; write it as in 127.0.0.1:9000"
        if fault:
            form = address_form(other_words)
            raise InvalidRequest(f"{name} must be {form}, got {text!r}: {fault}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def with_port(self, port: int) -> HostPort:
        """The same host with another port."""
        return HostPort(self.host, port)

    @property
    def is_loopback(self) -> bool:
        """Whether nobody on another host reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_form(other_words: Sequence[str] = ()) -> str:
    """What an address is, and what may stand in its place, in words."""
    return either(["host:port", *(word for word in other_words if word)])


def either(names: Sequence[str]) -> str:
    """Names in a sentence: a, b or c."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _fault(host: str, port: str) -> str:
    """What is wrong with the two parts of an address; nothing where both can be used."""
    if "/" in host or "/" in port:
        return "this is a URL, give its host and port alone"
    if port.endswith("]"):
        return f"there is no port; write it as in {host}:{port}:9000"
    if host.startswith("[") or host.endswith("]"):
        if not (host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])):
            return f"{host} is no IPv6 address in brackets"
    elif ":" in host:
        return "an IPv6 address stands in brackets, as in [::1]:9000"
    elif not _HOST.fullmatch(host):
        return f"{host!r} is no name or address of a host"
    return "" if _is_port(port) else f"{port!r} is no port, a number from 0 to {PORT_MAX}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    is_number = len(text) <= PORT_DIGITS_MAX and text.isascii() and text.isdigit()
    return is_number and int(text) <= PORT_MAX


def open_listeners(address: HostPort, setting: str = "") -> list[socket.socket]:
    """Listening sockets on every address of the host, all on one port; port 0 is a free one.

    Raises `Unavailable` where one cannot be had; it names the `setting` that says where, if any.
    """
    listeners: list[socket.socket] = []
    port = address.port
    try:
        for family, place in _places(address):
            listener = _listener(family, (place, port))
            listeners.append(listener)
            port = port_of(listener)
    except OSError as error:
        for listener in listeners:
            listener.close()
        reason = error.strerror or str(error)
        remedy = f"; {setting} says where else" if setting else ""
        raise Unavailable(f"cannot listen on {address}: {reason}{remedy}") from error
    return listeners


def _places(address: HostPort) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    places = [(family, str(place[0])) for family, _, _, _, place in found]
    return list(dict.fromkeys(places))


def _listener(family: socket.AddressFamily, place: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def port_of(listener: socket.socket) -> int:
    """The port of a listening TCP socket."""
    return int(listener.getsockname()[1])


def passed_descriptors(environment: MutableMapping[str, str], pid: int) -> list[int]:
    """The descriptors that systemd passed to this process, by LISTEN_FDS and LISTEN_PID.

    The variables are removed, so that no child takes them for its own. Raises `InvalidRequest` for
    a LISTEN_FDS that is no number.
    """
    for_pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if for_pid != str(pid):
        return []
    if not count.isascii() or not count.isdigit():
        raise InvalidRequest(f"LISTEN_FDS must be a number, got {count!r}")
    return list(range(FIRST_PASSED_DESCRIPTOR, FIRST_PASSED_DESCRIPTOR + int(count)))


def adopt_listeners(descriptors: Sequence[int]) -> list[socket.socket]:
    """Sockets of descriptors that were passed to this process; it owns them from now on.

    Raises `InvalidRequest` for one that is no listening TCP socket.
    """
    return [_adopted(descriptor) for descriptor in descriptors]


def _adopted(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise InvalidRequest(
            f"passed descriptor {descriptor} is no socket: {error.strerror}"
        ) from error
    is_inet = listener.family in (socket.AF_INET, socket.AF_INET6)
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    if not is_inet or listener.type != socket.SOCK_STREAM or not is_listening:
        listener.detach()
        raise InvalidRequest(f"passed descriptor {descriptor} is no listening TCP socket")
    os.set_inheritable(descriptor, False)
    listener.setblocking(False)
    return listener
