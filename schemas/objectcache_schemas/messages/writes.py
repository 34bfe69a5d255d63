"""Objects: put, copied, changed and deleted."""

from __future__ import annotations

from objectcache_schemas.messages.message import Message
from objectcache_schemas.records import (
    Condition,
    ObjectAttributes,
    ObjectInfo,
)


class PinObjects(Message, frozen=True):
    """Keep objects from eviction and expiry, or no longer. Reply: `ObjectsPinned`."""

    bucket: str
    keys: tuple[str, ...]
    pinned: bool


class ObjectsPinned(Message, frozen=True):
    """Reply to `PinObjects`."""

    count: int


class CommitPut(Message, frozen=True):
    """The data was whole and right: make it visible. Reply: `Stored` or `KvStored`."""

    etag: str = ""
    attributes: ObjectAttributes = ObjectAttributes()


class PutObject(Message, frozen=True):
    """Begin a put. Reply: `SendData`, after the checks that need no data.

    With `data`, which is all of a small object, and `commit` it is the whole put. Reply: `Stored`.
    """

    bucket: str
    key: str
    size_bytes: int | None  # None: not known before the end
    condition: Condition = Condition()
    identity: str = ""  # who asks, for its quota
    data: bytes | None = None
    commit: CommitPut | None = None


class PutPart(Message, frozen=True):
    """Begin a part of a multipart upload. Reply: `SendData`."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    size_bytes: int | None
    identity: str = ""


class SendData(Message, frozen=True):
    """Go ahead: data frames, then an empty one, then `CommitPut` or `AbortPut`."""


class AbortPut(Message, frozen=True):
    """The data was not right: forget it. Reply: `Done`."""


class Stored(Message, frozen=True):
    """Reply to `CommitPut` of an object or a part."""

    info: ObjectInfo


class CopyObject(Message, frozen=True):
    """Copy within the store. Reply: `Stored`. `source_etag` pins what the caller has seen."""

    source_bucket: str
    source_key: str
    source_etag: str
    bucket: str
    key: str
    attributes: ObjectAttributes
    etag: str
    condition: Condition = Condition()
    identity: str = ""  # who asks, for its quota


class CopyPart(Message, frozen=True):
    """Copy a range of an object into a part of an upload. Reply: `Stored`."""

    source_bucket: str
    source_key: str
    source_etag: str
    offset_bytes: int
    length_bytes: int
    bucket: str
    key: str
    upload_id: str
    part_number: int
    identity: str = ""


class ReplaceAttributes(Message, frozen=True):
    """Replace what is stored beside an object's bytes. Reply: `Object`.

    PreconditionFailed where the object is no longer what the caller has seen, attributes and all:
    whoever changes one of them must not undo what others changed meanwhile.
    """

    bucket: str
    seen: ObjectInfo
    attributes: ObjectAttributes


class DeleteObjects(Message, frozen=True):
    """Delete keys; a key that is not stored is no error. Reply: `Done`."""

    bucket: str
    keys: tuple[str, ...]
