"""The block device of an NVMe namespace, as the way to its page cache: the interface.

Commands that were passed through to the namespace go around this cache. So a page may be older than
the device (*stale*), and a dirty page may be written over what is younger. Nothing here keeps
either from happening: `volumes/cached_namespace.py` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class BlockDevice(ABC):
    """Any thread may call any method, also at the same time. Offsets are bytes of the namespace.

    A page is `BLOCK_BYTES`. Methods raise `OSError`.
    """

    name: str  # for operators
    description: str  # for operators: how it is known that a page is gone

    @abstractmethod
    def read(self, offset_bytes: int, memory: memoryview) -> None:
        """Fill the memory through the page cache, without reading ahead."""

    @abstractmethod
    def read_resident(self, offset_bytes: int, memory: memoryview) -> int:
        """Fill the memory as far as the page cache has it from its begin on; returns how far."""

    @abstractmethod
    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:
        """Have the page cache read a range; returns about when it has. Best effort."""

    @abstractmethod
    def write(self, offset_bytes: int, memory: memoryview) -> None:
        """Write into the page cache, and have it begin to write to the device."""

    @abstractmethod
    def write_back(self, offset_bytes: int, length_bytes: int) -> None:
        """Return when no page of the range is dirty or being written. Takes nothing from what
        `flush` raises.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when all that was written, by whichever way, survives a power loss."""

    @abstractmethod
    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        """Have the page cache forget pages that are not dirty. Best effort, raises nothing."""

    @abstractmethod
    def drop(self, offset_bytes: int, length_bytes: int) -> bool:
        """Have it forget whole pages; whether it is certain that none is left of those that it had,
        or was reading, when the call began. It may read the range for that.

        What a call that begins later reads into the cache is as young as that call.
        """

    @abstractmethod
    def read_past_cache(self, offset_bytes: int, length_bytes: int) -> bytes:
        """What the device itself has, whole pages."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors."""
