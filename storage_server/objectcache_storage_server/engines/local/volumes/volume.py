"""The volume contract: a linear address space of blocks, with two paths to it.

Every method blocks and may be called from any thread. Ranges are in bytes and lie within what
`extend` has added; nobody writes to a range that another call reads or writes. `OSError` leaves a
volume as it is; the engine translates it.

Both paths lead to the same bytes: a read gives what was last written, whichever path either takes.
Where the page cache does not notice what was written past it, a volume reads directly, also where
the page cache is asked for, until it is certain that no older page is left (`enter_cache`,
`prefetch`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from objectcache_schemas.limits import KIB

BLOCK_BYTES = 4 * KIB  # unit in which space is given out, and of a padded row


class IoPath(enum.IntEnum):
    """A way from the device to memory."""

    PAGE_CACHE = 0
    DIRECT = 1


class Transfer(NamedTuple):
    """One range of the volume and the memory it is read into or written from."""

    offset_bytes: int
    memory: memoryview


class Volume(ABC):
    """Where extents lie."""

    paths: frozenset[IoPath]  # that this volume has; never empty
    device_path: str  # for operators: how the direct path submits, and why
    cache_path: str = ""  # for operators: whose page cache it is, or why there is none
    segment_bytes: int  # an extent never crosses a multiple of this
    gives_segments_back: bool  # whether `remove` makes room for anybody else
    # Whether neighbours among the transfers of one `write` are one request; on the direct path
    # where all of them are whole blocks in memory that begins at one.
    joins_writes = False

    # --- space ---

    @abstractmethod
    def segments(self) -> Sequence[int]:
        """Numbers of the segments that exist: segment n is [n, n + 1) x `segment_bytes`."""

    @abstractmethod
    def extend(self) -> int:
        """Add a segment, preallocated and durable; returns its number.

        Raises `OSError` (ENOSPC) where there is no room, and then leaves nothing behind.
        """

    @abstractmethod
    def remove(self, segment: int) -> None:
        """Give a segment that holds no extent back to the file system, where that can be done."""

    @abstractmethod
    def room_bytes(self) -> int:
        """What `extend` could still add, in bytes, as the device says it now."""

    def growth_remedy(self) -> str:
        """What an operator does who wants `room_bytes` to be more, in words."""
        return "give it a larger device"

    # --- bytes ---

    @abstractmethod
    def read(self, transfers: Sequence[Transfer], path: IoPath) -> int:
        """Fill every memory; returns the bytes that were found in memory rather than read.

        Any offset, length and memory will do; whole blocks in aligned memory are read in place on
        the direct path. Raises `OSError`, EIO also where the device ends early.
        """

    def read_resident(self, transfer: Transfer) -> bool:
        """Fill the memory if all of it is in the page cache now; otherwise answer false, with the
        memory's content undefined. Never waits for the device. Raises `OSError`.
        """
        return False

    def cached_bytes(self, offset_bytes: int, length_bytes: int) -> int | None:
        """How much of a range the page cache has, without reading any of it; None where the kernel
        does not say.
        """
        return None

    def enter_cache(self, offset_bytes: int, length_bytes: int) -> bool:
        """Whether a range that was written, whole blocks, can be read through the page cache from
        here on. Where it answers false, the range had better stay on the direct path: it is read
        directly in either case.

        The range may be anybody's by now.
        """
        return True

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:  # noqa: B027
        """Have the page cache read a range, and return when it has, or sooner. Best effort. The
        range may be anybody's by now.
        """

    @abstractmethod
    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        """Write every memory; nothing is durable before `flush`.

        On the direct path the last block of a transfer is filled up with zeros, so a transfer
        begins at a block and what follows it up to the next block must be nobody's. On the other
        the device is set to work while more is written, and the bytes are in memory afterwards.
        """

    @abstractmethod
    def flush(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return when what was written to these (offset, length) ranges survives a power loss."""

    @abstractmethod
    def drop_cache(self, offset_bytes: int, length_bytes: int) -> None:
        """Forget what the page cache holds of a flushed range. Best effort; what a volume could
        not forget and may be older than the device, it does not read.
        """

    @abstractmethod
    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """The range holds nothing any more: tell the device (TRIM), where that is worth it. Best
        effort: raises nothing. What was written to it before is not written to the device after.
        """

    @abstractmethod
    def close(self) -> None:
        """Release descriptors and threads."""
