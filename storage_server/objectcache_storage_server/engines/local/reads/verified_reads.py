"""Held objects of the local engine: verified reads over both paths.

A read is cut into pieces of whole checksum blocks. On the page-cache path a piece is checked while
it is still in the processor's cache; on the direct path all pieces of a call go to the device at
once and are checked when they are there, and so do those that the page cache turns out not to have.
What begins or ends inside of a block is read with its block into memory of our own.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from objectcache_schemas.limits import MIB
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.base import OpenObjects, Placement, Read
from objectcache_storage_server.engines.block_checksums import block_checksum
from objectcache_storage_server.engines.local.reads.device_sharing import RunningFragment
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer
from objectcache_storage_server.engines.verify_blocks import compared_blocks

# Read, then hashed while it is still in a cache of the processor. Smaller pieces are hashed quicker
# and cost more turns of the interpreter: 256 KiB reached 0.65 of a plain copy, 1 MiB 0.73.
PIECE_BYTES = 1 * MIB


class DamagedVersion(Exception):
    """Bytes of this version are not those that were stored."""

    def __init__(self, version: Version, reason: str) -> None:
        super().__init__(reason)
        self.version = version


class Reader(Protocol):
    """What opened objects need of the engine."""

    read_resident: Callable[[Transfer], bool]  # the volume's; what it finds is counted apart

    def fragment(self, length_bytes: int, path: IoPath) -> RunningFragment:
        """What a path's readers are coordinated by, from the device part to the last check."""
        ...

    def read(self, transfers: Sequence[Transfer], path: IoPath, cold_bytes: int = 0) -> int:
        """Read from the volume; returns the bytes that were in memory. `cold_bytes` are of cold
        extents. Raises `OSError`.
        """
        ...

    def count_found(self, found_bytes: int) -> None:
        """Count what `read_resident` has read."""
        ...

    def read_missing(self, transfers: Sequence[Transfer]) -> None:
        """Read what is to be in the page cache and was not; raises `OSError`."""
        ...

    def read_again(self, transfer: Transfer) -> None:
        """Read from the device what the page cache had; raises `OSError`."""
        ...

    def count_stale(self, transfer: Transfer) -> None:
        """What was read again is right, and the page cache was wrong."""
        ...

    def seems_resident(self, offset_bytes: int, length_bytes: int) -> bool:
        """Whether the page cache has a range, by a few of its blocks."""
        ...

    def is_missing(self, extent: int) -> bool:
        """This extent was to be in the page cache and is not. Answers whether it can be read past
        it.
        """
        ...

    def is_there(self, extent: int) -> None:
        """This extent was cold, and is in the page cache."""
        ...

    def read_failed(self, error: DamagedVersion | OSError) -> Exception:
        """What a failed read raises; damage drops the version that was read."""
        ...

    def let_go(self, extents: npt.NDArray[np.int64]) -> None:
        """Nobody reads these extents for us any more."""
        ...


class OpenExtent:
    """Where an extent lies, and how an opening reads it."""

    __slots__ = ("is_cold", "length_bytes", "number", "offset_bytes", "path")

    def __init__(
        self,
        number: int,
        offset_bytes: int,
        length_bytes: int,
        path: IoPath,
        is_cold: bool | int = False,
    ) -> None:
        self.number = number
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.path = path
        # From the piece on that was not in memory, the opening asks for no other: see `path_use`.
        self.is_cold = is_cold and path is IoPath.PAGE_CACHE

    @property
    def read_path(self) -> IoPath:
        """The path that its bytes come by now."""
        return IoPath.DIRECT if self.is_cold else self.path


