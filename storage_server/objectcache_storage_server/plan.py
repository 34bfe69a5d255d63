"""What to read and where it lands, from a descriptor and placements by arithmetic alone.

Pure: no engine, no socket, no clock. A plan is a few numbers and the placements; fragments and
their reads are worked out when they are wanted, so a plan of 10,000 chunks costs no more than its
placements.

The payload of N chunks and layers [first, end) with slices of S bytes is, layerwise, for each layer
for each chunk its slice; chunkwise, for each chunk its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.engines.base import CHECKSUM_BLOCK_BYTES, Placement, Read
from objectcache_storage_server.engines.block_checksums import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    block_bytes_within,
)


class Fragment(NamedTuple):
    """A contiguous piece of the payload: some chunks' slices of some layers, or part of one slice.

    `skip_bytes` is where it begins within its first slice; it is 0 unless a slice is larger than a
    fragment.
    """

    offset_bytes: int  # in the payload
    length_bytes: int
    first_chunk: int
    end_chunk: int
    first_layer: int
    end_layer: int
    skip_bytes: int = 0


class Plan(ABC):
    """What one delivery reads, in the order it is sent."""

    payload_bytes: int
    end_layer: int

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """All fragments, in payload order, without a gap."""

    @abstractmethod
    def reads(self, fragment: Fragment) -> list[Read]:
        """The reads that fill a buffer of `fragment.length_bytes`, coalesced."""

    @abstractmethod
    def progress(self) -> Progress:
        """A fresh account of which layers are complete."""


class Progress(ABC):
    """Turns finished fragments, in any order, into a watermark of complete layers."""

    @abstractmethod
    def finish(self, fragment: Fragment) -> int | None:
        """Count a fragment; returns the new watermark (one past the last complete layer) if it
        moved.
        """

    @property
    @abstractmethod
    def end_layer(self) -> int:
        """All delivered layers below this are complete."""


@dataclass(frozen=True)
class ChunkPlan(Plan):
    """Plan of a prefix, layerwise or chunkwise."""

    placements: Sequence[Placement]
    slice_bytes: int
    first_layer: int
    end_layer: int
    mode: DeliveryMode
    fragment_bytes: int

    @cached_property
    def _each_alone(self) -> bool:
        """Every chunk lies in one run of its own, so no two reads can join."""
        return all(place.slots == 1 for place in self.placements)

    @property
    def payload_bytes(self) -> int:  # type: ignore[override]
        """N x layers x S."""
        return len(self.placements) * (self.end_layer - self.first_layer) * self.slice_bytes

    def fragments(self) -> Iterator[Fragment]:
        """See `Plan.fragments`. A layerwise fragment never spans two layers."""
        if self.slice_bytes > self.fragment_bytes:
            return self._pieces_of_slices()
        if self.mode is DeliveryMode.LAYERWISE:
            return self._groups_of_chunks()
        return self._whole_chunks()

    def _groups_of_chunks(self) -> Iterator[Fragment]:
        chunk_count, slice_bytes = len(self.placements), self.slice_bytes
        chunks_each = self.fragment_bytes // slice_bytes
        offset_bytes = 0
        for layer in range(self.first_layer, self.end_layer):
            for first in range(0, chunk_count, chunks_each):
                end = min(first + chunks_each, chunk_count)
                length_bytes = (end - first) * slice_bytes
                yield Fragment(offset_bytes, length_bytes, first, end, layer, layer + 1)
                offset_bytes += length_bytes

    def _whole_chunks(self) -> Iterator[Fragment]:
        layer_count = self.end_layer - self.first_layer
        slices_each = self.fragment_bytes // self.slice_bytes
        chunks_each = max(1, slices_each // layer_count)
        layers_each = min(layer_count, slices_each)
        offset_bytes = 0
        for first in range(0, len(self.placements), chunks_each):
            end = min(first + chunks_each, len(self.placements))
            for layer in range(self.first_layer, self.end_layer, layers_each):
                end_layer = min(layer + layers_each, self.end_layer)
                length_bytes = (end - first) * (end_layer - layer) * self.slice_bytes
                yield Fragment(offset_bytes, length_bytes, first, end, layer, end_layer)
                offset_bytes += length_bytes

    def _pieces_of_slices(self) -> Iterator[Fragment]:
        block_bytes = slice_block_bytes(self.slice_bytes)
        piece_bytes = self.fragment_bytes // block_bytes * block_bytes or self.fragment_bytes
        offset_bytes = 0
        for layer, chunk in self._slices():
            for skip in range(0, self.slice_bytes, piece_bytes):
                length = min(piece_bytes, self.slice_bytes - skip)
                yield Fragment(offset_bytes, length, chunk, chunk + 1, layer, layer + 1, skip)
                offset_bytes += length

    def _slices(self) -> Iterator[tuple[int, int]]:
        chunks, layers = range(len(self.placements)), range(self.first_layer, self.end_layer)
        if self.mode is DeliveryMode.LAYERWISE:
            return ((layer, chunk) for layer in layers for chunk in chunks)
        return ((layer, chunk) for chunk in chunks for layer in layers)

    def reads(self, fragment: Fragment) -> list[Read]:
        """See `Plan.reads`. Neighbours in one extent, and layers of one contiguous chunk, join."""
        _, length_bytes, first_chunk, end_chunk, first_layer, end_layer, skip_bytes = fragment
        slice_bytes = self.slice_bytes
        if skip_bytes or length_bytes < slice_bytes:
            place = self.placements[first_chunk]
            start = place.base_bytes + first_layer * place.slots * slice_bytes + skip_bytes
            return [Read(place.source, start, length_bytes, 0)]
        places = self.placements[first_chunk:end_chunk]
        if self._each_alone:
            run_bytes = (end_layer - first_layer) * slice_bytes
            skip_bytes = first_layer * slice_bytes
            landings = range(0, length_bytes, run_bytes)
            return [
                Read(place.source, place.base_bytes + skip_bytes, run_bytes, landing)
                for place, landing in zip(places, landings, strict=True)
            ]
        return self._joined_reads(places, first_layer, end_layer)

    def _joined_reads(
        self, places: Sequence[Placement], first_layer: int, end_layer: int
    ) -> list[Read]:
        slice_bytes = self.slice_bytes
        reads: list[Read] = []
        landing_bytes = last_end = 0
        last_source = -1
        for place in places:
            source, base_bytes, slots = place.source, place.base_bytes, place.slots
            joined = end_layer - first_layer if slots == 1 else 1
            run_bytes = joined * slice_bytes
            for layer in range(first_layer, end_layer, joined):
                start = base_bytes + layer * slots * slice_bytes
                if source == last_source and start == last_end:
                    grown = reads[-1]
                    reads[-1] = grown._replace(length_bytes=grown.length_bytes + run_bytes)
                else:
                    reads.append(Read(source, start, run_bytes, landing_bytes))
                landing_bytes += run_bytes
                last_source, last_end = source, start + run_bytes
        return reads

    def progress(self) -> Progress:
        """See `Plan.progress`."""
        if self.mode is DeliveryMode.LAYERWISE:
            layer_bytes = len(self.placements) * self.slice_bytes
            return _LayerProgress(layer_bytes, self.first_layer, self.end_layer)
        return _WholeProgress(self.payload_bytes, self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class RangePlan(Plan):
    """Plan of a byte range of one object that lies in one run: an ordinary S3 GET."""

    placement: Placement
    offset_bytes: int
    payload_bytes: int
    fragment_bytes: int
    end_layer: int = 1

    def fragments(self) -> Iterator[Fragment]:
        """See `Plan.fragments`. All but the first begin at a multiple of `fragment_bytes` of the
        object, so that no checksum block is read twice.
        """
        position, end = self.offset_bytes, self.offset_bytes + self.payload_bytes
        while position < end:
            stop = min(end, (position // self.fragment_bytes + 1) * self.fragment_bytes)
            yield Fragment(position - self.offset_bytes, stop - position, 0, 1, 0, 1)
            position = stop

    def reads(self, fragment: Fragment) -> list[Read]:
        """See `Plan.reads`."""
        start = self.placement.base_bytes + self.offset_bytes + fragment.offset_bytes
        return [Read(self.placement.source, start, fragment.length_bytes, 0)]

    def progress(self) -> Progress:
        """See `Plan.progress`. The range is one layer."""
        return _WholeProgress(self.payload_bytes, 0, 1)


class _LayerProgress(Progress):
    def __init__(self, layer_bytes: int, first_layer: int, end_layer: int) -> None:
        self._missing_bytes = [layer_bytes] * (end_layer - first_layer)
        self._first_layer = self._end_layer = first_layer

    @property
    def end_layer(self) -> int:
        return self._end_layer

    def finish(self, fragment: Fragment) -> int | None:
        index = fragment.first_layer - self._first_layer
        self._missing_bytes[index] -= fragment.length_bytes
        assert self._missing_bytes[index] >= 0
        before, done = self._end_layer, self._end_layer - self._first_layer
        while done < len(self._missing_bytes) and self._missing_bytes[done] == 0:
            done += 1
        self._end_layer = self._first_layer + done
        return self._end_layer if self._end_layer > before else None


class _WholeProgress(Progress):
    def __init__(self, payload_bytes: int, first_layer: int, end_layer: int) -> None:
        self._missing_bytes = payload_bytes
        self._first_layer, self._last = first_layer, end_layer

    @property
    def end_layer(self) -> int:
        return self._last if self._missing_bytes == 0 else self._first_layer

    def finish(self, fragment: Fragment) -> int | None:
        self._missing_bytes -= fragment.length_bytes
        assert self._missing_bytes >= 0
        return self._last if self._missing_bytes == 0 else None


def plan_chunks(
    descriptor: Descriptor,
    placements: Sequence[Placement],
    mode: DeliveryMode,
    fragment_bytes: int,
) -> ChunkPlan:
    """Plan the delivery of the chunks at `placements`, which may be fewer than the descriptor's."""
    assert mode is not DeliveryMode.AUTO
    return ChunkPlan(
        placements,
        descriptor.per_layer_chunk_bytes,
        descriptor.first_layer,
        descriptor.end_layer,
        mode,
        fragment_bytes,
    )


