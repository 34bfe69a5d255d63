"""Several catalogs on one store: what one changes, all have; nothing is half, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound, Unavailable
from objectcache_schemas.records import ObjectAttributes
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.shared_catalog import Moment
from objectcache_storage_server.engines.shared.versions import SharedVersionName
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import (
    BUCKET,
    SHAPE,
    Server,
    document_names,
    soon,
)


def test_what_one_server_stores_every_server_has(one: Server, other: Server) -> None:
    bucket = one.make_bucket()
    stored = one.put(bucket, ["a", "b", "c", "d", "e"])
    assert other.keys(bucket) == ["a", "b", "c", "d", "e"]
    with one.catalog.reading() as mine, other.catalog.reading() as theirs:
        assert mine.state == theirs.state
        found = theirs.versions(bucket, ["a", "e", "x"])
        assert found == mine.versions(bucket, ["a", "e", "x"])
        assert list(found) == ["a", "e"]
        assert found["e"].info == stored[4].info
        assert found["e"].checksums == stored[4].checksums
        assert found["e"].extents == stored[4].extents
        assert found["e"].serial != found["a"].serial != 0
        assert theirs.match(bucket, ["a", "b", "x", "c"]) == 2
        assert theirs.totals(bucket) == BucketTotals(5, 80)
        assert theirs.find_bucket("bucket") == mine.find_bucket("bucket")
        assert theirs.shapes([stored[0].extents[0]]) == {stored[0].extents[0]: SHAPE}
        assert [v.info.key for v in theirs.versions_in(stored[0].extents[0])] == list("abcd")


def test_bucket_numbers_are_never_used_again(one: Server, other: Server) -> None:
    first = one.make_bucket()
    other.change(lambda change: change.remove_bucket(first))
    assert one.make_bucket() == first + 1
    with one.catalog.reading() as view:
        assert [info.name for info in view.buckets()] == ["bucket"]


def test_a_replaced_or_deleted_extent_is_buried_when_nothing_names_it(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    stored = one.put(bucket, ["a", "b"])
    extent = stored[0].extents[0]
    other.catalog.follow(soon())
    other.put(bucket, ["a"], byte=1)
    one.catalog.follow(soon())
    with one.catalog.reading() as view:
        row = view.extent(extent)
        assert row is not None
        assert row.live_count == 1
        last = view.versions(bucket, ["b"])["b"]
        number = view.state.end
    gone = one.change(lambda change: change.delete([last.name, last.name]))
    assert gone == [last]
    other.catalog.follow(soon())
    with other.catalog.reading() as view:
        assert view.extent(extent) is None
        (buried,) = view.graveyard(None, 10)
        assert (buried.name, buried.shape, buried.emptied_by) == (extent, SHAPE, number)
        assert view.totals(bucket) == BucketTotals(1, 16)
        assert view.match(bucket, ["b"]) == 0
    other.change(lambda change: change.bury([extent]))
    with other.catalog.reading() as view:
        assert view.graveyard(None, 10) == []


def test_only_the_very_version_is_deleted_or_pinned(one: Server) -> None:
    bucket = one.make_bucket()
    one.put(bucket, ["a"])
    with one.catalog.reading() as view:
        before = view.versions(bucket, ["a"])["a"]
    one.put(bucket, ["a"], byte=1)
    assert one.change(lambda change: change.delete([before.name])) == []
    assert one.change(lambda change: change.set_pinned([before.name], True)) == 0
    with one.catalog.reading() as view:
        now = view.versions(bucket, ["a"])["a"]
    assert one.change(lambda change: change.set_pinned([now.name], True)) == 1
    missing = SharedVersionName(bucket, "x", 1)
    with one.catalog.reading() as view:
        assert view.pinned([before.name, now.name, missing]) == {now.name}
    attributes = ObjectAttributes(content_type="text/plain")
    one.change(lambda change: change.replace_attributes(now.name, attributes))
    with one.catalog.reading() as view:
        changed = view.versions(bucket, ["a"])["a"]
        assert changed.info.attributes == attributes
        assert changed.name == now.name
        assert view.pinned([now.name]) == {now.name}


def test_keys_of_any_length_are_in_order(one: Server, other: Server) -> None:
    bucket = one.make_bucket()
    keys = sorted(["k" * 500, "k" * 600 + "b", "k" * 600 + "a", "k" * 1024, "z", "ä"])
    one.put(bucket, keys)
    assert other.keys(bucket) == keys
    with other.catalog.reading() as view:
        assert set(view.versions(bucket, keys)) == set(keys)
        assert view.match(bucket, keys) == len(keys)
        every = view.every_version((bucket, keys[1]), 10)
        assert [version.info.key for version in every] == keys[2:]
        deleted = [view.versions(bucket, [key])[key].name for key in keys[1:4]]
    other.change(lambda change: change.delete(deleted))
    assert one.keys(bucket) == [keys[0], *keys[4:]]


def test_a_change_that_fails_changes_nothing(one: Server, other: Server) -> None:
    bucket = one.make_bucket()
    versions, shapes = one.staged(bucket, ["a"])

    def add_and_fail(change: ReplayedChange) -> None:
        change.add(new_rows(versions), shapes)
        change.put_document("name", b"document")
        raise Conflict("on purpose")

    with one.catalog.reading() as view:
        before = view.state
    with pytest.raises(Conflict, match="on purpose"):
        one.change(add_and_fail)
    with one.catalog.reading() as view:
        assert view.state == before
    assert other.keys(bucket) == []


def test_what_is_refused_was_judged_at_the_logs_end(one: Server, other: Server) -> None:
    one.make_bucket()
    found = other.change(lambda change: change.bucket("bucket").info)
    assert found == BUCKET
    with pytest.raises(NotFound):
        other.change(lambda change: change.bucket("none"))


def test_documents_are_shared(one: Server, other: Server) -> None:
    one.change(lambda change: change.put_document("accounts", b"first"))
    other.change(lambda change: change.put_document("accounts", b"second"))
    one.catalog.follow(soon())
    with one.catalog.reading() as view:
        assert view.document("accounts") == b"second"
        assert view.document("others") is None
        assert document_names(view) == ["accounts"]
    one.change(lambda change: change.put_document("accounts", None))
    other.catalog.follow(soon())
    with other.catalog.reading() as view:
        assert view.document("accounts") is None


def test_a_change_larger_than_a_record_is_refused(one: Server) -> None:
    limit = one.store.capabilities.record_bytes_max
    with pytest.raises(InvalidRequest, match=r"record of the store .* has at most \d+"):
        one.change(lambda change: change.put_document("large", bytes(limit)))
    one.change(lambda change: change.put_document("fits", bytes(limit - 200)))


def test_an_extent_that_was_emptied_or_whose_writer_is_fenced_takes_no_version(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    (stored,) = one.put(bucket, ["a"])
    with one.catalog.reading() as view:
        name = view.versions(bucket, ["a"])["a"].name
    one.change(lambda change: change.delete([name]))
    with pytest.raises(Unavailable, match="deleted meanwhile"):
        one.change(lambda change: change.add(new_rows([stored]), {stored.extents[0]: SHAPE}))
    versions, shapes = one.staged(bucket, ["b"])
    fenced = one.catalog.writer
    other.change(lambda change: change.fence(fenced))
    with pytest.raises(Unavailable, match="took it for dead"):
        one.change(lambda change: change.add(new_rows(versions), shapes))
    assert one.new_writer() != fenced
    one.put(bucket, ["b"])
    assert other.keys(bucket) == ["b"]
    with other.catalog.reading() as view:
        row = view.writer_row(fenced)
        assert row is not None
        assert row.fenced_by is not None
    other.change(lambda change: change.forget_writer(fenced))
    with pytest.raises(Unavailable, match="took it for dead"):
        one.change(lambda change: change.add(new_rows(versions), shapes))


def test_a_change_is_of_the_moment_that_was_read_until_anything_is_changed(one: Server) -> None:
    def act(change: ReplayedChange) -> tuple[Moment, Moment]:
        before = change.moment
        change.put_document("name", b"document")
        return before, change.moment

    with one.catalog.reading() as view:
        seen = view.moment
    before, after = one.change(act)
    assert before == seen
    assert after != seen
    with one.catalog.reading() as view:
        assert view.moment not in (before, after)


def test_an_index_is_used_again_after_a_restart(one: Server, other: Server) -> None:
    bucket = one.make_bucket()
    one.put(bucket, ["a"])
    one.close()
    folders = sorted(path.name for path in one.folder.iterdir())
    other.put(bucket, ["b"])
    one.open()
    assert one.keys(bucket) == ["a", "b"]
    assert sorted(path.name for path in one.folder.iterdir()) == folders


def test_a_folder_of_another_store_is_refused(one: Server, tmp_path: Path) -> None:
    one.close()
    one.state = MemoryStoreState()
    with pytest.raises(Unavailable, match="belongs to the shared store"):
        one.open()
    Server(one.state, tmp_path / "elsewhere").close()
    with pytest.raises(Unavailable, match="belongs to the shared store"):
        one.open()
