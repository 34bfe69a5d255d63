"""S3's XML answers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import quote

from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.records import BucketInfo, ObjectInfo, PartInfo, UploadInfo

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
XML = "application/xml"

PROLOG = b'<?xml version="1.0" encoding="UTF-8"?>\n'

_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
# XML 1.0 has no way to carry most control characters; S3 writes them as references all the same,
# and clients that expect such keys ask for encoding-type=url.
_UNSPEAKABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_ESCAPED = re.compile('[&<>"\x00-\x1f\x7f\ufffe\uffff]')


def escape(text: str) -> str:
    """Text of an element."""
    if _ESCAPED.search(text) is None:
        return text
    return _ESCAPED.sub(lambda match: _ESCAPES.get(match[0]) or f"&#x{ord(match[0]):x};", text)


def is_xml_text(text: str) -> bool:
    """Whether XML 1.0 can carry a text."""
    return not _UNSPEAKABLE.search(text)


def element(name: str, content: str | int | bool | None) -> str:
    """One element with text, escaped; nothing where there is no content."""
    if content is None:
        return ""
    if isinstance(content, bool):
        content = "true" if content else "false"
    return f"<{name}>{escape(str(content))}</{name}>"


def parent(name: str, *children: str) -> str:
    """An element with rendered children."""
    return f"<{name}>{''.join(children)}</{name}>"


def document(root: str, *children: str, namespace: str = NAMESPACE) -> bytes:
    """A whole answer."""
    opening = f'<{root} xmlns="{namespace}">' if namespace else f"<{root}>"
    return PROLOG + f"{opening}{''.join(children)}</{root}>".encode("utf-8", "replace")


def timestamp(seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds, as S3 writes it."""
    milliseconds = int(seconds * 1000)
    return f"{_whole_seconds(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@functools.lru_cache(maxsize=1024)
def _whole_seconds(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def url_encoded(text: str) -> str:
    """A key under encoding-type=url."""
    return quote(text, safe="/-_.~*")


def error_document(
    error: ObjectCacheError, resource: str, request_id: str, *more_elements: str
) -> bytes:
    """S3's error body; MissingIndex is the descriptor's first chunk that is not stored."""
    return document(
        "Error",
        element("Code", error.code),
        element("Message", error.message),
        element("Resource", resource),
        element("MissingIndex", error.details.missing_index),
        *more_elements,
        element("RequestId", request_id),
        namespace="",
    )


def owner(identity: str, name: str = "Owner") -> str:
    """Whose a bucket or object is."""
    return parent(name, element("ID", identity), element("DisplayName", identity))


def buckets_document(
    identity: str, buckets: Iterable[BucketInfo], prefix: str | None, continuation: str | None
) -> bytes:
    """Answer of ListBuckets."""
    entries = [
        parent(
            "Bucket",
            element("Name", bucket.name),
            element("CreationDate", timestamp(bucket.created_s)),
            element("BucketRegion", bucket.region),
        )
        for bucket in buckets
    ]
    return document(
        "ListAllMyBucketsResult",
        owner(identity),
        parent("Buckets", *entries),
        element("Prefix", prefix),
        element("ContinuationToken", continuation),
    )


def quoted_etag(etag: str) -> str:
    """An ETag as headers and XML carry it."""
    return f'"{etag}"'


def object_entry(info: ObjectInfo, key: str, identity: str | None, *, version: bool) -> str:
    """One object of a listing; `key` is as the listing encodes it.

    Written in one piece: a listing has a thousand of them.
    """
    name = "Version" if version else "Contents"
    checksums = info.attributes.checksums
    named = "".join([element("ChecksumAlgorithm", each.upper()) for each in checksums])
    return (
        f"<{name}><Key>{escape(key)}</Key>"
        f"{'<VersionId>null</VersionId><IsLatest>true</IsLatest>' if version else ''}"
        f"<LastModified>{timestamp(info.modified_s)}</LastModified>"
        f"<ETag>&quot;{escape(info.etag)}&quot;</ETag>{named}<Size>{info.size_bytes}</Size>"
        f"{owner(identity) if identity is not None else ''}"
        f"<StorageClass>STANDARD</StorageClass></{name}>"
    )


def checksum_elements(checksums: dict[str, str], checksum_type: str | None = None) -> str:
    """ChecksumCRC32 and its like."""
    values = "".join(element(f"Checksum{name.upper()}", text) for name, text in checksums.items())
    return values + (element("ChecksumType", checksum_type) if checksums else "")


def copy_document(root: str, info: ObjectInfo) -> bytes:
    """Answer of CopyObject (CopyObjectResult) and UploadPartCopy (CopyPartResult)."""
    return document(
        root,
        element("LastModified", timestamp(info.modified_s)),
        element("ETag", quoted_etag(info.etag)),
        checksum_elements(info.attributes.checksums),
    )


def part_entry(part: PartInfo) -> str:
    """One part of ListParts."""
    return parent(
        "Part",
        element("PartNumber", part.part_number),
        element("LastModified", timestamp(part.modified_s)),
        element("ETag", quoted_etag(part.etag)),
        element("Size", part.size_bytes),
        checksum_elements(part.checksums),
    )


def upload_entry(upload: UploadInfo, key: str, identity: str) -> str:
    """One upload of ListMultipartUploads."""
    return parent(
        "Upload",
        element("Key", key),
        element("UploadId", upload.upload_id),
        owner(identity, "Initiator"),
        owner(identity),
        element("StorageClass", "STANDARD"),
        element("Initiated", timestamp(upload.created_s)),
    )
