"""The local engine's index: what is committed is found, also by number, after a restart, or rot."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from objectcache_schemas.errors import InvalidRequest, NotFound, StorageFull, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.key_order import key_hash
from objectcache_storage_server.engines.lmdb_spaces.long_keys import DIRECT_BYTES
from objectcache_storage_server.engines.local.index.index_errors import translated_index
from objectcache_storage_server.engines.local.index.lmdb_index import (
    USES_ROWS,
    IndexChange,
    LocalIndex,
)
from objectcache_storage_server.engines.local.records import Version, VersionName
from objectcache_storage_server.engines.local.space.dense_tables import (
    EXTENT_COLUMNS,
    OBJECT_COLUMNS,
    DenseTable,
)
from tests.unit.examples import examples

BYTES_MAX = 64 * MIB
Rows = npt.NDArray[np.void]


class Store:
    """An index in a folder, with what it reported."""

    def __init__(self, folder: Path, bytes_max: int = BYTES_MAX) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self.damaged: list[str] = []
        self.flush_latch = FlushLatch()
        self.index = self.opened()

    def opened(self) -> LocalIndex:
        return LocalIndex(
            self.folder,
            self.bytes_max,
            lambda key, reason: self.damaged.append(key),
            self.flush_latch,
        )

    def reopen(self) -> None:
        self.index.close()
        self.index = self.opened()

    def add_bucket(self, name: str = "bucket") -> int:
        with self.index.writing() as change:
            return change.add_bucket(bucket_info(name))

    def add(self, versions: Sequence[Version]) -> int:
        with self.index.writing() as change:
            change.add(versions, rows_of(versions))
            return change.serial

    def versions(self, bucket: int, keys: Sequence[str]) -> dict[str, Version]:
        with self.index.reading() as view:
            return view.versions(bucket, keys)

    def keys(self, bucket: int) -> list[str]:
        with self.index.reading() as view:
            return [info.key for info in view.scan(bucket, "", "", 10**6)]

    def objects(self) -> DenseTable:
        table = DenseTable(OBJECT_COLUMNS)
        with self.index.reading() as view:
            view.load_objects(table)
            view.load_uses(table)
        return table

    def change_raw(self, name: str, action: Callable[[dict[bytes, bytes]], None]) -> None:
        """Change a database behind the index's back."""
        self.index.close()
        with lmdb.open(str(self.folder), max_dbs=10) as environment:
            database = environment.open_db(name.encode())
            with environment.begin(write=True) as txn:
                before = dict(txn.cursor(database))
                after = dict(before)
                action(after)
                for key in before.keys() - after.keys():
                    txn.delete(key, db=database)
                for key, value in after.items():
                    txn.put(key, value, db=database)
        self.index = self.opened()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "index")
    yield opened
    opened.index.close()


def bucket_info(name: str) -> BucketInfo:
    return BucketInfo(name=name, owner="o", region="r", created_s=1.0)


