"""Extents of a put whose slices are stored as frames: rows are gathered and encoded.

How long an extent becomes is known with its last row. So the frames wait in memory for it, and the
extent takes the space that it needs: in a full store that is what others of its kind have left.
Where there is no such memory, or slices do not get shorter, rows are written one after another into
the space that they need at most. A row is decoded again before it is written, and compared with
the checksums of what came, as far as the bucket's verification wants that.
"""

from __future__ import annotations

import contextlib
import mmap
import random
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.element_sizes import element_bytes_of, smallest_element_bytes
from objectcache_encodings.encoder import SliceEncoder
from objectcache_encodings.frames import PITCH_MULTIPLE_BYTES, SliceCodec, codec_of
from objectcache_schemas.errors import Busy, DamagedData
from objectcache_schemas.records import BucketInfo, Verification
from objectcache_storage_server.engines.block_checksums import block_checksums
from objectcache_storage_server.engines.local.puts.staged_runs import ExtentSource
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, round_up
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer
from objectcache_storage_server.engines.puts.put_buffers import Bytes, no_put_memory
from objectcache_storage_server.engines.puts.received_frames import ReceivedFrames

Frame = bytes | memoryview

LENGTHS = 128  # that encoded extents of one geometry may have, up to that of the plain one
SHORTER_PART = 16  # a plain extent stays, unless it gets shorter by one of so many parts


class NotShorter(Exception):
    """Plain chunks were to be encoded only for getting shorter, and do not."""


class RowEncoder:
    """Encodes rows of slices of one put. For one thread at a time."""

    def __init__(
        self,
        encoding: str,
        element_bytes: int | None,
        verification: Verification = Verification.FULL,
    ) -> None:
        """`element_bytes` is that of the bucket's numbers; None is found out with the first slice.
        With `only_shorter` set an extent that is not worth it raises `NotShorter`. `verification`
        says which rows are decoded again.

        Raises `InvalidRequest` for an encoding that there is none of.
        """
        self.codec = codec_of(encoding)
        self.only_shorter = False
        self.verification = verification
        self._encoding = encoding
        self._element_bytes = element_bytes
        self._encoder: SliceEncoder | None = None
        self._decoder = SliceDecoder()
        self._memory: mmap.mmap | None = None
        self._decoded: Bytes = np.empty((0, 0), np.uint8)

    def encode(self, slices: Bytes, checksums: Sequence[int] | None) -> list[bytes]:
        """Slices uint8[n, slice_bytes] as frames; `checksums` of them, where they are known."""
        if self._encoder is None:
            element_bytes = self._element_bytes
            if element_bytes is None or slices.shape[1] % element_bytes:
                element_bytes = smallest_element_bytes(slices[0])
            self._encoder = SliceEncoder(self._encoding, element_bytes)
        return self._encoder.encode_slices(slices, checksums)

    def check(self, row: memoryview, pitch_bytes: int, slice_bytes: int) -> None:
        """Decode a row again as the bucket's verification has it: every one, of 16 one that is
        chosen at random, or none. Raises `DamagedData` where a slice is not that of its checksum.
        """
        if not self._is_to_check():
            return
        frames = np.frombuffer(row, np.uint8).reshape(-1, pitch_bytes)
        if self._decoded.shape != (len(frames), slice_bytes):
            self._decoded = np.empty((len(frames), slice_bytes), np.uint8)
        try:
            self._decoder.decode_row(frames, self._decoded)
        except DamagedData as damage:
            raise DamagedData(f"slices do not decode to what was encoded: {damage}") from damage

    def _is_to_check(self) -> bool:
        """Whether the next row is decoded before it is written."""
        if self.verification is Verification.SAMPLED:
            return random.getrandbits(4) == 0
        return self.verification is Verification.FULL

    def room(self, length_bytes: int) -> memoryview:
        """Memory for a row that cannot wait, valid until the next call."""
        if self._memory is None or length_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, length_bytes)
        return memoryview(self._memory)[:length_bytes]


def _pitch_bytes(frames: Sequence[Frame]) -> int:
    return round_up(max(map(len, frames)), PITCH_MULTIPLE_BYTES)


def _lay_out(frames: Sequence[Frame], pitch_bytes: int, row: memoryview) -> None:
    """Frames at their pitch, and zeros behind each and the last."""
    begin = 0
    for frame in frames:
        row[begin : begin + len(frame)] = frame
        row[begin + len(frame) : begin + pitch_bytes] = bytes(pitch_bytes - len(frame))
        begin += pitch_bytes
    row[begin:] = bytes(len(row) - begin)


def row_encoder(bucket: BucketInfo) -> RowEncoder | None:
    """What encodes a bucket's chunks as its policy says; None where they are stored plain."""
    encoding = bucket.policy.encoding
    if encoding is None:
        return None
    layout = bucket.layout
    element_bytes = None if layout is None else element_bytes_of(layout.dtype)
    return RowEncoder(encoding.value, element_bytes, bucket.policy.verification)


