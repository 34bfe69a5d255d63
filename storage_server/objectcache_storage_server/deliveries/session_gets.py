"""Gets that a session asks for itself: no HTTP, no signature, no gateway; all else as for any get.

What a gateway does for a request is done here for a get: its bucket must be passed to the session
(`read_passes`), and it is logged. Quotas, turns and traces are those of every get.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from objectcache_runtime.logs import log_fields
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, WireError
from objectcache_schemas.messages.kv import DeliveryAccepted, DeliveryEnded, KvGet
from objectcache_schemas.messages.sessions import GetBegun, GetEnded, GetPrefix
from objectcache_storage_server.conversations.conversation import Asker
from objectcache_storage_server.conversations.sessions import Session
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.prefix_gets import serve_get

OWN_PATHS = ("", *(path.value for path in DeliveryPath if path is not DeliveryPath.BUFFER))

access_logger = logging.getLogger("objectcache.storage_server.access")
logger = logging.getLogger("objectcache.storage_server.session_gets")


class SessionAsker(Asker):
    """One get of a session. What is sent is told with the get's tag."""

    def __init__(self, session: Session, tag: int, cancelled: asyncio.Event) -> None:
        self._session = session
        self._tag = tag
        self._cancelled = cancelled
        self.ended = GetEnded(tag=tag)  # how, once it has

    async def send(self, message: msgspec.Struct) -> None:
        match message:
            case DeliveryAccepted():
                self._session.post(
                    GetBegun(
                        tag=self._tag,
                        delivery=message.delivery,
                        chunk_count=message.chunk_count,
                        rate_bytes_per_s=message.rate_bytes_per_s,
                        path=message.path,
                        window_source=message.window_source,
                        content=message.content,
                        directory_bytes=message.directory_bytes,
                    )
                )
            case DeliveryEnded():
                self.end(
                    GetEnded(
                        tag=self._tag,
                        payload_bytes=message.payload_bytes,
                        error=message.error,
                        failed_layer=message.failed_layer,
                    )
                )
            case _:
                raise AssertionError(f"{type(message).__name__} is no reply to a get")

    def end(self, ended: GetEnded) -> None:
        """Tell how it ended."""
        self.ended = ended
        self._session.post(ended)

    async def gone(self) -> None:
        await self._cancelled.wait()


async def serve_session_get(
    means: GetMeans, session: Session, request: GetPrefix, cancelled: asyncio.Event
) -> None:
    """Carry a get to its end, errors included. `cancelled` ends it."""
    begun_s = time.monotonic()
    asker = SessionAsker(session, request.tag, cancelled)
    try:
        await _serve(means, session, request, asker)
    except ObjectCacheError as error:
        means.counts.errors.add(error.code)
        _refuse(asker, request, error.to_wire())
    except ConnectionEnded:
        _refuse(asker, request, InvalidRequest("the get was cancelled").to_wire())
    except Exception:
        logger.exception("get %s failed", request.request_id)
        means.counts.errors.add(ObjectCacheError.default_code)
        failure = ObjectCacheError("the storage server failed; see its log")
        _refuse(asker, request, failure.to_wire())
    _log(session, request, asker.ended, time.monotonic() - begun_s)


async def _serve(
    means: GetMeans, session: Session, request: GetPrefix, asker: SessionAsker
) -> None:
    session.passes.check(request.bucket, means.books.versions, time.monotonic())
    descriptor = Descriptor.from_bytes(request.descriptor, means.settings.limits)
    target = descriptor.rdma_target
    if target is None or target.target_id not in session.targets or target.tag != request.tag:
        raise InvalidRequest("rdma_target must name a target of this session, and the get's tag")
    if request.path not in OWN_PATHS:
        raise InvalidRequest(f"path must be one of {', '.join(OWN_PATHS[1:])}, or empty")
    get = KvGet(
        bucket=request.bucket,
        identity=session.identity,
        request_id=request.request_id,
        descriptor=request.descriptor,
        path=request.path,
        client_s=request.client_s,
        traceparent=request.traceparent,
    )
    await serve_get(means, asker, get, descriptor)


def _refuse(asker: SessionAsker, request: GetPrefix, error: WireError) -> None:
    asker.end(GetEnded(tag=request.tag, error=error))


def _log(session: Session, request: GetPrefix, ended: GetEnded, elapsed_s: float) -> None:
    """One line a get, as a gateway has one a request."""
    if not access_logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "operation": "session_get",
        "bucket": request.bucket,
        "identity": session.identity,
        "sent_bytes": ended.payload_bytes,
        "duration_ms": round(elapsed_s * 1000, 3),
        "error_code": ended.error.code if ended.error else "",
        "request_id": request.request_id,
    }
    log_fields(access_logger, logging.INFO, "request", fields)
