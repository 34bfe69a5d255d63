"""A fetch that the server has accepted, whichever way its bytes come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from objectcache.channel.responses import DeliveryHead
from objectcache.core import TransportChoice
from objectcache.deliveries.consumption import ConsumptionReports
from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver
from objectcache.landing.regions import Landing
from objectcache.routes.taken_route import TakenRoute, only_direct

BODY = TransportChoice.BODY.value


def _nobody(_end_layer: int) -> None:
    """No later layer waits for room."""


@dataclass(frozen=True, slots=True)
class BegunFetch:
    """What was answered, where the layers land, who receives them, and who hears of their use."""

    head: DeliveryHead
    progress: LayerProgress
    landing: Landing
    receiver: LayerReceiver
    reports: ConsumptionReports
    transport: str
    route: TakenRoute = field(default_factory=only_direct)
    wire: WirePayload | None = None  # None where the payload is plain
    is_dequantised: bool = False  # what lands are the model's slices
    free_layers: Callable[[int], None] = _nobody  # of a ring: those below are not read any more

    def layer_bytes(self, slice_bytes: int) -> int:
        """Bytes that a layer brings, in the mean, as far as is known."""
        if self.wire is not None and self.wire.payload_bytes is not None:
            return self.wire.payload_bytes // max(1, len(self.progress.arrivals_s))
        return self.head.chunk_count * slice_bytes
