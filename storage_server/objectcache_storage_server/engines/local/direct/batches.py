"""Batches of the direct path: transfers of any shape as aligned pieces, and what was bounced.

A batch collects pieces and hands them to a submitter in one go, earlier where the bounce buffer is
full. It serves one call in one thread.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.direct.alignment import Alignment, split_at
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

BOUNCE_BYTES = 4 * MIB  # of a thread that needed it; as much as is worth one batch


class DirectPiece(NamedTuple):
    """One aligned request: a range of an open file and the memory for it, of the same length."""

    file_descriptor: int
    offset_bytes: int
    address: int
    memory: memoryview


class Submitter(ABC):
    """Carries out pieces. Any thread may call; a call returns when none of its pieces is in
    flight, also where it raises `OSError` (EIO where the file ends early)."""

    description: str  # for operators: how it submits, and why

    @abstractmethod
    def read(self, pieces: Sequence[DirectPiece]) -> None:
        """Fill every memory."""

    @abstractmethod
    def write(self, pieces: Sequence[DirectPiece]) -> None:
        """Write every memory."""

    @abstractmethod
    def close(self) -> None:
        """Release rings or threads; nobody is calling."""


class Bounce:
    """Aligned memory of our own, given out from its begin until it is full."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        self._address = address_of(self._memory)
        self.used_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much `take` can still give."""
        return BOUNCE_BYTES - self.used_bytes

    def take(self, length_bytes: int) -> tuple[int, memoryview]:
        """The next `length_bytes`, whole blocks of them taken: address and memory."""
        assert length_bytes <= self.left_bytes
        begin = self.used_bytes
        self.used_bytes += length_bytes + -length_bytes % BLOCK_BYTES
        return self._address + begin, self._memory[begin : begin + length_bytes]


class _Batch:
    """Pieces collected so far."""

    def __init__(
        self, submitter: Submitter, alignment: Alignment, bounce: Bounce, piece_bytes_max: int
    ) -> None:
        """`piece_bytes_max` is the most that one request may move, whole blocks."""
        self._submitter = submitter
        self._alignment = alignment
        self._bounce = bounce
        self._piece_bytes_max = piece_bytes_max
        self._pieces: list[DirectPiece] = []

    def _add_piece(
        self, file_descriptor: int, offset: int, address: int, memory: memoryview
    ) -> None:
        if len(memory) <= self._piece_bytes_max:
            self._pieces.append(DirectPiece(file_descriptor, offset, address, memory))
            return
        for begin, length in split_at(0, len(memory), self._piece_bytes_max):
            part = memory[begin : begin + length]
            self._pieces.append(DirectPiece(file_descriptor, offset + begin, address + begin, part))


class ReadBatch(_Batch):
    """Reads: ragged ends are read as whole blocks and copied from there."""

    def __init__(
        self, submitter: Submitter, alignment: Alignment, bounce: Bounce, piece_bytes_max: int
    ) -> None:
        super().__init__(submitter, alignment, bounce, piece_bytes_max)
        self._copies: list[tuple[memoryview, memoryview]] = []  # from, to

    def add(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        """Read the file from `offset_bytes` on into `memory`, which is not empty."""
        address = address_of(memory)
        parts = self._alignment.parts(offset_bytes, address, len(memory))
        begin, end = parts.head_bytes, parts.head_bytes + parts.whole_bytes
        if parts.head_bytes:
            self._add_bounced(file_descriptor, offset_bytes, memory[:begin])
        if parts.whole_bytes:
            target = memory[begin:end]
            self._add_piece(file_descriptor, offset_bytes + begin, address + begin, target)
        if parts.tail_bytes:
            self._add_bounced(file_descriptor, offset_bytes + end, memory[end:])

    def run(self) -> None:
        """Carry out what was added; raises `OSError`."""
        if self._pieces:
            self._submitter.read(self._pieces)
        for source, target in self._copies:
            target[:] = source
        self._pieces, self._copies = [], []
        self._bounce.used_bytes = 0

    def _add_bounced(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        # Cut at multiples, so that a part and its raggedness always fit an empty buffer.
        for begin, length in split_at(offset_bytes, len(memory), self._piece_bytes_max):
            aligned_begin, aligned_length = self._alignment.covering(begin, length)
            if aligned_length > self._bounce.left_bytes:
                self.run()
            address, source = self._bounce.take(aligned_length)
            self._pieces.append(DirectPiece(file_descriptor, aligned_begin, address, source))
            skipped = begin - aligned_begin
            target = memory[begin - offset_bytes : begin - offset_bytes + length]
            self._copies.append((source[skipped : skipped + length], target))


class WriteBatch(_Batch):
    """Writes: each begins at a block, and its last block is filled up with zeros."""

    def add(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        """Write `memory`, which is not empty, to the file from `offset_bytes` on."""
        assert offset_bytes % BLOCK_BYTES == 0, "a direct write begins at a block"
        address = address_of(memory)
        whole_bytes = len(memory) - len(memory) % BLOCK_BYTES
        if address % self._alignment.memory_bytes:
            whole_bytes = 0
        if whole_bytes:
            self._add_piece(file_descriptor, offset_bytes, address, memory[:whole_bytes])
        if whole_bytes < len(memory):
            self._add_bounced(file_descriptor, offset_bytes + whole_bytes, memory[whole_bytes:])

    def run(self) -> None:
        """Carry out what was added; raises `OSError`."""
        if self._pieces:
            self._submitter.write(self._pieces)
        self._pieces = []
        self._bounce.used_bytes = 0

    def _add_bounced(self, file_descriptor: int, offset_bytes: int, memory: memoryview) -> None:
        for begin, length in split_at(0, len(memory), self._piece_bytes_max):
            padded_bytes = length + -length % BLOCK_BYTES
            if padded_bytes > self._bounce.left_bytes:
                self.run()
            address, block = self._bounce.take(padded_bytes)
            block[:length] = memory[begin : begin + length]
            block[length:] = bytes(padded_bytes - length)
            self._pieces.append(DirectPiece(file_descriptor, offset_bytes + begin, address, block))


def address_of(memory: memoryview) -> int:
    """Where a view of bytes lies; it is not empty."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address
