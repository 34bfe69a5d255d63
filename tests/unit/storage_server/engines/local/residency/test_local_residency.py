"""Which extents keep the page cache: properties, and simulations against LRU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.residency import planner
from objectcache_storage_server.engines.local.residency.planner import HEAT_HALF_LIFE_S, replan
from objectcache_storage_server.engines.local.space.dense_tables import EXTENT_COLUMNS
from objectcache_storage_server.engines.local.volumes.volume import IoPath


@dataclass(frozen=True)
class Row:
    """What the planner reads of an extent."""

    path: IoPath
    heat: float
    length_bytes: int = 10
    readers: int = 0
    is_used: bool = True
    is_freed: bool = False
    slots: int = 1


def table(*rows: Row) -> npt.NDArray[np.void]:
    extents = np.zeros(len(rows), EXTENT_COLUMNS)
    for number, row in enumerate(rows):
        for name, value in vars(row).items():
            extents[name][number] = value
    return extents


def resident(heat: float, length_bytes: int = 10, *, readers: int = 0) -> Row:
    return Row(IoPath.PAGE_CACHE, heat, length_bytes, readers)


def direct(heat: float, length_bytes: int = 10) -> Row:
    return Row(IoPath.DIRECT, heat, length_bytes)


def moves(extents: npt.NDArray[np.void], budget_bytes: int, moves_max: int = 8) -> object:
    plan = replan(extents, budget_bytes, moves_max)
    return plan.to_direct.tolist(), plan.to_page_cache.tolist()


rows = st.builds(
    Row,
    path=st.sampled_from(IoPath),
    heat=st.floats(0, 64, width=32),
    length_bytes=st.integers(1, 40),
    readers=st.integers(0, 1),
    is_used=st.booleans(),
    is_freed=st.booleans(),
    slots=st.integers(1, 8),
)


def test_a_new_extent_is_admitted_while_it_fits() -> None:
    assert planner.admits(90, 10, 100)
    assert not planner.admits(91, 10, 100)


def test_over_the_budget_the_coldest_leave_and_no_more_than_must() -> None:
    extents = table(resident(5), resident(1), resident(3), resident(2), direct(99))
    assert moves(extents, 25) == ([1, 3], [])
    assert moves(extents, 30) == ([1], [])
    assert moves(extents, 0) == ([1, 3, 2, 0], [])


def test_extents_that_are_read_leave_too_when_memory_is_short() -> None:
    assert moves(table(resident(1, readers=3)), 5) == ([0], [])


def test_below_the_budget_the_hottest_that_fit_come_in() -> None:
    extents = table(direct(1), direct(9, 100), direct(5), direct(3), resident(0))
    assert moves(extents, 30) == ([], [2, 3])


def test_an_extent_that_nobody_read_does_not_come_in() -> None:
    assert moves(table(direct(0)), 100) == ([], [])


def test_a_replacement_must_be_twice_as_hot_after_one_more_read() -> None:
    assert moves(table(resident(3), direct(8)), 10) == ([0], [1])
    assert moves(table(resident(3), direct(7.5)), 10) == ([], [])
    assert moves(table(resident(0), direct(1.9)), 10) == ([], [])
    assert moves(table(resident(0), direct(2)), 10) == ([0], [1])


def test_equal_heat_moves_nothing() -> None:
    assert moves(table(*[resident(50)] * 3, *[direct(50)] * 9), 30) == ([], [])


def test_one_large_extent_replaces_as_many_as_it_needs() -> None:
    extents = table(resident(1), resident(2), resident(0), resident(0), direct(6, 25))
    assert moves(extents, 40) == ([2, 3, 0], [4])


def test_a_small_extent_does_not_replace_a_large_one_that_is_hit_more_in_all() -> None:
    assert moves(table(resident(4, 100), direct(12, 10)), 100) == ([], [])
    assert moves(table(resident(4, 100), direct(50, 10)), 100) == ([0], [1])


def test_what_is_being_read_is_not_replaced() -> None:
    extents = table(resident(0, readers=1), resident(1), direct(9))
    assert moves(extents, 20) == ([1], [2])


def test_replacements_are_a_few_at_a_time() -> None:
    extents = table(*[resident(0)] * 10, *[direct(9)] * 10)
    assert moves(extents, 100, moves_max=2) == ([0, 1], [10, 11])
    assert moves(extents, 100, moves_max=0) == ([], [])


def test_heat_counts_how_often_the_bytes_of_an_extent_are_read() -> None:
    extents = table(Row(IoPath.DIRECT, 0, slots=4), Row(IoPath.DIRECT, 0, slots=1))
    planner.count_reads(extents, [0, 0, 0, 0, 1, 0])
    assert extents["heat"].tolist() == [1.25, 1.0]


def test_heat_halves_in_a_half_life_and_ends_at_nothing() -> None:
    extents = table(direct(8), direct(0.02))
    planner.decay(extents, HEAT_HALF_LIFE_S)
    assert extents["heat"].tolist() == [4.0, 0.0]


@given(st.lists(rows, max_size=40), st.integers(0, 600), st.integers(0, 5))
def test_a_plan_keeps_the_budget_and_touches_live_extents_only(
    drawn: list[Row], budget_bytes: int, moves_max: int
) -> None:
    extents = table(*drawn)
    before_bytes = planner.resident_bytes(extents)
    plan = replan(extents, budget_bytes, moves_max)
    moved = np.concatenate([plan.to_direct, plan.to_page_cache])
    assert len(set(moved.tolist())) == len(moved)
    assert (extents["is_used"][moved] & ~extents["is_freed"][moved]).all()
    assert (extents["path"][plan.to_direct] == IoPath.PAGE_CACHE).all()
    assert (extents["path"][plan.to_page_cache] == IoPath.DIRECT).all()
    if len(plan.to_direct) and before_bytes <= budget_bytes:
        assert len(plan.to_page_cache) <= moves_max
    apply(extents, plan)
    assert planner.resident_bytes(extents) <= budget_bytes


@given(st.lists(rows, max_size=40), st.integers(0, 600))
def test_with_constant_heat_plans_come_to_rest(drawn: list[Row], budget_bytes: int) -> None:
    extents = table(*drawn)
    for _ in range(4 * len(drawn) + 2):
        plan = replan(extents, budget_bytes, 3)
        if not len(plan.to_direct) and not len(plan.to_page_cache):
            return
        apply(extents, plan)
    pytest.fail("extents still move")


def apply(extents: npt.NDArray[np.void], plan: planner.Replan) -> None:
    extents["path"][plan.to_direct] = IoPath.DIRECT
    extents["path"][plan.to_page_cache] = IoPath.PAGE_CACHE


# --- simulations: extents of one size are read whole, a plan is made now and then -----------------


class Store:
    """Extents that were admitted in order, and their hits."""

    def __init__(self, count: int, resident_max: int) -> None:
        self.budget_bytes = resident_max * MIB
        self.extents = table(*[direct(0, MIB)] * count)
        self.extents["path"][:resident_max] = IoPath.PAGE_CACHE
        self.hits = 0
        self.moves = 0

    def read(self, number: int) -> None:
        self.hits += int(self.extents["path"][number] == IoPath.PAGE_CACHE)
        planner.count_reads(self.extents, [number])

    def upkeep(self, elapsed_s: float) -> None:
        planner.decay(self.extents, elapsed_s)
        plan = replan(self.extents, self.budget_bytes, moves_max=4)
        self.moves += len(plan.to_page_cache)
        apply(self.extents, plan)


class Lru:
    """A page cache as the kernel keeps it, nearly."""

    def __init__(self, resident_max: int) -> None:
        self._max = resident_max
        self._resident: OrderedDict[int, None] = OrderedDict()
        self.hits = 0

    def read(self, number: int) -> None:
        self.hits += number in self._resident
        self._resident[number] = None
        self._resident.move_to_end(number)
        if len(self._resident) > self._max:
            self._resident.popitem(last=False)


@pytest.mark.parametrize("upkeep_reads", [1, 7, 40])
@pytest.mark.parametrize("read_s", [0.01, 30.0])
def test_a_cyclic_scan_of_more_than_the_budget_keeps_the_resident_part(
    upkeep_reads: int, read_s: float
) -> None:
    count, rounds = 10, 400 if upkeep_reads > 1 else 100
    for resident_max in (2, 5, 9):
        store, lru = Store(count, resident_max), Lru(resident_max)
        for read in range(count * rounds):
            number = (resident_max + read) % count  # what is not resident is read first
            store.read(number)
            lru.read(number)
            if read % upkeep_reads == 0:
                store.upkeep(upkeep_reads * read_s)
        assert store.moves == 0
        assert store.hits == resident_max * rounds
        assert lru.hits == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_where_some_extents_are_hotter_hits_come_near_to_the_best_choice(seed: int) -> None:
    count, resident_max, reads = 100, 20, 12_000
    weights = 1 / np.arange(1, count + 1)
    generator = np.random.default_rng(seed)
    popular = generator.permutation(count)
    drawn = popular[generator.choice(count, reads, p=weights / weights.sum())].tolist()
    store, lru = Store(count, resident_max), Lru(resident_max)
    for read, number in enumerate(drawn):
        store.read(number)
        lru.read(number)
        if read % 50 == 0:
            store.upkeep(5.0)
    best = reads * weights[:resident_max].sum() / weights.sum()
    assert store.hits > 0.85 * best, (seed, store.hits, best)
    assert store.hits > lru.hits, (seed, store.hits, lru.hits)


def test_the_resident_part_follows_when_others_become_hot() -> None:
    store = Store(40, 10)
    for base in (0, 20):
        for _ in range(60):
            for number in range(base, base + 10):
                store.read(number)
            store.upkeep(30.0)
    assert np.flatnonzero(store.extents["path"] == IoPath.PAGE_CACHE).tolist() == list(
        range(20, 30)
    )
