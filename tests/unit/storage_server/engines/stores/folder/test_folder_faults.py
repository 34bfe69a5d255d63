"""A shared folder whose mount is gone, hangs, fails, or answers twice."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.stores.folder import folder_log, folder_objects
from objectcache_storage_server.engines.stores.folder.folder_reserve import (
    RESERVE_BYTES,
    STEP_BYTES,
)
from objectcache_storage_server.engines.stores.folder.folder_store import THREADS, FolderStore
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoreTimeout,
    TrimmedLog,
)
from tests.unit.storage_server.engines.stores.folder.conftest import put, read, soon

Opener = Callable[[], FolderStore]
ALL = 1 << 30


# --- the folder itself ---


def test_an_empty_mount_point_is_not_taken_for_an_empty_store(root: Path) -> None:
    root.mkdir()
    with pytest.raises(Unavailable, match="no store in it"):
        FolderStore(root)
    with pytest.raises(Unavailable):
        FolderStore(root / "none")
    FolderStore(root, create=True).close()
    FolderStore(root).close()


def test_those_who_make_a_store_at_once_make_one(root: Path) -> None:
    ids: set[str] = set()

    def make() -> None:
        store = FolderStore(root, create=True)
        ids.add(repr(store))
        store.close()

    makers = [threading.Thread(target=make) for _ in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(ids) == 1


def test_another_store_in_its_place_has_lost_nothing(root: Path, open_store: Opener) -> None:
    store = open_store()
    put(store, "w/1", b"there")
    (root / "store").write_text(f"objectcache shared folder 1\nstore {'0' * 32}\n")
    assert store.get("w/1", soon()) == b"there"
    with pytest.raises(Unavailable, match="another store"):
        store.get("w/2", soon())


def test_a_marker_of_another_version_is_refused(root: Path, open_store: Opener) -> None:
    open_store()
    (root / "store").write_text("objectcache shared folder 2\n")
    with pytest.raises(Unavailable, match="this version"):
        FolderStore(root)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.EACCES])
def test_an_object_that_the_system_cannot_give_is_not_lost(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = open_store()
    put(store, "w/1", b"there")

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        with pytest.raises(Unavailable):
            read(store, "w/1", 5)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail)
        for name in ("w/1", "w/2"):
            with pytest.raises(Unavailable):
                store.get(name, soon())
    assert read(store, "w/1", 5) == store.get("w/1", soon()) == b"there"


def test_a_folder_that_was_mounted_anew_is_used_again(root: Path, open_store: Opener) -> None:
    store = open_store()
    put(store, "w/1", b"there")
    shutil.copytree(root, root.with_name("copy"))
    shutil.rmtree(root)
    with pytest.raises(Unavailable):
        store.get("w/1", soon())
    root.with_name("copy").rename(root)
    with pytest.raises(Unavailable):
        store.get("w/1", soon())
    assert store.get("w/1", soon()) == b"there"


# --- what hangs ---


def test_a_read_that_hangs_times_out_and_does_not_land_when_it_comes_back(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, goes_on, came_back = open_store(), threading.Event(), threading.Event()
    put(store, "w/1", b"there")
    read_file, is_reading = os.preadv, threading.Event()

    def hang(*args: Any) -> int:
        is_reading.set()
        goes_on.wait()
        read_bytes = read_file(*args)
        came_back.set()
        return read_bytes

    landing = bytearray(5)
    with monkeypatch.context() as hanging:
        hanging.setattr(os, "preadv", hang)
        for wait_s in (0.1, 2.0, 30.0):  # a busy machine may not have begun it by then
            future = store.begin_reads(
                [ObjectRead("w/1", 0, memoryview(landing))], time.monotonic() + wait_s
            )
            with pytest.raises(StoreTimeout):
                future.result()
            if is_reading.is_set():
                break
        assert is_reading.is_set()
    assert read(store, "w/1", 5) == b"there"  # other threads go on
    goes_on.set()
    came_back.wait()
    store.close()  # which waits for the threads
    assert landing == bytes(5)


def test_a_put_that_hangs_does_not_appear_with_bytes_that_are_not_its_own_any_more(
    root: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, goes_on = open_store(), threading.Event()
    flush = os.fsync

    def hang(descriptor: int) -> None:
        goes_on.wait()
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", hang)
    data = bytearray(b"first")
    with pytest.raises(StoreTimeout):
        store.put("w/1", [memoryview(data)], time.monotonic() + 0.1)
    data[:] = b"later"
    goes_on.set()
    with pytest.raises(LostObject):
        store.get("w/1", soon())
    put(store, "w/1", b"again")
    assert store.get("w/1", soon()) == b"again"
    store.close()
    assert [file.name for file in root.glob("objects/*/*")] == ["w=1"]


def test_a_folder_that_does_not_answer_is_not_asked_without_bound(
    root: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, goes_on = open_store(), threading.Event()
    put(store, "w/1", b"there")
    open_file = os.open

    def hang(*args: Any, **kwargs: Any) -> int:
        goes_on.wait()
        return open_file(*args, **kwargs)

    monkeypatch.setattr(os, "open", hang)
    begun: list[Future[None]] = []
    while not begun or not begun[-1].done():
        reads = [ObjectRead("w/1", 0, memoryview(bytearray(5)))]
        begun.append(store.begin_reads(reads, soon()))
        assert len(begun) < 10_000
    with pytest.raises(Unavailable, match="calls wait"):
        begun.pop().result()
    goes_on.set()
    for future in begun:
        future.result()
    assert store.get("w/1", soon()) == b"there"


def test_calls_that_ended_while_they_waited_are_forgotten_with_their_memory(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, goes_on = open_store(), threading.Event()
    put(store, "w/1", b"there")
    open_file = os.open

    def hang(*args: Any, **kwargs: Any) -> int:
        goes_on.wait()
        return open_file(*args, **kwargs)

    def begin(landing: memoryview, deadline_s: float) -> Future[None]:
        return store.begin_reads([ObjectRead("w/1", 0, landing)], deadline_s)

    monkeypatch.setattr(os, "open", hang)
    holding = [begin(memoryview(bytearray(5)), soon()) for _ in range(THREADS)]
    landing = np.zeros(5, np.uint8)
    landing_lives = weakref.ref(landing)
    reading = begin(landing.data, time.monotonic() + 0.1)
    with pytest.raises(StoreTimeout):
        reading.result()
    part = np.zeros(5, np.uint8)
    part_lives = weakref.ref(part)
    with pytest.raises(StoreTimeout):
        store.put("w/2", [part.data], time.monotonic() + 0.1)
    del landing, part, reading
    end_s = soon()  # whoever told of the deadline may have a call at hand a little longer
    while landing_lives() is not None or part_lives() is not None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
        gc.collect()
    goes_on.set()
    for future in holding:
        future.result()


# --- appends whose outcome the system does not tell ---


def test_a_link_that_answers_that_it_was_there_already_may_be_this_one_s(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store()
    link = os.link

    def answer_twice(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, "sent again by NFS")

    with monkeypatch.context() as twice:
        twice.setattr(os, "link", answer_twice)
        assert store.append(0, b"mine", soon())
    assert not other.append(0, b"other", soon())
    assert other.read_log(0, ALL, soon()) == [b"mine"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EACCES])
@pytest.mark.parametrize("is_carried_out", [False, True])
def test_a_link_that_fails_is_looked_for_and_may_be_on_its_way_unless_it_was_refused(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, is_carried_out: bool, code: int
) -> None:
    store, link = open_store(), os.link

    def fail(*args: Any, **kwargs: Any) -> None:
        if is_carried_out:
            link(*args, **kwargs)
        raise OSError(code, "the connection broke")

    monkeypatch.setattr(os, "link", fail)
    if is_carried_out:
        assert store.append(0, b"mine", soon())
    else:
        with pytest.raises(Unavailable) as caught:
            store.append(0, b"mine", soon())
        assert isinstance(caught.value, StoreTimeout) == (code != errno.EACCES)
    assert store.read_log(0, ALL, soon()) == [b"mine"][: int(is_carried_out)]


def test_an_append_that_stood_still_while_its_number_was_used_and_trimmed_is_not_acknowledged(
    root: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, other = open_store(), open_store()
    link = os.link

    def stand_still(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        for number in range(3):
            assert other.append(number, b"other", soon())
        other.trim_log(3, soon())
        link(*args, **kwargs)
        for store in (stale, other):
            with pytest.raises(TrimmedLog):
                store.read_log(0, ALL, soon())

    monkeypatch.setattr(os, "link", stand_still)
    with pytest.raises(StoreTimeout, match="another's"):
        stale.append(0, b"stale", soon())
    assert list(root.glob("log/0*")) == []
    assert stale.log_end(0, soon()) == other.log_end(3, soon()) == 3
    assert not stale.append(0, b"stale", soon())
    assert not stale.append(2, b"stale", soon())
    other.trim_log(3, soon())
    assert stale.append(3, b"mine", soon())
    assert other.read_log(3, ALL, soon()) == [b"mine"]


def test_a_put_from_the_reserve_takes_no_more_of_it_than_it_has(
    root: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def find_no_space(*arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # others have what was given up

    monkeypatch.setattr(folder_objects, "write_new_file", find_no_space)
    with pytest.raises(StorageFull):
        store.put_from_reserve("checkpoint/piece", [memoryview(bytes(2 * MIB))], soon())
    left_bytes = (root / "reserve").stat().st_size
    assert left_bytes == RESERVE_BYTES - 2 * MIB - STEP_BYTES


def test_an_append_leaves_no_hole(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(Unavailable, match="no record 0"):
        store.append(1, b"hole", soon())
    assert store.append(0, b"first", soon())
    with pytest.raises(Unavailable, match="no record 1"):
        store.append(2, b"hole", soon())
    assert store.log_end(0, soon()) == 1


def test_a_record_whose_name_could_not_be_flushed_may_be_there(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def fail(path: str, folder: int) -> None:
        raise OSError(errno.EIO, "the device is gone")

    monkeypatch.setattr(folder_log, "sync_names", fail)
    with pytest.raises(StoreTimeout, match="may have been stored"):
        store.append(0, b"mine", soon())
    assert store.read_log(0, ALL, soon()) == [b"mine"]


# --- leftovers ---


def test_what_a_crash_left_of_an_object_is_listed_and_deleted_by_its_name(
    root: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def crash(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as crashing:
        crashing.setattr(os, "rename", crash)
        with pytest.raises(SystemExit):
            put(store, "dead/e1/r1", b"begun")
    assert dict(store.list_objects("dead/", soon())) == {"dead/e1/r1": 5}
    with pytest.raises(LostObject):
        store.get("dead/e1/r1", soon())
    store.delete(["dead/e1/r1"], soon())
    assert list(store.list_objects("", soon())) == []
    assert list(root.glob("objects/*/*")) == []


def test_trimming_removes_records_old_floors_and_what_crashes_left(
    root: Path, open_store: Opener
) -> None:
    store = open_store()
    old, new = root / "log/floors/~crashed-0", root / "log/floors/~running-0"
    for left in (old, new):
        left.write_bytes(b"left")
    os.utime(old, (time.time() - 100_000,) * 2)
    for number in range(50):
        assert store.append(number, b"record", soon())
        store.trim_log(number, soon())
    assert {file.name for file in root.glob("log/*") if file.is_file()} == {f"{49:020d}"}
    assert len(list(root.glob("log/floors/[0-9]*"))) <= 3
    assert not old.exists()
    assert new.exists()


APPENDER = """
import sys, time
from pathlib import Path
from objectcache_storage_server.engines.stores.folder.folder_store import THREADS, FolderStore
store = FolderStore(Path(sys.argv[1]))
number = count = 0
while True:
    record = f"{sys.argv[2]} {count}".encode()
    while not store.append(number, record, time.monotonic() + 60):
        number += 1
    print(number, record.decode(), flush=True)
    count += 1
