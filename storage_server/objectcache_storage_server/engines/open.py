"""The engine that the settings name."""

from __future__ import annotations

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.settings import Settings
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.files import FilesEngine
from objectcache_storage_server.engines.memory import MemoryEngine


def open_engine(settings: Settings) -> Engine:
    """Open the engine of `storage.engine`; raises `InvalidRequest` for a name without one."""
    match settings.storage.engine:
        case "memory":
            return MemoryEngine()
        case "files":
            return FilesEngine(settings.data_dir, settings.storage.open_objects_max)
        case unknown:
            raise InvalidRequest(f"storage.engine must be memory or files, got {unknown!r}")
