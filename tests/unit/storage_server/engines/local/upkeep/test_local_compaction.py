"""Which chunks are moved together, and that moving them ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_storage_server.engines.local.space.dense_tables import (
    EXTENT_COLUMNS,
    OBJECT_COLUMNS,
    DenseTable,
)
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, slots_for
from objectcache_storage_server.engines.local.upkeep import plan_compaction
from objectcache_storage_server.engines.local.upkeep.plan_compaction import (
    Move,
    candidate_count,
    plan_moves,
)
from tests.unit.examples import examples

SLICE_BYTES = 4096
LAYERS = 3
ROW_BYTES = 8 * SLICE_BYTES  # full extents have 8 slots
EXTENT_BYTES_MAX = 1 << 20
CHUNK_BYTES = LAYERS * SLICE_BYTES


@dataclass
class Store:
    """Tables, and what applying a move does to them."""

    objects: DenseTable = field(default_factory=lambda: DenseTable(OBJECT_COLUMNS))
    extents: DenseTable = field(default_factory=lambda: DenseTable(EXTENT_COLUMNS))
    serial: int = 0
    moved_bytes: int = 0

    def extent(self, slots: int, slice_bytes: int = SLICE_BYTES, layers: int = LAYERS) -> int:
        number = self.extents.add()
        row = self.extents.rows[number]
        row["slots"], row["num_layers"], row["slice_bytes"] = slots, layers, slice_bytes
        row["length_bytes"] = Geometry(slots, layers, slice_bytes).extent_bytes
        return number

    def chunk(
        self, extent: int, own: int, parent: int = 0, *, bucket: int = 1, used: int = 0
    ) -> int:
        number = self.objects.add()
        row, home = self.objects.rows[number], self.extents.rows[extent]
        row["own_hash"], row["parent_hash"], row["last_used"] = own, parent, used
        row["bucket"], row["is_evictable"], row["serial"] = bucket, True, self.serial
        row["extent"], row["slot"] = extent, home["live_slots"]
        row["size_bytes"] = home["num_layers"] * home["slice_bytes"]
        home["live_slots"] += 1
        return number

    def put(self, own_hashes: list[int], parent: int = 0, *, used: int = 0) -> list[int]:
        """One put: its chunks in one extent."""
        self.serial += 1
        extent = self.extent(len(own_hashes))
        numbers: list[int] = []
        for own in own_hashes:
            numbers.append(self.chunk(extent, own, parent, used=used))
            parent = own
        return numbers

    def leave(self, number: int) -> None:
        extent = int(self.objects.rows["extent"][number])
        self.extents.rows["live_slots"][extent] -= 1
        if not self.extents.rows["live_slots"][extent]:
            self.extents.remove(extent)

    def remove(self, number: int) -> None:
        self.leave(number)
        self.objects.remove(number)

    def apply(self, move: Move) -> None:
        self.serial += 1
        extent = self.extent(
            move.geometry.slots, move.geometry.slice_bytes, move.geometry.num_layers
        )
        self.extents.rows["live_slots"][extent] = len(move.numbers)
        for slot, number in enumerate(move.numbers):
            self.leave(number)
            row = self.objects.rows[number]
            row["extent"], row["slot"], row["serial"] = extent, slot, self.serial
            self.moved_bytes += int(row["size_bytes"])

    def plan(self, moves_max: int = 1000, *, now_s: float = 0.0, idle_s: float = 0.0) -> list[Move]:
        return plan_moves(
            self.objects.used,
            self.extents.used,
            row_bytes=ROW_BYTES,
            extent_bytes_max=EXTENT_BYTES_MAX,
            now_s=now_s,
            idle_s=idle_s,
            moves_max=moves_max,
        )

    def candidates(self) -> int:
        return candidate_count(self.objects.used, self.extents.used, ROW_BYTES, EXTENT_BYTES_MAX)

    def order(self) -> float:
        """What every move is to raise: m log2 m over extents, less their space in chunks."""
        rows = self.extents.used[self.extents.used["is_used"]]
        together = sum(int(m) * log2(int(m)) for m in rows["live_slots"] if m)
        chunk_bytes = rows["num_layers"] * rows["slice_bytes"]
        return together - float((rows["length_bytes"] / chunk_bytes).sum())


def numbers_of(moves: list[Move]) -> list[tuple[int, ...]]:
    return [move.numbers for move in moves]


# --- what is moved ---


def test_the_settings_of_these_tests_make_extents_of_eight() -> None:
    assert slots_for(LAYERS, SLICE_BYTES, ROW_BYTES, EXTENT_BYTES_MAX) == 8


def test_a_prefix_that_came_in_small_puts_is_laid_together_in_its_order() -> None:
    store = Store()
    second = [store.put([own], own - 1)[0] for own in range(11, 15)]
    first = [store.put([own], own - 1 if own > 1 else 0)[0] for own in range(1, 11)]
    [head, tail] = store.plan()
    assert head == Move(1, tuple(first[:8]), Geometry(8, LAYERS, SLICE_BYTES))
    assert tail == Move(1, (*first[8:], *second), Geometry(6, LAYERS, SLICE_BYTES))
    assert store.candidates() == 14


def test_extents_that_are_shorter_since_they_are_encoded_are_joined_like_others() -> None:
    store = Store()
    chunks = [*store.put([1, 2, 3, 4]), *store.put([5, 6, 7, 8], 4)]
    lengths = store.extents.rows["length_bytes"]
    lengths[:] = lengths * 7 // 10
    [move] = store.plan()
    assert move == Move(1, tuple(chunks), Geometry(8, LAYERS, SLICE_BYTES))
    store.apply(move)
    assert store.plan() == []


def test_nothing_moves_that_lies_as_it_should() -> None:
    store = Store()
    store.put(list(range(1, 9)))
    store.put([9, 10, 11], 8)
    store.put([21, 22], 0)
    store.put([31], 0)
    assert store.plan() == []
    assert store.candidates() == 0


def test_counting_candidates_ends_once_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_compaction, "COUNT_MAX", 20)
    store = Store()
    for own in range(1, 101):
        store.put([own], own - 1)
    assert store.candidates() == 24  # with the third extent of eight
    monkeypatch.setattr(plan_compaction, "COUNT_MAX", 1000)
    assert store.candidates() == 100


def test_extents_less_than_twice_as_large_are_not_worth_a_move() -> None:
    store = Store()
    store.put([1, 2, 3, 4, 5, 6])
    store.put([7], 6)
    assert store.plan() == []


def test_a_large_piece_does_not_keep_small_ones_after_it_from_moving() -> None:
    store = Store()
    store.put([1, 2, 3, 4, 5, 6, 7])
    small = [store.put([own], own - 1)[0] for own in range(8, 13)]
    assert numbers_of(store.plan()) == [tuple(small)]


def test_at_a_fork_the_child_that_was_used_last_goes_on() -> None:
    store = Store()
    root = store.put([1], used=9)[0]
    old = [store.put([2], 1, used=3)[0], store.put([3], 2, used=3)[0]]
    recent = [store.put([4], 1, used=9)[0], store.put([5], 4, used=9)[0]]
    assert numbers_of(store.plan()) == [(root, *recent), tuple(old)]


def test_a_chunk_that_lies_well_parts_what_is_before_and_after_it() -> None:
    store = Store()
    store.put([1])
    store.put(list(range(2, 10)), 1)
    after = [store.put([own], own - 1)[0] for own in (10, 11)]
    assert numbers_of(store.plan()) == [tuple(after)]


def test_chunks_of_whom_no_neighbour_is_known_go_together_as_they_were_put() -> None:
    store = Store()
    numbers = [store.put([own])[0] for own in (50, 20, 90, 10)]
    foreign = store.extent(1)
    store.chunk(foreign, 7, bucket=2)
    assert numbers_of(store.plan()) == [tuple(numbers)]


def test_a_half_empty_extent_gives_its_space_back() -> None:
    store = Store()
    numbers = store.put(list(range(1, 9)))
    for number in numbers[3:]:
        store.remove(number)
    [move] = store.plan()
    assert move == Move(1, tuple(numbers[:3]), Geometry(3, LAYERS, SLICE_BYTES))
    store.apply(move)
    assert store.plan() == []


def test_an_extent_with_more_than_half_its_chunks_is_let_be() -> None:
    store = Store()
    numbers = store.put(list(range(1, 9)))
    for number in numbers[5:]:
        store.remove(number)
    assert store.plan() == []


def test_buckets_and_geometries_are_not_mixed() -> None:
    store = Store()
    for own, (bucket, slice_bytes, layers) in enumerate(
        [(1, 4096, 3), (2, 4096, 3), (1, 8192, 3), (1, 4096, 6)] * 2, start=1
    ):
        store.serial += 1
        store.chunk(store.extent(1, slice_bytes, layers), own, max(own - 4, 0), bucket=bucket)
    moves = store.plan()
    assert len(moves) == 4
    for move in moves:
        assert len(move.numbers) == 2
        rows = store.objects.rows[list(move.numbers)]
        assert set(rows["bucket"]) == {move.bucket}
        assert set(rows["size_bytes"]) == {move.geometry.chunk_bytes}


def test_the_most_recently_used_prefix_is_first_where_few_may_move() -> None:
    store = Store()
    for begin, used in ((10, 5), (20, 9), (30, 7)):
        for own in range(begin, begin + 4):
            store.put([own], own - 1 if own > begin else 0, used=used)
    [first] = store.plan(moves_max=1)
    assert set(store.objects.rows["last_used"][list(first.numbers)]) == {9}
    assert store.plan(moves_max=0) == []
    assert len(store.plan(moves_max=2)) == 2


@pytest.mark.parametrize(
    "why", ["recent", "read", "freed", "no cache content", "unknown geometry", "another size"]
)
def test_what_must_not_move_stays(why: str) -> None:
    store = Store()
    a, b, c = (store.put([own], own - 1)[0] for own in (1, 2, 3))
    row, home = store.objects.rows[[b]], int(store.objects.rows["extent"][b])
    if why == "recent":
        row["modified_s"] = 71.0
    elif why == "read":
        store.extents.rows["readers"][home] = 1
    elif why == "freed":
        store.extents.rows["is_freed"][home] = True
    elif why == "no cache content":
        row["is_evictable"] = False
    elif why == "unknown geometry":
        store.extents.rows["num_layers"][home] = 0
    else:
        row["size_bytes"] -= 1
    store.objects.rows[[b]] = row
    moves = store.plan(now_s=100.0, idle_s=30.0)
    assert all(b not in move.numbers for move in moves)
    # The two that are left are no neighbours, so nothing is gained by moving them.
    assert moves == []
    assert {a, c}.isdisjoint(number for move in moves for number in move.numbers)


def test_a_chunk_may_move_from_the_moment_it_is_idle() -> None:
    store = Store()
    for own in (1, 2):
        store.objects.rows["modified_s"][store.put([own], own - 1)] = 70.0
    assert store.plan(now_s=99.9, idle_s=30.0) == []
    assert len(store.plan(now_s=100.0, idle_s=30.0)) == 1


def test_chunks_in_a_circle_are_moved_once() -> None:
    store = Store()
    for own in range(1, 5):
        store.put([own], own % 4 + 1)
    for _ in range(3):
        for move in store.plan():
            store.apply(move)
    assert store.plan() == []


def test_an_empty_store_has_nothing_to_move() -> None:
    store = Store()
    assert store.plan() == []
    assert store.candidates() == 0


# --- that it ends ---

PUTS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 200), st.integers(0, 9)), max_size=30)


@settings(max_examples=examples(50), deadline=None)
@given(
    PUTS,
    st.lists(st.integers(0, 300), max_size=60),
    st.integers(1, 5),
    st.sampled_from([4096, 5000, 1000, 18432]),
)
def test_planning_ends_within_its_bound_whatever_was_put_and_removed(
    puts: list[tuple[int, int, int]], removed: list[int], moves_max: int, slice_bytes: int
) -> None:
    store = Store()
    stored: list[int] = []
    slots_max = slots_for(LAYERS, slice_bytes, ROW_BYTES, EXTENT_BYTES_MAX)
    for count, parent, used in puts:
        store.serial += 1
        parent_hash = parent if parent <= len(stored) else 0
        for place in range(count):
            if place % slots_max == 0:
                extent = store.extent(min(slots_max, count - place), slice_bytes)
            stored.append(store.chunk(extent, len(stored) + 1, parent_hash, used=used))
            parent_hash = len(stored)
    for number in {n for n in removed if n < len(stored)}:
        store.remove(number)

    before = store.order()
    moved_chunks = rounds = 0
    while moves := store.plan(moves_max):
        assert len(moves) <= moves_max
        together = [number for move in moves for number in move.numbers]
        assert len(set(together)) == len(together)
        for move in moves:
            order = store.order()
            store.apply(move)
            assert move.geometry.slots == len(move.numbers) <= slots_max
            assert store.order() - order >= 0.9 * len(move.numbers) - 1e-6
            moved_chunks += len(move.numbers)
        rounds += 1
        assert rounds <= len(stored) * 8, "planning does not end"
    assert store.candidates() == 0
    best = len(store.objects) * log2(slots_max)
    assert moved_chunks * 0.9 <= best - before + 1e-6
    live = store.extents.used[store.extents.used["is_used"]]["live_slots"]
    assert int(live.sum()) == len(store.objects)


@pytest.mark.parametrize("turn_chunks", [1, 2, 3, 5])
def test_a_conversation_that_grows_is_copied_a_few_times_at_most(turn_chunks: int) -> None:
    store = Store()
    own = 0
    for _ in range(60):
        store.put(list(range(own + 1, own + turn_chunks + 1)), own)
        own += turn_chunks
        for move in store.plan():
            store.apply(move)
    extents = int(store.extents.used["is_used"].sum())
    assert store.moved_bytes <= own * CHUNK_BYTES * log2(8)
    assert extents <= own / 8 * 2
