"""One file per object below a data directory, and an SQLite catalog that says what the files are.

The plain reference engine. Rules:

- A put is durable in this order: the bytes, their files' names, the catalog. Only the catalog makes
  an object visible, and one transaction makes all objects of a commit visible together.
- A file is written once and never changed. An overwrite is another file; the old one is unlinked
  when the catalog no longer names it, and who has it open reads on.
- A file that no row names is removed when the engine opens, and a row whose file is missing or has
  another length is dropped then.
- Every byte that is read is checked against the checksum of its block. An object that fails is
  dropped from the catalog, that very version and no newer one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.catalog_engine import DamageCount
from objectcache_storage_server.engines.disk.data_folders import (
    owned_folder,
    raise_open_files_limit,
    sync_folder,
)
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.files.folder_blobs import FolderBlobStore
from objectcache_storage_server.engines.files.sqlite_catalog import SqliteCatalog


class FilesEngine(BlobEngine):
    """Objects as files, `open_objects_max` of them kept open for the next read.

    The constructor raises this process's limit on open files, recovers from a crash, and raises
    `Unavailable` where another process uses `data_dir` or it cannot be used.
    """

    def __init__(
        self, data_dir: Path, open_objects_max: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._data_dir = data_dir
        latch, damage = FlushLatch(), DamageCount()
        # Half is left for sockets, for puts, and for files that are held but no longer cached.
        open_objects_max = min(open_objects_max, raise_open_files_limit() // 2)
        with contextlib.ExitStack() as opened:
            with translated(f"create {data_dir}", data_dir):
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(data_dir.parent)
            opened.enter_context(owned_folder(data_dir, latch))
            catalog = SqliteCatalog(data_dir / "index.sqlite3", damage.add, latch)
            opened.callback(catalog.close)
            store = FolderBlobStore(data_dir / "objects", latch)
            opened.callback(store.close)
            with translated("flush the data directory", data_dir):
                sync_folder(data_dir)
            super().__init__("files", catalog, store, open_objects_max, latch, damage, clock)
            self._opened = opened.pop_all()

    def __repr__(self) -> str:
        return f"<FilesEngine {self._data_dir} {self._cache}>"

    def close(self) -> None:
        super().close()
        self._opened.close()
