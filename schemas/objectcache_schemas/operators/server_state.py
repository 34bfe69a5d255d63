"""What operators ask and change of a storage server's process."""

from __future__ import annotations

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request


class Health(Message, frozen=True, omit_defaults=True):
    """The storage server's state, for health checks and the admin view."""

    engine: str
    deliveries_in_flight: int
    in_flight_bytes: int
    damaged_count: int  # objects dropped because their bytes failed a checksum
    draining: bool
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well
    degraded: str = ""  # whom it failed lately while it served others; empty while all is well


@request(Health, repeatable=True, changes=Changes.NOTHING)
class GetHealth(Message, frozen=True):
    """Ask whether the storage server serves."""


class Metrics(Message, frozen=True):
    """Reply to `GetMetrics`: Prometheus' text format."""

    text: bytes


@request(Metrics, repeatable=False, changes=Changes.NOTHING)
class GetMetrics(Message, frozen=True):
    """Ask for the storage server's metrics."""


@request(Done, repeatable=False, changes=Changes.PROCESS)
class SetLogLevel(Message, frozen=True):
    """Change what is logged, until the process ends."""

    level: str  # debug, info, warning or error


@request(Done, repeatable=False, changes=Changes.PROCESS)
class Drain(Message, frozen=True):
    """Take no new deliveries and puts, or take them again."""

    draining: bool
