"""The files engine: rot, recovery, its lock, and its open files."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import resource
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import (
    Busy,
    DamagedData,
    NotFound,
    ObjectCacheError,
    StorageFull,
    Unavailable,
)
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.disk.system_errors import as_our_error
from objectcache_storage_server.engines.files.engine import FilesEngine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.open_engine import open_engine
from tests.contract.engine_suite import (
    BUCKET,
    content,
    put,
    put_batch,
    read,
    read_range,
    staged_put,
    stored_keys,
)
from tests.unit.examples import examples

IMMUTABLE = Condition(immutable=True)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def engine(data_dir: Path) -> Iterator[FilesEngine]:
    opened = FilesEngine(data_dir, open_objects_max=64)
    opened.create_bucket(BUCKET)
    yield opened
    opened.close()


def object_files(data_dir: Path) -> list[Path]:
    """Object files, oldest first."""
    return sorted((data_dir / "objects").glob("*/*"), key=lambda path: path.name)


def flip_byte(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 0x40]))


def cut_short(path: Path, by_bytes: int = 1) -> None:
    os.truncate(path, path.stat().st_size - by_bytes)


def open_descriptors() -> int:
    """How many file descriptors this process has open, without those of what nobody refers to."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# --- rot ---


@pytest.mark.parametrize("block_bytes", [1000, 64 * KIB, 3 * MIB])
@pytest.mark.parametrize("warm", [False, True])
def test_a_flipped_byte_anywhere_is_found_and_never_delivered(
    engine: FilesEngine, data_dir: Path, block_bytes: int, warm: bool
) -> None:
    data = content("rot", 300_001)
    positions = [0, 999, 1000, 65_535, 65_536, 300_000]
    positions += random.Random(block_bytes).sample(range(len(data)), 10)
    for count, position in enumerate(positions):
        put(engine, "before", b"fine")
        put(engine, "key", data, block_bytes=block_bytes)
        if warm:
            assert read(engine, "key") == data
        flip_byte(object_files(data_dir)[-1], position)
        with pytest.raises(DamagedData, match="key") as caught:
            read(engine, "key")
        assert caught.value.details.key == "key"
        assert engine.damaged_count == count + 1
        assert read(engine, "key") is None
        assert engine.match(BUCKET.name, ["before", "key"]) == 1
        assert stored_keys(engine) == ["before"]
        assert len(object_files(data_dir)) == 1
    put(engine, "key", data, IMMUTABLE)
    assert read(engine, "key") == data


def test_only_reads_of_a_damaged_block_fail(engine: FilesEngine, data_dir: Path) -> None:
    data = content("blocks", 10_000)
    put(engine, "key", data, block_bytes=1000)
    flip_byte(object_files(data_dir)[0], 5500)
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        assert read_range(opened, 0, 0, 5000) == data[:5000]
        assert read_range(opened, 0, 6000, 4000) == data[6000:]
        for begin, length in ((5999, 1), (4999, 2), (5000, 1000), (0, 10_000), (5200, 3000)):
            with pytest.raises(DamagedData):
                read_range(opened, 0, begin, length)
    assert engine.damaged_count == 1


@pytest.mark.parametrize("by_bytes", [1, 1000, 2500, 10_000])
def test_a_file_cut_short_is_damage(engine: FilesEngine, data_dir: Path, by_bytes: int) -> None:
    put(engine, "key", content("short", 10_000), block_bytes=1000)
    cut_short(object_files(data_dir)[0], by_bytes)
    with pytest.raises(DamagedData, match="ends at byte"):
        read(engine, "key")
    assert read(engine, "key") is None
    assert engine.damaged_count == 1


def test_a_missing_file_reads_as_missing(engine: FilesEngine, data_dir: Path) -> None:
    put_batch(engine, {"a": b"1", "b": b"2", "c": b"3"})
    object_files(data_dir)[1].unlink()
    with engine.open_many(BUCKET.name, ["a", "b", "c"]) as opened:
        assert [info is not None for info in opened.infos] == [True, False, True]
    assert engine.match(BUCKET.name, ["a", "b", "c"]) == 1
    assert engine.damaged_count == 1


