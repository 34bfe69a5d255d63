"""How a client joins a session over a fabric."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from objectcache.channel.endpoint import Endpoint
from objectcache.sessions.fabric_session import FabricSession
from objectcache.sessions.web_wire import WebWire
from objectcache_fabrics.endpoints import FabricEndpoint
from objectcache_fabrics.nixl import agent as nixl_agent
from objectcache_fabrics.nixl.endpoint import NixlEndpoint
from objectcache_schemas.errors import InvalidRequest, Unavailable, Unsupported


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """Which devices this process uses.

    `nixl_devices` are UCX's names of network devices, empty for all; `nixl_ucx` more settings of
    UCX, NAME=VALUE,...; `verbs_device` an RDMA device, empty for the first that is active.
    """

    nixl_devices: str = "lo"
    nixl_ucx: str = ""
    verbs_device: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                kind = type(value).__name__
                raise InvalidRequest(f"fabric: {field.name} must be a string, got {kind}")


def join_fabric(
    transport: str,
    endpoint: Endpoint,
    sign: Callable[[Any], dict[str, str]],
    tls: ssl.SSLContext | None,
    timeout_s: float,
    settings: FabricSettings,
    server_id: bytes | None = None,
) -> FabricSession:
    """Join a session through the gateway, with this storage server or any, and open the fabric.

    Raises what is in the way: `Unsupported` where this process has no such fabric.
    """
    side = _endpoint(transport, settings)
    try:
        wire = WebWire.join(endpoint, sign, tls, timeout_s, server_id)
        return FabricSession(wire, side, timeout_s)
    except BaseException:
        side.close()
        raise


def _endpoint(transport: str, settings: FabricSettings) -> FabricEndpoint:
    try:
        if transport == NixlEndpoint.name:
            nixl_agent.library()
            return NixlEndpoint(settings.nixl_devices, settings.nixl_ucx)
        from objectcache_fabrics.verbs.endpoint import VerbsEndpoint

        return VerbsEndpoint(settings.verbs_device)
    except Unavailable as error:
        raise Unsupported(error.message) from error
