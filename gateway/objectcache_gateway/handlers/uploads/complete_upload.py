"""CompleteMultipartUpload: what the client says of its parts is compared with what is stored."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.answering.slow_answers import answer_when_done, copy_timeout_s
from objectcache_gateway.handlers.uploads.upload_checksums import (
    UploadChecksum,
    check_claims,
    listed_parts,
)
from objectcache_gateway.request.conditions import write_condition
from objectcache_gateway.request.listing_params import PAGE_ENTRIES_MAX
from objectcache_gateway.xml import xml_parse
from objectcache_gateway.xml.xml_parse import CompletedPart
from objectcache_gateway.xml.xml_render import checksum_elements, document, element, quoted_etag
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.uploads import CompleteUpload, ListParts, Parts
from objectcache_schemas.messages.writes import Stored
from objectcache_schemas.records import PartInfo, UploadInfo


async def complete_upload(exchange: Exchange) -> web.StreamResponse:
    """CompleteMultipartUpload; the same again is a success while the object is what it made."""
    decoder = exchange.decoder(exchange.settings.limits.xml_body_bytes_max, checksum_headers=False)
    body = await exchange.read_body(decoder)
    completed = await parse_apart(xml_parse.parse_complete, body)
    request, joined_bytes = await _request(exchange, completed)
    return await answer_when_done(exchange, _completed(exchange, request, joined_bytes))


async def _completed(exchange: Exchange, request: CompleteUpload, joined_bytes: int) -> bytes:
    """The answer's document, once the parts are one object; some engines copy them for that."""
    timeout_s = copy_timeout_s(exchange.settings.gateway, joined_bytes)
    info = (await exchange.storage.call(request, Stored, timeout_s=timeout_s)).info
    return document(
        "CompleteMultipartUploadResult",
        element("Location", f"/{exchange.bucket}/{exchange.key}"),
        element("Bucket", exchange.bucket),
        element("Key", exchange.key),
        element("ETag", quoted_etag(info.etag)),
        checksum_elements(info.attributes.checksums, info.attributes.checksum_type),
    )


async def _request(
    exchange: Exchange, completed: Sequence[CompletedPart]
) -> tuple[CompleteUpload, int]:
    """The completion with the checksums that follow from its parts, once they are as claimed, and
    the bytes of the parts.
    """
    request = CompleteUpload(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        parts=tuple((part.part_number, part.etag) for part in completed),
        condition=write_condition(exchange.head),
        identity=exchange.identity,
    )
    try:
        upload, stored = await _stored_parts(exchange)
    except NotFound as error:
        if error.code != "NoSuchUpload":
            raise
        return request, 0  # completed before, perhaps, which the storage server knows
    if not stored:
        return request, 0  # the same, where the server ended while it forgot the upload
    parts = listed_parts(completed, stored)
    checksum = UploadChecksum.of(upload.attributes)
    value = checksum.value(parts) if checksum is not None else None
    check_claims(exchange.head, checksum, value, parts)
    joined_bytes = sum(part.size_bytes for part in parts)
    if checksum is None or value is None:
        return request, joined_bytes
    with_checksum = msgspec.structs.replace(
        request,
        checksum=(checksum.algorithm, value),
        checksum_type=checksum.checksum_type,
        part_checksums=tuple(part.checksums[checksum.algorithm] for part in parts),
    )
    return with_checksum, joined_bytes


async def _stored_parts(exchange: Exchange) -> tuple[UploadInfo, dict[int, PartInfo]]:
    """The upload, and all of its parts by number."""
    stored: dict[int, PartInfo] = {}
    after = 0
    while True:
        page = await parts_page(exchange, after, PAGE_ENTRIES_MAX)
        stored |= {part.part_number: part for part in page.parts}
        if not page.truncated:
            return page.upload, stored
        after = page.parts[-1].part_number


async def parts_page(exchange: Exchange, after: int, limit: int) -> Parts:
    """A page of the upload's parts. Raises `NotFound` (NoSuchUpload)."""
    request = ListParts(
        bucket=exchange.bucket,
        key=exchange.key,
        upload_id=exchange.query["uploadId"],
        after_part_number=after,
        limit=limit,
    )
    return await exchange.storage.call(request, Parts)
