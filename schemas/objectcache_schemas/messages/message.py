"""The base of all messages."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Message(
    msgspec.Struct, frozen=True, tag_field="op", tag=True, forbid_unknown_fields=True, kw_only=True
):
    """Base of all messages; the tag is the class name."""
