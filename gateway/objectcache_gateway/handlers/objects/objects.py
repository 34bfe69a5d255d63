"""Operations on single objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
from aiohttp import web

from objectcache_gateway.access.permissions import denied
from objectcache_gateway.answering.body_into_put import (
    SMALL_BYTES_MAX,
    begin_body,
    is_small,
    receive_into_put,
    receive_whole,
)
from objectcache_gateway.answering.body_to_client import send_body
from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.bodies.body import BodyDecoder, BodyResult
from objectcache_gateway.handlers.objects.etags import etag_of, wants_md5
from objectcache_gateway.handlers.objects.object_headers import (
    attributes_of,
    checksum_headers,
    object_headers,
    overrides,
    part_checksum_headers,
)
from objectcache_gateway.handlers.objects.ownership import with_owner
from objectcache_gateway.request import ranges
from objectcache_gateway.request.addressing import check_key
from objectcache_gateway.request.client_kind import needs_whole_range
from objectcache_gateway.request.conditions import (
    ConditionOutcome,
    evaluate_read,
    range_applies,
    write_condition,
)
from objectcache_gateway.request.delivery_headers import (
    check_plain_get,
    client_seconds,
    traceparent,
)
from objectcache_gateway.request.expiration import expiration_headers
from objectcache_gateway.request.rdma_request import decline_headers
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.xml import xml_parse, xml_render
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas import headers
from objectcache_schemas.accounts import Access
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.errors import (
    InvalidRequest,
    ObjectCacheError,
    PreconditionFailed,
    Unsupported,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.reads import (
    CloseObject,
    Object,
    ObjectOpened,
    OpenObject,
    StatObject,
)
from objectcache_schemas.messages.writes import (
    CommitPut,
    DeleteObjects,
    PutObject,
    SendData,
    Stored,
)
from objectcache_schemas.records import ObjectInfo

PLAIN_GET_HEADERS = {headers.PATH: DeliveryPath.S3TCP.value, headers.TRANSPORT: "tcp"}


@dataclass(frozen=True, slots=True)
class Selection:
    """What a GET or HEAD answers with: a status, and a part of the object."""

    status: int
    offset_bytes: int
    length_bytes: int
    headers: Mapping[str, str]


def check_version(version_id: str | None) -> None:
    """Raise `InvalidRequest` for a version other than the only one, which S3 calls null."""
    if version_id not in (None, "", "null"):
        raise InvalidRequest("versionId can only be null: objects have no versions here")


async def put_object(exchange: Exchange) -> web.StreamResponse:
    """PutObject. Nothing is visible before the body was verified to its end."""
    object_bytes_max = exchange.settings.limits.object_bytes_max
    decoder = exchange.decoder(object_bytes_max, etag=wants_md5(exchange))
    attributes_of(exchange.head)  # refused before any byte is asked for
    request = PutObject(
        bucket=exchange.bucket,
        key=exchange.key,
        size_bytes=decoder.expected_bytes,
        condition=write_condition(exchange.head),
        identity=exchange.identity,
    )
    if is_small(decoder):
        info = await _put_whole(exchange, decoder, request)
    else:
        info = await _put_in_pieces(exchange, decoder, request)
    attributes = info.attributes
    exchange.object_bytes = info.size_bytes
    named = {
        "ETag": xml_render.quoted_etag(info.etag),
        **checksum_headers(attributes),
        **_expiration(exchange, info),
    }
    return exchange.empty(more=named)


async def _put_whole(exchange: Exchange, decoder: BodyDecoder, request: PutObject) -> ObjectInfo:
    """Put a small object in one message. A client that waits for word is told to go on only where
    the bucket and the quotas allow it; one that does not has its body on the way already.
    """
    await _check_room(exchange, request)
    data, result = await receive_whole(exchange, decoder)
    commit = _commit(exchange, result)
    whole = msgspec.structs.replace(request, data=data, commit=commit)
    timeout_s = exchange.admission_timeout_s
    return (await exchange.storage.call(whole, Stored, timeout_s=timeout_s)).info


async def _check_room(exchange: Exchange, request: PutObject) -> None:
    """Refuse a client that waits for word before it sends its body."""
    if exchange.awaits_continue:
        check = CheckPut(
            bucket=request.bucket, identity=request.identity, size_bytes=request.size_bytes or 0
        )
        await exchange.storage.call(check, Done)


async def _put_in_pieces(
    exchange: Exchange, decoder: BodyDecoder, request: PutObject
) -> ObjectInfo:
    await _check_room(exchange, request)
    body = await begin_body(exchange, decoder)
    async with exchange.storage.conversation() as conversation:
        await conversation.begin(request, SendData, timeout_s=exchange.admission_timeout_s)
        connection = conversation.connection
        commit = _commit(exchange, await receive_into_put(decoder, body, connection))
        return (await connection.ask(commit, Stored)).info


def _commit(exchange: Exchange, result: BodyResult) -> CommitPut:
    attributes = with_owner(exchange, attributes_of(exchange.head, result.checksums))
    return CommitPut(etag=etag_of(result), attributes=attributes)


async def get_object(exchange: Exchange) -> web.StreamResponse:
    """GetObject: a whole object, a range or a part, if its conditions hold."""
    check_version(exchange.query.get("versionId"))
    check_plain_get(exchange.head)
    request = OpenObject(
        bucket=exchange.bucket,
        key=exchange.key,
        identity=exchange.identity,
        request_id=exchange.request_id,
        client_s=client_seconds(exchange.head),
        gateway_s=exchange.elapsed_s,
        traceparent=exchange.traceparent or traceparent(exchange.head),
        body_bytes_max=SMALL_BYTES_MAX,
    )
    async with exchange.storage.conversation() as conversation:
        timeout_s = exchange.admission_timeout_s
        opened = await conversation.begin(request, ObjectOpened, timeout_s=timeout_s)
        info = opened.info
        exchange.object_bytes = info.size_bytes
        if opened.body is not None:
            return _part_of(exchange, info, opened.body)
        connection = conversation.connection
        try:
            selection = _select(exchange, info)
        except ObjectCacheError as error:
            await connection.ask(CloseObject(), Done)
            return _refused(exchange, error, info)
        if not selection.length_bytes:
            await connection.ask(CloseObject(), Done)
            return exchange.empty(selection.status, selection.headers)
        response = exchange.stream(selection.status, {**selection.headers, **PLAIN_GET_HEADERS})
        await send_body(
            exchange, connection, response, selection.offset_bytes, selection.length_bytes
        )
        return response


def _part_of(exchange: Exchange, info: ObjectInfo, body: bytes) -> web.Response:
    """The answer to a GET of an object whose bytes are at hand."""
    try:
        selection = _select(exchange, info)
    except ObjectCacheError as error:
        return _refused(exchange, error, info)
    if not selection.length_bytes:
        return exchange.empty(selection.status, selection.headers)
    end_bytes = selection.offset_bytes + selection.length_bytes
    part = body if len(body) == selection.length_bytes else body[selection.offset_bytes : end_bytes]
    named = {**selection.headers, **PLAIN_GET_HEADERS}
    return exchange.small(selection.status, part, named)


async def head_object(exchange: Exchange) -> web.StreamResponse:
    """HeadObject: what GetObject would answer, without the body."""
    check_version(exchange.query.get("versionId"))
    request = StatObject(bucket=exchange.bucket, key=exchange.key)
    info = (await exchange.storage.call(request, Object)).info
    exchange.object_bytes = info.size_bytes
    try:
        selection = _select(exchange, info)
    except ObjectCacheError as error:
        return _refused(exchange, error, info)
    return exchange.empty(selection.status, selection.headers)


async def delete_object(exchange: Exchange) -> web.StreamResponse:
    """DeleteObject; a key that is not stored is a success."""
    check_version(exchange.query.get("versionId"))
    request = DeleteObjects(bucket=exchange.bucket, keys=(exchange.key,))
    await exchange.storage.call(request, Done)
    return exchange.empty(204)


async def delete_objects(exchange: Exchange) -> web.StreamResponse:
    """DeleteObjects: up to 1,000 keys, each with its own outcome."""
    decoder = exchange.decoder(exchange.settings.limits.xml_body_bytes_max)
    if not decoder.is_checked:
        raise InvalidRequest(
            "DeleteObjects needs Content-MD5, an x-amz-checksum-* header or a signed body",
            code="InvalidRequest",
        )
    body = await exchange.read_body(decoder)
    entries, is_quiet = await parse_apart(xml_parse.parse_delete, body)
    errors = {
        index: error
        for index, entry in enumerate(entries)
        if (error := _flaw(entry) or _refusal(exchange, entry))
    }
    good = [entry for index, entry in enumerate(entries) if index not in errors]
    request = DeleteObjects(bucket=exchange.bucket, keys=tuple(entry.key for entry in good))
    await exchange.storage.call(request, Done)
    deleted = [] if is_quiet else [_deleted_entry(entry) for entry in good]
    failed = [_failed_entry(entries[index], error) for index, error in errors.items()]
    return exchange.xml(xml_render.document("DeleteResult", *deleted, *failed))


async def stat_object(exchange: Exchange) -> ObjectInfo:
    """The request's object. Raises `NotFound` (NoSuchKey)."""
    check_version(exchange.query.get("versionId"))
    request = StatObject(bucket=exchange.bucket, key=exchange.key)
    return (await exchange.storage.call(request, Object)).info


