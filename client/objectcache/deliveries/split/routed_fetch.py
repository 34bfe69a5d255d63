"""Fetches of a client that has relays: where a source refuses, fails or is silent, the layers that
are missing come from another one, under the same delivery.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from objectcache.channel.responses import DeliveryHead
from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.begun_fetch import BODY, BegunFetch
from objectcache.deliveries.consumption import ConsumptionReports, no_reports
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.feedback import spare_events_of_parts, tell_sessions
from objectcache.deliveries.fetch_into_body import begin_body, teaching, with_learned_window
from objectcache.deliveries.fetch_into_target import TargetPlace, ask_session
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import BodyReceiver
from objectcache.deliveries.split.copying_receiver import CopyingReceiver
from objectcache.deliveries.split.split_fetch import begin_parts, head_of_parts
from objectcache.deliveries.split.split_parts import SplitPart, consecutive_parts
from objectcache.deliveries.split.split_receiver import PartAttempt, SplitReceiver
from objectcache.landing.refusals import is_going, was_refused
from objectcache.landing.regions import Landing, SharedLanding, nothing
from objectcache.routes.awaited_bytes import AwaitedBytes
from objectcache.routes.client_routes import SILENCE_S_MIN, ClientRoutes, RelayLine, RoutePlan
from objectcache.routes.taken_route import TakenRoute
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing
from objectcache_schemas.errors import (
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unavailable,
)

PATIENCE_SHARE = 0.5  # of the caller's silence; the rest is for going on elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class RouteSource:
    """Where a part may come from: the gateway's side, or a relay. `in_body` brings it in a body
    though there may be a session.
    """

    core: ClientCore
    line: RelayLine | None = None
    in_body: bool = False

    @property
    def word(self) -> str:
        """The route of what comes from here."""
        return "direct" if self.line is None else self.line.word


def begin_routed(
    core: ClientCore,
    routes: ClientRoutes,
    request: FetchRequest,
    plan: RoutePlan,
    fetch: Callable[[ClientCore, FetchRequest], Delivery],
) -> BegunFetch:
    """Returns when every part was accepted by somebody. Raises the refusal of a direct get.

    `fetch` is how what a fetcher was to dequantise comes without it: encoded, where the caller
    takes encodings.
    """
    silent = set[RelayLine]()
    try:
        landing = _landing(core, routes, request, plan, silent)
    except BaseException:
        plan.end()
        raise
    asking = _Asking(core, routes, request, plan, landing, fetch, silent)

    def receiver_in(landing: Landing, progress: LayerProgress) -> SplitReceiver[RouteSource]:
        asking.landing = landing
        return SplitReceiver(
            landing, progress, asking.parts, asking.ask, asking.sources, asking.lost
        )

    try:
        begun = begin_parts(
            core,
            request,
            landing,
            lambda: _landing(core, routes, request, plan, silent),
            receiver_in,
        )
    except BaseException as error:
        plan.end()
        if isinstance(error, ObjectCacheError) and asking.refused_directly is not None:
            raise asking.refused_directly from None
        raise
    receiver, progress = begun.receiver, begun.progress
    plan.follow(progress)
    heads = [part.attempt.head for part in receiver.parts if part.attempt is not None]
    head = heads[0] if len(heads) == 1 else head_of_parts(heads, asking.chunk_count)
    consumers = receiver.consumers
    least_silence_s = min(SILENCE_S_MIN, routes.settings.timeout_s or SILENCE_S_MIN)
    spare_events_of_parts(progress, consumers, least_silence_s)
    reports: ConsumptionReports
    if request.wants_the_whole:
        reports = no_reports(progress)
    elif consumers:
        layer_bytes = head.chunk_count * request.descriptor.per_layer_chunk_bytes
        reports = tell_sessions(progress, consumers, layer_bytes)
    else:
        reports = teaching(core, request, head.chunk_count, progress)
    transport = core.memory(request.memory_choice).transport if consumers else BODY
    return BegunFetch(
        head,
        progress,
        begun.landing,
        receiver,
        reports,
        transport,
        asking.taken,
        is_dequantised=request.is_dequantised_away,
    )


def _landing(
    core: ClientCore,
    routes: ClientRoutes,
    request: FetchRequest,
    plan: RoutePlan,
    silent: set[RelayLine],
) -> Landing:
    """Memory that every source can fill which may be asked. Relays that do not answer meanwhile are
    `silent` from then on.
    """
    if request.target is not None:
        return request.target.claim(request.timeout_s)
    choice = request.memory_choice
    if choice is TransportChoice.AUTO:
        over_relays = any(_has_session_over(routes, one, silent) for one in plan.relays)
        if not over_relays and not _has_session(core):
            choice = TransportChoice.BODY
    if choice is TransportChoice.BODY:
        return Landing(np.empty(request.landed_bytes, np.uint8), None, nothing)
    return core.memory(choice).pool.lease(request.landed_bytes, request.timeout_s)


def _has_session(core: ClientCore) -> bool:
    try:
        core.shared.sessions.session()
    except ObjectCacheError:
        return False
    return True


def _has_session_over(routes: ClientRoutes, line: RelayLine, silent: set[RelayLine]) -> bool:
    if line in silent or routes.is_left_alone(line):
        return False
    asked_s = time.monotonic()
    try:
        line.core.shared.sessions.session()
    except ObjectCacheError as error:
        if _came_too_late(error):
            silent.add(line)
            routes.silent(line, asked_s, error.message)
        return False
    return True


class _Asking:
    """Asks sources for parts of one delivery. What the first of them answers holds for the others:
    the order of the bytes, and how many chunks there are.
    """

    def __init__(
        self,
        core: ClientCore,
        routes: ClientRoutes,
        request: FetchRequest,
        plan: RoutePlan,
        landing: Landing,
        fetch: Callable[[ClientCore, FetchRequest], Delivery],
        silent: set[RelayLine],
    ) -> None:
        self._fetch = fetch
        self._silent = silent
        self._core = core
        self._routes = routes
        self._request = request
        self._plan = plan
        self.landing = landing
        no_session = request.comes_in_body or landing.region is None
        self._whole = with_learned_window(core, request) if no_session else request.descriptor
        self._choice = TransportChoice.BODY if no_session else request.memory_choice
        self._may_come_in_body = request.memory_choice is TransportChoice.AUTO
        self._accepted: DeliveryHead | None = None
        self.parts = consecutive_parts([part.chunk_count for part in plan.parts])
        self._begun: set[int] = set()  # parts that were asked for as planned
        self._direct = RouteSource(core)
        self._of_line = dict[RelayLine, RouteSource]()
        self._direct_in_body = RouteSource(core, in_body=True)
        self._words: dict[SplitPart, str] = {}
        self._lock = threading.Lock()
        self._refusals: dict[SplitPart, ObjectCacheError] = {}  # the last of each part
        self._because = ""
        self.refused_directly: ObjectCacheError | None = None
        self.taken = TakenRoute("", plan.reason)

    @property
    def chunk_count(self) -> int:
        """Of the whole delivery."""
        return len(self._whole.chunk_keys)

    def sources(self, number: int) -> Iterator[RouteSource]:
        """What was planned for this part, then directly, then over whatever else there is."""
        planned = self._plan.parts[number].relay
        if planned is not None:
            yield self._over(planned)
        yield self._direct
        if self._request.is_dequantised_away:
            return  # which that is without a fetcher, by whatever way there is
        refusal = self._refusals.pop(self.parts[number], None)
        if refusal is not None and is_going(refusal):
            yield RouteSource(self._core)  # another server has its session now
        if self._may_come_in_body and self._choice is not TransportChoice.BODY:
            yield self._direct_in_body
        if isinstance(refusal, Unavailable | Busy):
            for line in self._routes.others([planned]):
                yield self._over(line)

    def _over(self, line: RelayLine) -> RouteSource:
        with self._lock:
            return self._of_line.setdefault(line, RouteSource(line.core, line))

    def lost(self, chunks: SplitPart, source: RouteSource, failure: ObjectCacheError) -> None:
        """A source that had accepted a part has failed. What failed upstream of a relay has a cause
        that says so.
        """
        cause = failure.__cause__
        is_upstream = isinstance(cause, ObjectCacheError) and not isinstance(cause, Unavailable)
        if source.line is not None and not is_upstream:
            self._routes.failed(source.line, "failed", failure.message)
        self._refusals[chunks] = failure
        self._because = f"{source.word} failed: {failure.message}"

    def ask(
        self, chunks: SplitPart, layer: int, source: RouteSource, settled: Callable[[bool], None]
    ) -> PartAttempt:
        """See `AskForPart`."""
        try:
            descriptor = self._descriptor(chunks, layer)
            layer_bytes = len(descriptor.chunk_keys) * descriptor.per_layer_chunk_bytes
            assignment = self._assignment(chunks, layer, source, layer_bytes)
        except BaseException:
            settled(True)
            raise
        asked_s = time.monotonic()
        try:
            attempt = self._asked(chunks, descriptor, source, settled)
        except BaseException as error:
            assignment.end()
            if isinstance(error, ObjectCacheError):
                if source.line is not None and _came_too_late(error):
                    self._routes.silent(source.line, asked_s, error.message)
                self._note_refusal(chunks, source, error)
            raise
        progress, is_at_full_rate = attempt.progress, descriptor.rate_bytes_per_s is None
        layer_bytes = attempt.head.chunk_count * descriptor.per_layer_chunk_bytes

        def heard() -> None:
            assignment.heard(progress, layer_bytes, is_at_full_rate=is_at_full_rate)

        progress.listen(heard)
        heard()
        self._note(chunks, source)
        return attempt

    def _assignment(
        self, chunks: SplitPart, layer: int, source: RouteSource, layer_bytes: int
    ) -> AwaitedBytes:
        """What was planned, where that is asked for first, or another one."""
        for number, part in enumerate(self._plan.parts):
            is_this = number not in self._begun and part.relay is source.line
            if is_this and self.parts[number] == chunks and not source.in_body:
                self._begun.add(number)
                return part.assignment
        length_bytes = (self._whole.end_layer - layer) * layer_bytes
        return self._routes.assign(source.line, length_bytes)

    def _note_refusal(
        self, chunks: SplitPart, source: RouteSource, error: ObjectCacheError
    ) -> None:
        self._refusals[chunks] = error
        self._because = f"{source.word} refused: {error.message}"
        if source.line is None:
            self.refused_directly = error
        elif isinstance(error, Busy):
            self._routes.was_busy(source.line)
        elif isinstance(error, InvalidRequest):
            self._routes.was_unfit(source.line, error.message)
        elif not _would_be_refused_directly(error):
            self._routes.failed(source.line, "refused", error.message)

    def _note(self, chunks: SplitPart, source: RouteSource) -> None:
        with self._lock:
            self._words[chunks] = source.word
            words = sorted((part.first, part.end, word) for part, word in self._words.items())
            word = words[0][2]
            if any(other != word for _, _, other in words):
                word = "split:" + ",".join(f"{name}={end - first}" for first, end, name in words)
            self.taken.change(word, self._because or self._plan.reason)

    def _asked(
        self,
        chunks: SplitPart,
        descriptor: Descriptor,
        source: RouteSource,
        settled: Callable[[bool], None],
    ) -> PartAttempt:
        if self._request.is_dequantised_away and source.line is None:
            attempt = self._dequantised_here(descriptor, settled)
            self._check(attempt, len(descriptor.chunk_keys))
            return attempt
        try:
            request, silence_s = self._bounded(descriptor, source)
            session = self._session(source)
        except BaseException:
            settled(True)
            raise
        if session is None:
            attempt = self._in_body(chunks, descriptor, source, request, silence_s, settled)
        else:
            attempt = self._into_memory(descriptor, source, request, session, silence_s, settled)
        self._check(attempt, len(descriptor.chunk_keys))
        return attempt

    def _session(self, source: RouteSource) -> TargetSession | None:
        """None where it comes in a body. Raises what is in the way where it must not: a fetcher
        dequantises over sessions alone, and a relay that does not answer is asked for nothing else.
        """
        line = source.line
        if line is not None and (line in self._silent or self._routes.is_left_alone(line)):
            raise Unavailable("it did not answer in time, or failed, and is left alone")
        is_dequantised = self._request.is_dequantised_away
        if source.in_body or self._choice is TransportChoice.BODY:
            if is_dequantised:
                raise Unavailable("there is no session to dequantise into its memory")
            return None
        try:
            return source.core.memory(self._choice).sessions.session()
        except Unavailable as error:
            is_silent = line is not None and (
                _came_too_late(error) or self._routes.is_left_alone(line)
            )
            if self._may_come_in_body and not is_dequantised and not is_silent:
                return None
            raise

    def _descriptor(self, chunks: SplitPart, layer: int) -> Descriptor:
        whole = self._whole
        if len(self._plan.parts) > 1:
            return chunks.descriptor(whole, layer)
        return (
            whole
            if layer == whole.first_layer
            else replace(whole, layers=(layer, whole.end_layer), delivery=DeliveryMode.LAYERWISE)
        )

    def _bounded(
        self, descriptor: Descriptor, source: RouteSource
    ) -> tuple[FetchRequest, float | None]:
        """The request with the silence that this source may keep, and that silence; None where it
        is the caller's.
        """
        if source.line is None:
            return self._request, None
        silence_s = self._silence_s(source.line, descriptor)
        return replace(self._request, timeout_s=silence_s), silence_s

    def _silence_s(self, line: RelayLine, descriptor: Descriptor) -> float:
        """How long the relay may bring nothing of it, by what is known of the relay now."""
        count = len(descriptor.chunk_keys)
        silence_s = self._routes.silence_s(
            line,
            descriptor.payload_bytes(count),
            count * descriptor.per_layer_chunk_bytes,
            descriptor.rate_bytes_per_s,
            descriptor.compute_window_s,
        )
        return min(silence_s, PATIENCE_SHARE * self._request.timeout_s)

    def _skip_bytes(self, descriptor: Descriptor) -> int:
        """What lies in the memory before the first layer that is asked for."""
        layers = descriptor.first_layer - self._whole.first_layer
        return layers * self.chunk_count * self._request.landed_slice_bytes

    def _dequantised_here(
        self, descriptor: Descriptor, settled: Callable[[bool], None]
    ) -> PartAttempt:
        """A delivery of its own, of chunks as they are stored, into whose layers' places what was
        dequantised is copied. It is what a fetcher would write there, so one that was given up does
        no harm by writing still.
        """
        share = Landing(self.landing.array, None, settled)
        asked = replace(self._request, descriptor=descriptor, is_dequantised_away=False)
        try:
            delivery = self._fetch(self._core, asked)
        except BaseException:
            share.settle()
            raise
        assert delivery.head is not None
        progress = LayerProgress(descriptor.first_layer, descriptor.end_layer)
        receiver = CopyingReceiver(delivery, share, progress, self._skip_bytes(descriptor))
        return PartAttempt(delivery.head, progress, receiver)

    def _in_body(
        self,
        chunks: SplitPart,
        descriptor: Descriptor,
        source: RouteSource,
        request: FetchRequest,
        silence_s: float | None,
        settled: Callable[[bool], None],
    ) -> PartAttempt:
        share = Landing(self.landing.array, None, settled)
        try:
            exchange, head = begin_body(source.core, request, descriptor)
        except BaseException:
            share.settle()
            raise
        progress = LayerProgress(
            descriptor.first_layer, descriptor.end_layer, silence_s_max=silence_s
        )
        shape = head.shape(descriptor)
        slice_bytes = descriptor.per_layer_chunk_bytes
        is_part = len(self._plan.parts) > 1
        receiver = BodyReceiver(
            exchange,
            share,
            progress,
            shape,
            self._skip_bytes(descriptor) + (chunks.first * slice_bytes if is_part else 0),
            self.chunk_count * slice_bytes if is_part else None,
        )
        if silence_s is None:
            return PartAttempt(head, progress, receiver)
        exchange.wait_forever()  # its silence is watched

        def cut(why: str) -> None:
            self._was_silent(source, silence_s, why)
            progress.fail(why)
            receiver.cancel()

        more_s = self._more_s(source, descriptor, progress, silence_s)
        return PartAttempt(head, progress, receiver, cut=cut, more_s=more_s)

    def _more_s(
        self,
        source: RouteSource,
        descriptor: Descriptor,
        progress: LayerProgress,
        silence_s: float,
    ) -> Callable[[], float] | None:
        """How much longer a relay may bring nothing of one delivery: while it moves others' bytes
        it is no silent one, for as long as the caller's patience leaves time to go on elsewhere.
        Where it has turned out to be slow meanwhile, a silence is as long as its rate has it now.
        Of a body each byte counts, though the receiver reads on for many.
        """
        line = source.line
        if line is None:
            return None
        patience_s = PATIENCE_SHARE * self._request.timeout_s - silence_s

        seen_bytes = 0

        def more_s() -> float:
            nonlocal seen_bytes
            came_bytes = progress.came_bytes
            if came_bytes > seen_bytes:
                seen_bytes = came_bytes
                progress.stir()
            left_s = progress.silence_left_s() or 0.0
            now_silence_s = max(silence_s, self._silence_s(line, descriptor))
            moving_s = self._routes.moved_s(line) + now_silence_s - time.monotonic()
            return min(max(moving_s, left_s + now_silence_s - silence_s), left_s + patience_s)

        return more_s

    def _into_memory(
        self,
        descriptor: Descriptor,
        source: RouteSource,
        request: FetchRequest,
        session: TargetSession,
        silence_s: float | None,
        settled: Callable[[bool], None],
    ) -> PartAttempt:
        memory = source.core.memory(self._choice)
        share = SharedLanding(self.landing, session, settled)
        progress = LayerProgress(
            descriptor.first_layer, descriptor.end_layer, silence_s_max=silence_s
        )
        skip_bytes = self._skip_bytes(descriptor)
        slice_count = (self._whole.end_layer - self._whole.first_layer) * self.chunk_count
        length_bytes = slice_count * self._request.landed_slice_bytes - skip_bytes
        place = TargetPlace(memory.transport, skip_bytes, length_bytes)
        try:
            head, receiver, tag = ask_session(
                source.core, request, descriptor, place, share, progress, session
            )
        except BaseException as error:
            if isinstance(error, ObjectCacheError) and is_going(error):
                memory.sessions.leave(session)
            if was_refused(error):
                share.settle()
            else:
                is_silent = isinstance(error.__cause__, TimeoutError)
                if is_silent and silence_s is not None and self._is_still(source, silence_s):
                    session.give_up(f"{source.word} has not answered for {silence_s:g} s")
                share.withdraw()
            raise
        consumer = (session, tag)
        if silence_s is None:
            return PartAttempt(head, progress, receiver, consumer)

        def cut(why: str) -> None:
            self._was_silent(source, silence_s, why)
            session.give_up(f"{source.word}: {why}")  # nothing is written over it any more
            receiver.cancel()

        more_s = self._more_s(source, descriptor, progress, silence_s)
        return PartAttempt(head, progress, receiver, consumer, cut, more_s, share.withdraw)

    def _was_silent(self, source: RouteSource, silence_s: float, why: str) -> None:
        if source.line is not None:
            self._routes.silent(source.line, time.monotonic() - silence_s, why)

    def _is_still(self, source: RouteSource, silence_s: float) -> bool:
        """Whether a relay has moved nothing at all, of any delivery, for so long."""
        line = source.line
        return line is None or self._routes.moved_s(line) + silence_s < time.monotonic()

    def _check(self, attempt: PartAttempt, asked_count: int) -> None:
        """What others have answered before holds for this one, too."""
        head, known = attempt.head, self._accepted
        is_alike = head.chunk_count == asked_count and (known is None or head.mode is known.mode)
        if known is None and len(self._plan.parts) == 1:
            self._accepted = head
            if head.chunk_count:
                keys = self._whole.chunk_keys[: head.chunk_count]
                self._whole = replace(
                    self._whole, chunk_keys=keys, delivery=head.mode, on_missing=OnMissing.FAIL
                )
            return
        if len(self._plan.parts) > 1:
            is_alike &= head.mode is DeliveryMode.LAYERWISE
        if not is_alike:
            attempt.receiver.start(self._core.threads)
            attempt.receiver.cancel()
            raise ObjectCacheError(
                f"{asked_count} chunks were asked for as before, and "
                f"{head.chunk_count} come {head.mode.value}"
            )


def _would_be_refused_directly(error: ObjectCacheError) -> bool:
    """Whether it says nothing of a relay: what is not there, and what the job's key may not do. Who
    does not know the key has codes of its own for that.
    """
    return isinstance(error, NotFound) or error.code == "AccessDenied"


def _came_too_late(error: BaseException) -> bool:
    """Whether it means that nothing was answered in time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return True
        cause = cause.__cause__
    return False
