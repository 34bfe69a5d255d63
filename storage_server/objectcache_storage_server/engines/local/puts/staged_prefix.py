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

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix
from objectcache_storage_server.engines.block_checksums import block_checksums, slice_block_bytes
from objectcache_storage_server.engines.local.puts.staged_runs import (
    Bytes,
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

    def open(self, *, comes_whole: bool = False) -> None:
        """Take space, once; memory too, unless all chunks come at once and can go out as they are.
        Raises `StorageFull`, and `Busy` where there is no memory either.
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
        elif comes_whole and self._may_scatter():
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

    def _may_scatter(self) -> bool:
        """Whether slices go out from where they lie, each a vector of a row's write: shorter ones
        are gathered sooner. A row's part that ends inside of a block would have the page cache
        read that block first.
        """
        slice_bytes = self.geometry.slice_bytes
        is_long = slice_bytes >= SCATTERED_BYTES_MIN and slice_bytes % BLOCK_BYTES == 0
        joins = self.path is IoPath.PAGE_CACHE and self._source.volume.joins_writes
        return joins and is_long and self.geometry.slots > 1

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
        return array("Q", self._prefix.checksums[self._index].tobytes())

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
    ) -> None:
        """`extents` hold the chunks in order. Raises `InvalidRequest` for slices that cannot be
        divided into checksum blocks.
        """
        self.bucket = bucket
        self.shape = shape
        self.block_bytes = slice_block_bytes(shape.slice_bytes)
        blocks = shape.chunk_bytes // self.block_bytes
        self.checksums: npt.NDArray[np.uint64] = np.zeros((len(shape.keys), blocks), np.uint64)
        self._source = source
        self._writers = [
            _ExtentWriter(source, self._take_buffer, each, shape.layerwise, self.block_bytes)
            for each in extents
        ]
        self._slots_each = extents[0].slots
        self._open = [each.slots for each in extents]  # chunks neither kept nor discarded
        self._kept = [False] * len(extents)
        self._ended = [False] * len(shape.keys)
        self._position_bytes = 0
        self._being_written: tuple[_ExtentWriter, Future[None]] | None = None
        self._failure: BaseException | None = None  # of an extent that was written meanwhile
        self._chunks_staged = [StagedChunk(self, index) for index in range(len(shape.keys))]
        self.staged = self._chunks_staged

    def write(self, position_bytes: int, data: memoryview) -> None:
        assert position_bytes == self._position_bytes, "the payload comes in order"
        assert position_bytes + len(data) <= self.shape.total_bytes, "more than the payload"
        transfers: dict[IoPath, list[Transfer]] = {}  # from the caller's memory, or a row's
        pieces = self._rows if self.shape.layerwise else self._chunks
        for writer, transfer in pieces(position_bytes, data):
            if transfer is None:
                continue
            if writer.gathers_extent:
                self._begin_extent(writer, transfer)
            else:
                transfers.setdefault(writer.path, []).append(transfer)
        begun = [self._source.begin_write(batch, path) for path, batch in transfers.items()]
        try:
            self._note_checksums(position_bytes, data)  # while the device is busy
        finally:
            wait(begun)
        for write in begun:
            write.result()
        self._position_bytes += len(data)

    def _begin_extent(self, writer: _ExtentWriter, transfer: Transfer) -> None:
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
    ) -> Iterator[tuple[_ExtentWriter, Transfer | None]]:
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
    ) -> Iterator[tuple[_ExtentWriter, Transfer | None]]:
        chunk_bytes, slice_bytes = self.shape.chunk_bytes, self.shape.slice_bytes
        done = 0
        while done < len(data):
            chunk, in_chunk = divmod(position_bytes + done, chunk_bytes)
            index, slot = divmod(chunk, self._slots_each)
            writer = self._writers[index]
            extent_bytes = writer.geometry.slots * chunk_bytes
            starts_extent = slot == 0 and in_chunk == 0
            writer.open(comes_whole=starts_extent and len(data) - done >= extent_bytes)
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

    def _note_checksums(self, position_bytes: int, data: memoryview) -> None:
        block_bytes = self.block_bytes
        assert position_bytes % block_bytes == 0, "a piece begins at a block"
        sums = np.array(block_checksums(data, block_bytes), np.uint64)
        numbers = np.arange(len(sums)) + position_bytes // block_bytes
        if not self.shape.layerwise:
            self.checksums.reshape(-1)[numbers] = sums
            return
        blocks_each = self.shape.slice_bytes // block_bytes
        slices, block = np.divmod(numbers, blocks_each)
        layers, chunks = np.divmod(slices, len(self.shape.keys))
        self.checksums[chunks, layers * blocks_each + block] = sums

    def finish(self) -> None:
        """Wait for the device, and assert that every byte of the payload was written. Raises what
        a write has raised, every time.
        """
        self._settle()
        assert self._position_bytes == self.shape.total_bytes, "the put is torn"

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
