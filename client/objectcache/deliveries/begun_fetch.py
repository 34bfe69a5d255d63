"""A fetch that the server has accepted, whichever way its bytes come."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache.channel.responses import DeliveryHead
from objectcache.core import TransportChoice
from objectcache.deliveries.consumption import ConsumptionReports
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver
from objectcache.landing.regions import Landing

BODY = TransportChoice.BODY.value


@dataclass(frozen=True, slots=True)
class BegunFetch:
    """What was answered, where the layers land, who receives them, and who hears of their use."""

    head: DeliveryHead
    progress: LayerProgress
    landing: Landing
    receiver: LayerReceiver
    reports: ConsumptionReports
    transport: str
