"""The engine that the settings name."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from objectcache_runtime.settings import Settings, StorageSettings
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.data_files import MORE_SPACE, DataFiles
from objectcache_storage_server.engines.local.volumes.volume import Volume

DATA_FILES_MIN = 8  # of which a store's room is at least made up; the rest of a file is lost to it
DATA_FILE_BYTES_MIN = 4 * MIB

logger = logging.getLogger("objectcache.storage_server.engines")


def open_engine(settings: Settings) -> Engine:
    """Open the engine of `storage.engine`; raises `InvalidRequest` for a name without one."""
    match settings.storage.engine:
        case "memory":
            from objectcache_storage_server.engines.memory.engine import MemoryEngine

            return MemoryEngine()
        case "files":
            if (settings.data_dir / "index" / "data.mdb").exists():
                raise Unavailable(
                    f"{settings.data_dir} holds a store of engine local: serve it with "
                    "--set storage.engine=local, or give another --data-dir"
                )
            from objectcache_storage_server.engines.files.engine import FilesEngine

            return FilesEngine(settings.data_dir, settings.storage.open_objects_max)
        case "local":
            return open_local_engine(settings.data_dir, settings.storage)
        case unknown:
            raise InvalidRequest(f"storage.engine must be local, files or memory, got {unknown!r}")


def open_local_engine(
    data_dir: Path, storage: StorageSettings, clock: Callable[[], float] = time.time
) -> LocalEngine:
    """Open the local engine on data files below `data_dir`, or on the NVMe namespace that the
    settings name.

    Raises `InvalidRequest` for settings that contradict each other.
    """
    if storage.low_watermark > storage.high_watermark:
        raise InvalidRequest(
            f"storage.low_watermark must not be above storage.high_watermark, got "
            f"{storage.low_watermark:g} and {storage.high_watermark:g}"
        )
    return LocalEngine(data_dir, storage, open_volume, clock)


def open_volume(data_dir: Path, storage: StorageSettings) -> Volume:
    """The volume that the settings name."""
    if storage.nvme_device:
        from objectcache_storage_server.engines.local.volumes.nvme_volume import open_nvme_volume

        return open_nvme_volume(
            Path(storage.nvme_device),
            data_dir / "index",
            storage.data_file_bytes,
            storage.direct_depth,
            storage.nvme_block_device,
        )
    folder = data_dir / "data"
    system = os.statvfs(data_dir)
    if storage.capacity_bytes > system.f_blocks * system.f_frsize:
        logger.warning(
            "storage.capacity_bytes is %d, the file system of server.data_dir has %d in all: the "
            "store is full when that is",
            storage.capacity_bytes,
            system.f_blocks * system.f_frsize,
        )
    files = DataFiles(
        folder,
        storage.data_file_bytes if folder.exists() else new_data_file_bytes(data_dir, storage),
        storage.capacity_bytes,
        storage.capacity_reserve_bytes,
        storage.direct_io,
        storage.direct_depth,
    )
    taken_bytes = len(files.segments()) * files.segment_bytes
    if 0 < storage.capacity_bytes < max(taken_bytes, files.segment_bytes):
        logger.warning(
            "storage.capacity_bytes is %d, the store has data files of %d bytes each and %d in "
            "all: none is added",
            storage.capacity_bytes,
            files.segment_bytes,
            taken_bytes,
        )
    return files


def new_data_file_bytes(data_dir: Path, storage: StorageSettings) -> int:
    """The size of data files for a store that is made in `data_dir`: `storage.data_file_bytes`, or
    less where fewer than DATA_FILES_MIN of those would fit.

    Raises `InvalidRequest` where there is no room for files at all.
    """
    system = os.statvfs(data_dir)
    room_bytes = system.f_bavail * system.f_frsize - storage.capacity_reserve_bytes
    remedy = f"{MORE_SPACE}, or lower storage.capacity_reserve_bytes"
    if storage.capacity_bytes and storage.capacity_bytes <= room_bytes:
        room_bytes = storage.capacity_bytes
        remedy = "raise storage.capacity_bytes"
    if room_bytes < DATA_FILE_BYTES_MIN:
        raise InvalidRequest(
            f"there is room for {max(0, room_bytes)} bytes of data files, a store takes at least "
            f"{DATA_FILE_BYTES_MIN}: {remedy}"
        )
    fitting_bytes = room_bytes // DATA_FILES_MIN // DATA_FILE_BYTES_MIN * DATA_FILE_BYTES_MIN
    return min(storage.data_file_bytes, max(DATA_FILE_BYTES_MIN, fitting_bytes))
