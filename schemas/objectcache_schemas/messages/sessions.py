"""Messages of a session, between a client (C) and the storage server (S).

    C JoinSession                             S SessionJoined | WireError (then S closes)
    C RegisterTarget, with one memory file    S TargetRegistered | WireError
    C OpenFabric                              S FabricOpened | WireError
    C RegisterRemoteTarget                    S TargetRegistered | WireError
    C ReleaseTarget                           S TargetReleased, once nothing writes to it any more
    C GetPrefix, of a bucket passed to it     S GetBegun once it runs, GetEnded at its end
    C CancelGet, at any time                  nothing but that end
    C LayersConsumed, at any time             nothing
    C LayersAwaited, at any time              nothing
    C LayersFreed, at any time                nothing
    C SessionPing, at any time                S SessionPong, at once
    C ReturnCredits, at any time              nothing
                                              S LayersReady, DeliveryFailure, PassGiven,
                                                MoveSession: unasked, at any time

On the target socket, for clients on the same host, a session begins with `JoinSession`, and targets
are memory files. Through a gateway, for clients anywhere, it is joined from the start, and targets
are memory that a fabric reaches; there `LayersReady` comes over the fabric itself. When the
connection ends, its targets end with it.
"""

from __future__ import annotations

from msgspec.structs import replace

from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.messages.request_labels import (
    adopted_client_s,
    adopted_request_id,
    adopted_traceparent,
    new_request_id,
)


class SessionTicket(Message, frozen=True):
    """A ticket, good once and for a short time, and where to present it."""

    ticket: bytes
    socket_path: str
    host_id: str  # boot id of the storage server's host
    expires_s: float  # seconds from now


@request(SessionTicket, repeatable=True, changes=Changes.NOTHING)
class CreateSession(Message, frozen=True):
    """Ask for a ticket to the target socket."""

    identity: str
    access_key: str = ""  # that signed


class SessionJoined(Message, frozen=True):
    """The session belongs to the identity that asked for the ticket."""

    v: int

    def goes_on(self) -> bool:
        return True


@request(SessionJoined, repeatable=False, changes=Changes.NOTHING)
class JoinForClient(Message, frozen=True):
    """Begin a session for a client behind the gateway.

    From then on the connection is that session's, until either side closes it: the gateway passes
    the client's messages on, and the storage server's back.
    """

    identity: str
    access_key: str = ""  # that signed


class JoinSession(Message, frozen=True):
    """First message of a client on the target socket."""

    v: int
    ticket: bytes


class RegisterTarget(Message, frozen=True):
    """Register a memory file (sent with this frame) that is sealed against shrinking."""

    length_bytes: int


class TargetRegistered(Message, frozen=True, omit_defaults=True):
    """Reply to `RegisterTarget`."""

    target_id: bytes
    hears_awaited: bool = False  # the session may be sent `LayersAwaited`


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
    (nixl). `device_id` is the GPU's where `memory` is VRAM; where it is DRAM, any number, another
    one for each registration of the session (nixl).
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


class PassGiven(Message, frozen=True):
    """The session may get from this bucket by itself for so long, or until it is refused: a get
    over HTTP was allowed to read all of it.
    """

    bucket: str
    lives_s: float


class MoveSession(Message, frozen=True):
    """The client should join another session, where a gateway sends it, before what it does next,
    and leave this one once nothing runs over it; it may stay. Other servers have fewer sessions.
    """


class GetPrefix(Message, frozen=True, omit_defaults=True):
    """Begin a delivery into a target of this session.

    `tag` is that of the descriptor's target, and of no other get of the session. The other fields
    are those of a get over HTTP; `dequantise` is a fetcher's, which bounds the shape in it.
    AccessDenied where the bucket is not passed to the session, or not any more: ask over HTTP.
    """

    tag: int
    bucket: str
    descriptor: bytes
    request_id: str
    path: str = ""
    client_s: float = 0.0  # that the client has spent on the fetch
    traceparent: str = ""
    dequantise: str = ""

    def with_adopted_labels(self) -> GetPrefix:
        """The same with only those labels that HTTP's headers could have; an id out of its form is
        replaced by a new one.
        """
        return replace(
            self,
            request_id=adopted_request_id(self.request_id) or new_request_id(),
            client_s=adopted_client_s(self.client_s),
            traceparent=adopted_traceparent(self.traceparent),
        )


class CancelGet(Message, frozen=True):
    """End the get with this tag; no effect where it has ended."""

    tag: int


class GetBegun(Message, frozen=True, omit_defaults=True):
    """The get with this tag is planned and running."""

    tag: int
    delivery: str  # the mode chosen: layerwise or chunkwise
    chunk_count: int
    rate_bytes_per_s: int | None = None  # when it begins; None where the policy assigns none
    path: str = ""
    window_source: str = "none"
    content: str = ""  # a digest of its objects' ETags
    directory_bytes: int = 0  # before the first layer of an encoded payload; 0: it is plain


class GetEnded(Message, frozen=True, omit_defaults=True):
    """Nothing is written for the get with this tag any more; `error` None is success. Before
    `GetBegun` it is a refusal.
    """

    tag: int
    payload_bytes: int = 0
    error: WireError | None = None
    failed_layer: int | None = None


class LayersConsumed(Message, frozen=True, omit_defaults=True):
    """The engine is through with the layers below `end_layer`; unanswered.

    `compute_s` is the time that it computed on the last of them, waiting left out. `waited_s` is
    how long it stood still for them, all that it had not told of before together; None is unknown.
    """

    tag: int
    end_layer: int
    compute_s: float
    waited_s: float | None = None


class LayersAwaited(Message, frozen=True):
    """Nobody waits for a layer of this delivery before all below `end_layer` are in place;
    unanswered. What comes before them need not be announced, but for once in `interval_s` while
    layers come. A later message takes the place of an earlier one.
    """

    tag: int
    end_layer: int
    interval_s: float


class LayersFreed(Message, frozen=True):
    """Of a get with `ring_layers`: nobody reads the layers below `end_layer` any more, and later
    ones may take their places; unanswered. Of layers that were not announced it ends the get.
    """

    tag: int
    end_layer: int


class SessionPing(Message, frozen=True):
    """Ask whether the server still moves; while something is waited for, not otherwise."""


class SessionPong(Message, frozen=True):
    """Reply to `SessionPing`, which overtakes whatever else is waited for."""


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
    | LayersAwaited
    | LayersFreed
    | ReturnCredits
    | GetPrefix
    | CancelGet
    | SessionPing
)


TargetEvent = (
    WireError
    | SessionJoined
    | FabricOpened
    | TargetRegistered
    | TargetReleased
    | LayersReady
    | DeliveryFailure
    | PassGiven
    | MoveSession
    | GetBegun
    | GetEnded
    | SessionPong
)
