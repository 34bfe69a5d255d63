"""What an engine has consumed, deduced from its waits or told by it; and windows learned of it."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache.deliveries.consumption import Consumption, ConsumptionMeter, ConsumptionReports
from objectcache.deliveries.feedback import tell_session
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.learned_windows import (
    DELIVERIES_MAX,
    SHAPES_MAX,
    WINDOW_S_MIN,
    FetchShape,
    RememberedWindows,
)
from objectcache_schemas.messages.sessions import LayersConsumed


def given(meter: ConsumptionMeter, layer: int, begins_s: float, ends_s: float) -> object:
    """One wait of an engine; what its entry told."""
    told = meter.wait_begins(layer, begins_s)
    meter.wait_ended(layer, ends_s)
    return told


def test_asking_for_a_layer_tells_of_those_before_and_of_the_time_since_the_last_answer() -> None:
    meter = ConsumptionMeter(0, 3)
    assert given(meter, 0, 10.0, 11.0) is None
    assert given(meter, 1, 11.25, 20.0) == Consumption(1, 0.25, 1.0)
    assert given(meter, 2, 20.5, 20.5) == Consumption(2, 0.5, 8.75)
    assert meter.closed(22.5) == Consumption(3, 2.0, 0.0)


def test_a_range_of_layers_counts_in_the_models_layers() -> None:
    meter = ConsumptionMeter(16, 18)
    assert given(meter, 16, 0.0, 1.0) is None
    assert given(meter, 17, 3.0, 4.0) == Consumption(17, 2.0, 1.0)
    assert meter.closed(5.0) == Consumption(18, 1.0, 1.0)


def test_a_delivery_that_is_closed_early_tells_nothing_of_the_layer_that_it_holds() -> None:
    meter = ConsumptionMeter(0, 3)
    given(meter, 0, 0.0, 1.0)
    given(meter, 1, 2.0, 3.0)
    assert meter.closed(9.0) is None
    assert ConsumptionMeter(0, 3).closed(1.0) is None


def test_a_wait_that_is_tried_again_tells_once() -> None:
    meter = ConsumptionMeter(0, 3)
    given(meter, 0, 0.0, 1.0)
    assert meter.wait_begins(1, 2.0) == Consumption(1, 1.0, 1.0)
    assert meter.wait_begins(1, 5.0) is None  # the first one ran into its timeout
    meter.wait_ended(1, 6.0)
    assert meter.wait_begins(2, 6.5) == Consumption(2, 0.5, 4.0)


def test_looking_at_a_layer_again_does_not_stop_the_clock() -> None:
    meter = ConsumptionMeter(0, 3)
    given(meter, 0, 0.0, 1.0)
    given(meter, 1, 2.0, 3.0)
    assert given(meter, 0, 4.0, 4.0) is None
    assert given(meter, 1, 5.0, 5.0) is None
    assert given(meter, 2, 7.0, 8.0) == Consumption(2, 4.0, 1.0)


def test_layers_that_are_waited_for_in_groups_share_the_time() -> None:
    meter = ConsumptionMeter(0, 8)
    assert given(meter, 3, 0.0, 10.0) is None  # nothing of 0 to 2 is consumed yet
    assert given(meter, 7, 18.0, 20.0) == Consumption(4, 2.0, 10.0)
    assert meter.closed(24.0) == Consumption(8, 1.0, 2.0)


def test_an_engine_that_tells_by_itself_is_not_second_guessed() -> None:
    meter = ConsumptionMeter(0, 4)
    given(meter, 0, 0.0, 1.0)
    assert meter.told(0, None, 1.0, 1.5) == Consumption(1, 0.5)
    assert given(meter, 1, 2.0, 3.0) is None
    assert given(meter, 3, 4.0, 5.0) is None
    assert meter.closed(9.0) is None
    assert meter.told(1, 0.125, 3.0, 9.0) == Consumption(2, 0.125, 1.5, is_measured=True)


def test_an_engine_may_announce_that_it_will_tell() -> None:
    meter = ConsumptionMeter(0, 3)
    meter.report_explicitly()
    given(meter, 0, 0.0, 1.0)
    assert given(meter, 1, 2.0, 3.0) is None
    assert meter.told(0, None, 1.0, 4.0) == Consumption(1, 3.0)


@pytest.mark.parametrize(
    ("ready_s", "compute_s", "waited_s"),
    [(1.0, 2.0, 0.0), (4.0, 1.0, 1.0), (7.0, 0.0, 4.0)],
    ids=["queued behind the last", "waited for", "clocks that disagree"],
)
def test_a_told_layer_computed_since_the_last_one_or_since_it_arrived(
    ready_s: float, compute_s: float, waited_s: float
) -> None:
    meter = ConsumptionMeter(0, 3)
    meter.told(0, None, 0.5, 3.0)
    assert meter.told(1, None, ready_s, 5.0) == Consumption(2, compute_s, waited_s)


def test_layers_told_together_share_the_time_and_none_is_told_twice() -> None:
    meter = ConsumptionMeter(0, 8)
    assert meter.told(3, None, 2.0, 10.0) == Consumption(4, 2.0)
    assert meter.told(3, None, 2.0, 11.0) is None
    assert meter.told(1, 0.5, 2.0, 11.0) is None


def test_a_report_of_a_layer_that_has_not_arrived_is_ignored() -> None:
    heard: list[Consumption] = []
    progress = LayerProgress(0, 3)
    reports = ConsumptionReports(progress, heard.append)
    reports.consumed(0, 0.25)
    progress.advance(1)
    reports.consumed(1, 0.25)
    assert heard == []
    reports.consumed(0, 0.25)
    assert heard == [Consumption(1, 0.25, is_measured=True)]


def test_nothing_is_deduced_of_a_closed_delivery_and_its_end_is_told_once() -> None:
    heard: list[Consumption] = []
    ends: list[str] = []
    progress = LayerProgress(0, 2)
    progress.advance(2)
    reports = ConsumptionReports(progress, heard.append, lambda: ends.append("closed"))
    for layer in (0, 1):
        reports.wait_begins(layer)
        reports.wait_ended(layer)
    for _ in range(2):
        reports.close()
    assert [told.end_layer for told in heard] == [1, 2]
    reports.wait_begins(1)
    assert ([told.end_layer for told in heard], ends) == ([1, 2], ["closed"])


def test_what_another_process_measured_is_told_as_it_is_and_nothing_is_deduced() -> None:
    told: list[Consumption] = []
    progress = LayerProgress(0, 3)
    reports = ConsumptionReports(progress, told.append)
    progress.advance(2)
    passed_on = Consumption(2, 0.25, 0.5, is_measured=True)
    reports.pass_on(passed_on)
    reports.wait_begins(0)
    reports.wait_ended(0)
    reports.wait_begins(1)
    reports.close()
    assert told == [passed_on]


def test_a_gpu_that_is_behind_the_close_is_heard_and_nothing_is_deduced() -> None:
    heard: list[Consumption] = []
    progress = LayerProgress(0, 2)
    progress.advance(2)
    reports = ConsumptionReports(progress, heard.append)
    reports.report_explicitly()
    for layer in (0, 1):
        reports.wait_begins(layer)
        reports.wait_ended(layer)
    reports.close()
    assert heard == []
    reports.consumed(1, 0.5)
    assert [(told.end_layer, told.compute_s) for told in heard] == [(2, 0.5)]


class FakeSession:
    """A session that only listens."""

    def __init__(self) -> None:
        self.told: list[LayersConsumed] = []

    def tell(self, message: LayersConsumed) -> None:
        self.told.append(message)


LAYER_BYTES = 40_000_000  # a copy takes 10 ms at the slowest


def told_s(compute_s: float, *, layer_bytes: int, is_measured: bool) -> float:
    """What the server hears of a layer that took so long."""
    session: Any = FakeSession()
    progress = LayerProgress(0, 1)
    progress.advance(1)
    reports = tell_session(progress, session, 7, layer_bytes)
    reports._tell(Consumption(1, compute_s, None, is_measured))
    (message,) = session.told
    assert (message.tag, message.end_layer) == (7, 1)
    heard_s: float = message.compute_s
    return heard_s


@pytest.mark.parametrize(
    ("compute_s", "is_measured", "heard_s"),
    [
        (0.011, False, 0.011),
        (0.003, False, 0.0),  # 13 GB/s: a memcpy
        (0.003, True, 0.003),  # a GPU's own time
        (1e-7, True, 0.0),  # 400 TB/s
    ],
)
def test_the_time_of_a_copy_is_told_only_by_an_engine_that_measured_it(
    compute_s: float, is_measured: bool, heard_s: float
) -> None:
    heard = told_s(compute_s, layer_bytes=LAYER_BYTES, is_measured=is_measured)
    assert heard == heard_s


SHAPE = FetchShape("b", 5, None)


def test_a_window_is_the_median_of_the_last_deliveries_medians() -> None:
    windows = RememberedWindows()
    assert windows.window_s(SHAPE) is None
    windows.learn(SHAPE, [0.1, 0.2, 9.0])
    assert windows.window_s(SHAPE) == 0.2
    windows.learn(SHAPE, [0.4])
    windows.learn(SHAPE, [5.0])
    assert windows.window_s(SHAPE) == 0.4
    for _ in range(DELIVERIES_MAX):
        windows.learn(SHAPE, [7.0])
    assert windows.window_s(SHAPE) == 7.0


def test_each_shape_is_learned_by_itself() -> None:
    windows = RememberedWindows()
    shapes = [FetchShape("b", 5, None), FetchShape("b", 6, None), FetchShape("b", 5, 100)]
    for window_s, shape in enumerate([*shapes, FetchShape("c", 5, None)], start=1):
        windows.learn(shape, [float(window_s)])
    assert [windows.window_s(shape) for shape in shapes] == [1.0, 2.0, 3.0]


def test_a_consumer_that_only_copies_teaches_no_window() -> None:
    windows = RememberedWindows()
    windows.learn(SHAPE, [])
    assert windows.window_s(SHAPE) is None
    windows.learn(SHAPE, [WINDOW_S_MIN / 2] * 3)
    assert windows.window_s(SHAPE) is None
    windows.learn(SHAPE, [WINDOW_S_MIN * 2])
    assert windows.window_s(SHAPE) == pytest.approx(WINDOW_S_MIN * 1.25)


def test_the_shape_that_was_used_least_recently_is_forgotten() -> None:
    windows = RememberedWindows()
    shapes = [FetchShape("b", count, None) for count in range(SHAPES_MAX)]
    for shape in shapes:
        windows.learn(shape, [1.0])
    assert windows.window_s(shapes[0]) == 1.0
    windows.learn(FetchShape("another", 1, None), [1.0])
    assert windows.window_s(shapes[1]) is None
    assert windows.window_s(shapes[0]) == 1.0
    assert repr(windows) == f"<RememberedWindows {SHAPES_MAX}/{SHAPES_MAX} shapes>"
