"""The chunks of one put on their way into extents.

Bytes arrive layer after layer or chunk after chunk; on the device they lie row after row. What
arrives as a whole row goes out from the caller's memory, and so does an extent whose chunks arrive
at once, where long slices can be joined to rows by the page cache; anything less is gathered first:
a row where layers arrive, an extent where chunks do, so that the device sees long writes in either
case. A put holds one row for each of its extents, or two extents: one is written while the next is
gathered.
"""

from __future__ import annotations

import contextlib
import enum
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np
from msgspec.structs import replace

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix
from objectcache_storage_server.engines.local.direct.batches import address_of
from objectcache_storage_server.engines.local.puts.encode_extents import (
    EncodedExtentWriter,
    RowEncoder,
)
from objectcache_storage_server.engines.local.puts.staged_runs import (
    ExtentSource,
    LocalStaged,
)
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
)
from objectcache_storage_server.engines.puts.prefix_checksums import PrefixChecksums
from objectcache_storage_server.engines.puts.put_buffers import Bytes
from objectcache_storage_server.engines.puts.received_frames import ReceivedFrames

SCATTERED_BYTES_MIN = 32 * KIB  # of a slice that is written from where it lies


class Gathering(enum.Enum):
    """What is put together in memory before it is written."""

    NOTHING = "nothing"
    ROW = "row"
    EXTENT = "extent"


