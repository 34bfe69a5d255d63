"""A payload over the landing memory goes round in a part of it, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from objectcache_relay.landing.landing_regions import region_bytes_for
from objectcache_relay.landing.ring_plan import through_landing
from objectcache_relay.landing.upstream import AskedForward
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing

KEYS = tuple(f"{number:064x}" for number in range(4))


def asked(
    layers: tuple[int, int], delivery: DeliveryMode = DeliveryMode.AUTO, rate: float | None = None
) -> AskedForward:
    """Of layers of 4 MiB."""
    descriptor = Descriptor(
        KEYS, 80, 16, 1 << 20, delivery, layers, OnMissing.TRUNCATE, rate_bytes_per_s=rate
    )
    return AskedForward("bucket", descriptor, None, "request")


@given(
    st.integers(0, 79),
    st.integers(1, 80),
    st.integers(4 << 20, 400 << 20),
    st.sampled_from([None, 1e6]),
)
def test_a_ring_takes_half_of_the_rings_share_and_two_layers_at_least_where_those_fit(
    first: int, count: int, landing_bytes: int, rate: float | None
) -> None:
    whole = asked((first, min(80, first + count)), rate=rate)
    ring = through_landing(whole, landing_bytes)
    room_bytes = landing_bytes if rate is None else landing_bytes // 2  # of what comes at a rate
    if region_bytes_for(whole.payload_bytes) <= room_bytes:
        assert ring == whole
        return
    layerwise = replace(whole.descriptor, delivery=DeliveryMode.LAYERWISE)
    assert replace(ring, ring_layers=0) == replace(whole, descriptor=layerwise)
    if region_bytes_for(2 * whole.layer_bytes) > room_bytes:
        assert ring.ring_layers == 1
        return
    assert ring.ring_layers >= 2
    assert region_bytes_for(ring.landing_bytes) <= room_bytes
    if ring.ring_layers > 2:  # two rings fit, and leave room beside them
        share_bytes = room_bytes if rate is not None else room_bytes * 3 // 4
        assert 2 * region_bytes_for(ring.landing_bytes) <= share_bytes


def test_what_is_wanted_in_chunks_goes_through_no_ring() -> None:
    in_chunks = asked((0, 80), DeliveryMode.CHUNKWISE)
    assert through_landing(in_chunks, 64 << 20) == in_chunks
