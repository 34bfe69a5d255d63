"""What a delivery tells the account of its bucket when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from objectcache.deliveries.delivery_facts import DeliveryFacts
from objectcache.encoding_choice.encoding_account import EndedDelivery

LAYERS_MIN = 2  # one layer's time is that of the request, too


class DeliveryWatch:
    """Measures one delivery. Deliveries of which it cannot be said how fast their link was teach
    nothing: of one layer, chunkwise, over relays, or that were not waited for to their end.
    """

    def __init__(self, tell: Callable[[EndedDelivery], None]) -> None:
        self._tell = tell
        self._waits_since_s: float | None = None
        self._waited_s = 0.0

    def wait_begins(self) -> None:
        """The engine wants a layer."""
        if self._waits_since_s is None:
            self._waits_since_s = time.monotonic()

    def wait_ended(self) -> None:
        """It was given it."""
        if self._waits_since_s is not None:
            self._waited_s += time.monotonic() - self._waits_since_s
            self._waits_since_s = None

    def closed(self, facts: DeliveryFacts, decode_s: float | None) -> None:
        """The delivery ends; `decode_s` is None where not all that came encoded was decoded."""
        arrivals_s = [at_s for at_s in facts.arrivals_s if at_s is not None]
        wire_bytes, count = facts.wire_bytes, len(facts.layers)
        if (
            decode_s is None
            or not wire_bytes
            or len(arrivals_s) < max(count, LAYERS_MIN)
            or facts.mode != "layerwise"
            or facts.route != "direct"
            or self._waited_s == 0
        ):
            return
        self._tell(
            EndedDelivery(
                facts.stored_bytes,
                wire_bytes,
                wire_bytes * (count - 1) // count,
                arrivals_s[-1] - arrivals_s[0],
                self._waited_s,
                decode_s,
                facts.is_encoded,
            )
        )
