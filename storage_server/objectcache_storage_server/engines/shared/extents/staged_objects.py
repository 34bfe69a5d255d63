"""Objects being put into a shared store, which no record names yet: what a commit asks of each, and
those on their own.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.engines.block_checksums import (
    block_checksums,
    block_count,
    stored_block_bytes,
)
from objectcache_storage_server.engines.judge_commit import FinishedStaged
from objectcache_storage_server.engines.puts.put_buffers import no_put_memory
from objectcache_storage_server.engines.shared.extents.cut_extents import cut_object
from objectcache_storage_server.engines.shared.extents.write_extents import (
    ObjectWriter,
    PutWrites,
    WrittenExtent,
)
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
)


class SharedStaged(FinishedStaged):
    """What a commit asks of anything staged by the shared engine."""

    is_chunk = False  # whether it came with a put of chunks
    parent_key: str | None = None  # the chunk before it, where the put said so
    sources: Sequence[SharedVersion] = ()  # stored versions whose extents it takes over

    @abstractmethod
    def place(self) -> tuple[tuple[ExtentName, ...], int]:
        """Its extents, and its slot."""

    @abstractmethod
    def shapes(self) -> Mapping[ExtentName, ExtentShape]:
        """Those of its extents that are new."""

    def begin_finish(self) -> None:
        """Begin to write what is still in memory; nothing is written after it."""

    def finish(self) -> None:
        """Wait until all is in the store, and assert that no byte is missing. Raises what a write
        has raised, every time.
        """

    @abstractmethod
    def keep(self) -> None:
        """A record names it, or may: `discard` has no effect from here on."""


@dataclass(slots=True)
class _Piece:
    """An object of the store that did not come whole: what there is of it, in memory."""

    parts: list[tuple[int, memoryview]] = field(default_factory=list)  # offset in it, bytes
    filled_bytes: int = 0


class StagedAlone(SharedStaged):
    """An object on its own: an extent of one slot and one layer, written as its bytes arrive.

    What comes as a whole object of the store goes out from the caller's memory; anything else is
    copied and gathered.
    """

    def __init__(
        self, writer: ObjectWriter, bucket: str, key: str, checksum_block_bytes: int
    ) -> None:
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self._object_bytes = cut_object(self.block_bytes, writer.object_bytes_max)
        self._writer = writer
        self._writes = PutWrites(writer)
        self._extent = WrittenExtent(self._writes)
        self._pieces: dict[int, _Piece] = {}
        self._checksums = array("Q")
        self._written_bytes = 0
        self._end_bytes = 0
        self._is_open = True

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        assert self._is_open, "written to after its end"
        assert offset_bytes % self.checksum_block_bytes == 0, offset_bytes
        if not data:
            return
        self._check_blocks(offset_bytes + len(data))
        self._writes.check()
        begun: list[Future[None]] = []  # from the caller's memory
        try:
            self._write(offset_bytes, data, begun)
            self._note_checksums(offset_bytes, data)  # while the store is busy
        finally:
            wait(begun)
        if begun:
            self._writes.check()
        self._written_bytes += len(data)

    def _check_blocks(self, end_bytes: int) -> None:
        """Raise `InvalidRequest` for more blocks than one record can name."""
        blocks_max = self._writer.blocks_max
        if block_count(end_bytes, self.block_bytes) > blocks_max:
            raise InvalidRequest(
                f"{self.key!r} has over {blocks_max * self.block_bytes} bytes, more than one "
                "object of a shared store can have; store it as several",
                code="EntityTooLarge",
                key=self.key,
            )

    def _write(self, offset_bytes: int, data: memoryview, begun: list[Future[None]]) -> None:
        while data:
            number, within = divmod(offset_bytes, self._object_bytes)
            part = data[: self._object_bytes - within]
            if len(part) == self._object_bytes:
                begun.append(self._extent.put(number, [part]))
            else:
                self._gather(number, within, part, begun)
            offset_bytes, data = offset_bytes + len(part), data[len(part) :]

    def _gather(
        self, number: int, within: int, part: memoryview, begun: list[Future[None]]
    ) -> None:
        piece = self._pieces.setdefault(number, _Piece())
        completes = piece.filled_bytes + len(part) == self._object_bytes
        is_copied = self._reserve(len(part), is_needed=not completes)
        piece.parts.append((within, memoryview(bytes(part)) if is_copied else part))
        if is_copied:
            piece.filled_bytes += len(part)
        if completes:
            future = self._put(number)
            if not is_copied:
                begun.append(future)

    def _reserve(self, length_bytes: int, *, is_needed: bool) -> bool:
        """Whether there is memory for a copy. Raises `Busy` where there is none in time."""
        buffers = self._writer.buffers
        self._writes.wait_below(self._writer.depth)
        while not buffers.reserve(length_bytes):
            if not is_needed:
                return False
            if self._writes.is_any_under_way():
                self._writes.wait_for_one()
            elif buffers.reserve(length_bytes, self._writer.call_s_max):
                break
            else:
                raise no_put_memory()
        return True

    def _put(self, number: int) -> Future[None]:
        piece = self._pieces.pop(number)
        piece.parts.sort(key=lambda part: part[0])
        release = partial(self._writer.buffers.release, piece.filled_bytes)
        return self._extent.put(number, [part for _, part in piece.parts], release)

    def _note_checksums(self, offset_bytes: int, data: memoryview) -> None:
        end_bytes = offset_bytes + len(data)
        if end_bytes > self._end_bytes:
            assert self._end_bytes % self.block_bytes == 0, f"{self.key!r} has ended before"
            self._end_bytes = end_bytes
            more = block_count(end_bytes, self.block_bytes) - len(self._checksums)
            self._checksums.frombytes(bytes(more * self._checksums.itemsize))
        first = offset_bytes // self.block_bytes
        checksums = array("Q", block_checksums(data, self.block_bytes))
        self._checksums[first : first + len(checksums)] = checksums

    def begin_finish(self) -> None:
        if not self._pieces:
            return
        number, within = divmod(self._end_bytes - 1, self._object_bytes)
        missing_bytes = within + 1 - self._pieces[number].filled_bytes
        assert len(self._pieces) == 1, f"{self.key!r} is torn"
        assert missing_bytes == 0, f"{self.key!r} is torn"
        self._put(number)

    def finish(self) -> None:
        self.begin_finish()
        self._writes.settle()

    def size_bytes(self) -> int:
        assert self._written_bytes == self._end_bytes, f"{self.key!r} is torn"
        return self._end_bytes

    def checksums(self) -> array[int]:
        return self._checksums

    def place(self) -> tuple[tuple[ExtentName, ...], int]:
        return ((self._extent.name,) if self._end_bytes else ()), 0

    def shapes(self) -> Mapping[ExtentName, ExtentShape]:
        if not self._end_bytes:
            return {}
        return {self._extent.name: ExtentShape(1, 1, self._end_bytes, self._object_bytes)}

    def keep(self) -> None:
        self._end(keep=True)

    def discard(self) -> None:
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        if self._is_open:
            self._is_open = False
            for piece in self._pieces.values():
                self._writer.buffers.release(piece.filled_bytes)
            self._pieces.clear()
            self._extent.end(keep=keep)


class JoinedExtents(SharedStaged):
    """The extents of stored versions, one after the other. Nothing is written."""

    def __init__(
        self, bucket: str, key: str, checksum_block_bytes: int, sources: Sequence[SharedVersion]
    ) -> None:
        """`can_join` holds for the sources."""
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self.sources = sources

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        raise AssertionError("nothing is written to what is joined")

    def size_bytes(self) -> int:
        return sum(source.info.size_bytes for source in self.sources)

    def checksums(self) -> array[int]:
        joined = array("Q")
        for source in self.sources:
            joined.extend(source.checksums)
        return joined

    def place(self) -> tuple[tuple[ExtentName, ...], int]:
        return tuple(name for source in self.sources for name in source.extents), 0

    def shapes(self) -> Mapping[ExtentName, ExtentShape]:
        return {}

    def keep(self) -> None:
        """The sources' extents are the index's already."""

    def discard(self) -> None:
        """Nothing was taken."""


def can_join(
    sources: Sequence[SharedVersion],
    shapes: Mapping[ExtentName, ExtentShape],
    block_bytes: int,
) -> bool:
    """Whether the sources' bytes lie as those of one object do.

    All are in blocks of this size, and all but the last hold whole ones, so that no block lies in
    two of them. An extent of several slots is nobody's alone.
    """
    return all(shape.slots == 1 for shape in shapes.values()) and all(
        source.block_bytes == block_bytes
        and (source is sources[-1] or source.info.size_bytes % block_bytes == 0)
        for source in sources
    )
