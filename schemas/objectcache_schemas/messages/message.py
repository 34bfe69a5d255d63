"""The base of all messages, and how one that begins a conversation is declared.

A request is declared once, where its class is: what answers it, whether it may be sent twice, and
what it changes. The decoders, what is repeated after a lost connection, and what a drained server
refuses follow from that; the storage server's handler is a row of its table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from objectcache_schemas.limits import Limits

PROTOCOL_VERSION = 1


class Message(
    msgspec.Struct, frozen=True, tag_field="op", tag=True, forbid_unknown_fields=True, kw_only=True
):
    """Base of all messages; the tag is the class name."""

    def goes_on(self) -> bool:
        """Whether the conversation goes on after this reply; else the connection is free."""
        return False


class Changes(enum.Enum):
    """What a request changes."""

    NOTHING = "nothing"
    OBJECTS = "objects"
    UPLOADS = "uploads"
    BUCKETS = "buckets"
    PUTS = "puts"  # objects or parts, by a put that is admitted for itself
    PINS = "pins"
    REQUEST_TOKENS = "request tokens"
    ACCOUNTS = "accounts"
    SCHEDULE = "schedule"
    PROCESS = "process"  # the server's own, until it ends


Repeatable = bool | Callable[[Any, Limits], bool]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What is declared of a request."""

    replies: tuple[type[Message], ...]  # all that the storage server may say until its end
    repeatable: Repeatable  # whether carrying it out twice is the same as once, replies included
    changes: Changes


REQUESTS: dict[type[Message], RequestRow] = {}  # by class, as they were declared


def request(
    *replies: type[Message], repeatable: Repeatable, changes: Changes
) -> Callable[[type[M]], type[M]]:
    """Declare a class as the first message of a conversation with the storage server."""

    def declare(kind: type[M]) -> type[M]:
        REQUESTS[kind] = RequestRow(replies, repeatable, changes)
        return kind

    return declare


def is_repeatable(message: Message, limits: Limits) -> bool:
    """Whether a request may be sent again. A connection that ends without a reply does not tell
    whether the request was carried out.
    """
    repeatable = REQUESTS[type(message)].repeatable
    return repeatable if isinstance(repeatable, bool) else repeatable(message, limits)
