"""Messages between the gateway and the storage server, and between a client and its targets.

One connection carries one request at a time, as an HTTP/1.1 connection does: cancelling is closing,
backpressure is the socket's own. Every message is a msgpack map whose `op` names its class. Frames
are those of `frames`.

Conversations, gateway (G) to storage server (S):

    any      G Hello                          S Welcome | WireError (then S closes)
    simple   G request                        S reply | WireError
    read     G OpenObject                     S ObjectOpened
             G SendBody | CloseObject         S body, see below | Done
    kv get   G KvGet                          S DeliveryAccepted
               without a target: G SendBody   S body
               with a target:                 S DeliveryEnded, when it has ended
    lease    G LeaseTarget                    S TargetLeased, with one memory file
             G EndLease                       S Done
    write    G PutObject | PutPart | KvPut    S SendData
             G data frames, an empty one, then CommitPut (S Stored | KvStored) | AbortPut (S Done)
    kv put   G KvPut with a target            S KvStored, when the chunks are stored

A put with a target has no data on this connection: S takes the payload out of the target, where the
client has laid it. G sends it once the whole request was verified, and closing stops it until it is
being committed.

A delivery whose path is `buffer` is a kv get without a target here, and a lease beside it: G takes
the body, and writes it into the client's memory itself. The lease lasts until EndLease, or until G
closes, which it does only when it writes no more. S may send WireError before EndLease: the target
was released, or the lease took too long. G then stops writing and closes, and so does S.

A body goes where SendBody says. `into_socket` false: S writes exactly `length_bytes` raw bytes on
this connection, and closes it if it cannot. `into_socket` true: the frame carries one file
descriptor, the gateway's connected client socket; S writes the bytes there and answers BodySent.
After a WireError that ends a conversation the connection takes the next request.

Conversations, client (C) to the storage server's target socket (S):

    C JoinSession                             S SessionJoined | WireError (then S closes)
    C RegisterTarget, with one memory file    S TargetRegistered | WireError
    C ReleaseTarget                           S TargetReleased, once nothing writes to it any more
    C LayersConsumed, at any time             nothing
                                              S LayersReady, DeliveryFailure: unasked, at any time

When the connection ends, its targets end with it.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from objectcache_schemas.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckProgress,
    EngineState,
    GetEngineStatus,
)
from objectcache_schemas.errors import WireError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.message import Message
from objectcache_schemas.schedule import GetSchedule, ScheduleState, SetSchedule
from objectcache_schemas.traces import GetTraces, Traces

# --- records -------------------------------------------------------------------------------------


class ObjectAttributes(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What S3 stores beside an object's bytes; header values as they arrived."""

    content_type: str | None = None
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    expires: str | None = None
    user_metadata: dict[str, str] = {}  # names without the x-amz-meta- prefix, lowercase
    checksums: dict[str, str] = {}  # algorithm in lowercase ("crc32") to its base64 value
    checksum_type: str | None = None  # FULL_OBJECT or COMPOSITE
    part_sizes_bytes: tuple[int, ...] = ()  # of a completed multipart upload


class ObjectInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stored object, without its bytes."""

    key: str
    size_bytes: int
    etag: str  # without quotes
    modified_s: float  # Unix time
    attributes: ObjectAttributes = ObjectAttributes()


class Durability(enum.Enum):
    """When a put is acknowledged."""

    SYNC = "sync"  # once no crash can lose it
    ASYNC = "async"  # once it is readable; a power loss may lose the last second


class Verification(enum.Enum):
    """Which slices are compared with their checksums when they are read."""

    FULL = "full"
    SAMPLED = "sampled"  # one of 16, at random
    OFF = "off"


class BucketPolicy(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What an operator may choose for a bucket."""

    durability: Durability = Durability.SYNC
    verification: Verification = Verification.FULL
    quota_bytes: int | None = None  # stored bytes, more are refused or evict; None is no quota
    ttl_s: float | None = None  # age since the put after which an object is gone; None is never


class BucketInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bucket."""

    name: str
    owner: str
    region: str
    created_s: float  # Unix time
    layout: KvLayout | None = None
    policy: BucketPolicy = BucketPolicy()


class PartInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stored part of a multipart upload."""

    part_number: int
    size_bytes: int
    etag: str
    modified_s: float
    checksums: dict[str, str] = {}


class UploadInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One open multipart upload."""

    key: str
    upload_id: str
    created_s: float
    attributes: ObjectAttributes = ObjectAttributes()


class Condition(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """When a put may become visible. Nothing set: always."""

    absent: bool = False  # If-None-Match: *
    etag: str | None = None  # If-Match; "*" is any existing object
    immutable: bool = False  # an existing key with the same bytes is a success, others a conflict


# --- opening a connection ------------------------------------------------------------------------


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


class GetHealth(Message, frozen=True):
    """Ask whether the storage server serves."""


class Health(Message, frozen=True):
    """The storage server's state, for health checks and the admin view."""

    engine: str
    deliveries_in_flight: int
    in_flight_bytes: int
    damaged_count: int  # objects dropped because their bytes failed a checksum
    draining: bool


class SetPolicy(Message, frozen=True):
    """Replace a bucket's policy. Reply: `Done`."""

    bucket: str
    policy: BucketPolicy


class PinObjects(Message, frozen=True):
    """Keep objects from eviction and expiry, or no longer. Reply: `ObjectsPinned`."""

    bucket: str
    keys: tuple[str, ...]
    pinned: bool


class ObjectsPinned(Message, frozen=True):
    """Reply to `PinObjects`."""

    count: int


# --- buckets -------------------------------------------------------------------------------------


class CreateBucket(Message, frozen=True):
    """Create a bucket. Reply: `Done`; BucketAlreadyOwnedByYou or BucketAlreadyExists."""

    name: str
    owner: str
    region: str


class GetBucket(Message, frozen=True):
    """Look a bucket up. Reply: `Bucket`."""

    name: str


class Bucket(Message, frozen=True):
    """Reply to `GetBucket`."""

    info: BucketInfo


class DeleteBucket(Message, frozen=True):
    """Delete an empty bucket. Reply: `Done`; BucketNotEmpty."""

    name: str


class ListBuckets(Message, frozen=True):
    """List all buckets by name. Reply: `Buckets`."""


class Buckets(Message, frozen=True):
    """Reply to `ListBuckets`."""

    buckets: tuple[BucketInfo, ...]


class SetLayout(Message, frozen=True):
    """Give a bucket its KV layout; the same one again is a success. Reply: `Done`."""

    bucket: str
    layout: KvLayout


# --- reading -------------------------------------------------------------------------------------


class StatObject(Message, frozen=True):
    """Look an object up. Reply: `Object`."""

    bucket: str
    key: str


class Object(Message, frozen=True):
    """Reply to `StatObject`."""

    info: ObjectInfo


class OpenObject(Message, frozen=True):
    """Pin an object for reading: until the conversation ends its bytes stay as they are."""

    bucket: str
    key: str
    identity: str = ""  # who asks, for its tenant's share
    request_id: str = ""
    client_s: float = 0.0  # as of KvGet
    gateway_s: float = 0.0
    traceparent: str = ""


class ObjectOpened(Message, frozen=True):
    """Reply to `OpenObject`; the gateway now chooses the range."""

    info: ObjectInfo


class SendBody(Message, frozen=True):
    """Send a range of the opened object, or (both numbers whole) an accepted delivery's payload."""

    offset_bytes: int
    length_bytes: int
    into_socket: bool


class CloseObject(Message, frozen=True):
    """Let the opened object, or the accepted delivery, go without sending. Reply: `Done`."""


class BodySent(Message, frozen=True):
    """All bytes were written to the socket that came with `SendBody`."""

    length_bytes: int


class ListObjects(Message, frozen=True):
    """List keys in UTF-8 byte order. Reply: `Listing`.

    Keys that hold `delimiter` after `prefix` roll up into common prefixes. Only keys and common
    prefixes greater than `start_after` count; an object and a common prefix each take one of
    `limit`.
    """

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    limit: int = 1000


class Listing(Message, frozen=True):
    """Reply to `ListObjects`. `next_start_after` continues; None is the end."""

    objects: tuple[ObjectInfo, ...]
    common_prefixes: tuple[str, ...]
    next_start_after: str | None


# --- writing -------------------------------------------------------------------------------------


