"""How a connection to the storage server begins, and the reply that says nothing."""

from __future__ import annotations

from objectcache_schemas.messages.message import Message


class Hello(Message, frozen=True):
    """First message of a gateway. Both sides must agree on the limits."""

    v: int
    limits_fingerprint: bytes


class Welcome(Message, frozen=True):
    """The storage server's answer to `Hello`."""

    v: int
    engine: str  # name of the engine behind this server


class Done(Message, frozen=True):
    """Success without anything to say."""
