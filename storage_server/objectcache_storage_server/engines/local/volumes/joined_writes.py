"""Writes of a data file: what lies side by side is one call, whichever path it takes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.direct.alignment import Alignment
from objectcache_storage_server.engines.local.direct.batches import WriteBatch, address_of
from objectcache_storage_server.engines.local.direct.kernel_facts import start_write_back
from objectcache_storage_server.engines.local.direct.threads import write_whole
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

WRITE_BACK_BYTES = 1 * MIB  # copied into the page cache before the device is set to work on them
DIRECT_BYTES_MAX = 32 * MIB  # of a call past it, all of which the device has at once
VECTORS_MAX = 512  # of memory in one call, of which the kernel takes 1024


class _JoinedWrites(ABC):
    """Collects neighbours, and writes them when something else comes."""

    def __init__(self, joined_bytes_max: int) -> None:
        self._joined_bytes_max = joined_bytes_max
        self._file_descriptor = -1
        self._offset_bytes = 0
        self._memories: list[memoryview] = []  # of one range of the file
        self._length_bytes = 0

    def _join(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        is_behind = offset_bytes == self._offset_bytes + self._length_bytes
        is_more = self._length_bytes + len(memory) <= self._joined_bytes_max
        if not (is_behind and is_more and file_descriptor == self._file_descriptor):
            self._write_joined()
            self._file_descriptor, self._offset_bytes = file_descriptor, offset_bytes
        self._memories.append(memory)
        self._length_bytes += len(memory)
        if len(self._memories) == VECTORS_MAX:
            self._write_joined()

    def _write_joined(self) -> None:
        memories, self._memories = self._memories, []
        length_bytes, self._length_bytes = self._length_bytes, 0
        if memories:
            self._write(self._file_descriptor, self._offset_bytes, memories, length_bytes)

    @abstractmethod
    def _write(
        self,
        file_descriptor: int,
        offset_bytes: int,
        memories: Sequence[memoryview],
        length_bytes: int,
    ) -> None:
        """Write one range; raises `OSError`."""


class CachedWrites(_JoinedWrites):
    """Writes through the page cache, and has the device begin with what it took while it takes
    more: pieces of about `WRITE_BACK_BYTES`, or less where what follows does not lie behind them.
    """

    def __init__(self) -> None:
        super().__init__(WRITE_BACK_BYTES)

    def add(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        """Write now or with a later call, at last with `run`. Raises `OSError`."""
        if len(memory) <= WRITE_BACK_BYTES:
            self._join(file_descriptor, offset_bytes, memory)
            return
        for begin in range(0, len(memory), WRITE_BACK_BYTES):
            piece = memory[begin : begin + WRITE_BACK_BYTES]
            self._join(file_descriptor, offset_bytes + begin, piece)

    def run(self) -> None:
        """Write what was added; raises `OSError`."""
        self._write_joined()

    def _write(
        self,
        file_descriptor: int,
        offset_bytes: int,
        memories: Sequence[memoryview],
        length_bytes: int,
    ) -> None:
        _write_vectors(file_descriptor, offset_bytes, memories)
        start_write_back(file_descriptor, offset_bytes, length_bytes)


class DirectWrites(_JoinedWrites):
    """Writes past the page cache: neighbours that are whole blocks in memory that begins at one go
    out from where they lie, in one call, and everything else in one batch at the end.
    """

    def __init__(self, batch: WriteBatch, alignment: Alignment) -> None:
        super().__init__(DIRECT_BYTES_MAX)
        self._batch = batch
        self._memory_bytes = alignment.memory_bytes

    def add(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        """Write now or with a later call, at last with `run`. Raises `OSError`."""
        is_whole = offset_bytes % BLOCK_BYTES == len(memory) % BLOCK_BYTES == 0
        if is_whole and address_of(memory) % self._memory_bytes == 0:
            self._join(file_descriptor, offset_bytes, memory)
        else:
            self._batch.add(file_descriptor, offset_bytes, memory)

    def run(self) -> None:
        """Write what was added; raises `OSError`."""
        self._write_joined()
        self._batch.run()

    def _write(
        self,
        file_descriptor: int,
        offset_bytes: int,
        memories: Sequence[memoryview],
        length_bytes: int,
    ) -> None:
        if len(memories) == 1:
            self._batch.add(file_descriptor, offset_bytes, memories[0])
        else:
            _write_vectors(file_descriptor, offset_bytes, memories)


def _write_vectors(file_descriptor: int, offset_bytes: int, memories: Sequence[memoryview]) -> None:
    done_bytes = os.pwritev(file_descriptor, memories, offset_bytes)
    for memory in memories:  # a rest, where it was cut short
        if done_bytes < len(memory):
            write_whole(file_descriptor, offset_bytes + done_bytes, memory[done_bytes:])
        offset_bytes += len(memory)
        done_bytes = max(0, done_bytes - len(memory))
