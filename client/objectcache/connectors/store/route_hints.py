"""What a router says in a request of the relay over which its KV is to be read.

Whoever sends requests must not stop the engine: what makes no sense is no hint.
"""

from __future__ import annotations

from typing import Any

from objectcache.client import Client

RELAY_CHARS_MAX = 256


def relay_of(hint: Any) -> str:
    """The relay that a hint names, by its node, address or URL; empty where it is none."""
    return hint if isinstance(hint, str) and len(hint) <= RELAY_CHARS_MAX else ""


def route_by(client: Client, relay: str) -> str | None:
    """The route of a load whose router named this relay; None: the client's own choice, also where
    the relay is none of the client's, or is left alone.
    """
    return client.route_over(relay) if relay else None
