"""S3's XML bodies. The caller has capped their bytes; entities and DTDs are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from objectcache_schemas.errors import InvalidRequest

DELETE_KEYS_MAX = 1000  # S3's own
PARTS_MAX = 10_000  # S3's own
PART_NUMBER_DIGITS_MAX = 9


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """One key of DeleteObjects."""

    key: str
    version_id: str | None = None
    etag: str | None = None  # a condition, which this server refuses


@dataclass(frozen=True, slots=True)
class CompletedPart:
    """One part of CompleteMultipartUpload."""

    part_number: int
    etag: str  # without quotes
    checksums: dict[str, str]


def parse_delete(body: bytes) -> tuple[list[DeleteEntry], bool]:
    """Keys and the quiet flag of a DeleteObjects body; raises `InvalidRequest` (MalformedXML)."""
    root = _root(body, "Delete")
    entries = [_delete_entry(child) for child in _children(root, "Object")]
    if not 1 <= len(entries) <= DELETE_KEYS_MAX:
        raise _malformed(f"Delete names {len(entries)} objects, from 1 to {DELETE_KEYS_MAX} may")
    return entries, (_text(root, "Quiet") or "").strip().lower() == "true"


def parse_complete(body: bytes) -> list[CompletedPart]:
    """Parts of a CompleteMultipartUpload body, in ascending order.

    Raises `InvalidRequest`: MalformedXML, or InvalidPartOrder.
    """
    root = _root(body, "CompleteMultipartUpload")
    parts = [_completed_part(child) for child in _children(root, "Part")]
    if not 1 <= len(parts) <= PARTS_MAX:
        raise _malformed(f"{len(parts)} parts are named, from 1 to {PARTS_MAX} may")
    numbers = [part.part_number for part in parts]
    if any(first >= second for first, second in itertools.pairwise(numbers)):
        raise InvalidRequest("the parts are not in ascending order", code="InvalidPartOrder")
    return parts


def parse_location(body: bytes) -> str:
    """The location constraint of a CreateBucket body; empty where there is none."""
    if not body.strip():
        return ""
    return (_text(_root(body, "CreateBucketConfiguration"), "LocationConstraint") or "").strip()


def _delete_entry(child: Element) -> DeleteEntry:
    key = _text(child, "Key")
    if not key:
        raise _malformed("an Object of Delete has no Key")
    return DeleteEntry(key, _text(child, "VersionId"), _text(child, "ETag"))


def _completed_part(child: Element) -> CompletedPart:
    number, etag = (_text(child, "PartNumber") or "").strip(), _text(child, "ETag")
    if not (number.isascii() and number.isdigit() and len(number) <= PART_NUMBER_DIGITS_MAX):
        raise _malformed("PartNumber must be a number")
    if etag is None:
        raise _malformed("a Part has no ETag")
    checksums = {
        _local(field).removeprefix("Checksum").lower(): (field.text or "").strip()
        for field in child
        if _local(field).startswith("Checksum")
    }
    return CompletedPart(int(number), etag.strip().strip('"'), checksums)


def _root(body: bytes, name: str) -> Element:
    try:
        root: Element = fromstring(body, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError, LookupError, RecursionError) as error:
        raise _malformed(f"the body must be a {name} document") from error
    if _local(root) != name:
        raise _malformed(f"the body must be a {name} document")
    return root


def _local(node: Element) -> str:
    return node.tag.rpartition("}")[2]


def _children(node: Element, name: str) -> Iterator[Element]:
    return (child for child in node if _local(child) == name)


def _text(node: Element, name: str) -> str | None:
    child = next(_children(node, name), None)
    return None if child is None else child.text or ""


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="MalformedXML")
