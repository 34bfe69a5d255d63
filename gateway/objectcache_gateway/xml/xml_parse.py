"""S3's XML bodies. The caller has capped their bytes; entities and DTDs are refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from objectcache_gateway.xml.xml_tree import malformed, root_of
from objectcache_schemas.errors import InvalidRequest

DELETE_KEYS_MAX = 1000  # S3's own
PARTS_MAX = 10_000  # S3's own
COMPLETE_ELEMENTS_MAX = 1 + 8 * PARTS_MAX  # a part has its number, ETag and some checksums
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
    root = root_of(body, "Delete")
    entries = [_delete_entry(child) for child in root.iterfind("Object")]
    if not 1 <= len(entries) <= DELETE_KEYS_MAX:
        raise malformed(f"Delete names {len(entries)} objects, from 1 to {DELETE_KEYS_MAX} may")
    return entries, (root.findtext("Quiet") or "").strip().lower() == "true"


def parse_complete(body: bytes) -> list[CompletedPart]:
    """Parts of a CompleteMultipartUpload body, in ascending order. A part that is named again was
    sent again, and its last entry counts.

    Raises `InvalidRequest`: MalformedXML, or InvalidPartOrder.
    """
    root = root_of(body, "CompleteMultipartUpload", COMPLETE_ELEMENTS_MAX)
    parts = [_completed_part(child) for child in root.iterfind("Part")]
    if not 1 <= len(parts) <= PARTS_MAX:
        raise malformed(f"{len(parts)} parts are named, from 1 to {PARTS_MAX} may")
    numbers = [part.part_number for part in parts]
    if any(first > second for first, second in itertools.pairwise(numbers)):
        raise InvalidRequest("the parts are not in ascending order", code="InvalidPartOrder")
    return list({part.part_number: part for part in parts}.values())


def parse_location(body: bytes) -> str:
    """The location constraint of a CreateBucket body; empty where there is none."""
    if not body.strip():
        return ""
    return (root_of(body, "CreateBucketConfiguration").findtext("LocationConstraint") or "").strip()


def _delete_entry(child: Element) -> DeleteEntry:
    key = child.findtext("Key")
    if not key:
        raise malformed("an Object of Delete has no Key")
    return DeleteEntry(key, child.findtext("VersionId"), child.findtext("ETag"))


def _completed_part(child: Element) -> CompletedPart:
    fields: dict[str, str] = {}
    for field in child:  # once for all of them: there are 10,000 parts
        fields.setdefault(field.tag, field.text or "")
    number, etag = fields.get("PartNumber", "").strip(), fields.get("ETag")
    if not (number.isascii() and number.isdigit() and len(number) <= PART_NUMBER_DIGITS_MAX):
        raise malformed("PartNumber must be a number")
    if etag is None:
        raise malformed("a Part has no ETag")
    checksums = {
        name.removeprefix("Checksum").lower(): text.strip()
        for name, text in fields.items()
        if name.startswith("Checksum")
    }
    return CompletedPart(int(number), etag.strip().strip('"'), checksums)
