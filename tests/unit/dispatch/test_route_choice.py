"""Over whose storage NIC a delivery comes: the model, and each policy by it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_dispatch import (
    POLICIES,
    Candidates,
    DispatchRequest,
    NodeLoad,
    ReadRoute,
    RoutePart,
    RoutePolicy,
    choose_route,
    lateness_s,
    least_lateness,
    shorter_queue,
    shortest_time,
    split,
)
from objectcache_schemas.errors import InvalidRequest
from tests.unit.dispatch.clusters import COMPUTE_RATE, RATE, node, one_of_each, request


def by(
    policy: RoutePolicy,
    queues: dict[str, int],
    asked: DispatchRequest | None = None,
    *others: str,
    any_node: bool = True,
    used: dict[str, int] | None = None,
    **rates: float,
) -> ReadRoute | None:
    """By queues in bytes, over p (prefill), d (decode) and others; rates of some storage NICs."""
    names = ("p", "d", *others)
    cluster = one_of_each(*(node(name) for name in others))
    loads = {
        name: NodeLoad(
            name, queues.get(name, 0), (used or {}).get(name, 0), rate_bytes_per_s=rates.get(name)
        )
        for name in names
    }
    return choose_route(asked or request("r"), "p", "d", cluster, loads, policy, any_node=any_node)


def candidates(
    busy_s: list[float], rates: list[float], hop_s_per_byte: list[float], room: list[float]
) -> Candidates:
    return Candidates(
        [f"n{number}" for number in range(len(busy_s))],
        0,
        1,
        np.array(busy_s),
        np.array(rates),
        np.array(hop_s_per_byte),
        np.array(room),
    )


ANY_CANDIDATES = st.integers(2, 5).flatmap(
    lambda count: st.builds(
        lambda busy, rates, hops: candidates(
            busy, rates, [0.0, *hops[1:]], [np.inf] + [1e9] * (count - 1)
        ),
        *(
            st.lists(st.floats(least, most), min_size=count, max_size=count)
            for least, most in ((0.0, 5.0), (100.0, 9000.0), (1e-5, 1e-3))
        ),
    )
)
ANY_REQUEST = st.builds(
    lambda layers, chunks, slice_bytes, window_s: request(
        "r",
        layer_bytes=chunks * slice_bytes,
        num_layers=layers,
        window_s=window_s,
        chunk_bytes=layers * slice_bytes,
    ),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(1, 20),
    st.none() | st.floats(0.0, 0.3),
)


@given(ANY_CANDIDATES, ANY_REQUEST)
def test_lateness_is_the_most_over_all_layers(found: Candidates, asked: DispatchRequest) -> None:
    s, window_s = asked.layer_bytes, asked.compute_window_s or 0.0
    for number, late_s in enumerate(lateness_s(asked, found)):
        rate, hop = found.rate_bytes_per_s[number], found.hop_s_per_byte[number]
        arrivals = [
            found.busy_s[number] + (layer + 1) * s / rate + s * hop
            for layer in range(asked.num_layers)
        ]
        late = max(at_s - layer * window_s for layer, at_s in enumerate(arrivals))
        assert late_s == pytest.approx(late)


def test_an_idle_pair_reads_direct_because_a_relay_moves_the_bytes_twice() -> None:
    for policy in (least_lateness, shorter_queue, shortest_time):
        assert str(by(policy, {})) == "direct"


def test_the_paper_takes_the_shorter_queue_and_direct_of_equal_ones() -> None:
    assert str(by(shorter_queue, {"p": 501, "d": 500})) == "relay:d"
    assert str(by(shorter_queue, {"p": 500, "d": 500})) == "direct"
    assert str(by(shorter_queue, {"p": 500, "d": 501})) == "direct"


def test_of_equal_relays_the_decode_workers_node_which_needs_the_bytes_anyway() -> None:
    cluster = one_of_each()
    first = node("a")  # in the topology before d
    loads = {"p": NodeLoad("p", 5000)}
    for policy in (least_lateness, shorter_queue, shortest_time):
        route = choose_route(
            request("r"), "p", "d", type(cluster)((first, *cluster.nodes)), loads, policy
        )
        assert str(route) == "relay:d"


def test_a_fast_nic_has_read_a_longer_queue_sooner() -> None:
    queues = {"p": 900, "d": 600}
    assert str(by(shorter_queue, queues, d=RATE / 4)) == "relay:d"
    assert str(by(shortest_time, queues, d=RATE / 4)) == "direct"


def test_a_slow_nic_without_a_queue_is_late_with_the_last_layer_alone() -> None:
    # Of 10 layers of 100 bytes: p is free in 0.5 s and reads 1,000 bytes/s, d now and 400.
    queues = {"p": 500}
    patient = request("r", window_s=1.0)  # the first layer counts: 0.6 s against 0.26
    hasty = request("r", window_s=0.0)  # the last one does: 1.5 s against 2.51
    assert str(by(least_lateness, queues, patient, d=400.0)) == "relay:d"
    assert str(by(least_lateness, queues, hasty, d=400.0)) == "direct"
    assert str(by(least_lateness, queues, request("r"), d=400.0)) == "direct"


def test_any_node_may_relay_unless_only_the_pair_may() -> None:
    queues = {"p": 5000, "d": 4000}
    assert str(by(least_lateness, queues, None, "cpu")) == "relay:cpu"
    assert str(by(least_lateness, queues, None, "cpu", any_node=False)) == "relay:d"


def test_a_relay_without_landing_memory_for_all_of_it_takes_nothing() -> None:
    queues = {"p": 5000}
    assert str(by(least_lateness, queues, used={"d": 99_000})) == "relay:d"
    assert str(by(least_lateness, queues, used={"d": 99_001})) == "direct"


def test_a_slow_compute_network_bounds_a_relay() -> None:
    cluster = type(one_of_each())((node("p", "prefill", compute_rate=100.0), node("d", "decode")))
    # Over d 100 bytes a second: 11 s with the hop; p is done after 4 + 1.
    assert str(choose_route(request("r"), "p", "d", cluster, {"p": NodeLoad("p", 4000)})) == (
        "direct"
    )


def test_no_route_where_no_node_can_read() -> None:
    cluster = type(one_of_each())((node("p", "prefill", rate=0.0), node("d", "decode")))
    asked = request("r", chunk_bytes=100)
    for policy in POLICIES.values():
        assert str(choose_route(asked, "p", "d", cluster, {}, policy)) == "relay:d"
        full = {"d": NodeLoad("d", 0, 100_000)}
        assert choose_route(asked, "p", "d", cluster, full, policy) is None
        dead = {"d": NodeLoad("d", is_alive=False)}
        assert choose_route(asked, "p", "d", cluster, dead, policy) is None


def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'x' is not in the topology"):
        choose_route(request("r"), "p", "x", one_of_each(), {})


def test_equal_sides_read_half_each() -> None:
    route = by(split, {}, request("r", chunk_bytes=100))
    assert route is not None
    assert route.parts == (RoutePart("p", None, 500, 5), RoutePart("d", "d", 500, 5))
    assert (route.kind, str(route)) == ("split", "split:direct=5,relay:d=5")
    assert route.predicted_lateness_s == pytest.approx(0.5 + 50 / COMPUTE_RATE)


def test_a_side_that_is_busy_for_long_has_no_part() -> None:
    assert str(by(split, {"d": 1000}, request("r", chunk_bytes=100))) == "direct"
    assert str(by(split, {"d": 600}, request("r", chunk_bytes=100))) == "split:direct=8,relay:d=2"


def test_landing_memory_bounds_a_relays_part() -> None:
    asked = request("r", chunk_bytes=100)
    assert str(by(split, {}, asked, used={"d": 99_750})) == "split:direct=8,relay:d=2"


def test_a_delivery_of_one_chunk_or_of_unknown_chunks_is_not_split() -> None:
    for chunk_bytes in (0, 1000):
        assert str(by(split, {}, request("r", chunk_bytes=chunk_bytes))) == "direct"


@given(ANY_CANDIDATES, ANY_REQUEST)
def test_the_sides_of_a_split_are_done_within_a_chunk_of_each_other(
    found: Candidates, asked: DispatchRequest
) -> None:
    shares = split(asked, found)
    assert sum(share.read_bytes for share in shares) == asked.read_bytes
    if len(shares) < 2:
        return
    assert all(share.read_bytes == share.chunk_count * asked.chunk_bytes for share in shares)
    done_s, chunk_s = list[float](), list[float]()
    for share in shares:
        rate, hop = (
            float(each[share.candidate]) for each in (found.rate_bytes_per_s, found.hop_s_per_byte)
        )
        done_s.append(
            float(found.busy_s[share.candidate])
            + share.read_bytes / rate
            + share.read_bytes / asked.num_layers * hop
        )
        chunk_s.append(asked.chunk_bytes / rate + asked.chunk_bytes / asked.num_layers * hop)
    assert abs(done_s[0] - done_s[1]) <= max(chunk_s) * (1 + 1e-9)
    alone_s = found.busy_s + asked.read_bytes / found.rate_bytes_per_s
    alone_s += asked.layer_bytes * found.hop_s_per_byte
    assert max(done_s) <= float(alone_s.min()) + max(chunk_s)


@given(ANY_CANDIDATES, ANY_REQUEST)
def test_least_lateness_is_never_later_than_another_choice(
    found: Candidates, asked: DispatchRequest
) -> None:
    late = lateness_s(asked, found)
    [ours] = least_lateness(asked, found)
    for policy in (shorter_queue, shortest_time):
        [theirs] = policy(asked, found)
        assert late[ours.candidate] <= late[theirs.candidate]


def test_of_idle_nics_the_one_that_read_less_lately_is_taken_once_that_is_worth_a_hop() -> None:
    asked = request("r", layer_bytes=100)
    idle = candidates([0.0, 0.0, 0.0], [1000.0] * 3, [0.0, 1e-5, 1e-5], [np.inf, 1e9, 1e9])

    def chosen(*recent_s: float) -> int:
        recent = dataclasses.replace(idle, recent_s=np.array(recent_s))
        return least_lateness(asked, recent)[0].candidate

    assert chosen(0.0, 0.0, 0.0) == 0
    assert chosen(0.04, 0.0, 0.0) == 0  # 0.8 ms of lateness, for a hop of 1 ms
    assert chosen(0.06, 0.01, 0.0) == 2
    assert chosen(0.06, 0.0, 0.01) == 1


def test_what_a_nic_read_lately_does_not_outweigh_what_it_has_to_read() -> None:
    asked = request("r", layer_bytes=100)
    busy = candidates([0.0, 0.03], [1000.0] * 2, [0.0, 0.0], [np.inf, 1e9])
    recent = dataclasses.replace(busy, recent_s=np.array([1.0, 0.0]))
    assert least_lateness(asked, recent)[0].candidate == 0
