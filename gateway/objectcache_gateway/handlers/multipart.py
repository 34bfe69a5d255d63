"""Multipart uploads."""

from __future__ import annotations

from aiohttp import web

from objectcache_gateway.bodies.checksums import algorithm_named
from objectcache_gateway.exchange import Exchange
from objectcache_gateway.handlers.objects import part_number
from objectcache_gateway.handlers.xml_render import (
    checksum_elements,
    document,
    element,
    owner,
    part_entry,
    quoted_etag,
    upload_entry,
    url_encoded,
)
from objectcache_gateway.receiving import receive_into_put
from objectcache_gateway.request import xml_parse
from objectcache_gateway.request.conditions import write_condition
from objectcache_gateway.request.listing_params import PAGE_ENTRIES_MAX, encoding_type, page_size
from objectcache_gateway.request.object_headers import attributes_of, checksum_headers
from objectcache_gateway.request.xml_parse import CompletedPart
from objectcache_schemas.errors import InvalidRequest, NotFound, Unsupported
from objectcache_schemas.messages import (
    AbortUpload,
    CommitPut,
    CompleteUpload,
    CreateUpload,
    Done,
    ListParts,
    ListUploads,
    Parts,
    PutPart,
    SendData,
    Stored,
    Upload,
    Uploads,
)
from objectcache_schemas.records import ObjectAttributes, PartInfo


async def create_upload(exchange: Exchange) -> web.StreamResponse:
    """CreateMultipartUpload."""
    algorithm = exchange.head.header("x-amz-checksum-algorithm")
    if algorithm is not None:
        algorithm_named(algorithm)
    request = CreateUpload(
        bucket=exchange.bucket, key=exchange.key, attributes=attributes_of(exchange.head)
    )
    upload = (await exchange.storage.call(request, Upload)).info
    body = document(
        "InitiateMultipartUploadResult",
        element("Bucket", exchange.bucket),
        element("Key", exchange.key),
        element("UploadId", upload.upload_id),
    )
    echoed = {"x-amz-checksum-algorithm": algorithm} if algorithm is not None else {}
    return exchange.xml(body, echoed)


async def upload_part(exchange: Exchange) -> web.StreamResponse:
    """UploadPart."""
    number = part_number(exchange.query.get("partNumber", ""))
    decoder = exchange.decoder(exchange.settings.limits.object_bytes_max, etag=True)
    request = PutPart(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        part_number=number,
        size_bytes=decoder.expected_bytes,
    )
    async with exchange.storage.conversation() as conversation:
        await conversation.begin(request, SendData)
        connection = conversation.connection
        result = await receive_into_put(exchange, decoder, connection)
        attributes = ObjectAttributes(checksums=result.checksums)
        commit = CommitPut(etag=result.etag_md5_hex, attributes=attributes)
        await connection.ask(commit, Stored)
    return exchange.empty(
        more={"ETag": quoted_etag(result.etag_md5_hex), **checksum_headers(attributes)}
    )


async def complete_upload(exchange: Exchange) -> web.StreamResponse:
    """CompleteMultipartUpload. What the client says about its parts is checked first."""
    decoder = exchange.decoder(exchange.settings.limits.xml_body_bytes_max, checksum_headers=False)
    parts = xml_parse.parse_complete(await exchange.read_body(decoder))
    await _check_parts(exchange, parts)
    request = CompleteUpload(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        parts=tuple((part.part_number, part.etag) for part in parts),
        condition=write_condition(exchange.head),
    )
    info = (await exchange.storage.call(request, Stored)).info
    body = document(
        "CompleteMultipartUploadResult",
        element("Location", f"/{exchange.bucket}/{exchange.key}"),
        element("Bucket", exchange.bucket),
        element("Key", exchange.key),
        element("ETag", quoted_etag(info.etag)),
        checksum_elements(info.attributes.checksums, info.attributes.checksum_type),
    )
    return exchange.xml(body)


async def abort_upload(exchange: Exchange) -> web.StreamResponse:
    """AbortMultipartUpload."""
    request = AbortUpload(
        bucket=exchange.bucket, key=exchange.key, upload_id=exchange.query["uploadId"]
    )
    await exchange.storage.call(request, Done)
    return exchange.empty(204)