def target_fragment_bytes(
    layer_bytes: int, reader_threads: int, fragment_bytes: int, fragment_bytes_max: int
) -> int:
    """Fragment size for a delivery into a target, which holds no buffer of the server's.

    A fragment costs the readers tens of microseconds of each other's time, so the larger the
    better, as long as every layer still has two for each reader.
    """
    return max(fragment_bytes, min(fragment_bytes_max, layer_bytes // (2 * reader_threads)))


def slice_block_bytes(slice_bytes: int) -> int:
    """Checksum block for chunks of such slices: `block_bytes_within` a slice, so that a slice is
    whole blocks and can be verified alone.

    Raises `InvalidRequest` for a slice that cannot be divided.
    """
    block_bytes = block_bytes_within(slice_bytes)
    if block_bytes is not None:
        return block_bytes
    raise InvalidRequest(
        f"per_layer_chunk_bytes is {slice_bytes}; above {BLOCK_BYTES_MAX} it must have a "
        f"divisor from {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}; pad the slice",
        code="InvalidDescriptor",
    )


class Landing(NamedTuple):
    """Where a piece of a put's data goes: object `object_index`, at `offset_bytes` of it."""

    object_index: int
    offset_bytes: int
    start_bytes: int  # of the piece, in the buffer
    length_bytes: int


@dataclass(frozen=True, slots=True)
class PutPlan:
    """How the data of a put, arriving in order, falls into `object_count` objects.

    `unit_bytes` divides every boundary: a buffer that holds whole units has whole landings.
    Layerwise, the data is for each layer, for each object, `unit_bytes x units_per_slice` bytes;
    otherwise object after object.
    """

    object_count: int
    object_bytes: int | None  # None: one object, of a length not known before the end
    slice_bytes: int
    block_bytes: int
    layerwise: bool

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all data, where known."""
        return None if self.object_bytes is None else self.object_count * self.object_bytes

    def buffer_bytes(self, about_bytes: int) -> int:
        """A buffer size near `about_bytes` that ends on a block."""
        return max(self.block_bytes, about_bytes // self.block_bytes * self.block_bytes)

    def landings(self, position_bytes: int, length_bytes: int) -> Iterator[Landing]:
        """Where `length_bytes` of data from `position_bytes` on go. Begins on a block boundary."""
        done = 0
        while done < length_bytes:
            index, offset, room = self._locate(position_bytes + done)
            length = min(room, length_bytes - done)
            yield Landing(index, offset, done, length)
            done += length

    def _locate(self, position_bytes: int) -> tuple[int, int, int]:
        if self.object_bytes is None:
            return 0, position_bytes, 1 << 62
        if not self.layerwise:
            index, offset = divmod(position_bytes, self.object_bytes)
            return index, offset, self.object_bytes - offset
        number, skip = divmod(position_bytes, self.slice_bytes)
        layer, index = divmod(number, self.object_count)
        return index, layer * self.slice_bytes + skip, self.slice_bytes - skip


def object_put_plan(size_bytes: int | None, block_bytes: int = CHECKSUM_BLOCK_BYTES) -> PutPlan:
    """Plan of one ordinary object."""
    return PutPlan(1, size_bytes, block_bytes, block_bytes, layerwise=False)


def chunk_put_plan(descriptor: Descriptor) -> PutPlan:
    """Plan of a kv-put. Raises `InvalidRequest` where the descriptor's slices cannot be stored."""
    return PutPlan(
        len(descriptor.chunk_keys),
        descriptor.chunk_bytes,
        descriptor.per_layer_chunk_bytes,
        slice_block_bytes(descriptor.per_layer_chunk_bytes),
        layerwise=descriptor.delivery is DeliveryMode.LAYERWISE,
    )
