"""Listings with delimiters against a plain model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.messages.reads import ListObjects
from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.s3.list_objects import list_objects
from tests.unit.examples import examples

ALPHABET = "ab/\u00e9\uffff\U0010ffff"


def info_of(key: str) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=0, etag="e", modified_s=0.0)


def model(keys: set[str], prefix: str, delimiter: str) -> list[tuple[str, str]]:
    entries: set[tuple[str, str]] = set()
    for key in keys:
        if key.startswith(prefix):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            entries.add((key, "key") if end < 0 else (key[: end + len(delimiter)], "prefix"))
    return sorted(entries)


@given(
    keys=st.sets(st.text(ALPHABET, min_size=1, max_size=6), max_size=25),
    prefix=st.text(ALPHABET, max_size=2),
    delimiter=st.sampled_from(["", "/", "a", "b/"]),
    limit=st.integers(1, 5),
)
@settings(max_examples=examples(75), deadline=None)
def test_all_pages_together_are_the_model(
    keys: set[str], prefix: str, delimiter: str, limit: int
) -> None:
    ordered = sorted(keys)

    def scan(scan_prefix: str, start_after: str, scan_limit: int) -> list[ObjectInfo]:
        found = [k for k in ordered if k.startswith(scan_prefix) and k > start_after]
        return [info_of(key) for key in found[:scan_limit]]

    start_after, seen = "", list[tuple[str, str]]()
    for _ in range(len(keys) + 2):
        page = list_objects(
            ListObjects(
                bucket="b", prefix=prefix, delimiter=delimiter, start_after=start_after, limit=limit
            ),
            scan,
        )
        entries = [(one.key, "key") for one in page.objects]
        entries += [(one, "prefix") for one in page.common_prefixes]
        assert len(entries) <= limit
        seen += sorted(entries)
        if page.next_start_after is None:
            break
        assert len(entries) == limit
        start_after = page.next_start_after
    assert seen == model(keys, prefix, delimiter)


def test_a_rolled_up_prefix_is_skipped_not_read_through() -> None:
    keys = sorted([f"dir/{n:05d}" for n in range(10_000)] + ["z"])
    scanned = []

    def scan(prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        found = [key for key in keys if key > start_after][:limit]
        scanned.extend(found)
        return [info_of(key) for key in found]

    page = list_objects(ListObjects(bucket="b", delimiter="/", limit=10), scan)
    assert (page.common_prefixes, [one.key for one in page.objects]) == (("dir/",), ["z"])
    assert len(scanned) < 50


def test_many_folders_cost_one_key_each_and_a_flat_one_few_scans() -> None:
    keys = [f"{folder:03d}/{n:03d}" for folder in range(100) for n in range(100)]
    keys += [f"flat-{n:04d}" for n in range(1000)]
    scans: list[int] = []

    def scan(prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        found = [key for key in keys if key > start_after][:limit]
        scans.append(len(found))
        return [info_of(key) for key in found]

    page = list_objects(ListObjects(bucket="b", delimiter="/", limit=1000), scan)
    assert (len(page.common_prefixes), len(page.objects)) == (100, 900)
    assert scans[:100] == [1] * 100
    assert len(scans) < 110
    assert page.next_start_after == "flat-0899"


def test_a_limit_of_zero_lists_nothing() -> None:
    page = list_objects(ListObjects(bucket="b", limit=0), lambda *_: [info_of("a")])
    assert (page.objects, page.next_start_after) == ((), None)
