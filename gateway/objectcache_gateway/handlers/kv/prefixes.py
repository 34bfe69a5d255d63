"""The extension: get, match and put of KV prefixes, bucket layouts, and tickets for targets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cached_property

import msgspec
from aiohttp import web

from objectcache_gateway.answering.body_into_put import abort_put, decoded
from objectcache_gateway.answering.body_to_client import send_body
from objectcache_gateway.answering.http_exchange import Exchange, PrefixMatch
from objectcache_gateway.bodies.body import BodyDecoder
from objectcache_gateway.bodies.descriptor_body import bounded_descriptor, descriptor_too_large
from objectcache_gateway.buffer_path.leased_target import leased_target
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_gateway.handlers.kv.known_servers import wanted_server
from objectcache_gateway.handlers.kv.read_passes import read_pass
from objectcache_gateway.request.delivery_headers import client_seconds, forced_path, traceparent
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_gateway.storage.storage_pool import StorageConversation
from objectcache_schemas import headers
from objectcache_schemas.accounts import Access
from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import (
    DESCRIPTOR_VERSION,
    DeliveryOutcome,
    Descriptor,
    MatchReply,
    MatchRequest,
    descriptor_header_bytes,
)
from objectcache_schemas.errors import AccessDenied, InvalidRequest, NotFound, ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, Limits
from objectcache_schemas.messages.buckets import SetLayout
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import (
    DeliveryAccepted,
    DeliveryEnded,
    KvGet,
    KvMatch,
    KvPut,
    KvStored,
    Matched,
    ReadPass,
)
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.sessions import CreateSession, SessionTicket
from objectcache_schemas.messages.writes import CommitPut, SendData

_BUFFER = DeliveryPath.BUFFER.value
_NO_WINDOW = ("", WindowSource.NONE.value)
LAYOUT_BYTES_MAX = 16 * KIB  # two names of 1 KiB and a few numbers

Pieces = Sequence[bytes | memoryview]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer to `POST /?kv-session`."""

    v: int
    ticket: bytes
    socket_path: str
    host_id: str
    expires_s: float


class PutReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer to `POST /{bucket}?kv-put`."""

    v: int
    stored: int
    existing: int


# --- get -----------------------------------------------------------------------------------------


class _Asked:
    """A get's descriptor: passed on as it came, decoded once if anything here looks into it."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self.data = data
        self._limits = limits

    @cached_property
    def descriptor(self) -> Descriptor:
        """Raises `InvalidRequest` as `Descriptor.from_bytes` does."""
        return Descriptor.from_bytes(self.data, self._limits)


async def get_by_key(exchange: Exchange) -> web.StreamResponse:
    """The header form: the descriptor's last key is the path's."""
    limits = exchange.settings.limits
    header = exchange.head.header(headers.DESCRIPTOR)
    assert header is not None
    asked = _Asked(descriptor_header_bytes(header, limits), limits)
    last_key = asked.descriptor.chunk_keys[-1]
    if last_key != exchange.key:
        raise InvalidRequest(
            f"the last of chunk_keys is {last_key!r}, the path names {exchange.key!r}",
            code="InvalidRequest",
            key=last_key,
        )
    return await _deliver(exchange, asked)


async def get(exchange: Exchange) -> web.StreamResponse:
    """The POST form: the descriptor is the body."""
    body = await _read_descriptor_body(exchange)
    return await _deliver(exchange, _Asked(body, exchange.settings.limits))


async def _deliver(exchange: Exchange, asked: _Asked) -> web.StreamResponse:
    if not exchange.access.here.allows(Access.READ, ""):
        exchange.access.here.check_all(Access.READ, asked.descriptor.chunk_keys)
    request = _get_request(exchange, asked.data)
    async with exchange.storage.conversation() as conversation:
        accepted = await conversation.begin(
            request, DeliveryAccepted, timeout_s=exchange.admission_timeout_s
        )
        if accepted.path == _BUFFER:
            return await _deliver_staged(exchange, conversation.connection, accepted, asked)
        if accepted.body_bytes == 0:
            connection = conversation.connection
            return await _respond(exchange, accepted, lambda: _delivery_end(exchange, connection))
        response = exchange.stream(
            200, {**delivery_headers(accepted), "Content-Length": str(accepted.body_bytes)}
        )
        await send_body(exchange, conversation.connection, response, 0, accepted.body_bytes)
        return response