def _select(exchange: Exchange, info: ObjectInfo) -> Selection:
    """`select`, with when a lifecycle rule will expire the object, and that the bytes do not come
    by RDMA where the client asks for that.
    """
    exact = needs_whole_range(exchange.head, exchange.settings.gateway.exact_ranges)
    selection = select(exchange.head, exchange.query, info, exact=exact)
    more = _expiration(exchange, info)
    if exchange.rdma_declined:
        more = {**more, **decline_headers(exchange.head)}
    return replace(selection, headers={**selection.headers, **more}) if more else selection


def _expiration(exchange: Exchange, info: ObjectInfo) -> dict[str, str]:
    bucket = exchange.access.bucket
    if bucket is None or not bucket.configuration.lifecycle:
        return {}
    day_s = exchange.settings.storage.lifecycle_day_s
    return expiration_headers(bucket.configuration.lifecycle, info, day_s)


def select(
    head: RequestHead, query: Mapping[str, str], info: ObjectInfo, *, exact: bool = False
) -> Selection:
    """Decide status, headers and range of a GET or HEAD of a stored object.

    `exact` refuses a range of which the object has only a part. Raises `PreconditionFailed` and
    `InvalidRequest` (InvalidRange for a range that the object does not have, InvalidPart for such a
    part number, InvalidRequest for an exact range that it does not have whole).
    """
    named = object_headers(info) | overrides(query)
    outcome = evaluate_read(head, info.etag, info.modified_s)
    if outcome is ConditionOutcome.FAILED:
        raise PreconditionFailed("a condition of the request does not hold")
    if outcome is ConditionOutcome.NOT_MODIFIED:
        return Selection(304, 0, 0, named)
    part = _part(head, query, info, named)
    range_header = head.header("range") if part is None else None
    if range_header is not None and range_applies(head, info.etag, info.modified_s):
        part = ranges.resolve_range(range_header, info.size_bytes, exact=exact)
    if part is None or (info.size_bytes == 0):
        named["Content-Length"] = str(info.size_bytes)
        if _wants_checksums(head, query):
            named |= checksum_headers(info.attributes)
        return Selection(200, 0, info.size_bytes, named)
    offset_bytes, length_bytes = part
    named["Content-Length"] = str(length_bytes)
    named["Content-Range"] = ranges.content_range(offset_bytes, length_bytes, info.size_bytes)
    if "partNumber" in query and _wants_checksums(head, query):
        named |= part_checksum_headers(info.attributes, int(query["partNumber"]))
    return Selection(206, offset_bytes, length_bytes, named)


