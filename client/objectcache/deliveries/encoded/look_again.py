"""A chunk of which a reader could not decode a slice is looked at where it is stored."""

from __future__ import annotations

import logging
from dataclasses import replace

from objectcache.core import ClientCore
from objectcache.deliveries.fetch_request import FetchRequest, begin_over_http
from objectcache_schemas.descriptor import DeliveryMode, OnMissing
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.request_labels import new_request_id

logger = logging.getLogger("objectcache.deliveries.look_again")


def have_looked_at(core: ClientCore, request: FetchRequest, layer: int, key: str) -> None:
    """Ask for the slice plain, which the server has to decode: it drops a chunk that it cannot
    decode, and keeps one that was damaged on its way. May block; raises nothing.
    """
    descriptor = replace(
        request.descriptor,
        chunk_keys=(key,),
        layers=(layer, layer + 1),
        delivery=DeliveryMode.LAYERWISE,
        on_missing=OnMissing.FAIL,
        rdma_target=None,
        part=None,
        encodings=None,
        rate_bytes_per_s=None,
    )
    asked = replace(request, request_id=new_request_id(), path=None)
    try:
        exchange, _ = begin_over_http(core, asked, descriptor)
        try:
            exchange.read(descriptor.per_layer_chunk_bytes)
            exchange.finish()
        finally:
            exchange.abandon()
    except ObjectCacheError as error:
        logger.warning("chunk %s was damaged here, and cannot be had: %s", key, error)
        return
    logger.warning("chunk %s was damaged here, and is whole where it is stored", key)
