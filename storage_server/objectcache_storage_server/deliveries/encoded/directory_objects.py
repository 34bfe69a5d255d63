"""Opened objects, and the directory of the payload that is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_storage_server.engines.base import (
    BegunReads,
    EndedReads,
    FramePlace,
    OpenObjects,
    Placement,
    Read,
)

DIRECTORY = -1  # the source of reads of the directory


class DirectoryObjects(OpenObjects):
    """Opened objects that also read the directory, which is in memory."""

    def __init__(self, opened: OpenObjects, directory: bytes) -> None:
        """Takes `opened` over: it is closed with this."""
        self.infos = opened.infos
        self._opened = opened
        self._directory = memoryview(directory)

    def placements(self) -> Sequence[Placement]:
        return self._opened.placements()

    def frames(self) -> Sequence[FramePlace | None] | None:
        return self._opened.frames()

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        of_objects = self._copied(reads, buffer)
        if of_objects:
            self._opened.read_many(of_objects, buffer)

    def begin_reads(self, reads: Sequence[Read], buffer: memoryview) -> BegunReads:
        of_objects = self._copied(reads, buffer)
        if not of_objects:
            return EndedReads(None)
        return self._opened.begin_reads(of_objects, buffer)

    def _copied(self, reads: Sequence[Read], buffer: memoryview) -> Sequence[Read]:
        """The reads that are left when those of the directory, which come first, are done."""
        for number, (source, offset_bytes, length_bytes, landing_bytes) in enumerate(reads):
            if source != DIRECTORY:
                return reads[number:] if number else reads
            part = self._directory[offset_bytes : offset_bytes + length_bytes]
            buffer[landing_bytes : landing_bytes + length_bytes] = part
        return ()

    def close(self) -> None:
        self._opened.close()
