"""How a fetch chooses where its bytes come, and becomes a running delivery."""

from __future__ import annotations

import numpy as np

from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.begun_fetch import BODY, BegunFetch
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.fetch_in_body import begin_in_body
from objectcache.deliveries.fetch_into_target import begin_into_target
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.landing.refusals import may_fall_back
from objectcache.payload import PayloadShape
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import NotFound, Unavailable


def fetch(core: ClientCore, request: FetchRequest) -> Delivery:
    """Begin a delivery; returns when the server has accepted it.

    Raises the server's refusal, or `Unavailable` with the reason where registered memory was
    demanded and cannot be had.
    """
    begun = _begin(core, request)
    delivery = Delivery(
        begun.progress,
        begun.head.shape(request.descriptor),
        begun.landing.array,
        begun.receiver,
        transport=begun.transport,
        head=begun.head,
        target=request.target,
        reports=begun.reports,
        owner=core,
    )
    begun.receiver.start(core.threads)
    return delivery


def _begin(core: ClientCore, request: FetchRequest) -> BegunFetch:
    if request.comes_in_body:
        return begin_in_body(core, request)
    try:
        return begin_into_target(core, request, core.memory(request.memory_choice))
    except (Unavailable, NotFound) as error:
        if request.memory_choice is not TransportChoice.AUTO or not may_fall_back(error):
            raise
    return begin_in_body(core, request)


def empty_delivery(layers: tuple[int, int], slice_bytes: int) -> Delivery:
    """The delivery of no chunks: complete, without asking a server."""
    first_layer, end_layer = layers
    progress = LayerProgress(first_layer, end_layer)
    progress.advance(end_layer)
    shape = PayloadShape(first_layer, end_layer, 0, slice_bytes, DeliveryMode.LAYERWISE)
    return Delivery(progress, shape, np.empty(0, np.uint8), None, transport=BODY)
