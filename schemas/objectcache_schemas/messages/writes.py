"""Objects: put, copied, changed and deleted."""

from __future__ import annotations

from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.messages.reads import Object
from objectcache_schemas.records import (
    Condition,
    ObjectAttributes,
    ObjectInfo,
)


class ObjectsPinned(Message, frozen=True):
    """Reply to `PinObjects`."""

    count: int


@request(ObjectsPinned, repeatable=False, changes=Changes.PINS)
class PinObjects(Message, frozen=True):
    """Keep objects from eviction and expiry, or no longer."""

    bucket: str
    keys: tuple[str, ...]
    pinned: bool


class CommitPut(Message, frozen=True):
    """The data was whole and right: make it visible. Reply: `Stored` or `KvStored`."""

    etag: str = ""
    attributes: ObjectAttributes = ObjectAttributes()


class SendData(Message, frozen=True):
    """Go ahead: data frames, then an empty one, then `CommitPut` or `AbortPut`."""

    def goes_on(self) -> bool:
        return True


class Stored(Message, frozen=True):
    """Reply to `CommitPut` of an object or a part."""

    info: ObjectInfo


def _is_opening(put: PutObject, limits: Limits) -> bool:
    """An opening stores nothing before its `CommitPut`."""
    return put.data is None


@request(SendData, Stored, Done, repeatable=_is_opening, changes=Changes.PUTS)
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


@request(SendData, Stored, Done, repeatable=True, changes=Changes.PUTS)
class PutPart(Message, frozen=True):
    """Begin a part of a multipart upload."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    size_bytes: int | None
    identity: str = ""


class AbortPut(Message, frozen=True):
    """The data was not right: forget it. Reply: `Done`."""


@request(Stored, repeatable=False, changes=Changes.OBJECTS)
class CopyObject(Message, frozen=True):
    """Copy within the store. `source_etag` names what the caller has seen."""

    source_bucket: str
    source_key: str
    source_etag: str
    bucket: str
    key: str
    attributes: ObjectAttributes
    etag: str
    condition: Condition = Condition()
    identity: str = ""  # who asks, for its quota


@request(Stored, repeatable=False, changes=Changes.UPLOADS)
class CopyPart(Message, frozen=True):
    """Copy a range of an object into a part of an upload."""

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


@request(Object, repeatable=False, changes=Changes.OBJECTS)
class ReplaceAttributes(Message, frozen=True):
    """Replace what is stored beside an object's bytes.

    PreconditionFailed where the object is no longer what the caller has seen, attributes and all:
    whoever changes one of them must not undo what others changed meanwhile.
    """

    bucket: str
    seen: ObjectInfo
    attributes: ObjectAttributes


@request(Done, repeatable=True, changes=Changes.OBJECTS)
class DeleteObjects(Message, frozen=True):
    """Delete keys; a key that is not stored is no error."""

    bucket: str
    keys: tuple[str, ...]
