"""Layers take turns in a ring's places, and none takes one that is still read."""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_relay.landing.landing_ring import LandingRing
from objectcache_schemas.errors import DeliveryFailed

BOUND_S = 60.0


@given(
    first=st.integers(0, 50),
    written=st.integers(0, 40),
    layer_bytes=st.integers(1, 300),
    memory_bytes=st.integers(320, 3000),
)
def test_layers_that_have_room_have_places_of_their_own(
    first: int, written: int, layer_bytes: int, memory_bytes: int
) -> None:
    ring = LandingRing(first, memory_bytes)
    ring.divide(layer_bytes)
    ring.written(first + written)
    rounded_bytes = -(-layer_bytes // 64) * 64
    layers = range(first + written, first + written + memory_bytes // rounded_bytes)
    assert all(ring.wait_room(layer) for layer in layers)  # else it hangs
    begins = sorted(map(ring.place_bytes, layers))
    assert all(one + layer_bytes <= other for one, other in itertools.pairwise(begins))
    assert begins[-1] + layer_bytes <= memory_bytes


def waits(ring: LandingRing, layer: int, threads: ThreadPoolExecutor) -> Future[bool]:
    """A wait for room that there is none for yet."""
    waiting = threads.submit(ring.wait_room, layer)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    return waiting


def test_a_layer_waits_until_the_one_in_its_place_is_written() -> None:
    ring = LandingRing(3, 256)
    ring.divide(100)
    assert ring.wait_room(3)
    assert ring.wait_room(4)
    with ThreadPoolExecutor() as threads:
        waiting = waits(ring, 5, threads)
        ring.written(4)
        assert waiting.result(BOUND_S)
    assert ring.place_bytes(5) == ring.place_bytes(3) != ring.place_bytes(4)


def test_who_waits_for_room_is_told_of_the_close() -> None:
    ring = LandingRing(0, 256)
    ring.divide(256)
    with ThreadPoolExecutor() as threads:
        waiting = waits(ring, 1, threads)
        ring.close()
        assert not waiting.result(BOUND_S)


def test_a_layer_over_the_memory_is_refused_with_the_limit() -> None:
    with pytest.raises(DeliveryFailed, match="257 bytes, which do not fit in the 256 bytes"):
        LandingRing(0, 256).divide(257)