"""


def test_processes_that_append_and_are_killed_leave_no_hole_and_lose_nothing(
    root: Path, open_store: Opener
) -> None:
    store = open_store()
    appenders = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(root), str(i)], stdout=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    acknowledged: dict[int, str] = {}
    for appender in appenders:
        assert appender.stdout is not None
        for _ in range(10):
            number, _, record = appender.stdout.readline().strip().partition(" ")
            acknowledged[int(number)] = record
    for appender in appenders:
        appender.kill()
    for appender in appenders:
        assert appender.stdout is not None
        for line in appender.stdout:
            if line.endswith("\n"):
                number, _, record = line.strip().partition(" ")
                acknowledged[int(number)] = record
        appender.stdout.close()
        appender.wait()
    found = store.read_log(0, ALL, soon())
    assert len(found) == store.log_end(0, soon()) >= len(acknowledged) >= 30
    assert {number: found[number].decode() for number in acknowledged} == acknowledged
    assert len(set(found)) == len(found)
    assert store.append(len(found), b"after", soon())


def test_no_hard_links_are_a_reason_to_refuse(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderStore(root, create=True).close()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Unavailable, match="no hard links"):
        FolderStore(root)
    assert descriptors_of(root) == 0


def test_what_is_no_store_is_let_go_of(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="has no store in it"):
        FolderStore(tmp_path)
    assert descriptors_of(tmp_path) == 0


def descriptors_of(folder: Path) -> int:
    """How many this process has of it."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found += one.readlink() == folder
    return found


def test_a_full_folder_says_so(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    for code in (errno.ENOSPC, errno.EDQUOT):

        def fail(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as full:
            full.setattr(os, "write", fail)
            with pytest.raises(StorageFull):
                put(store, "w/1", b"data")
    assert list(store.list_objects("", soon())) == []
