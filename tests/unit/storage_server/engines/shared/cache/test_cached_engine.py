"""An engine before whose store there is a cache: who is asked, and what is never answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectcache_schemas.errors import DamagedData, NotFound, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy, Verification
from objectcache_storage_server.engines.base import PrefixShape, Read, StagedPut
from objectcache_storage_server.engines.shared.cache.cache_file import FILE_NAME
from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.testing import FaultyStore
from tests.contract.engine_suite import BUCKET, content, put, read, read_range
from tests.contract.opened_engines.shared_engines import open_server

OBJECT_BYTES = 16 * KIB
SLOTS = 32
LAYERS, SLICE_BYTES = 4, 2 * KIB
KEYS = [f"chunk {number}" for number in range(8)]  # a layer is an object of the store
DATA = content("data", 3 * OBJECT_BYTES + 1000)


class CachedServer:
    """A server of a store, with a cache."""

    def __init__(self, state: MemoryStoreState, folder: Path, slots: int = SLOTS) -> None:
        self.folder = folder
        self.store = FaultyStore(MemoryStore(state))
        self.store.capabilities = replace(self.store.capabilities, object_bytes_max=OBJECT_BYTES)
        self.engine: SharedEngine = open_server(self.store, folder, cache_slots=slots)

    @property
    def cache(self) -> ExtentCache:
        """With all that it was to keep."""
        assert self.engine.cache is not None
        self.engine.cache.settle()
        return self.engine.cache

    @property
    def asked(self) -> int:
        """Batches of reads that the store was asked for."""
        return self.store.calls["begin_reads"]

    def rot(self) -> None:
        """Every 1000th byte of the cache's file is another one."""
        assert self.cache.status().used_bytes
        path = self.folder.with_name(f"{self.folder.name}-cache") / FILE_NAME
        data = bytearray(path.read_bytes())
        for position in range(0, len(data), 1000):
            data[position] ^= 1
        with path.open("r+b") as file:
            file.write(data)

    def put_prefix(self) -> None:
        shape = PrefixShape(KEYS, LAYERS, SLICE_BYTES, layerwise=False)
        prefix = self.engine.stage_prefix(BUCKET.name, shape)
        prefix.write(0, memoryview(b"".join(content(key, shape.chunk_bytes) for key in KEYS)))
        self.engine.commit([StagedPut(each, "") for each in prefix.staged])

    def layer(self, layer: int, count: int = len(KEYS)) -> bytes:
        """One layer of the first chunks."""
        with self.engine.open_many(BUCKET.name, KEYS[:count]) as opened:
            places = opened.placements()
            landing = bytearray(count * SLICE_BYTES)
            begin = places[0].base_bytes + layer * places[0].stride_bytes
            opened.read_many([Read(places[0].source, begin, len(landing), 0)], memoryview(landing))
        return bytes(landing)


def slices(layer: int, count: int = len(KEYS)) -> bytes:
    begin = layer * SLICE_BYTES
    return b"".join(
        content(key, LAYERS * SLICE_BYTES)[begin : begin + SLICE_BYTES] for key in KEYS[:count]
    )


Start = Callable[..., CachedServer]


@pytest.fixture
def state() -> MemoryStoreState:
    return MemoryStoreState()


@pytest.fixture
def start(state: MemoryStoreState, tmp_path: Path) -> Iterator[Start]:
    started: dict[str, CachedServer] = {}

    def start_one(name: str = "a", slots: int = SLOTS) -> CachedServer:
        """The server of this name, which is closed first if it runs."""
        if name in started:
            started.pop(name).engine.close()
        started[name] = CachedServer(state, tmp_path / name, slots)
        return started[name]

    yield start_one
    for each in started.values():
        each.store.release()
        each.engine.close()


@pytest.fixture
def server(start: Start) -> CachedServer:
    server = start()
    server.engine.create_bucket(BUCKET)
    return server


def test_what_a_server_has_put_it_reads_without_the_store(server: CachedServer) -> None:
    put(server.engine, "key", DATA)
    server.put_prefix()
    assert server.cache.status().written_bytes == len(DATA) + len(KEYS) * LAYERS * SLICE_BYTES
    asked = server.asked
    assert read(server.engine, "key") == DATA
    assert all(server.layer(each) == slices(each) for each in range(LAYERS))
    assert server.asked == asked
    assert server.cache.status().misses == 0


def test_what_another_has_put_is_asked_for_once(server: CachedServer, start: Start) -> None:
    server.put_prefix()
    other = start("b")
    assert other.layer(1, 5) == slices(1, 5)
    assert other.cache.status().written_bytes == 5 * SLICE_BYTES
    asked = other.asked
    assert other.layer(1, 5) == slices(1, 5)
    assert other.layer(1, 2) == slices(1, 2)
    assert other.asked == asked
    assert other.layer(1, 6) == slices(1, 6)  # one that was not read yet
    assert other.asked == asked + 1
    assert other.layer(1, 6) == slices(1, 6) == other.layer(1, 6)
    assert other.cache.status().damaged_objects == 0


def test_a_read_asks_the_store_for_the_objects_that_are_not_cached(
    server: CachedServer, start: Start
) -> None:
    put(server.engine, "key", DATA, block_bytes=1024)
    other = start("b")
    with other.engine.open_many(BUCKET.name, ["key"]) as opened:
        second = DATA[OBJECT_BYTES : 2 * OBJECT_BYTES]
        assert read_range(opened, 0, OBJECT_BYTES, OBJECT_BYTES) == second
        assert other.cache.status().misses == 1
        assert read_range(opened, 0, 0, len(DATA)) == DATA
    found = other.cache.status()
    assert (found.hits, found.misses) == (1, 4)


