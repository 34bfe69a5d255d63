"""Multipart uploads."""

from __future__ import annotations

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.messages.writes import Stored
from objectcache_schemas.records import (
    Condition,
    ObjectAttributes,
    PartInfo,
    UploadInfo,
)


class Upload(Message, frozen=True):
    """Reply to `CreateUpload`."""

    info: UploadInfo


@request(Upload, repeatable=False, changes=Changes.UPLOADS)
class CreateUpload(Message, frozen=True):
    """Open a multipart upload."""

    bucket: str
    key: str
    attributes: ObjectAttributes


@request(Stored, repeatable=False, changes=Changes.UPLOADS)
class CompleteUpload(Message, frozen=True):
    """Join the listed parts into the object.

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


@request(Done, repeatable=False, changes=Changes.UPLOADS)
class AbortUpload(Message, frozen=True):
    """Forget an upload and its parts."""

    bucket: str
    key: str
    upload_id: str


class Parts(Message, frozen=True):
    """Reply to `ListParts`."""

    upload: UploadInfo
    parts: tuple[PartInfo, ...]
    truncated: bool


@request(Parts, repeatable=True, changes=Changes.NOTHING)
class ListParts(Message, frozen=True):
    """List an upload's parts by number."""

    bucket: str
    key: str
    upload_id: str
    after_part_number: int = 0
    limit: int = 1000


class Uploads(Message, frozen=True):
    """Reply to `ListUploads`. The next two continue it where it is truncated."""

    uploads: tuple[UploadInfo, ...]
    truncated: bool
    common_prefixes: tuple[str, ...] = ()
    next_key: str = ""
    next_upload_id: str = ""


@request(Uploads, repeatable=True, changes=Changes.NOTHING)
class ListUploads(Message, frozen=True):
    """List a bucket's open uploads by key, then upload id.

    Keys that hold `delimiter` after `prefix` roll up into common prefixes, as in `ListObjects`.
    """

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    after_key: str = ""
    after_upload_id: str = ""
    limit: int = 1000
