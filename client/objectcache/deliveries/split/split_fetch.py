"""Fetches that several storage servers share: each writes its chunks of every layer into one
target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import msgspec

from objectcache.channel import requests
from objectcache.channel.responses import DeliveryHead, parse_match
from objectcache.core import ClientCore
from objectcache.deliveries.begun_fetch import BegunFetch
from objectcache.deliveries.consumption import no_reports
from objectcache.deliveries.feedback import tell_sessions
from objectcache.deliveries.fetch_into_target import TargetPlace, ask_session
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.split.split_parts import SplitPart, even_parts
from objectcache.deliveries.split.split_receiver import MemoryInDoubt, PartAttempt, S, SplitReceiver
from objectcache.landing.refusals import is_going, was_refused
from objectcache.landing.regions import Landing, SharedLanding
from objectcache.landing.registered_memory import RegisteredMemory
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing
from objectcache_schemas.errors import NotFound, ObjectCacheError

JOIN_S = 1.0  # for parts that were begun in vain


def begin_split(
    core: ClientCore, request: FetchRequest, memory: RegisteredMemory
) -> BegunFetch | None:
    """Returns when every server has accepted its part; None where the delivery is better left to
    one server: there are no two, or the prefix is not stored whole. Raises the refusal.
    """
    if not _may_split(core, request):
        return None
    sessions = memory.servers.sessions()
    if len(sessions) < 2:
        return None
    descriptor = _stored(core, request)
    if descriptor is None:
        return None
    try:
        return _begin(core, request, descriptor, memory)
    except NotFound as error:
        if error.code != "NoSuchKey" or descriptor.on_missing is OnMissing.FAIL:
            raise
        return None  # evicted since it was looked for


def _may_split(core: ClientCore, request: FetchRequest) -> bool:
    split_from_bytes = core.settings.split_from_bytes
    return 0 < split_from_bytes <= request.payload_bytes and _has_parts(request)


def _has_parts(request: FetchRequest) -> bool:
    descriptor = request.descriptor
    return (
        len(descriptor.chunk_keys) > 1
        and descriptor.delivery is not DeliveryMode.CHUNKWISE
        and descriptor.ring_layers is None
        and request.path in (None, DeliveryPath.AGG)
    )


def divisible(core: ClientCore, request: FetchRequest) -> FetchRequest | None:
    """The request for as much as is stored, layer by layer, of which several sources may each bring
    some chunks; None where there are no two, or it must come in another order.
    """
    if not _has_parts(request):
        return None
    descriptor = _stored(core, request)
    if descriptor is None:
        return None
    whole = replace(descriptor, delivery=DeliveryMode.LAYERWISE, on_missing=OnMissing.FAIL)
    return request if whole == request.descriptor else replace(request, descriptor=whole)


def _stored(core: ClientCore, request: FetchRequest) -> Descriptor | None:
    """The descriptor of as much of the prefix as is stored, where that may be less; None where too
    little is.
    """
    descriptor = request.descriptor
    if descriptor.on_missing is OnMissing.FAIL:
        return descriptor
    keys = descriptor.chunk_keys
    reply = core.channel.call(requests.match(request.bucket, keys), request.timeout_s)
    matched = parse_match(reply.body, len(keys))
    if matched < 2 or descriptor.payload_bytes(matched) < core.settings.split_from_bytes:
        return None
    return replace(descriptor, chunk_keys=keys[:matched])


def _begin(
    core: ClientCore,
    request: FetchRequest,
    descriptor: Descriptor,
    memory: RegisteredMemory,
) -> BegunFetch:
    sessions = memory.servers.sessions
    whole = replace(descriptor, on_missing=OnMissing.FAIL)
    parts = even_parts(len(whole.chunk_keys), max(1, len(sessions())))

    def in_turn(number: int) -> Sequence[TargetSession]:
        found = sessions()
        turn = number % max(1, len(found))
        return [*found[turn:], *found[:turn]]

    def lease() -> Landing:
        return memory.pool.lease(request.payload_bytes, request.timeout_s)

    def receiver_in(landing: Landing, progress: LayerProgress) -> SplitReceiver[TargetSession]:
        def ask(
            part: SplitPart, layer: int, session: TargetSession, settled: Callable[[bool], None]
        ) -> PartAttempt:
            return _ask_for_part(
                core, request, whole, part, layer, landing, session, memory, settled
            )

        return SplitReceiver(landing, progress, parts, ask, in_turn)

    landing = lease() if request.target is None else request.target.claim(request.timeout_s)
    begun = begin_parts(core, request, landing, lease, receiver_in)
    receiver, progress = begun.receiver, begun.progress
    heads = [part.attempt.head for part in receiver.parts if part.attempt is not None]
    layer_bytes = len(whole.chunk_keys) * whole.per_layer_chunk_bytes
    reports = (
        no_reports(progress)
        if request.wants_the_whole
        else tell_sessions(progress, receiver.consumers, layer_bytes)
    )
    head = head_of_parts(heads, len(whole.chunk_keys))
    return BegunFetch(head, progress, begun.landing, receiver, reports, memory.transport)


@dataclass(frozen=True, slots=True)
class BegunParts(Generic[S]):
    """Parts of which every one was accepted, and where they land."""

    landing: Landing
    progress: LayerProgress
    receiver: SplitReceiver[S]


def begin_parts(
    core: ClientCore,
    request: FetchRequest,
    landing: Landing,
    other: Callable[[], Landing],
    receiver_in: Callable[[Landing, LayerProgress], SplitReceiver[S]],
) -> BegunParts[S]:
    """Have every part begun: in `other` memory where somebody who did not accept a part may still
    write to it, unless that is the caller's. Raises the refusal.
    """
    refused: list[set[S]] = []
    while True:
        progress = request.progress(silence_s_max=request.timeout_s)
        receiver = receiver_in(landing, progress)
        for part, others in zip(receiver.parts, refused, strict=False):
            part.asked |= others
        try:
            receiver.begin(core.threads)
            return BegunParts(landing, progress, receiver)
        except BaseException as error:
            refused = [part.refused for part in receiver.parts]
            if request.target is not None:
                request.target.closing()
            receiver.abandon(core.threads)
            receiver.join(JOIN_S)
            if request.target is not None or not isinstance(error, MemoryInDoubt):
                raise
        landing = other()


def _ask_for_part(
    core: ClientCore,
    request: FetchRequest,
    whole: Descriptor,
    part: SplitPart,
    layer: int,
    landing: Landing,
    session: TargetSession,
    memory: RegisteredMemory,
    settled: Callable[[bool], None],
) -> PartAttempt:
    shared = SharedLanding(landing, session, settled)
    row_bytes = len(whole.chunk_keys) * whole.per_layer_chunk_bytes
    skip_bytes = (layer - whole.first_layer) * row_bytes
    payload_bytes = whole.payload_bytes(len(whole.chunk_keys))
    place = TargetPlace(memory.transport, skip_bytes, payload_bytes - skip_bytes)
    progress = LayerProgress(layer, whole.end_layer)
    try:
        asked = part.descriptor(whole, layer)
        head, receiver, tag = ask_session(core, request, asked, place, shared, progress, session)
    except BaseException as error:
        if isinstance(error, ObjectCacheError) and is_going(error):
            memory.servers.leave(session)
        if was_refused(error):
            shared.settle()
        else:
            shared.withdraw()
        if isinstance(error, NotFound) and error.details.missing_index is not None:
            missing = error.details.missing_index + part.first  # as the caller counts
            error.details = msgspec.structs.replace(error.details, missing_index=missing)
        raise
    if head.mode is not DeliveryMode.LAYERWISE or head.chunk_count != part.end - part.first:
        receiver.start(core.threads)
        receiver.cancel()
        raise ObjectCacheError(
            f"a server was asked for {part.end - part.first} chunks layer by layer, and delivers "
            f"{head.chunk_count} {head.mode.value}"
        )
    return PartAttempt(head, progress, receiver, (session, tag))


def head_of_parts(heads: Sequence[DeliveryHead], chunk_count: int) -> DeliveryHead:
    """What the servers answered, as one answer."""
    rates = [head.rate_bytes_per_s for head in heads]
    known = [rate for rate in rates if rate is not None]
    return replace(
        heads[0],
        chunk_count=chunk_count,
        rate_bytes_per_s=sum(known) if len(known) == len(rates) else None,
        path=DeliveryPath.AGG.value,
    )
