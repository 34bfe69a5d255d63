"""The receiving side of a delivery of which each part may come from several sources in turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from objectcache.channel.responses import DeliveryHead
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver
from objectcache.deliveries.split.split_parts import SplitPart
from objectcache.landing.regions import Landing
from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import ObjectCacheError, Unavailable

logger = logging.getLogger("objectcache.deliveries.split")

ENDING_S = 1.0  # within which a source that has brought all layers says that it writes no more

SETTLING_S = 1.0  # within which a source that was told to stop says that it has

S = TypeVar("S", bound=Hashable)  # a source: whoever can be asked for a part


class MemoryInDoubt(Unavailable):
    """Nobody else may be asked: a source may still write to the memory, and nobody knows what."""


@dataclass(eq=False, slots=True)
class PartAttempt:
    """What one source was asked for, and has accepted. `consumer` is the session and the tag that
    hear of consumption; None for a body. `cut` has the source write nothing more, whether it
    answers or not: it is called where the progress is silent for longer than it may be, and for
    `more_s` seconds, asked again and again, since the source is known to be at work meanwhile.
    `let_go` has it let go of this delivery's memory alone: where it has brought all layers and does
    not say that it is through.
    """

    head: DeliveryHead
    progress: LayerProgress
    receiver: LayerReceiver
    consumer: tuple[TargetSession, int] | None = None
    cut: Callable[[str], None] | None = None
    more_s: Callable[[], float] | None = None
    let_go: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class PartWriter:
    """A source that may write to a part's memory: of objects with this digest, or of unknown ones.
    One that has settled and is still among the part's does so for ever, as far as is known.
    """

    content: str | None = None
    has_settled: bool = False


@dataclass(eq=False, slots=True)
class PartOfSplit(Generic[S]):
    """One part: how far it is, who delivers it now, and who was asked before. `content` is the
    digest of the objects whose layers are there.
    """

    number: int
    chunks: SplitPart
    ready_end: int
    attempt: PartAttempt | None = None
    source: S | None = None
    content: str | None = None
    asked: set[S] = field(default_factory=set[S])
    writers: list[PartWriter] = field(default_factory=list[PartWriter])

    @property
    def refused(self) -> set[S]:
        """Who was asked, and does not deliver it now."""
        return self.asked if self.attempt is None else {*self.asked} - {self.source}


# Asks a source for a part, from a layer on; `settled` is told once when that source does not touch
# the memory any more, or that this cannot be known. Raises the refusal.
AskForPart = Callable[[SplitPart, int, S, Callable[[bool], None]], PartAttempt]
SourcesOf = Callable[[int], Iterable[S]]  # of a part's number: who to ask, in this order


class SplitReceiver(LayerReceiver, Generic[S]):
    """Announces a layer when every part has it. A part whose source fails is asked for again, from
    the layer where it stood, of each other source once; then the delivery fails. It fails too where
    the objects were replaced meanwhile: layers of two versions are never put together, and of two
    sources that may write at the same time both have the same objects.
    """

    def __init__(
        self,
        landing: Landing,
        progress: LayerProgress,
        parts: Sequence[SplitPart],
        ask: AskForPart[S],
        sources: SourcesOf[S],
        lost: Callable[[SplitPart, S, ObjectCacheError], None] | None = None,
    ) -> None:
        """`lost` is told of a part that a source had accepted, and has failed to bring."""
        super().__init__(landing, progress)
        self.parts: list[PartOfSplit[S]] = [
            PartOfSplit(number, part, progress.first_layer) for number, part in enumerate(parts)
        ]
        self._ask = ask
        self._sources = sources
        self._lost = lost
        self._threads: ThreadReserve | None = None
        self._lock = threading.Lock()
        self._writer_settled = threading.Condition(self._lock)
        self._unsettled = 0  # sources that may touch the memory
        self._asking = 0
        self._all_quiet = True
        self._stopped = False
        self._ended = False
        self._followed: list[PartAttempt] = []
        # Who hears of consumption: it holds none of the memory, and outlives the delivery.
        self._consumers: dict[SplitPart, tuple[TargetSession, int]] = {}

    def begin(self, threads: ThreadReserve) -> None:
        """Have every part begun: all are asked for at the same time, since none is done before its
        own answer. Raises the refusal of one that nobody takes; `abandon` then. Where that is
        `MemoryInDoubt`, others than the `refused` may take it in other memory.
        """
        first, *others = self.parts
        failures: dict[int, BaseException] = {}
        asked: list[threading.Event] = []
        try:
            for part in others:
                told = threading.Event()
                threads.start(partial(self._begin_part, part, failures, told.set))
                asked.append(told)
            self._begin_part(first, failures, _nobody)
        finally:
            for told in asked:
                told.wait()
        final = [one for one in failures.values() if not isinstance(one, MemoryInDoubt)]
        for failure in (*final, *failures.values()):
            raise failure

    def _begin_part(
        self, part: PartOfSplit[S], failures: dict[int, BaseException], done: Callable[[], None]
    ) -> None:
        try:
            attempt = self._asked(part)
            part.attempt = attempt
            self._note(part.chunks, attempt)
        except BaseException as error:
            failures[part.number] = error
        finally:
            done()

    def abandon(self, threads: ThreadReserve) -> None:
        """Not every part was begun: end those that were."""
        self.start(threads)
        self.cancel()

    def start(self, threads: ThreadReserve) -> None:
        begun = [(part, part.attempt) for part in self.parts if part.attempt is not None]
        self._threads = threads  # from now on parts are asked for again
        for part, attempt in begun:
            self._follow(part, attempt)
        self._end_if_quiet()

    def _follow(self, part: PartOfSplit[S], attempt: PartAttempt) -> None:
        assert self._threads is not None
        self._followed.append(attempt)
        attempt.progress.is_part_of(self._progress)
        attempt.progress.listen(partial(self._changed, part, attempt))
        self._changed(part, attempt)  # over the session it may have gone on since it was asked
        attempt.receiver.start(self._threads)  # which may have it end at once
        if attempt.cut is not None:
            self._threads.start(partial(_cut_if_silent, attempt))

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            attempts = [part.attempt for part in self.parts if part.attempt is not None]
        for attempt in attempts:
            attempt.receiver.cancel()

    @property
    def consumers(self) -> Mapping[SplitPart, tuple[TargetSession, int]]:
        """The session and the tag of whoever delivers a part now."""
        return self._consumers

    def _note(self, chunks: SplitPart, attempt: PartAttempt) -> None:
        if attempt.consumer is None:
            self._consumers.pop(chunks, None)
        else:
            self._consumers[chunks] = attempt.consumer

    # --- how parts go on ---

    def _changed(self, part: PartOfSplit[S], attempt: PartAttempt) -> None:
        """On any thread that received something of a part."""
        failure = attempt.progress.failure
        with self._lock:
            if part.attempt is not attempt:
                return
            part.ready_end = max(part.ready_end, attempt.progress.ready_end)
            ready_end = min(one.ready_end for one in self.parts)
            is_lost = failure is not None and not self._stopped
            if is_lost:
                part.attempt = None
                self._asking += 1
        self._progress.advance(ready_end)
        if is_lost and failure is not None and self._threads is not None:
            self._threads.start(partial(self._ask_again, part, failure))

    def _ask_again(self, part: PartOfSplit[S], failure: ObjectCacheError) -> None:
        attempt: PartAttempt | None = None
        try:
            if self._lost is not None and part.source is not None:
                self._lost(part.chunks, part.source, failure)
            logger.info(
                "chunks %d to %d are asked for again: %s",
                part.chunks.first,
                part.chunks.end - 1,
                failure.message,
            )
            attempt = self._asked(part)
        except ObjectCacheError as error:
            self._give_up(f"{failure.message}; asked for again: {error.message}", failure)
        except Exception as error:
            logger.exception("asking for a part again failed")
            self._give_up(f"asking for a part again failed: {error!r}", error)
        with self._lock:
            part.attempt = attempt
            is_unwanted = self._stopped
        if attempt is not None:
            self._note(part.chunks, attempt)
            self._follow(part, attempt)
            if is_unwanted:
                attempt.receiver.cancel()
        with self._lock:
            self._asking -= 1
        self._end_if_quiet()

    def _asked(self, part: PartOfSplit[S]) -> PartAttempt:
        """Whoever takes the part, of those that were not asked for it before."""
        refusal: ObjectCacheError = Unavailable("nobody else can be asked")
        for source in self._sources(part.number):
            if source in part.asked or self._stopped:
                continue
            before = self._writers_before(part)
            if any(one.content is None for one in before):
                raise MemoryInDoubt(
                    f"{refusal.message}; whoever was asked may still write to the memory, which "
                    "nobody else can be given therefore"
                ) from refusal
            part.asked.add(source)
            writer = PartWriter()
            with self._lock:
                self._unsettled += 1
                part.writers.append(writer)
            settled = partial(self._settled, part, writer)
            try:
                attempt = self._ask(part.chunks, part.ready_end, source, settled)
            except ObjectCacheError as error:
                refusal = error
                continue
            part.source = source
            content = writer.content = attempt.head.content
            in_doubt = self._in_doubt(part, content, before)
            if in_doubt is not None:
                assert self._threads is not None  # somebody had accepted it, so it was started
                attempt.receiver.start(self._threads)
                attempt.receiver.cancel()
                refusal = in_doubt
                continue
            part.content = content
            return attempt
        raise refusal

    def _writers_before(self, part: PartOfSplit[S]) -> list[PartWriter]:
        """Who may still write to the part's memory, now that whoever was told to stop had time to
        say that it has.
        """
        with self._writer_settled:
            self._writer_settled.wait_for(
                lambda: all(one.has_settled for one in part.writers), SETTLING_S
            )
            return list(part.writers)

    def _in_doubt(
        self, part: PartOfSplit[S], content: str | None, before: Sequence[PartWriter]
    ) -> Unavailable | None:
        """Why a source whose objects have this digest must not be the one that delivers it."""
        has_layers = part.ready_end > self._progress.first_layer
        if has_layers and (content is None or content != part.content):
            return Unavailable("the chunks there are not known to be those of the layers had")
        if any(one.content is None or one.content != content for one in before):
            return Unavailable(
                "the chunks there are not known to be those that a source which was given up may "
                "still write to the memory"
            )
        return None

    def _give_up(self, reason: str, cause: BaseException) -> None:
        self._progress.fail(reason, cause)
        self._stop()

    # --- the end ---

    def _settled(self, part: PartOfSplit[S], writer: PartWriter, quiet: bool) -> None:
        """One thread may bring the end of a source while another is about to tell here of its last
        layers, or of its failure: these come first.
        """
        if self._threads is not None:
            for one in self.parts:
                if (attempt := one.attempt) is not None:
                    self._changed(one, attempt)
        with self._writer_settled:
            self._unsettled -= 1
            self._all_quiet &= quiet
            writer.has_settled = True
            if quiet:
                part.writers.remove(writer)
            self._writer_settled.notify_all()
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        with self._lock:
            is_busy = self._unsettled or self._asking or self._threads is None
            if is_busy or self._ended:
                return
            self._ended = True
        try:
            if self._all_quiet:
                self._landing.settle()
            else:
                self._landing.lose()
        finally:
            self._forget_attempts()
            self._returned.set()

    def _forget_attempts(self) -> None:
        """They hold this, and the memory: it is free again when its arrays are dead."""
        for attempt in self._followed:
            attempt.progress.ignore_listeners()
        self._followed.clear()
        for part in self.parts:
            part.attempt = None


def _cut_if_silent(attempt: PartAttempt) -> None:
    """Have a source that brings no layer in time write nothing more, and one that does not say that
    it is through let go of the memory.
    """
    assert attempt.cut is not None
    progress = attempt.progress
    while not progress.ended:
        left_s = progress.silence_left_s()
        assert left_s is not None
        if left_s <= 0 and attempt.more_s is not None:
            left_s = attempt.more_s()
        if left_s <= 0:
            attempt.cut("it has brought nothing for too long")
            progress.fail_if_silent()  # as it does by itself where the cut was noticed
            return
        progress.wait_ended(left_s)
    if attempt.let_go is not None and not attempt.receiver.join(ENDING_S):
        attempt.let_go()


def _nobody() -> None:
    """The first part's caller waits for nothing."""
