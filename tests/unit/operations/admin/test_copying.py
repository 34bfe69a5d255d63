"""What a copy of a bucket makes of listings."""

from __future__ import annotations

import pytest

from objectcache_operations.admin.copying.copy_chunks import (
    BATCH_BYTES_MAX,
    BATCH_CHUNKS_MAX,
    batches,
)
from objectcache_operations.admin.copying.inventory import (
    SOURCE,
    TARGET,
    Amount,
    Inventory,
    Listed,
)
from objectcache_operations.admin.copying.listings import parse_page
from objectcache_schemas.errors import ObjectCacheError

PAGE = b"""<?xml version="1.0"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>
<Contents><Key>a%20b%2Fc</Key><LastModified>2026-11-27T02:30:00.001Z</LastModified>
<ETag>&quot;e-1&quot;</ETag><Size>7</Size></Contents>
<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>
</ListBucketResult>"""


def listed(key: str, modified: str = "1", etag: str = "e", size_bytes: int = 1) -> Listed:
    return Listed(key, size_bytes, etag, modified)


def test_a_page_is_its_objects_and_the_way_to_the_next() -> None:
    expected = Listed("a b/c", 7, "e-1", "2026-11-27T02:30:00.001Z")
    assert parse_page(PAGE) == ([expected], "next")
    assert parse_page(PAGE.replace(b"NextContinuationToken", b"Other"))[1] is None


@pytest.mark.parametrize("wrong", [b"", b"<html>", PAGE.replace(b"<Size>7", b"<Size>x"), PAGE[:-9]])
def test_what_is_no_listing_is_said_to_be_none(wrong: bytes) -> None:
    with pytest.raises(ObjectCacheError, match="is none"):
        parse_page(wrong)


def test_what_was_stored_together_is_copied_together_and_nothing_else() -> None:
    with Inventory() as inventory:
        rows = [listed("b", "2"), listed("c", "1"), listed("a", "2"), listed("d", "3")]
        inventory.fill(SOURCE, [rows[:2], rows[2:]])
        assert list(batches(inventory.missing(), 1)) == [["c"], ["a", "b"], ["d"]]


def test_a_batch_is_bounded_by_chunks_and_bytes() -> None:
    rows = [listed(f"{number:05}") for number in range(BATCH_CHUNKS_MAX + 1)]
    assert [len(one) for one in batches(rows, 1)] == [BATCH_CHUNKS_MAX, 1]
    assert [len(one) for one in batches(rows[:5], BATCH_BYTES_MAX // 2)] == [2, 2, 1]
    assert [len(one) for one in batches(rows[:2], 2 * BATCH_BYTES_MAX)] == [1, 1]


def test_only_the_same_key_size_and_etag_are_there_already() -> None:
    with Inventory() as inventory:
        inventory.fill(SOURCE, [[listed(key) for key in "abcd"]])
        target = [listed("a"), listed("b", etag="other"), listed("c", size_bytes=2), listed("e")]
        inventory.fill(TARGET, [target])
        assert [one.key for one in inventory.missing()] == ["b", "c", "d"]
        assert inventory.same() == Amount(1, 1)
        assert inventory.arrived() == Amount(2, 2)
        inventory.forget(["d"])
        assert inventory.source() == Amount(3, 3)
        inventory.fill(TARGET, [])
        assert inventory.arrived() == Amount(0, 0)
