"""Which storage server a request has to go to: the one that holds the target which it names."""

from __future__ import annotations

from objectcache_schemas.descriptor import SERVER_ID_BYTES, Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.kv import KvGet, KvPut
from objectcache_schemas.messages.leases import LeaseTarget
from objectcache_schemas.messages.message import Message


def target_server(request: Message) -> bytes | None:
    """The id of the server, with which the target's begins; None where the request names none."""
    match request:
        case KvGet() | KvPut():
            return _of_descriptor(request.descriptor)
        case LeaseTarget():
            return request.target_id[:SERVER_ID_BYTES]
        case _:
            return None


def _of_descriptor(descriptor: bytes) -> bytes | None:
    try:
        target = Descriptor.target_of(descriptor)
    except InvalidRequest:
        return None  # which the server says
    return None if target is None else target.target_id[:SERVER_ID_BYTES]
