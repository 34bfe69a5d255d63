"""How a client joins a session over a fabric."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from objectcache.channel.endpoint import Endpoint
from objectcache.memory.fabric_session import FabricEndpoint, FabricSession
from objectcache.memory.nixl_endpoint import NixlEndpoint
from objectcache.memory.session_keeper import RETRY_AFTER_S, SessionKeeper
from objectcache.memory.target_session import TargetSession
from objectcache.memory.web_wire import WebWire
from objectcache_schemas.errors import Busy, ObjectCacheError, Unavailable


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """Which devices this process uses.

    `nixl_devices` are UCX's names of network devices, empty for all; `nixl_ucx` more settings of
    UCX, NAME=VALUE,...; `verbs_device` an RDMA device, empty for the first that is active.
    """

    nixl_devices: str = "lo"
    nixl_ucx: str = ""
    verbs_device: str = ""


class FabricKeeper(SessionKeeper):
    """Holds a fabric's session; see `SessionKeeper`."""

    def __init__(self, join: Callable[[], TargetSession]) -> None:
        super().__init__(_no_invitation, 0.0)
        self._join_fabric = join

    def _join(self) -> TargetSession:
        try:
            return self._join_fabric()
        except Busy as error:  # says nothing about the fabric
            raise Unavailable(f"no session: {error.message}") from error
        except ObjectCacheError as error:
            self._refused = Unavailable(f"no session: {error.message}")
            self._refused_until_s = time.monotonic() + RETRY_AFTER_S
            raise self._refused from error


def join_fabric(
    transport: str,
    endpoint: Endpoint,
    sign: Callable[[Any], dict[str, str]],
    tls: ssl.SSLContext | None,
    timeout_s: float,
    settings: FabricSettings,
) -> FabricSession:
    """Join a session through the gateway and open the fabric. Raises what is in the way."""
    side = _endpoint(transport, settings)
    try:
        return FabricSession(WebWire.join(endpoint, sign, tls, timeout_s), side, timeout_s)
    except BaseException:
        side.close()
        raise


def _endpoint(transport: str, settings: FabricSettings) -> FabricEndpoint:
    if transport == NixlEndpoint.name:
        return NixlEndpoint(settings.nixl_devices, settings.nixl_ucx)
    from objectcache.memory.verbs.endpoint import VerbsEndpoint

    return VerbsEndpoint(settings.verbs_device)


def _no_invitation() -> Any:
    raise AssertionError("a fabric's session needs none")
