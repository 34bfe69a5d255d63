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

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from objectcache_schemas.errors import WireError
from objectcache_schemas.messages import (
    buckets,
    kv,
    leases,
    quotas,
    reads,
    sessions,
    uploads,
    writes,
)
from objectcache_schemas.messages.handshake import Welcome
from objectcache_schemas.messages.message import REQUESTS, Message
from objectcache_schemas.messages.reads import CloseObject, SendBody
from objectcache_schemas.messages.writes import AbortPut, CommitPut
from objectcache_schemas.operators import (
    account_changes,
    engine_status,
    schedule,
    server_list,
    server_state,
    traces,
)

# Each declares its requests as it is imported.
DECLARING = (
    *(buckets, kv, leases, quotas, reads, sessions, uploads, writes),
    *(account_changes, engine_status, schedule, server_list, server_state, traces),
)

BodyChoice = SendBody | CloseObject
PutEnd = CommitPut | AbortPut

if TYPE_CHECKING:
    GatewayRequest = Message
    StorageReply = Message | WireError
else:  # as decoders need them: each class that was declared
    GatewayRequest = reduce(or_, REQUESTS)
    _REPLIES = {reply: None for row in REQUESTS.values() for reply in row.replies}
    StorageReply = reduce(or_, (WireError, Welcome, *_REPLIES))
