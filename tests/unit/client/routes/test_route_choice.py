"""The choice of a way, against the model computed by hand."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache.routes.accounts import RouteLoad
from objectcache.routes.route_choice import (
    COMPUTE_OVER_STORAGE,
    LEAST_LATENESS,
    SPLIT,
    choose_way,
)
from objectcache_dispatch import DispatchRequest
from tests.unit.examples import examples

INF = math.inf
MB = 10**6
CHUNKS, LAYERS, CHUNK_BYTES = 40, 8, 8 * 10**6


def fetch(window_s: float | None = None, chunk_bytes: int = CHUNK_BYTES) -> DispatchRequest:
    read_bytes = CHUNKS * CHUNK_BYTES
    return DispatchRequest(
        "fetch", 640, 1, read_bytes, read_bytes // LAYERS, LAYERS, window_s, chunk_bytes=chunk_bytes
    )


def late_s(load: RouteLoad, rate: float, *, is_direct: bool, window_s: float) -> float:
    """The most of arrival minus l x window over all layers."""
    layer_bytes = fetch().layer_bytes
    hop_s = 0.0 if is_direct else layer_bytes / (COMPUTE_OVER_STORAGE * rate)
    return max(
        load.queue_bytes / rate + (layer + 1) * layer_bytes / rate + hop_s - layer * window_s
        for layer in range(LAYERS)
    )


loads = st.builds(
    RouteLoad,
    st.integers(0, 10**9),
    st.one_of(st.none(), st.floats(1e6, 1e10)),
    st.sampled_from([0.0, 10.0**8, 10.0**9, INF]),
)


@settings(max_examples=examples(100))
@given(loads, st.dictionaries(st.sampled_from("bcde"), loads), st.sampled_from([None, 0.0, 0.01]))
def test_the_way_over_which_the_latest_layer_is_the_least_late_is_taken(
    direct: RouteLoad, relays: dict[str, RouteLoad], window_s: float | None
) -> None:
    direct = RouteLoad(direct.queue_bytes, direct.rate_bytes_per_s, INF)
    route = choose_way(fetch(window_s), direct, relays, LEAST_LATENESS)
    (part,) = route.parts
    every = [direct, *relays.values()]
    fastest = max((one.rate_bytes_per_s or 0.0 for one in every), default=0.0) or 125e6

    def of(load: RouteLoad, *, is_direct: bool = False) -> float:
        rate = load.rate_bytes_per_s or fastest
        return late_s(load, rate, is_direct=is_direct, window_s=window_s or 0.0)

    fitting = {name: one for name, one in relays.items() if one.room_bytes >= fetch().read_bytes}
    best = min([of(direct, is_direct=True), *(of(one) for one in fitting.values())])
    taken = of(direct, is_direct=True) if part.relay is None else of(fitting[part.relay])
    assert taken <= best * (1 + 1e-9)


def test_an_idle_direct_way_is_taken_where_nothing_is_known_of_rates() -> None:
    idle = RouteLoad(0, None, INF)
    for relays in ({}, {"b": idle}, {"b": RouteLoad(0, 50e6, INF)}):
        assert choose_way(fetch(), idle, relays, LEAST_LATENESS).kind == "direct"
    busy = RouteLoad(500 * MB, 100e6, INF)
    assert str(choose_way(fetch(), busy, {"b": RouteLoad(0, 100e6, INF)}, LEAST_LATENESS)) == (
        "relay:b"
    )
    full = RouteLoad(0, 100e6, 1.0)
    assert choose_way(fetch(), busy, {"b": full}, LEAST_LATENESS).kind == "direct"


@settings(max_examples=examples(100))
@given(loads, st.dictionaries(st.sampled_from("bcde"), loads))
def test_a_split_has_every_chunk_once_and_no_more_than_there_is_room_for(
    direct: RouteLoad, relays: dict[str, RouteLoad]
) -> None:
    direct = RouteLoad(direct.queue_bytes, direct.rate_bytes_per_s, INF)
    route = choose_way(fetch(), direct, relays, SPLIT)
    counts = [part.chunk_count or CHUNKS for part in route.parts]
    assert sum(counts) == CHUNKS
    assert all(count > 0 for count in counts)
    assert len({part.relay for part in route.parts}) == len(route.parts) <= 2
    for part in route.parts:
        if part.relay is not None:
            assert part.read_bytes <= relays[part.relay].room_bytes


def test_ways_that_are_alike_share_a_split_evenly() -> None:
    one = RouteLoad(0, 100e6, INF)
    parts = choose_way(fetch(), one, {"b": one}, SPLIT).parts
    assert [part.relay for part in parts] == [None, "b"]
    assert abs(parts[0].chunk_count - parts[1].chunk_count) <= 2  # the hop
