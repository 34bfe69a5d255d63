"""Landing memory that a payload goes round in: a layer lies where an earlier one lay, once that one
is written. No sockets.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.errors import DamagedData, DeliveryFailed

_PLACE_MULTIPLE_BYTES = 64


class LayerRing(ABC):
    """Places which layers take in turn. Whoever sends layers on asks where they lie, and says what
    is `written`.
    """

    @abstractmethod
    def layer_bytes(self, layer: int, directory: PayloadDirectory | None) -> int:
        """Where in the memory a layer begins that has arrived and is not written. Raises
        `DamagedData` for a directory by which that is no place.
        """

    @abstractmethod
    def written(self, end_layer: int) -> None:
        """Layers below `end_layer` are sent on, and not read any more."""


class WrittenRing(LayerRing):
    """A ring of `place_count` layers that the storage server writes to by itself."""

    def __init__(self, first_layer: int, place_count: int) -> None:
        self.place_count = place_count
        self._first_layer = first_layer
        self._place_bytes = 0
        self._free: Callable[[int], None] | None = None

    def begin(self, place_bytes: int, free: Callable[[int], None]) -> None:
        """The server has accepted it; `free` tells it below which layer all is written."""
        self._place_bytes = place_bytes
        self._free = free

    def layer_bytes(self, layer: int, directory: PayloadDirectory | None) -> int:
        number = layer - self._first_layer
        lead_bytes = length_bytes = 0  # of what comes before the first layer, in its place
        if directory is not None:
            begin_bytes, end_bytes = directory.layer_offsets[number : number + 2]
            lead_bytes = 0 if number else begin_bytes
            length_bytes = lead_bytes + end_bytes - begin_bytes
        if length_bytes > self._place_bytes:
            raise DamagedData(
                f"by its directory layer {layer} has {length_bytes} bytes, it came in "
                f"{self._place_bytes} at most"
            )
        return number % self.place_count * self._place_bytes + lead_bytes

    def written(self, end_layer: int) -> None:
        assert self._free is not None
        self._free(end_layer)

    def __repr__(self) -> str:
        return f"<WrittenRing of {self.place_count} layers>"


class LandingRing(LayerRing):
    """Places in `memory_bytes`, which the layers of a body take from `first_layer` on. Thread-safe.

    One thread receives: it calls `divide` once, and `wait_room` before each layer.
    """

    def __init__(self, first_layer: int, memory_bytes: int) -> None:
        self._first_layer = first_layer
        self._memory_bytes = memory_bytes
        self._place_bytes = memory_bytes
        self._place_count = 1
        self._written_end = first_layer
        self._is_closed = False
        self._condition = threading.Condition()

    def divide(self, layer_bytes_max: int) -> None:
        """Have places for layers of so many bytes at most. Raises `DeliveryFailed` where none
        fits.
        """
        self._place_bytes = -(-layer_bytes_max // _PLACE_MULTIPLE_BYTES) * _PLACE_MULTIPLE_BYTES
        self._place_count = self._memory_bytes // self._place_bytes
        if not self._place_count:
            raise DeliveryFailed(
                f"a layer comes in {layer_bytes_max} bytes, which do not fit in the "
                f"{self._memory_bytes} bytes of landing memory that the delivery has "
                "(relay.landing_bytes); have it delivered directly"
            )

    def layer_bytes(self, layer: int, directory: PayloadDirectory | None) -> int:
        return self.place_bytes(layer)

    def place_bytes(self, layer: int) -> int:
        """Where in the memory a layer begins."""
        return (layer - self._first_layer) % self._place_count * self._place_bytes

    def wait_room(self, layer: int) -> bool:
        """Wait until nothing is read any more of the layer that lay where this one will; false
        where the ring is closed.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_closed or layer - self._written_end < self._place_count
            )
            return not self._is_closed

    def written(self, end_layer: int) -> None:
        with self._condition:
            self._written_end = end_layer
            self._condition.notify_all()

    def close(self) -> None:
        """Nothing is received any more; who waits for room is told. Repeating has no effect."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def __repr__(self) -> str:
        return f"<LandingRing of {self._place_count} layers, {self._written_end} are written>"
