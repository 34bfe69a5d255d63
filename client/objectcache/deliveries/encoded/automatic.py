"""A fetch whose caller leaves it to the client whether layers come encoded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from objectcache.core import ClientCore
from objectcache.deliveries.encoded.delivery_watch import DeliveryWatch
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache_encodings.frames import ENCODINGS


def choose(core: ClientCore, request: FetchRequest) -> tuple[FetchRequest, DeliveryWatch]:
    """The request, with encodings where they pay, and what learns of its delivery."""
    watch = DeliveryWatch(partial(core.encoding_accounts.ended, request.bucket))
    target, descriptor = request.target, request.descriptor
    is_of_gpu = target is not None and target.array.nbytes < target.length_bytes
    if is_of_gpu or not core.encoding_accounts.asks(
        request.bucket, _compute_s_per_byte(core, request)
    ):
        return request, watch
    asked = replace(descriptor, encodings=tuple(ENCODINGS))
    return replace(request, descriptor=asked), watch


def _compute_s_per_byte(core: ClientCore, request: FetchRequest) -> float:
    descriptor, chunk_count = request.descriptor, len(request.descriptor.chunk_keys)
    window_s = descriptor.compute_window_s
    if window_s is None:
        window_s = core.windows.window_s(request.shape(chunk_count))
    return (window_s or 0.0) / (chunk_count * descriptor.per_layer_chunk_bytes)
