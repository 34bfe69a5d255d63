"""The delivery mode of a get: the descriptor's, or the threshold rule (paper, equation 2)."""

from __future__ import annotations

from objectcache_schemas.descriptor import DeliveryMode


def choose_mode(
    asked: DeliveryMode, payload_bytes: int, layerwise_threshold_bytes: int
) -> DeliveryMode:
    """Layerwise from the threshold up, chunkwise below, unless the client asked for one."""
    if asked is not DeliveryMode.AUTO:
        return asked
    if payload_bytes >= layerwise_threshold_bytes:
        return DeliveryMode.LAYERWISE
    return DeliveryMode.CHUNKWISE
