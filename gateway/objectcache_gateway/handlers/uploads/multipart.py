"""Multipart uploads."""

from __future__ import annotations

import msgspec
from aiohttp import web

from objectcache_gateway.answering.body_into_put import (
    begin_body,
    is_small,
    put_whole,
    receive_into_put,
)
from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.objects.etags import etag_of, wants_md5
from objectcache_gateway.handlers.objects.object_headers import attributes_of, checksum_headers
from objectcache_gateway.handlers.objects.objects import part_number
from objectcache_gateway.handlers.objects.ownership import with_owner
from objectcache_gateway.handlers.uploads.complete_upload import parts_page
from objectcache_gateway.handlers.uploads.upload_checksums import (
    UploadChecksum,
    asked_checksum,
    check_part_algorithm,
)
from objectcache_gateway.request.listing_params import encoding_type, page_size
from objectcache_gateway.xml.xml_render import (
    document,
    element,
    owner,
    parent,
    part_entry,
    quoted_etag,
    upload_entry,
    url_encoded,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.uploads import (
    AbortUpload,
    CreateUpload,
    ListUploads,
    Upload,
    Uploads,
)
from objectcache_schemas.messages.writes import CommitPut, PutPart, SendData, Stored
from objectcache_schemas.records import ObjectAttributes, UploadInfo


async def create_upload(exchange: Exchange) -> web.StreamResponse:
    """CreateMultipartUpload."""
    checksum = asked_checksum(exchange.head)
    attributes = with_owner(exchange, attributes_of(exchange.head))
    echoed: dict[str, str] = {}
    if checksum is not None:
        attributes = msgspec.structs.replace(
            attributes, checksums={checksum.algorithm: ""}, checksum_type=checksum.checksum_type
        )
        echoed["x-amz-checksum-algorithm"] = checksum.algorithm.upper()
        echoed["x-amz-checksum-type"] = checksum.checksum_type
    request = CreateUpload(bucket=exchange.bucket, key=exchange.key, attributes=attributes)
    upload = (await exchange.storage.call(request, Upload)).info
    body = document(
        "InitiateMultipartUploadResult",
        element("Bucket", exchange.bucket),
        element("Key", exchange.key),
        element("UploadId", upload.upload_id),
    )
    return exchange.xml(body, echoed)


async def upload_part(exchange: Exchange) -> web.StreamResponse:
    """UploadPart."""
    number = part_number(exchange.query.get("partNumber", ""))
    checksum = UploadChecksum.of((await parts_page(exchange, 0, 1)).upload.attributes)
    decoder = exchange.decoder(
        exchange.settings.limits.object_bytes_max,
        etag=wants_md5(exchange),
        compute_checksum=checksum.algorithm if checksum is not None else None,
    )
    check_part_algorithm(checksum, decoder.checksum_algorithm)
    request = PutPart(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        part_number=number,
        size_bytes=decoder.expected_bytes,
        identity=exchange.identity,
    )
    body = await begin_body(exchange, decoder)
    whole = decoder.finish() if is_small(decoder) else None
    async with exchange.storage.conversation() as conversation:
        await conversation.begin(request, SendData, timeout_s=exchange.admission_timeout_s)
        connection = conversation.connection
        if whole is None:
            result = await receive_into_put(decoder, body, connection)
        else:
            result = whole
            await put_whole(connection, body.first)
        attributes = ObjectAttributes(checksums=result.checksums)
        etag = etag_of(result)
        commit = CommitPut(etag=etag, attributes=attributes)
        await connection.ask(commit, Stored)
    return exchange.empty(more={"ETag": quoted_etag(etag), **checksum_headers(attributes)})


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
    page = await parts_page(exchange, after, limit)
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
        *checksum_names(page.upload),
        *[part_entry(part) for part in page.parts],
        owner(exchange.access.here.owner, "Initiator"),
        owner(exchange.access.here.owner),
        element("StorageClass", "STANDARD"),
    )
    return exchange.xml(body)


async def list_uploads(exchange: Exchange) -> web.StreamResponse:
    """ListMultipartUploads."""
    query = exchange.query
    limit = page_size(query, "max-uploads")
    request = ListUploads(
        bucket=exchange.bucket,
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        after_key=query.get("key-marker", ""),
        after_upload_id=query.get("upload-id-marker", ""),
        limit=limit,
    )
    page = await exchange.storage.call(request, Uploads)
    encoded = url_encoded if encoding_type(query) else str
    bucket_owner = exchange.access.here.owner
    body = document(
        "ListMultipartUploadsResult",
        element("Bucket", exchange.bucket),
        element("KeyMarker", encoded(request.after_key)),
        element("UploadIdMarker", request.after_upload_id),
        element("NextKeyMarker", encoded(page.next_key) if page.truncated else None),
        element("NextUploadIdMarker", page.next_upload_id if page.truncated else None),
        element("Prefix", encoded(request.prefix)),
        element("Delimiter", encoded(request.delimiter) if request.delimiter else None),
        element("MaxUploads", limit),
        element("EncodingType", encoding_type(query)),
        element("IsTruncated", page.truncated),
        *[
            upload_entry(upload, encoded(upload.key), upload.attributes.owner or bucket_owner)
            for upload in page.uploads
        ],
        *[
            parent("CommonPrefixes", element("Prefix", encoded(prefix)))
            for prefix in page.common_prefixes
        ],
    )
    return exchange.xml(body)


def checksum_names(upload: UploadInfo) -> list[str]:
    """Elements that name the algorithm and type of an upload's checksum."""
    checksum = UploadChecksum.of(upload.attributes)
    if checksum is None:
        return []
    return [
        element("ChecksumAlgorithm", checksum.algorithm.upper()),
        element("ChecksumType", checksum.checksum_type),
    ]


def page_marker(text: str) -> int:
    """The part number after which a page begins. Raises `InvalidRequest`."""
    if text and not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest("part-number-marker must be a number")
    return int(text or 0)
