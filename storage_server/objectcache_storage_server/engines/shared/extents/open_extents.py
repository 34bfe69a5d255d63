"""Opened objects of a shared store: reads of its objects, verified.

A read is cut where the store's objects end, and into whole checksum blocks: what begins or ends
inside of a block is read with its block into memory of our own. All reads of a call are one batch
of the store; when it has landed, everything is compared with its checksums.

What is lost or does not match is read once more, into memory of our own, before anything is
dropped: a client can write to the memory that is being filled for it, and a store can fail once.

Where this server has a cache it is asked first, and the store for the rest, of which the cache
keeps a copy. The copy is what is compared, in full: nobody else can write to it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.base import (
    BegunReads,
    EndedReads,
    OpenObjects,
    Placement,
    Read,
)
from objectcache_storage_server.engines.blobs.blob_store import DONE
from objectcache_storage_server.engines.block_checksums import block_checksum, block_count
from objectcache_storage_server.engines.shared.cache.extent_cache import CachedRange, ExtentCache
from objectcache_storage_server.engines.shared.extents.read_sources import ReadSource
from objectcache_storage_server.engines.shared.versions import SharedVersion
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    SharedStore,
)
from objectcache_storage_server.engines.verify_blocks import find_misfit


class ExtentReader(ABC):
    """What opened objects ask of their engine."""

    store: SharedStore
    cache: ExtentCache | None = None  # that reads are to ask first

    @abstractmethod
    def deadline_s(self) -> float:
        """Of a call of the store that begins now."""

    @abstractmethod
    def drop_damaged(self, versions: Iterable[SharedVersion], reason: str) -> Exception:
        """Their bytes are not those that were stored, or are lost: drop those that the index still
        has at the log's end. Returns what to raise: that they are damaged, or where others took
        them away, gone.
        """


class _Piece(NamedTuple):
    """Whole blocks of a source, the last one perhaps short, and where they land."""

    source: ReadSource
    first_block: int
    memory: memoryview

    @property
    def expected(self) -> Sequence[int]:
        """The checksums of its blocks."""
        count = block_count(len(self.memory), self.source.block_bytes)
        return self.source.expected[self.first_block : self.first_block + count]

    def object_reads(self) -> list[ObjectRead]:
        """What fills it: one read of each of the store's objects."""
        begin_bytes = self.first_block * self.source.block_bytes
        return list(self.source.object_reads(begin_bytes, self.memory))

    def owners(self, blocks: Iterable[int]) -> list[SharedVersion]:
        """Whose blocks these are, each once; they are numbered from the piece's begin."""
        found = (self.source.owner(self.first_block + block) for block in blocks)
        return list({version.name: version for version in found}.values())


_Asked = tuple[_Piece, Sequence[ObjectRead]]  # and what the store was asked for of it
Copies = list[tuple[memoryview, memoryview]]  # from a block to where a part of it belongs


