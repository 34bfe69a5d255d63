"""GetObjectAttributes: what is stored beside an object's bytes, by name, and its parts in pages."""

from __future__ import annotations

from email.utils import formatdate

from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.objects.objects import stat_object
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.xml.xml_render import checksum_elements, document, element, parent
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import ObjectAttributes, ObjectInfo

NAMES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")
PAGE_PARTS_MAX = 1000  # S3's own
_NUMBER_DIGITS_MAX = 10


async def get_object_attributes(exchange: Exchange) -> web.StreamResponse:
    """GetObjectAttributes."""
    names = asked_names(exchange.head)
    info = await stat_object(exchange)
    body = attributes_document(
        info,
        names,
        after=_number(exchange.head, "x-amz-part-number-marker", 0),
        parts_max=min(_number(exchange.head, "x-amz-max-parts", PAGE_PARTS_MAX), PAGE_PARTS_MAX),
    )
    return exchange.xml(body, {"Last-Modified": formatdate(int(info.modified_s), usegmt=True)})


def asked_names(head: RequestHead) -> frozenset[str]:
    """Names of x-amz-object-attributes; raises `InvalidRequest` for none, or an unknown one."""
    header = head.header("x-amz-object-attributes") or ""
    names = frozenset(name.strip() for name in header.split(",") if name.strip())
    if not names or not names <= frozenset(NAMES):
        raise InvalidRequest(f"x-amz-object-attributes must name some of {', '.join(NAMES)}")
    return names


def attributes_document(
    info: ObjectInfo, names: frozenset[str], *, after: int, parts_max: int
) -> bytes:
    """The answer; parts come in a page of those with a number above `after`."""
    attributes = info.attributes
    checksums = checksum_elements(attributes.checksums, attributes.checksum_type)
    elements = {
        "ETag": element("ETag", info.etag),
        "Checksum": parent("Checksum", checksums) if checksums else "",
        "ObjectParts": _object_parts(attributes, after, parts_max),
        "StorageClass": element("StorageClass", "STANDARD"),
        "ObjectSize": element("ObjectSize", info.size_bytes),
    }
    return document("GetObjectAttributesResponse", *[elements[n] for n in NAMES if n in names])


def _object_parts(attributes: ObjectAttributes, after: int, parts_max: int) -> str:
    """Of an object that was joined from parts; nothing of another."""
    count = len(attributes.part_sizes_bytes)
    if not count:
        return ""
    numbers = range(after + 1, min(count, after + parts_max) + 1)
    return parent(
        "ObjectParts",
        element("IsTruncated", after + parts_max < count),
        element("MaxParts", parts_max),
        element("NextPartNumberMarker", numbers[-1] if numbers else after),
        element("PartNumberMarker", after),
        element("PartsCount", count),
        *[_part(attributes, number) for number in numbers],
    )


def _part(attributes: ObjectAttributes, number: int) -> str:
    return parent(
        "Part",
        checksum_elements(attributes.checksums_of_part(number)),
        element("PartNumber", number),
        element("Size", attributes.part_sizes_bytes[number - 1]),
    )


def _number(head: RequestHead, name: str, default: int) -> int:
    text = head.header(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX):
        raise InvalidRequest(f"{name} must be a number")
    return int(text)
