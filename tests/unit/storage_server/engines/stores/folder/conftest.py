"""A store in a folder, and what the tests of its faults share."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.shared_store import ObjectRead, SharedStore


@pytest.fixture
def root() -> Iterator[Path]:
    """Where a store may be made."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="objectcache-test-", dir=memory if memory.is_dir() else None)
    yield Path(folder) / "shared"
    shutil.rmtree(folder)


@pytest.fixture
def open_store(root: Path) -> Iterator[Callable[[], FolderStore]]:
    """Opens handles, which are closed when the test ends."""
    opened: list[FolderStore] = []

    def open_store() -> FolderStore:
        opened.append(FolderStore(root, create=True))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def soon() -> float:
    """A deadline that a store which works meets."""
    return time.monotonic() + 60


def put(store: SharedStore, name: str, data: bytes) -> None:
    store.put(name, [memoryview(data)], soon())


def read(store: SharedStore, name: str, length_bytes: int) -> bytes:
    landing = bytearray(length_bytes)
    store.begin_reads([ObjectRead(name, 0, memoryview(landing))], soon()).result()
    return bytes(landing)