class PutObject(Message, frozen=True):
    """Begin a put. Reply: `SendData`, after the checks that need no data."""

    bucket: str
    key: str
    size_bytes: int | None  # None: not known before the end
    condition: Condition = Condition()


class PutPart(Message, frozen=True):
    """Begin a part of a multipart upload. Reply: `SendData`."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    size_bytes: int | None


class SendData(Message, frozen=True):
    """Go ahead: data frames, then an empty one, then `CommitPut` or `AbortPut`."""


class CommitPut(Message, frozen=True):
    """The data was whole and right: make it visible. Reply: `Stored` or `KvStored`."""

    etag: str = ""
    attributes: ObjectAttributes = ObjectAttributes()


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


class DeleteObjects(Message, frozen=True):
    """Delete keys; a key that is not stored is no error. Reply: `Done`."""

    bucket: str
    keys: tuple[str, ...]


class CreateUpload(Message, frozen=True):
    """Open a multipart upload. Reply: `Upload`."""

    bucket: str
    key: str
    attributes: ObjectAttributes


class Upload(Message, frozen=True):
    """Reply to `CreateUpload`."""

    info: UploadInfo


class CompleteUpload(Message, frozen=True):
    """Join the listed parts into the object. Reply: `Stored`.

    The ETag is the MD5 of the parts' binary MD5s, a dash, and their count.
    """

    bucket: str
    key: str
    upload_id: str
    parts: tuple[tuple[int, str], ...]  # part number, ETag without quotes
    condition: Condition = Condition()


class AbortUpload(Message, frozen=True):
    """Forget an upload and its parts. Reply: `Done`."""

    bucket: str
    key: str
    upload_id: str


class ListParts(Message, frozen=True):
    """List an upload's parts by number. Reply: `Parts`."""

    bucket: str
    key: str
    upload_id: str
    after_part_number: int = 0
    limit: int = 1000


class Parts(Message, frozen=True):
    """Reply to `ListParts`."""

    upload: UploadInfo
    parts: tuple[PartInfo, ...]
    truncated: bool


class ListUploads(Message, frozen=True):
    """List a bucket's open uploads by key, then upload id. Reply: `Uploads`."""

    bucket: str
    prefix: str = ""
    after_key: str = ""
    after_upload_id: str = ""
    limit: int = 1000


class Uploads(Message, frozen=True):
    """Reply to `ListUploads`."""

    uploads: tuple[UploadInfo, ...]
    truncated: bool


# --- the extension -------------------------------------------------------------------------------


class KvMatch(Message, frozen=True):
    """How long a prefix is stored. Reply: `Matched`."""

    bucket: str
    chunk_keys: tuple[str, ...]


class Matched(Message, frozen=True):
    """Reply to `KvMatch`."""

    matched: int


class KvGet(Message, frozen=True):
    """Begin a delivery. Reply: `DeliveryAccepted`."""

    bucket: str
    identity: str  # who asks; a target must belong to the same
    request_id: str
    descriptor: bytes  # as it came over HTTP; the storage server parses and checks it
    path: str = ""  # that the request forces, one of `DeliveryPath`; empty is the server's choice
    client_s: float = 0.0  # that the client spent before it sent the request, as it says
    gateway_s: float = 0.0  # that the gateway spent before it sent this
    traceparent: str = ""  # W3C Trace Context, where the request is traced


class DeliveryPath(enum.Enum):
    """The paper's five paths (section 4.1)."""

    S3TCP = "s3tcp"  # one object in the response body
    BUFFER = "buffer"  # one object, staged in the gateway, into a target
    DIRECT = "direct"  # one object, straight into a target
    BATCH = "batch"  # many objects, chunkwise
    AGG = "agg"  # many objects, layerwise


class WindowSource(enum.Enum):
    """Where a delivery's compute window came from."""

    DESCRIPTOR = "descriptor"
    PROFILE = "profile"
    LEARNED = "learned"
    NONE = "none"


class DeliveryAccepted(Message, frozen=True):
    """The delivery is planned and, with a target, running."""

    delivery: str  # the mode chosen: layerwise or chunkwise
    chunk_count: int
    layer_bytes: int  # bytes of one layer payload
    body_bytes: int  # bytes of the response body; 0 with a target
    rate_bytes_per_s: int | None = None  # assigned for its life; None where the policy assigns none
    path: str = ""
    transport: str = "tcp"
    window_source: str = "none"


