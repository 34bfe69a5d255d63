"""Two servers of one shared store in memory, as far as their log goes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.fleet.shared_parts import SharedParts


@contextmanager
def two_servers(folder: Path) -> Generator[tuple[SharedParts, SharedParts]]:
    """Each with a log of its own, whose heartbeats come ten times a second."""
    state = MemoryStoreState()
    with ExitStack() as opened:
        parts: list[SharedParts] = []
        for name in ("first", "second"):
            store = opened.enter_context(closing(MemoryStore(state)))
            catalog = LogCatalog(store, folder / name, heartbeat_s=0.1)
            opened.callback(catalog.close)
            parts.append(opened.enter_context(closing(SharedParts(catalog))))
        yield parts[0], parts[1]