def test_damage_of_an_old_version_leaves_the_newer_one(engine: FilesEngine, data_dir: Path) -> None:
    put(engine, "key", b"old bytes")
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        flip_byte(object_files(data_dir)[0], 3)
        put(engine, "key", b"new bytes")
        with pytest.raises(DamagedData):
            read_range(opened, 0, 0, 9)
    assert read(engine, "key") == b"new bytes"
    assert engine.damaged_count == 0


@pytest.mark.parametrize("harm", [lambda path: flip_byte(path, 700), cut_short, Path.unlink])
def test_an_immutable_put_repairs_what_it_had_to_read_and_found_damaged(
    engine: FilesEngine, data_dir: Path, harm: Callable[[Path], None]
) -> None:
    data = content("repair", 5000)
    put(engine, "key", data, block_bytes=1000)
    harm(object_files(data_dir)[0])
    assert not put(engine, "key", data, IMMUTABLE, block_bytes=512).existed
    assert read(engine, "key") == data
    assert engine.damaged_count == 1
    assert len(object_files(data_dir)) == 1


def test_damage_outlives_a_restart(engine: FilesEngine, data_dir: Path) -> None:
    put(engine, "key", b"data")
    flip_byte(object_files(data_dir)[0], 0)
    engine.close()
    again = FilesEngine(data_dir, 64)
    with pytest.raises(DamagedData):
        read(again, "key")
    again.close()
    last = FilesEngine(data_dir, 64)
    assert read(last, "key") is None
    last.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("key", b"b2\xff"),
        ("id", 12_345),
        ("size_bytes", 2),
        ("record", b"rot"),
        ("record", 7),
        ("checksums", b"rot"),
        ("checksums", 7.0),
    ],
)
def test_a_damaged_index_row_is_dropped_and_put_right_by_a_put(
    engine: FilesEngine, data_dir: Path, column: str, value: bytes | float
) -> None:
    put_batch(engine, {"a": b"1", "b": b"2", "c": b"3"})
    connection = sqlite3.connect(data_dir / "index.sqlite3")
    connection.execute(f"UPDATE objects SET {column} = ? WHERE key = ?", (value, b"b"))
    connection.commit()
    connection.close()
    for _ in range(2):
        assert read(engine, "b") is None
        assert stored_keys(engine) == ["a", "c"]
        assert engine.damaged_count == 1
    put(engine, "b", b"2", IMMUTABLE)
    assert {key: read(engine, key) for key in "abc"} == {"a": b"1", "b": b"2", "c": b"3"}
    engine.close()
    again = FilesEngine(data_dir, 64)
    assert len(object_files(data_dir)) == 3
    assert again.damaged_count == 0
    again.close()


@pytest.mark.parametrize("seed", range(examples(4)))
def test_flipped_bytes_of_the_index_never_deliver_wrong_bytes(
    engine: FilesEngine, data_dir: Path, seed: int
) -> None:
    objects = {f"key {i}": b"%d" % i for i in range(100)}
    put_batch(engine, objects)
    engine.close()
    path = data_dir / "index.sqlite3"
    rng = random.Random(seed)
    for position in rng.sample(range(100, path.stat().st_size), 40):
        flip_byte(path, position)
    try:
        again = FilesEngine(data_dir, 64)
    except Unavailable:
        return
    for key, data in objects.items():
        try:
            assert read(again, key) in (None, data)
            assert again.stat(BUCKET.name, key).size_bytes == len(data)
        except (NotFound, Unavailable, DamagedData):
            continue
    again.close()


# --- opening ---


def test_objects_and_buckets_outlive_a_restart(engine: FilesEngine, data_dir: Path) -> None:
    objects = {f"{i}": content(i, 1000 * i) for i in range(20)}
    put_batch(engine, objects)
    info = engine.stat(BUCKET.name, "7")
    engine.close()
    again = FilesEngine(data_dir, 64)
    assert again.buckets() == [BUCKET]
    assert again.stat(BUCKET.name, "7") == info
    assert {key: read(again, key) for key in objects} == objects
    put(again, "later", b"more")
    assert read(again, "later") == b"more"
    again.close()


def test_unfinished_puts_leave_nothing_behind(engine: FilesEngine, data_dir: Path) -> None:
    put(engine, "key", b"data")
    staged = staged_put(engine, "unfinished", b"data")
    assert len(object_files(data_dir)) == 2
    engine.close()
    assert len(object_files(data_dir)) == 1
    staged.staged.discard()


