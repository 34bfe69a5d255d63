"""What a client counts of its relays, without one."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache.pause import PAUSE_MAX_S, PAUSE_MIN_S
from objectcache.routes.accounts import (
    FAILURES_S,
    MEASURED_S,
    REPORT_AGE_S_MAX,
    DirectAccount,
    RelayAccount,
)
from objectcache_schemas.operators.relay_report import RelayReport
from tests.unit.examples import examples

MB = 10**6


def report(
    queue_bytes: int = 0,
    rate: float = 100e6,
    free: int = 10**9,
    draining: bool = False,
    moved: int = 0,
) -> RelayReport:
    return RelayReport(
        read_queue_bytes=queue_bytes,
        landing_free_bytes=free,
        landing_bytes=10**9,
        rate_bytes_per_s=rate,
        deliveries=0,
        is_draining=draining,
        moved_bytes=moved,
    )


def test_a_relay_counts_for_a_second_after_its_report_was_asked_for() -> None:
    account = RelayAccount()
    assert account.load(10.0) is None
    account.reported(report(5 * MB), 10.0)
    load = account.load(10.0 + REPORT_AGE_S_MAX)
    assert load is not None
    assert (load.queue_bytes, load.rate_bytes_per_s) == (5 * MB, 100e6)
    assert account.load(10.0 + REPORT_AGE_S_MAX + 0.001) is None
    assert account.may_be_tried(20.0)  # by whoever asks for this very relay
    account.reported(report(draining=True), 21.0)
    assert account.load(21.0) is None
    assert not account.may_be_tried(21.0)


def test_what_was_assigned_since_the_report_was_asked_for_counts_on_top() -> None:
    account = RelayAccount()
    account.assigned(1 * MB, 9.9)
    account.reported(report(5 * MB, free=100 * MB), 10.0)
    account.assigned(2 * MB, 10.01)
    account.assigned(3 * MB, 10.02)
    load = account.load(10.05)
    assert load is not None
    assert (load.queue_bytes, load.room_bytes) == (10 * MB, 95 * MB)
    account.reported(report(7 * MB), 10.015)  # which knows of the first of them
    load = account.load(10.05)
    assert load is not None
    assert load.queue_bytes == 10 * MB
    account.reported(report(0), 11.0)  # it cannot have less than this client waits for
    load = account.load(11.0)
    assert load is not None
    assert load.queue_bytes == 6 * MB


def test_what_has_come_since_the_report_was_asked_for_is_in_no_queue() -> None:
    account = RelayAccount()
    account.assigned(8 * MB, 9.0)
    account.arrived(1 * MB, 9.5)
    account.reported(report(9 * MB), 10.0)  # 2 MB of it others wait for
    account.arrived(3 * MB, 10.1)
    account.dropped(4 * MB, 10.2)
    load = account.load(10.2)
    assert load is not None
    assert load.queue_bytes == 2 * MB
    account.reported(report(2 * MB), 10.3)
    load = account.load(10.3)
    assert load is not None
    assert load.queue_bytes == 2 * MB


def test_a_rate_under_half_of_the_reported_one_counts_as_measured_for_a_while() -> None:
    account = RelayAccount()
    account.reported(report(rate=100e6), 10.0)
    account.took(20e6, 40 * MB, 1.0, 10.1)  # 60 MB/s
    assert account.rate_bytes_per_s(10.2) == 100e6
    account.took(0, 10 * MB, 1.0, 10.1)
    account.took(0, 10 * MB, 1.0, 10.1)
    assert account.rate_bytes_per_s(10.2) == 10e6
    account.reported(report(rate=100e6), 10.1 + MEASURED_S + 0.1)
    assert account.rate_bytes_per_s(10.1 + MEASURED_S + 0.1) == 100e6
    account.reported(report(rate=0.0), 30.0)
    assert account.rate_bytes_per_s(30.0) is None
    account.took(0, 10 * MB, 1.0, 30.0)
    assert account.rate_bytes_per_s(30.0) == 10e6


def test_a_relay_moves_where_something_came_or_its_queue_is_shorter() -> None:
    account = RelayAccount()
    account.assigned(8 * MB, 1.0)
    account.reported(report(5 * MB), 2.0)
    account.reported(report(9 * MB), 3.0)  # others ask, which moves nothing
    account.reported(report(9 * MB), 4.0)
    account.arrived(0, 4.5)
    account.dropped(1 * MB, 4.6)
    assert account.moved_s == -math.inf
    account.reported(report(8 * MB), 5.0)
    assert account.moved_s == 5.0
    account.arrived(1 * MB, 6.0)
    assert account.moved_s == 6.0
    account.reported(report(7 * MB), 5.5)  # asked for before
    assert account.moved_s == 6.0


def test_three_failures_within_ten_seconds_have_it_left_alone_longer_each_time() -> None:
    account = RelayAccount()
    assert [account.failed(now_s) for now_s in (0.0, 1.0, 2.0)] == [False, False, True]
    account.reported(report(), 2.5)
    assert account.load(2.5) is None
    rests, now_s = [account.rest_s(2.0)], 2.0
    for _ in range(7):
        now_s += account.rest_s(now_s)
        assert account.may_be_tried(now_s)
        assert account.failed(now_s)  # once is enough now
        rests.append(account.rest_s(now_s))
    assert rests == [PAUSE_MIN_S, 2.0, 4.0, 8.0, 16.0, PAUSE_MAX_S, PAUSE_MAX_S, PAUSE_MAX_S]
    now_s += account.rest_s(now_s)
    account.went_well()
    assert not account.failed(now_s + 1)
    assert account.rest_s(now_s + 1) == 0


def test_one_that_was_waited_for_in_vain_is_left_alone_at_once_until_something_goes_well() -> None:
    account = RelayAccount()
    assert account.silent(10.0)
    assert account.rest_s(10.0) == PAUSE_MIN_S
    assert not account.silent(10.5)  # as what was under way
    assert not account.failed(10.5)
    assert account.rest_s(10.5) == PAUSE_MIN_S - 0.5
    assert account.failed(10.0 + PAUSE_MIN_S)
    account.went_well()
    assert not account.failed(30.0)


def test_failures_far_apart_are_borne() -> None:
    account = RelayAccount()
    for number in range(10):
        assert not account.failed(number * (FAILURES_S / 2 + 0.1))


def test_the_direct_ways_rate_is_that_while_something_is_awaited() -> None:
    account = DirectAccount(0.0)
    assert account.load(0.0).rate_bytes_per_s is None
    account.assigned(10 * MB, 100.0)
    account.arrived(5 * MB, 100.5)
    load = account.load(100.5, others_bytes=7 * MB)
    assert load.queue_bytes == 12 * MB
    assert load.rate_bytes_per_s == pytest.approx(10e6)
    assert math.isinf(load.room_bytes)
    account.dropped(5 * MB, 101.0)
    account.assigned(1 * MB, 110.0)  # idle time does not count
    rate = account.load(110.0).rate_bytes_per_s
    assert rate is not None
    assert 4e6 < rate < 6e6
    account.dropped(1 * MB, 110.0)
    assert account.load(200.0).rate_bytes_per_s is None


@settings(max_examples=examples(30))
@given(st.data())
def test_no_order_of_events_leaves_more_or_less_than_is_awaited(data: st.DataObject) -> None:
    account, now_s, open_bytes = RelayAccount(), 0.0, list[int]()
    for _ in range(data.draw(st.integers(1, 30))):
        now_s += data.draw(st.floats(0, 2))
        match data.draw(st.sampled_from(["assign", "arrive", "drop", "report", "fail", "well"])):
            case "assign":
                length = data.draw(st.integers(0, 10 * MB))
                account.assigned(length, now_s)
                open_bytes.append(length)
            case "arrive" if open_bytes:
                part = data.draw(st.integers(0, open_bytes[0]))
                account.arrived(part, now_s)
                open_bytes[0] -= part
            case "drop" if open_bytes:
                account.dropped(open_bytes.pop(), now_s)
            case "report":
                account.reported(report(data.draw(st.integers(0, 10 * MB))), now_s)
            case "fail":
                account.failed(now_s)
            case "well":
                account.went_well()
            case _:
                pass
        assert account.awaited_bytes == sum(open_bytes)
        load = account.load(now_s)
        if load is not None:
            assert load.queue_bytes >= sum(open_bytes)
            assert account.rest_s(now_s) == 0
        assert account.rest_s(now_s) <= PAUSE_MAX_S
    for left in open_bytes:
        account.dropped(left, now_s)
    assert account.awaited_bytes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate_bytes_per_s", -5), ("rate_bytes_per_s", 1e308), ("read_queue_bytes", -1)],
)
def test_a_report_out_of_bounds_is_none(field: str, value: float) -> None:
    said = {
        "read_queue_bytes": 0,
        "landing_free_bytes": 1,
        "landing_bytes": 1,
        "rate_bytes_per_s": 0.0,
        "deliveries": 0,
        "is_draining": False,
    }
    assert msgspec.convert(said, RelayReport).landing_bytes == 1
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(said | {field: value}, RelayReport)


def test_a_relay_whose_counter_grows_moves_and_one_whose_counter_stands_does_not() -> None:
    account = RelayAccount()
    account.reported(report(5 * MB, rate=0.0, moved=7), 10.0)
    assert account.moved_s == -math.inf  # of the first nothing follows
    account.reported(report(5 * MB, rate=0.0, moved=8), 11.0)
    assert account.moved_s == 11.0
    account.reported(report(5 * MB, rate=0.0, moved=8), 12.0)
    account.reported(report(6 * MB, rate=0.0, moved=2), 13.0)  # it was started again
    assert account.moved_s == 11.0


def test_a_relay_that_gives_no_report_is_not_asked_for_a_while_once_its_last_one_is_too_old() -> (
    None
):
    account = RelayAccount()
    account.reported(report(), 10.0)
    assert not account.untold(10.5)
    assert account.untold(12.0)
    assert account.is_unheard(12.0 + PAUSE_MIN_S / 2)
    assert not account.is_unheard(12.0 + PAUSE_MIN_S)
    assert account.untold(14.0)
    assert account.is_unheard(14.0 + 1.5 * PAUSE_MIN_S)  # twice as long
    assert account.rest_s(14.0) == 0  # gets may still go over it
    account.reported(report(), 14.5)
    assert not account.is_unheard(14.5)
