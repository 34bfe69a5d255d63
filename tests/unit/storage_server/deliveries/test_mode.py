"""The threshold rule."""

from __future__ import annotations

import pytest

from objectcache_schemas.descriptor import DeliveryMode
from objectcache_storage_server.deliveries.delivery_path import choose_mode

AUTO, LAYERWISE, CHUNKWISE = DeliveryMode.AUTO, DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE


@pytest.mark.parametrize(
    ("asked", "payload_bytes", "chosen"),
    [
        (AUTO, 99, CHUNKWISE),
        (AUTO, 100, LAYERWISE),
        (LAYERWISE, 1, LAYERWISE),
        (CHUNKWISE, 1000, CHUNKWISE),
    ],
)
def test_auto_is_layerwise_from_the_threshold_up(
    asked: DeliveryMode, payload_bytes: int, chosen: DeliveryMode
) -> None:
    assert choose_mode(asked, payload_bytes, 100) is chosen
