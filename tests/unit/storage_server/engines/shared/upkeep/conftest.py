"""Servers of one store, for the tests of their upkeep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import UpkeptServer


@pytest.fixture
def state() -> MemoryStoreState:
    return MemoryStoreState()


@pytest.fixture
def start(state: MemoryStoreState, tmp_path: Path) -> Iterator[Callable[..., UpkeptServer]]:
    """Starts one more server."""
    servers: list[UpkeptServer] = []

    def start_one(**settings: Any) -> UpkeptServer:
        server = UpkeptServer(state, tmp_path / f"{len(servers)}", **settings)
        servers.append(server)
        return server

    try:
        yield start_one
    finally:
        for server in servers:
            server.close()