class SharedOpenObjects(OpenObjects):
    """Versions of one moment, in the order asked. Nothing is held: what is deleted stays readable
    for a grace that is longer than any delivery.
    """

    def __init__(
        self,
        reader: ExtentReader,
        versions: Sequence[SharedVersion | None],
        sources: Sequence[ReadSource],
        placements: Sequence[Placement],
        verification: Verification,
        sample: int,
    ) -> None:
        """`placements` are those of the versions that are not None, in their order; `sample` says
        which blocks are verified where not all are.
        """
        self.infos = [version.info if version else None for version in versions]
        self._reader = reader
        self._sources = sources
        self._placements = placements
        self._verification = verification
        self._sample = sample

    def placements(self) -> Sequence[Placement]:
        assert None not in self.infos, "an object is not stored"
        return self._placements

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        self.begin_reads(reads, buffer).finish()

    def begin_reads(self, reads: Sequence[Read], buffer: memoryview) -> BegunReads:
        copies: Copies = []
        pieces = list(self._pieces(reads, buffer, copies))
        if not pieces:
            return EndedReads(None)
        cache = self._reader.cache
        wanted = [piece.object_reads() for piece in pieces]
        if cache is not None:
            wanted = [cache.read(reads) for reads in wanted]
        asked = list(itertools.chain.from_iterable(wanted))
        future = DONE
        if asked:
            future = self._reader.store.begin_reads(asked, self._reader.deadline_s())
        return _BegunExtentReads(self, list(zip(pieces, wanted, strict=True)), copies, future)

    def _pieces(
        self, reads: Sequence[Read], buffer: memoryview, copies: Copies
    ) -> Iterator[_Piece]:
        assert buffer.itemsize == 1
        for number, offset_bytes, length_bytes, landing in reads:
            source = self._sources[number]
            block_bytes, size_bytes = source.block_bytes, source.size_bytes
            target = buffer[landing : landing + length_bytes]
            assert len(target) == length_bytes
            assert 0 <= offset_bytes <= offset_bytes + length_bytes <= size_bytes
            while target:
                block, skip = divmod(offset_bytes, block_bytes)
                whole_bytes = len(target)
                if offset_bytes + whole_bytes != size_bytes:
                    whole_bytes -= whole_bytes % block_bytes
                if not skip and whole_bytes:
                    part = target[:whole_bytes]
                    yield _Piece(source, block, part)
                else:
                    _, around_bytes = source.block_around(offset_bytes)
                    own = memoryview(bytearray(around_bytes))
                    part = target[: around_bytes - skip]
                    yield _Piece(source, block, own)
                    copies.append((own[skip : skip + len(part)], part))
                target, offset_bytes = target[len(part) :], offset_bytes + len(part)

    def land(self, asked: Sequence[_Asked], future: Future[None]) -> None:
        """Wait for pieces, and compare them with their checksums. Raises as `read_many`."""
        is_lost = False
        try:
            future.result()
        except LostObject:  # which of the others the store has read is not known
            is_lost = True
        except CancelledError as error:
            raise Unavailable("the read was given up") from error
        suspects = [
            piece for piece, reads in asked if (is_lost and reads) or self._is_misfit(piece, reads)
        ]
        for piece in suspects:
            self._read_again(piece)

    def _is_misfit(self, piece: _Piece, asked: Sequence[ObjectRead]) -> bool:
        """`asked`: what the store was asked for of it."""
        cache, (source, first_block, memory) = self._reader.cache, piece
        if cache is not None and asked:
            copy = cache.buffer(len(memory))
            if copy is not None:
                copy[:] = memory
                return self._is_kept_misfit(piece, asked, cache, copy)
        if self._verification is Verification.OFF:
            return False
        misfit = find_misfit(
            memory,
            source.block_bytes,
            piece.expected,
            self._verification,
            first_block,
            self._sample,
        )
        return misfit is not None

    def _is_kept_misfit(
        self, piece: _Piece, asked: Sequence[ObjectRead], cache: ExtentCache, copy: memoryview
    ) -> bool:
        """The same of a copy, of which the cache keeps what was asked for."""
        if find_misfit(copy, piece.source.block_bytes, piece.expected) is not None:
            cache.give_back(copy)
            return self._verification is not Verification.OFF
        names = {read.name for read in asked}
        copied = [
            CachedRange(*read)
            for read in piece._replace(memory=copy).object_reads()
            if read.name in names
        ]
        cache.keep(copy, copied, is_read=True)
        return False

    def _read_again(self, piece: _Piece) -> None:
        source, _, landing = piece
        own = memoryview(bytearray(len(landing)))
        wanted = piece._replace(memory=own).object_reads()
        if self._reader.cache is not None:
            self._reader.cache.drop(read.name for read in wanted)
        try:
            self._reader.store.begin_reads(wanted, self._reader.deadline_s()).result()
        except LostObject as lost:
            blocks = _blocks_of(lost.name, wanted, source.block_bytes)
            raise self._reader.drop_damaged(piece.owners(blocks), str(lost)) from lost
        misfits = _misfits(own, source.block_bytes, piece.expected)
        if misfits and self._verification is not Verification.OFF:
            owners = piece.owners(misfits)
            raise self._reader.drop_damaged(owners, "a block does not match its checksum")
        landing[:] = own

    def close(self) -> None:
        self._sources = ()


class _BegunExtentReads(BegunReads):
    def __init__(
        self,
        opened: SharedOpenObjects,
        asked: Sequence[_Asked],
        copies: Copies,
        future: Future[None],
    ) -> None:
        self._opened = opened
        self._asked = asked
        self._copies = copies
        self._future = future

    def when_landed(self, call: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: call())

    def finish(self) -> None:
        self._opened.land(self._asked, self._future)
        for block, target in self._copies:
            target[:] = block

    def cancel(self) -> None:
        self._future.cancel()


def _misfits(memory: memoryview, block_bytes: int, expected: Sequence[int]) -> list[int]:
    begins = range(0, len(memory), block_bytes)
    return [
        block
        for block, begin in enumerate(begins)
        if block_checksum(memory[begin : begin + block_bytes]) != expected[block]
    ]


def _blocks_of(name: str, wanted: Sequence[ObjectRead], block_bytes: int) -> range:
    """The blocks that lie in an object of this name, numbered from the first read's begin; all
    where none of the reads is of it.
    """
    begin = 0
    for read in wanted:
        end = begin + len(read.landing)
        if read.name == name:
            return range(begin // block_bytes, block_count(end, block_bytes))
        begin = end
    return range(block_count(begin, block_bytes))
