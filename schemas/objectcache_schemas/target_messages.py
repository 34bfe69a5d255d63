"""Messages between a client (C) and the storage server's target socket (S).

    C JoinSession                             S SessionJoined | WireError (then S closes)
    C RegisterTarget, with one memory file    S TargetRegistered | WireError
    C ReleaseTarget                           S TargetReleased, once nothing writes to it any more
    C LayersConsumed, at any time             nothing
                                              S LayersReady, DeliveryFailure: unasked, at any time

When the connection ends, its targets end with it.
"""

from __future__ import annotations

from objectcache_schemas.errors import WireError
from objectcache_schemas.message import Message


class JoinSession(Message, frozen=True):
    """First message of a client on the target socket."""

    v: int
    ticket: bytes


class SessionJoined(Message, frozen=True):
    """The session belongs to the identity that asked for the ticket."""

    v: int


class RegisterTarget(Message, frozen=True):
    """Register a memory file (sent with this frame) that is sealed against shrinking."""

    length_bytes: int


class TargetRegistered(Message, frozen=True):
    """Reply to `RegisterTarget`."""

    target_id: bytes


class ReleaseTarget(Message, frozen=True):
    """Stop writing to a target. Deliveries into it are cancelled."""

    target_id: bytes


class TargetReleased(Message, frozen=True):
    """Nothing writes to the target any more; its memory may be used for anything."""

    target_id: bytes


class LayersConsumed(Message, frozen=True, omit_defaults=True):
    """The engine is through with the layers below `end_layer`; unanswered.

    `compute_s` is the time that it computed on the last of them, waiting left out. `waited_s` is
    how long it stood still for them, all that it had not told of before together; None is unknown.
    """

    tag: int
    end_layer: int
    compute_s: float
    waited_s: float | None = None


class LayersReady(Message, frozen=True):
    """All delivered layers below `end_layer` are in place for the delivery with this tag."""

    tag: int
    end_layer: int


class DeliveryFailure(Message, frozen=True):
    """The delivery with this tag ended; `failed_layer` is the first that is not complete."""

    tag: int
    failed_layer: int
    error: WireError


TargetRequest = JoinSession | RegisterTarget | ReleaseTarget | LayersConsumed


TargetEvent = (
    WireError | SessionJoined | TargetRegistered | TargetReleased | LayersReady | DeliveryFailure
)