@pytest.mark.parametrize("verification", [Verification.FULL, Verification.SAMPLED])
def test_rot_in_the_cache_is_never_answered_where_blocks_are_compared(
    server: CachedServer, verification: Verification
) -> None:
    server.engine.set_policy(BUCKET.name, BucketPolicy(verification=verification))
    put(server.engine, "key", DATA, block_bytes=1024)
    server.put_prefix()
    server.rot()
    if verification is Verification.FULL:
        assert read(server.engine, "key") == DATA
        assert server.layer(2) == slices(2)
    else:
        for _ in range(40):  # each compares other blocks
            read(server.engine, "key")
        assert read(server.engine, "key") == DATA
    assert server.cache.status().damaged_objects > 0
    assert server.engine.damaged_count == 0
    read(server.engine, "key")  # of the store, which the cache keeps
    assert server.cache.status().used_bytes
    asked = server.asked
    assert read(server.engine, "key") == DATA
    assert server.asked == asked


def test_what_is_wrong_in_the_store_as_well_is_damaged(
    server: CachedServer, state: MemoryStoreState
) -> None:
    put(server.engine, "key", DATA)
    server.rot()
    for name in [name for name in state.objects if name.startswith("data/")]:
        server.store.flip(name, 3)
    with pytest.raises(DamagedData):
        read(server.engine, "key")
    assert read(server.engine, "key") is None


def test_what_does_not_match_is_never_kept(
    server: CachedServer, start: Start, state: MemoryStoreState
) -> None:
    server.engine.set_policy(BUCKET.name, BucketPolicy(verification=Verification.OFF))
    put(server.engine, "key", DATA)
    other = start("b")
    (first, *_) = [name for name in sorted(state.objects) if name.startswith("data/")]
    other.store.flip(first, 3, read_count=1)
    assert read(other.engine, "key") != DATA  # as the bucket wants it
    assert other.cache.status().written_bytes == 0
    assert read(other.engine, "key") == DATA


def test_what_is_deleted_is_gone_though_the_cache_has_it(
    server: CachedServer, start: Start
) -> None:
    put(server.engine, "key", DATA)
    other = start("b")
    assert read(other.engine, "key") == DATA
    with other.engine.open_many(BUCKET.name, ["key"]) as opened:
        server.engine.delete(BUCKET.name, ["key"])
        assert read(other.engine, "key") is None
        with pytest.raises(NotFound):
            other.engine.stat(BUCKET.name, "key")
        assert read_range(opened, 0, 0, len(DATA)) == DATA  # whoever had it open reads on
    put(server.engine, "key", DATA[::-1])
    assert read(other.engine, "key") == read(server.engine, "key") == DATA[::-1]


def test_a_put_that_is_given_up_is_not_there_and_goes_first(start: Start) -> None:
    server = start(slots=8)
    server.engine.create_bucket(BUCKET)
    put(server.engine, "kept", DATA)
    assert server.cache.status().used_bytes == 4 * OBJECT_BYTES
    assert read(server.engine, "kept") == DATA
    for seed in range(5):
        staged = server.engine.stage(BUCKET.name, "key")
        staged.write_at(0, memoryview(content(seed, len(DATA))))
        staged.discard()
        assert read(server.engine, "key") is None
        assert server.cache.status().used_bytes > 4 * OBJECT_BYTES
    asked = server.asked
    assert read(server.engine, "kept") == DATA
    assert server.asked == asked


def test_what_a_fenced_server_had_under_way_is_not_there(
    server: CachedServer, start: Start
) -> None:
    other = start("b")
    put(other.engine, "before", DATA)
    staged = other.engine.stage(BUCKET.name, "key")
    staged.write_at(0, memoryview(DATA[::-1]))
    fenced = other.engine.catalog.writer
    server.engine.catalog.change(lambda change: change.fence(fenced), server.engine.deadline_s())
    with pytest.raises(Unavailable):
        other.engine.commit([StagedPut(staged, "etag")])
    assert read(other.engine, "key") is None
    assert read(other.engine, "before") == DATA
    put(other.engine, "key", DATA)  # under its next number
    assert read(other.engine, "key") == read(server.engine, "key") == DATA


def test_reads_go_on_out_of_the_cache_while_the_store_is_away(server: CachedServer) -> None:
    server.engine.set_policy(BUCKET.name, BucketPolicy())
    put(server.engine, "key", DATA)
    with server.engine.open_many(BUCKET.name, ["key"]) as opened:
        assert server.cache.status().used_bytes
        server.store.hold()
        assert read_range(opened, 0, 0, len(DATA)) == DATA
        server.store.release()


def test_the_check_reads_the_store_and_not_the_cache(
    server: CachedServer, state: MemoryStoreState
) -> None:
    put(server.engine, "key", DATA)
    assert read(server.engine, "key") == DATA
    (first, *_) = [name for name in sorted(state.objects) if name.startswith("data/")]
    server.store.flip(first, 3)
    assert server.engine.check(False, lambda _: True).damaged == 1
    assert read(server.engine, "key") == DATA


def test_a_restart_keeps_the_cache(server: CachedServer, start: Start) -> None:
    put(server.engine, "key", DATA)
    assert server.cache.status().used_bytes
    again = start()
    assert read(again.engine, "key") == DATA
    assert again.asked == 0
    status = again.engine.status().shared
    assert status is not None
    assert status.cache is not None
    assert (status.cache.hits, status.cache.misses) == (4, 0)


def test_a_cache_that_is_too_small_for_a_prefix_answers_what_it_has(
    server: CachedServer, start: Start
) -> None:
    server.put_prefix()
    small = start("b", slots=2)
    for _ in range(3):
        assert all(small.layer(each) == slices(each) for each in range(LAYERS))
    assert small.cache.status().evicted_objects >= 2
