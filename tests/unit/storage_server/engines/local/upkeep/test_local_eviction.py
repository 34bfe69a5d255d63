"""Which chunks go: against a slow oracle, and in a store that is filled again and again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_storage_server.engines.eviction.plan_eviction import choose_victims, expired
from objectcache_storage_server.engines.local.space.dense_tables import (
    EXTENT_COLUMNS,
    OBJECT_COLUMNS,
    DenseTable,
)
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES
from tests.unit.examples import examples

Rows = npt.NDArray[np.void]


@dataclass
class Tables:
    """Objects and extents as a test words them."""

    objects: DenseTable = field(default_factory=lambda: DenseTable(OBJECT_COLUMNS))
    extents: DenseTable = field(default_factory=lambda: DenseTable(EXTENT_COLUMNS))

    def extent(self, slots: int, *, blocks: int = 0, readers: int = 0) -> int:
        number = self.extents.add()
        row = self.extents.rows[number]
        row["slots"], row["readers"] = slots, readers
        row["length_bytes"] = (blocks or slots) * BLOCK_BYTES
        return number

    def chunk(
        self,
        extent: int,
        own: int,
        parent: int = 0,
        used: int = 0,
        *,
        bucket: int = 1,
        is_evictable: bool = True,
        is_pinned: bool = False,
        modified_s: float = 0.0,
    ) -> int:
        number = self.objects.add()
        row = self.objects.rows[number]
        row["own_hash"], row["parent_hash"], row["last_used"] = own, parent, used
        row["extent"], row["slot"] = extent, self.extents.rows["live_slots"][extent]
        row["bucket"], row["is_evictable"], row["is_pinned"] = bucket, is_evictable, is_pinned
        row["size_bytes"], row["modified_s"] = BLOCK_BYTES, modified_s
        self.extents.rows["live_slots"][extent] += 1
        return number

    def prefix(self, own_hashes: list[int], used: int, *, slots: int = 1) -> list[int]:
        numbers: list[int] = []
        for index, own in enumerate(own_hashes):
            if index % slots == 0:
                extent = self.extent(min(slots, len(own_hashes) - index))
            parent = own_hashes[index - 1] if index else 0
            numbers.append(self.chunk(extent, own, parent, used))
        return numbers

    def remove(self, number: int) -> None:
        extent = int(self.objects.rows["extent"][number])
        self.objects.remove(number)
        self.extents.rows["live_slots"][extent] -= 1
        if not self.extents.rows["live_slots"][extent]:
            self.extents.remove(extent)

    def victims(self, blocks: int, bucket: int | None = None) -> list[int]:
        chosen = choose_victims(
            self.objects.used, self.extents.used, blocks * BLOCK_BYTES, bucket=bucket
        )
        return [int(number) for number in chosen]


# --- the rules, one by one ---


def test_the_least_recently_used_goes_first() -> None:
    tables = Tables()
    first, second, third = (tables.chunk(tables.extent(1), own, 0, 9 - own) for own in (1, 2, 3))
    assert tables.victims(1) == [third]
    assert tables.victims(2) == [third, second]
    assert tables.victims(99) == [third, second, first]


def test_nothing_goes_where_nothing_is_wanted() -> None:
    tables = Tables()
    assert tables.victims(1) == []
    tables.prefix([1, 2], 1)
    assert tables.victims(0) == []
    assert tables.victims(-5) == []


def test_a_prefix_goes_from_its_end_although_its_beginning_was_used_earlier() -> None:
    tables = Tables()
    a, b, c = (
        tables.chunk(tables.extent(1), own, own - 1, used) for own, used in ((1, 1), (2, 2), (3, 3))
    )
    other = tables.chunk(tables.extent(1), 10, 0, 2)
    assert tables.victims(1) == [other]
    assert tables.victims(4) == [other, c, b, a]


@pytest.mark.parametrize("what", ["pinned", "read", "no cache content"])
def test_what_stays_holds_all_before_it_but_not_what_follows(what: str) -> None:
    tables = Tables()
    before = tables.chunk(tables.extent(1), 1, 0, 1)
    tables.chunk(
        tables.extent(1, readers=int(what == "read")),
        2,
        1,
        1,
        is_pinned=what == "pinned",
        is_evictable=what != "no cache content",
    )
    after = tables.chunk(tables.extent(1), 3, 2, 1)
    fork = tables.chunk(tables.extent(1), 4, 1, 1)
    assert sorted(tables.victims(99)) == [after, fork]
    assert before not in tables.victims(99)


def test_space_counts_only_in_extents_that_become_empty() -> None:
    tables = Tables()
    half = tables.extent(4)
    tables.chunk(half, 1, 0, 1)
    tables.chunk(half, 2, 0, 50)
    whole = tables.extent(2)
    pair = [tables.chunk(whole, own, 0, 9) for own in (3, 4)]
    assert tables.victims(1) == pair, "the old chunk beside a recent one would free nothing"
    assert len(tables.victims(3)) == 4


def test_what_follows_goes_with_its_beginning_also_from_an_extent_that_stays() -> None:
    tables = Tables()
    shared = tables.extent(2)
    tail = tables.chunk(shared, 2, 1, 5)
    recent = tables.chunk(shared, 9, 0, 99)
    head = tables.chunk(tables.extent(1), 1, 0, 1)
    assert tables.victims(1) == [tail, head]
    assert recent not in tables.victims(1)


def test_among_equals_the_extent_with_fewer_chunks_left_goes_first() -> None:
    tables = Tables()
    full, begun = tables.extent(4), tables.extent(4)
    for own in range(1, 5):
        tables.chunk(full, own, 0, 7)
    last = tables.chunk(begun, 5, 0, 7)
    assert tables.victims(4) == [last]


def test_a_bucket_over_its_quota_gives_its_own_chunks_only() -> None:
    tables = Tables()
    tables.chunk(tables.extent(1), 1, 0, 1, bucket=1)
    theirs = tables.chunk(tables.extent(1), 2, 0, 2, bucket=2)
    assert tables.victims(99, bucket=2) == [theirs]
    assert tables.victims(99, bucket=3) == []


def test_chunks_that_name_each_other_in_a_circle_can_go() -> None:
    tables = Tables()
    circle = [tables.chunk(tables.extent(1), own, own % 3 + 1, own) for own in (1, 2, 3)]
    itself = tables.chunk(tables.extent(1), 4, 4, 1)
    tail = tables.chunk(tables.extent(1), 5, 3, 9)
    chosen = tables.victims(99)
    assert sorted(chosen) == sorted([*circle, itself, tail])
    assert chosen.index(tail) < chosen.index(circle[2])


def test_chunks_that_share_a_hash_go_after_all_that_name_it() -> None:
    tables = Tables()
    twins = [tables.chunk(tables.extent(1), 1, 0, used) for used in (1, 2)]
    child = tables.chunk(tables.extent(1), 2, 1, 30)
    other = tables.chunk(tables.extent(1), 3, 0, 20)
    assert tables.victims(1) == [other]
    assert tables.victims(99) == [other, child, *twins]


def test_an_object_without_bytes_frees_nothing_and_is_let_be() -> None:
    tables = Tables()
    extent = tables.extent(1)
    chunk = tables.chunk(extent, 1, 0, 5)
    empty = tables.objects.add()
    tables.objects.rows[empty] = 0
    tables.objects.rows["is_used"][empty] = tables.objects.rows["is_evictable"][empty] = True
    tables.objects.rows["own_hash"][empty] = 77
    assert tables.victims(99) == [chunk]


def test_a_very_long_prefix_goes_from_its_very_end() -> None:
    tables = Tables()
    chunks = tables.prefix(list(range(1, 5001)), 1, slots=8)
    assert tables.victims(20) == chunks[:-25:-1]


# --- against the oracle ---


@st.composite
def stores(draw: st.DrawFn) -> Tables:
    """Chunks with hashes 1, 2, ..., which name what came before them, or what is absent."""
    tables = Tables()
    for _ in range(draw(st.integers(0, 8))):
        readers = draw(st.sampled_from([0, 0, 0, 0, 1]))
        tables.extent(draw(st.integers(1, 4)), blocks=draw(st.integers(1, 6)), readers=readers)
    count = len(tables.extents)
    for own in range(1, 1 + (draw(st.integers(0, 24)) if count else 0)):
        room = tables.extents.used
        extent = draw(st.integers(0, count - 1))
        if room["live_slots"][extent] == room["slots"][extent]:
            continue
        tables.chunk(
            extent,
            own,
            draw(st.sampled_from([0, 99, *range(1, own)])),
            draw(st.integers(0, 5)),
            bucket=draw(st.sampled_from([1, 1, 2])),
            is_evictable=draw(st.sampled_from([True] * 7 + [False])),
            is_pinned=draw(st.sampled_from([False] * 7 + [True])),
        )
    for number in range(len(tables.objects)):
        if draw(st.integers(0, 9)) == 0:
            tables.remove(number)
    return tables


class Oracle:
    """The rules, chunk by chunk."""

    def __init__(self, objects: Rows, extents: Rows, bucket: int | None) -> None:
        self.objects, self.extents, self.bucket = objects, extents, bucket
        self.numbers = [n for n in range(len(objects)) if objects[n]["is_used"]]

    def children(self, number: int) -> list[int]:
        own = self.objects[number]["own_hash"]
        return [n for n in self.numbers if self.objects[n]["parent_hash"] == own]

    def with_all_after(self, number: int) -> list[int]:
        after = [n for child in self.children(number) for n in self.with_all_after(child)]
        return [number, *after]

    def use(self, number: int) -> int:
        return max(int(self.objects[n]["last_used"]) for n in self.with_all_after(number))

    def depth(self, number: int) -> int:
        parent = self.objects[number]["parent_hash"]
        before = [n for n in self.numbers if self.objects[n]["own_hash"] == parent]
        return 1 + self.depth(before[0]) if before else 0

    def may_go(self, number: int) -> bool:
        def alone(row: np.void) -> bool:
            is_read = self.extents[row["extent"]]["readers"] > 0
            is_ours = self.bucket is None or row["bucket"] == self.bucket
            return bool(row["is_evictable"] and not row["is_pinned"] and not is_read and is_ours)

        return all(alone(self.objects[n]) for n in self.with_all_after(number))

    def chunks_in(self, extent: int) -> list[int]:
        return [n for n in self.numbers if self.objects[n]["extent"] == extent]

    def turn(self, extent: int) -> tuple[float, ...]:
        chunks, row = self.chunks_in(extent), self.extents[extent]
        latest = max(self.use(n) for n in chunks)
        nearest = min(self.depth(n) for n in chunks)
        return (latest, -nearest, len(chunks) / int(row["slots"]), extent)

    def victims(self, wanted_bytes: int) -> list[int]:
        extents = [e for e in range(len(self.extents)) if self.chunks_in(e)]
        extents = [e for e in extents if all(self.may_go(n) for n in self.chunks_in(e))]
        gone: list[int] = []
        for extent in sorted(extents, key=self.turn):
            emptied = [e for e in extents if set(self.chunks_in(e)) <= set(gone)]
            if sum(int(self.extents[e]["length_bytes"]) for e in emptied) >= wanted_bytes:
                break
            going = {n for chunk in self.chunks_in(extent) for n in self.with_all_after(chunk)}
            fresh = going - set(gone)
            gone += sorted(fresh, key=lambda n: (self.use(n), -self.depth(n), n))
        return gone


@settings(max_examples=examples(75), deadline=None)
@given(stores(), st.integers(1, 30), st.sampled_from([None, None, 1, 2]))
def test_the_oracle_chooses_the_same(tables: Tables, blocks: int, bucket: int | None) -> None:
    oracle = Oracle(tables.objects.used, tables.extents.used, bucket)
    assert tables.victims(blocks, bucket) == oracle.victims(blocks * BLOCK_BYTES)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 3)), max_size=12),
    st.integers(1, 12),
)
def test_any_links_at_all_end_and_none_goes_before_one_that_names_it(
    chunks: list[tuple[int, int, int]], blocks: int
) -> None:
    tables = Tables()
    for own, parent, used in chunks:
        tables.chunk(tables.extent(1), own, parent, used)
    chosen = tables.victims(blocks)
    assert len(set(chosen)) == len(chosen) <= blocks
    order = {number: place for place, number in enumerate(chosen)}
    circling = hashes_in_circles([(own, parent) for own, parent, _ in chunks])
    for number in chosen:
        own = chunks[number][0]
        for child, (_, parent, _) in enumerate(chunks):
            if parent == own and own not in circling:
                assert order.get(child, len(order)) < order[number]


def hashes_in_circles(links: list[tuple[int, int]]) -> set[int]:
    """Hashes from which a walk over any chunks that have them comes back."""
    after = {own: {parent for o, parent in links if o == own} for own, _ in links}
    for _ in after:
        after = {
            own: {far for near in seen for far in (near, *after.get(near, ()))}
            for own, seen in after.items()
        }
    return {own for own, seen in after.items() if own in seen}


# --- a store over time ---


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [1, 4])
def test_no_chunk_ever_misses_one_that_was_evicted_before_it(seed: int, slots: int) -> None:
    rng = random.Random(seed)
    tables = Tables()
    evicted: set[int] = set()
    number_of: dict[int, int] = {}
    prefixes: list[list[int]] = []
    fresh_hash, capacity_blocks = 1, 150
    for tick in range(1, 250):
        # A prefix that was seen before, up to somewhere, and something after it.
        known = rng.choice(prefixes) if prefixes and rng.random() < 0.7 else []
        prefix = known[: rng.randint(0, len(known))]
        prefix = prefix + list(range(fresh_hash, fresh_hash + rng.randint(0, 9)))
        fresh_hash += 10
        prefixes.append(prefix)
        missing = [own for own in prefix if own not in number_of]
        for own in prefix:
            if own in number_of:
                tables.objects.rows["last_used"][number_of[own]] = tick
        for begin in range(0, len(missing), slots):
            run = missing[begin : begin + slots]
            extent = tables.extent(len(run))
            for own in run:
                place = prefix.index(own)
                parent = prefix[place - 1] if place else 0
                number_of[own] = tables.chunk(extent, own, parent, tick)
        evicted -= set(prefix)
        in_use = tables.extents.used
        taken = int(in_use["length_bytes"][in_use["is_used"]].sum()) // BLOCK_BYTES
        if taken > capacity_blocks:
            before = set(in_use["is_used"].nonzero()[0])
            for number in tables.victims(taken - capacity_blocks):
                own = int(tables.objects.rows["own_hash"][number])
                del number_of[own]
                evicted.add(own)
                tables.remove(number)
            after = set(tables.extents.used["is_used"].nonzero()[0])
            freed = sum(int(tables.extents.rows["length_bytes"][e]) for e in before - after)
            assert freed >= (taken - capacity_blocks) * BLOCK_BYTES, f"seed {seed}"
        stored = tables.objects.used[tables.objects.used["is_used"]]
        torn = evicted.intersection(stored["parent_hash"].tolist())
        assert not torn, f"seed {seed}, tick {tick}"
    assert evicted, f"seed {seed} never filled the store"


# --- expiry ---


def test_what_is_older_than_its_bucket_allows_expires_ends_first() -> None:
    tables = Tables()
    head, middle, young = (
        tables.chunk(tables.extent(1), own, own - 1, 0, modified_s=age)
        for own, age in ((1, 10.0), (2, 20.0), (3, 30.0))
    )
    forever = tables.chunk(tables.extent(1), 4, 0, 0, bucket=2, modified_s=0.0)
    pinned = tables.chunk(tables.extent(1), 5, 0, 0, is_pinned=True)
    objects = tables.objects.used
    assert expired(objects, {1: 100.0}, 109.9).tolist() == []
    assert expired(objects, {1: 100.0}, 110.0).tolist() == [head]
    assert expired(objects, {1: 100.0}, 120.0).tolist() == [middle, head]
    everything = expired(objects, {1: 100.0, 2: 1.0}, 1000.0).tolist()
    assert everything.index(young) < everything.index(middle) < everything.index(head)
    assert forever in everything
    assert pinned not in everything


def test_what_a_pinned_chunk_follows_does_not_expire() -> None:
    tables = Tables()
    before = [
        tables.chunk(tables.extent(1), own, own - 1, modified_s=age)
        for own, age in ((1, 10.0), (2, 90.0))  # the second is not old, and links the first
    ]
    pinned = tables.chunk(tables.extent(1), 3, 2, is_pinned=True)
    after = tables.chunk(tables.extent(1), 4, 3)
    beside = tables.chunk(tables.extent(1), 5, 1)
    assert set(expired(tables.objects.used, {1: 50.0}, 100.0).tolist()) == {after, beside}
    assert set(expired(tables.objects.used, {1: 50.0}, 1000.0).tolist()) == {after, beside}
    tables.objects.rows["is_pinned"][pinned] = False
    everything = {*before, pinned, after, beside}
    assert set(expired(tables.objects.used, {1: 50.0}, 1000.0).tolist()) == everything


def test_nothing_expires_without_a_rule() -> None:
    tables = Tables()
    tables.chunk(tables.extent(1), 1)
    assert expired(tables.objects.used, {}, 1e12).tolist() == []
