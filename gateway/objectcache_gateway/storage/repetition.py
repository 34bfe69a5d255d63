"""Which requests to the storage server may be sent twice.

A connection that ends without a reply does not tell whether the request was carried out.
"""

from __future__ import annotations

from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.buckets import GetBucket, ListBuckets
from objectcache_schemas.messages.kv import KvGet, KvMatch, KvPut
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.reads import ListObjects, OpenObject, StatObject
from objectcache_schemas.messages.sessions import CreateSession
from objectcache_schemas.messages.uploads import ListParts, ListUploads
from objectcache_schemas.messages.writes import DeleteObjects, PutObject, PutPart
from objectcache_schemas.operators.server_state import GetHealth

_READS = (
    GetHealth,
    GetBucket,
    ListBuckets,
    StatObject,
    OpenObject,
    ListObjects,
    ListParts,
    ListUploads,
    KvMatch,
    CheckPut,
)
# The puts' openings store nothing before their CommitPut, a ticket that nobody uses expires, and
# deleting what is deleted is no error.
_HARMLESS = (PutObject, PutPart, CreateSession, DeleteObjects)


def is_repeatable(request: Message, limits: Limits) -> bool:
    """Whether carrying a request out twice is the same as once, replies included."""
    if isinstance(request, KvGet | KvPut):
        return not _has_target(request, limits)
    if isinstance(request, PutObject):
        return request.data is None
    return isinstance(request, _READS + _HARMLESS)


def _has_target(request: KvGet | KvPut, limits: Limits) -> bool:
    """Whether a delivery writes into a client's memory, or a put is stored out of it without a
    CommitPut; one that is refused does neither.
    """
    of_put = isinstance(request, KvPut)
    try:
        descriptor = Descriptor.from_bytes(request.descriptor, limits, of_put=of_put)
        return descriptor.rdma_target is not None
    except InvalidRequest:
        return False
