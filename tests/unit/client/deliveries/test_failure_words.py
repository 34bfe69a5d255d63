"""What a delivery's failure says: the layer once, and why."""

from __future__ import annotations

import pytest

from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.errors import DeliveryFailed


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("the session ended", "layer 5 did not arrive: the session ended"),
        (
            "DeliveryFailed: layer 5 did not arrive: DeliveryFailed: layer 5 did not arrive: "
            "DamagedData: chunk 'ab'",
            "layer 5 did not arrive: DamagedData: chunk 'ab'",
        ),
        (
            "relay:b failed: layer 5 did not arrive: it was cut",
            "layer 5 did not arrive: relay:b failed: it was cut",
        ),
        (
            "DeliveryFailed: layer 6 did not arrive: it was cut",
            "layer 5 did not arrive: DeliveryFailed: layer 6 did not arrive: it was cut",
        ),
    ],
)
def test_a_layer_is_said_once_not_to_have_arrived(reason: str, said: str) -> None:
    progress = LayerProgress(0, 8)
    progress.advance(5)
    progress.fail(reason)
    with pytest.raises(DeliveryFailed) as failed:
        progress.wait(5, 20.0)
    assert failed.value.message == said
