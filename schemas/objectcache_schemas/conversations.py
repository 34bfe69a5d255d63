"""Messages between the gateway and the storage server.

One connection carries one request at a time, as an HTTP/1.1 connection does: cancelling is closing,
backpressure is the socket's own. Every message is a msgpack map whose `op` names its class. Frames
are those of `messages.frames`.

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
    session  G JoinForClient                  S SessionJoined, then as in messages.sessions
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

from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.buckets import (
    Bucket,
    Buckets,
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    ListBuckets,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.handshake import Done, Welcome
from objectcache_schemas.messages.kv import (
    DeliveryAccepted,
    DeliveryEnded,
    KvGet,
    KvMatch,
    KvPut,
    KvStored,
    Matched,
)
from objectcache_schemas.messages.leases import LeaseTarget, TargetLeased
from objectcache_schemas.messages.quotas import (
    CheckPut,
    GetUsage,
    RequestsTaken,
    TakeRequests,
    Usage,
)
from objectcache_schemas.messages.reads import (
    BodySent,
    CloseObject,
    Listing,
    ListObjects,
    Object,
    ObjectOpened,
    OpenObject,
    SendBody,
    StatObject,
)
from objectcache_schemas.messages.sessions import (
    CreateSession,
    JoinForClient,
    SessionJoined,
    SessionTicket,
)
from objectcache_schemas.messages.uploads import (
    AbortUpload,
    CompleteUpload,
    CreateUpload,
    ListParts,
    ListUploads,
    Parts,
    Upload,
    Uploads,
)
from objectcache_schemas.messages.writes import (
    AbortPut,
    CommitPut,
    CopyObject,
    CopyPart,
    DeleteObjects,
    ObjectsPinned,
    PinObjects,
    PutObject,
    PutPart,
    ReplaceAttributes,
    SendData,
    Stored,
)
from objectcache_schemas.operators.account_changes import (
    AccountsChanged,
    AccountsExported,
    ChangeAccounts,
    Directory,
    ExportAccounts,
    ImportAccounts,
    WatchDirectory,
)
from objectcache_schemas.operators.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckProgress,
    EngineState,
    GetEngineStatus,
)
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState, SetSchedule
from objectcache_schemas.operators.server_state import (
    Drain,
    GetHealth,
    GetMetrics,
    Health,
    Metrics,
    SetLogLevel,
)
from objectcache_schemas.operators.traces import GetTraces, Traces

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
