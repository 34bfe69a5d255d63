"""The volume contract: a linear address space of blocks, with two paths to it.

Every method blocks and may be called from any thread. Ranges are in bytes and lie within what
`extend` has added; nobody writes to a range that another call reads or writes. `OSError` leaves a
volume as it is; the engine translates it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from objectcache_schemas.limits import KIB

BLOCK_BYTES = 4 * KIB  # unit in which space is given out, and of a padded row


class Path(enum.IntEnum):
    """A way from the device to memory."""

    PAGE_CACHE = 0
    DIRECT = 1


class Transfer(NamedTuple):
    """One range of the volume and the memory it is read into or written from."""

    offset_bytes: int
    memory: memoryview


class Volume(ABC):
    """Where extents lie."""

    paths: frozenset[Path]  # that this volume has; never empty
    device_path: str  # for operators: how the direct path submits, and why
    segment_bytes: int  # an extent never crosses a multiple of this
    gives_segments_back: bool  # whether `remove` makes room for anybody else

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

    # --- bytes ---

    @abstractmethod
    def read(self, transfers: Sequence[Transfer], path: Path) -> int:
        """Fill every memory; returns the bytes that were found in memory rather than read.

        Any offset, length and memory will do; whole blocks in aligned memory are read in place on
        the direct path. Raises `OSError`, EIO also where the device ends early.
        """

    def read_resident(self, transfer: Transfer) -> bool:
        """Fill the memory if all of it is in the page cache now; otherwise answer false, with the
        memory's content undefined. Never waits for the device. Raises `OSError`.
        """
        return False

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:  # noqa: B027
        """Have the page cache read a range, which may go on after the call. Best effort."""

    @abstractmethod
    def write(self, transfers: Sequence[Transfer], path: Path) -> None:
        """Write every memory; nothing is durable before `flush`.

        On the direct path the last block of a transfer is filled up with zeros, so a transfer
        begins at a block and what follows it up to the next block must be nobody's.
        """

    @abstractmethod
    def flush(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return when what was written to these (offset, length) ranges survives a power loss."""

    @abstractmethod
    def drop_cache(self, offset_bytes: int, length_bytes: int) -> None:
        """Forget what the page cache holds of a flushed range."""

    @abstractmethod
    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """The range holds nothing any more: tell the device (TRIM), where that is worth it. Best
        effort: raises nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Release descriptors and threads."""
