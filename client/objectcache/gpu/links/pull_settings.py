"""How links share what is to be copied."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache.gpu.line import PIECES_MAX
from objectcache_schemas.errors import InvalidRequest

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Sizes are MMA's, section 3.4 and figures 13 and 14; the rule is ours."""

    chunk_bytes: int = 5 * _MB  # of a micro-task at most
    pieces_max: int = PIECES_MAX  # of a micro-task
    depth: int = 2  # micro-tasks on a link at once
    relay_buffers: int = 2  # of each relaying device and direction, each of `chunk_bytes`
    fallback_bytes: int = 12 * _MB  # less than that is one copy over the device's own link
    direct_first: bool = True  # no link relays while its own device has something queued
    # Earliest due layer first, and a link pulls only what it finishes before others would; else in
    # the order of arrival by whichever link has room, as the paper does.
    by_finish_time: bool = True
    # A link pauses for the time of one micro-task behind one that took much longer than expected:
    # others use it (MMA, 3.4.2, "prioritizing background traffic").
    is_background: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "pieces_max", "depth", "relay_buffers"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.fallback_bytes < 0:
            raise InvalidRequest(f"fallback_bytes must not be below 0, got {self.fallback_bytes}")


OURS = PullSettings()
PAPERS = PullSettings(by_finish_time=False)  # MMA, section 3.4
