"""Blobs being written, which no catalog names yet; checksums are taken as bytes arrive."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from objectcache_storage_server.engines.base import Engine, PrefixShape, StagedApart
from objectcache_storage_server.engines.blobs.blob_store import BlobStore
from objectcache_storage_server.engines.block_checksums import (
    block_checksums,
    block_count,
    stored_block_bytes,
)
from objectcache_storage_server.engines.judge_commit import FinishedStaged


class StagedBlob(FinishedStaged):
    """One object on its way into one blob."""

    def __init__(
        self,
        store: BlobStore,
        blob_number: int,
        bucket: str,
        key: str,
        checksum_block_bytes: int,
        deadline: Callable[[], float],
        remove: Callable[[Sequence[int]], None],
        on_end: Callable[[StagedBlob], None],
    ) -> None:
        """`deadline` is that of a call that begins now; `remove` deletes blobs and raises nothing.
        `on_end` is called once, when the blob is stored or discarded.
        """
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self.blob_number = blob_number
        self._store = store
        self._deadline = deadline
        self._remove = remove
        self._on_end = on_end
        self._checksums = array("Q")
        self._written_bytes = 0
        self._end_bytes = 0
        self._is_open = True

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        assert self._is_open, "written to after its end"
        assert offset_bytes % self.checksum_block_bytes == 0, offset_bytes
        if not data:
            return
        self._grow(offset_bytes + len(data))
        first = offset_bytes // self.block_bytes
        checksums = array("Q", block_checksums(data, self.block_bytes))
        self._checksums[first : first + len(checksums)] = checksums
        self._store.write(self.blob_number, offset_bytes, data, self._deadline())
        self._written_bytes += len(data)

    def discard(self) -> None:
        if self._is_open:
            self._remove([self.blob_number])
            self.keep()

    def keep(self) -> None:
        """The catalog names it: `discard` has no effect from here on."""
        if self._is_open:
            self._is_open = False
            self._on_end(self)

    def size_bytes(self) -> int:
        assert self._written_bytes == self._end_bytes, f"{self.key!r} is torn"
        return self._end_bytes

    def checksums(self) -> array[int]:
        return self._checksums

    def _grow(self, end_bytes: int) -> None:
        if end_bytes > self._end_bytes:
            assert self._end_bytes % self.block_bytes == 0, f"{self.key!r} has ended before"
            self._end_bytes = end_bytes
            more = block_count(end_bytes, self.block_bytes) - len(self._checksums)
            self._checksums.frombytes(bytes(more * self._checksums.itemsize))


class StagedAtOnce(StagedApart):
    """The chunks of one put, each a blob: what one call writes to several is written at once, since
    a store that is far away takes as long for one as for many.
    """

    def __init__(
        self, engine: Engine, bucket: str, shape: PrefixShape, writers: ThreadPoolExecutor
    ) -> None:
        super().__init__(engine, bucket, shape)
        self._writers = writers

    def write(self, position_bytes: int, data: memoryview) -> None:
        by_chunk: defaultdict[int, list[tuple[int, memoryview]]] = defaultdict(list)
        for index, offset_bytes, piece in self.pieces(position_bytes, data):
            by_chunk[index].append((offset_bytes, piece))
        writing = [self._writers.submit(self._write, *chunk) for chunk in by_chunk.items()]
        errors = [each.exception() for each in writing]  # all have let go of the caller's memory
        for error in errors:
            if error is not None:
                raise error

    def _write(self, index: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        for offset_bytes, piece in pieces:
            self.staged[index].write_at(offset_bytes, piece)
