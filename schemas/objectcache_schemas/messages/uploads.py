"""Multipart uploads."""

from __future__ import annotations

from objectcache_schemas.messages.message import Message
from objectcache_schemas.records import (
    Condition,
    ObjectAttributes,
    PartInfo,
    UploadInfo,
)


class CreateUpload(Message, frozen=True):
    """Open a multipart upload. Reply: `Upload`."""

    bucket: str
    key: str
    attributes: ObjectAttributes


class Upload(Message, frozen=True):
    """Reply to `CreateUpload`."""

    info: UploadInfo


class CompleteUpload(Message, frozen=True):
    """Join the listed parts into the object. Reply: `Stored`.

    The ETag is the MD5 of the parts' binary MD5s, a dash, and their count.
    """

    bucket: str
    key: str
    upload_id: str
    parts: tuple[tuple[int, str], ...]  # part number, ETag without quotes
    condition: Condition = Condition()
    checksum: tuple[str, str] | None = None  # of the object: algorithm, and value from the parts'
    checksum_type: str | None = None
    part_checksums: tuple[str, ...] = ()  # in the order of `parts`
    identity: str = ""


class AbortUpload(Message, frozen=True):
    """Forget an upload and its parts. Reply: `Done`."""

    bucket: str
    key: str
    upload_id: str


class ListParts(Message, frozen=True):
    """List an upload's parts by number. Reply: `Parts`."""

    bucket: str
    key: str
    upload_id: str
    after_part_number: int = 0
    limit: int = 1000


class Parts(Message, frozen=True):
    """Reply to `ListParts`."""

    upload: UploadInfo
    parts: tuple[PartInfo, ...]
    truncated: bool


class ListUploads(Message, frozen=True):
    """List a bucket's open uploads by key, then upload id. Reply: `Uploads`.

    Keys that hold `delimiter` after `prefix` roll up into common prefixes, as in `ListObjects`.
    """

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    after_key: str = ""
    after_upload_id: str = ""
    limit: int = 1000


class Uploads(Message, frozen=True):
    """Reply to `ListUploads`. The next two continue it where it is truncated."""

    uploads: tuple[UploadInfo, ...]
    truncated: bool
    common_prefixes: tuple[str, ...] = ()
    next_key: str = ""
    next_upload_id: str = ""
