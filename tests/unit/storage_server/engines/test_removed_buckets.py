"""A bucket that is removed between two look-ups of one call holds nothing, in every catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import NotFound
from objectcache_schemas.records import BucketInfo, ObjectAttributes
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.catalog import BucketRow
from tests.contract.engine_suite import BUCKET, put, put_batch
from tests.contract.opened_engines.blob_engines import files_over, memory_over

OPENINGS: dict[str, Callable[[Path], BlobEngine]] = {
    "memory": lambda _: memory_over(lambda store: store),
    "files": lambda folder: files_over(lambda store: store, folder / "store"),
}


@pytest.fixture(params=OPENINGS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobEngine]:
    opened = OPENINGS[request.param](tmp_path)
    opened.create_bucket(BUCKET)
    yield opened
    opened.close()


def lose_buckets(engine: BlobEngine) -> None:
    """From here on a bucket is removed as soon as its number was looked up."""
    find = engine.bucket_row

    def find_and_remove(name: str) -> BucketRow:
        row = find(name)
        engine.delete_bucket(name)
        return row

    engine.bucket_row = find_and_remove  # type: ignore[method-assign]


def test_an_open_of_a_bucket_that_is_being_removed_finds_nothing(engine: BlobEngine) -> None:
    lose_buckets(engine)
    with engine.open_many(BUCKET.name, ["key", "other"]) as opened:
        assert list(opened.infos) == [None, None]


def test_a_delete_in_a_bucket_that_is_being_removed_deletes_nothing(engine: BlobEngine) -> None:
    lose_buckets(engine)
    assert engine.delete(BUCKET.name, ["key"]) == 0


def test_attributes_in_a_bucket_that_is_being_removed_are_of_no_object(engine: BlobEngine) -> None:
    put(engine, "key", b"data")
    seen = engine.stat(BUCKET.name, "key")
    engine.delete(BUCKET.name, ["key"])
    lose_buckets(engine)
    with pytest.raises(NotFound):
        engine.replace_attributes(BUCKET.name, seen, ObjectAttributes())


def test_a_number_that_no_bucket_has_any_more_has_no_versions(engine: BlobEngine) -> None:
    number = engine.bucket_row(BUCKET.name).number
    engine.delete_bucket(BUCKET.name)
    with engine.catalog.reading() as view:
        assert view.versions(number, ["key"]) == {}
        assert view.match(number, ["key"]) == 0
        assert view.scan(number, "", "", 10) == []
        assert view.is_empty(number)
        assert view.key_of_other_size(number, 1) is None
        assert view.totals(number) == BucketTotals(0, 0)


def test_a_change_that_fails_leaves_buckets_as_they_were(engine: BlobEngine) -> None:
    put_batch(engine, {"key": b"data"})
    row = engine.bucket_row(BUCKET.name)
    other = BucketInfo(name="another", owner="o", region="", created_s=1.0)

    def change_and_fail() -> None:
        with engine.catalog.writing() as change:
            change.remove_bucket(change.add_bucket(other))
            change.add_bucket(other)
            change.remove_bucket(row.number)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        change_and_fail()
    assert engine.bucket_row(BUCKET.name) == row
    assert engine.match(BUCKET.name, ["key"]) == 1
    assert [each.name for each in engine.buckets()] == [BUCKET.name]
    with pytest.raises(NotFound):
        engine.bucket(other.name)
