"""Whether a layer has room in a ring of a client's memory, whose places layers take in turn.

What the client says is not believed: a layer takes a place only where the one before it there was
announced, and freed after that.
"""

from __future__ import annotations

import threading
import time

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import TargetRing


class RingRoom:
    """The room in the ring of one delivery. Thread-safe; nothing waits in here."""

    def __init__(self, ring: TargetRing, first_layer: int) -> None:
        self.ring = ring
        self._first_layer = first_layer
        self._announced_end = self._freed_end = first_layer
        self._lacking_since_s: float | None = None
        self._lacking_end: int | None = None  # below which all must be freed for what has no room
        self._lock = threading.Lock()

    @property
    def lacking_since_s(self) -> float | None:
        """Since when a layer has been without room that the client could free, by time.monotonic;
        None where none is: what was not announced cannot be freed.
        """
        return self._lacking_since_s

    def has_room(self, payload_offset_bytes: int) -> bool:
        """Whether the place of this piece's layer is free. Where it is not, the delivery is to be
        woken after `freed`.
        """
        with self._lock:
            layer = self._first_layer + self.ring.number(payload_offset_bytes)
            needed_end = layer + 1 - self.ring.place_count
            if needed_end <= self._freed_end:
                self._lacking_end = self._lacking_since_s = None
                return True
            self._lacking_end = needed_end
            self._look_who_is_late()
            return False

    def _look_who_is_late(self) -> None:
        """The client is, from when it may free what is needed. Under the lock."""
        may_free = self._lacking_end is not None and self._lacking_end <= self._announced_end
        if may_free and self._lacking_since_s is None:
            self._lacking_since_s = time.monotonic()

    def announced(self, end_layer: int) -> None:
        """The client is about to be told of the layers below, and so may free them."""
        with self._lock:
            self._announced_end = end_layer
            self._look_who_is_late()

    def freed(self, end_layer: int) -> None:
        """The client reads nothing below `end_layer` any more. Raises `InvalidRequest` where it was
        not told of all that.
        """
        with self._lock:
            if end_layer > self._announced_end:
                raise InvalidRequest(
                    f"LayersFreed.end_layer is {end_layer}, but only the layers below "
                    f"{self._announced_end} were announced"
                )
            if end_layer > self._freed_end:
                self._freed_end = end_layer
                self._lacking_end = self._lacking_since_s = None  # until it is asked for again

    def __repr__(self) -> str:
        return (
            f"<RingRoom of {self.ring.place_count} layers, below {self._announced_end} announced, "
            f"below {self._freed_end} freed>"
        )
