"""A shared folder on a file system that is really full."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.folder import folder_reserve
from objectcache_storage_server.engines.stores.folder.folder_reserve import RESERVE_BYTES
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.shared_store import SharedStore
from tests.contract.engine_suite import BUCKET, stored_keys
from tests.contract.engine_suite import put as engine_put
from tests.contract.opened_engines.shared_engines import open_server
from tests.unit.storage_server.engines.stores.folder.conftest import put, soon

SIZE_BYTES = 64 * MIB
RULES = UpkeepRules(evicts=False, grace_s=1.0, writer_lease_s=1.0)


@pytest.fixture
def indexes() -> Iterator[Path]:
    """Where servers keep their indexes: in memory, as their store, since every record changes one
    and a device may be busy with what other tests do.
    """
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="objectcache-test-", dir=memory if memory.is_dir() else None)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    options = f"size={SIZE_BYTES}"
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
        )
    except OSError as error:
        pytest.skip(f"no small file system can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no small file system can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(store: SharedStore, writer: str) -> list[str]:
    """Put until there is no space, down to the last 4 KiB."""
    names: list[str] = []
    for size_bytes in (4 * MIB, 64 * 1024, 4096):
        while True:
            name = f"{writer}/{size_bytes}/{len(names)}"
            try:
                put(store, name, bytes(size_bytes))
            except StorageFull:
                break
            names.append(name)
    return names


def put_when_there_is_room(engine: SharedEngine, key: str, data: bytes) -> None:
    """Put once what was deleted came free."""
    deadline_s = soon()
    while True:
        try:
            engine_put(engine, key, data)
            return
        except (StorageFull, Unavailable):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def fill_log(store: SharedStore, record_bytes: int) -> int:
    """Append until there is no space; returns how many records there are."""
    for number in itertools.count():
        try:
            assert store.append(number, bytes(record_bytes), soon())
        except StorageFull:
            break
    return number


def test_a_full_folder_takes_records_and_deletes_and_then_objects_again(mounted: Path) -> None:
    one, other = FolderStore(mounted / "s", create=True), FolderStore(mounted / "s")
    reserve = mounted / "s" / "reserve"
    assert reserve.stat().st_size == RESERVE_BYTES
    names = fill(one, "one") + fill(other, "other")
    assert reserve.stat().st_size == RESERVE_BYTES  # no put takes of it
    for number in range(40):  # records of deletions, by both
        store = (one, other)[number % 2]
        assert store.append(number, bytes(20_000), soon())
    assert reserve.stat().st_size < RESERVE_BYTES
    other.trim_log(20, soon())
    assert one.log_end(0, soon()) == 40
    one.delete(names, soon())
    assert list(one.list_objects("", soon())) == []
    assert reserve.stat().st_size == RESERVE_BYTES
    put(other, "other/after", bytes(MIB))
    assert len(one.read_log(20, 1 << 30, soon())) == 20
    for store in (one, other):
        store.close()


def test_a_reserve_that_is_used_up_is_a_full_store_and_nothing_half_done(mounted: Path) -> None:
    store = FolderStore(mounted / "s", create=True)
    names = fill(store, "one")
    number = fill_log(store, 2 * MIB)
    assert number >= RESERVE_BYTES // (2 * MIB) - 2
    assert store.log_end(0, soon()) == number
    store.delete(names[:3], soon())
    assert store.append(number, bytes(2 * MIB), soon())
    store.close()
    assert os.listdir(mounted / "s" / "log" / "floors") == []


def test_puts_beside_records_take_nothing_of_the_reserve(mounted: Path) -> None:
    one, other = FolderStore(mounted / "s", create=True), FolderStore(mounted / "s")
    reserve = mounted / "s" / "reserve"
    names = fill(one, "one")
    given_bytes = 0
    for number in range(300):
        assert one.append(number, bytes(500), soon())
        with pytest.raises(StorageFull):
            put(other, f"other/{number}", bytes(4096))
        given_bytes = RESERVE_BYTES - reserve.stat().st_size
        assert given_bytes <= (number + 1) * 4096 + 64 * 1024  # a page each, in small steps
    assert given_bytes >= 299 * 4096
    one.delete(names[:1], soon())
    assert reserve.stat().st_size == RESERVE_BYTES
    put(other, "other/after", bytes(MIB))
    for store in (one, other):
        store.close()


def test_a_delete_that_frees_less_than_was_given_goes_to_the_reserve(mounted: Path) -> None:
    store = FolderStore(mounted / "s", create=True)
    names = fill(store, "one")
    for number in range(40):
        assert store.append(number, bytes(250_000), soon())
    held_bytes = (mounted / "s" / "reserve").stat().st_size
    store.delete(names[:1], soon())
    assert (mounted / "s" / "reserve").stat().st_size >= held_bytes + 4 * MIB - 64 * 1024
    with pytest.raises(StorageFull, match=r"comes free after storage\.grace_s"):
        put(store, "one/after", bytes(4096))
    store.close()


@pytest.mark.parametrize("has_reserve", [True, False])
def test_a_full_folder_is_opened(mounted: Path, has_reserve: bool) -> None:
    store = FolderStore(mounted / "s", create=True)
    name = fill(store, "one")[0]
    number = 0 if has_reserve else fill_log(store, 4096)
    store.close()
    store = FolderStore(mounted / "s")
    assert store.get(name, soon()) == bytes(4 * MIB)
    store.delete([name], soon())
    assert store.append(number, b"deleted", soon())
    store.close()


def test_a_full_engine_takes_each_delete_and_a_start_and_puts_after_the_grace(
    mounted: Path, indexes: Path
) -> None:
    def start(name: str) -> SharedEngine:
        store = FolderStore(mounted / "s", create=True)
        return open_server(store, indexes / name, rules=RULES, round_s=0.1)

    def fill_engine(round_number: int) -> None:
        for size_bytes in (4 * MIB, 64 * 1024, 1024):
            for number in itertools.count():
                key = f"{round_number}/{size_bytes}/{number}"
                try:
                    engine_put(engine, key, bytes(size_bytes))
                except StorageFull:
                    break

    engine = start("first")
    try:
        engine.create_bucket(BUCKET)
        fill_engine(0)
        for round_number in range(100):
            with contextlib.suppress(StorageFull):
                engine_put(engine, f"loop/{round_number}", bytes(4096))
            if keys := stored_keys(engine)[:1]:
                assert engine.delete(BUCKET.name, keys) == 1
            else:
                fill_engine(round_number)
        fill_engine(1000)
    finally:
        engine.close()
    engine = start("second")
    try:
        keys = stored_keys(engine)
        assert engine.delete(BUCKET.name, keys) == len(keys)
        put_when_there_is_room(engine, "after", bytes(8 * MIB))
        assert (mounted / "s" / "reserve").stat().st_size == RESERVE_BYTES
    finally:
        engine.close()


def test_a_full_folder_takes_more_records_than_it_holds_space_for(
    mounted: Path, indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record takes 4 KiB: checkpoints, which take of the same space, let the log be trimmed."""
    reserve_bytes = 2 * MIB
    monkeypatch.setattr(folder_reserve, "RESERVE_BYTES", reserve_bytes)
    engine = open_server(
        FolderStore(mounted / "s", create=True),
        indexes / "index",
        rules=UpkeepRules(evicts=False),
        round_s=None,
        heartbeat_s=3600.0,
        checkpoint_rule=CheckpointRule(records_when_short=100),
    )
    with contextlib.closing(engine):
        engine.create_bucket(BUCKET)
        for size_bytes in (4 * MIB, 64 * 1024, 1024):
            with contextlib.suppress(StorageFull):
                for number in itertools.count():
                    engine_put(engine, f"{size_bytes}/{number}", bytes(size_bytes))
        keys = stored_keys(engine)
        for number in range(4 * reserve_bytes // 4096):
            if number % 50 == 0:
                engine.upkeep.round()
                engine.delete(BUCKET.name, [keys.pop()])
            engine.catalog.change(lambda change: change.heartbeat(None, ()), soon())
        assert engine.delete(BUCKET.name, keys) == len(keys)


def test_a_server_started_without_any_reserve_left_frees_what_was_deleted(
    mounted: Path, indexes: Path
) -> None:
    root = mounted / "s"
    engine = open_server(
        FolderStore(root, create=True), indexes / "first", rules=RULES, round_s=None
    )
    try:
        engine.upkeep.round()  # it has the lease
        engine.create_bucket(BUCKET)
        keys = [f"key/{number}" for number in range(8)]
        for key in keys:
            engine_put(engine, key, bytes(4 * MIB))
        engine.delete(BUCKET.name, keys)
        os.truncate(root / "reserve", 0)
        with open(mounted / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
    finally:
        engine.close()
    engine = open_server(FolderStore(root), indexes / "second", rules=RULES, round_s=0.1)
    try:
        put_when_there_is_room(engine, "after", bytes(8 * MIB))
        assert (root / "reserve").stat().st_size == RESERVE_BYTES
    finally:
        engine.close()
