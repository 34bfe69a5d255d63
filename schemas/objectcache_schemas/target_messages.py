"""Messages of a session, between a client (C) and the storage server (S).

    C JoinSession                             S SessionJoined | WireError (then S closes)
    C RegisterTarget, with one memory file    S TargetRegistered | WireError
    C OpenFabric                              S FabricOpened | WireError
    C RegisterRemoteTarget                    S TargetRegistered | WireError
    C ReleaseTarget                           S TargetReleased, once nothing writes to it any more
    C LayersConsumed, at any time             nothing
    C ReturnCredits, at any time              nothing
                                              S LayersReady, DeliveryFailure: unasked, at any time

On the target socket, for clients on the same host, a session begins with `JoinSession`, and targets
are memory files. Through a gateway, for clients anywhere, it is joined from the start, and targets
are memory that a fabric reaches; there `LayersReady` comes over the fabric itself. When the
connection ends, its targets end with it.
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


class OpenFabric(Message, frozen=True):
    """Have the server reach this client over a fabric; once a session.

    `endpoint` is what the server has to know for that: nothing for nixl, a `VerbsAddress` for
    verbs.
    """

    transport: str
    endpoint: bytes = b""


class FabricOpened(Message, frozen=True):
    """Reply to `OpenFabric`: a `NixlNames` for nixl, the server's `VerbsAddress` for verbs."""

    endpoint: bytes


class NixlNames(Message, frozen=True):
    """The names of both agents. The server gives them out, because a name that two clients choose
    would cost one of them its memory.
    """

    client: str
    server: str


class RegisterRemoteTarget(Message, frozen=True):
    """Register memory that the session's fabric reaches.

    `key` is the memory's rkey (verbs); `metadata` the client agent's, which covers the memory
    (nixl). `device_id` is the GPU's where `memory` is VRAM.
    """

    length_bytes: int
    address: int
    key: int = 0
    device_id: int = 0
    memory: str = "DRAM"
    metadata: bytes = b""


class ReturnCredits(Message, frozen=True):
    """The client has taken this many announcements since the session began, and can take as many
    more (verbs); unanswered. A later message makes up for one that was lost.
    """

    count: int


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


TargetRequest = (
    JoinSession
    | RegisterTarget
    | OpenFabric
    | RegisterRemoteTarget
    | ReleaseTarget
    | LayersConsumed
    | ReturnCredits
)


TargetEvent = (
    WireError
    | SessionJoined
    | FabricOpened
    | TargetRegistered
    | TargetReleased
    | LayersReady
    | DeliveryFailure
)
