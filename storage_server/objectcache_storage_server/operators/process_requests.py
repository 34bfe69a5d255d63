"""Requests that change the process itself, until it ends."""

from __future__ import annotations

from objectcache_runtime.logs import set_log_level
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.server_state import Drain, SetLogLevel
from objectcache_storage_server.admission.gates import Gates


def drain(gates: Gates, request: Drain) -> Done:
    """`Drain`."""
    gates.entrance.drained = request.draining
    return Done()


def change_log_level(request: SetLogLevel) -> Done:
    """`SetLogLevel`."""
    set_log_level(request.level)
    return Done()
