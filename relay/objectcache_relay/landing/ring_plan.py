"""A payload over the landing memory goes round in a part of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from objectcache_relay.landing.landing_grants import ring_share
from objectcache_relay.landing.landing_regions import region_bytes_for
from objectcache_relay.landing.upstream import AskedForward
from objectcache_schemas.descriptor import DeliveryMode


def through_landing(asked: AskedForward, landing_bytes: int) -> AskedForward:
    """What is asked upstream for a get: all at once where that fits, else into a ring. A payload
    that is wanted in chunks has no layers to take turns. Of what is wanted at a rate all together
    has half of the memory.
    """
    share_bytes = ring_share(landing_bytes)
    if asked.descriptor.rate_bytes_per_s is not None:
        landing_bytes = share_bytes = landing_bytes // 2
    fits = region_bytes_for(asked.payload_bytes) <= landing_bytes
    if fits or asked.descriptor.delivery is DeliveryMode.CHUNKWISE:
        return asked
    layerwise = replace(asked.descriptor, delivery=DeliveryMode.LAYERWISE)
    ring_layers = _ring_layers(asked.layer_bytes, landing_bytes, share_bytes)
    return replace(asked, descriptor=layerwise, ring_layers=ring_layers)


def _ring_layers(layer_bytes: int, landing_bytes: int, share_bytes: int) -> int:
    """As many as half of the rings' share has, so that two rings fit; two at least where those fit
    in all of the memory, so that one lands while the other is sent on; else one.
    """
    layers = share_bytes // 2 // layer_bytes
    while layers > 2 and region_bytes_for(layers * layer_bytes) > share_bytes // 2:
        layers -= 1
    layers = max(2, layers)
    return layers if region_bytes_for(layers * layer_bytes) <= landing_bytes else 1
