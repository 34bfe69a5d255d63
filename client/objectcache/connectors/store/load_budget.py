"""How much an engine may load at once, so that memory for all of it is to be had."""

from __future__ import annotations

from bisect import bisect_right

from objectcache.landing.memory_file import file_bytes_for
from objectcache.landing.target_pool import REGIONS_MAX
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB


class LoadBudget:
    """`bytes_max` and `loads_max` for loads that are open at the same time, those of one step or
    batch, say: a delivery each. What fits it has room in a client's pool of
    `pool_bytes_for(bytes_max)`.

    Not thread-safe.
    """

    def __init__(self, bytes_max: int, chunk_bytes: int, loads_max: int = REGIONS_MAX) -> None:
        """Raises `InvalidRequest` where not one chunk fits."""
        self.bytes_max = bytes_max
        self._chunk_bytes = chunk_bytes
        self._loads_max = loads_max
        counts = range(1, bytes_max // chunk_bytes + 1)
        self.chunk_count_max = bisect_right(counts, bytes_max, key=self._bytes_of)
        if self.chunk_count_max == 0:
            raise InvalidRequest(
                f"connector setting 'load_bytes_max' is {bytes_max}; one chunk of this model needs "
                f"{self._bytes_of(1)} bytes"
            )
        self.clear()

    def clear(self) -> None:
        """Nothing is loaded any more."""
        self._held_bytes = 0
        self._load_count = 0

    def fitting(self, chunk_count: int) -> int:
        """As many of so many chunks as one load may have."""
        return min(chunk_count, self.chunk_count_max)

    def has_room(self, chunk_count: int) -> bool:
        """Whether so many chunks more may be loaded, for one request."""
        needed_bytes = self._held_bytes + self._bytes_of(chunk_count)
        return needed_bytes <= self.bytes_max and self._load_count < self._loads_max

    def take(self, chunk_count: int) -> None:
        """They are loaded from now on."""
        self._held_bytes += self._bytes_of(chunk_count)
        self._load_count += 1

    def give_back(self, chunk_count: int) -> None:
        """They are loaded no more, or not after all."""
        self._held_bytes -= self._bytes_of(chunk_count)
        self._load_count -= 1

    def _bytes_of(self, chunk_count: int) -> int:
        return file_bytes_for(chunk_count * self._chunk_bytes)

    def __repr__(self) -> str:
        held, most = self._held_bytes / MIB, self.bytes_max / MIB
        return f"<LoadBudget {self._load_count} loads, {held:g}/{most:g} MiB>"
