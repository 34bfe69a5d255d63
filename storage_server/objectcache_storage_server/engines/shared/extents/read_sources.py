"""Where opened objects lie: address spaces that reads name, and the store's objects behind them.

An extent of several slots is one source, in which neighbours of a layer lie side by side. Any other
object is a source of its own: its extents, one after the other.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
)
from objectcache_storage_server.engines.stores.shared_store import ObjectRead


class ExtentRun(NamedTuple):
    """An extent's place in a source."""

    end_bytes: int  # in the source, of it and all before it
    size_bytes: int
    extent: ExtentName
    object_bytes: int


class ReadSource(ABC):
    """Checksum blocks are counted over the whole of it, at multiples of `block_bytes`."""

    def __init__(self, block_bytes: int, size_bytes: int, runs: Sequence[ExtentRun]) -> None:
        self.block_bytes = block_bytes
        self.size_bytes = size_bytes
        self._runs = runs

    @cached_property
    @abstractmethod
    def expected(self) -> Sequence[int]:
        """The checksum of every block."""

    @abstractmethod
    def owner(self, block: int) -> SharedVersion:
        """Whose block it is, of one that was opened."""

    def object_reads(self, offset_bytes: int, memory: memoryview) -> Iterator[ObjectRead]:
        """What fills `memory` from an address on: one read of each of the store's objects."""
        index = bisect.bisect_right(self._runs, offset_bytes, key=_run_end)
        while memory:
            end_bytes, size_bytes, extent, object_bytes = self._runs[index]
            in_extent = offset_bytes - end_bytes + size_bytes
            number, within = divmod(in_extent, object_bytes)
            part = memory[: min(object_bytes - within, end_bytes - offset_bytes)]
            yield ObjectRead(extent.object_name(number), within, part)
            offset_bytes, memory = offset_bytes + len(part), memory[len(part) :]
            index += offset_bytes == end_bytes

    def block_around(self, offset_bytes: int) -> tuple[int, int]:
        """Begin and length of the block that holds an address."""
        begin = offset_bytes - offset_bytes % self.block_bytes
        return begin, min(self.block_bytes, self.size_bytes - begin)


def _run_end(run: ExtentRun) -> int:
    return run.end_bytes


class ExtentSlots(ReadSource):
    """An extent of several slots."""

    def __init__(self, name: ExtentName, shape: ExtentShape, block_bytes: int) -> None:
        size_bytes = shape.size_bytes
        super().__init__(block_bytes, size_bytes, [_run(0, name, shape)])
        self.versions: dict[int, SharedVersion] = {}  # by slot: those that were opened
        self._shape = shape
        self._blocks_each = shape.slice_bytes // block_bytes

    @cached_property
    def expected(self) -> Sequence[int]:
        shape = self._shape
        sums = np.zeros((shape.num_layers, shape.slots, self._blocks_each), np.uint64)
        for slot, version in self.versions.items():
            of_version = np.frombuffer(version.checksums, np.uint64)
            sums[:, slot] = of_version.reshape(shape.num_layers, self._blocks_each)
        flat: list[int] = sums.reshape(-1).tolist()
        return flat

    def owner(self, block: int) -> SharedVersion:
        return self.versions[block // self._blocks_each % self._shape.slots]


class ObjectExtents(ReadSource):
    """An object on its own."""

    def __init__(self, version: SharedVersion, runs: Sequence[ExtentRun]) -> None:
        super().__init__(version.block_bytes, version.info.size_bytes, runs)
        self._version = version

    @cached_property
    def expected(self) -> Sequence[int]:
        return self._version.checksums

    def owner(self, block: int) -> SharedVersion:
        return self._version


def lay_out(
    versions: Sequence[SharedVersion], shapes: Mapping[ExtentName, ExtentShape]
) -> tuple[list[ReadSource], list[Placement]]:
    """The versions' sources, and where each lies in them."""
    sources: list[ReadSource] = []
    placements: list[Placement] = []
    shared: dict[ExtentName, tuple[int, ExtentSlots, int, int]] = {}
    for version in versions:
        extents = version.extents
        found = shared.get(extents[0]) if extents else None
        if found is None:
            shape = shapes[extents[0]] if extents else None
            if shape is None or shape.slots == 1:
                placements.append(Placement(len(sources), 0))
                sources.append(ObjectExtents(version, _runs(extents, shapes)))
                continue
            source = ExtentSlots(extents[0], shape, version.block_bytes)
            found = len(sources), source, shape.slice_bytes, shape.slots * shape.slice_bytes
            shared[extents[0]] = found
            sources.append(source)
        number, source, slice_bytes, stride_bytes = found
        slot = version.slot
        source.versions[slot] = version
        placements.append(Placement(number, slot * slice_bytes, slice_bytes, stride_bytes))
    return sources, placements


def _runs(
    extents: Sequence[ExtentName], shapes: Mapping[ExtentName, ExtentShape]
) -> Sequence[ExtentRun]:
    runs: list[ExtentRun] = []
    end_bytes = 0
    for name in extents:
        run = _run(end_bytes, name, shapes[name])
        end_bytes = run.end_bytes
        runs.append(run)
    return runs


def _run(begin_bytes: int, name: ExtentName, shape: ExtentShape) -> ExtentRun:
    size_bytes = shape.size_bytes
    return ExtentRun(begin_bytes + size_bytes, size_bytes, name, shape.object_bytes)
