"""Reads of extents whose slices are frames: what a caller gets is what was put.

A source of frames is addressed as if its slices were plain, so nothing above knows of it. What a
read asks for of a row is one run of frames: they are read into memory of the thread's own, verified
as any blocks are, and decoded to where the read lands. Beside each such source is another, which
gives its frames as they are stored: they are read and verified where they land.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.frames import SliceCodec
from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.base import FramePlace, FrameRows, Placement, Read
from objectcache_storage_server.engines.local.reads.verified_reads import (
    PIECE_BYTES,
    DamagedVersion,
    LocalOpenObjects,
    OpenExtent,
    Piece,
    Reader,
    Source,
)
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.extent_geometry import EncodedRows, Geometry
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer

SCRATCH_BYTES = 4 * MIB  # of frames that a thread reads at once; a longer frame is read alone


class EncodedSlots(Source):
    """An extent of frames. Its addresses are those of the plain extent of its geometry."""

    def __init__(
        self,
        geometry: Geometry,
        pitches: Sequence[int],
        extent: OpenExtent,
        versions: Mapping[int, Version],
        codec: SliceCodec | None,
    ) -> None:
        """`versions` by slot: those that were opened; `codec` made the frames that are not plain,
        None where the store does not know.
        """
        self.codec = codec
        self.extents = (extent,)
        self.may_be_cold = bool(extent.is_cold)
        self.block_bytes = geometry.slice_bytes
        self.geometry = geometry
        self.rows = EncodedRows.of(geometry.slots, pitches)
        self._extent = extent
        self._versions = versions

    def pieces(self, offset_bytes: int, memory: memoryview) -> Iterator[Piece]:
        raise AssertionError("what has to be decoded is read by DecodingOpenObjects")

    def block_around(self, offset_bytes: int) -> tuple[int, int]:
        in_row = offset_bytes % self.geometry.row_stride_bytes
        return offset_bytes - in_row % self.block_bytes, self.block_bytes

    def expected(self, row: int, blocks: range) -> Sequence[int]:
        """Of frames up to their pitch; a block is a slot."""
        return [self._checksums(slot)[row] for slot in blocks]

    def _checksums(self, slot: int) -> Sequence[int]:
        version = self._versions[slot]
        checksums = version.frame_checksums
        if checksums is None or len(checksums) != self.geometry.num_layers:
            raise DamagedVersion(version, "it lies among frames, and has no checksums of frames")
        return checksums

    def owner(self, block: int) -> Version:
        return self._versions[block]

    def frames_offset_bytes(self, layer: int, slot: int) -> int:
        """Where a frame begins in the volume."""
        rows = self.rows
        in_extent = rows.row_offset_bytes(layer) + slot * rows.pitches[layer]
        return self._extent.offset_bytes + in_extent

    def frame_pieces(self, layer: int, first: int, memory: memoryview) -> Iterator[Piece]:
        """Pieces that fill `memory` with the frames of slots from `first` on."""
        extent, path = self._extent, self._extent.read_path
        pitch = self.rows.pitches[layer]
        count = len(memory) // pitch
        step = count if path is IoPath.DIRECT else max(1, PIECE_BYTES // pitch)
        begin_bytes = self.frames_offset_bytes(layer, first)
        for index in range(0, count, step):
            view = memory[index * pitch : (index + step) * pitch]
            transfer = Transfer(begin_bytes + index * pitch, view)
            yield Piece(transfer, path, pitch, self, layer, first + index, extent)

    def stored_pieces(self, read: Read, buffer: memoryview) -> Iterator[Piece]:
        """Pieces that fill a read of whole frames of one row, addressed as they are stored."""
        layer, first = self.rows.locate(read.offset_bytes)
        memory = buffer[read.landing_offset_bytes :][: read.length_bytes]
        assert len(memory) == read.length_bytes
        return self.frame_pieces(layer, first, memory)

    def frame_rows(self, number: int) -> FrameRows | None:
        """Its frames as source `number` of an opening; None where nobody knows who decodes them."""
        rows = self.rows
        if self.codec is None:
            return None
        offsets = tuple(rows.row_offset_bytes(layer) for layer in range(len(rows.pitches)))
        return FrameRows(number, self.codec, rows.pitches, offsets)

    def parts(self, read: Read, buffer: memoryview) -> Iterator[_Part]:
        """A read as runs of frames, each in one row and at most `SCRATCH_BYTES` or one frame."""
        geometry, slice_bytes = self.geometry, self.geometry.slice_bytes
        offset_bytes = read.offset_bytes
        target = buffer[read.landing_offset_bytes :][: read.length_bytes]
        assert len(target) == read.length_bytes
        while target:
            layer, in_row = divmod(offset_bytes, geometry.row_stride_bytes)
            assert in_row < geometry.row_bytes, "what lies between rows is nobody's"
            first, skip_bytes = divmod(in_row, slice_bytes)
            most = max(1, SCRATCH_BYTES // self.rows.pitches[layer])
            most_bytes = min(most, geometry.slots - first) * slice_bytes - skip_bytes
            part = _Part(self, layer, first, skip_bytes, target[:most_bytes])
            yield part
            target, offset_bytes = target[most_bytes:], offset_bytes + most_bytes


class _Part(NamedTuple):
    """Slices of one row, and where they land: from `skip_bytes` of the first on."""

    source: EncodedSlots
    layer: int
    first: int  # slot
    skip_bytes: int
    target: memoryview

    @property
    def pitch_bytes(self) -> int:
        """Bytes of a frame."""
        return self.source.rows.pitches[self.layer]

    @property
    def frame_count(self) -> int:
        """Frames that hold it."""
        return -(-(self.skip_bytes + len(self.target)) // self.source.geometry.slice_bytes)

    @property
    def phase_bytes(self) -> int:
        """Where in a block its frames begin, so that they can be read past the page cache."""
        return self.source.frames_offset_bytes(self.layer, self.first) % BLOCK_BYTES

    @property
    def room_bytes(self) -> int:
        """Whole blocks of memory that its frames fit in."""
        frames_bytes = self.phase_bytes + self.frame_count * self.pitch_bytes
        return frames_bytes + -frames_bytes % BLOCK_BYTES


class _Scratch(threading.local):
    """What a thread decodes with: made by the first read of frames, kept with the thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SCRATCH_BYTES + BLOCK_BYTES)
        self.decoder = SliceDecoder()

    def memory(self, length_bytes: int) -> memoryview:
        """Memory that begins at a block."""
        if length_bytes > len(self._memory):
            return memoryview(mmap.mmap(-1, length_bytes))
        return memoryview(self._memory)[:length_bytes]


