"""Messages between the gateway and the storage server.

One connection carries one request at a time, as an HTTP/1.1 connection does: cancelling is closing,
backpressure is the socket's own. Every message is a msgpack map whose `op` names its class. Frames
are those of `frames`.

Conversations, gateway (G) to storage server (S):

    any      G Hello                          S Welcome | WireError (then S closes)
    simple   G request                        S reply | WireError
    read     G OpenObject                     S ObjectOpened, the end where it has the body
             G SendBody | CloseObject         S body, see below | Done
    kv get   G KvGet                          S DeliveryAccepted
               without a target: G SendBody   S body
               with a target:                 S DeliveryEnded, when it has ended
    lease    G LeaseTarget                    S TargetLeased, with one memory file
             over a fabric                    S TargetLeased, then G data frames, an empty one
             G EndLease                       S Done
    session  G JoinForClient                  S SessionJoined, then as in target_messages
    write    G PutObject | PutPart | KvPut    S SendData
             G data frames, an empty one, then CommitPut (S Stored | KvStored) | AbortPut (S Done)
             G PutObject with its data        S Stored
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
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from objectcache_schemas.accounts import (
    AccountsChanged,
    AccountsExported,
    ChangeAccounts,
    Directory,
    ExportAccounts,
    ImportAccounts,
    WatchDirectory,
)
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
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    BucketPolicy,
    Condition,
    ObjectAttributes,
    ObjectInfo,
    PartInfo,
    UploadInfo,
)
from objectcache_schemas.schedule import GetSchedule, ScheduleState, SetSchedule
from objectcache_schemas.target_messages import SessionJoined
from objectcache_schemas.traces import GetTraces, Traces

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
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well


class GetMetrics(Message, frozen=True):
    """Ask for the storage server's metrics. Reply: `Metrics`."""


class Metrics(Message, frozen=True):
    """Reply to `GetMetrics`: Prometheus' text format."""

    text: bytes


class SetLogLevel(Message, frozen=True):
    """Change what is logged, until the process ends. Reply: `Done`."""

    level: str  # debug, info, warning or error


class Drain(Message, frozen=True):
    """Take no new deliveries and puts, or take them again. Reply: `Done`."""

    draining: bool


class GetUsage(Message, frozen=True):
    """Ask what the buckets hold. Reply: `Usage`. An empty name is every one."""

    owner: str = ""
    bucket: str = ""


class BucketUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one bucket holds."""

    bucket: str
    owner: str
    object_count: int
    stored_bytes: int


class TenantActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes on for one tenant."""

    identity: str
    in_flight_bytes: int
    deliveries: int


class Usage(Message, frozen=True):
    """Reply to `GetUsage`."""

    buckets: tuple[BucketUsage, ...]
    tenants: tuple[TenantActivity, ...] = ()


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
    """Create a bucket. Reply: `Done`; BucketAlreadyOwnedByYou or BucketAlreadyExists.

    `Done` for a change of a bucket comes when every gateway that follows the accounts has heard of
    it, or a second later.
    """

    name: str
    owner: str
    region: str
    configuration: BucketConfiguration = BucketConfiguration()


class GetBucket(Message, frozen=True):
    """Look a bucket up. Reply: `Bucket`."""

    name: str


class Bucket(Message, frozen=True):
    """Reply to `GetBucket`."""

    info: BucketInfo


class ConfigureBucket(Message, frozen=True):
    """Replace a bucket's configuration. Reply: `Done`.

    OperationAborted where another is in force than the one that the caller has seen: whoever
    changes a part of it must not undo what others changed meanwhile.
    """

    name: str
    configuration: BucketConfiguration
    replaces: BucketConfiguration


class DeleteBucket(Message, frozen=True):
    """Delete an empty bucket. Reply: `Done`; BucketNotEmpty.

    AccessDenied for a user where the bucket has a quota, which would go with it.
    """

    name: str
    identity: str = ""  # who asks; empty is an operator


class ListBuckets(Message, frozen=True):
    """List buckets by name, those after `start_after`. Reply: `Buckets`."""

    start_after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    with_configuration: bool = False  # without, every bucket's is the default


class Buckets(Message, frozen=True):
    """Reply to `ListBuckets`, of as many as fit a message. `next_start_after` continues; None is
    the end.
    """

    buckets: tuple[BucketInfo, ...]
    next_start_after: str | None = None


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
    body_bytes_max: int = 0  # an object of no more may come whole with the reply


class ObjectOpened(Message, frozen=True):
    """Reply to `OpenObject`; the gateway now chooses the range.

    With a `body`, which is the whole object, the conversation is over: nothing is pinned.
    """

    info: ObjectInfo
    body: bytes | None = None


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


class CommitPut(Message, frozen=True):
    """The data was whole and right: make it visible. Reply: `Stored` or `KvStored`."""

    etag: str = ""
    attributes: ObjectAttributes = ObjectAttributes()


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


