"""A storage server with a cache before its shared store, killed and started again under clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import objectcache
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.operators.engine_status import CacheStatus, EngineState, GetEngineStatus
from objectcache_storage_server.engines.stores.open_store import create_store
from tests.integration.served import wait_until
from tests.servers import RunningServer, running_server
from tests.storage_client import StorageClient

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=64 << 10, dtype="uint8", fingerprint="t"
)
CHUNKS_EACH = 8  # of a put, whose extent is one object of the store
CACHE = "storage.cache_bytes=48MiB"  # twelve of them
TIMEOUT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    address = f"file://{tmp_path / 'store'}"
    create_store(address)
    with running_server(tmp_path / "data", f"storage.engine={address}", CACHE) as running:
        yield running


class Prefixes:
    """A client that puts prefixes and fetches them."""

    def __init__(self, server: RunningServer) -> None:
        keys = server.credentials
        self.client = objectcache.Client(
            f"http://127.0.0.1:{server.port}",
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            timeout_s=TIMEOUT_S,
        )
        self.bucket = self.client.kv_bucket("kvs", LAYOUT, create=True)
        self.stored: list[int] = []

    def keys(self, number: int) -> list[str]:
        first = 16 * CHUNKS_EACH * number
        return self.bucket.chunk_keys(list(range(first, first + 16 * CHUNKS_EACH)))

    def chunks(self, number: int) -> Any:
        shape = (CHUNKS_EACH, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
        return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)

    def put(self, number: int) -> None:
        self.bucket.put(self.keys(number), self.chunks(number))
        self.stored.append(number)

    def is_right(self, number: int) -> bool:
        """Whether a prefix that was stored is fetched as it was."""
        chunks = self.chunks(number)
        with self.bucket.fetch(self.keys(number)) as delivery:
            return all(
                np.array_equal(delivery.wait_layer(layer), chunks[:, layer])
                for layer in range(LAYOUT.num_layers)
            )

    def wait_stored(self, more: int) -> None:
        enough = len(self.stored) + more
        wait_until(lambda: len(self.stored) >= enough, f"{more} more puts")

    def fetch_all(self) -> None:
        """Every put that was acknowledged is there."""
        for number in self.stored:
            assert self.is_right(number)


def cache_of(server: RunningServer) -> CacheStatus:
    with StorageClient(server.run_dir / "storage.sock") as client:
        shared = client.ask(GetEngineStatus(), EngineState).status.shared
    assert shared is not None
    assert shared.cache is not None
    return shared.cache


def wait_written(server: RunningServer, size_bytes: int) -> None:
    wait_until(lambda: cache_of(server).written_bytes >= size_bytes, "the cache is written")


def test_what_is_cached_is_read_again_after_a_restart_and_not_after_a_kill(
    server: RunningServer,
) -> None:
    prefixes = Prefixes(server)
    for number in range(3):
        prefixes.put(number)
    total_bytes = sum(prefixes.chunks(number).nbytes for number in prefixes.stored)
    wait_written(server, total_bytes)
    prefixes.fetch_all()
    found = cache_of(server)
    assert (found.hit_bytes, found.miss_bytes) == (total_bytes, 0)
    server.restart_storage()
    prefixes.fetch_all()
    found = cache_of(server)
    assert (found.hit_bytes, found.miss_bytes, found.written_bytes) == (total_bytes, 0, 0)
    server.kill_storage()
    server.restart_storage()
    assert cache_of(server).used_bytes == 0
    prefixes.fetch_all()
    wait_written(server, total_bytes)
    prefixes.fetch_all()
    found = cache_of(server)
    assert (found.hit_bytes, found.miss_bytes) == (total_bytes, total_bytes)


def test_a_server_that_is_killed_again_and_again_answers_no_wrong_byte(
    server: RunningServer,
) -> None:
    prefixes, stop = Prefixes(server), threading.Event()
    wrong: list[int] = []

    def converse() -> None:
        number = 0
        while not stop.is_set():
            try:
                prefixes.put(number)
                wrong.extend(each for each in prefixes.stored[-16:] if not prefixes.is_right(each))
            except ObjectCacheError:
                pass  # of a server that was killed
            number += 1

    thread = threading.Thread(target=converse)
    thread.start()
    try:
        for kills in range(3):
            prefixes.wait_stored(8)
            server.kill_storage()
            server.restart_storage()
            assert cache_of(server).failure == "", kills
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    prefixes.fetch_all()
    assert cache_of(server).damaged_objects == 0
