"""Objects: looked up, listed and read."""

from __future__ import annotations

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.records import (
    ObjectInfo,
)


class Object(Message, frozen=True):
    """Reply to `StatObject`."""

    info: ObjectInfo


@request(Object, repeatable=True, changes=Changes.NOTHING)
class StatObject(Message, frozen=True):
    """Look an object up."""

    bucket: str
    key: str


class ObjectOpened(Message, frozen=True):
    """Reply to `OpenObject`; the gateway now chooses the range.

    With a `body`, which is the whole object, the conversation is over: nothing is held.
    """

    info: ObjectInfo
    body: bytes | None = None

    def goes_on(self) -> bool:
        return self.body is None


class BodySent(Message, frozen=True):
    """All bytes were written to the socket that came with `SendBody`."""

    length_bytes: int


@request(ObjectOpened, BodySent, Done, repeatable=True, changes=Changes.NOTHING)
class OpenObject(Message, frozen=True):
    """Hold an object for reading: until the conversation ends its bytes stay as they are."""

    bucket: str
    key: str
    identity: str = ""  # who asks, for its tenant's share
    request_id: str = ""
    client_s: float = 0.0  # as of KvGet
    gateway_s: float = 0.0
    traceparent: str = ""
    body_bytes_max: int = 0  # an object of no more may come whole with the reply


class SendBody(Message, frozen=True):
    """Send a range of the opened object, or (both numbers whole) an accepted delivery's payload."""

    offset_bytes: int
    length_bytes: int
    into_socket: bool


class CloseObject(Message, frozen=True):
    """Let the opened object, or the accepted delivery, go without sending. Reply: `Done`."""


class Listing(Message, frozen=True):
    """Reply to `ListObjects`. `next_start_after` continues; None is the end."""

    objects: tuple[ObjectInfo, ...]
    common_prefixes: tuple[str, ...]
    next_start_after: str | None


@request(Listing, repeatable=True, changes=Changes.NOTHING)
class ListObjects(Message, frozen=True):
    """List keys in UTF-8 byte order.

    Keys that hold `delimiter` after `prefix` roll up into common prefixes. Only keys and common
    prefixes greater than `start_after` count; an object and a common prefix each take one of
    `limit`.
    """

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    limit: int = 1000
