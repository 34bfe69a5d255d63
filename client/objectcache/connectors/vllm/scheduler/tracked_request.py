"""A request as the connector's scheduler side follows it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from objectcache.connectors.identity.adapters import NO_ADAPTER
from objectcache.connectors.vllm.scheduler.lookups import NOTHING_STORED, Lookup


@dataclass(slots=True)
class TrackedRequest:
    """A request, from its arrival to its end. Ends and counts are in blocks.

    `adapter` is the revision of the request's adapter; None where its KV has no name. `parks` is
    what was chosen for its load.
    """

    request: Any
    lookup: Lookup
    adapter: str | None = NO_ADAPTER
    local: int = 0
    stored: int = 0
    saved_end: int = 0
    loaded: tuple[int, ...] = ()
    parks: bool = False

    def start_over(self, failed_block_ids: Collection[int]) -> None:
        """Some of its blocks were not there: save them from the first of these on, once they are
        computed.
        """
        places = (place for place, block in enumerate(self.loaded) if block in failed_block_ids)
        if (place := next(places, None)) is not None:
            self.lookup = NOTHING_STORED
            self.stored = self.saved_end = self.local + place
            self.loaded = ()

    def renew(self) -> None:
        """What is known of it holds for other weights."""
        self.lookup = NOTHING_STORED
        self.loaded = ()
        self.stored = self.saved_end = 0
