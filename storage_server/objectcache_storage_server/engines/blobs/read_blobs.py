"""Held objects: reads of their blobs, verified.

A read is cut into pieces of whole checksum blocks. What begins or ends inside of a block is read
with its block into memory of our own. A store that does one read after the other is asked for a
piece at a time, which is checked while it is still in the processor's cache; any other store is
given all of a call at once, and everything is checked when it is there.

What is lost or does not match is read once more, into memory of our own, before anything is
dropped: a client can write to the memory that is being filled for it, and a device can fail once.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.base import BegunReads, OpenObjects, Placement, Read
from objectcache_storage_server.engines.blobs.blob_store import DONE, BlobRead, BlobStore, LostBlob
from objectcache_storage_server.engines.blobs.open_versions import OpenVersion
from objectcache_storage_server.engines.block_checksums import block_checksum, block_count
from objectcache_storage_server.engines.verify_blocks import find_misfit

PIECE_BYTES = 256 * KIB  # read, then hashed while still in the processor's cache
MAX_PIECE_BYTES = 64 * MIB


class BlobReader(ABC):
    """What held objects ask of their engine."""

    store: BlobStore

    @abstractmethod
    def deadline_s(self) -> float:
        """Of a call of the store that begins now."""

    @abstractmethod
    def drop_lost(self, version: OpenVersion, reason: str) -> Exception:
        """Its bytes are not those that were stored: drop it. Returns what to raise."""

    @abstractmethod
    def let_go(self, versions: Sequence[OpenVersion]) -> None:
        """They are not read any more."""


class _Damage(Exception):
    """A block does not match its checksum."""

    def __init__(self, version: OpenVersion, block: int) -> None:
        super().__init__(f"block {block} does not match its checksum")
        self.version = version


class _Piece(NamedTuple):
    """Whole blocks of a version, the last one perhaps short."""

    version: OpenVersion
    first_block: int
    read: BlobRead

    def misfit(self, memory: memoryview) -> int | None:
        """The first block that does not match its checksum, where `memory` is what was read."""
        version, first_block, _ = self
        block_bytes = version.block_bytes
        end_block = first_block + block_count(len(memory), block_bytes)
        misfit = find_misfit(memory, block_bytes, version.checksums[first_block:end_block])
        return None if misfit is None else first_block + misfit


Copies = list[tuple[memoryview, memoryview]]  # from a block to where a part of it belongs


class OpenBlobs(OpenObjects):
    """Versions that are open, in the order asked."""

    def __init__(self, reader: BlobReader, versions: Sequence[OpenVersion | None]) -> None:
        self.infos = [each.version.info if each else None for each in versions]
        self._reader = reader
        self._versions = versions

    def placements(self) -> Sequence[Placement]:
        assert None not in self._versions, "an object is not stored"
        return [Placement(source, 0) for source in range(len(self._versions))]

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        store = self._reader.store
        if store.capabilities.queue_depth:
            self.begin_reads(reads, buffer).finish()
            return
        is_verified, deadline_s = store.capabilities.is_verified, self._reader.deadline_s()
        versions, begin_reads, checksum_of = self._versions, store.begin_reads, block_checksum
        with self.failures():
            for read in reads:
                source, offset_bytes, length_bytes, landing = read
                version = versions[source]
                assert version is not None
                index, skip = divmod(offset_bytes, version.block_bytes)
                if skip or length_bytes != version.block_bytes:
                    self._read_pieces(read, buffer, deadline_s)
                    continue
                # A slice that is one block: a layer is hundreds, and a call each costs a tenth.
                target = buffer[landing : landing + length_bytes]
                wanted = BlobRead(version.blob, offset_bytes, target)
                future = begin_reads((wanted,), deadline_s)
                if future is DONE and (
                    is_verified or checksum_of(target) == version.checksums[index]
                ):
                    continue
                self.land((_Piece(version, index, wanted),), future)

    def _read_pieces(self, read: Read, buffer: memoryview, deadline_s: float) -> None:
        """Read and verify piece by piece."""
        copies: Copies = []
        for piece in self._pieces((read,), buffer, copies, PIECE_BYTES):
            self.land((piece,), self._reader.store.begin_reads((piece.read,), deadline_s))
        _copy(copies)

    def begin_reads(self, reads: Sequence[Read], buffer: memoryview) -> BegunReads:
        copies: Copies = []
        pieces = list(self._pieces(reads, buffer, copies))
        wanted = [piece.read for piece in pieces]
        future = self._reader.store.begin_reads(wanted, self._reader.deadline_s())
        return _BegunBlobReads(self, pieces, copies, future)

    @contextlib.contextmanager
    def failures(self) -> Generator[None, None, None]:
        """Raise what a read's failure in the block means; damage drops the version."""
        try:
            yield
        except _Damage as damage:
            raise self._reader.drop_lost(damage.version, str(damage)) from damage
        except LostBlob as lost:
            version = next(each for each in self._versions if each and each.blob is lost.blob)
            raise self._reader.drop_lost(version, str(lost)) from lost
        except CancelledError as error:
            raise Unavailable("the read was given up") from error

    def land(self, pieces: Sequence[_Piece], future: Future[None]) -> None:
        """Wait for pieces, and compare them with their checksums. Raises `LostBlob` and `_Damage`
        for what is no better when it is read again, and what else reading fails with.
        """
        try:
            future.result()
        except LostBlob:  # which of the others were read is not known
            suspects = list(pieces)
        else:
            if self._reader.store.capabilities.is_verified:
                return
            suspects = [piece for piece in pieces if piece.misfit(piece.read.landing) is not None]
        for piece in suspects:
            self._read_again(piece)

    def _read_again(self, piece: _Piece) -> None:
        store, (blob, offset_bytes, landing) = self._reader.store, piece.read
        own = memoryview(bytearray(len(landing)))
        again = BlobRead(blob, offset_bytes, own)
        store.begin_reads((again,), self._reader.deadline_s()).result()
        misfit = None if store.capabilities.is_verified else piece.misfit(own)
        if misfit is not None:
            raise _Damage(piece.version, misfit)
        landing[:] = own

    def _pieces(
        self,
        reads: Sequence[Read],
        buffer: memoryview,
        copies: Copies,
        piece_bytes: int = MAX_PIECE_BYTES,
    ) -> Iterator[_Piece]:
        assert buffer.itemsize == 1
        for source, offset_bytes, length_bytes, landing in reads:
            version = self._versions[source]
            assert version is not None
            target = buffer[landing : landing + length_bytes]
            assert len(target) == length_bytes
            block_bytes, size_bytes = version.block_bytes, version.size_bytes
            assert 0 <= offset_bytes <= offset_bytes + length_bytes <= size_bytes
            while target:
                index, skip = divmod(offset_bytes, block_bytes)
                whole_bytes = _whole_bytes(version, offset_bytes, len(target))
                if not skip and whole_bytes:
                    whole_bytes_max = max(block_bytes, _floor(piece_bytes, block_bytes))
                    part = target[: min(whole_bytes, whole_bytes_max)]
                    yield _Piece(version, index, BlobRead(version.blob, offset_bytes, part))
                else:
                    begin = offset_bytes - skip
                    block = memoryview(bytearray(min(block_bytes, size_bytes - begin)))
                    part = target[: len(block) - skip]
                    yield _Piece(version, index, BlobRead(version.blob, begin, block))
                    copies.append((block[skip : skip + len(part)], part))
                target, offset_bytes = target[len(part) :], offset_bytes + len(part)

    def close(self) -> None:
        versions, self._versions = self._versions, []
        self._reader.let_go([each for each in set(versions) if each is not None])


class _BegunBlobReads(BegunReads):
    def __init__(
        self, opened: OpenBlobs, pieces: Sequence[_Piece], copies: Copies, future: Future[None]
    ) -> None:
        self._opened = opened
        self._pieces = pieces
        self._copies = copies
        self._future = future

    def when_landed(self, call: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: call())

    def finish(self) -> None:
        with self._opened.failures():
            self._opened.land(self._pieces, self._future)
        _copy(self._copies)

    def cancel(self) -> None:
        self._future.cancel()


def _whole_bytes(version: OpenVersion, offset_bytes: int, length_bytes: int) -> int:
    """How much from a block's begin on is whole blocks, a short last one included."""
    if offset_bytes + length_bytes == version.size_bytes:
        return length_bytes
    return _floor(length_bytes, version.block_bytes)


def _floor(length_bytes: int, unit_bytes: int) -> int:
    return length_bytes - length_bytes % unit_bytes


def _copy(copies: Copies) -> None:
    for block, target in copies:
        target[:] = block
