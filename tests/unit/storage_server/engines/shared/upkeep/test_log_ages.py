"""How old records are, without a wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objectcache_storage_server.engines.shared.upkeep.log_ages import FINENESS, LogAges


def test_what_was_there_at_the_start_is_as_old_as_the_start() -> None:
    ages = LogAges()
    ages.saw(100, 50.0)
    assert ages.end_before(10.0, 59.0) == 0
    assert ages.end_before(10.0, 60.0) == 100
    assert ages.age_s(99, 60.0) == 10.0
    assert ages.age_s(100, 60.0) == 0.0
    assert ages.first_end == 100


def test_a_record_is_as_old_as_the_first_look_that_saw_it() -> None:
    ages = LogAges()
    for second in range(10):
        ages.saw(second + 1, float(second))
    assert ages.age_s(4, 9.0) == 5.0
    assert ages.end_before(5.0, 9.0) == 5


@given(
    steps=st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 100)), min_size=1, max_size=400),
    age_s=st.floats(0, 1e6),
)
def test_no_record_is_ever_taken_for_older_than_it_is(
    steps: list[tuple[float, int]], age_s: float
) -> None:
    ages = LogAges()
    now_s, end = 0.0, 0
    truth: list[tuple[float, int]] = []
    for pause_s, records in steps:
        now_s, end = now_s + pause_s, end + records
        ages.saw(end, now_s)
        truth.append((now_s, end))
    old = max((end for seen_s, end in truth if seen_s <= now_s - age_s), default=0)
    assert ages.end_before(age_s, now_s) <= old
    for number in range(0, end, max(1, end // 7)):
        seen_s = next(seen_s for seen_s, end in truth if end > number)
        assert ages.age_s(number, now_s) <= now_s - seen_s


def test_a_year_of_looks_is_not_kept_one_by_one() -> None:
    ages = LogAges()
    for second in range(200_000):
        ages.saw(second + 1, float(second))
    assert len(ages) < 2000
    for wanted_s in (1.0, 100.0, 10_000.0, 150_000.0):
        found_s = ages.age_s(200_000 - int(wanted_s), 200_000.0)
        assert wanted_s * (1 - 3 / FINENESS) - 2 <= found_s <= wanted_s + 1
