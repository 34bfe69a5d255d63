"""Puts out of memory that the storage server reads by itself: mapped, or over a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectcache.channel import requests
from objectcache.channel.responses import PutResult, parse_reply
from objectcache.core import ClientCore
from objectcache.landing.refusals import was_refused
from objectcache.landing.regions import Landing
from objectcache.landing.registered_memory import RegisteredMemory
from objectcache.landing.targets import SessionTarget
from objectcache.puts.put_request import PutRequest
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import Busy, InvalidRequest
from objectcache_schemas.limits import MIB

STORED_BYTES_PER_S_MIN = 32 * MIB  # a server that stores slower than this is taken for dead
NO_EVENTS_TAG = 0


@dataclass(frozen=True, slots=True)
class HeldPayload:
    """The caller's target in which a payload lies in one run, and where in it it begins."""

    memory: RegisteredMemory
    target: SessionTarget
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class RegisteredPayload:
    """A payload in registered memory, from `offset_bytes` on; `put_registered` lets the memory go.

    It is registered with `session`, at the latest when it is put.
    """

    transport: str
    session: TargetSession
    landing: Landing
    offset_bytes: int


def held_payload(
    core: ClientCore, put: PutRequest, parts: Sequence[memoryview]
) -> HeldPayload | None:
    """Where the payload lies already; None where that is in no target, or in none that the put may
    come out of.
    """
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    begin = end = arrays[0].ctypes.data
    for array in arrays:
        if array.ctypes.data != end:
            return None
        end += len(array)
    return held_run(core, put, begin, end - begin)


def held_run(
    core: ClientCore, put: PutRequest, address: int, length_bytes: int
) -> HeldPayload | None:
    """The same, for one run of memory."""
    for memory in core.memories(put.transport):
        found = memory.targets.holding(address, length_bytes)
        if found is not None:
            return HeldPayload(memory, *found)
    return None


def claim_held(held: HeldPayload) -> RegisteredPayload | None:
    """Hold the target for a put; None where it was closed or lost. Raises `Unavailable`."""
    session = held.memory.sessions.session()
    landing = held.target.claim_for_put()
    if landing is None:
        return None
    return RegisteredPayload(held.memory.transport, session, landing, held.offset_bytes)


def memory_for_payload(core: ClientCore, put: PutRequest) -> RegisteredPayload | None:
    """Memory of the client's own for a payload that lies elsewhere: shared memory, unless another
    kind was demanded. Raises `Unavailable`.

    Where there is no room it is None, or raises what the pool has against it if it was demanded.
    """
    memory = core.memory(put.transport)
    session = memory.sessions.session()
    try:
        landing = memory.pool.lease(put.payload_bytes, 0.0)
    except (Busy, InvalidRequest):
        if put.demands_registered_memory:
            raise
        return None
    return RegisteredPayload(memory.transport, session, landing, 0)


def put_registered(core: ClientCore, put: PutRequest, payload: RegisteredPayload) -> PutResult:
    """Have the server store what lies in the memory; it is not read any more afterwards.

    Raises the server's refusal, `Unavailable`, and `NotFound` (NoSuchTarget) where the session or
    the target ended meanwhile.
    """
    landing = payload.landing
    try:
        target = _memory_target(put, payload)
        request = requests.put(put.bucket, replace(put.descriptor, rdma_target=target), ())
        patience_s = put.payload_bytes / STORED_BYTES_PER_S_MIN
        with payload.session.attended():
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


def _memory_target(put: PutRequest, payload: RegisteredPayload) -> MemoryTarget:
    assert payload.landing.region is not None
    return MemoryTarget(
        transport=payload.transport,
        target_id=payload.landing.region.target_id(payload.session),
        offset_bytes=payload.offset_bytes,
        length_bytes=put.payload_bytes,
        tag=NO_EVENTS_TAG,
    )
