"""Puts out of memory that the storage server reads by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectcache.channel import requests
from objectcache.channel.responses import PutResult, parse_reply
from objectcache.core import ClientCore
from objectcache.deliveries.fetching import SHARED_MEMORY
from objectcache.deliveries.put_request import PutRequest
from objectcache.deliveries.refusals import was_refused
from objectcache.memory.landing import Landing
from objectcache.memory.target_session import TargetSession
from objectcache.memory.targets import SharedMemoryTarget
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import Busy, InvalidRequest
from objectcache_schemas.limits import MIB

STORED_BYTES_PER_S_MIN = 32 * MIB  # a server that stores slower than this is taken for dead
NO_EVENTS_TAG = 0


@dataclass(frozen=True, slots=True)
class SharedPayload:
    """A payload in shared memory, from `offset_bytes` on; `put_shared` lets the memory go."""

    landing: Landing
    offset_bytes: int


def target_of(
    core: ClientCore, parts: Sequence[memoryview]
) -> tuple[SharedMemoryTarget, int] | None:
    """The caller's target in which the payload lies in one run already, and where it begins."""
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    begin = end = arrays[0].ctypes.data
    for array in arrays:
        if array.ctypes.data != end:
            return None
        end += len(array)
    return core.targets.holding(begin, end - begin)


def memory_for_payload(core: ClientCore, put: PutRequest) -> SharedPayload | None:
    """Memory of the client's own for a payload that lies elsewhere.

    Where there is no room it is None, or raises what the pool has against it if shared memory was
    demanded.
    """
    try:
        return SharedPayload(core.pool.lease(put.payload_bytes, 0.0), 0)
    except (Busy, InvalidRequest):
        if put.demands_shared_memory:
            raise
        return None


def put_shared(
    core: ClientCore, put: PutRequest, payload: SharedPayload, session: TargetSession
) -> PutResult:
    """Have the server store what lies in the memory; it is not read any more afterwards.

    Raises the server's refusal, `Unavailable`, and `NotFound` (NoSuchTarget) where the session or
    the target ended meanwhile.
    """
    landing = payload.landing
    try:
        target = _memory_target(put, payload, session)
        request = requests.put(put.bucket, replace(put.descriptor, rdma_target=target), ())
        patience_s = put.payload_bytes / STORED_BYTES_PER_S_MIN
        reply = core.channel.call(request, put.timeout_s + patience_s)
        result = parse_reply(reply.body, PutResult, "a put")
    except BaseException as error:
        if was_refused(error):
            landing.settle()
        else:
            landing.withdraw()
        raise
    landing.settle()
    return result


def _memory_target(put: PutRequest, payload: SharedPayload, session: TargetSession) -> MemoryTarget:
    assert payload.landing.region is not None
    return MemoryTarget(
        transport=SHARED_MEMORY,
        target_id=payload.landing.region.target_id(session),
        offset_bytes=payload.offset_bytes,
        length_bytes=put.payload_bytes,
        tag=NO_EVENTS_TAG,
    )
