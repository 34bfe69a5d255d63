"""What operators ask and change of a storage server's process."""

from __future__ import annotations

from objectcache_schemas.messages.message import Message


class GetHealth(Message, frozen=True):
    """Ask whether the storage server serves."""


class Health(Message, frozen=True):
    """The storage server's state, for health checks and the admin view."""

    engine: str
    deliveries_in_flight: int
    in_flight_bytes: int
    damaged_count: int  # objects dropped because their bytes failed a checksum
    draining: bool
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well


class GetMetrics(Message, frozen=True):
    """Ask for the storage server's metrics. Reply: `Metrics`."""


class Metrics(Message, frozen=True):
    """Reply to `GetMetrics`: Prometheus' text format."""

    text: bytes


class SetLogLevel(Message, frozen=True):
    """Change what is logged, until the process ends. Reply: `Done`."""

    level: str  # debug, info, warning or error


class Drain(Message, frozen=True):
    """Take no new deliveries and puts, or take them again. Reply: `Done`."""

    draining: bool
