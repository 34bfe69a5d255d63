"""Fetches whose bytes come in the response's body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from objectcache.core import ClientCore
from objectcache.deliveries.begun_fetch import BODY, BegunFetch
from objectcache.deliveries.consumption import ConsumptionReports, no_reports
from objectcache.deliveries.feedback import teach_windows
from objectcache.deliveries.fetch_request import FetchRequest, begin_over_http
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import BodyReceiver
from objectcache.landing.regions import Landing, nothing
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import ObjectCacheError


def begin_in_body(core: ClientCore, request: FetchRequest) -> BegunFetch:
    """Returns when the server has accepted it; raises its refusal."""
    # An explicit target is claimed first: a refusal must not cost the server a delivery.
    landing = None if request.target is None else request.target.claim(request.timeout_s)
    progress = request.progress(silence_s_max=None)  # the socket's timeout bounds it
    try:
        exchange, head = begin_over_http(core, request, _with_learned_window(core, request))
        shape = head.shape(request.descriptor)
        if exchange.length_bytes != shape.payload_bytes:
            exchange.abandon()
            raise ObjectCacheError(
                f"the server announced a body of {exchange.length_bytes} bytes "
                f"for a payload of {shape.payload_bytes}"
            )
        landing = landing or Landing(np.empty(shape.payload_bytes, np.uint8), None, nothing)
    except BaseException:
        if landing is not None:
            landing.settle()
        raise
    receiver = BodyReceiver(exchange, landing, progress, shape)
    reports = _teaching(core, request, head.chunk_count, progress)
    return BegunFetch(head, progress, landing, receiver, reports, BODY)


def _with_learned_window(core: ClientCore, request: FetchRequest) -> Descriptor:
    """The descriptor, with what earlier deliveries took where the caller says nothing."""
    descriptor = request.descriptor
    if not core.settings.learn_windows or descriptor.model is not None:
        return descriptor
    if descriptor.compute_window_s is not None:
        return descriptor
    window_s = core.windows.window_s(request.shape(len(descriptor.chunk_keys)))
    return replace(descriptor, compute_window_s=window_s)


def _teaching(
    core: ClientCore, request: FetchRequest, chunk_count: int, progress: LayerProgress
) -> ConsumptionReports:
    if not core.settings.learn_windows or request.wants_the_whole:
        return no_reports(progress)
    layer_bytes = chunk_count * request.descriptor.per_layer_chunk_bytes
    return teach_windows(progress, core.windows, request.shape(chunk_count), layer_bytes)
