"""One HTTP request and the means to answer it, as the operations' handlers see it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiohttp import HttpVersion11, web

from objectcache_gateway.access.authorizer import RequestAccess
from objectcache_gateway.answering.buffer_path_memory import BufferPathMemory
from objectcache_gateway.answering.document_memory import DocumentMemory, RequestDocument
from objectcache_gateway.bodies.arrival import ArrivalBudget
from objectcache_gateway.bodies.body import BodyDecoder
from objectcache_gateway.request import rdma_request
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import Operation
from objectcache_gateway.signing.sigv4 import Authenticated
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_gateway.storage.tenant_storage import TenantStorage
from objectcache_gateway.xml.xml_render import XML, error_document
from objectcache_gateway.xml.xml_tree import SMALL_XML_BYTES_MAX
from objectcache_runtime.settings import Settings
from objectcache_schemas import headers
from objectcache_schemas.errors import (
    AccessDenied,
    InvalidRequest,
    ObjectCacheError,
    Unsupported,
)
from objectcache_schemas.messages.request_labels import adopted_request_id, new_request_id

SERVER_NAME = "ObjectCache"
THREAD_BYTES_MIN = 64 << 10  # smaller pieces are hashed sooner than a thread takes them over
RETRY_AFTER_S = 1.0  # where the error does not say
RETRYABLE_STATUS = 503  # SlowDown, and what cannot be reached just now
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def request_head(request: web.BaseRequest, raw_path: str, raw_query: str) -> RequestHead:
    """The head of a request in the pure core's terms."""
    pairs = [
        (name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
        for name, value in request.raw_headers
    ]
    return RequestHead(request.method, raw_path, raw_query, tuple(pairs))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for and who asks, established before any handler runs."""

    address: Address
    operation: Operation
    authenticated: Authenticated
    identity: str


class PrefixMatch(NamedTuple):
    """How much of a prefix was stored, for the metrics."""

    asked: int  # chunks
    matched: int
    chunk_tokens: int  # 0 where the bucket has no layout


def _nothing() -> None:
    """Nobody counts."""


class Exchange:
    """One request and its response. Handlers raise `ObjectCacheError`s; the server renders them."""

    def __init__(
        self,
        request: web.BaseRequest,
        settings: Settings,
        storage: StorageFleet,
        staging: BufferPathMemory,
        documents: DocumentMemory,
        is_draining: Callable[[], bool],
        leave_flight: Callable[[], None] = _nothing,
        identity_for: Callable[[str], str] | None = None,
    ) -> None:
        """`is_draining` tells whether connections have to end with their response. `leave_flight`
        and `identity_for` are for what goes on for longer than a request: the first has it take no
        request's place, and a drain not wait for it; the second tells whose an access key is now,
        and raises `AccessDenied` where it is none any more.
        """
        self.request = request
        self.settings = settings
        self._fleet = storage
        self.storage = TenantStorage(storage, "")
        self.staging = staging
        self._document = RequestDocument(documents)
        self.started_s = time.monotonic()
        self.traceparent = ""  # of this request's span, where there is one
        self.request_id = (
            adopted_request_id(request.headers.get(headers.REQUEST_ID)) or new_request_id()
        )
        self.received_bytes = 0
        self.sent_bytes = 0
        self.first_byte_s: float | None = None  # after the start, when the response's head was sent
        self.error_code = ""  # of the error that the request was answered with
        self.refused_by = ""  # the quota, where it was one
        self.object_bytes: int | None = None  # of the object that is read or stored
        self.versions: tuple[int, int] | None = None  # of accounts and buckets, that decide
        self.matched: PrefixMatch | None = None  # what a match has found
        self.rdma_declined = False  # a transfer by RDMA that the request asks for
        self.awaits_body = False  # and nothing is done for the request meanwhile
        self.body_stalled = False  # the request's body stopped arriving, or nearly
        self.response: web.StreamResponse | None = None  # once its head is on the wire
        self.last_bytes = b""  # of a streamed response's body, to leave together with its end
        self._head: RequestHead | None = None
        self._asked: Asked | None = None
        self._access: RequestAccess | None = None
        self._query: Mapping[str, str] = {}
        self._continued = False
        self._is_draining = is_draining
        self.leave_flight = leave_flight
        self._identity_for = identity_for

    # --- the request ---

    def establish(self, head: RequestHead, query: Mapping[str, str], asked: Asked) -> None:
        """Tell the exchange what was asked."""
        self._head, self._query, self._asked = head, query, asked
        self.storage = TenantStorage(self._fleet, asked.identity)

    @property
    def asked(self) -> Asked | None:
        """What was asked, once that is established."""
        return self._asked

    def permit(self, access: RequestAccess) -> None:
        """Tell the exchange what whoever asks may do."""
        self._access = access

    @property
    def access(self) -> RequestAccess:
        """What whoever asks may do, once that is decided."""
        assert self._access is not None
        return self._access

    @property
    def bucket_owner(self) -> str:
        """Who owns the request's bucket; empty where that is not known."""
        bucket = self._access.bucket if self._access is not None else None
        return bucket.owner if bucket is not None else ""

    @property
    def head(self) -> RequestHead:
        """The request's head."""
        assert self._head is not None
        return self._head

    @property
    def query(self) -> Mapping[str, str]:
        """The decoded query; the first value of each name."""
        return self._query

    @property
    def operation(self) -> Operation:
        """What is asked for."""
        assert self._asked is not None
        return self._asked.operation

    @property
    def address(self) -> Address:
        """The resource that the request names."""
        assert self._asked is not None
        return self._asked.address

    @property
    def bucket(self) -> str:
        """The bucket of an operation that has one."""
        assert self._asked is not None
        assert self._asked.address.bucket is not None
        return self._asked.address.bucket

    @property
    def key(self) -> str:
        """The key of an operation that has one."""
        assert self._asked is not None
        assert self._asked.address.key is not None
        return self._asked.address.key

    @property
    def identity(self) -> str:
        """Who asks."""
        assert self._asked is not None
        return self._asked.identity

    def check_identity(self) -> None:
        """Raise `AccessDenied` where the access key that signed is not in force any more."""
        if self._identity_for is not None:
            now = self._identity_for(self.authenticated.access_key)
            if now != self.identity:
                raise AccessDenied("the access key is another user's now")

    @property
    def authenticated(self) -> Authenticated:
        """How the request was signed."""
        assert self._asked is not None
        return self._asked.authenticated

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request's head arrived."""
        return time.monotonic() - self.started_s

    @property
    def admission_timeout_s(self) -> float:
        """How long the storage server may take to begin a delivery, which may wait for its turn,
        for memory, and then for a rate.
        """
        gateway, scheduler = self.settings.gateway, self.settings.scheduler
        return gateway.storage_timeout_s + 3 * scheduler.queue_timeout_s

    # --- the request's body ---

    @property
    def awaits_continue(self) -> bool:
        """Whether the client holds its body back until it is told to go on."""
        expect = self.request.headers.get("Expect", "")
        knows_continue = self.request.version >= HttpVersion11
        return expect.lower() == "100-continue" and knows_continue and not self._continued

    def send_continue(self) -> None:
        """Let a client that waits for it send its body."""
        if self.awaits_continue and self.request.transport is not None:
            self.request.transport.write(_CONTINUE)
        self._continued = True

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, still in its aws-chunked framing.

        Raises `InvalidRequest`: RequestTimeout when it stops arriving, or arrives too slowly for
        too long; IncompleteBody when HTTP's own framing breaks.
        """
        self.send_continue()
        gateway = self.settings.gateway
        budget = ArrivalBudget(gateway.body_stall_timeout_s, gateway.body_rate_bytes_per_s_min)
        content = self.request.content
        while not content.at_eof():
            asked_s = time.monotonic()
            try:
                if content.is_eof():
                    data = content.read_nowait()
                else:
                    self.awaits_body = True
                    async with asyncio.timeout(budget.left_s):
                        data = await content.readany()
            except TimeoutError as error:
                self.body_stalled = True
                raise InvalidRequest(
                    f"for {gateway.body_stall_timeout_s:g} s the body arrived at less than "
                    f"{gateway.body_rate_bytes_per_s_min} bytes/s, or not at all "
                    "(gateway.body_stall_timeout_s, gateway.body_rate_bytes_per_s_min)",
                    code="RequestTimeout",
                ) from error
            except web.RequestPayloadError as error:
                raise InvalidRequest(
                    "the body's framing is broken", code="IncompleteBody"
                ) from error
            finally:
                self.awaits_body = False
            budget.arrived(len(data), time.monotonic() - asked_s)
            self.received_bytes += len(data)
            if data:
                yield data

    def decoder(
        self,
        bytes_max: int,
        *,
        etag: bool = False,
        compute_checksum: str | None = None,
        checksum_headers: bool = True,
    ) -> BodyDecoder:
        """A decoder of this request's body."""
        return BodyDecoder(
            self.head,
            self.authenticated,
            bytes_max,
            etag,
            compute_checksum=compute_checksum,
            checksum_headers=checksum_headers,
        )

    def hold_document(self, arrived_bytes: int) -> None:
        """So much has arrived of a document that is kept here. Raises `Busy` past the tenant's
        share of the memory for them.
        """
        self._document.hold(self.identity, arrived_bytes)

    def release_document(self) -> None:
        """The request has ended, and with it what it kept. Repeating has no effect."""
        self._document.release()

    async def read_body(self, decoder: BodyDecoder) -> bytes:
        """A whole small body, verified; the decoder's cap bounds it. Raises `Busy` too."""
        payload: list[bytes | memoryview] = []
        async for data in self.pieces():
            self.hold_document(self.received_bytes)
            payload += await feed(decoder, data)
        decoder.finish()
        return b"".join(payload)

    async def read_xml(self, bytes_max: int = SMALL_XML_BYTES_MAX) -> bytes:
        """A whole XML body of a kind that is small in S3 too."""
        bytes_max = min(bytes_max, self.settings.limits.xml_body_bytes_max)
        return await self.read_body(self.decoder(bytes_max))

    # --- the response ---

    @property
    def base_headers(self) -> dict[str, str]:
        """Headers of every response."""
        return {
            "Server": SERVER_NAME,
            "x-amz-request-id": self.request_id,
            headers.REQUEST_ID: self.request_id,
        }

    def empty(self, status: int = 200, more: Mapping[str, str] | None = None) -> web.Response:
        """A response without a body."""
        return web.Response(status=status, headers={**self.base_headers, **(more or {})})

    def document(
        self, body: bytes, content_type: str, more: Mapping[str, str] | None = None
    ) -> web.Response:
        """A response with a body that is at hand."""
        named = {**self.base_headers, **(more or {}), "Content-Type": content_type}
        return web.Response(body=body, headers=named)

    def xml(self, body: bytes, more: Mapping[str, str] | None = None) -> web.Response:
        """A response with an XML document."""
        return self.document(body, XML, more)

    def small(self, status: int, body: bytes, more: Mapping[str, str]) -> web.Response:
        """A response with bytes of an object, which leave together with its head."""
        return web.Response(status=status, body=body, headers={**self.base_headers, **more})

    def stream(self, status: int, more: Mapping[str, str]) -> web.StreamResponse:
        """A response whose body follows."""
        return web.StreamResponse(status=status, headers={**self.base_headers, **more})

    def declined_write(self) -> web.Response:
        """The answer to a PUT whose bytes were to be read by RDMA: a status of success, no ETag,
        and the error in the body, as the draft of S3 over RDMA has it. Nothing was stored.
        """
        error = Unsupported(
            "no transfer by RDMA here; send the bytes in the body, without x-amz-rdma-token",
            code="RDMANotSupported",
        )
        response = self.error(error, {rdma_request.REPLY: rdma_request.DECLINED})
        response.set_status(200)
        return response

    def failed(self, error: ObjectCacheError) -> None:
        """Note for the metrics and the logs that the request was answered with an error."""
        self.error_code = error.code
        self.refused_by = error.details.quota or ""

    def error(
        self,
        error: ObjectCacheError,
        more: Mapping[str, str] | None = None,
        more_elements: Sequence[str] = (),
    ) -> web.Response:
        """The response to an error, with more headers and XML elements; a HEAD gets no body."""
        self.failed(error)
        named = {**self.base_headers, **(more or {})}
        method, resource = self.request.method, self.request.raw_path
        return error_response(error, method, resource, named, more_elements)

    async def start(self, response: web.StreamResponse) -> None:
        """Send the response's head. From here on an error can only cut the connection."""
        if self._is_draining():
            response.force_close()
        self.response = response
        await response.prepare(self.request)
        self.first_byte_s = self.elapsed_s

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.request.method}>"


async def feed(decoder: BodyDecoder, data: bytes) -> list[bytes | memoryview]:
    """Decode and hash one piece, a large one in a thread."""
    if len(data) < THREAD_BYTES_MIN:
        return decoder.feed(data)
    return await asyncio.to_thread(decoder.feed, data)


def error_response(
    error: ObjectCacheError,
    method: str,
    resource: str,
    named: Mapping[str, str],
    more_elements: Sequence[str] = (),
) -> web.Response:
    """S3's response to an error."""
    status = error.row.http_status
    extra: dict[str, str] = {}
    if status == RETRYABLE_STATUS:
        extra["Retry-After"] = str(math.ceil(error.details.retry_after_s or RETRY_AFTER_S))
    if method == "HEAD":
        return web.Response(status=status, headers={**named, **extra})
    path = resource.partition("?")[0]
    body = error_document(error, path, named["x-amz-request-id"], *more_elements)
    return web.Response(status=status, body=body, headers={**named, **extra, "Content-Type": XML})
