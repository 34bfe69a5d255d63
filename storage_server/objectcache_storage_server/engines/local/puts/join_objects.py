"""An object that takes over the extents of others, as multipart parts become one object."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from objectcache_storage_server.engines.block_checksums import stored_block_bytes
from objectcache_storage_server.engines.local.puts.staged_runs import LocalStaged
from objectcache_storage_server.engines.local.records import Version


class JoinedRuns(LocalStaged):
    """The runs of stored versions, one after the other. Nothing is written."""

    def __init__(
        self, bucket: str, key: str, checksum_block_bytes: int, sources: Sequence[Version]
    ) -> None:
        """`can_join` holds for the sources."""
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self._sources = sources

    @property
    def sources(self) -> Sequence[Version]:
        return self._sources

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        raise AssertionError("nothing is written to what is joined")

    def size_bytes(self) -> int:
        return sum(source.info.size_bytes for source in self._sources)

    def checksums(self) -> array[int]:
        joined = array("Q")
        for source in self._sources:
            joined.extend(source.checksums)
        return joined

    def place(self) -> tuple[tuple[int, ...], int]:
        return tuple(number for source in self._sources for number in source.extents), 0

    def keep(self) -> None:
        """The sources' extents are the index's already."""

    def discard(self) -> None:
        """Nothing was taken."""


def can_join(sources: Sequence[Version], block_bytes: int, slots: Sequence[int]) -> bool:
    """Whether the sources' runs lie as those of one object do.

    All are in blocks of this size, and all but the last hold whole ones, so that no block lies in
    two runs. `slots` are those of their extents: a row of several chunks is nobody's alone. Frames
    are no run.
    """
    return all(slot == 1 for slot in slots) and all(
        source.block_bytes == block_bytes
        and source.frame_checksums is None
        and (source is sources[-1] or source.info.size_bytes % block_bytes == 0)
        for source in sources
    )