_scratch = _Scratch()


class DecodingOpenObjects(LocalOpenObjects):
    """Held extents of which some hold frames."""

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
        super().__init__(reader, versions, sources, placements, extents, verification, sample)
        self._encoded = {
            number: source
            for number, source in enumerate(sources)
            if isinstance(source, EncodedSlots)
        }
        self._source_count = len(sources)  # from which on they are of frames

    def frames(self) -> Sequence[FramePlace | None]:
        rows_of = {
            number: source.frame_rows(self._source_count + number)
            for number, source in self._encoded.items()
        }
        places: list[FramePlace | None] = []
        for place in self.placements():
            rows = rows_of.get(place.source)
            at = None if rows is None else FramePlace(rows, place.base_bytes // place.slice_bytes)
            places.append(at)
        return places

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        plain = [
            read
            for read in reads
            if read.source < self._source_count and read.source not in self._encoded
        ]
        if plain:
            super().read_many(plain, buffer)
        try:
            self._carry_out_all(list(self._stored_pieces(reads, buffer)))
            for parts in _batches(self._parts(reads, buffer)):
                self._read_frames(parts)
        except (DamagedVersion, OSError) as error:
            raise self._reader.read_failed(error) from error

    def _parts(self, reads: Sequence[Read], buffer: memoryview) -> Iterator[_Part]:
        for read in reads:
            source = self._encoded.get(read.source)
            if source is not None:
                if source.may_be_cold:
                    self._look_again(source)
                yield from source.parts(read, buffer)

    def _stored_pieces(self, reads: Sequence[Read], buffer: memoryview) -> Iterator[Piece]:
        for read in reads:
            source = self._encoded.get(read.source - self._source_count)
            if source is not None:
                if source.may_be_cold:
                    self._look_again(source)
                yield from source.stored_pieces(read, buffer)

    def _read_frames(self, parts: Sequence[_Part]) -> None:
        memory = _scratch.memory(sum(part.room_bytes for part in parts))
        pieces: list[Piece] = []
        frames: list[memoryview] = []
        begin = 0
        for part in parts:
            first = begin + part.phase_bytes
            frames.append(memory[first : first + part.frame_count * part.pitch_bytes])
            pieces += part.source.frame_pieces(part.layer, part.first, frames[-1])
            begin += part.room_bytes
        self._carry_out_all(pieces)
        for part, row in zip(parts, frames, strict=True):
            self._decode(part, row)

    def _decode(self, part: _Part, frames: memoryview) -> None:
        slice_bytes = part.source.geometry.slice_bytes
        row = np.frombuffer(frames, np.uint8).reshape(part.frame_count, part.pitch_bytes)
        target = np.frombuffer(part.target, np.uint8)
        if target.size == part.frame_count * slice_bytes:
            self._decode_row(part, row, target.reshape(part.frame_count, slice_bytes))
            return
        decoded = np.empty((part.frame_count, slice_bytes), np.uint8)
        self._decode_row(part, row, decoded)
        target[:] = decoded.reshape(-1)[part.skip_bytes : part.skip_bytes + target.size]

    def _decode_row(
        self, part: _Part, row: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
    ) -> None:
        try:
            _scratch.decoder.decode_row(row, out)
        except DamagedData:  # not all frames are compared before they are decoded
            for index in range(len(row)):
                self._decode_frame(part, part.first + index, row[index : index + 1], out[index])

    def _decode_frame(
        self, part: _Part, slot: int, frame: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
    ) -> None:
        """Decode one frame of a row that has a damaged one; what the page cache had may be wrong,
        and the device right. Raises `DamagedVersion`.
        """
        decode_row = _scratch.decoder.decode_row
        try:
            decode_row(frame, out[np.newaxis])
        except DamagedData:
            offset_bytes = part.source.frames_offset_bytes(part.layer, slot)
            again = Transfer(offset_bytes, memoryview(bytearray(frame.size)))
            self._reader.read_again(again)
            try:
                decode_row(np.frombuffer(again.memory, np.uint8)[np.newaxis], out[np.newaxis])
            except DamagedData as damage:
                raise DamagedVersion(part.source.owner(slot), str(damage)) from damage
            self._reader.count_stale(again)


def _batches(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Parts whose frames fit a thread's memory, as many as do; at least one."""
    batch: list[_Part] = []
    length_bytes = 0
    for part in parts:
        if batch and length_bytes + part.room_bytes > SCRATCH_BYTES:
            yield batch
            batch, length_bytes = [], 0
        batch.append(part)
        length_bytes += part.room_bytes
    if batch:
        yield batch
