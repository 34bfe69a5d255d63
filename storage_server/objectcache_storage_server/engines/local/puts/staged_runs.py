"""Bytes on their way into extents, and what a commit asks of them: an object on its own.

What is staged belongs to its writer alone: extents that the index does not name, found free again
after a crash. A writer counts as a reader of its extents, so nothing else takes or moves them.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.block_checksums import (
    block_checksums,
    stored_block_bytes,
)
from objectcache_storage_server.engines.judge_commit import FinishedStaged
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, round_up
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)
from objectcache_storage_server.engines.puts.put_buffers import Bytes

DIRECT_BYTES_MIN = 256 * KIB  # of a piece; a shorter one gains nothing past the page cache


class ExtentSource(Protocol):
    """Where a writer's extents come from."""

    volume: Volume

    def allocate(self, length_bytes: int, geometry: Geometry | None) -> int:
        """A new extent; raises `StorageFull`."""
        ...

    def allocate_run(self, length_bytes: int, least_bytes: int) -> tuple[int, int]:
        """A new plain extent and its length: as wanted, or down to `least_bytes` where free space
        lies in pieces. Both are whole blocks of the volume. Raises `StorageFull`.
        """
        ...

    def place(self, number: int) -> int:
        """Where an extent begins."""
        ...

    def path(self, number: int) -> IoPath:
        """How an extent is to be written: by the path that it will be read by."""
        ...

    def shrink(self, number: int, length_bytes: int) -> None:
        """Give the end of an extent back."""
        ...

    def end_rows(
        self, number: int, pitches: tuple[int, ...], codec: int, length_bytes: int
    ) -> None:
        """The slices of an extent are frames of a codec and these pitches, and end here."""
        ...

    def end_writing(self, number: int, *, keep: bool) -> None:
        """Nothing more will be written to it; without `keep` it is given back."""
        ...

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        """Write to the volume; raises our errors."""
        ...

    def begin_write(self, transfers: Sequence[Transfer], path: IoPath) -> Future[None]:
        """The same in another thread; the memory must stay as it is until then."""
        ...

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Have another thread do something that waits for no other."""
        ...

    def take_buffer(self, length_bytes: int) -> Bytes | None:
        """Memory to gather an extent in, block aligned; None where none is free."""
        ...

    def return_buffer(self, buffer: Bytes) -> None:
        """It is free again."""
        ...


class LocalStaged(FinishedStaged):
    """What a commit asks of anything staged by the local engine."""

    def finish(self) -> None:
        """Write what is still in memory; nothing is written after it."""

    @abstractmethod
    def place(self) -> tuple[tuple[int, ...], int]:
        """Its extents, and its slot."""

    @abstractmethod
    def keep(self) -> None:
        """The index names it: `discard` has no effect from here on."""

    def frame_checksums(self) -> array[int] | None:
        """Of its frames, where its slices are encoded."""
        return None

    @property
    def sources(self) -> Sequence[Version]:
        """Stored versions whose extents it takes over."""
        return ()

    @property
    def parent_key(self) -> str | None:
        """The chunk before it, where the put said so."""
        return None

    @property
    def is_chunk(self) -> bool:
        """Whether it came with a put of chunks."""
        return False


class StagedRun(LocalStaged):
    """An object on its own: one or more plain runs.

    Pieces that come out of order wait in memory for their turn.
    """

    def __init__(
        self,
        source: ExtentSource,
        bucket: str,
        key: str,
        checksum_block_bytes: int,
        run_bytes_max: int,
    ) -> None:
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self._source = source
        self._run_bytes_max = run_bytes_max
        self._runs: list[tuple[int, int, int]] = []  # extent, begin, length
        self._paths: list[IoPath] = []  # of the runs
        self._room_bytes = 0  # of all runs
        self._end_bytes = 0  # written or in the tail
        self._tail = bytearray()  # begun block, where the device takes only whole ones
        self._checksums = array("Q")
        self._early: dict[int, bytes] = {}
        self._is_open = True
        self._is_chunk = False
        self._parent_key: str | None = None

    def come_with_chunks(self, parent_key: str | None) -> None:
        """It is one of a put's chunks, though it lies on its own; `parent_key` is the one before
        it.
        """
        self._is_chunk, self._parent_key = True, parent_key

    @property
    def parent_key(self) -> str | None:
        return self._parent_key

    @property
    def is_chunk(self) -> bool:
        return self._is_chunk

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        assert self._is_open, "written to after its end"
        assert offset_bytes % self.checksum_block_bytes == 0, offset_bytes
        if not data:
            return
        if offset_bytes != self._end_bytes:
            assert offset_bytes > self._end_bytes, f"written twice at {offset_bytes}"
            assert offset_bytes not in self._early, f"written twice at {offset_bytes}"
            self._early[offset_bytes] = bytes(data)
            return
        self._append(data)
        while (early := self._early.pop(self._end_bytes, None)) is not None:
            self._append(memoryview(early))

    def _append(self, data: memoryview) -> None:
        assert self._end_bytes % self.block_bytes == 0, f"{self.key!r} has ended before"
        self._checksums.extend(block_checksums(data, self.block_bytes))
        begin_bytes = self._end_bytes - len(self._tail)
        self._end_bytes += len(data)
        self._grow(self._end_bytes)
        if IoPath.PAGE_CACHE in self._source.volume.paths:
            self._write(begin_bytes, data)
            return
        if self._tail:
            data = memoryview(bytes(self._tail) + bytes(data))
        whole_bytes = len(data) - self._begun_bytes()
        self._write(begin_bytes, data[:whole_bytes])
        self._tail = bytearray(data[whole_bytes:])

    def _begun_bytes(self) -> int:
        """Of the block that the end lies in. Blocks count from the begin of their run, the last
        one, whose own end may be no whole block.
        """
        if self._end_bytes == self._room_bytes:
            return 0
        return (self._end_bytes - self._room_bytes + self._runs[-1][2]) % BLOCK_BYTES

    def _grow(self, end_bytes: int) -> None:
        """Runs of twice the size of the one before. All but the last hold whole blocks, so that
        no block lies in two of them.
        """
        while self._room_bytes < end_bytes:
            missing_bytes = end_bytes - self._room_bytes
            last_bytes = self._runs[-1][2] if self._runs else 0
            wanted_bytes = min(max(missing_bytes, 2 * last_bytes), self._run_bytes_max)
            least_bytes = round_up(min(missing_bytes, self.block_bytes))
            number, length_bytes = self._source.allocate_run(
                max(round_up(wanted_bytes), least_bytes), least_bytes
            )
            usable_bytes = length_bytes - length_bytes % self.block_bytes
            if missing_bytes % self.block_bytes and missing_bytes <= length_bytes:
                usable_bytes = missing_bytes  # a piece of no whole blocks ends the object
            self._runs.append((number, self._source.place(number), usable_bytes))
            self._paths.append(self._source.path(number))
            self._room_bytes += usable_bytes

    def _write(self, begin_bytes: int, data: memoryview) -> None:
        run_begin = 0
        by_path: dict[IoPath, list[Transfer]] = {path: [] for path in IoPath}
        for (_, offset_bytes, length_bytes), path in zip(self._runs, self._paths, strict=True):
            low = max(begin_bytes, run_begin)
            high = min(begin_bytes + len(data), run_begin + length_bytes)
            if low < high:
                offset_bytes += low - run_begin
                piece = data[low - begin_bytes : high - begin_bytes]
                direct_bytes = self._direct_bytes(offset_bytes, len(piece), path)
                by_path[IoPath.DIRECT].append(Transfer(offset_bytes, piece[:direct_bytes]))
                rest = Transfer(offset_bytes + direct_bytes, piece[direct_bytes:])
                by_path[IoPath.PAGE_CACHE].append(rest)
            run_begin += length_bytes
        for path, transfers in by_path.items():
            some = [transfer for transfer in transfers if transfer.memory]
            if some:
                self._source.write(some, path)

    def _direct_bytes(self, offset_bytes: int, length_bytes: int, path: IoPath) -> int:
        """How much of a piece, from its begin on, is written past the page cache: of an extent on
        the direct path, whole blocks of a long piece.
        """
        if IoPath.PAGE_CACHE not in self._source.volume.paths:
            return length_bytes
        whole_bytes = length_bytes - length_bytes % BLOCK_BYTES
        is_direct = path is IoPath.DIRECT and offset_bytes % BLOCK_BYTES == 0
        return whole_bytes if is_direct and whole_bytes >= DIRECT_BYTES_MIN else 0

    def finish(self) -> None:
        if self._tail:
            tail, self._tail = self._tail, bytearray()
            self._write(self._end_bytes - len(tail), memoryview(tail))
        over_bytes = self._room_bytes - self._end_bytes
        if over_bytes > 0:
            number, offset_bytes, length_bytes = self._runs[-1]
            used_bytes = length_bytes - over_bytes
            assert used_bytes > 0
            self._source.shrink(number, used_bytes)
            self._runs[-1] = (number, offset_bytes, used_bytes)
            self._room_bytes = self._end_bytes

    def size_bytes(self) -> int:
        assert not self._early, f"{self.key!r} is torn at {self._end_bytes}"
        return self._end_bytes

    def checksums(self) -> array[int]:
        return self._checksums

    def place(self) -> tuple[tuple[int, ...], int]:
        return tuple(run[0] for run in self._runs), 0

    def keep(self) -> None:
        self._end(keep=True)

    def discard(self) -> None:
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._early.clear()
            for number, *_ in self._runs:
                self._source.end_writing(number, keep=keep)
