"""What the upstream of one get took."""

from __future__ import annotations

from objectcache.encoding_choice.encoding_account import EndedDelivery
from objectcache_relay.landing.landed_prefixes import LandedPrefix
from objectcache_relay.landing.upstream import AskedForward
from objectcache_schemas.descriptor import DeliveryMode

LAYERS_MIN = 2  # one layer's time is that of the request, too


def seen(
    asked: AskedForward, landed: LandedPrefix, begun_s: float, now_s: float, decode_s: float
) -> EndedDelivery | None:
    """Of a get that was asked for as this, all of which has landed and was sent, after so much
    decoding; accepted at `begun_s`, by time.monotonic.

    None of gets of which it cannot be said how fast their link was: of one layer, chunkwise, that
    wanted no more than a rate, or were sent what landed for others.
    """
    delivery = landed.delivery
    layers = asked.descriptor.end_layer - asked.descriptor.first_layer
    first_s = delivery.progress.arrived_s(delivery.layers.start)
    last_s = delivery.progress.arrived_s(delivery.layers.stop - 1)
    wire_bytes = delivery.wire_bytes
    if (
        layers < LAYERS_MIN
        or first_s is None
        or last_s is None
        or wire_bytes is None
        or delivery.mode != DeliveryMode.LAYERWISE.value
        or landed.is_rated
        or landed.asked is not asked
    ):
        return None
    return EndedDelivery(
        delivery.delivered_bytes,
        wire_bytes,
        wire_bytes * (layers - 1) // layers,
        last_s - first_s,
        now_s - begun_s,
        decode_s,
        delivery.is_encoded,
    )
