"""The extension: prefixes matched, delivered and stored."""

from __future__ import annotations

import msgspec

from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest, WireError
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.messages.reads import BodySent
from objectcache_schemas.messages.writes import SendData


class Matched(Message, frozen=True):
    """Reply to `KvMatch`."""

    matched: int
    chunk_tokens: int = 0  # of the bucket's KV layout; 0 where it has none


@request(Matched, repeatable=True, changes=Changes.NOTHING)
class KvMatch(Message, frozen=True):
    """How long a prefix is stored."""

    bucket: str
    chunk_keys: tuple[str, ...]


class ReadPass(msgspec.Struct, frozen=True):
    """Leave for a session to get from a bucket by itself, as a gateway may give it: whoever signed
    may read all of the bucket, by the accounts and buckets of these versions.
    """

    access_key: str  # that signed; the session must have been opened with the same
    version: int  # of the accounts
    buckets_version: int
    lives_s: float | None = None  # until the key expires; None where it does not


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
    content: str = ""  # a digest of its objects' ETags
    directory_bytes: int = 0  # before the first layer of an encoded payload; 0: it is plain

    def goes_on(self) -> bool:
        return True


class DeliveryEnded(Message, frozen=True):
    """A delivery into a target has ended; `error` None is success."""

    payload_bytes: int
    error: WireError | None = None
    failed_layer: int | None = None


def _has_no_target(message: KvGet | KvPut, limits: Limits) -> bool:
    """Whether no delivery writes into a client's memory, and no put is stored out of it without a
    `CommitPut`; what is no descriptor does neither.
    """
    try:
        return Descriptor.target_of(message.descriptor) is None
    except InvalidRequest:
        return True


@request(
    DeliveryAccepted,
    DeliveryEnded,
    BodySent,
    Done,
    repeatable=_has_no_target,
    changes=Changes.NOTHING,
)
class KvGet(Message, frozen=True):
    """Begin a delivery."""

    bucket: str
    identity: str  # who asks; a target must belong to the same
    request_id: str
    descriptor: bytes  # as it came over HTTP; the storage server parses and checks it
    path: str = ""  # that the request forces, one of `DeliveryPath`; empty is the server's choice
    client_s: float = 0.0  # that the client spent before it sent the request, as it says
    gateway_s: float = 0.0  # that the gateway spent before it sent this
    traceparent: str = ""  # W3C Trace Context, where the request is traced
    read_pass: ReadPass | None = None  # for the session whose target it names


class KvStored(Message, frozen=True):
    """Reply to `CommitPut` of a kv-put, and to a `KvPut` with a target."""

    stored: int  # chunks that are new
    existing: int  # chunks that were stored already, with the same bytes


@request(SendData, KvStored, Done, repeatable=_has_no_target, changes=Changes.PUTS)
class KvPut(Message, frozen=True):
    """Begin storing chunks, all or none. Reply: `SendData`; the data is the payload alone.

    Where the descriptor has an `rdma_target` the payload lies there, and the reply is `KvStored`.
    """

    bucket: str
    identity: str  # who asks; a target must belong to the same
    descriptor: bytes