def test_files_that_no_row_names_are_removed_when_opening(
    engine: FilesEngine, data_dir: Path
) -> None:
    put(engine, "key", b"data")
    engine.close()
    orphan = data_dir / "objects" / "02" / f"{0x2FF:016x}"
    orphan.write_bytes(b"left by a crash")
    others = [data_dir / "objects" / "03" / name for name in ("not ours", f"{0x2FF:016x}")]
    for other in others:
        other.write_bytes(b"")
    again = FilesEngine(data_dir, 64)
    assert not orphan.exists()
    assert all(other.exists() for other in others)
    assert again.damaged_count == 0
    assert read(again, "key") == b"data"
    again.close()


def test_rows_whose_file_is_missing_or_of_another_length_are_dropped_when_opening(
    engine: FilesEngine, data_dir: Path
) -> None:
    put_batch(engine, {"a": b"1", "b": b"22", "c": b"333", "d": b"4444"})
    engine.close()
    files = object_files(data_dir)
    files[0].unlink()
    cut_short(files[1])
    files[2].write_bytes(b"longer")
    again = FilesEngine(data_dir, 64)
    assert stored_keys(again) == ["d"]
    assert again.damaged_count == 3
    assert len(object_files(data_dir)) == 1
    again.close()


def test_a_second_engine_on_the_same_directory_is_refused(
    engine: FilesEngine, data_dir: Path
) -> None:
    with pytest.raises(Unavailable, match=str(data_dir)):
        FilesEngine(data_dir, 64)
    engine.close()
    FilesEngine(data_dir, 64).close()


@pytest.mark.parametrize("harm", ["garbage", "format"])
def test_an_index_that_cannot_be_read_is_named_and_the_directory_let_go(
    engine: FilesEngine, data_dir: Path, harm: str
) -> None:
    engine.close()
    path = data_dir / "index.sqlite3"
    if harm == "garbage":
        path.write_bytes(content("garbage", 8192))
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    before = open_descriptors()
    for _ in range(2):
        with pytest.raises(Unavailable, match="index"):
            FilesEngine(data_dir, 64)
    assert open_descriptors() == before


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="file/data"):
        FilesEngine(tmp_path / "file" / "data", 64)


def test_settings_choose_the_engine(data_dir: Path) -> None:
    settings: Callable[[str], Settings] = lambda name: load_settings(  # noqa: E731
        None, {}, [f"storage.engine={name}", f"server.data_dir={data_dir}"]
    )
    for name, engine_class in (("memory", MemoryEngine), ("files", FilesEngine)):
        opened: Engine = open_engine(settings(name))
        assert isinstance(opened, engine_class)
        assert opened.capabilities.name == name
        opened.close()
    with pytest.raises(ObjectCacheError, match=r"storage\.engine"):
        open_engine(settings("tape"))


# --- durability ---


