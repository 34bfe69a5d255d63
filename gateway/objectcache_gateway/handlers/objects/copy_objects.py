"""CopyObject and UploadPartCopy: bytes that move within the storage server."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.answering.slow_answers import answer_when_done, copy_timeout_s
from objectcache_gateway.handlers.objects.copied_checksum import missing_algorithm, with_checksum
from objectcache_gateway.handlers.objects.object_headers import attributes_of
from objectcache_gateway.handlers.objects.objects import check_version, part_number
from objectcache_gateway.handlers.objects.ownership import with_owner
from objectcache_gateway.request import ranges
from objectcache_gateway.request.addressing import Address, check_bucket_name, check_key
from objectcache_gateway.request.conditions import check_copy_source, write_condition
from objectcache_gateway.request.request_head import RequestHead, wire_bytes
from objectcache_gateway.request.tags import tags_of_header
from objectcache_gateway.xml import xml_render
from objectcache_schemas.accounts import Access
from objectcache_schemas.errors import AccessDenied, InvalidRequest
from objectcache_schemas.messages.buckets import Bucket, GetBucket
from objectcache_schemas.messages.reads import Object, StatObject
from objectcache_schemas.messages.writes import CopyObject, CopyPart, Stored
from objectcache_schemas.records import FULL_OBJECT, ObjectAttributes, ObjectInfo

_VERSION_MARK = "?versionId="


def copy_source(header: str) -> Address:
    """Bucket and key of an x-amz-copy-source. Raises `InvalidRequest` naming what is wrong.

    A plus sign is a space there, as in S3 and unlike in paths: some clients write a space so.
    """
    path, _, version_id = header.partition(_VERSION_MARK)
    check_version(version_id or None)
    try:
        decoded = unquote_to_bytes(wire_bytes(path).replace(b"+", b" ")).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("x-amz-copy-source must be percent-encoded UTF-8") from error
    bucket, _, key = decoded.removeprefix("/").partition("/")
    if not bucket or not key:
        raise InvalidRequest("x-amz-copy-source must be /bucket/key")
    check_bucket_name(bucket)
    check_key(key)
    return Address(bucket, key)


def copied_attributes(head: RequestHead, source: ObjectInfo) -> ObjectAttributes:
    """What the copy carries beside its bytes, by the metadata directive.

    The bytes are the source's, so checksums of the whole object still hold; a copy has no parts, so
    what was said of parts does not. Tags have a directive of their own. Whose the copy is, and what
    others may, is not the source's matter.
    """
    replaced = attributes_of(head) if replaces(head, "metadata") else source.attributes
    is_whole = source.attributes.checksum_type == FULL_OBJECT
    return msgspec.structs.replace(
        replaced,
        checksums=source.attributes.checksums if is_whole else {},
        checksum_type=FULL_OBJECT if is_whole else None,
        part_sizes_bytes=(),
        part_checksums=(),
        tags=tags_of_header(head) if replaces(head, "tagging") else source.attributes.tags,
        owner="",
        acl=(),
    )


def replaces(head: RequestHead, what: str) -> bool:
    """Whether the directive of "metadata" or "tagging" is REPLACE; raises `InvalidRequest` for an
    unknown one.
    """
    name = f"x-amz-{what}-directive"
    directive = head.header(name) or "COPY"
    if directive not in ("COPY", "REPLACE"):
        raise InvalidRequest(f"{name} must be COPY or REPLACE")
    return directive == "REPLACE"


async def copy_object(exchange: Exchange) -> web.StreamResponse:
    """CopyObject. `source_etag` names what the conditions were checked on."""
    address, source = await _source(exchange)
    if address == Address(exchange.bucket, exchange.key) and not replaces(
        exchange.head, "metadata"
    ):
        raise InvalidRequest(
            "a copy onto itself needs x-amz-metadata-directive: REPLACE", code="InvalidRequest"
        )
    assert address.bucket is not None
    request = CopyObject(
        source_bucket=address.bucket,
        source_key=source.key,
        source_etag=source.etag,
        bucket=exchange.bucket,
        key=exchange.key,
        attributes=with_owner(exchange, copied_attributes(exchange.head, source)),
        etag=source.etag,
        condition=write_condition(exchange.head),
        identity=exchange.identity,
    )
    algorithm = missing_algorithm(exchange.head, request.attributes)
    work = _copied_object(exchange, request, source.size_bytes, algorithm)
    return await answer_when_done(exchange, work)


async def upload_part_copy(exchange: Exchange) -> web.StreamResponse:
    """UploadPartCopy: a range of an object becomes a part."""
    number = part_number(exchange.query.get("partNumber", ""))
    address, source = await _source(exchange)
    range_header = exchange.head.header("x-amz-copy-source-range")
    offset_bytes, length_bytes = (
        (0, source.size_bytes)
        if range_header is None
        else ranges.resolve_copy_range(range_header, source.size_bytes)
    )
    assert address.bucket is not None
    request = CopyPart(
        source_bucket=address.bucket,
        source_key=source.key,
        source_etag=source.etag,
        offset_bytes=offset_bytes,
        length_bytes=length_bytes,
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        part_number=number,
        identity=exchange.identity,
    )
    work = _copied(exchange, request, length_bytes, "CopyPartResult")
    return await answer_when_done(exchange, work)


async def _copied_object(
    exchange: Exchange, request: CopyObject, copied_bytes: int, algorithm: str | None
) -> bytes:
    if algorithm is not None:
        request = await with_checksum(exchange, request, algorithm)
    return await _copied(exchange, request, copied_bytes, "CopyObjectResult")


async def _copied(
    exchange: Exchange, request: CopyObject | CopyPart, copied_bytes: int, root: str
) -> bytes:
    """The answer's document, once the bytes were copied."""
    timeout_s = copy_timeout_s(exchange.settings.gateway, copied_bytes)
    stored = await exchange.storage.call(request, Stored, timeout_s=timeout_s)
    return xml_render.copy_document(root, stored.info)


async def _source(exchange: Exchange) -> tuple[Address, ObjectInfo]:
    """The source that the request names, once its conditions hold."""
    header = exchange.head.header("x-amz-copy-source")
    assert header is not None
    address = copy_source(header)
    assert address.bucket is not None
    assert address.key is not None
    await exchange.access.check_elsewhere(Access.READ, address.bucket, address.key)
    await _check_source_owner(exchange, address.bucket)
    request = StatObject(bucket=address.bucket, key=address.key)
    info = (await exchange.storage.call(request, Object)).info
    check_copy_source(exchange.head, info.etag, info.modified_s)
    return address, info


async def _check_source_owner(exchange: Exchange, bucket: str) -> None:
    """Raise `AccessDenied` where x-amz-source-expected-bucket-owner is not the source's owner."""
    expected = exchange.head.header("x-amz-source-expected-bucket-owner")
    if expected is None:
        return
    if (await exchange.storage.call(GetBucket(name=bucket), Bucket)).info.owner != expected:
        raise AccessDenied("the source bucket's owner is not x-amz-source-expected-bucket-owner")
