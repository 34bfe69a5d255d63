from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.errors import DeliveryFailed
from objectcache_schemas.operators.traces import DeliveryTrace
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

ERROR = DeliveryFailed("the client is gone").to_wire()
LAYERS, LAYER_BYTES = 3, 100


def recorder(client_s: float = 0.0, gateway_s: float = 0.0) -> DeliveryRecorder:
    """A request that arrived at the storage server at 10 s."""
    return DeliveryRecorder(
        "ABC",
        "bucket",
        "tenant",
        started_s=10.0,
        started_unix_s=1000.0,
        client_s=client_s,
        gateway_s=gateway_s,
    )


def accept(
    record: DeliveryRecorder, now_s: float, rate: float | None = None, first_layer: int = 0
) -> None:
    record.accepted(
        path="agg",
        transport="tcp",
        delivery="layerwise",
        policy="stall_dynamic",
        chunk_count=4,
        payload_bytes=LAYERS * LAYER_BYTES,
        first_layer=first_layer,
        end_layer=first_layer + LAYERS,
        compute_window_s=0.5,
        window_source="descriptor",
        rate_bytes_per_s=rate,
        now_s=now_s,
    )


def read(record: DeliveryRecorder, layer: int, begun_s: float, now_s: float) -> None:
    """Read one whole layer as one fragment."""
    record.fragment_begun(layer, begun_s)
    record.fragment_read(layer, LAYER_BYTES, now_s - begun_s, now_s)
    record.layers_ready(layer + 1, now_s)


def phases(trace: DeliveryTrace) -> dict[str, float]:
    return {phase.name: round(phase.seconds, 9) for phase in trace.phases}


def total_s(trace: DeliveryTrace) -> float:
    return sum(phase.seconds for phase in trace.phases)


def test_every_moment_of_a_body_belongs_to_one_phase() -> None:
    record = recorder(client_s=0.25, gateway_s=1.0)
    record.queued(2.0)
    record.planned(13.0)
    accept(record, 14.0)
    read(record, 0, 15.0, 17.0)
    record.sending_begun(17.0)
    record.sending_ended(17.5)
    read(record, 1, 18.0, 19.0)
    read(record, 2, 19.0, 20.0)
    record.sending_begun(20.25)
    record.sending_ended(21.0)
    record.ended(22.0, None)
    trace = record.trace()
    assert phases(trace) == {
        "client": 0.25,
        "control_plane": 2.0,  # 1 in the gateway, and 1 of the 3 before it was planned
        "queue": 4.5,  # 2 for admission, 1 for a rate, 1 and 0.5 for its turn
        "storage": 4.0,
        "network": 2.5,  # 0.5 between reads, and all of what came after the last
    }
    assert trace.duration_s == 13.0
    assert total_s(trace) == pytest.approx(13.25)
    assert record.engine_s == 4.0


def test_pacing_is_queue_and_a_slow_client_is_network() -> None:
    paced, slow = recorder(), recorder()
    for record in (paced, slow):
        accept(record, 10.0)
        read(record, 0, 10.0, 11.0)
    slow.sending_begun(11.0)
    slow.sending_ended(19.0)
    for record in (paced, slow):
        read(record, 1, 19.0, 20.0)
        record.ended(20.0, None)
    assert phases(paced.trace()) | {"queue": 8.0, "network": 0.0} == phases(paced.trace())
    assert phases(slow.trace()) | {"queue": 0.0, "network": 8.0} == phases(slow.trace())


def test_reads_that_overlap_count_once_on_the_wall_clock() -> None:
    record = recorder()
    accept(record, 10.0)
    record.fragment_begun(0, 10.0)
    record.fragment_begun(1, 11.0)
    record.sending_begun(11.5)
    record.fragment_read(0, 100, 2.0, 12.0)
    record.fragment_read(1, 100, 3.0, 14.0)
    record.sending_ended(14.5)
    record.ended(15.0, ERROR)
    spent = phases(record.trace())
    assert (spent["storage"], spent["network"], spent["queue"]) == (4.0, 0.5, 0.5)
    assert record.engine_s == 5.0


def test_a_refused_request_spent_its_time_before_acceptance() -> None:
    record = recorder(gateway_s=0.5)
    record.queued(2.0)
    record.ended(13.0, ERROR)
    trace = record.trace()
    assert phases(trace)["control_plane"] == 1.5
    assert phases(trace)["queue"] == 2.0
    assert (trace.duration_s, trace.layers, trace.path) == (3.5, (), "")
    assert trace.error == ERROR
    assert trace.achieved_bytes_per_s is None


def test_a_failure_keeps_what_came_before_it() -> None:
    record = recorder()
    accept(record, 10.0)
    read(record, 0, 10.0, 11.0)
    record.fragment_begun(1, 11.0)
    record.fragment_read(1, 0, 1.0, 12.0)
    record.ended(12.0, ERROR)
    trace = record.trace()
    assert [layer.ready_s for layer in trace.layers] == [1.0, None, None]
    assert [layer.first_read_s for layer in trace.layers] == [0.0, 1.0, None]
    assert trace.achieved_bytes_per_s == LAYER_BYTES / 2
    assert total_s(trace) == trace.duration_s == 2.0


def test_nothing_after_the_end_counts_but_what_the_gpu_consumes() -> None:
    record = recorder()
    accept(record, 10.0)
    for layer in range(LAYERS):
        read(record, layer, 10.0 + layer, 11.0 + layer)
    record.layers_consumed(1, 12.5)
    record.ended(13.0, None)
    before = record.trace()
    record.ended(99.0, ERROR)
    record.sending_begun(14.0)
    record.sending_ended(15.0)
    assert record.trace() == before
    record.layers_consumed(3, 16.0)
    assert [layer.consumed_s for layer in record.trace().layers] == [2.5, 6.0, 6.0]