def test_bytes_and_names_are_flushed_before_the_index_names_them(
    engine: FilesEngine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def recording(flush: Callable[[int], None]) -> Callable[[int], None]:
        def record_and_flush(file_descriptor: int) -> None:
            assert engine.match(BUCKET.name, ["a"]) == 0
            flush(file_descriptor)
            flushed.append(os.readlink(f"/proc/self/fd/{file_descriptor}"))

        return record_and_flush

    monkeypatch.setattr(os, "fdatasync", recording(os.fdatasync))
    monkeypatch.setattr(os, "fsync", recording(os.fsync))
    put_batch(engine, {"a": b"1", "b": b"2", "c": b""})
    files = object_files(data_dir)
    assert len(files) == 3
    assert sorted(flushed) == sorted(map(str, {*files, *(path.parent for path in files)}))


def test_what_is_stored_already_is_not_flushed_again(
    engine: FilesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_batch(engine, {"a": b"1", "b": b"2"})
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    put_batch(engine, {"a": b"1", "b": b"2"}, IMMUTABLE)
    assert flushed == []
    put_batch(engine, {"a": b"1", "c": b"3", "b": b"2"}, IMMUTABLE)
    assert len(flushed) == 1


def test_what_is_deleted_while_its_equal_is_put_is_stored_and_flushed(
    engine: FilesEngine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine, "a", b"1")
    flushed: list[str] = []

    def delete_and_flush(file_descriptor: int, flush: Callable[[int], None] = os.fdatasync) -> None:
        if not flushed:
            engine.delete(BUCKET.name, ["a"])
        flush(file_descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{file_descriptor}"))

    monkeypatch.setattr(os, "fdatasync", delete_and_flush)
    committed = put_batch(engine, {"a": b"1", "b": b"2"}, IMMUTABLE)
    assert [each.existed for each in committed] == [False, False]
    assert read(engine, "a") == b"1"
    assert sorted(flushed) == sorted(map(str, object_files(data_dir)))


# --- open files ---


def test_no_more_files_stay_open_than_allowed(data_dir: Path) -> None:
    engine = FilesEngine(data_dir, open_objects_max=10)
    engine.create_bucket(BUCKET)
    objects = {f"{i}": b"%d" % i for i in range(50)}
    put_batch(engine, objects)
    before = open_descriptors()
    opened = engine.open_many(BUCKET.name, list(objects))
    assert open_descriptors() == before + 50
    for index, data in enumerate(objects.values()):  # evicted, and open for this reader
        assert read_range(opened, index, 0, len(data)) == data
    opened.close()
    assert open_descriptors() == before + 10
    engine.delete(BUCKET.name, list(objects))
    assert open_descriptors() == before
    engine.close()


def test_deleted_and_replaced_files_are_closed_with_their_last_reader(
    engine: FilesEngine,
) -> None:
    put_batch(engine, {"a": b"1", "b": b"2"})
    before = open_descriptors()
    opened = engine.open_many(BUCKET.name, ["a", "b", "a"])
    put(engine, "a", b"other")
    engine.delete(BUCKET.name, ["b"])
    assert open_descriptors() == before + 2
    assert [read_range(opened, index, 0, 1) for index in range(3)] == [b"1", b"2", b"1"]
    opened.close()
    assert open_descriptors() == before


def test_running_out_of_descriptors_is_busy_and_leaks_none(engine: FilesEngine) -> None:
    objects = {f"{i}": b"%d" % i for i in range(60)}
    put_batch(engine, objects)
    before = open_descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    unused = (number for number in itertools.count() if number not in used)
    twentieth_unused = next(itertools.islice(unused, 20, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (twentieth_unused, limits[1]))
    try:
        with pytest.raises(Busy, match="ulimit"):
            engine.open_many(BUCKET.name, list(objects))
        assert open_descriptors() == before
        keys = list(objects)
        for begin in range(0, 60, 10):  # idle files make way
            engine.open_many(BUCKET.name, keys[begin : begin + 10]).close()
        staged = [engine.stage(BUCKET.name, f"new {i}") for i in range(10)]
        for each in staged:
            each.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with engine.open_many(BUCKET.name, list(objects)) as opened:
        assert None not in opened.infos


def test_the_limit_on_open_files_is_raised(data_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        FilesEngine(data_dir, 4096).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_lets_every_descriptor_go(data_dir: Path) -> None:
    before = open_descriptors()
    engine = FilesEngine(data_dir, 64)
    engine.create_bucket(BUCKET)
    put(engine, "key", b"data")
    read(engine, "key")
    staged_put(engine, "unfinished", b"data")
    engine.close()
    assert open_descriptors() == before


# --- errors of the system ---


@pytest.mark.parametrize(
    ("number", "error_class"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EFBIG, StorageFull),
        (errno.EMFILE, Busy),
        (errno.ENFILE, Busy),
        (errno.EACCES, Unavailable),
        (errno.EROFS, Unavailable),
    ],
)
def test_system_errors_are_translated_by_what_a_caller_can_do(
    number: int, error_class: type[ObjectCacheError], caplog: pytest.LogCaptureFixture
) -> None:
    path = "/data/objects/00/1"
    cause = OSError(number, os.strerror(number), path)
    error = as_our_error(cause, "write an object", path)
    assert type(error) is error_class
    assert str(error).startswith(f"write an object: {os.strerror(number)}")
    assert path not in str(error)
    assert path in caplog.text


def test_what_is_stored_is_for_the_servers_own_user_only(
    engine: FilesEngine, data_dir: Path
) -> None:
    put(engine, "key", b"data")
    assert data_dir.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in data_dir.glob("index.sqlite3*")}
    assert modes == dict.fromkeys(
        ("index.sqlite3", "index.sqlite3-shm", "index.sqlite3-wal"), 0o600
    )
