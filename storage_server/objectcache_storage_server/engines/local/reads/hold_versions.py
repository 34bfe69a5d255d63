"""From versions to held sources: where each lies, and how a plan addresses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from objectcache_encodings.frames import SliceCodec
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.engines.local.reads.decoded_reads import (
    DecodingOpenObjects,
    EncodedSlots,
)
from objectcache_storage_server.engines.local.reads.device_sharing import RunningFragment
from objectcache_storage_server.engines.local.reads.path_use import PathUse
from objectcache_storage_server.engines.local.reads.verified_reads import (
    DamagedVersion,
    LocalOpenObjects,
    ObjectSource,
    OpenExtent,
    Reader,
    Run,
    SlotSource,
    Source,
)
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.dense_tables import UNKNOWN_CODEC
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer


class _VolumeReader(Reader):
    def __init__(
        self,
        holdings: Holdings,
        path_use: PathUse,
        on_failure: Callable[[DamagedVersion | OSError], Exception],
    ) -> None:
        self._holdings = holdings
        self._path_use = path_use
        self._on_failure = on_failure
        self.read_resident = path_use.volume.read_resident

    def fragment(self, length_bytes: int, path: IoPath) -> RunningFragment:
        return self._path_use.fragment(length_bytes, path)

    def read(self, transfers: Sequence[Transfer], path: IoPath, cold_bytes: int = 0) -> int:
        return self._path_use.read(transfers, path, cold_bytes)

    def count_found(self, found_bytes: int) -> None:
        self._path_use.count_found(found_bytes)

    def read_missing(self, transfers: Sequence[Transfer]) -> None:
        self._path_use.read_missing(transfers)

    def read_again(self, transfer: Transfer) -> None:
        self._path_use.read_again(transfer)

    def count_stale(self, transfer: Transfer) -> None:
        self._path_use.count_stale(transfer)

    def seems_resident(self, offset_bytes: int, length_bytes: int) -> bool:
        return self._path_use.seems_resident(offset_bytes, length_bytes)

    def is_missing(self, extent: int) -> bool:
        if not self._path_use.has_direct:
            return False
        self._holdings.set_cold(extent, True)
        self._path_use.want_resident(extent)
        return True

    def is_there(self, extent: int) -> None:
        self._holdings.set_cold(extent, False)

    def read_failed(self, error: DamagedVersion | OSError) -> Exception:
        return self._on_failure(error)

    def let_go(self, extents: npt.NDArray[np.int64]) -> None:
        self._holdings.let_go(extents)


def open_sources(
    holdings: Holdings,
    path_use: PathUse,
    versions: Sequence[Version | None],
    verification: Verification,
    on_failure: Callable[[DamagedVersion | OSError], Exception],
) -> LocalOpenObjects:
    """Hold what the versions lie in. To be called while the index cannot have let go of them:
    inside of `Holdings.looking_up` and after that look-up, or while nothing changes.
    """
    stored = [version for version in versions if version is not None]
    numbers = sorted({number for version in stored for number in version.extents})
    extents = np.array(numbers, np.int64)
    rows = holdings.hold(extents, [version.extents[0] for version in stored if version.extents])
    pitches: dict[int, tuple[int, ...]] = {}
    if rows["is_encoded"].any():
        with holdings.lock:
            pitches = holdings.pitches_of(numbers)
    sources, placements = _lay_out(stored, _homes(numbers, rows), pitches)
    reader = _VolumeReader(holdings, path_use, on_failure)
    opening = DecodingOpenObjects if pitches else LocalOpenObjects
    return opening(reader, versions, sources, placements, extents, verification, path_use.sample())


class _Home(NamedTuple):
    """An extent as its row says, in plain numbers."""

    extent: OpenExtent
    geometry: Geometry
    codec: int


class _SharedSource(NamedTuple):
    """An extent with slots among the sources, and who was opened in it."""

    number: int
    slice_bytes: int
    stride_bytes: int
    versions: dict[int, Version]  # by slot


def _homes(numbers: Sequence[int], rows: npt.NDArray[np.void]) -> dict[int, _Home]:
    places = ("offset_bytes", "length_bytes", "path", "is_cold")
    shapes = ("slots", "num_layers", "slice_bytes")
    return {
        number: _Home(
            OpenExtent(number, offset, length, IoPath(path), is_cold), Geometry(*shape), codec
        )
        for number, (offset, length, path, is_cold), shape, codec in zip(
            numbers,
            _values(rows, places),
            _values(rows, shapes),
            rows["codec"].tolist(),
            strict=True,
        )
    }


def _values(rows: npt.NDArray[np.void], columns: Sequence[str]) -> Iterator[tuple[int, ...]]:
    return zip(*(rows[column].tolist() for column in columns), strict=True)


def _lay_out(
    stored: Sequence[Version], homes: dict[int, _Home], pitches: dict[int, tuple[int, ...]]
) -> tuple[list[Source], list[Placement]]:
    sources: list[Source] = []
    placements: list[Placement] = []
    shared: dict[int, _SharedSource] = {}  # by extent
    for version in stored:
        extents = version.extents
        source = shared.get(extents[0]) if extents else None
        if source is None:
            is_run = not extents or homes[extents[0]].geometry.slots == 1
            if is_run and (not extents or extents[0] not in pitches):
                placements.append(Placement(len(sources), 0))
                sources.append(_object_source(version, homes))
                continue
            extent, geometry, codec = homes[extents[0]]
            source = _SharedSource(
                len(sources), geometry.slice_bytes, geometry.row_stride_bytes, {}
            )
            shared[extents[0]] = source
            block_bytes = version.block_bytes
            frames = pitches.get(extents[0])
            sources.append(
                SlotSource(geometry, extent, source.versions, block_bytes)
                if frames is None
                else EncodedSlots(geometry, frames, extent, source.versions, _known_codec(codec))
            )
        number, slice_bytes, stride_bytes, versions = source
        slot = version.slot
        versions[slot] = version
        placements.append(Placement(number, slot * slice_bytes, slice_bytes, stride_bytes))
    return sources, placements


def _known_codec(codec: int) -> SliceCodec | None:
    return None if codec == UNKNOWN_CODEC else SliceCodec(codec)


def _object_source(version: Version, homes: dict[int, _Home]) -> ObjectSource:
    runs: list[Run] = []
    begin_bytes, block_bytes = 0, version.block_bytes
    for index, number in enumerate(version.extents):
        extent = homes[number].extent
        is_last = index == len(version.extents) - 1
        usable_bytes = extent.length_bytes - extent.length_bytes % block_bytes
        end_bytes = version.info.size_bytes if is_last else begin_bytes + usable_bytes
        runs.append(Run(begin_bytes, end_bytes, extent))
        begin_bytes = end_bytes
    return ObjectSource(version, runs)
