"""What a router says in a request of the route over which its KV is to be read."""

from __future__ import annotations

from typing import Any

from objectcache.connectors.store.route_hints import relay_of

PARAMETERS = "objectcache"  # of kv_transfer_params: {"objectcache": {"relay": NODE}}


def hinted_relay(kv_transfer_params: Any) -> str:
    """The relay that a request names, by its node, address or URL; empty where it names none, or
    in no way that makes sense: whoever sends requests must not stop the engine.
    """
    if not isinstance(kv_transfer_params, dict):
        return ""
    own: Any = kv_transfer_params.get(PARAMETERS)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    relay: Any = own.get("relay") if isinstance(own, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return relay_of(relay)