class _ExtentWriter:
    """One extent of a put: where its pieces go, and what waits in memory."""

    def __init__(
        self,
        source: ExtentSource,
        take_buffer: Callable[[int], Bytes | None],
        geometry: Geometry,
        layerwise: bool,
        block_bytes: int,
    ) -> None:
        """`take_buffer` is the source's, or does as that does."""
        self.geometry = geometry
        self.number = -1
        self.takes_whole = False  # all chunks at once, by `add_extent`
        self._source = source
        self._take_buffer = take_buffer
        self._layerwise = layerwise
        self._block_bytes = block_bytes  # at whose multiples pieces begin
        self._offset_bytes = 0
        self.path = IoPath.PAGE_CACHE
        self._gathering = Gathering.NOTHING
        self._memory: Bytes | None = None  # the row, or the extent
        self._filled_bytes = 0

    def open(self, whole: memoryview | None = None) -> None:
        """Take space, once; memory too, unless all chunks come at once, in `whole`, and can go out
        as they are. Raises `StorageFull`, and `Busy` where there is no memory either.
        """
        if self.number >= 0:
            return
        geometry = self.geometry
        self.number = self._source.allocate(geometry.extent_bytes, geometry)
        self._offset_bytes = self._source.place(self.number)
        self.path = self._source.path(self.number)
        is_aligned = self._block_bytes % BLOCK_BYTES == 0
        if geometry.slots > 1 and self._layerwise:
            self._gathering = Gathering.ROW
        elif whole is not None and self._may_scatter(whole):
            self.takes_whole = True
        elif geometry.slots > 1 or not is_aligned:
            self._memory = self._take_buffer(geometry.extent_bytes)
            if self._memory is not None:
                self._gathering = Gathering.EXTENT
            else:  # slices straight into the page cache; whole blocks are not at stake there
                self.path = IoPath.PAGE_CACHE

    def add(self, offset_bytes: int, data: memoryview) -> Transfer | None:
        """Take a piece at an offset of the extent; what is to be written now, if anything is."""
        geometry = self.geometry
        if self._gathering is Gathering.NOTHING:
            return Transfer(self._offset_bytes + offset_bytes, data)
        if self._gathering is Gathering.EXTENT:
            assert self._memory is not None
            self._memory[offset_bytes : offset_bytes + len(data)] = np.frombuffer(data, np.uint8)
            return self._filled(len(data), geometry.slots * geometry.chunk_bytes, 0)
        row_begin = offset_bytes // geometry.row_stride_bytes * geometry.row_stride_bytes
        # What does not end with a block would have the page cache read that block first.
        is_whole = self.path is IoPath.DIRECT or geometry.row_bytes % BLOCK_BYTES == 0
        if len(data) == geometry.row_bytes and is_whole:
            return Transfer(self._offset_bytes + offset_bytes, data)
        if self._memory is None:
            self._memory = np.zeros(geometry.row_stride_bytes, np.uint8)
        begin = offset_bytes - row_begin
        self._memory[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        return self._filled(len(data), geometry.row_bytes, row_begin)

    def _may_scatter(self, data: memoryview) -> bool:
        """Whether slices go out from where they lie, each a vector of a row's write: shorter ones
        are gathered sooner. A row's part that ends inside of a block would have the page cache
        read that block first, and past it memory has to begin at a block, too.
        """
        slice_bytes = self.geometry.slice_bytes
        is_long = slice_bytes >= SCATTERED_BYTES_MIN and slice_bytes % BLOCK_BYTES == 0
        if not (self._source.volume.joins_writes and is_long and self.geometry.slots > 1):
            return False
        return self.path is IoPath.PAGE_CACHE or address_of(data) % BLOCK_BYTES == 0

    def add_extent(self, data: memoryview) -> Iterator[Transfer]:
        """Take all chunks; yields what is to be written now, slice after slice of each row."""
        geometry = self.geometry
        chunk_bytes, slice_bytes = geometry.chunk_bytes, geometry.slice_bytes
        for layer in range(geometry.num_layers):
            offset_bytes = self._offset_bytes + layer * geometry.row_stride_bytes
            begin = layer * slice_bytes
            for _ in range(geometry.slots):
                yield Transfer(offset_bytes, data[begin : begin + slice_bytes])
                offset_bytes, begin = offset_bytes + slice_bytes, begin + chunk_bytes

    def add_chunk(self, slot: int, data: memoryview) -> Iterator[Transfer]:
        """Take a whole chunk; yields what is to be written now."""
        geometry = self.geometry
        if self._gathering is Gathering.EXTENT and self._memory is not None:
            rows = self._memory[: geometry.num_layers * geometry.row_stride_bytes]
            rows = rows.reshape(geometry.num_layers, geometry.row_stride_bytes)
            begin = slot * geometry.slice_bytes
            slices = np.frombuffer(data, np.uint8).reshape(geometry.num_layers, -1)
            rows[:, begin : begin + geometry.slice_bytes] = slices
            full = self._filled(len(data), geometry.slots * geometry.chunk_bytes, 0)
            if full is not None:
                yield full
            return
        if geometry.slots == 1:
            yield Transfer(self._offset_bytes, data)
            return
        for layer in range(geometry.num_layers):
            piece = data[layer * geometry.slice_bytes :][: geometry.slice_bytes]
            offset_bytes = geometry.slice_offset_bytes(slot, layer)
            yield Transfer(self._offset_bytes + offset_bytes, piece)

    def _filled(self, more_bytes: int, whole_bytes: int, begin_bytes: int) -> Transfer | None:
        self._filled_bytes += more_bytes
        if self._filled_bytes < whole_bytes:
            return None
        assert self._memory is not None
        self._filled_bytes = 0
        memory = memoryview(self._memory)  # type: ignore[arg-type]
        if self._gathering is Gathering.ROW:
            self._memory = None  # the next row may begin before this one is written
        return Transfer(self._offset_bytes + begin_bytes, memory)

    @property
    def gathers_extent(self) -> bool:
        """Whether what it gives out is the whole extent, from memory of the source's."""
        return self._gathering is Gathering.EXTENT

    def return_memory(self) -> None:
        """What was gathered is written, or given up: its memory is free again."""
        memory, self._memory = self._memory, None
        if memory is not None and self._gathering is Gathering.EXTENT:
            self._source.return_buffer(memory)

    def end(self, *, keep: bool) -> None:
        """Nothing more is written."""
        self.return_memory()
        if self.number >= 0:
            self._source.end_writing(self.number, keep=keep)
            self.number = -1


_Writer = _ExtentWriter | EncodedExtentWriter


class StagedChunk(LocalStaged):
    """One chunk of a `LocalStagedPrefix`; all bytes go through the prefix."""

    def __init__(self, prefix: LocalStagedPrefix, index: int) -> None:
        self.bucket = prefix.bucket
        self.key = prefix.shape.keys[index]
        self.checksum_block_bytes = self.block_bytes = prefix.block_bytes
        self._prefix = prefix
        self._index = index

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        raise AssertionError("the chunks of a put are written through StagedPrefix.write")

    def finish(self) -> None:
        self._prefix.finish()

    def size_bytes(self) -> int:
        return self._prefix.shape.chunk_bytes

    def checksums(self) -> array[int]:
        return self._prefix.checksums(self._index)

    def frame_checksums(self) -> array[int] | None:
        return self._prefix.frame_checksums(self._index)

    def place(self) -> tuple[tuple[int, ...], int]:
        number, slot = self._prefix.place(self._index)
        return (number,), slot

    def keep(self) -> None:
        self._prefix.keep(self._index)

    def discard(self) -> None:
        self._prefix.let_go(self._index)

    @property
    def parent_key(self) -> str | None:
        keys = self._prefix.shape.keys
        return keys[self._index - 1] if self._index else self._prefix.shape.parent_key

    @property
    def is_chunk(self) -> bool:
        return True


class LocalStagedPrefix(StagedPrefix):
    """Writes a put's payload into extents, in whichever order it comes."""

    def __init__(
        self,
        source: ExtentSource,
        bucket: str,
        shape: PrefixShape,
        extents: list[Geometry],
        encoder: RowEncoder | None = None,
        extent_bytes_max: int = 0,
    ) -> None:
        """`extents` hold the chunks in order. With an encoder those are encoded that may be,
        none of which can come to be longer than `extent_bytes_max`. Raises `InvalidRequest` for
        slices that cannot be divided into checksum blocks.
        """
        self.bucket = bucket
        self.shape = shape
        self._checksums = PrefixChecksums(shape)
        self.block_bytes = self._checksums.block_bytes
        self._source = source
        self._slots_each = extents[0].slots
        self._writers = [
            self._writer(each, index * self._slots_each, encoder, extent_bytes_max)
            for index, each in enumerate(extents)
        ]
        self._encodes = any(isinstance(each, EncodedExtentWriter) for each in self._writers)
        self._open = [each.slots for each in extents]  # chunks neither kept nor discarded
        self._kept = [False] * len(extents)
        self._ended = [False] * len(shape.keys)
        self._position_bytes = 0
        self._being_written: tuple[_Writer, Future[None]] | None = None
        self._failure: BaseException | None = None  # of an extent that was written meanwhile
        self._chunks_staged = [StagedChunk(self, index) for index in range(len(shape.keys))]
        self.staged = self._chunks_staged

    def _writer(
        self, geometry: Geometry, first: int, encoder: RowEncoder | None, extent_bytes_max: int
    ) -> _Writer:
        """Of an extent whose first chunk is `first` of the put."""
        source, take_buffer, layerwise = self._source, self._take_buffer, self.shape.layerwise
        if encoder is not None and geometry.may_be_encoded(extent_bytes_max):
            checksums_of = partial(self._checksums.of_slices, first, geometry.slots)
            return EncodedExtentWriter(
                source, take_buffer, geometry, layerwise, encoder, checksums_of
            )
        return _ExtentWriter(source, take_buffer, geometry, layerwise, self.block_bytes)

    def write(self, position_bytes: int, data: memoryview) -> None:
        assert position_bytes == self._position_bytes, "the payload comes in order"
        assert position_bytes + len(data) <= self.shape.total_bytes, "more than the payload"
        note_checksums = partial(self._checksums.note, position_bytes, data)
        if self._encodes:  # what is encoded is compared with them
            note_checksums()
        transfers: dict[IoPath, list[Transfer]] = {}  # from the caller's memory, or a row's
        pieces = self._rows if self.shape.layerwise else self._chunks
        for writer, transfer in pieces(position_bytes, data):
            if transfer is None:
                continue
            if writer.gathers_extent:
                self._begin_extent(writer, transfer)
            else:
                transfers.setdefault(writer.path, []).append(transfer)
        if self._encodes:
            for path, batch in transfers.items():
                self._source.write(batch, path)
        elif transfers:
            self._write_while(note_checksums, transfers)
        else:
            note_checksums()
        self._position_bytes += len(data)

    def write_frames(self, position_bytes: int, frames: ReceivedFrames) -> None:
        """See `StagedPrefix.write_frames`. Frames of the policy's codec are stored as they are."""
        assert self.shape.layerwise, "frames come layer by layer"
        slice_bytes = self.shape.slice_bytes
        while len(frames):
            index, slot = divmod(frames.first_chunk, self._slots_each)
            writer = self._writers[index]
            some = frames[: writer.geometry.slots - slot]
            if isinstance(writer, EncodedExtentWriter) and writer.codec is frames.codec:
                assert position_bytes == self._position_bytes, "the payload comes in order"
                self._checksums.note_slices(some.layer, some.first_chunk, some.checksums())
                writer.open()
                writer.add_frames(some)
                self._position_bytes += len(some) * slice_bytes
            else:
                self.write(position_bytes, some.decoded().reshape(-1).data)
            position_bytes += len(some) * slice_bytes
            frames = frames[len(some) :]

    def _write_while(
        self, note_checksums: Callable[[], None], transfers: dict[IoPath, list[Transfer]]
    ) -> None:
        """Hashing never lets go of the interpreter, and a call of the system does: so the writes
        are made here, and what another thread hashes it hashes while the device is busy.
        """
        hashed = self._source.begin(note_checksums)
        try:
            for path, batch in transfers.items():
                self._source.write(batch, path)
        finally:
            wait((hashed,))
        hashed.result()

    def _begin_extent(self, writer: _Writer, transfer: Transfer) -> None:
        """Write a gathered extent while the next one is gathered."""
        self._settle()
        self._being_written = (writer, self._source.begin_write([transfer], writer.path))

    def _settle(self) -> None:
        """Wait for the extent that is being written; raises what any such write has raised."""
        self._await_write()
        if self._failure is not None:
            raise self._failure

    def _await_write(self) -> None:
        if self._being_written is not None:
            (writer, write), self._being_written = self._being_written, None
            self._failure = write.exception() or self._failure
            writer.return_memory()

    def _take_buffer(self, length_bytes: int) -> Bytes | None:
        """Where no other memory is free, that of the extent that is being written."""
        with contextlib.suppress(Busy):
            buffer = self._source.take_buffer(length_bytes)
            if buffer is not None:
                return buffer
        self._settle()
        return self._source.take_buffer(length_bytes)

    def _rows(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[_Writer, Transfer | None]]:
        slice_bytes = self.shape.slice_bytes
        layer_bytes = len(self.shape.keys) * slice_bytes
        extent_row_bytes = self._slots_each * slice_bytes
        done = 0
        while done < len(data):
            layer, in_layer = divmod(position_bytes + done, layer_bytes)
            index, in_row = divmod(in_layer, extent_row_bytes)
            writer = self._writers[index]
            writer.open()
            geometry = writer.geometry
            piece = data[done : done + geometry.row_bytes - in_row]
            yield writer, writer.add(layer * geometry.row_stride_bytes + in_row, piece)
            done += len(piece)

    def _chunks(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[_Writer, Transfer | None]]:
        chunk_bytes, slice_bytes = self.shape.chunk_bytes, self.shape.slice_bytes
        done = 0
        while done < len(data):
            chunk, in_chunk = divmod(position_bytes + done, chunk_bytes)
            index, slot = divmod(chunk, self._slots_each)
            writer = self._writers[index]
            extent_bytes = writer.geometry.slots * chunk_bytes
            is_whole = slot == 0 and in_chunk == 0 and len(data) - done >= extent_bytes
            writer.open(data[done : done + extent_bytes] if is_whole else None)
            if writer.takes_whole:
                for transfer in writer.add_extent(data[done : done + extent_bytes]):
                    yield writer, transfer
                done += extent_bytes
                continue
            if in_chunk == 0 and len(data) - done >= chunk_bytes:
                for transfer in writer.add_chunk(slot, data[done : done + chunk_bytes]):
                    yield writer, transfer
                yield writer, None
                done += chunk_bytes
                continue
            if writer.geometry.slots == 1:
                piece = data[done : done + chunk_bytes - in_chunk]
                offset_bytes = in_chunk
            else:
                layer, skip = divmod(in_chunk, slice_bytes)
                piece = data[done : done + slice_bytes - skip]
                offset_bytes = writer.geometry.slice_offset_bytes(slot, layer) + skip
            yield writer, writer.add(offset_bytes, piece)
            done += len(piece)

    def finish(self) -> None:
        """Wait for the device, and assert that every byte of the payload was written. Raises what
        a write has raised, every time.
        """
        self._settle()
        assert self._position_bytes == self.shape.total_bytes, "the put is torn"

    def checksums(self, index: int) -> array[int]:
        """Of a chunk's blocks."""
        return self._checksums.of_chunks[index]

    def frame_checksums(self, index: int) -> array[int] | None:
        """Of a chunk's frames; None where its slices are plain."""
        extent, slot = divmod(index, self._slots_each)
        writer = self._writers[extent]
        return writer.frame_checksums(slot) if isinstance(writer, EncodedExtentWriter) else None

    def place(self, index: int) -> tuple[int, int]:
        """Extent and slot of a chunk."""
        extent, slot = divmod(index, self._slots_each)
        return self._writers[extent].number, slot

    def moved(self, versions: Sequence[Version]) -> list[Version]:
        """Versions whose bytes were written here again, one a chunk."""
        return [
            replace(
                version,
                serial=0,
                block_bytes=self.block_bytes,
                checksums=staged.checksums(),
                extents=staged.place()[0],
                slot=staged.place()[1],
                frame_checksums=staged.frame_checksums(),
            )
            for version, staged in zip(versions, self._chunks_staged, strict=True)
        ]

    def keep(self, index: int) -> None:
        """The index names this chunk."""
        self._kept[index // self._slots_each] = True
        self.let_go(index)

    def let_go(self, index: int) -> None:
        """This chunk is through; with the last of its extent that nobody keeps, the space is."""
        if not self._ended[index]:
            self._ended[index] = True
            self._await_write()  # what it raises is for `finish`
            extent = index // self._slots_each
            self._open[extent] -= 1
            if self._open[extent] == 0:
                self._writers[extent].end(keep=self._kept[extent])
