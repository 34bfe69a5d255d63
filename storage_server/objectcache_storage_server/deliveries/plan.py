"""What to read and where it lands, from a descriptor and placements by arithmetic alone.

Pure: no engine, no socket, no clock. A plan is a few numbers and the placements; fragments and
their reads are worked out when they are wanted, so a plan of 10,000 chunks costs no more than its
placements.

The payload of N chunks and layers [first, end) with slices of S bytes is, layerwise, for each layer
for each chunk its slice; chunkwise, for each chunk its layers.
"""

from __future__ import annotations

import bisect
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_storage_server.engines.base import OpenObjects, Placement, Read
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.scheduling.fragments import Fragment


class Plan(ABC):
    """What one delivery reads, in the order it is sent."""

    payload_bytes: int  # as it is sent
    first_layer: int
    end_layer: int

    @property
    def directory_bytes(self) -> int:
        """Bytes of the payload that say how the rest of it is encoded; 0 where it is plain."""
        return 0

    @property
    def decoded_bytes(self) -> int:
        """Bytes that its client has in the end, of an encoded payload when it is decoded."""
        return self.payload_bytes

    @property
    def layers_bytes(self) -> Sequence[int]:
        """Of each layer of a layerwise payload as it is sent, what comes before the first with it;
        of any other of the whole.
        """
        return [self.payload_bytes]

    def reading(self, opened: OpenObjects) -> OpenObjects:
        """What carries its reads out, made of the opened objects, which go with it."""
        return opened

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


class _Run(NamedTuple):
    """Chunks whose slices of a layer lie side by side: layer l begins at base + l * stride."""

    first_chunk: int
    end_chunk: int
    source: int
    base_bytes: int
    stride_bytes: int


_run_end = operator.attrgetter("end_chunk")


