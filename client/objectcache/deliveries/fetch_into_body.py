"""Fetches whose bytes come in the body of the response."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from objectcache.channel.http_channel import GatewayExchange
from objectcache.channel.responses import DeliveryHead
from objectcache.core import ClientCore
from objectcache.deliveries.begun_fetch import BODY, BegunFetch
from objectcache.deliveries.consumption import ConsumptionReports, no_reports
from objectcache.deliveries.encoded.encoded_body import EncodedBodyReceiver
from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.deliveries.feedback import teach_windows
from objectcache.deliveries.fetch_request import FetchRequest, begin_over_http
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import BodyReceiver, ExchangeReceiver
from objectcache.landing.regions import Landing, nothing
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import ObjectCacheError


def begin_in_body(core: ClientCore, request: FetchRequest) -> BegunFetch:
    """Returns when the server has accepted it; raises its refusal."""
    # An explicit target is claimed first: a refusal must not cost the server a delivery.
    landing = None if request.target is None else request.target.claim(request.timeout_s)
    progress = request.progress(silence_s_max=None)  # the socket's timeout bounds it
    try:
        exchange, head = begin_body(core, request, with_learned_window(core, request))
        assert exchange.length_bytes is not None, "begin_body has checked it"
        length_bytes = exchange.length_bytes
        landing = landing or Landing(np.empty(length_bytes, np.uint8), None, nothing)
    except BaseException:
        if landing is not None:
            landing.settle()
        raise
    shape = head.shape(request.descriptor)
    receiver: ExchangeReceiver = BodyReceiver(exchange, landing, progress, shape)
    wire = None
    if head.directory_bytes:
        wire = WirePayload(landing.array, length_bytes, head.directory_bytes, shape)
        receiver = EncodedBodyReceiver(
            exchange, landing, progress, wire, head.directory_bytes, length_bytes
        )
    reports = teaching(core, request, head.chunk_count, progress)
    return BegunFetch(head, progress, landing, receiver, reports, BODY, wire=wire)


def begin_body(
    core: ClientCore, request: FetchRequest, descriptor: Descriptor
) -> tuple[GatewayExchange, DeliveryHead]:
    """Returns when the server has accepted it, with its payload to be read; raises its refusal."""
    exchange, head = begin_over_http(core, request, descriptor)
    payload_bytes = head.shape(descriptor).payload_bytes
    length_bytes = exchange.length_bytes
    is_encoded = head.directory_bytes > 0
    is_right = length_bytes == payload_bytes
    if is_encoded:
        is_right = length_bytes is not None and head.directory_bytes < length_bytes < payload_bytes
    if not is_right:
        exchange.abandon()
        raise ObjectCacheError(
            f"the server announced a body of {length_bytes} bytes "
            f"for {'an encoded' if is_encoded else 'a'} payload of {payload_bytes}"
        )
    return exchange, head


def with_learned_window(core: ClientCore, request: FetchRequest) -> Descriptor:
    """The descriptor, with what earlier deliveries took where the caller says nothing."""
    descriptor = request.descriptor
    if not core.settings.learn_windows or descriptor.model is not None:
        return descriptor
    if descriptor.compute_window_s is not None:
        return descriptor
    window_s = core.windows.window_s(request.shape(len(descriptor.chunk_keys)))
    return replace(descriptor, compute_window_s=window_s)


def teaching(
    core: ClientCore, request: FetchRequest, chunk_count: int, progress: LayerProgress
) -> ConsumptionReports:
    """Reports from which the client learns, unless it is not to, or nothing can be learned."""
    if not core.settings.learn_windows or request.wants_the_whole:
        return no_reports(progress)
    layer_bytes = chunk_count * request.descriptor.per_layer_chunk_bytes
    return teach_windows(progress, core.windows, request.shape(chunk_count), layer_bytes)
