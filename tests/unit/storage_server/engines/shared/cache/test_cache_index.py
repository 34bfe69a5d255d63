"""Ranges of cached objects, and which object goes for another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_storage_server.engines.shared.cache.cache_index import CachedObject, CacheIndex

RANGES = st.tuples(st.integers(0, 40), st.integers(1, 40)).map(lambda at: (at[0], sum(at)))


@given(added=st.lists(RANGES, max_size=12), asked=RANGES)
def test_a_range_is_there_when_each_of_its_bytes_was_added(
    added: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    cached, there = CachedObject(0, []), set[int]()
    for begin, end in added:
        cached.add(begin, end)
        there.update(range(begin, end))
    assert cached.has(*asked) == there.issuperset(range(*asked))
    assert cached.bounds == sorted(set(cached.bounds))
    assert len(cached.bounds) % 2 == 0


@pytest.fixture
def index() -> CacheIndex:
    return CacheIndex(8)


def put(index: CacheIndex, *names: str) -> None:
    for name in names:
        index.place(name, is_read=False).add(0, 10)


def fill(index: CacheIndex, *names: str) -> None:
    for name in names:
        index.place(name, is_read=True).add(0, 10)


def names(index: CacheIndex) -> set[str]:
    return {*index.unread, *index.read}


def test_what_was_read_longest_ago_goes_first(index: CacheIndex) -> None:
    fill(index, *"abcdefgh")
    assert index.find("a", 0, 10) is not None
    fill(index, "i", "j")
    assert names(index) == set("adefghij")
    assert index.evicted_objects == 2


def test_what_nobody_has_read_goes_before_what_was_read_from_a_quarter_on(
    index: CacheIndex,
) -> None:
    fill(index, "a", "b", "c", "d")
    put(index, "w", "x", "y", "z")
    put(index, "v")
    assert names(index) == set("abcdvxyz")
    fill(index, "e")  # three are unread, more than a quarter
    assert names(index) == set("abcdevyz")
    fill(index, "f")
    assert names(index) == set("abcdefvz")
    fill(index, "g")  # and two are not
    assert names(index) == set("bcdefgvz")


def test_what_was_put_and_then_read_counts_as_read(index: CacheIndex) -> None:
    put(index, *"abcdefgh")
    assert index.find("a", 5, 10) is not None
    put(index, *"ijklmno")
    assert names(index) == set("aijklmno")


def test_what_was_only_put_goes_oldest_first_where_nothing_was_read() -> None:
    small = CacheIndex(2)
    put(small, "a", "b", "c")
    assert names(small) == {"b", "c"}


def test_a_range_that_is_not_there_is_no_read(index: CacheIndex) -> None:
    put(index, "a")
    assert index.find("a", 5, 11) is None
    assert index.find("b", 0, 1) is None
    assert list(index.unread) == ["a"]


def test_a_slot_is_one_objects(index: CacheIndex) -> None:
    fill(index, *"abcd")
    put(index, *"efgh")
    assert index.remove("c")
    assert not index.remove("c")
    put(index, *"ijk")
    slots = [each.slot for part in (index.read, index.unread) for each in part.values()]
    assert sorted(slots) == list(range(8))


def test_what_is_restored_keeps_its_order_and_its_slots(index: CacheIndex) -> None:
    fill(index, *"abcd")
    put(index, *"efg")
    index.remove("b")
    smaller = CacheIndex(6)
    smaller.restore(list(index.unread.items()), list(index.read.items()))
    assert [*smaller.unread, *smaller.read] == ["e", "f", "a", "c", "d"]  # g's slot is the seventh
    put(smaller, "h")  # in b's slot
    slots = [each.slot for part in (smaller.read, smaller.unread) for each in part.values()]
    assert sorted(slots) == list(range(6))
    fill(smaller, "i")
    assert "e" not in names(smaller)
