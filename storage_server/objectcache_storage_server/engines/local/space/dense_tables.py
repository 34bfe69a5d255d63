"""Objects and extents in memory: numpy columns, a row a number.

Numbers are dense and used again, so a number means something only while the lock that guards the
table is held, or while its row is held. About 60 bytes an object and 50 an extent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FIRST_ROWS = 1024
UNKNOWN_CODEC = 255

OBJECT_COLUMNS = np.dtype(
    [
        ("is_used", "?"),
        ("is_evictable", "?"),  # cache content: a chunk of a kv-put or of a bucket with a layout
        ("is_pinned", "?"),  # by an operator
        ("bucket", "u4"),
        ("extent", "u4"),  # number of its first extent
        ("slot", "u2"),
        ("own_hash", "u8"),  # xxh3-64 of bucket number and key
        ("parent_hash", "u8"),  # of the chunk before it; 0 is unknown or none
        ("size_bytes", "u8"),
        ("last_used", "u8"),  # tick of the store's clock of uses
        ("modified_s", "f8"),
        ("serial", "u8"),  # of the commit that stored it
    ]
)
EXTENT_COLUMNS = np.dtype(
    [
        ("is_used", "?"),
        ("path", "u1"),  # an `IoPath`
        ("is_cold", "?"),  # on the page-cache path, and not known to be in memory
        ("slots", "u2"),
        ("live_slots", "u2"),
        ("readers", "u4"),  # open objects in it
        ("is_freed", "?"),  # the index names it no more; its space is free when its readers leave
        ("is_encoded", "?"),  # its slices are frames; see `Holdings.pitches`
        # The `SliceCodec` that its slices were given to; where they are plain all the same, they
        # got no shorter. `UNKNOWN_CODEC` of frames that were stored before this was.
        ("codec", "u1"),
        ("num_layers", "u4"),
        ("slice_bytes", "u8"),
        ("offset_bytes", "u8"),
        ("length_bytes", "u8"),
        ("heat", "f4"),  # reads of it, decayed
    ]
)


class DenseTable:
    """A growing structured array whose rows are given out and taken back by number."""

    def __init__(self, columns: np.dtype[np.void]) -> None:
        self.rows: npt.NDArray[np.void] = np.zeros(FIRST_ROWS, columns)
        self._end = 0  # numbers below were given out at some time
        self._free: list[int] = []

    def __len__(self) -> int:
        return self._end - len(self._free)

    @property
    def used(self) -> npt.NDArray[np.void]:
        """All rows up to the highest number; those not in use have `is_used` false."""
        return self.rows[: self._end]

    def add(self) -> int:
        """A number whose row is zero but for `is_used`."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._end
            self.reserve(number + 1)
            self._end = number + 1
        self.rows[number] = 0
        self.rows["is_used"][number] = True
        return number

    def add_at(self, number: int) -> None:
        """Take this very number, as a store that opens does; `rebuild_free` follows."""
        self.reserve(number + 1)
        self._end = max(self._end, number + 1)
        self.rows["is_used"][number] = True

    def rebuild_free(self) -> None:
        """Find the numbers that nobody took."""
        self._free = np.flatnonzero(~self.used["is_used"])[::-1].tolist()

    def remove(self, number: int) -> None:
        """Give a number back."""
        assert self.rows["is_used"][number]
        self.rows["is_used"][number] = False
        self._free.append(number)

    def reserve(self, count: int) -> None:
        """Grow the columns to at least `count` rows."""
        if count > len(self.rows):
            grown = np.zeros(max(count, 2 * len(self.rows)), self.rows.dtype)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