class EncodedExtentWriter:
    """One extent of a put: what waits in memory, and the frames that were written."""

    gathers_extent = False  # by itself: nothing that is to be written comes out of `add`

    def __init__(
        self,
        source: ExtentSource,
        take_buffer: Callable[[int], Bytes | None],
        geometry: Geometry,
        layerwise: bool,
        encoder: RowEncoder,
        checksums_of: Callable[[int], Sequence[int] | None],
    ) -> None:
        """`checksums_of` tells the xxh3_64 of each slice of a layer, once its bytes were added."""
        self.geometry = geometry
        self.number = -1
        self.path = IoPath.PAGE_CACHE
        self.takes_whole = False  # all chunks at once, by `add_extent`
        self._source = source
        self._take_buffer = take_buffer
        self._layerwise = layerwise
        self._encoder = encoder
        self._checksums_of = checksums_of
        self._is_open = False
        self._end_bytes = 0  # of the rows that were encoded
        self._memory: Bytes | None = None  # plain: a row, or where chunks come one by one all
        # Of the rows that were encoded, until they are written; where chunks are gathered in the
        # same memory, from which rows go before their frames take their place.
        self._frames: Bytes | None = None
        self._borrowed: Bytes | None = None  # whichever of them is the source's
        self._filled_bytes = 0  # of the memory
        self._pitches: list[int] = []
        self._received: list[bytes] = []  # frames of a row that has not come whole
        self._checksums = np.zeros((geometry.slots, geometry.num_layers), np.uint64)

    @property
    def codec(self) -> SliceCodec:
        """Of the frames that it writes."""
        return self._encoder.codec

    def open(self, whole: memoryview | None = None) -> None:
        """Take memory, once; of chunks that all come at once, in `whole`, for their frames alone.
        Raises `Busy` where there is none for chunks that are to be gathered, and `StorageFull`
        where there is no room for rows that cannot wait.
        """
        if self._is_open:
            return
        self._is_open = True
        geometry = self.geometry
        self.takes_whole = whole is not None and not self._layerwise
        if not self._layerwise and not self.takes_whole:
            self._memory = self._frames = self._borrowed = self._take_buffer(geometry.extent_bytes)
            if self._memory is None:
                raise no_put_memory()
            return
        with contextlib.suppress(Busy):
            self._frames = self._borrowed = self._take_buffer(geometry.extent_bytes)
        if self._frames is None:
            self._allocate(geometry.encoded_bytes_max)

    def add(self, offset_bytes: int, data: memoryview) -> Transfer | None:
        """Take a piece at an offset that it would have in a plain extent."""
        geometry = self.geometry
        if self._layerwise:
            offset_bytes %= geometry.row_stride_bytes
            if len(data) == geometry.row_bytes:
                self._write_row(np.frombuffer(data, np.uint8).reshape(geometry.slots, -1))
                return None
            if self._memory is None:
                self._memory = np.empty(geometry.row_bytes, np.uint8)
        assert self._memory is not None
        self._memory[offset_bytes : offset_bytes + len(data)] = np.frombuffer(data, np.uint8)
        self._fill(len(data))
        return None

    def add_frames(self, frames: ReceivedFrames) -> None:
        """Take the next slices of a layer as frames of this codec: decoded, and stored as they
        are.
        """
        assert self._layerwise
        assert frames.codec is self.codec
        geometry, received = self.geometry, self._received
        if not received and len(frames) == geometry.slots:
            self._write_frames(frames.frames())
            return
        received += map(bytes, frames.frames())
        if len(received) == geometry.slots:
            self._received = []
            self._write_frames(received)

    def add_chunk(self, slot: int, data: memoryview) -> Iterator[Transfer]:
        """Take a whole chunk."""
        geometry = self.geometry
        begin = slot * geometry.slice_bytes
        slices = np.frombuffer(data, np.uint8).reshape(geometry.num_layers, -1)
        self._rows()[:, begin : begin + geometry.slice_bytes] = slices
        self._fill(len(data))
        return iter(())

    def add_extent(self, data: memoryview) -> Iterator[Transfer]:
        """Take all chunks, which are encoded from where they lie."""
        geometry = self.geometry
        slices = np.frombuffer(data, np.uint8).reshape(geometry.slots, geometry.num_layers, -1)
        for layer in range(geometry.num_layers):
            self._write_row(slices[:, layer])
        return iter(())

    def _rows(self) -> Bytes:
        geometry = self.geometry
        assert self._memory is not None
        rows = self._memory[: geometry.num_layers * geometry.row_stride_bytes]
        return rows.reshape(geometry.num_layers, geometry.row_stride_bytes)

    def _fill(self, more_bytes: int) -> None:
        geometry = self.geometry
        self._filled_bytes += more_bytes
        if self._layerwise:
            if self._filled_bytes == geometry.row_bytes:
                self._filled_bytes = 0
                assert self._memory is not None
                memory, self._memory = self._memory, None  # else a put would hold all its rows'
                self._write_row(memory.reshape(geometry.slots, -1))
        elif self._filled_bytes == geometry.slots * geometry.chunk_bytes:
            for row in self._rows():
                self._write_row(row[: geometry.row_bytes].reshape(geometry.slots, -1))

    def _write_row(self, slices: Bytes) -> None:
        """Encode and keep, or write, the slices uint8[slots, slice_bytes] of the next layer."""
        frames = self._encoder.encode(slices, self._checksums_of(len(self._pitches)))
        self._write_frames(frames, check=True)

    def _write_frames(self, frames: Sequence[Frame], *, check: bool = False) -> None:
        """Keep, or write, the frames of the next layer; `check` them as verification says."""
        geometry, layer = self.geometry, len(self._pitches)
        pitch_bytes = _pitch_bytes(frames)
        length_bytes = round_up(geometry.slots * pitch_bytes)
        waiting = self._waiting_room(layer, length_bytes)
        laid_out = self._encoder.room(length_bytes) if waiting is None else waiting
        _lay_out(frames, pitch_bytes, laid_out)  # from here on the slices may be overwritten
        used = laid_out[: geometry.slots * pitch_bytes]
        if check:
            self._encoder.check(used, pitch_bytes, geometry.slice_bytes)
        self._checksums[:, layer] = block_checksums(used, pitch_bytes)
        if waiting is None:
            self._write(self._end_bytes, laid_out)
        self._pitches.append(pitch_bytes)
        self._end_bytes += length_bytes
        if len(self._pitches) == geometry.num_layers:
            self._end_rows()

    def _waiting_room(self, layer: int, length_bytes: int) -> memoryview | None:
        """Where a row's frames can wait in memory; where they cannot, those before them are
        written.
        """
        waiting = self._frames
        if waiting is None:
            return None
        end_bytes = self._end_bytes + length_bytes
        room_bytes = len(waiting)
        if self._memory is waiting:  # what follows are rows that are not encoded yet
            room_bytes = (layer + 1) * self.geometry.row_stride_bytes
        if end_bytes <= room_bytes:
            return memoryview(waiting)[self._end_bytes : end_bytes]  # type: ignore[arg-type]
        self._frames = None
        if self._encoder.only_shorter:
            raise NotShorter
        self._allocate(self.geometry.encoded_bytes_max)
        if self._end_bytes:
            self._write(0, memoryview(waiting)[: self._end_bytes])  # type: ignore[arg-type]
        return None

    def _end_rows(self) -> None:
        """All rows are encoded: extents of alike chunks become equally long, so that one fits
        where another was.
        """
        unit_bytes = round_up(self.geometry.extent_bytes // LENGTHS)
        length_bytes = round_up(self._end_bytes, unit_bytes)
        plain_bytes = self.geometry.extent_bytes
        if self._encoder.only_shorter and length_bytes > plain_bytes - plain_bytes // SHORTER_PART:
            raise NotShorter
        if self._frames is not None:
            frames, self._frames = self._frames, None
            self._allocate(length_bytes)
            self._write(0, memoryview(frames)[: self._end_bytes])  # type: ignore[arg-type]
        pitches, codec = tuple(self._pitches), self._encoder.codec
        self._source.end_rows(self.number, pitches, codec, length_bytes)
        self.return_memory()

    def _allocate(self, length_bytes: int) -> None:
        self.number = self._source.allocate(length_bytes, self.geometry)
        self.path = self._source.path(self.number)

    def _write(self, offset_bytes: int, frames: memoryview) -> None:
        begin_bytes = self._source.place(self.number)
        self._source.write([Transfer(begin_bytes + offset_bytes, frames)], self.path)

    def frame_checksums(self, slot: int) -> array[int]:
        """xxh3_64 of each of a chunk's frames up to its pitch, once all are written."""
        assert len(self._pitches) == self.geometry.num_layers, "the put is torn"
        return array("Q", self._checksums[slot].tobytes())

    def return_memory(self) -> None:
        """What was gathered is written, or given up: its memory is free again."""
        borrowed, self._borrowed = self._borrowed, None
        self._memory = self._frames = None
        self._received = []
        if borrowed is not None:
            self._source.return_buffer(borrowed)

    def end(self, *, keep: bool) -> None:
        """Nothing more is written."""
        self.return_memory()
        if self.number >= 0:
            self._source.end_writing(self.number, keep=keep)
            self.number = -1
