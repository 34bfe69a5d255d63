"""What a gateway says of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_gateway.connections.turned_away import TurnedAway


@dataclass(frozen=True, slots=True)
class GatewayLevels:
    """How much of everything there is right now."""

    requests_in_flight: int
    connections: int
    strangers: int  # of those, on which nobody has shown a good signature
    turned_away: TurnedAway  # since the start
    crowded: str  # why this is no good health; empty where it is
    storage_connections_in_use: int
    storage_connections_idle: int
    draining: bool
    audit_lines: int
    audit_lines_lost: int
