"""The engine that the settings name."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from objectcache_runtime.settings import Settings, StorageSettings
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.catalog_engine import CALL_S_MAX
from objectcache_storage_server.engines.disk.data_folders import owned_folder
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.data_files import MORE_SPACE, DataFiles
from objectcache_storage_server.engines.local.volumes.volume import Volume
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.shared_store import SharedStore

DATA_FILES_MIN = 8  # of which a store's room is at least made up; the rest of a file is lost to it
DATA_FILE_BYTES_MIN = 4 * MIB
SHARED_INDEX = "shared-index"  # folder of the data directory
HEARTBEATS_A_LEASE = 5  # at least

logger = logging.getLogger("objectcache.storage_server.engines")


def open_engine(settings: Settings) -> Engine:
    """Open the engine of `storage.engine`; raises `InvalidRequest` for a name without one."""
    if settings.storage.cache_bytes and "://" not in settings.storage.engine:
        raise InvalidRequest(
            f"storage.cache_bytes is for a shared store, and storage.engine is "
            f"{settings.storage.engine}: leave it 0"
        )
    match settings.storage.engine:
        case "memory":
            from objectcache_storage_server.engines.memory.engine import MemoryEngine

            return MemoryEngine()
        case "files":
            _check_not_shared(settings.data_dir, "files")
            if (settings.data_dir / "index" / "data.mdb").exists():
                raise Unavailable(
                    f"{settings.data_dir} holds a store of engine local: serve it with "
                    "--set storage.engine=local, or give another --data-dir"
                )
            from objectcache_storage_server.engines.files.engine import FilesEngine

            return FilesEngine(settings.data_dir, settings.storage.open_objects_max)
        case "local":
            _check_not_shared(settings.data_dir, "local")
            return open_local_engine(settings.data_dir, settings.storage)
        case url if "://" in url:
            return _open_shared_engine(url, settings)
        case unknown:
            raise InvalidRequest(f"storage.engine must be local, files or memory, got {unknown!r}")


def _check_not_shared(data_dir: Path, engine: str) -> None:
    if (data_dir / SHARED_INDEX).exists():
        raise Unavailable(
            f"{data_dir} is the data directory of a server of a shared store, and has its index "
            f"alone: serve that with --set storage.engine=URL of the store, or give another "
            f"--data-dir to a store of engine {engine}"
        )


def _open_shared_engine(url: str, settings: Settings) -> Engine:
    """One server of a shared store, which is never made here: what looks like none may be one whose
    folder is not mounted, or whose address has a mistake. No call of the store is waited for longer
    than the writer lease: by then the others take this server for dead.
    """
    from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
    from objectcache_storage_server.engines.shared.engine import SharedEngine
    from objectcache_storage_server.engines.shared.log import log_catalog
    from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import SharedUpkeep
    from objectcache_storage_server.engines.stores.open_store import check_apart

    check_apart(url, settings.data_dir)
    folder, latch, storage = settings.data_dir / SHARED_INDEX, FlushLatch(), settings.storage
    rules, lease_s = _upkeep_rules(storage), storage.writer_lease_s
    with contextlib.ExitStack() as opened:
        with translated(f"create {settings.data_dir}", settings.data_dir):
            settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened.enter_context(owned_folder(settings.data_dir, latch))
        store = opened.enter_context(contextlib.closing(_open_store(url, folder.exists())))
        cache: ExtentCache | None = None
        if storage.cache_bytes:
            slot_bytes = store.capabilities.object_bytes_max
            cache = ExtentCache(settings.cache_dir, storage.cache_bytes, slot_bytes)
            opened.callback(cache.close)
        catalog = log_catalog.LogCatalog(
            store,
            folder,
            index_bytes_max=storage.index_bytes_max,
            heartbeat_s=min(log_catalog.HEARTBEAT_S, lease_s / HEARTBEATS_A_LEASE),
            call_s_max=min(log_catalog.CALL_S_MAX, lease_s),
        )
        opened.callback(catalog.close)
        upkeep = SharedUpkeep(catalog, store, rules)
        opened.callback(upkeep.close)
        buffer_bytes_max, close = storage.put_buffer_bytes_max, opened.pop_all().close
        return SharedEngine(
            catalog,
            store,
            upkeep,
            buffer_bytes_max,
            latch,
            close,
            call_s_max=min(CALL_S_MAX, lease_s),
            cache=cache,
        )


def _open_store(url: str, was_seen: bool) -> SharedStore:
    """Raises as `open_store`; to who has not seen the store yet the error says how one is made."""
    from objectcache_storage_server.engines.stores.open_store import open_store

    try:
        return open_store(url)
    except StoreTimeout:
        raise
    except Unavailable as error:
        if was_seen:
            raise
        raise Unavailable(
            f"{error.message} (storage.engine={url}). Is it the right address, and is its file "
            f"system mounted? A store is made once, by: objectcache create-store '{url}'"
        ) from error


def _upkeep_rules(storage: StorageSettings) -> UpkeepRules:
    """Raises `InvalidRequest` for settings that contradict each other."""
    _check_watermarks(storage)
    if storage.grace_s <= storage.delivery_timeout_s:
        raise InvalidRequest(
            f"storage.grace_s must be above storage.delivery_timeout_s, or deliveries end early, "
            f"got {storage.grace_s:g} and {storage.delivery_timeout_s:g}"
        )
    return UpkeepRules(
        capacity_bytes=storage.capacity_bytes,
        high_watermark=storage.high_watermark,
        low_watermark=storage.low_watermark,
        evicts=storage.when_full == "evict",
        grace_s=storage.grace_s,
        writer_lease_s=storage.writer_lease_s,
    )


def _check_watermarks(storage: StorageSettings) -> None:
    if storage.low_watermark > storage.high_watermark:
        raise InvalidRequest(
            f"storage.low_watermark must not be above storage.high_watermark, got "
            f"{storage.low_watermark:g} and {storage.high_watermark:g}"
        )


def open_local_engine(
    data_dir: Path, storage: StorageSettings, clock: Callable[[], float] = time.time
) -> LocalEngine:
    """Open the local engine on data files below `data_dir`, or on the NVMe namespace that the
    settings name.

    Raises `InvalidRequest` for settings that contradict each other.
    """
    _check_watermarks(storage)
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
