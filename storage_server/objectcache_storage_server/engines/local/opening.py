"""From versions to pinned sources: where each lies, and how a plan addresses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_schemas.messages import Verification
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.engines.local.geometry import Geometry
from objectcache_storage_server.engines.local.holdings import Holdings
from objectcache_storage_server.engines.local.opened import (
    DamagedVersion,
    LocalOpenObjects,
    ObjectSource,
    Reader,
    Run,
    SlotSource,
    Source,
)
from objectcache_storage_server.engines.local.overlap import GatedFragment
from objectcache_storage_server.engines.local.path_use import PathUse
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.volumes.volume import Path, Transfer


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

    def fragment(self, length_bytes: int, path: Path) -> GatedFragment:
        return self._path_use.fragment(length_bytes, path)

    def read(self, transfers: Sequence[Transfer], path: Path) -> int:
        return self._path_use.read(transfers, path)

    def read_resident(self, transfer: Transfer) -> bool:
        return self._path_use.read_resident(transfer)

    def read_missing(self, transfers: Sequence[Transfer]) -> None:
        self._path_use.read_missing(transfers)

    def read_failed(self, error: DamagedVersion | OSError) -> Exception:
        return self._on_failure(error)

    def unpin(self, extents: npt.NDArray[np.int64]) -> None:
        self._holdings.unpin(extents)


def open_sources(
    holdings: Holdings,
    path_use: PathUse,
    versions: Sequence[Version | None],
    verification: Verification,
    on_failure: Callable[[DamagedVersion | OSError], Exception],
) -> LocalOpenObjects:
    """Pin what the versions lie in. To be called while the index cannot have let go of them: inside
    of `Holdings.looking_up` and after that look-up, or while nothing changes.
    """
    stored = [version for version in versions if version is not None]
    numbers = sorted({number for version in stored for number in version.extents})
    extents = np.array(numbers, np.int64)
    rows = holdings.pin(extents, [version.extents[0] for version in stored if version.extents])
    sources, placements = _lay_out(stored, dict(zip(numbers, rows, strict=True)))
    reader = _VolumeReader(holdings, path_use, on_failure)
    return LocalOpenObjects(reader, versions, sources, placements, extents, verification)


def _lay_out(
    stored: Sequence[Version], rows: dict[int, np.void]
) -> tuple[list[Source], list[Placement]]:
    sources: list[Source] = []
    placements: list[Placement] = []
    slots: dict[int, tuple[int, Geometry, dict[int, Version]]] = {}  # by extent
    for version in stored:
        first = rows[version.extents[0]] if version.extents else None
        if first is None or first["slots"] == 1:
            placements.append(Placement(len(sources), 0))
            sources.append(_object_source(version, rows))
            continue
        extent = version.extents[0]
        if extent not in slots:
            geometry = Geometry(
                int(first["slots"]), int(first["num_layers"]), int(first["slice_bytes"])
            )
            neighbours: dict[int, Version] = {}
            slots[extent] = (len(sources), geometry, neighbours)
            where, path = int(first["offset_bytes"]), Path(int(first["path"]))
            sources.append(SlotSource(geometry, where, path, neighbours, version.block_bytes))
        number, geometry, neighbours = slots[extent]
        neighbours[version.slot] = version
        placements.append(
            Placement(
                number,
                version.slot * geometry.slice_bytes,
                geometry.slice_bytes,
                geometry.row_stride_bytes,
            )
        )
    return sources, placements


def _object_source(version: Version, rows: dict[int, np.void]) -> ObjectSource:
    runs: list[Run] = []
    begin_bytes, block_bytes = 0, version.block_bytes
    for index, number in enumerate(version.extents):
        row = rows[number]
        length_bytes = int(row["length_bytes"])
        is_last = index == len(version.extents) - 1
        usable_bytes = length_bytes - length_bytes % block_bytes
        end_bytes = version.info.size_bytes if is_last else begin_bytes + usable_bytes
        where, path = int(row["offset_bytes"]), Path(int(row["path"]))
        runs.append(Run(begin_bytes, end_bytes, where, path))
        begin_bytes = end_bytes
    return ObjectSource(version, runs)