class PutPart(Message, frozen=True):
    """Begin a part of a multipart upload. Reply: `SendData`."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    size_bytes: int | None
    identity: str = ""


class SendData(Message, frozen=True):
    """Go ahead: data frames, then an empty one, then `CommitPut` or `AbortPut`."""


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
    identity: str = ""  # who asks, for its quota


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
    identity: str = ""


class ReplaceAttributes(Message, frozen=True):
    """Replace what is stored beside an object's bytes. Reply: `Object`.

    PreconditionFailed where the object is no longer what the caller has seen, attributes and all:
    whoever changes one of them must not undo what others changed meanwhile.
    """

    bucket: str
    seen: ObjectInfo
    attributes: ObjectAttributes


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
    checksum: tuple[str, str] | None = None  # of the object: algorithm, and value from the parts'
    checksum_type: str | None = None
    part_checksums: tuple[str, ...] = ()  # in the order of `parts`
    identity: str = ""


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
    """List a bucket's open uploads by key, then upload id. Reply: `Uploads`.

    Keys that hold `delimiter` after `prefix` roll up into common prefixes, as in `ListObjects`.
    """

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    after_key: str = ""
    after_upload_id: str = ""
    limit: int = 1000


class Uploads(Message, frozen=True):
    """Reply to `ListUploads`. The next two continue it where it is truncated."""

    uploads: tuple[UploadInfo, ...]
    truncated: bool
    common_prefixes: tuple[str, ...] = ()
    next_key: str = ""
    next_upload_id: str = ""


# --- the extension -------------------------------------------------------------------------------


class KvMatch(Message, frozen=True):
    """How long a prefix is stored. Reply: `Matched`."""

    bucket: str
    chunk_keys: tuple[str, ...]


class Matched(Message, frozen=True):
    """Reply to `KvMatch`."""

    matched: int
    chunk_tokens: int = 0  # of the bucket's KV layout; 0 where it has none


class ReadPass(msgspec.Struct, frozen=True):
    """Leave for a session to get from a bucket by itself, as a gateway may give it: whoever signed
    may read all of the bucket, by the accounts and buckets of these versions.
    """

    access_key: str  # that signed; the session must have been opened with the same
    version: int  # of the accounts
    buckets_version: int
    lives_s: float | None = None  # until the key expires; None where it does not


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
    read_pass: ReadPass | None = None  # for the session whose target it names


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
    WHOLE = "whole"  # the client says that it computes nothing between layers
    DISBELIEVED = "disbelieved"  # told, measured or learned, but shorter than a layer can take
    NONE = "none"


class DeliveryAccepted(Message, frozen=True):
    """The delivery is planned and, with a target, running."""

    delivery: str  # the mode chosen: layerwise or chunkwise
    chunk_count: int
    layer_bytes: int  # bytes of one layer payload
    body_bytes: int  # bytes of the response body; 0 with a target
    rate_bytes_per_s: int | None = None  # when it begins; None where the policy assigns none
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
    """Reply to `LeaseTarget`; the target's memory file is beside it.

    Memory that a fabric reaches has none: there the gateway sends the payload in data frames, an
    empty one at the end, before `EndLease`.
    """


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


class CheckPut(Message, frozen=True):
    """Ask whether quotas leave room for a put of at least so many bytes. Reply: `Done`."""

    bucket: str
    identity: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class TakeRequests(Message, frozen=True):
    """Take from what a tenant and a bucket may still request. Reply: `RequestsTaken`.

    A gateway takes several at a time, so that most requests need no round trip.
    """

    identity: str
    bucket: str
    wanted: Annotated[int, msgspec.Meta(ge=1, le=1000)]


class RequestsTaken(Message, frozen=True):
    """Reply to `TakeRequests`: how many may be served now; with none, when to ask again."""

    granted: int
    retry_after_s: float = 0.0
    limited: bool = True  # False: there is no quota of requests, ask again after a while


class CreateSession(Message, frozen=True):
    """Ask for a ticket to the target socket. Reply: `SessionTicket`."""

    identity: str
    access_key: str = ""  # that signed


class JoinForClient(Message, frozen=True):
    """Begin a session for a client behind the gateway. Reply: `SessionJoined` (target_messages).

    From then on the connection is that session's, until either side closes it: the gateway passes
    the client's messages on, and the storage server's back.
    """

    identity: str
    access_key: str = ""  # that signed


class SessionTicket(Message, frozen=True):
    """A ticket, good once and for a short time, and where to present it."""

    ticket: bytes
    socket_path: str
    host_id: str  # boot id of the storage server's host
    expires_s: float  # seconds from now


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
    | JoinForClient
    | GetEngineStatus
    | CheckEngine
    | SetPolicy
    | PinObjects
    | GetSchedule
    | SetSchedule
    | GetTraces
    | ConfigureBucket
    | ReplaceAttributes
    | CheckPut
    | TakeRequests
    | GetUsage
    | GetMetrics
    | SetLogLevel
    | Drain
    | WatchDirectory
    | ChangeAccounts
    | ExportAccounts
    | ImportAccounts
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
    | SessionJoined
    | EngineState
    | CheckProgress
    | CheckEnded
    | ObjectsPinned
    | ScheduleState
    | Traces
    | RequestsTaken
    | Usage
    | Metrics
    | Directory
    | AccountsChanged
    | AccountsExported
)