async def list_parts(exchange: Exchange) -> web.StreamResponse:
    """ListParts."""
    query = exchange.query
    limit = page_size(query, "max-parts")
    after = page_marker(query.get("part-number-marker", ""))
    page = await _parts(exchange, after, limit)
    last = page.parts[-1].part_number if page.parts else 0
    key = url_encoded(exchange.key) if encoding_type(query) else exchange.key
    body = document(
        "ListPartsResult",
        element("Bucket", exchange.bucket),
        element("Key", key),
        element("UploadId", page.upload.upload_id),
        element("PartNumberMarker", after),
        element("NextPartNumberMarker", last),
        element("MaxParts", limit),
        element("IsTruncated", page.truncated),
        element("EncodingType", encoding_type(query)),
        *[part_entry(part) for part in page.parts],
        owner(exchange.identity, "Initiator"),
        owner(exchange.identity),
        element("StorageClass", "STANDARD"),
    )
    return exchange.xml(body)


async def list_uploads(exchange: Exchange) -> web.StreamResponse:
    """ListMultipartUploads."""
    query = exchange.query
    if query.get("delimiter"):
        raise Unsupported("a delimiter in a listing of uploads is not implemented")
    limit = page_size(query, "max-uploads")
    request = ListUploads(
        bucket=exchange.bucket,
        prefix=query.get("prefix", ""),
        after_key=query.get("key-marker", ""),
        after_upload_id=query.get("upload-id-marker", ""),
        limit=limit,
    )
    page = await exchange.storage.call(request, Uploads)
    encoded = url_encoded if encoding_type(query) else str
    last = page.uploads[-1] if page.uploads and page.truncated else None
    body = document(
        "ListMultipartUploadsResult",
        element("Bucket", exchange.bucket),
        element("KeyMarker", encoded(request.after_key)),
        element("UploadIdMarker", request.after_upload_id),
        element("NextKeyMarker", encoded(last.key) if last else None),
        element("NextUploadIdMarker", last.upload_id if last else None),
        element("Prefix", encoded(request.prefix)),
        element("MaxUploads", limit),
        element("EncodingType", encoding_type(query)),
        element("IsTruncated", page.truncated),
        *[upload_entry(upload, encoded(upload.key), exchange.identity) for upload in page.uploads],
    )
    return exchange.xml(body)


def page_marker(text: str) -> int:
    """The part number after which a page begins. Raises `InvalidRequest`."""
    if text and not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest("part-number-marker must be a number")
    return int(text or 0)


async def _check_parts(exchange: Exchange, parts: list[CompletedPart]) -> None:
    """Check checksums and the total size where the client sent any; S3 clients may send neither."""
    size_text = exchange.head.header("x-amz-mp-object-size")
    if size_text is None and not any(part.checksums for part in parts):
        return
    try:
        stored = await _all_parts(exchange)
    except NotFound:
        return  # completed before perhaps, which the storage server knows
    for part in parts:
        known = stored.get(part.part_number)
        if known is None:
            raise InvalidRequest(f"part {part.part_number} is not stored", code="InvalidPart")
        for name, value in part.checksums.items():
            if known.checksums.get(name, value) != value:
                raise InvalidRequest(
                    f"part {part.part_number} has another {name.upper()}", code="InvalidPart"
                )
    size_bytes = sum(stored[part.part_number].size_bytes for part in parts)
    if size_text is not None and size_text.strip() != str(size_bytes):
        raise InvalidRequest(
            f"the parts hold {size_bytes} bytes, x-amz-mp-object-size differs",
            code="InvalidRequest",
        )


async def _all_parts(exchange: Exchange) -> dict[int, PartInfo]:
    stored: dict[int, PartInfo] = {}
    after = 0
    while True:
        page = await _parts(exchange, after, PAGE_ENTRIES_MAX)
        stored |= {part.part_number: part for part in page.parts}
        if not page.truncated:
            return stored
        after = page.parts[-1].part_number


async def _parts(exchange: Exchange, after: int, limit: int) -> Parts:
    request = ListParts(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        after_part_number=after,
        limit=limit,
    )
    return await exchange.storage.call(request, Parts)
