"""Servers that share one store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import Server

Opened = Callable[..., Server]


@pytest.fixture
def state() -> MemoryStoreState:
    """What the store holds."""
    return MemoryStoreState()


@pytest.fixture
def opened(state: MemoryStoreState, tmp_path: Path) -> Iterator[Opened]:
    """Opens servers on one store, by name."""
    servers: list[Server] = []

    def open_one(name: str, **arguments: object) -> Server:
        servers.append(Server(state, tmp_path / name, **arguments))  # type: ignore[arg-type]
        return servers[-1]

    yield open_one
    for server in servers:
        server.store.release()
        server.close()


@pytest.fixture
def one(opened: Opened) -> Server:
    return opened("one")


@pytest.fixture
def other(one: Server, opened: Opened) -> Server:
    return opened("other")
