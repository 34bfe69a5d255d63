"""Small objects that are at hand: answered at once, in one message.

A read that does not wait is cheaper than handing it to another thread, so it is done in the event
loop. It is a delivery all the same: admitted in its turn by the caller, and kept in the traces.
"""

from __future__ import annotations

import time

from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.limits import KIB
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject
from objectcache_storage_server.deliveries.delivery_path import TCP
from objectcache_storage_server.deliveries.delivery_records import recorded
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

BODY_BYTES_MAX = 64 * KIB  # whatever a gateway asks for; more is sent from a buffer of the pool


def open_small(
    means: GetMeans, request: OpenObject, recorder: DeliveryRecorder
) -> ObjectOpened | None:
    """The object with its body; None where it has to be opened.

    Under a cap it is always opened, because its bytes are paced with all others. Raises `NotFound`.
    """
    if not request.body_bytes_max or means.schedule.paces(request.identity):
        return None
    begun_s = time.monotonic()
    size_bytes_max = min(request.body_bytes_max, BODY_BYTES_MAX)
    found = means.calls.engine.read_small(request.bucket, request.key, size_bytes_max)
    if found is None:
        return None
    info, body = found
    if body:  # as with other objects, nothing is delivered of an empty one
        _record(means, recorder, len(body), begun_s)
    return ObjectOpened(info=info, body=body)


def _record(means: GetMeans, recorder: DeliveryRecorder, size_bytes: int, begun_s: float) -> None:
    """The trace of a delivery that was one read."""
    now_s = time.monotonic()
    with recorded(means, recorder):
        recorder.accepted(
            path=DeliveryPath.S3TCP.value,
            transport=TCP,
            delivery=DeliveryMode.CHUNKWISE.value,
            policy=means.schedule.policy,
            chunk_count=1,
            payload_bytes=size_bytes,
            first_layer=0,
            end_layer=1,
            compute_window_s=None,
            window_source=WindowSource.NONE.value,
            rate_bytes_per_s=None,
            now_s=begun_s,
        )
        recorder.fragment_begun(0, begun_s)
        recorder.fragment_read(0, size_bytes, now_s - begun_s, now_s)
        recorder.layers_ready(1, now_s)
