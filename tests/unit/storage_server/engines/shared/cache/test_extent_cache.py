"""A cache by itself: what it keeps, over restarts, crashes and failing devices."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.shared.cache import cache_file
from objectcache_storage_server.engines.shared.cache.cache_file import FILE_NAME, INDEX_NAME
from objectcache_storage_server.engines.shared.cache.extent_cache import (
    WAITING_BYTES_MAX,
    CachedRange,
    ExtentCache,
)
from objectcache_storage_server.engines.stores.shared_store import ObjectRead
from tests.contract.engine_suite import content
from tests.unit.storage_server.engines.files.test_engine_full_device import small_device

__all__ = ["small_device"]

SLOT_BYTES = 64 * KIB
SLOTS = 4
Open = Callable[..., ExtentCache]


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Open]:
    opened: list[ExtentCache] = []

    def open_one(size_bytes: int = SLOTS * SLOT_BYTES) -> ExtentCache:
        opened.append(ExtentCache(tmp_path, size_bytes, SLOT_BYTES))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def cache(open_cache: Open) -> ExtentCache:
    return open_cache()


def put(cache: ExtentCache, *names: str) -> None:
    for name in names:
        cache.keep_put(name, [memoryview(content(name, SLOT_BYTES))])
    cache.settle()


def get(cache: ExtentCache, name: str, begin: int = 0, end: int = SLOT_BYTES) -> bytes | None:
    landing = memoryview(bytearray(end - begin))
    missed = cache.read([ObjectRead(name, begin, landing)])
    return None if missed else bytes(landing)


def keep(cache: ExtentCache, name: str, begin: int, end: int) -> None:
    buffer = cache.buffer(end - begin)
    assert buffer is not None
    buffer[:] = content(name, SLOT_BYTES)[begin:end]
    cache.keep(buffer, [CachedRange(name, begin, buffer)], is_read=True)
    cache.settle()


def test_what_was_put_is_there_as_a_whole_and_in_part(cache: ExtentCache) -> None:
    parts = [memoryview(content("a", SLOT_BYTES))[begin:end] for begin, end in ((0, 9), (9, 9000))]
    cache.keep_put("a", parts)
    cache.settle()
    assert get(cache, "a", 0, 9000) == content("a", SLOT_BYTES)[:9000]
    assert get(cache, "a", 4000, 4100) == content("a", SLOT_BYTES)[4000:4100]
    assert get(cache, "a", 8000, 9001) is None
    found = cache.status()
    assert (found.hits, found.hit_bytes, found.misses, found.miss_bytes) == (2, 9100, 1, 1001)
    assert (found.written_bytes, found.used_bytes) == (9000, SLOT_BYTES)


def test_ranges_that_were_read_join(cache: ExtentCache) -> None:
    keep(cache, "a", 0, 2000)
    keep(cache, "a", 4000, 6000)
    assert get(cache, "a", 0, 6000) is None
    keep(cache, "a", 1500, 4000)
    assert get(cache, "a", 0, 6000) == content("a", SLOT_BYTES)[:6000]
    assert cache.status().used_bytes == SLOT_BYTES


def test_what_is_not_worth_a_slot_is_not_kept(cache: ExtentCache) -> None:
    assert cache.buffer(SLOT_BYTES // 64 - 1) is None
    cache.keep_put("small", [memoryview(b"x" * 100)])
    keep(cache, "a", 0, SLOT_BYTES // 64)
    assert get(cache, "small", 0, 100) is None
    assert cache.status().passed_over_bytes == 0


def test_a_full_cache_lets_go_of_others(cache: ExtentCache) -> None:
    put(cache, "a")
    assert get(cache, "a") is not None
    put(cache, *"bcdef")
    assert [name for name in "abcdef" if get(cache, name) == content(name, SLOT_BYTES)] == [
        "a", "d", "e", "f",
    ]  # fmt: skip
    assert cache.status().evicted_objects == 2
    assert cache.status().used_bytes == SLOTS * SLOT_BYTES


def test_what_did_not_match_makes_room(cache: ExtentCache) -> None:
    put(cache, *"abcd")
    cache.drop(["b", "c", "none"])
    assert get(cache, "b") is None
    put(cache, "e", "f")
    assert [name for name in "abcdef" if get(cache, name)] == ["a", "d", "e", "f"]
    found = cache.status()
    assert (found.evicted_objects, found.damaged_objects) == (0, 2)


def test_a_read_whose_slot_becomes_anothers_is_a_miss(
    cache: ExtentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "a")
    read = cache_file.CacheFile.read

    def read_late(self: cache_file.CacheFile, slot: int, begin: int, landing: memoryview) -> None:
        monkeypatch.undo()
        for name in "bcde":
            keep(cache, name, 0, SLOT_BYTES)
        read(self, slot, begin, landing)  # what is e's by now

    monkeypatch.setattr(cache_file.CacheFile, "read", read_late)
    assert get(cache, "a") is None
    assert cache.status().evicted_objects == 1
    assert get(cache, "e") == content("e", SLOT_BYTES)


def test_many_threads_find_right_bytes_or_none(cache: ExtentCache) -> None:
    names = [f"{number}" for number in range(3 * SLOTS)]
    wrong: list[str] = []

    def use(first: int) -> None:
        for turn in range(200):
            name = names[(first + turn * 7) % len(names)]
            found = get(cache, name)
            if found is None:
                cache.keep_put(name, [memoryview(content(name, SLOT_BYTES))])
            elif found != content(name, SLOT_BYTES):
                wrong.append(name)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cache.settle()  # which may be the first that the device is through with
    found = {name: get(cache, name) for name in names}
    assert any(found.values())
    assert all(data in (None, content(name, SLOT_BYTES)) for name, data in found.items())


def test_what_finds_no_memory_is_passed_over(cache: ExtentCache) -> None:
    taken = cache.buffer(WAITING_BYTES_MAX - SLOT_BYTES + 1)
    assert taken is not None
    cache.keep_put("a", [memoryview(content("a", SLOT_BYTES))])
    assert cache.status().passed_over_bytes == SLOT_BYTES
    cache.give_back(taken)
    put(cache, "a")
    assert get(cache, "a") == content("a", SLOT_BYTES)


# --- restarts ---


def test_what_is_cached_is_there_after_a_restart(open_cache: Open, tmp_path: Path) -> None:
    cache = open_cache()
    put(cache, *"abc")
    get(cache, "a")
    cache.close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {FILE_NAME: 0o600, INDEX_NAME: 0o600}
    again = open_cache()
    assert [name for name in "abc" if get(again, name) == content(name, SLOT_BYTES)] == list("abc")


def test_a_server_that_was_killed_finds_an_empty_cache(open_cache: Open, tmp_path: Path) -> None:
    first = open_cache()
    put(first, "a")
    first.close()
    second = open_cache()
    assert get(second, "a") is not None
    killed = tmp_path.with_name(f"{tmp_path.name}-killed")
    shutil.copytree(tmp_path, killed)  # as it is while a server has it open
    try:
        third = ExtentCache(killed, SLOTS * SLOT_BYTES, SLOT_BYTES)
        assert get(third, "a") is None
        assert third.status().failure == ""
        third.close()
    finally:
        shutil.rmtree(killed)


@pytest.mark.parametrize("fault", ["rewritten", "another file", "rotten index", "torn index"])
def test_an_index_that_is_not_the_files_is_not_believed(
    open_cache: Open, tmp_path: Path, fault: str
) -> None:
    cache = open_cache()
    put(cache, "a")
    cache.close()
    file, index = tmp_path / FILE_NAME, tmp_path / INDEX_NAME
    if fault == "rewritten":
        saved_ns = file.stat().st_mtime_ns
        with file.open("r+b") as opened:
            opened.write(b"other")
        os.utime(file, ns=(saved_ns, saved_ns + 1))  # in the same tick of the system's clock, too
    elif fault == "another file":
        data = file.read_bytes()
        file.rename(tmp_path / "kept")
        file.write_bytes(data)
    else:
        body = index.read_bytes()
        index.write_bytes(body[:-1] + (b"" if fault == "torn index" else bytes([body[-1] ^ 1])))
    again = open_cache()
    assert get(again, "a") is None
    assert again.status().failure == ""
    put(again, "a")
    assert get(again, "a") == content("a", SLOT_BYTES)


def test_a_cache_of_another_size_keeps_what_it_has_slots_for(open_cache: Open) -> None:
    cache = open_cache()
    put(cache, *"abcd")
    cache.close()
    smaller = open_cache(3 * SLOT_BYTES - 1)
    assert smaller.status().capacity_bytes == 2 * SLOT_BYTES
    assert [name for name in "abcd" if get(smaller, name)] == ["a", "b"]
    smaller.close()
    larger = open_cache(8 * SLOT_BYTES)
    put(larger, *"efghij")
    assert [name for name in "abcdefghij" if get(larger, name) == content(name, SLOT_BYTES)] == [
        "a", "b", "e", "f", "g", "h", "i", "j",
    ]  # fmt: skip


# --- what cannot be ---


def test_a_folder_is_one_servers(cache: ExtentCache, open_cache: Open) -> None:
    with pytest.raises(Unavailable, match=r"storage\.cache_dir"):
        open_cache()


def test_a_cache_without_a_slot_is_refused(open_cache: Open) -> None:
    with pytest.raises(InvalidRequest, match=r"storage\.cache_bytes"):
        open_cache(SLOT_BYTES - 1)


def test_a_device_without_room_turns_it_off_and_has_its_room_again(
    small_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cache = ExtentCache(small_device / "cache", 32 << 20, SLOT_BYTES)
    assert "off until the next start" in caplog.text
    put(cache, "a")
    assert get(cache, "a") is None
    assert "No space left" in cache.status().failure
    left = os.statvfs(small_device)
    assert left.f_bavail * left.f_frsize > 20 << 20
    cache.close()


@pytest.mark.parametrize("operation", ["preadv", "pwritev"])
def test_an_error_of_the_device_turns_it_off(
    cache: ExtentCache,
    open_cache: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
) -> None:
    put(cache, "a")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, operation, fail)
    with caplog.at_level(logging.WARNING):
        if operation == "preadv":
            assert get(cache, "a") is None
        else:
            put(cache, "b")
    monkeypatch.undo()
    assert caplog.text.count("off until the next start") == 1
    assert get(cache, "a") is None
    assert cache.buffer(SLOT_BYTES) is None
    assert "Input/output error" in cache.status().failure
    cache.close()
    assert get(open_cache(), "a") is None  # nothing of it is believed


def test_a_file_that_was_cut_turns_it_off(cache: ExtentCache, tmp_path: Path) -> None:
    put(cache, "a", "b")
    os.truncate(tmp_path / FILE_NAME, SLOT_BYTES)
    assert get(cache, "a") == content("a", SLOT_BYTES)
    assert get(cache, "b") is None
    assert "shorter" in cache.status().failure
