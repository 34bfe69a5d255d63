"""What an event loop may have of every engine without waiting: `read_small`, `stat_at_hand`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import NotFound
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy, ObjectAttributes, ObjectInfo, Verification
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.files.engine import FilesEngine
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from tests.contract.engine_suite import BUCKET, content, opened_engine, put, read
from tests.contract.opened_engines.local_engines import nvme_local_engine, small_local_engine
from tests.contract.opened_engines.shared_engines import one_server

MOST = 64 * KIB
ENGINES: dict[str, Callable[[Path], Engine]] = {
    "memory": lambda _: MemoryEngine(),
    "files": lambda folder: FilesEngine(folder, open_objects_max=64),
    "local": small_local_engine,
    "local on nvme": nvme_local_engine,
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, store_of: Callable[[str], Path]) -> Iterator[Engine]:
    with opened_engine(ENGINES[request.param], store_of(request.param)) as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalEngine]:
    opened = small_local_engine(tmp_path / "data")
    opened.create_bucket(BUCKET)
    yield opened
    opened.close()


def drop_page_cache(folder: Path) -> None:
    """Have the system forget what it holds of the data files."""
    for file in folder.rglob("*"):
        if file.is_file() and "index" not in file.parts:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def stat_at_once(engine: Engine, key: str) -> ObjectInfo:
    """What is known of an object, by the quick way where the engine has one."""
    found = engine.read_small(BUCKET.name, key, MOST)
    return engine.stat(BUCKET.name, key) if found is None else found[0]


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 4097, 65535, 65536])
def test_what_is_read_at_once_is_the_object_or_nothing(engine: Engine, size_bytes: int) -> None:
    put(engine, "k", content("k", size_bytes))
    found = engine.read_small(BUCKET.name, "k", MOST)
    if found is not None:
        info, body = found
        assert body == content("k", size_bytes)
        assert info == engine.stat(BUCKET.name, "k")


def test_a_larger_object_is_not_read_at_once(engine: Engine) -> None:
    put(engine, "k", content("k", 4097))
    assert engine.read_small(BUCKET.name, "k", 4096) is None


def test_a_replaced_or_deleted_object_is_not_read_any_more(engine: Engine) -> None:
    put(engine, "k", content("old", 4096))
    engine.read_small(BUCKET.name, "k", MOST)
    put(engine, "k", content("new", 4096))
    found = engine.read_small(BUCKET.name, "k", MOST)
    assert found is None or found[1] == content("new", 4096)
    engine.delete(BUCKET.name, ["k"])
    with pytest.raises(NotFound) as caught:
        stat_at_once(engine, "k")
    assert caught.value.code == "NoSuchKey"


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 65536])
def test_local_reads_what_it_has_just_stored_at_once(local: LocalEngine, size_bytes: int) -> None:
    put(local, "k", content("k", size_bytes), attributes=ObjectAttributes(content_type="a/b"))
    found = local.read_small(BUCKET.name, "k", MOST)
    assert found is not None
    assert found[1] == content("k", size_bytes)
    assert found[0].attributes.content_type == "a/b"


def test_what_is_known_at_once_is_the_object_or_nothing(engine: Engine) -> None:
    put(engine, "k", content("k", 4096))
    assert engine.stat_at_hand(BUCKET.name, "k") in (None, engine.stat(BUCKET.name, "k"))


def test_local_knows_every_object_at_once(local: LocalEngine) -> None:
    put(local, "k", content("k", 1 << 20))
    assert local.stat_at_hand(BUCKET.name, "k") == local.stat(BUCKET.name, "k")
    with pytest.raises(NotFound):
        local.stat_at_hand(BUCKET.name, "nothing")


def test_a_shared_store_is_not_asked_for_what_is_to_be_known_at_once(tmp_path: Path) -> None:
    with opened_engine(one_server, tmp_path) as engine:
        put(engine, "k", content("k", 4096))
        assert engine.stat_at_hand(BUCKET.name, "k") == engine.stat(BUCKET.name, "k")
        assert engine.stat_at_hand(BUCKET.name, "perhaps another server's") is None
        assert engine.stat_at_hand("perhaps-another", "k") is None


def test_local_says_what_is_missing(local: LocalEngine) -> None:
    with pytest.raises(NotFound) as caught:
        local.read_small(BUCKET.name, "nothing", MOST)
    assert caught.value.code == "NoSuchKey"
    with pytest.raises(NotFound) as caught:
        local.read_small("nowhere", "k", MOST)
    assert caught.value.code == "NoSuchBucket"


def test_local_reads_nothing_at_once_that_it_would_have_to_wait_for(
    local: LocalEngine, tmp_path: Path
) -> None:
    put(local, "k", content("k", 4096))
    drop_page_cache(tmp_path / "data")
    assert local.read_small(BUCKET.name, "k", MOST) is None
    assert read(local, "k") == content("k", 4096)


@pytest.mark.parametrize(
    ("verification", "is_answered"), [(Verification.FULL, False), (Verification.OFF, True)]
)
def test_local_leaves_rot_to_the_ordinary_way_where_it_verifies(
    local: LocalEngine, tmp_path: Path, verification: Verification, is_answered: bool
) -> None:
    local.set_policy(BUCKET.name, BucketPolicy(verification=verification))
    put(local, "k", content("k", 4096))
    rot(tmp_path / "data", content("k", 4096))
    assert (local.read_small(BUCKET.name, "k", MOST) is not None) is is_answered
    assert local.damaged_count == 0, "dropping it would wait for the device"


def rot(folder: Path, stored: bytes) -> None:
    """Change a byte of what lies in the data files."""
    for file in folder.rglob("*"):
        if file.is_file() and "index" not in file.parts:
            data = file.read_bytes()
            begin = data.find(stored)
            if begin >= 0:
                with file.open("r+b") as writable:
                    writable.seek(begin + 100)
                    writable.write(bytes([stored[100] ^ 1]))
                return
    raise AssertionError("the object is in no file")


def test_reading_at_once_counts_as_a_use(local: LocalEngine) -> None:
    put(local, "k", content("k", 4096))
    before = local.holdings.clock_of_uses
    assert local.read_small(BUCKET.name, "k", MOST) is not None
    assert local.holdings.clock_of_uses == before + 1
    assert local.holdings.objects.used["last_used"].max() == before + 1