class DeliveryEnded(Message, frozen=True):
    """A delivery into a target has ended; `error` None is success."""

    payload_bytes: int
    error: WireError | None = None
    failed_layer: int | None = None


class LeaseTarget(Message, frozen=True):
    """Lease a part of a client's target, to write one payload to it. Reply: `TargetLeased`.

    The five fields of the target are those of the descriptor's `rdma_target`. NotFound
    (NoSuchTarget) unless the identity registered it.
    """

    identity: str  # who asks; the target must belong to the same
    transport: str
    target_id: bytes
    offset_bytes: int
    length_bytes: int
    tag: int
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)]  # to be written from `offset_bytes` on
    first_layer: int  # of the payload; what has failed where the payload does not come
    end_layer: int


class TargetLeased(Message, frozen=True):
    """Reply to `LeaseTarget`; the target's memory file is beside it."""


class EndLease(Message, frozen=True):
    """Nothing is written to the target any more. Reply: `Done`.

    The target's owner hears of it: all layers are ready, or the delivery failed with `error`.
    """

    error: WireError | None = None


class KvPut(Message, frozen=True):
    """Begin storing chunks, all or none. Reply: `SendData`; the data is the payload alone.

    Where the descriptor has an `rdma_target` the payload lies there, and the reply is `KvStored`.
    """

    bucket: str
    identity: str  # who asks; a target must belong to the same
    descriptor: bytes


class KvStored(Message, frozen=True):
    """Reply to `CommitPut` of a kv-put, and to a `KvPut` with a target."""

    stored: int  # chunks that are new
    existing: int  # chunks that were stored already, with the same bytes


class CreateSession(Message, frozen=True):
    """Ask for a ticket to the target socket. Reply: `SessionTicket`."""

    identity: str


class SessionTicket(Message, frozen=True):
    """A ticket, good once and for a short time, and where to present it."""

    ticket: bytes
    socket_path: str
    host_id: str  # boot id of the storage server's host
    expires_s: float  # seconds from now


# --- client to target socket ---------------------------------------------------------------------


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


class LayersConsumed(Message, frozen=True):
    """The engine is through with the layers below `end_layer`; unanswered.

    `compute_s` is the time that it computed on the last of them, waiting left out.
    """

    tag: int
    end_layer: int
    compute_s: float


class LayersReady(Message, frozen=True):
    """All delivered layers below `end_layer` are in place for the delivery with this tag."""

    tag: int
    end_layer: int


class DeliveryFailure(Message, frozen=True):
    """The delivery with this tag ended; `failed_layer` is the first that is not complete."""

    tag: int
    failed_layer: int
    error: WireError


GatewayRequest = (
    GetHealth
    | CreateBucket
    | GetBucket
    | DeleteBucket
    | ListBuckets
    | SetLayout
    | StatObject
    | OpenObject
    | ListObjects
    | PutObject
    | PutPart
    | CopyObject
    | CopyPart
    | DeleteObjects
    | CreateUpload
    | CompleteUpload
    | AbortUpload
    | ListParts
    | ListUploads
    | KvMatch
    | KvGet
    | LeaseTarget
    | KvPut
    | CreateSession
    | GetEngineStatus
    | CheckEngine
    | SetPolicy
    | PinObjects
    | GetSchedule
    | SetSchedule
    | GetTraces
)
BodyChoice = SendBody | CloseObject
PutEnd = CommitPut | AbortPut
StorageReply = (
    WireError
    | Welcome
    | Done
    | Health
    | Bucket
    | Buckets
    | Object
    | ObjectOpened
    | BodySent
    | Listing
    | SendData
    | Stored
    | Upload
    | Parts
    | Uploads
    | Matched
    | DeliveryAccepted
    | DeliveryEnded
    | TargetLeased
    | KvStored
    | SessionTicket
    | EngineState
    | CheckProgress
    | CheckEnded
    | ObjectsPinned
    | ScheduleState
    | Traces
)
TargetRequest = JoinSession | RegisterTarget | ReleaseTarget | LayersConsumed
TargetEvent = (
    WireError | SessionJoined | TargetRegistered | TargetReleased | LayersReady | DeliveryFailure
)