class Piece(NamedTuple):
    """Whole checksum blocks in one run of the volume."""

    transfer: Transfer
    path: IoPath  # that is tried first
    block_bytes: int
    source: Source
    row: int  # of the source, in which the blocks lie
    first_block: int  # as the source numbers them in a row
    extent: OpenExtent

    @property
    def block_count(self) -> int:
        """Blocks in it; an object's last may be short."""
        return -(-len(self.transfer.memory) // self.block_bytes)


class Source(ABC):
    """An extent with slots, or an object on its own: an address space that reads name."""

    block_bytes: int
    extents: Sequence[OpenExtent]
    may_be_cold: bool  # and it was not yet looked whether it still is

    @abstractmethod
    def pieces(self, offset_bytes: int, memory: memoryview) -> Iterator[Piece]:
        """Pieces that fill `memory`, which begins and ends with a block (or the object)."""

    @abstractmethod
    def expected(self, row: int, blocks: range) -> Sequence[int]:
        """Checksums of blocks of a row, looked up as they are needed: a delivery that samples
        needs few of them.
        """

    @abstractmethod
    def owner(self, block: int) -> Version:
        """Whose block it is: `Piece.first_block`, or one of those that follow it."""

    @abstractmethod
    def block_around(self, offset_bytes: int) -> tuple[int, int]:
        """Begin and length of the block that holds an address."""


class SlotSource(Source):
    """An extent whose slots lie side by side, row after row. A read lies in one row."""

    def __init__(
        self,
        geometry: Geometry,
        extent: OpenExtent,
        versions: Mapping[int, Version],
        block_bytes: int,
    ) -> None:
        """`versions` by slot: those that were opened."""
        self.extents = (extent,)
        self.may_be_cold = bool(extent.is_cold)
        self._geometry = geometry
        self._extent = extent
        self._versions = versions
        self.block_bytes = block_bytes
        self._blocks_each = geometry.slice_bytes // self.block_bytes
        self._stride_bytes = geometry.row_stride_bytes
        self._step = max(1, PIECE_BYTES // block_bytes)  # blocks of a piece out of memory

    def pieces(self, offset_bytes: int, memory: memoryview) -> Iterator[Piece]:
        layer, in_row = divmod(offset_bytes, self._stride_bytes)
        block_bytes = self.block_bytes
        first, end = in_row // block_bytes, (in_row + len(memory)) // block_bytes
        extent, path = self._extent, self._extent.read_path
        step = end - first if path is IoPath.DIRECT else self._step
        start = extent.offset_bytes + layer * self._stride_bytes
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            view = memory[(begin - first) * block_bytes : (stop - first) * block_bytes]
            yield Piece(
                Transfer(start + begin * block_bytes, view),
                path,
                block_bytes,
                self,
                layer,
                begin,
                extent,
            )

    def expected(self, row: int, blocks: range) -> Sequence[int]:
        versions, blocks_each = self._versions, self._blocks_each
        begin = row * blocks_each
        return [
            versions[block // blocks_each].checksums[begin + block % blocks_each]
            for block in blocks
        ]

    def owner(self, block: int) -> Version:
        return self._versions[block // self._blocks_each]

    def block_around(self, offset_bytes: int) -> tuple[int, int]:
        in_row = offset_bytes % self._stride_bytes
        return offset_bytes - in_row % self.block_bytes, self.block_bytes


class Run(NamedTuple):
    """A part of an object in one extent."""

    begin_bytes: int  # in the object
    end_bytes: int
    extent: OpenExtent


class ObjectSource(Source):
    """An object in plain runs; every run but the last holds whole blocks."""

    def __init__(self, version: Version, runs: Sequence[Run]) -> None:
        self.extents = [run.extent for run in runs]
        self.may_be_cold = any(extent.is_cold for extent in self.extents)
        self._version = version
        self._runs = runs
        self.block_bytes = version.block_bytes

    def pieces(self, offset_bytes: int, memory: memoryview) -> Iterator[Piece]:
        version, block_bytes = self._version, self.block_bytes
        end_bytes = offset_bytes + len(memory)
        blocks = len(version.checksums)
        for run in self._runs:
            low, high = max(offset_bytes, run.begin_bytes), min(end_bytes, run.end_bytes)
            path = run.extent.read_path
            blocks_each = blocks if path is IoPath.DIRECT else PIECE_BYTES // block_bytes
            step_bytes = max(1, blocks_each) * block_bytes
            for begin in range(low, high, step_bytes):
                stop = min(begin + step_bytes, high)
                view = memory[begin - offset_bytes : stop - offset_bytes]
                yield Piece(
                    Transfer(run.extent.offset_bytes + begin - run.begin_bytes, view),
                    path,
                    block_bytes,
                    self,
                    0,
                    begin // block_bytes,
                    run.extent,
                )

    def expected(self, row: int, blocks: range) -> Sequence[int]:
        return self._version.checksums[blocks.start : blocks.stop : blocks.step]

    def owner(self, block: int) -> Version:
        return self._version

    def block_around(self, offset_bytes: int) -> tuple[int, int]:
        begin = offset_bytes - offset_bytes % self.block_bytes
        return begin, min(self.block_bytes, self._version.info.size_bytes - begin)


class LocalOpenObjects(OpenObjects):
    """Held extents, and how their bytes are read."""

    def __init__(
        self,
        reader: Reader,
        versions: Sequence[Version | None],
        sources: Sequence[Source],
        placements: Sequence[Placement],
        extents: npt.NDArray[np.int64],
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
        self._extents: npt.NDArray[np.int64] | None = extents
        self._verification = verification
        self._sample = sample

    def placements(self) -> Sequence[Placement]:
        assert None not in self.infos, "an object is not stored"
        return self._placements

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        assert buffer.itemsize == 1
        copies: list[tuple[memoryview, memoryview]] = []  # from a block to where a part belongs
        pieces = list(self._pieces(reads, buffer, copies))
        try:
            self._carry_out_all(pieces)
        except (DamagedVersion, OSError) as error:
            raise self._reader.read_failed(error) from error
        for block, target in copies:
            target[:] = block

    def _carry_out_all(self, pieces: Sequence[Piece]) -> None:
        for path in IoPath:
            of_path = [piece for piece in pieces if piece.path is path]
            if of_path:
                self._carry_out(of_path, path)

    def _carry_out(self, pieces: Sequence[Piece], path: IoPath) -> None:
        length_bytes = sum(len(piece.transfer.memory) for piece in pieces)
        with self._reader.fragment(length_bytes, path) as fragment:
            if path is IoPath.DIRECT:
                with fragment.reading():
                    self._read(pieces, path)
                for piece in pieces:
                    self._verify(piece)
                return
            missed = self._read_resident(pieces, fragment)
            if missed:
                fragment.cold_bytes = sum(len(piece.transfer.memory) for piece in missed)
                with fragment.reading():
                    self._read(missed, path)
                for piece in missed:
                    self._verify(piece)

    def _read_resident(self, pieces: Sequence[Piece], fragment: RunningFragment) -> list[Piece]:
        """Read and check what is in memory; returns the rest. Of an extent that lacks a piece no
        other is asked for.

        What runs between two copies runs from a cold cache: so there is little.
        """
        reader, turn = self._reader, fragment.reading()
        read_resident = reader.read_resident
        verification, sample = self._verification, self._sample
        missed: list[Piece] = []
        found_bytes = 0
        try:
            for piece in pieces:
                extent = piece.extent
                if extent.is_cold:
                    missed.append(piece)
                    continue
                transfer = piece.transfer
                with turn:
                    is_resident = read_resident(transfer)
                if not is_resident:
                    extent.is_cold = reader.is_missing(extent.number)
                    missed.append(piece)
                    continue
                found_bytes += len(transfer.memory)
                try:
                    verify(piece, verification, sample)
                except DamagedVersion:
                    self._verify_on_device(piece, fragment)
        finally:
            reader.count_found(found_bytes)
        return missed

    def _look_again(self, source: Source) -> None:
        """What was cold when it was opened, or before, may have come into memory since. Another
        thread may look at the same time.
        """
        for extent in source.extents:
            if not extent.is_cold:
                continue
            if self._reader.seems_resident(extent.offset_bytes, extent.length_bytes):
                extent.is_cold = False
                self._reader.is_there(extent.number)
            else:
                self._reader.is_missing(extent.number)
        source.may_be_cold = False

    def _verify_on_device(self, piece: Piece, fragment: RunningFragment) -> None:
        """Bytes are rotten only where the device has them so: what the page cache had is dropped,
        not the object. Raises `DamagedVersion`.
        """
        with fragment.reading():
            try:
                self._reader.read_again(piece.transfer)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self._find_unreadable(piece, IoPath.DIRECT)
                raise
        self._verify(piece)
        self._reader.count_stale(piece.transfer)

    def _pieces(
        self,
        reads: Sequence[Read],
        buffer: memoryview,
        copies: list[tuple[memoryview, memoryview]],
    ) -> Iterator[Piece]:
        for number, offset_bytes, length_bytes, landing in reads:
            source = self._sources[number]
            if source.may_be_cold:
                self._look_again(source)
            target = buffer[landing : landing + length_bytes]
            assert len(target) == length_bytes
            while target:
                begin, block_bytes = source.block_around(offset_bytes)
                skip = offset_bytes - begin
                if not skip and len(target) >= block_bytes:
                    whole_bytes = self._whole_bytes(source, offset_bytes, len(target))
                    yield from source.pieces(offset_bytes, target[:whole_bytes])
                    target, offset_bytes = target[whole_bytes:], offset_bytes + whole_bytes
                    continue
                block = memoryview(bytearray(block_bytes))
                part = target[: block_bytes - skip]
                yield from source.pieces(begin, block)
                copies.append((block[skip : skip + len(part)], part))
                target, offset_bytes = target[len(part) :], offset_bytes + len(part)

    @staticmethod
    def _whole_bytes(source: Source, offset_bytes: int, length_bytes: int) -> int:
        """How much from a block's begin on is whole blocks, a short last one included."""
        ragged = length_bytes % source.block_bytes
        if ragged:
            _, last_bytes = source.block_around(offset_bytes + length_bytes - 1)
            if last_bytes != ragged:
                return length_bytes - ragged
        return length_bytes

    def _read(self, pieces: Sequence[Piece], path: IoPath) -> None:
        transfers = [piece.transfer for piece in pieces]
        try:
            if path is IoPath.PAGE_CACHE:
                self._reader.read_missing(transfers)
            else:
                cold = [len(piece.transfer.memory) for piece in pieces if piece.extent.is_cold]
                self._reader.read(transfers, path, sum(cold))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            for piece in pieces:
                self._find_unreadable(piece, path)
            raise

    def _find_unreadable(self, piece: Piece, path: IoPath) -> None:
        """Raise `DamagedVersion` for the first block that the device cannot read."""
        offset_bytes, memory = piece.transfer
        for block in range(piece.block_count):
            begin = block * piece.block_bytes
            part = memory[begin : begin + piece.block_bytes]
            try:
                self._reader.read([Transfer(offset_bytes + begin, part)], path)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                reason = f"the device cannot read it at byte {offset_bytes + begin} of the volume"
                owner = piece.source.owner(piece.first_block + block)
                raise DamagedVersion(owner, reason) from error

    def _verify(self, piece: Piece) -> None:
        verify(piece, self._verification, self._sample)

    def close(self) -> None:
        extents, self._extents = self._extents, None
        if extents is not None:
            self._sources = ()
            self._reader.let_go(extents)


def verify(piece: Piece, verification: Verification, sample: int) -> None:
    """Compare what was read with its checksums; raises `DamagedVersion`. `sample` says which blocks
    are compared where not all are.
    """
    (_, memory), _, block_bytes, source, row, first_block, _ = piece
    blocks = compared_blocks(piece.block_count, verification, first_block, sample)
    for block, checksum in zip(blocks, source.expected(row, blocks), strict=True):
        begin = (block - first_block) * block_bytes
        if block_checksum(memory[begin : begin + block_bytes]) != checksum:
            raise DamagedVersion(source.owner(block), "a block does not match its checksum")
