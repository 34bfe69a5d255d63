"""What tenants and buckets hold, and what they may still ask for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request


class Usage(Message, frozen=True):
    """Reply to `GetUsage`."""

    buckets: tuple[BucketUsage, ...]
    tenants: tuple[TenantActivity, ...] = ()


@request(Usage, repeatable=False, changes=Changes.NOTHING)
class GetUsage(Message, frozen=True):
    """Ask what the buckets hold. An empty name is every one."""

    owner: str = ""
    bucket: str = ""


class BucketUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one bucket holds."""

    bucket: str
    owner: str
    object_count: int
    stored_bytes: int
    encoded_bytes: int = 0  # of the frames of chunks that are stored encoded
    decoded_bytes: int = 0  # of those chunks, among the stored ones


class TenantActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes on for one tenant."""

    identity: str
    in_flight_bytes: int
    deliveries: int


@request(Done, repeatable=True, changes=Changes.OBJECTS)
class CheckPut(Message, frozen=True):
    """Ask whether quotas leave room for a put of at least so many bytes."""

    bucket: str
    identity: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class RequestsTaken(Message, frozen=True):
    """Reply to `TakeRequests`: how many may be served now; with none, when to ask again."""

    granted: int
    retry_after_s: float = 0.0
    limited: bool = True  # False: there is no quota of requests, ask again after a while


@request(RequestsTaken, repeatable=False, changes=Changes.REQUEST_TOKENS)
class TakeRequests(Message, frozen=True):
    """Take from what a tenant and a bucket may still request.

    A gateway takes several at a time, so that most requests need no round trip.
    """

    identity: str
    bucket: str
    wanted: Annotated[int, msgspec.Meta(ge=1, le=1000)]
