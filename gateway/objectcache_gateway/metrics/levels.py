"""What a gateway says of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayLevels:
    """How much of everything there is right now."""

    requests_in_flight: int
    connections: int
    storage_connections_in_use: int
    storage_connections_idle: int
    draining: bool
    audit_lines: int
    audit_lines_lost: int
