"""A delivery of parts goes on, or is whole, whatever thread hears first how a source ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from objectcache.channel.responses import DeliveryHead
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver, SessionReceiver
from objectcache.deliveries.split.split_parts import SplitPart
from objectcache.deliveries.split.split_receiver import (
    MemoryInDoubt,
    PartAttempt,
    SplitReceiver,
)
from objectcache.landing.regions import Landing, nothing
from objectcache.sessions.session_wire import SocketWire
from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_schemas.messages.sessions import GetBegun, GetEnded, GetPrefix

LAYERS = 4
HEAD = DeliveryHead(DeliveryMode.LAYERWISE, 1, "1", content="of one version")
MEMORY = np.zeros(1, np.uint8)
DEADLINE_S = 20.0


class Told(LayerReceiver):
    """A receiver that hears of nothing by itself."""

    def start(self, threads: ThreadReserve) -> None:
        pass

    def _stop(self) -> None:
        pass


class Settling:
    """A source whose end is heard on another thread before its layers have been told to all: the
    progress's first listener settles the memory.
    """

    def __init__(self) -> None:
        self.progress = LayerProgress(0, LAYERS)

    def ask(self, settled: Callable[[bool], None]) -> PartAttempt:
        def heard() -> None:
            if self.progress.ended:
                settled(True)

        self.progress.listen(heard)
        receiver = Told(Landing(MEMORY, None, settled), self.progress)
        return PartAttempt(HEAD, self.progress, receiver)


def receiver_of(
    ask: Callable[[SplitPart, int, str, Callable[[bool], None]], PartAttempt],
) -> tuple[SplitReceiver[str], LayerProgress]:
    progress = LayerProgress(0, LAYERS)
    landing = Landing(MEMORY, None, nothing)
    return SplitReceiver(landing, progress, [SplitPart(0, 1)], ask, lambda _: "ab"), progress


@pytest.fixture
def threads() -> Iterator[ThreadReserve]:
    with closing(ThreadReserve("part-ends")) as threads:
        yield threads


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_that_is_heard_before_the_last_layers_are_told_takes_nothing_from_the_delivery(
    threads: ThreadReserve, fails: bool
) -> None:
    sources = {"a": Settling(), "b": Settling()}
    asked = list[tuple[str, int]]()

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        asked.append((source, layer))
        if source == "b":
            sources["b"].progress.advance(LAYERS)
        return sources[source].ask(settled)

    receiver, progress = receiver_of(ask)
    receiver.begin(threads)
    receiver.start(threads)
    sources["a"].progress.advance(3)
    if fails:
        sources["a"].progress.fail("it broke")
    else:
        sources["a"].progress.advance(LAYERS)
    assert progress.wait_ended(DEADLINE_S)
    assert progress.complete
    assert asked == ([("a", 0), ("b", 3)] if fails else [("a", 0)])
    if not fails:
        assert receiver.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("first", "second", "is_quiet", "goes_on"),
    [
        ("1", "1", False, True),
        ("1", "2", False, False),
        ("1", None, False, False),
        (None, None, False, False),
        ("1", "2", True, True),
    ],
)
def test_two_that_may_write_at_the_same_time_have_the_same_objects(
    threads: ThreadReserve, first: str | None, second: str | None, is_quiet: bool, goes_on: bool
) -> None:
    """No layer is there when the first one is given up."""
    progresses = {"a": LayerProgress(0, LAYERS), "b": LayerProgress(0, LAYERS)}
    ends = list[Callable[[bool], None]]()
    settled_so = list[bool]()

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        ends.append(settled)
        head = replace(HEAD, content=first if source == "a" else second)
        receiver = Told(Landing(MEMORY, None, settled), progresses[source])
        return PartAttempt(head, progresses[source], receiver)

    progress = LayerProgress(0, LAYERS)
    landing = Landing(MEMORY, None, settled_so.append)
    receiver = SplitReceiver(landing, progress, [SplitPart(0, 1)], ask, lambda _: "ab")
    receiver.begin(threads)
    receiver.start(threads)
    progresses["a"].fail("it was cut off")
    ends[0](is_quiet)
    progresses["b"].advance(LAYERS)
    assert progress.wait_ended(DEADLINE_S)
    assert progress.complete == goes_on
    if not goes_on:
        assert progress.failure is not None
        assert "may still write" in progress.failure.message
    for settled in ends[1:]:
        settled(True)
    assert receiver.join(DEADLINE_S)
    assert settled_so == [is_quiet]  # it is not used again where one may write for ever


def test_a_source_that_is_through_late_lets_go_of_this_memory_alone(threads: ThreadReserve) -> None:
    first = LayerProgress(0, LAYERS, silence_s_max=DEADLINE_S)
    cuts = list[str]()

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        landing = Landing(MEMORY, None, settled)
        return PartAttempt(
            HEAD, first, Told(landing, first), cut=cuts.append, let_go=landing.withdraw
        )

    receiver, progress = receiver_of(ask)
    receiver.begin(threads)
    receiver.start(threads)
    first.advance(LAYERS)
    assert progress.complete
    assert receiver.join(DEADLINE_S)
    assert cuts == []


def test_what_comes_of_a_layer_that_is_not_whole_yet_is_no_silence_of_the_delivery(
    threads: ThreadReserve,
) -> None:
    first = LayerProgress(0, LAYERS)
    whole = LayerProgress(0, LAYERS, silence_s_max=DEADLINE_S)

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        return PartAttempt(HEAD, first, Told(Landing(MEMORY, None, settled), first))

    landing = Landing(MEMORY, None, nothing)
    receiver = SplitReceiver(landing, whole, [SplitPart(0, 1)], ask, lambda _: "a")
    receiver.begin(threads)
    receiver.start(threads)
    before_s = whole._silence_deadline_s()
    first.stir()
    after_s = whole._silence_deadline_s()
    assert before_s is not None
    assert after_s is not None
    assert after_s > before_s


def test_nobody_else_is_given_memory_to_which_one_that_said_nothing_may_write(
    threads: ThreadReserve,
) -> None:
    asked = list[str]()

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        asked.append(source)
        settled(False)
        raise Unavailable("it has not answered")

    receiver, _ = receiver_of(ask)
    with pytest.raises(MemoryInDoubt, match="it has not answered; whoever was asked may still"):
        receiver.begin(threads)
    receiver.abandon(threads)
    assert asked == ["a"]
    assert [part.refused for part in receiver.parts] == [{"a"}]


def test_parts_are_asked_for_at_the_same_time(threads: ThreadReserve) -> None:
    both = threading.Barrier(2)
    progresses = [LayerProgress(0, LAYERS) for _ in range(2)]

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        both.wait(DEADLINE_S)  # broken where one is asked for after the other's answer
        first = progresses[chunks.first]
        return PartAttempt(HEAD, first, Told(Landing(MEMORY, None, settled), first))

    progress = LayerProgress(0, LAYERS)
    landing = Landing(MEMORY, None, nothing)
    parts = [SplitPart(0, 1), SplitPart(1, 2)]
    receiver = SplitReceiver(landing, progress, parts, ask, lambda _: "a")
    receiver.begin(threads)
    receiver.start(threads)
    progresses[1].advance(LAYERS)
    assert progress.ready_end == 0
    progresses[0].advance(LAYERS)
    assert progress.complete


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refused_part_is_told_of_when_the_others_have_answered(
    threads: ThreadReserve, refused: int
) -> None:
    settled_so = list[bool]()
    is_refused = threading.Event()
    accepted = LayerProgress(0, LAYERS)

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        if chunks.first == refused:
            settled(True)
            is_refused.set()
            raise Unavailable("it wants no part")
        assert is_refused.wait(DEADLINE_S)
        return PartAttempt(HEAD, accepted, Told(Landing(MEMORY, None, settled), accepted))

    landing = Landing(MEMORY, None, settled_so.append)
    progress = LayerProgress(0, LAYERS)
    parts = [SplitPart(0, 1), SplitPart(1, 2)]
    receiver = SplitReceiver(landing, progress, parts, ask, lambda _: "a")
    with pytest.raises(Unavailable, match="it wants no part"):
        receiver.begin(threads)
    assert receiver.parts[1 - refused].attempt is not None
    receiver.abandon(threads)
    assert accepted.failure is not None  # it was cancelled
    assert progress.failure is not None


MOMENTS = ["asked", "begun", "returned", "started", "layers", "ended"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_whoever_waits_for_a_session_that_is_given_up_goes_on_elsewhere_at_every_moment(
    threads: ThreadReserve, moment: str
) -> None:
    ours, theirs = socket.socketpair()
    session = TargetSession(SocketWire(ours, DEADLINE_S), DEADLINE_S)
    elsewhere = LayerProgress(0, LAYERS)
    first = LayerProgress(0, LAYERS)
    asked = list[str]()

    def give_up_at(now: str) -> None:
        if now == moment:
            session.give_up("another delivery was silent")

    def ask(
        chunks: SplitPart, layer: int, source: str, settled: Callable[[bool], None]
    ) -> PartAttempt:
        asked.append(source)
        landing = Landing(MEMORY, None, settled)
        if source == "b":
            elsewhere.advance(LAYERS)
            landing.settle()
            return PartAttempt(HEAD, elsewhere, Told(landing, elsewhere))
        tag = session.listen(first)
        get = session.get(GetPrefix(tag=tag, bucket="b", descriptor=b"", request_id="1"))
        if moment == "ended":  # which is heard before the failure was told to all
            first.listen(lambda: get.ended(GetEnded(tag=tag, payload_bytes=1)))
        give_up_at("asked")
        get.begun(GetBegun(tag=tag, delivery="layerwise", chunk_count=1, path="agg"))
        give_up_at("begun")
        try:
            get.wait_begun(DEADLINE_S)
        except ObjectCacheError:
            landing.settle()
            raise
        return PartAttempt(HEAD, first, SessionReceiver(get, landing, first, session))

    receiver, progress = receiver_of(ask)
    try:
        receiver.begin(threads)
        give_up_at("returned")
        receiver.start(threads)
        give_up_at("started")
        if moment == "layers":
            first.advance(2)
            give_up_at("layers")
        give_up_at("ended")
        assert progress.wait_ended(DEADLINE_S)
        assert progress.complete
        assert asked == ["a", "b"]
        assert receiver.join(DEADLINE_S)
        assert not session.is_waited_for
    finally:
        session.close()
        theirs.close()