def _get_request(exchange: Exchange, descriptor: bytes) -> KvGet:
    return KvGet(
        bucket=exchange.bucket,
        identity=exchange.identity,
        request_id=exchange.request_id,
        descriptor=descriptor,
        path=forced_path(exchange.head),
        client_s=client_seconds(exchange.head),
        gateway_s=exchange.elapsed_s,
        traceparent=exchange.traceparent or traceparent(exchange.head),
        read_pass=_read_pass(exchange),
    )


def _read_pass(exchange: Exchange) -> ReadPass | None:
    """Leave for the caller's session to get from the bucket by itself; none where every request is
    to be in the audit log, which is written here.
    """
    bucket = exchange.access.bucket
    if bucket is None or exchange.settings.gateway.audit_log:
        return None
    permission = exchange.access.here
    return read_pass(exchange.authenticated, permission, bucket, exchange.versions, time.time())


async def _deliver_staged(
    exchange: Exchange, body: StorageConnection, accepted: DeliveryAccepted, asked: _Asked
) -> web.StreamResponse:
    """The path `buffer`: this process takes the payload and writes it into the client's target."""
    with exchange.staging.piece(accepted.body_bytes, exchange.identity) as piece:
        async with leased_target(exchange, asked.descriptor, accepted.body_bytes) as target:
            return await _respond(exchange, accepted, lambda: target.fill(body, piece))


async def _respond(
    exchange: Exchange,
    accepted: DeliveryAccepted,
    delivery_end: Callable[[], Awaitable[DeliveryEnded]],
) -> web.StreamResponse:
    """Bytes go to the client's target; the response begins now and ends with the outcome."""
    response = exchange.stream(200, {**delivery_headers(accepted), "Content-Type": headers.MSGPACK})
    await exchange.start(response)
    ended = await delivery_end()
    outcome = DeliveryOutcome(
        v=DESCRIPTOR_VERSION,
        chunk_count=accepted.chunk_count,
        payload_bytes=ended.payload_bytes,
        error_code=ended.error.code if ended.error else None,
        error_message=ended.error.message if ended.error else None,
        failed_layer=ended.failed_layer,
    )
    exchange.last_bytes = msgspec.msgpack.encode(outcome)
    return response


async def _delivery_end(exchange: Exchange, connection: StorageConnection) -> DeliveryEnded:
    """How the delivery ended; a storage server that went away ended it too."""
    gateway, storage = exchange.settings.gateway, exchange.settings.storage
    timeout_s = storage.delivery_timeout_s + gateway.storage_timeout_s
    try:
        return await connection.receive(DeliveryEnded, timeout_s=timeout_s)
    except ObjectCacheError as error:
        return DeliveryEnded(payload_bytes=0, error=error.to_wire())


def delivery_headers(accepted: DeliveryAccepted) -> dict[str, str]:
    """What the response says about the delivery."""
    named = {
        headers.DELIVERY: accepted.delivery,
        headers.CHUNK_COUNT: str(accepted.chunk_count),
        headers.LAYER_BYTES: str(accepted.layer_bytes),
        "Content-Type": "application/octet-stream",
    }
    if accepted.rate_bytes_per_s is not None:
        named[headers.RATE] = str(accepted.rate_bytes_per_s)
    if accepted.path:
        named[headers.PATH] = accepted.path
        named[headers.TRANSPORT] = accepted.transport
    if accepted.window_source not in _NO_WINDOW:
        named[headers.WINDOW_SOURCE] = accepted.window_source
    if accepted.content:
        named[headers.CONTENT] = accepted.content
    if accepted.directory_bytes:
        named[headers.DIRECTORY_BYTES] = str(accepted.directory_bytes)
    return named


# --- match, layout, session ----------------------------------------------------------------------


async def match(exchange: Exchange) -> web.StreamResponse:
    """How long a prefix is stored, in one round trip."""
    body = await _read_descriptor_body(exchange)
    keys = MatchRequest.keys_from_bytes(body, exchange.settings.limits)
    exchange.access.here.check_all(Access.READ, keys)
    request = KvMatch(bucket=exchange.bucket, chunk_keys=keys)
    reply = await exchange.storage.call(request, Matched)
    exchange.matched = PrefixMatch(len(keys), reply.matched, reply.chunk_tokens)
    return _msgpack(exchange, MatchReply(v=DESCRIPTOR_VERSION, matched=reply.matched))


