"""The chunks of one put on their way into extents.

Bytes arrive layer after layer or chunk after chunk; in the store they lie layer after layer of an
extent's chunks, cut into objects. What arrives as a whole object goes out from the caller's memory.
Anything else is gathered: an object where layers arrive, an extent where chunks do. What is
gathered is written while the next is.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial

import numpy as np

from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix
from objectcache_storage_server.engines.puts.prefix_checksums import PrefixChecksums
from objectcache_storage_server.engines.puts.put_buffers import Bytes
from objectcache_storage_server.engines.shared.extents.cut_extents import cut_prefix
from objectcache_storage_server.engines.shared.extents.gather_memory import GatherMemory
from objectcache_storage_server.engines.shared.extents.staged_objects import SharedStaged
from objectcache_storage_server.engines.shared.extents.write_extents import (
    ObjectWriter,
    PutWrites,
    WrittenExtent,
)
from objectcache_storage_server.engines.shared.versions import ExtentName, ExtentShape


class _Gathered:
    """Memory that is being filled: an object of the store, or an extent."""

    __slots__ = ("buffer", "filled_bytes")

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self.filled_bytes = 0


class _Extent:
    """One extent of a put."""

    def __init__(self, writes: PutWrites, shape: ExtentShape) -> None:
        self.shape = shape
        self.written = WrittenExtent(writes)
        self.names = (self.written.name,)
        self.shapes = {self.written.name: shape}
        self.gathered: dict[int, _Gathered] = {}  # by object; 0 is the extent of a chunkwise put
        self.open_slots = shape.slots  # chunks neither kept nor discarded
        self.is_kept = False

    def object_length_bytes(self, number: int) -> int:
        """Bytes of one of its objects."""
        begin_bytes = number * self.shape.object_bytes
        return min(self.shape.object_bytes, self.shape.size_bytes - begin_bytes)


class SharedStagedChunk(SharedStaged):
    """One chunk of a `SharedStagedPrefix`; all bytes go through the prefix."""

    is_chunk = True

    def __init__(self, prefix: SharedStagedPrefix, index: int, parent_key: str | None) -> None:
        self.bucket = prefix.bucket
        self.key = prefix.shape.keys[index]
        self.checksum_block_bytes = self.block_bytes = prefix.block_bytes
        self.parent_key = parent_key
        self._prefix = prefix
        self._index = index
        self._extent, slot = prefix.place(index)
        self._place = self._extent.names, slot

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        raise AssertionError("the chunks of a put are written through StagedPrefix.write")

    def finish(self) -> None:
        self._prefix.finish()

    def size_bytes(self) -> int:
        return self._prefix.chunk_bytes

    def checksums(self) -> array[int]:
        return self._prefix.checksums.of_chunks[self._index]

    def place(self) -> tuple[tuple[ExtentName, ...], int]:
        return self._place

    def shapes(self) -> Mapping[ExtentName, ExtentShape]:
        return self._extent.shapes

    def keep(self) -> None:
        self._prefix.end(self._index, keep=True)

    def discard(self) -> None:
        self._prefix.end(self._index, keep=False)


class SharedStagedPrefix(StagedPrefix):
    """Writes a put's payload into extents, in whichever order it comes."""

    def __init__(self, writer: ObjectWriter, bucket: str, shape: PrefixShape) -> None:
        """Raises `InvalidRequest` for slices that cannot be divided into checksum blocks."""
        self.bucket = bucket
        self.shape = shape
        self.chunk_bytes = shape.chunk_bytes
        self.checksums = PrefixChecksums(shape)
        self.block_bytes = self.checksums.block_bytes
        self._writes = PutWrites(writer)
        shapes = cut_prefix(shape, writer.object_bytes_max, writer.buffers.bytes_max)
        self._extents = [_Extent(self._writes, each) for each in shapes]
        self._slots_each = shapes[0].slots
        self._gathers_extents = not shape.layerwise and self._slots_each > 1
        self._memory = self._gather_memory(shapes)
        self._is_ended = [False] * len(shape.keys)
        self._open_extents = len(shapes)
        self._position_bytes = 0
        self._is_finished = False
        parents = [shape.parent_key, *shape.keys[:-1]]
        self.chunks = [SharedStagedChunk(self, *each) for each in enumerate(parents)]
        self.staged = self.chunks

    def _gather_memory(self, shapes: list[ExtentShape]) -> GatherMemory:
        """Of what is gathered at a time: an extent, an object, or one object of each extent."""
        if self._gathers_extents:
            return GatherMemory(self._writes, shapes[0].size_bytes, 1)
        buffer_bytes = max(min(each.object_bytes, each.size_bytes) for each in shapes)
        count = 1
        if self.shape.layerwise and len(shapes) > 1:
            count += sum(each.object_bytes > each.slots * each.slice_bytes for each in shapes)
        return GatherMemory(self._writes, buffer_bytes, count)

    def write(self, position_bytes: int, data: memoryview) -> None:
        assert position_bytes == self._position_bytes, "the payload comes in order"
        assert position_bytes + len(data) <= self.shape.total_bytes, "more than the payload"
        self._writes.check()
        begun: list[Future[None]] = []  # from the caller's memory
        try:
            if self._gathers_extents:
                self._gather_chunks(position_bytes, data)
            else:
                for extent, offset_bytes, piece in self._runs(position_bytes, data):
                    self._add(extent, offset_bytes, piece, begun)
            self.checksums.note(position_bytes, data)  # while the store is busy
        finally:
            wait(begun)
        if begun:
            self._writes.check()
        self._position_bytes += len(data)

    # --- what comes in the order in which it lies ---

    def _runs(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[_Extent, int, memoryview]]:
        """The payload's next bytes as runs of extents: offset in the extent, and the bytes."""
        if self.shape.layerwise and len(self._extents) > 1:
            return self._rows(position_bytes, data)
        return self._extents_in_order(position_bytes, data)

    def _rows(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[_Extent, int, memoryview]]:
        slice_bytes = self.shape.slice_bytes
        layer_bytes = len(self.shape.keys) * slice_bytes
        done = 0
        while done < len(data):
            layer, in_layer = divmod(position_bytes + done, layer_bytes)
            index, in_row = divmod(in_layer, self._slots_each * slice_bytes)
            extent = self._extents[index]
            row_bytes = extent.shape.slots * slice_bytes
            piece = data[done : done + row_bytes - in_row]
            yield extent, layer * row_bytes + in_row, piece
            done += len(piece)

    def _extents_in_order(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[_Extent, int, memoryview]]:
        """All layers of one extent, or chunks of an extent each."""
        extent_bytes = self._extents[0].shape.size_bytes
        done = 0
        while done < len(data):
            index, offset_bytes = divmod(position_bytes + done, extent_bytes)
            piece = data[done : done + extent_bytes - offset_bytes]
            yield self._extents[index], offset_bytes, piece
            done += len(piece)

    def _add(
        self, extent: _Extent, offset_bytes: int, data: memoryview, begun: list[Future[None]]
    ) -> None:
        """Write what is a whole object now, and gather the rest."""
        while data:
            number, within = divmod(offset_bytes, extent.shape.object_bytes)
            length_bytes = extent.object_length_bytes(number)
            part = data[: length_bytes - within]
            if len(part) == length_bytes:
                begun.append(extent.written.put(number, [part]))
            else:
                self._gather_object(extent, number, within, part)
            offset_bytes, data = offset_bytes + len(part), data[len(part) :]

    def _gather_object(self, extent: _Extent, number: int, within: int, part: memoryview) -> None:
        gathered = extent.gathered.get(number)
        if gathered is None:
            gathered = extent.gathered[number] = _Gathered(self._memory.take())
        buffer = gathered.buffer
        buffer[within : within + len(part)] = np.frombuffer(part, np.uint8)
        gathered.filled_bytes += len(part)
        length_bytes = extent.object_length_bytes(number)
        if gathered.filled_bytes == length_bytes:
            del extent.gathered[number]
            release = partial(self._memory.give_back, buffer)
            extent.written.put(number, [_memory(buffer)[:length_bytes]], release)

    # --- chunks of several slots ---

    def _gather_chunks(self, position_bytes: int, data: memoryview) -> None:
        chunk_bytes, slice_bytes = self.shape.chunk_bytes, self.shape.slice_bytes
        done = 0
        while done < len(data):
            chunk, in_chunk = divmod(position_bytes + done, chunk_bytes)
            index, slot = divmod(chunk, self._slots_each)
            extent = self._extents[index]
            if 0 not in extent.gathered:
                extent.gathered[0] = _Gathered(self._memory.take())
            gathered, shape = extent.gathered[0], extent.shape
            layers = gathered.buffer[: shape.size_bytes].reshape(shape.num_layers, -1, slice_bytes)
            layer, skip = divmod(in_chunk, slice_bytes)
            whole = (len(data) - done) // slice_bytes if not skip else 0
            count = min(whole, shape.num_layers - layer)
            if count:
                piece = data[done : done + count * slice_bytes]
                slices = np.frombuffer(piece, np.uint8).reshape(count, slice_bytes)
                layers[layer : layer + count, slot] = slices
            else:
                piece = data[done : done + slice_bytes - skip]
                layers[layer, slot, skip : skip + len(piece)] = np.frombuffer(piece, np.uint8)
            gathered.filled_bytes += len(piece)
            done += len(piece)
            if gathered.filled_bytes == shape.size_bytes:
                self._put_extent(extent)

    def _put_extent(self, extent: _Extent) -> None:
        buffer = extent.gathered.pop(0).buffer
        release = _AfterLast(extent.shape.object_count, partial(self._memory.give_back, buffer))
        for number in range(extent.shape.object_count):
            begin_bytes = number * extent.shape.object_bytes
            part = _memory(buffer)[begin_bytes : begin_bytes + extent.object_length_bytes(number)]
            extent.written.put(number, [part], release)

    # --- what a commit asks ---

    def finish(self) -> None:
        """Wait for the store, and assert that every byte of the payload was written. Raises what a
        write has raised, every time.
        """
        if self._is_finished:
            return
        self._memory.close()
        self._writes.settle()
        assert self._position_bytes == self.shape.total_bytes, "the put is torn"
        self._is_finished = True

    def place(self, index: int) -> tuple[_Extent, int]:
        """Extent and slot of a chunk."""
        number, slot = divmod(index, self._slots_each)
        return self._extents[number], slot

    def end(self, index: int, *, keep: bool) -> None:
        """This chunk is through; with the last of its extent that nobody keeps, the space is."""
        if self._is_ended[index]:
            return
        self._is_ended[index] = True
        extent = self._extents[index // self._slots_each]
        extent.is_kept = extent.is_kept or keep
        extent.open_slots -= 1
        if extent.open_slots == 0:
            for gathered in extent.gathered.values():
                self._memory.give_back(gathered.buffer)
            extent.gathered.clear()
            extent.written.end(keep=extent.is_kept)
            self._open_extents -= 1
            if self._open_extents == 0:
                self._memory.close()


class _AfterLast:
    """Calls `action` when it has been called `count` times."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = itertools.count(count - 1, -1)
        self._action = action

    def __call__(self) -> None:
        if next(self._left) == 0:
            self._action()


def _memory(buffer: Bytes) -> memoryview:
    return memoryview(buffer)  # type: ignore[arg-type]
