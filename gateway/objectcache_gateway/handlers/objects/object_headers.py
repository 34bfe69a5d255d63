"""An object's attributes as request headers bring them and response headers show them."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import formatdate

from objectcache_gateway.bodies.body import stored_content_encoding
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.tags import tags_of_header
from objectcache_gateway.xml.xml_render import quoted_etag
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import USER_METADATA_BYTES_MAX
from objectcache_schemas.records import FULL_OBJECT, ObjectAttributes, ObjectInfo

DEFAULT_CONTENT_TYPE = "binary/octet-stream"  # S3's own
METADATA_PREFIX = "x-amz-meta-"

_STORED: tuple[tuple[str, str], ...] = (
    ("content_encoding", "Content-Encoding"),
    ("content_disposition", "Content-Disposition"),
    ("content_language", "Content-Language"),
    ("cache_control", "Cache-Control"),
    ("expires", "Expires"),
)
_OVERRIDES = ("Content-Type", *(header for _, header in _STORED))


def attributes_of(head: RequestHead, checksums: dict[str, str] | None = None) -> ObjectAttributes:
    """What to store beside the bytes. Raises `InvalidRequest`, also MetadataTooLarge."""
    return ObjectAttributes(
        content_type=_utf8(head, "content-type"),
        content_encoding=_content_encoding(head),
        content_disposition=_utf8(head, "content-disposition"),
        content_language=_utf8(head, "content-language"),
        cache_control=_utf8(head, "cache-control"),
        expires=_utf8(head, "expires"),
        user_metadata=_user_metadata(head),
        checksums=checksums or {},
        checksum_type=FULL_OBJECT if checksums else None,
        tags=tags_of_header(head),
    )


def object_headers(info: ObjectInfo) -> dict[str, str]:
    """Headers of a GET, HEAD or 304 of the object, without those of its length and range."""
    attributes = info.attributes
    named = {
        "ETag": quoted_etag(info.etag),
        "Last-Modified": formatdate(int(info.modified_s), usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": attributes.content_type or DEFAULT_CONTENT_TYPE,
    }
    for field, header in _STORED:
        value = getattr(attributes, field)
        if value is not None:
            named[header] = value
    if attributes.tags:
        named["x-amz-tagging-count"] = str(len(attributes.tags))
    named.update((METADATA_PREFIX + name, text) for name, text in attributes.user_metadata.items())
    return named


def checksum_headers(attributes: ObjectAttributes) -> dict[str, str]:
    """The checksums of a whole object."""
    named = {f"x-amz-checksum-{name}": text for name, text in attributes.checksums.items()}
    if named and attributes.checksum_type:
        named["x-amz-checksum-type"] = attributes.checksum_type
    return named


def part_checksum_headers(attributes: ObjectAttributes, number: int) -> dict[str, str]:
    """The checksums of a part by its number; an object that was put whole is its only part."""
    if not attributes.part_sizes_bytes:
        return checksum_headers(attributes)
    named = attributes.checksums_of_part(number).items()
    values = {f"x-amz-checksum-{name}": text for name, text in named}
    if values and attributes.checksum_type:
        values["x-amz-checksum-type"] = attributes.checksum_type
    return values


def overrides(query: Mapping[str, str]) -> dict[str, str]:
    """Headers that the request's response-* parameters ask for. Raises `InvalidRequest`."""
    named: dict[str, str] = {}
    for header in _OVERRIDES:
        value = query.get(f"response-{header.lower()}")
        if value is not None:
            if any(ord(character) < 32 or ord(character) == 127 for character in value):
                raise InvalidRequest(f"response-{header.lower()} must not hold control characters")
            named[header] = value
    return named


def _user_metadata(head: RequestHead) -> dict[str, str]:
    names = dict.fromkeys(name for name, _ in head.headers if name.startswith(METADATA_PREFIX))
    if not all(name.isascii() for name in names):
        raise InvalidRequest(f"the name of a header {METADATA_PREFIX}* must be ASCII")
    metadata = {name.removeprefix(METADATA_PREFIX): _utf8(head, name) or "" for name in names}
    size_bytes = sum(len(name) + len(value.encode()) for name, value in metadata.items())
    if size_bytes > USER_METADATA_BYTES_MAX:
        raise InvalidRequest(
            f"the user metadata holds {size_bytes} bytes, {USER_METADATA_BYTES_MAX} are allowed",
            code="MetadataTooLarge",
        )
    return metadata


def _content_encoding(head: RequestHead) -> str | None:
    _utf8(head, "content-encoding")
    return stored_content_encoding(head)


def _utf8(head: RequestHead, name: str) -> str | None:
    value = head.header(name)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the header {name} must be UTF-8") from error
    return value