async def put_layout(exchange: Exchange) -> web.StreamResponse:
    """Give the bucket its KV layout."""
    body = await exchange.read_body(exchange.decoder(LAYOUT_BYTES_MAX))
    request = SetLayout(bucket=exchange.bucket, layout=KvLayout.from_bytes(body))
    await exchange.storage.call(request, Done)
    return exchange.empty()


async def get_layout(exchange: Exchange) -> web.StreamResponse:
    """The bucket's KV layout."""
    layout = (await get_bucket(exchange)).layout
    if layout is None:
        raise NotFound("the bucket has no KV layout", code="NoSuchKvLayout")
    return exchange.document(layout.to_bytes(), headers.MSGPACK)


async def create_session(exchange: Exchange) -> web.StreamResponse:
    """A ticket with which a client on a storage server's host joins its target socket."""
    request = CreateSession(
        identity=exchange.identity, access_key=exchange.authenticated.access_key
    )
    prefer = wanted_server(exchange)
    ticket = await exchange.storage.call(request, SessionTicket, prefer=prefer)
    body = Ticket(
        v=DESCRIPTOR_VERSION,
        ticket=ticket.ticket,
        socket_path=ticket.socket_path,
        host_id=ticket.host_id,
        expires_s=ticket.expires_s,
    )
    return _msgpack(exchange, body)


def _msgpack(exchange: Exchange, body: msgspec.Struct) -> web.Response:
    return exchange.document(msgspec.msgpack.encode(body), headers.MSGPACK)


async def _read_descriptor_body(exchange: Exchange) -> bytes:
    limits = exchange.settings.limits
    with bounded_descriptor(limits):
        return await exchange.read_body(exchange.decoder(limits.descriptor_bytes_max))


# --- put -----------------------------------------------------------------------------------------


class PutHead:
    """The length and the descriptor before a kv-put's payload, collected from pieces.

    With an `rdma_target` the payload lies there and none follows.
    """

    def __init__(self, limits: Limits, announced_bytes: int | None) -> None:
        """`announced_bytes` is the length of the whole body, None where it is not known."""
        self._limits = limits
        self._announced_bytes = announced_bytes
        self._collected = bytearray()
        self._payload_left_bytes = 0
        self.descriptor: Descriptor | None = None
        self.descriptor_bytes = b""

    def take(self, piece: bytes | memoryview) -> memoryview:
        """Take the next bytes and return what of them is payload.

        Raises `InvalidRequest`: DescriptorTooLarge, InvalidDescriptor, or IncompleteBody where the
        lengths do not add up.
        """
        view = memoryview(piece)
        while self.descriptor is None:
            wanted_bytes = self._wanted_bytes()
            count = min(wanted_bytes - len(self._collected), len(view))
            self._collected += view[:count]
            view = view[count:]
            if len(self._collected) < wanted_bytes:
                return view
            if wanted_bytes > LENGTH.size:
                self._parse()
        self._payload_left_bytes -= len(view)
        if self._payload_left_bytes < 0:
            raise self._wrong_length("more than")
        return view

    @property
    def document_bytes(self) -> int:
        """How much of the length and the descriptor has arrived."""
        return len(self._collected)

    @property
    def has_payload(self) -> bool:
        """Whether a payload follows the descriptor; false before the descriptor is known."""
        return self.descriptor is not None and self.descriptor.rdma_target is None

    def finish(self) -> None:
        """Raise `InvalidRequest` (IncompleteBody) unless all of the payload came."""
        if self.descriptor is None or self._payload_left_bytes:
            raise self._wrong_length("less than")

    def _wanted_bytes(self) -> int:
        if len(self._collected) < LENGTH.size:
            return LENGTH.size
        (length_bytes,) = LENGTH.unpack_from(self._collected)
        if length_bytes > self._limits.descriptor_bytes_max:
            raise descriptor_too_large(self._limits)
        if length_bytes == 0:
            raise InvalidRequest("the descriptor is empty", code="InvalidDescriptor")
        return LENGTH.size + int(length_bytes)

    def _parse(self) -> None:
        self.descriptor_bytes = bytes(memoryview(self._collected)[LENGTH.size :])
        descriptor = Descriptor.from_bytes(self.descriptor_bytes, self._limits, of_put=True)
        if descriptor.rdma_target is None:
            self._payload_left_bytes = descriptor.put_bytes
        self.descriptor = descriptor
        whole_bytes = len(self._collected) + self._payload_left_bytes
        if self._announced_bytes not in (None, whole_bytes):
            raise InvalidRequest(
                f"the body must have {whole_bytes} bytes: 4, the descriptor and, without an "
                f"rdma_target, encoded_bytes or chunks x layers x per_layer_chunk_bytes; "
                f"{self._announced_bytes} are announced",
                code="IncompleteBody",
            )

    def _wrong_length(self, came: str) -> InvalidRequest:
        """Of a body whose length was not announced."""
        wanted = "4 bytes of length and the descriptor"
        if self.descriptor is not None:
            payload_bytes = self.descriptor.put_bytes if self.has_payload else 0
            wanted += f", {len(self._collected)} bytes, and a payload of {payload_bytes}"
        return InvalidRequest(
            f"the body has {came} it must have: {wanted}; the payload is, without an rdma_target, "
            "encoded_bytes or chunks x layers x per_layer_chunk_bytes",
            code="IncompleteBody",
        )


