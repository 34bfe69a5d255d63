"""The store in RADOS where there is no space: puts are refused at once, all else works on."""

from __future__ import annotations

import itertools
from contextlib import suppress

from objectcache_schemas.errors import StorageFull
from objectcache_storage_server.engines.stores.rados.rados_store import RadosStore
from tests.ceph import CephCluster
from tests.contract.engine_suite import content
from tests.rados.conftest import Open, within

MIB = 1 << 20
RATIOS = {"nearfull": "0.85", "backfillfull": "0.90", "full": "0.95"}


def fill(store: RadosStore) -> int:
    """Put objects until one is refused; how many there are."""
    for count in itertools.count():
        try:
            store.put(f"w/{count}", [memoryview(content(count, 2 * MIB))], within())
        except StorageFull:
            return count
    raise AssertionError


def check_full(store: RadosStore, other: RadosStore, count: int, appended: int) -> None:
    """What must work on in a store that is full, in which objects and records are."""
    assert other.get("w/0", within()) == content(0, 2 * MIB)
    record = content("deletion", 10_000)
    for number in range(appended, appended + 20):
        assert store.append(number, record, within()), number
    assert other.read_log(appended, MIB, within()) == [record] * 20
    assert len(list(other.list_objects("w/", within()))) == count
    store.delete([f"w/{count - 1}"], within())
    assert len(list(other.list_objects("w/", within()))) == count - 1
    store.trim_log(appended, within())


def put_when_possible(store: RadosStore) -> None:
    """There is space again: the monitor tells of it in a while."""
    while True:
        try:
            store.put("w/again", [memoryview(b"again")], within())
            return
        except StorageFull:
            continue


def test_where_the_quota_is_reached_records_and_deletions_go_on(
    cluster: CephCluster, open_store: Open
) -> None:
    pool = cluster.create_pool()
    store, other = open_store(pool), open_store(pool)
    cluster.tell("osd", "pool", "set-quota", pool, "max_bytes", str(64 * MIB))
    check_full(store, other, fill(store), 0)
    # The log's reserve is finite: no segment can be made, and the head can be filled but once.
    number, record = 20, content("large", MIB)
    with suppress(StorageFull):
        while store.append(number, record, within()):
            number += 1
    assert number > 20 + 8
    cluster.tell("osd", "pool", "set-quota", pool, "max_bytes", "0")
    put_when_possible(store)
    assert other.append(number, b"last", within())
    found = other.read_log(0, 1 << 30, within())
    assert len(found) == number + 1
    assert found[20:] == [record] * (number - 20) + [b"last"]
    cluster.remove_pool(pool)


def test_where_osds_are_full_records_and_deletions_go_on(
    cluster: CephCluster, open_store: Open
) -> None:
    pool = cluster.create_pool()
    store, other = open_store(pool), open_store(pool)
    store.put("w/0", [memoryview(content(0, 2 * MIB))], within())
    assert store.append(0, b"record", within())
    try:
        for name, ratio in zip(RATIOS, ("0.001", "0.002", "0.003"), strict=True):
            cluster.tell("osd", f"set-{name}-ratio", ratio)
        check_full(store, other, fill(store), 1)
    finally:
        for name, ratio in reversed(RATIOS.items()):
            cluster.tell("osd", f"set-{name}-ratio", ratio)
    put_when_possible(store)
    cluster.remove_pool(pool)
