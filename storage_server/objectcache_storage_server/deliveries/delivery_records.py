"""Records of deliveries: what becomes of one, from its request to its end."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, WireError
from objectcache_schemas.messages.kv import KvGet
from objectcache_schemas.messages.reads import OpenObject
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.tracing.recorder import DeliveryRecorder


@contextmanager
def recorded(means: GetMeans, recorder: DeliveryRecorder) -> Generator[None]:
    """Keep the trace, and end it however the block ends; an error that is raised is its own."""
    means.traces.begin(recorder)
    error: WireError | None = None
    try:
        yield
    except ObjectCacheError as raised:
        error = raised.to_wire()
        raise
    except BaseException:
        error = DeliveryFailed("the gateway is gone").to_wire()
        raise
    finally:
        recorder.ended(time.monotonic(), error)


def new_recorder(
    means: GetMeans, request: KvGet | OpenObject, nic: str | None = None
) -> DeliveryRecorder:
    """The record of a request that has just arrived, with the path that it asks for, and the NIC
    that it names.
    """
    return DeliveryRecorder(
        request.request_id,
        request.bucket,
        request.identity,
        started_s=time.monotonic(),
        started_unix_s=time.time(),
        client_s=request.client_s,
        gateway_s=request.gateway_s,
        traceparent=request.traceparent,
        path=request.path if isinstance(request, KvGet) else DeliveryPath.S3TCP.value,
        policy=means.schedule.policy,
        nic=nic or "",
        reads=means.counts.engine.reads,
    )