async def put(exchange: Exchange) -> web.StreamResponse:
    """Store chunks, all or none, once the whole body was verified."""
    limits = exchange.settings.limits
    decoder = exchange.decoder(LENGTH.size + limits.descriptor_bytes_max + limits.payload_bytes_max)
    if exchange.awaits_continue:
        await _check_room(exchange, decoder.expected_bytes or 0)
    body = decoded(exchange, decoder)
    first = await anext(body)
    async with exchange.storage.conversation() as conversation:
        head = PutHead(limits, decoder.expected_bytes)
        stored = await _receive_chunks(exchange, decoder, head, first, body, conversation)
    reply = PutReply(v=DESCRIPTOR_VERSION, stored=stored.stored, existing=stored.existing)
    return _msgpack(exchange, reply)


async def _check_room(exchange: Exchange, body_bytes: int) -> None:
    """Refuse before the body is asked for what no descriptor could make fit the quotas: how much of
    the body is the descriptor nobody knows yet.
    """
    head_bytes_max = LENGTH.size + exchange.settings.limits.descriptor_bytes_max
    request = CheckPut(
        bucket=exchange.bucket,
        identity=exchange.identity,
        size_bytes=max(0, body_bytes - head_bytes_max),
    )
    await exchange.storage.call(request, Done)


async def _receive_chunks(
    exchange: Exchange,
    decoder: BodyDecoder,
    head: PutHead,
    first: Pieces,
    body: AsyncIterator[Pieces],
    conversation: StorageConversation,
) -> KvStored:
    begun: StorageConnection | None = None
    try:
        async for pieces in _joined(first, body):
            payload = [head.take(piece) for piece in pieces]
            exchange.hold_document(head.document_bytes)
            if begun is None and head.has_payload:
                begun = await _begin_put(exchange, head, conversation)
            payload = [piece for piece in payload if len(piece)]
            if begun is not None and payload:
                await begun.send_data(payload)
        decoder.finish()
        head.finish()
    except (InvalidRequest, AccessDenied):
        if begun is not None and not begun.idle:
            await abort_put(begun)
        raise
    if begun is None:
        return await _put_from_target(exchange, head, conversation)
    await begun.end_data()
    return await begun.ask(CommitPut(), KvStored)


async def _joined(first: Pieces, rest: AsyncIterator[Pieces]) -> AsyncIterator[Pieces]:
    yield first
    async for pieces in rest:
        yield pieces


async def _begin_put(
    exchange: Exchange, head: PutHead, conversation: StorageConversation
) -> StorageConnection:
    await conversation.begin(
        _put_request(exchange, head), SendData, timeout_s=exchange.admission_timeout_s
    )
    return conversation.connection


async def _put_from_target(
    exchange: Exchange, head: PutHead, conversation: StorageConversation
) -> KvStored:
    """Have the payload taken from the client's target, which takes as long as a delivery may."""
    gateway, storage = exchange.settings.gateway, exchange.settings.storage
    timeout_s = storage.delivery_timeout_s + gateway.storage_timeout_s
    return await conversation.begin(_put_request(exchange, head), KvStored, timeout_s=timeout_s)


def _put_request(exchange: Exchange, head: PutHead) -> KvPut:
    """The request, for keys that may be written. The parent decides what is evicted with it."""
    if head.descriptor is not None:
        parent_key = head.descriptor.parent_key
        keys = head.descriptor.chunk_keys + ((parent_key,) if parent_key else ())
        exchange.access.here.check_all(Access.WRITE, keys)
    return KvPut(
        bucket=exchange.bucket, identity=exchange.identity, descriptor=head.descriptor_bytes
    )
