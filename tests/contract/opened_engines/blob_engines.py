"""The engine over blob stores that a test wraps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.blobs.blob_store import BlobStore
from objectcache_storage_server.engines.catalog_engine import DamageCount
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.files.folder_blobs import FolderBlobStore
from objectcache_storage_server.engines.files.sqlite_catalog import SqliteCatalog
from objectcache_storage_server.engines.memory.memory_blobs import MemoryBlobStore
from objectcache_storage_server.engines.memory.memory_catalog import MemoryCatalog
from objectcache_storage_server.testing import DelayingBlobStore

OPEN_OBJECTS_MAX = 16
Wrap = Callable[[BlobStore], BlobStore]


def files_over(wrap: Wrap, folder: Path, clock: Callable[[], float] = time.time) -> BlobEngine:
    """The files engine's parts, its store wrapped."""
    folder.mkdir(exist_ok=True)
    latch, damage = FlushLatch(), DamageCount()
    catalog = SqliteCatalog(folder / "index.sqlite3", damage.add, latch)
    store = wrap(FolderBlobStore(folder / "objects", latch))
    return BlobEngine("files", catalog, store, OPEN_OBJECTS_MAX, latch, damage, clock)


def memory_over(wrap: Wrap) -> BlobEngine:
    """The memory engine's parts, its store wrapped."""
    store, latch, damage = wrap(MemoryBlobStore()), FlushLatch(), DamageCount()
    return BlobEngine("memory", MemoryCatalog(), store, OPEN_OBJECTS_MAX, latch, damage)


def delayed(store: BlobStore) -> BlobStore:
    """A store whose reads end later, and in another thread."""
    return DelayingBlobStore(store, lambda: 0.0002)