def version(bucket: int, key: str, number: int, size_bytes: int = 10) -> Version:
    info = ObjectInfo(key=key, size_bytes=size_bytes, etag=f"tag {key}", modified_s=number + 0.5)
    checksums = array("Q", [number, key_hash(bucket, key)])
    return Version(bucket, info, number, 0, 5, checksums, (number // 4,), number % 4, True, 0)


def versions_of(bucket: int, keys: Sequence[str], first: int = 0) -> list[Version]:
    return [version(bucket, key, first + number) for number, key in enumerate(keys)]


def rows_of(versions: Sequence[Version]) -> Rows:
    rows = np.zeros(len(versions), OBJECT_COLUMNS)
    for row, each in zip(rows, versions, strict=True):
        row["is_used"] = True
        row["is_evictable"] = each.is_evictable
        row["bucket"], row["slot"] = each.bucket_number, each.slot
        row["extent"] = each.extents[0]
        row["own_hash"] = key_hash(each.bucket_number, each.info.key)
        row["size_bytes"], row["modified_s"] = each.info.size_bytes, each.info.modified_s
    return rows


def flip_bit(stored: bytes, position: int = -1) -> bytes:
    changed = bytearray(stored)
    changed[position] ^= 4
    return bytes(changed)


# --- buckets ---


def test_buckets_are_found_by_name_and_listed_in_its_order(store: Store) -> None:
    numbers = {name: store.add_bucket(name) for name in ("b", ".hidden", "a")}
    store.reopen()
    with store.index.reading() as view:
        assert [row.info.name for row in view.bucket_rows()] == [".hidden", "a", "b"]
        assert [info.name for info in view.buckets()] == ["a", "b"]
        assert [info.name for info in view.buckets(limit=1)] == ["a"]
        assert [info.name for info in view.buckets("a")] == ["b"]
        assert view.buckets("b") == []
        assert {row.info.name: row.number for row in view.bucket_rows()} == numbers
        assert view.bucket("a").info == bucket_info("a")
        assert view.find_bucket("c") is None
        assert view.find_bucket("n" * 600) is None
        with pytest.raises(NotFound, match="'c'") as caught:
            view.bucket("c")
    assert caught.value.code == "NoSuchBucket"


def test_a_bucket_number_is_never_given_out_again(store: Store) -> None:
    seen = [store.add_bucket("a"), store.add_bucket("b")]
    with store.index.writing() as change:
        change.remove_bucket(seen[1])
        assert change.find_bucket("b") is None
    store.reopen()
    assert store.add_bucket("b") not in seen


def test_a_changed_bucket_keeps_its_number(store: Store) -> None:
    number = store.add_bucket("a")
    changed = BucketInfo(name="a", owner="o", region="r", created_s=2.0)
    with store.index.writing() as change:
        change.replace_bucket(number, changed)
    with store.index.reading() as view:
        row = view.bucket("a")
    assert (row.number, row.info) == (number, changed)


# --- objects ---


def test_what_is_added_is_found_with_the_serial_of_its_commit(store: Store) -> None:
    bucket = store.add_bucket()
    added = versions_of(bucket, ["b", "a", "é" * 500])
    rows = rows_of(added)
    with store.index.writing() as change:
        change.add(added, rows)
    expected = {each.info.key: replace(each, serial=change.serial) for each in added}
    assert rows["serial"].tolist() == [change.serial] * 3
    store.reopen()
    assert store.versions(bucket, ["b", "c", "a", "é" * 500]) == expected
    assert store.objects().used["serial"].tolist() == [change.serial] * 3
    assert store.versions(bucket + 1, ["a"]) == {}


def test_serials_grow_also_over_restarts(store: Store) -> None:
    bucket = store.add_bucket()
    serials = []
    for number in range(3):
        serials.append(store.add([version(bucket, f"{number}", number)]))
        store.reopen()
    assert serials == sorted(set(serials))


def test_a_replaced_version_leaves_its_number(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    store.add([version(bucket, "a", 7)])
    with store.index.reading() as view:
        assert view.name_of(0) is None
        assert view.name_of(1) == (bucket, "b")
        assert view.name_of(7) == (bucket, "a")
    assert np.flatnonzero(store.objects().used["is_used"]).tolist() == [1, 7]


def test_only_the_very_version_is_deleted(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    old = store.versions(bucket, ["a"])["a"]
    store.add([version(bucket, "a", 5)])
    current = store.versions(bucket, ["a", "b"])
    with store.index.writing() as change:
        assert change.delete([old.name, VersionName(bucket, "c", 1)]) == []
        assert change.delete([current["b"].name, current["b"].name]) == [current["b"]]
    assert store.keys(bucket) == ["a"]
    assert len(store.objects()) == 1


def test_a_version_moves_unless_it_is_gone(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    old = store.versions(bucket, ["a"])["a"]
    elsewhere = replace(old, number=9, extents=(33,), slot=2, serial=0)
    row = rows_of([elsewhere])
    with store.index.writing() as change:
        assert change.move(old.name, elsewhere, row)
        assert not change.move(old.name, elsewhere, rows_of([elsewhere])[0])
    assert store.versions(bucket, ["a"])["a"] == replace(elsewhere, serial=change.serial)
    objects = store.objects().used
    assert np.flatnonzero(objects["is_used"]).tolist() == [1, 9]
    assert objects[9]["extent"] == 33
    assert objects[9]["serial"] == row["serial"][0] == change.serial


def test_an_error_undoes_the_whole_transaction(store: Store) -> None:
    bucket = store.add_bucket()

    def fail() -> None:
        with store.index.writing() as change:
            change.add(versions_of(bucket, ["a"]), rows_of(versions_of(bucket, ["a"])))
            change.add_bucket(bucket_info("other"))
            assert change.versions(bucket, ["a"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.keys(bucket) == []
    with store.index.reading() as view:
        assert [info.name for info in view.buckets()] == ["bucket"]


def test_a_view_sees_the_commits_at_its_begin(store: Store) -> None:
    bucket = store.add_bucket()
    with store.index.reading() as view:
        store.add(versions_of(bucket, ["a"]))
        assert view.is_empty(bucket)
        assert view.match(bucket, ["a"]) == 0
    with store.index.reading() as view:
        assert view.match(bucket, ["a"]) == 1


def test_match_counts_leading_keys_and_looks_no_further(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["0", "1", "3"]))
    looked_at: list[int] = []

    class Keys(Sequence[str]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> str:  # type: ignore[override]
            looked_at.append(index)
            return str(index)

    with store.index.reading() as view:
        assert view.match(bucket, Keys()) == 2
        assert view.match(bucket, ["3", "1"]) == 2
        assert view.match(bucket, []) == 0
    assert max(looked_at) == 2


def test_a_key_of_another_size_is_found(store: Store) -> None:
    bucket = store.add_bucket()
    store.add([version(bucket, "a", 0, 10), version(bucket, "b", 1, 20)])
    with store.index.reading() as view:
        assert view.key_of_other_size(bucket, 10) == "b"
        assert view.key_of_other_size(bucket, 20) == "a"
        assert view.key_of_other_size(bucket + 1, 10) is None


def test_text_that_is_not_unicode_is_the_callers_fault(store: Store) -> None:
    with store.index.reading() as view, pytest.raises(InvalidRequest, match="not valid Unicode"):
        view.versions(1, ["\ud800"])


def test_deleting_the_last_long_key_leaves_nothing_behind(store: Store) -> None:
    bucket = store.add_bucket()
    beginning = "a" * DIRECT_BYTES
    keys = [beginning, beginning * 2, beginning * 2 + "c", beginning + "b"]
    store.add(versions_of(bucket, keys))
    assert store.keys(bucket) == keys
    for left in (keys[:-1], keys[:1], []):
        gone = store.versions(bucket, sorted(set(store.keys(bucket)) - set(left)))
        with store.index.writing() as change:
            change.delete(each.name for each in gone.values())
        assert store.keys(bucket) == left
    with store.index.reading() as view:
        assert view.is_empty(bucket)
    store.change_raw("objects", lambda stored: None if not stored else pytest.fail(str(stored)))


# --- tables ---


def test_pins_are_stored_with_the_rows(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b", "c"]))
    with store.index.writing() as change:
        change.set_pinned([0, 2, 99], True)
    with store.index.writing() as change:
        change.set_pinned([2], False)
    store.reopen()
    assert store.objects().used["is_pinned"].tolist() == [True, False, False]
    with store.index.reading() as view:
        assert view.name_of(0) == (bucket, "a")


def test_uses_are_stored_by_blocks(store: Store) -> None:
    bucket = store.add_bucket()
    numbers = [0, USES_ROWS - 1, USES_ROWS, 3 * USES_ROWS + 1]
    store.add([version(bucket, f"{number}", number) for number in numbers])
    table = store.objects()
    table.rows["last_used"][numbers] = [4, 5, 6, 7]
    table.rows["parent_hash"][numbers] = [1, 2, 3, 4]
    with store.index.writing(durable=False) as change:
        for block in (0, 1, 3):
            change.store_uses(table, block)
    store.reopen()
    again = store.objects().used
    assert again["last_used"][numbers].tolist() == [4, 5, 6, 7]
    assert again["parent_hash"][numbers].tolist() == [1, 2, 3, 4]


def test_extents_and_what_is_unflushed_of_them_come_back(store: Store) -> None:
    rows = np.zeros(3, EXTENT_COLUMNS)
    rows["slots"], rows["num_layers"], rows["slice_bytes"] = [1, 2, 16], [3, 4, 5], [6, 7, 8]
    rows["offset_bytes"], rows["length_bytes"] = [2**40, 0, 4096], [4096, 8192, 2**33]
    rows["readers"], rows["heat"], rows["live_slots"] = 5, 2.5, 1
    rows["codec"], rows["is_encoded"] = [1, 2, 0], [False, True, False]
    with store.index.writing() as change:
        change.add_extents([4, 0, 9], rows, {0: (64, 128, 192, 64)})
        change.mark_unflushed([4, 9, 0])
    with store.index.writing() as change:
        change.unmark_unflushed([0])
        change.remove_extents([9])
    store.reopen()
    table = DenseTable(EXTENT_COLUMNS)
    with store.index.reading() as view:
        assert view.load_extents(table) == {0: (64, 128, 192, 64)}
        assert view.unflushed() == [4]
    expected = rows[:2].copy()
    for column in ("readers", "heat", "live_slots"):
        expected[column] = 0
    expected["is_used"] = True
    assert table.used[[4, 0]].tolist() == expected.tolist()
    assert [table.add() for _ in range(4)] == [1, 2, 3, 5]


# --- rot ---


def test_a_damaged_record_counts_as_missing_and_is_dropped_with_its_row(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b", "c"]))
    raw = bucket.to_bytes(4, "big") + b"b"
    store.change_raw("objects", lambda stored: stored.update({raw: flip_bit(stored[raw])}))
    assert sorted(store.versions(bucket, ["a", "b", "c"])) == ["a", "c"]
    assert store.damaged == ["b"]
    assert store.keys(bucket) == ["a", "c"]
    assert len(store.objects()) == 2
    assert store.damaged == ["b"]


@pytest.mark.parametrize("look_up", ["scan", "delete", "add", "every_version"])
def test_every_look_up_notices_a_damaged_record(store: Store, look_up: str) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    name = store.versions(bucket, ["b"])["b"].name
    raw = bucket.to_bytes(4, "big") + b"b"
    store.change_raw("objects", lambda stored: stored.update({raw: flip_bit(stored[raw])}))
    if look_up == "scan":
        assert store.keys(bucket) == ["a"]
    elif look_up == "every_version":
        with store.index.reading() as view:
            assert [each.info.key for each in view.every_version(None, 10)] == ["a"]
    elif look_up == "delete":
        assert store.index.change_with_reserve(lambda change: change.delete([name])) == []
    else:
        store.add([version(bucket, "b", 8)])
        assert store.keys(bucket) == ["a", "b"]
    assert store.damaged == ["b"]
    numbers = [0, 8] if look_up == "add" else [0]
    assert np.flatnonzero(store.objects().used["is_used"]).tolist() == numbers


def test_a_record_under_another_key_is_noticed(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    head = bucket.to_bytes(4, "big")
    store.change_raw("objects", lambda stored: stored.update({head + b"b": stored[head + b"a"]}))
    assert list(store.versions(bucket, ["a", "b"])) == ["a"]
    assert store.damaged == ["b"]


def test_an_object_with_a_damaged_row_is_dropped_when_the_table_is_loaded(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b", "c"]))
    raw = (1).to_bytes(4, "big")
    store.change_raw("rows", lambda stored: stored.update({raw: flip_bit(stored[raw])}))
    table = store.objects()
    assert np.flatnonzero(table.used["is_used"]).tolist() == [0, 2]
    assert table.add() == 1
    assert store.damaged == ["b"]
    assert store.keys(bucket) == ["a", "c"]
    store.reopen()
    assert len(store.objects()) == 2
    assert store.damaged == ["b"]


def test_a_row_under_another_number_is_noticed(store: Store) -> None:
    bucket = store.add_bucket()
    store.add(versions_of(bucket, ["a", "b"]))
    one, two = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
    store.change_raw("rows", lambda stored: stored.update({two: stored[one]}))
    with store.index.reading() as view:
        assert view.name_of(1) is None
        assert view.name_of(0) == (bucket, "a")


def test_a_damaged_extent_is_dropped(store: Store) -> None:
    with store.index.writing() as change:
        change.add_extents([0, 1], np.zeros(2, EXTENT_COLUMNS))
    raw = (1).to_bytes(4, "big")
    store.change_raw("extents", lambda stored: stored.update({raw: flip_bit(stored[raw], 0)}))
    for _ in range(2):
        table = DenseTable(EXTENT_COLUMNS)
        with store.index.reading() as view:
            view.load_extents(table)
        assert np.flatnonzero(table.used["is_used"]).tolist() == [0]
    assert store.damaged == ["extent 1"]


def test_a_damaged_pointer_hides_its_keys_until_they_are_stored_again(store: Store) -> None:
    bucket = store.add_bucket()
    keys = ["a", "b" * DIRECT_BYTES + "long", "c"]
    store.add(versions_of(bucket, keys))

    def damage(stored: dict[bytes, bytes]) -> None:
        pointer = max(stored, key=len)
        stored[pointer] = flip_bit(stored[pointer])

    store.change_raw("objects", damage)
    assert store.keys(bucket) == ["a", "c"]
    assert sorted(store.versions(bucket, keys)) == ["a", "c"]
    store.add([version(bucket, keys[1], 9)])
    assert store.keys(bucket) == keys


def test_a_damaged_bucket_makes_the_index_unavailable(store: Store) -> None:
    store.add_bucket("a")
    store.change_raw("buckets", lambda stored: stored.update({b"a": flip_bit(stored[b"a"])}))
    with store.index.reading() as view, pytest.raises(Unavailable, match="index is damaged"):
        view.bucket("a")


def test_another_format_is_refused(store: Store) -> None:
    with pytest.raises(Unavailable, match="format 99, not 1"):
        store.change_raw("meta", lambda stored: stored.update({b"format": b"99"}))


def test_a_file_that_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(range(256)) * 64)
    with pytest.raises(Unavailable, match="index is damaged") as caught:
        Store(tmp_path)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("left", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_an_index_that_lost_its_end_never_ends_the_process(store: Store, left: float) -> None:
    bucket = store.add_bucket()
    keys = [f"{number:05}" for number in range(2000)]
    store.add(versions_of(bucket, keys))
    store.index.close()
    path = store.folder / "data.mdb"
    os.truncate(path, int(path.stat().st_size * left))
    found = -1
    with contextlib.suppress(Unavailable), contextlib.closing(store.opened()) as cut:
        found = 0
        with cut.reading() as view:
            found = len(view.versions(bucket, keys))
    assert found < len(keys)


# --- the folder, threads, restarts ---


def test_nobody_else_may_read_the_index(store: Store) -> None:
    store.add_bucket()
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    for name in ("data.mdb", "lock.mdb"):
        assert stat.S_IMODE((store.folder / name).stat().st_mode) == 0o600


def test_a_closed_index_says_so(store: Store) -> None:
    store.index.close()
    store.index.close()
    with pytest.raises(Unavailable, match="closed"), store.index.reading():
        pass
    with pytest.raises(Unavailable, match="closed"), store.index.writing():
        pass


def test_what_was_committed_survives_the_end_of_the_process(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from tests.unit.storage_server.engines.local.index.test_local_index import rows_of, versions_of
from tests.unit.storage_server.engines.local.index.test_local_index import Store
store = Store(Path(sys.argv[1]))
bucket = store.add_bucket()
store.add(versions_of(bucket, ["sync"]))
with store.index.writing(durable=False) as change:
    added = versions_of(bucket, ["async"], 1)
    change.add(added, rows_of(added))
with store.index.writing() as change:
    change.add(versions_of(bucket, ["open"], 2), rows_of(versions_of(bucket, ["open"], 2)))
    os._exit(9)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 9
    store = Store(tmp_path)
    assert store.keys(1) == ["async", "sync"]
    assert len(store.objects()) == 2
    store.index.close()


def test_readers_see_whole_commits_while_others_write(store: Store) -> None:
    bucket = store.add_bucket()
    batches, keys_each, writers = 15, 6, 3
    torn: list[list[str]] = []
    ended = threading.Event()

    def write(writer: int) -> None:
        for batch in range(batches):
            first = (writer * batches + batch) * keys_each
            keys = [f"{writer} {batch:02} {index}" for index in range(keys_each)]
            store.add(versions_of(bucket, keys, first))

    def read() -> None:
        while not ended.is_set():
            keys = store.keys(bucket)
            if len(keys) % keys_each:
                torn.append(keys)

    writing = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    reading = [threading.Thread(target=read) for _ in range(2)]
    for thread in writing + reading:
        thread.start()
    for thread in writing:
        thread.join()
    ended.set()
    for thread in reading:
        thread.join()
    assert torn == []
    assert len(store.keys(bucket)) == len(store.objects()) == batches * keys_each * writers


# --- no room ---


def fill(store: Store, bucket: int, name: str, count: int, first: int = 0) -> list[str]:
    """Add batches until there is no room; returns the keys that were acknowledged."""
    stored: list[str] = []
    while True:
        keys = [f"{name} {len(stored) + index:07}" for index in range(count)]
        try:
            added = versions_of(bucket, keys, first + len(stored))
            store.add([replace(each, checksums=array("Q", range(200))) for each in added])
        except StorageFull:
            return stored
        stored += keys


def delete_all(store: Store, bucket: int, keys: Sequence[str]) -> int:
    def action(change: IndexChange) -> int:
        names = [each.name for each in change.versions(bucket, keys).values()]
        return len(change.delete(names))

    return store.index.change_with_reserve(action)


def test_a_full_index_takes_deletes_and_then_puts_again(tmp_path: Path) -> None:
    store = Store(tmp_path, bytes_max=4 * MIB)
    bucket = store.add_bucket()
    stored = fill(store, bucket, "many", 500)
    stored += fill(store, bucket, "few", 100, len(stored))
    assert len(stored) > 500
    with pytest.raises(StorageFull, match=r"storage\.index_bytes_max"):
        store.add(versions_of(bucket, [f"x{n}" for n in range(2000)], 10**6))
    assert store.keys(bucket) == sorted(stored)
    gone = stored[:300]
    assert delete_all(store, bucket, gone) == len(gone)
    store.add(versions_of(bucket, ["again"], 10**6))
    store.reopen()
    assert store.keys(bucket) == sorted(["again", *stored[300:]])
    assert len(store.objects()) == len(stored) - 300 + 1
    store.index.close()


@pytest.fixture
def small_device() -> Iterator[Path]:
    """A file system of 24 MiB, not below pytest's own folders, which pytest removes itself."""
    folder = Path(tempfile.mkdtemp(prefix="objectcache-small-device-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def test_a_full_device_refuses_puts_and_takes_deletes(small_device: Path) -> None:
    store = Store(small_device / "index", bytes_max=256 * MIB)
    bucket = store.add_bucket()
    stored = fill(store, bucket, "many", 1000)
    stored += fill(store, bucket, "few", 100, len(stored))
    with pytest.raises(StorageFull, match="delete objects or add space"):
        store.add(versions_of(bucket, [f"x{n}" for n in range(4000)], 10**6))
    assert store.keys(bucket) == sorted(stored)
    gone = random.Random(1).sample(stored, 1000)
    assert delete_all(store, bucket, gone) == len(gone)
    left = sorted(set(stored) - set(gone))
    assert store.keys(bucket) == left
    store.reopen()
    assert store.keys(bucket) == left
    assert len(store.objects()) == len(left)
    store.index.close()


@pytest.mark.parametrize("room_bytes", [4 * KIB, 16 * KIB])  # LMDB's SIGBUS, and its EIO
def test_an_index_is_not_begun_on_a_full_device(small_device: Path, room_bytes: int) -> None:
    with (small_device / "other").open("wb") as other, contextlib.suppress(OSError):
        os.posix_fallocate(other.fileno(), 0, 24 * MIB - 8 * KIB - room_bytes)
    with pytest.raises(StorageFull, match=r"^open the index: No space left on device; delete"):
        Store(small_device / "index", bytes_max=256 * MIB)


def test_a_write_that_ended_early_on_a_full_device_is_told_as_no_space(
    small_device: Path,
) -> None:
    (small_device / "other").write_bytes(bytes(24 * MIB - 64 * KIB))
    ended_early = lmdb.Error("mdb_txn_commit: Input/output error")
    vars(ended_early)["code"] = errno.EIO  # as LMDB says it
    with (
        pytest.raises(StorageFull, match=r"^write the index: No space left on device; delete"),
        translated_index("write", small_device),
    ):
        raise ended_early


# --- a model ---


class IndexAgrees(RuleBasedStateMachine):
    """What the index holds is what a dictionary of versions holds."""

    buckets = st.integers(1, 3)
    keys = st.sampled_from(
        [
            "a",
            "a/b",
            "\ud7ff",
            "\U0010ffff",
            "a" * DIRECT_BYTES,
            "a" * (DIRECT_BYTES - 1) + "é",
            "a" * (DIRECT_BYTES + 1),
            "a" * 2 * DIRECT_BYTES,
            "a" * 2 * DIRECT_BYTES + "b",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="objectcache-index-")
        self.store = Store(Path(self.folder.name))
        self.model: dict[tuple[int, str], Version] = {}
        self.next_number = 0

    def teardown(self) -> None:
        self.store.index.close()
        self.folder.cleanup()

    @rule(bucket=buckets, keys=st.sets(keys, min_size=1, max_size=4))
    def add(self, bucket: int, keys: set[str]) -> None:
        added = versions_of(bucket, sorted(keys), self.next_number)
        self.next_number += len(added)
        serial = self.store.add(added)
        for each in added:
            self.model[bucket, each.info.key] = replace(each, serial=serial)

    @rule(bucket=buckets, keys=st.sets(keys, max_size=4))
    def delete(self, bucket: int, keys: set[str]) -> None:
        there = keys & {key for number, key in self.model if number == bucket}
        assert delete_all(self.store, bucket, sorted(keys)) == len(there)
        for key in there:
            del self.model[bucket, key]

    @rule(bucket=buckets, key=keys)
    def move(self, bucket: int, key: str) -> None:
        old = self.model.get((bucket, key))
        name = old.name if old else VersionName(bucket, key, 1)
        moved = version(bucket, key, self.next_number)
        self.next_number += 1
        with self.store.index.writing(durable=False) as change:
            assert change.move(name, moved, rows_of([moved])) == (old is not None)
        if old is not None:
            self.model[bucket, key] = replace(moved, serial=change.serial)

    @rule()
    def reopen(self) -> None:
        self.store.reopen()

    @rule(bucket=buckets, prefix=keys, start_after=st.just("") | keys, limit=st.integers(0, 4))
    def scan(self, bucket: int, prefix: str, start_after: str, limit: int) -> None:
        with self.store.index.reading() as view:
            found = view.scan(bucket, prefix[:-1], start_after, limit)
        after = start_after.encode()
        expected = [
            each.info
            for each in self.sorted_model()
            if each.bucket_number == bucket
            and each.info.key.startswith(prefix[:-1])
            and (not after or each.info.key.encode() > after)
        ]
        assert found == expected[:limit]

    def sorted_model(self) -> list[Version]:
        return sorted(
            self.model.values(), key=lambda each: (each.bucket_number, each.info.key.encode())
        )

    @invariant()
    def all_versions_agree(self) -> None:
        expected = self.sorted_model()
        with self.store.index.reading() as view:
            assert view.every_version(None, 100) == expected
            for position, each in enumerate(expected):
                after = (each.bucket_number, each.info.key)
                assert view.every_version(after, 2) == expected[position + 1 : position + 3]
                assert view.name_of(each.number) == after
            for bucket in range(1, 4):
                mine = {key: each for (number, key), each in self.model.items() if number == bucket}
                assert view.versions(bucket, [*mine, "other"]) == mine
                assert view.match(bucket, [*mine, "other", *mine]) == len(mine)
                assert view.is_empty(bucket) == (not mine)

    @invariant()
    def the_table_agrees(self) -> None:
        table = self.store.objects()
        assert len(table) == len(self.model)
        for each in self.model.values():
            row = table.rows[each.number]
            expected = rows_of([each])[0]
            expected["serial"] = each.serial
            assert row == expected


TestIndexAgrees = IndexAgrees.TestCase
TestIndexAgrees.settings = settings(max_examples=examples(7), stateful_step_count=12, deadline=None)
