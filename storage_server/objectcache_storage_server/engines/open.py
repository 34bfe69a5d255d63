"""The engine that the settings name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.settings import Settings, StorageSettings
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.files import FilesEngine
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.nvme_volume import open_nvme_volume
from objectcache_storage_server.engines.local.volumes.volume import Volume
from objectcache_storage_server.engines.memory import MemoryEngine


def open_engine(settings: Settings) -> Engine:
    """Open the engine of `storage.engine`; raises `InvalidRequest` for a name without one."""
    match settings.storage.engine:
        case "memory":
            return MemoryEngine()
        case "files":
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
        raise InvalidRequest("storage.low_watermark must not be above storage.high_watermark")
    if storage.extent_bytes_max > storage.data_file_bytes:
        raise InvalidRequest("storage.extent_bytes_max must not be above storage.data_file_bytes")
    return LocalEngine(data_dir, storage, open_volume, clock)


def open_volume(data_dir: Path, storage: StorageSettings) -> Volume:
    """The volume that the settings name."""
    if storage.nvme_device:
        return open_nvme_volume(
            Path(storage.nvme_device),
            data_dir / "index",
            storage.data_file_bytes,
            storage.direct_depth,
        )
    return DataFiles(
        data_dir / "data",
        storage.data_file_bytes,
        storage.capacity_bytes,
        storage.capacity_reserve_bytes,
        storage.direct_io,
        storage.direct_depth,
    )