def _reads_of(source: int, runs: Sequence[tuple[int, int]], landing_bytes: int = 0) -> list[Read]:
    reads: list[Read] = []
    for start_bytes, length_bytes in runs:
        reads.append(Read(source, start_bytes, length_bytes, landing_bytes))
        landing_bytes += length_bytes
    return reads


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
    def _runs(self) -> list[_Run] | None:
        """The chunks in runs of neighbours; None where one was stored in slices of another size."""
        runs: list[_Run] = []
        slice_bytes = self.slice_bytes
        first_source = first_base = first_stride = next_base = room = -1
        first = 0
        for index, (source, base_bytes, stored_slice_bytes, stride_bytes) in enumerate(
            self.placements
        ):
            if stored_slice_bytes != slice_bytes:
                if stored_slice_bytes:
                    return None
                stride_bytes = slice_bytes
            if (
                base_bytes == next_base
                and source == first_source
                and stride_bytes == first_stride
                and room
            ):
                room -= 1
            else:
                if index:
                    runs.append(_Run(first, index, first_source, first_base, first_stride))
                first, first_source, first_base = index, source, base_bytes
                first_stride = stride_bytes
                room = stride_bytes // slice_bytes - 1
            next_base = base_bytes + slice_bytes
        if self.placements:
            end = len(self.placements)
            runs.append(_Run(first, end, first_source, first_base, first_stride))
        return runs

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """First and end chunk of each fragment of a layer: whole runs as far as they fit."""
        chunks_each = self.fragment_bytes // self.slice_bytes
        groups: list[tuple[int, int]] = []
        first = end = 0
        for run in self._runs or [_Run(0, len(self.placements), 0, 0, 0)]:
            if run.end_chunk - first > chunks_each and end > first:
                groups.append((first, end))
                first = end
            while run.end_chunk - first > chunks_each:
                groups.append((first, first + chunks_each))
                first += chunks_each
            end = run.end_chunk
        groups.append((first, end))
        return groups

    @property
    def payload_bytes(self) -> int:  # type: ignore[override]
        """N x layers x S."""
        return len(self.placements) * (self.end_layer - self.first_layer) * self.slice_bytes

    @property
    def layers_bytes(self) -> Sequence[int]:
        """See `Plan.layers_bytes`."""
        if self.mode is not DeliveryMode.LAYERWISE:
            return [self.payload_bytes]
        layer_bytes = len(self.placements) * self.slice_bytes
        return [layer_bytes] * (self.end_layer - self.first_layer)

    def fragments(self) -> Iterator[Fragment]:
        """See `Plan.fragments`. A layerwise fragment never spans two layers."""
        if self.slice_bytes > self.fragment_bytes:
            return self._pieces_of_slices()
        if self.mode is DeliveryMode.LAYERWISE:
            return self._groups_of_chunks()
        return self._whole_chunks()

    def _groups_of_chunks(self) -> Iterator[Fragment]:
        slice_bytes = self.slice_bytes
        offset_bytes = 0
        for layer in range(self.first_layer, self.end_layer):
            for first, end in self._groups:
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
        if fragment.skip_bytes or fragment.length_bytes < self.slice_bytes:
            return self._piece_reads(fragment)
        runs = self._runs
        if runs is None:
            return self._converted_reads(fragment)
        _, _, first_chunk, end_chunk, first_layer, end_layer, _ = fragment
        slice_bytes = self.slice_bytes
        reads: list[Read] = []
        landing_bytes = 0
        number = bisect.bisect_right(runs, first_chunk, key=_run_end)
        chunk = first_chunk
        while chunk < end_chunk:
            run_first, run_end, source, base_bytes, stride_bytes = runs[number]
            start = base_bytes + (chunk - run_first) * slice_bytes + first_layer * stride_bytes
            end = min(run_end, end_chunk)
            if end_layer == first_layer + 1:
                length_bytes = (end - chunk) * slice_bytes
                reads.append(Read(source, start, length_bytes, landing_bytes))
                landing_bytes += length_bytes
                chunk, number = end, number + 1
                continue
            if stride_bytes == slice_bytes:
                starts, length_bytes = [start], (end_layer - first_layer) * slice_bytes
            else:
                starts = [start + layer * stride_bytes for layer in range(end_layer - first_layer)]
                length_bytes = slice_bytes
            for start in starts:
                reads.append(Read(source, start, length_bytes, landing_bytes))
                landing_bytes += length_bytes
            chunk += 1
            number += chunk == run_end
        return reads

    def _piece_reads(self, fragment: Fragment) -> list[Read]:
        place = self.placements[fragment.first_chunk]
        start = fragment.first_layer * self.slice_bytes + fragment.skip_bytes
        return _reads_of(place.source, place.runs(start, fragment.length_bytes))

    def _converted_reads(self, fragment: Fragment) -> list[Read]:
        """Of chunks that were stored in slices of another size."""
        slice_bytes = self.slice_bytes
        first_bytes = fragment.first_layer * slice_bytes
        length_bytes = (fragment.end_layer - fragment.first_layer) * slice_bytes
        reads: list[Read] = []
        landing_bytes = 0
        for place in self.placements[fragment.first_chunk : fragment.end_chunk]:
            runs = place.runs(first_bytes, length_bytes)
            reads.extend(_reads_of(place.source, runs, landing_bytes))
            landing_bytes += length_bytes
        return reads

    def progress(self) -> Progress:
        """See `Plan.progress`."""
        if self.mode is DeliveryMode.LAYERWISE:
            return LayerwiseProgress(self.layers_bytes, self.first_layer)
        return _WholeProgress(self.payload_bytes, self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class RangePlan(Plan):
    """Plan of a byte range of one object: an ordinary S3 GET."""

    placement: Placement
    offset_bytes: int
    payload_bytes: int
    fragment_bytes: int
    first_layer: int = 0
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
        start = self.offset_bytes + fragment.offset_bytes
        runs = self.placement.runs(start, fragment.length_bytes)
        return _reads_of(self.placement.source, runs)

    def progress(self) -> Progress:
        """See `Plan.progress`. The range is one layer."""
        return _WholeProgress(self.payload_bytes, 0, 1)


class LayerwiseProgress(Progress):
    """Of fragments of one layer each."""

    def __init__(self, layers_bytes: Sequence[int], first_layer: int) -> None:
        """`layers_bytes`: of each layer."""
        self._missing_bytes = list(layers_bytes)
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
    layer_bytes: int,
    reader_threads: int,
    fragment_bytes: int,
    fragment_bytes_max: int,
    read_bytes: int = 0,
) -> int:
    """Fragment size for a delivery into a target, which holds no buffer of the server's.

    A fragment costs the readers tens of microseconds of each other's time, so the larger the
    better, as long as every layer has as many for one reader as for the others. An engine that has
    many under way at once says with `read_bytes` what it wants them to be: larger ones would fill
    its link with later layers, which share it evenly with the first.
    """
    if read_bytes:
        return min(read_bytes, fragment_bytes_max)
    fewest = -(-layer_bytes // fragment_bytes_max)
    count = max(1, -(-fewest // reader_threads)) * reader_threads
    return max(fragment_bytes, -(-layer_bytes // count))
