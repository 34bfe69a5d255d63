"""The address of a gateway, as a user writes it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from objectcache_schemas.errors import InvalidRequest

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `host` is without brackets, `port` is always set."""

    scheme: str  # http or https
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse `http://host[:port]` or `https://host[:port]`; raises `InvalidRequest`."""
        if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(f"endpoint must be a string, got {type(url).__name__}")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest(f"endpoint {url!r}: {error}") from error
        if parts.scheme not in DEFAULT_PORTS or not host or not host.isascii():
            raise InvalidRequest(f"endpoint {url!r} must be http://host:port or https://host:port")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise InvalidRequest(f"endpoint {url!r} must end after the port")
        if port == 0:
            raise InvalidRequest(f"endpoint {url!r} must not name port 0")
        return cls(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme])

    @property
    def host_header(self) -> str:
        """Value of the Host header: without a scheme's own port, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The endpoint as a URL without a path."""
        return f"{self.scheme}://{self.host_header}"

    @property
    def protects_bodies(self) -> bool:
        """Whether nobody on the way can change a body: TLS, or a host that is this one."""
        return self.scheme == "https" or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether the name or address is this host's loopback by definition, without looking it up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
