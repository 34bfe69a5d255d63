"""What the store lets go of when the index finds rows of its own damaged while it is open."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import small_local_engine

SIZE_BYTES = 16 * KIB
# Another process changes the store's own map of the index, as a device would that rots.
DAMAGE = """
import lmdb, sys
folder, name, *keys = sys.argv[1:]
with lmdb.open(folder, max_dbs=10, map_size=int(keys.pop(0))) as environment:
    database = environment.open_db(name.encode())
    with environment.begin(write=True) as txn:
        for key, value in list(txn.cursor(database)):
            if any(wanted.encode() in key + value for wanted in keys):
                txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=database)
"""
INDEX_BYTES = 256 * MIB


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    opened = small_local_engine(tmp_path / "data", capacity_bytes=8 * MIB)
    opened.upkeep.close()  # rounds are run by hand
    opened.create_bucket(BUCKET)
    yield opened
    opened.close()


@pytest.fixture
def damage(tmp_path: Path) -> Callable[..., None]:
    """Damages the index's rows of some keys: of the database "objects" or "rows"."""

    def carry_out(database: str, *keys: str) -> None:
        arguments = [str(tmp_path / "data" / "index"), database, str(INDEX_BYTES), *keys]
        subprocess.run([sys.executable, "-c", DAMAGE, *arguments], check=True)

    return carry_out


def assert_counts_agree(engine: LocalEngine, keys: list[str], object_bytes: int) -> None:
    """Memory and index name the same, before and after the store is opened again."""
    status = engine.status()
    assert (status.objects, status.live_bytes) == (len(keys), object_bytes)
    assert engine.holdings.stored_bytes.get(1, 0) == object_bytes
    report = engine.check(False, lambda _: True)
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)
    assert report.objects == len(keys)


def prefix_keys(name: str, count: int) -> list[str]:
    return [f"{name}-{index:03}" for index in range(count)]


def put_prefix(engine: LocalEngine, keys: list[str]) -> None:
    """Chunks of one put, four to an extent."""
    prefix = engine.stage_prefix(BUCKET.name, PrefixShape(keys, 4, 4 * KIB, layerwise=False))
    prefix.write(0, memoryview(b"".join(content(key, SIZE_BYTES) for key in keys)))
    engine.commit([StagedPut(each, "") for each in prefix.staged], Condition(immutable=True))


@pytest.mark.parametrize("database", ["objects", "rows"])
def test_an_object_that_the_index_lost_gives_its_space_back(
    engine: LocalEngine, damage: Callable[..., None], database: str
) -> None:
    for key in ("kept", "lost", "last"):
        put(engine, key, content(key, SIZE_BYTES))
    damage(database, "lost")
    assert read(engine, "lost") in (None, content("lost", SIZE_BYTES))
    engine.check(False, lambda _: True)  # meets what a look-up by key does not
    with engine.index.reading() as view:  # which looks at the rows
        for number in range(3):
            view.name_of(number)
    engine.upkeep.round()
    assert read(engine, "lost") is None
    assert engine.damaged_count == 1
    assert engine.status().allocated_bytes == 2 * SIZE_BYTES
    assert_counts_agree(engine, ["kept", "last"], 2 * SIZE_BYTES)
    for key in ("lost", "more"):
        put(engine, key, content(key, SIZE_BYTES))
    for key in ("kept", "lost", "last", "more"):
        assert read(engine, key) == content(key, SIZE_BYTES)


def test_a_chunk_that_the_index_lost_leaves_its_neighbours_where_they_are(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    keys = prefix_keys("chunk", 4)
    put_prefix(engine, keys)
    damage("objects", keys[1])
    assert read(engine, keys[1]) is None
    for _ in range(2):
        engine.upkeep.round()
        assert_counts_agree(engine, [keys[0], *keys[2:]], 3 * SIZE_BYTES)
    assert engine.status().allocated_bytes == 4 * SIZE_BYTES
    engine.delete(BUCKET.name, keys)
    assert engine.status().allocated_bytes == 0


def test_a_put_over_a_damaged_row_counts_once(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    put(engine, "key", content("old", SIZE_BYTES))
    damage("objects", "key")
    put(engine, "key", content("new", SIZE_BYTES))
    engine.upkeep.round()
    assert read(engine, "key") == content("new", SIZE_BYTES)
    assert engine.status().allocated_bytes == SIZE_BYTES
    assert_counts_agree(engine, ["key"], SIZE_BYTES)


def test_lost_chunks_do_not_keep_a_full_store_from_evicting(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    put_prefix(engine, prefix_keys("oldest", 4))
    put_prefix(engine, prefix_keys("old", 508))  # with which it is full
    damage("rows", "oldest")
    put_prefix(engine, prefix_keys("new", 4))
    assert engine.match(BUCKET.name, prefix_keys("new", 4)) == 4


def test_a_repair_that_meets_damaged_rows_counts_right(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    for key in ("kept", "lost", "last"):
        put(engine, key, content(key, SIZE_BYTES))
    damage("objects", "lost")
    report = engine.check(True, lambda _: True)
    assert (report.damaged, report.dropped) == (1, 1)
    assert engine.status().allocated_bytes == 2 * SIZE_BYTES
    engine.delete(BUCKET.name, ["last"])
    large = content("large", MIB + SIZE_BYTES)  # its second run is the lost one's extent, again
    staged = engine.stage(BUCKET.name, "large", SIZE_BYTES)
    staged.write_at(0, memoryview(large)[:MIB])
    staged.write_at(MIB, memoryview(large)[MIB:])
    engine.commit([StagedPut(staged, "etag")])
    engine.upkeep.round()
    assert_counts_agree(engine, ["kept", "large"], SIZE_BYTES + len(large))
    assert read(engine, "large") == large


def test_a_repair_counts_the_neighbours_of_a_lost_chunk_right(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    keys = prefix_keys("chunk", 4)
    put_prefix(engine, keys)
    damage("objects", keys[0])
    engine.check(True, lambda _: True)
    engine.upkeep.round()
    engine.delete(BUCKET.name, keys[1:3])
    put_prefix(engine, prefix_keys("other", 4))
    assert read(engine, keys[3]) == content(keys[3], SIZE_BYTES)
    assert engine.status().allocated_bytes == 8 * SIZE_BYTES