def test_times_count_from_the_arrival_at_the_gateway() -> None:
    record = recorder(gateway_s=0.5)
    accept(record, 10.0)
    read(record, 0, 10.25, 10.5)
    trace = record.trace()
    assert trace.started_unix_s == 999.5
    assert (trace.layers[0].first_read_s, trace.layers[0].ready_s) == (0.75, 1.0)


def test_a_delivery_under_way_is_shown_up_to_now() -> None:
    record = recorder()
    accept(record, 10.0, rate=50.0)
    record.fragment_begun(0, 11.0)
    assert total_s(record.trace()) == 1.0
    trace = record.trace(now_s=14.0)
    assert (trace.duration_s, trace.rate_bytes_per_s) == (None, 50.0)
    assert phases(trace)["storage"] == 3.0
    record.fragment_read(0, 100, 5.0, 16.0)
    assert phases(record.trace())["storage"] == 5.0


def test_the_rate_is_the_present_one_and_in_the_end_the_mean_of_those_it_had() -> None:
    record = recorder()
    accept(record, 11.0, rate=50.0)
    accept(record, 13.0, rate=80.0)
    assert record.trace(14.0).rate_bytes_per_s == 80.0
    record.ended(14.0, None)
    assert record.trace().rate_bytes_per_s == pytest.approx((2 * 50 + 1 * 80) / 3)
    assert record.summary().rate_bytes_per_s == pytest.approx(60.0)


def test_the_mean_is_over_the_time_in_which_it_had_a_rate() -> None:
    record = recorder()
    accept(record, 11.0)
    accept(record, 13.0, rate=80.0)
    accept(record, 14.0)
    record.ended(20.0, None)
    assert record.trace().rate_bytes_per_s == pytest.approx(80.0)


def test_a_later_acceptance_changes_the_rate_alone() -> None:
    record = recorder()
    accept(record, 11.0, rate=50.0)
    read(record, 0, 11.0, 12.0)
    accept(record, 13.0, rate=70.0)
    trace = record.trace()
    assert trace.rate_bytes_per_s == 70.0
    assert trace.layers[0].ready_s == 2.0
    assert record.accepted_after_s == 1.0


def test_layers_are_numbered_as_in_the_descriptor() -> None:
    record = recorder()
    accept(record, 10.0, first_layer=7)
    read(record, 7, 10.0, 11.0)
    record.layers_consumed(99, 12.0)
    layers = record.trace().layers
    assert [layer.layer for layer in layers] == [7, 8, 9]
    assert [layer.ready_s for layer in layers] == [1.0, None, None]
    assert [layer.consumed_s for layer in layers] == [2.0, 2.0, 2.0]


def test_layers_that_one_fragment_holds_were_read_together() -> None:
    record = recorder()
    accept(record, 10.0)
    record.fragment_begun(0, 11.0)
    record.fragment_read(0, 200, 1.0, 12.0)
    record.layers_ready(2, 12.0)
    assert [layer.first_read_s for layer in record.trace().layers] == [1.0, 1.0, None]


def test_what_others_say_of_their_time_may_be_nonsense() -> None:
    for said in (-1.0, math.nan, math.inf):
        record = recorder(client_s=said, gateway_s=said)
        record.ended(11.0, None)
        assert total_s(record.trace()) == record.trace().duration_s == 1.0


def test_the_end_is_told_once() -> None:
    ends: list[DeliveryRecorder] = []
    record = recorder()
    record.when_ended(ends.append)
    record.ended(11.0, None)
    record.ended(12.0, None)
    assert ends == [record]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["queued", "planned", "begun", "read", "sending", "sent"]),
        st.floats(-0.01, 5.0, allow_nan=False),
    ),
    max_size=30,
)


@given(EVENTS, EVENTS, st.booleans())
def test_phases_sum_to_the_duration_in_whatever_order_things_happen(
    before: list[tuple[str, float]], after: list[tuple[str, float]], is_accepted: bool
) -> None:
    record = recorder(client_s=0.5, gateway_s=0.25)
    now_s, readers = 10.0, 0

    def play(events: list[tuple[str, float]]) -> None:
        nonlocal now_s, readers
        for name, step_s in events:
            now_s += step_s
            match name:
                case "queued":
                    record.queued(step_s)
                case "planned":
                    record.planned(now_s)
                case "begun":
                    readers += 1
                    record.fragment_begun(0, now_s)
                case "read" if readers:
                    readers -= 1
                    record.fragment_read(0, 10, step_s, now_s)
                case "sending":
                    record.sending_begun(now_s)
                case _:
                    record.sending_ended(now_s)

    play([event for event in before if event[0] in ("queued", "planned")])
    if is_accepted:
        accept(record, now_s)
        play([event for event in after if event[0] != "planned"])
    record.ended(now_s, None)
    trace = record.trace()
    assert trace.duration_s is not None
    assert total_s(trace) == pytest.approx(trace.duration_s + 0.5)
    assert min(phase.seconds for phase in trace.phases) >= -1e-9


def test_readers_in_several_threads_lose_nothing() -> None:
    record = recorder()
    accept(record, 10.0)
    barrier = threading.Barrier(4)

    def reader(number: int) -> None:
        barrier.wait()
        for step in range(500):
            begun_s = 10.0 + step * 0.01 + number * 0.001
            record.fragment_begun(0, begun_s)
            record.fragment_read(0, 1, 0.001, begun_s + 0.001)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.ended(20.0, None)
    trace = record.trace()
    assert record.engine_s == pytest.approx(2.0)
    assert trace.achieved_bytes_per_s == pytest.approx(2000 / 10.0)
    assert total_s(trace) == pytest.approx(10.0)
