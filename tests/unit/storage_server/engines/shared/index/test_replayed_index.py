"""The environment of a replayed index: its room, its copies, and how it ends."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.engines.shared.index.copied_pieces import copied_pieces
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.replayed_index import ReplayedIndex
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.versions import ExtentName, SharedVersion
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import SHAPE, Server, soon


def test_an_index_that_is_full_takes_deletes_only(tmp_path: Path) -> None:
    state = MemoryStoreState()
    one = Server(state, tmp_path / "one", index_bytes_max=8 * MIB)
    large = Server(state, tmp_path / "large")
    bucket = one.make_bucket()

    def fill(server: Server) -> None:
        while True:
            server.put(bucket, [f"{server.extent_count}-{n}" for n in range(500)])

    with pytest.raises(StorageFull, match=r"index_bytes_max; delete objects or raise"):
        fill(one)
    keys = one.keys(bucket)
    assert len(keys) > 5000
    with one.catalog.reading() as view:
        names = [version.name for version in view.versions(bucket, keys[:3000]).values()]
    for begin in range(0, len(names), 500):
        some = names[begin : begin + 500]
        one.change(lambda change: change.delete(some))  # noqa: B023
    one.put(bucket, ["new"])
    assert large.keys(bucket) == one.keys(bucket)
    one.close()
    large.close()


def test_a_follower_whose_index_is_full_reads_on_and_goes_on_with_more_room(
    tmp_path: Path,
) -> None:
    state = MemoryStoreState()
    small = Server(state, tmp_path / "small", index_bytes_max=4 * MIB)
    large = Server(state, tmp_path / "large")
    bucket = large.make_bucket()
    large.put(bucket, ["first"])
    assert small.keys(bucket) == ["first"]
    for number in range(50):
        large.put(bucket, [f"{number}-{n}" for n in range(500)])
    with pytest.raises(StorageFull, match="raise the setting"):
        small.catalog.follow(soon())
    with small.catalog.reading() as view:
        assert view.match(bucket, ["first"]) == 1
    small.close()
    small.index_bytes_max = 64 * MIB
    small.open()
    assert small.contents()[1:7] == large.contents()[1:7]
    small.close()
    large.close()


def test_a_file_system_without_room_for_pages_is_told_before_they_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(MemoryStoreState(), tmp_path / "one")
    bucket = server.make_bucket()

    def put_many() -> None:
        for _ in range(100):
            server.put(bucket, [f"{server.extent_count}-{n}" for n in range(500)])

    def refuse(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StorageFull, match="grow the index: No space left on device"):
            put_many()
        keys = server.keys(bucket)
    server.put(bucket, ["new"])
    assert server.keys(bucket) == sorted([*keys, "new"])
    server.close()


def test_an_object_in_several_extents_goes_when_all_of_it_does(tmp_path: Path) -> None:
    server = Server(MemoryStoreState(), tmp_path / "one")
    bucket = server.make_bucket()
    names = tuple(ExtentName(server.catalog.writer, number) for number in (1, 2, 3))
    info = ObjectInfo(key="joined", size_bytes=48, etag="etag-2", modified_s=1.0)
    version = SharedVersion(bucket, info, 0, 8, array("Q", range(6)), names, 0, False, 0)
    empty = SharedVersion(
        bucket,
        ObjectInfo(key="empty", size_bytes=0, etag="empty", modified_s=1.0),
        0,
        8,
        array("Q"),
        (),
        0,
        False,
        0,
    )
    server.change(
        lambda change: change.add(new_rows([version, empty]), dict.fromkeys(names, SHAPE))
    )
    with server.catalog.reading() as view:
        stored = view.versions(bucket, ["joined", "empty"])
        assert stored["joined"].extents == names
        assert stored["empty"].extents == ()
        assert view.shapes(names) == dict.fromkeys(names, SHAPE)
        assert [each.info.key for each in view.versions_in(names[1])] == ["joined"]
    server.change(lambda change: change.delete([stored["joined"].name, stored["empty"].name]))
    with server.catalog.reading() as view:
        assert [buried.name for buried in view.graveyard(None, 9)] == list(names)
        assert [buried.name for buried in view.graveyard(names[0], 1)] == [names[1]]
        assert view.is_empty(bucket)
    server.close()


def test_a_closed_index_lets_nobody_in(tmp_path: Path) -> None:
    index = ReplayedIndex(tmp_path, 8 * MIB)
    index.start(IndexState(bytes(16)))
    with index.reading() as view:
        assert view.state == IndexState(bytes(16))
    index.close()
    index.close()
    with pytest.raises(Unavailable, match="closed"), index.reading():
        pass


def test_pieces_of_a_copy_are_all_of_it_and_their_thread_ends() -> None:
    data = bytes(range(256)) * 1000

    def write(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)

    pieces = list(copied_pieces(write, 100_000))
    assert [len(piece) for piece in pieces] == [100_000, 100_000, 56_000]
    assert b"".join(pieces) == data
    unfinished = copied_pieces(write, 10)
    assert next(unfinished) == data[:10]
    unfinished.close()


def test_what_a_copy_fails_with_is_raised() -> None:
    def fail(descriptor: int) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        list(copied_pieces(fail, 10))