def _part(
    head: RequestHead, query: Mapping[str, str], info: ObjectInfo, named: dict[str, str]
) -> tuple[int, int] | None:
    """Offset and length of the part that partNumber asks for; an object put whole has one."""
    text = query.get("partNumber")
    if text is None:
        return None
    if head.header("range") is not None:
        raise InvalidRequest("give a Range or a partNumber, not both", code="InvalidRequest")
    sizes_bytes = info.attributes.part_sizes_bytes
    if sizes_bytes:
        named["x-amz-mp-parts-count"] = str(len(sizes_bytes))
    ends_bytes = [0, *accumulate(sizes_bytes or (info.size_bytes,))]
    number = part_number(text)
    if number >= len(ends_bytes):
        raise InvalidRequest(
            f"the object has {len(ends_bytes) - 1} parts, partNumber is {number}",
            code="InvalidPart",
        )
    return ends_bytes[number - 1], ends_bytes[number] - ends_bytes[number - 1]


def part_number(text: str) -> int:
    """The number of a part. Raises `InvalidRequest` unless it is from 1 to 10,000."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    if not 1 <= number <= xml_parse.PARTS_MAX:
        raise InvalidRequest(f"partNumber must be from 1 to {xml_parse.PARTS_MAX}")
    return number


def _wants_checksums(head: RequestHead, query: Mapping[str, str]) -> bool:
    mode = head.header("x-amz-checksum-mode") or query.get("x-amz-checksum-mode") or ""
    return mode.upper() == "ENABLED"


def _refused(exchange: Exchange, error: ObjectCacheError, info: ObjectInfo) -> web.Response:
    if error.code != "InvalidRange":
        return exchange.error(error)
    # The AWS Common Runtime learns from this element that an object is empty, and asks again.
    size = xml_render.element("ActualObjectSize", info.size_bytes)
    content_range = ranges.unsatisfied_content_range(info.size_bytes)
    return exchange.error(error, {"Content-Range": content_range}, [size])


def _flaw(entry: xml_parse.DeleteEntry) -> ObjectCacheError | None:
    try:
        check_key(entry.key)
        check_version(entry.version_id)
        if entry.etag is not None:
            raise Unsupported("a conditional delete is not implemented")
    except ObjectCacheError as error:
        return error
    return None


def _refusal(exchange: Exchange, entry: xml_parse.DeleteEntry) -> ObjectCacheError | None:
    """Why this key may not be deleted, whether it is stored or not."""
    is_allowed = exchange.access.here.allows(Access.WRITE, entry.key)
    return None if is_allowed else denied(Access.WRITE, entry.key)


def _deleted_entry(entry: xml_parse.DeleteEntry) -> str:
    return xml_render.parent(
        "Deleted",
        xml_render.element("Key", entry.key),
        xml_render.element("VersionId", entry.version_id),
    )


def _failed_entry(entry: xml_parse.DeleteEntry, error: ObjectCacheError) -> str:
    return xml_render.parent(
        "Error",
        xml_render.element("Key", entry.key),
        xml_render.element("VersionId", entry.version_id),
        xml_render.element("Code", error.code),
        xml_render.element("Message", error.message),
    )
