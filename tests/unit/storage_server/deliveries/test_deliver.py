"""Deliveries and their threads when something is slow or breaks: all end once, threads go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.deliveries import delivery as delivery_module
from objectcache_storage_server.deliveries.delivery import (
    YIELD_S_MAX,
    DeliveryState,
    ServedDelivery,
)
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import (
    plan_chunks,
)
from objectcache_storage_server.engines.base import OpenObjects, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import NextFragment, Scheduler, Wait
from objectcache_storage_server.transports.memory import MemoryTransport
from tests.schedules import a_configuration, a_recorder, a_scheduler, demand_of

LAYERS, SLICE = 4, 64
PAYLOAD = LAYERS * SLICE
BOUND_S = 20.0


class Breakdown(Exception):
    """A fault that nobody foresaw."""


class Client(MemoryTransport):
    """Breaks where a test says so, and keeps the order of what it is told."""

    def __init__(self, *breaks: str) -> None:
        super().__init__(PAYLOAD)
        self.told: list[str] = []
        self._breaks = breaks

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what in self._breaks:
            raise Breakdown(what)

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        if f"reserve {offset_bytes}" in self._breaks:
            raise Breakdown("reserve")
        return True

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        if f"written {offset_bytes}" in self._breaks:
            raise Breakdown("written")
        super().written(offset_bytes, length_bytes)

    def announce(self, end_layer: int) -> None:
        self._tell(f"announce {end_layer}")

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        super().fail(failed_layer, error)
        self._tell("fail")

    def close(self) -> None:
        super().close()
        self._tell("close")


def opened_chunk() -> OpenObjects:
    engine = MemoryEngine()
    engine.create_bucket(BucketInfo(name="b", owner="root", region="", created_s=0.0))
    staged = engine.stage("b", "k", SLICE)
    staged.write_at(0, memoryview(bytes(range(256))[:PAYLOAD]))
    engine.commit([StagedPut(staged, "e")])
    return engine.open_many("b", ["k"])


def a_delivery(
    client: MemoryTransport,
    on_end: Callable[[ServedDelivery], None],
    opened: OpenObjects | None = None,
) -> ServedDelivery:
    """One whose fragments are its layers."""
    opened = opened or opened_chunk()
    descriptor = Descriptor(("k",), LAYERS, 16, SLICE, DeliveryMode.LAYERWISE)
    plan = plan_chunks(descriptor, opened.placements(), DeliveryMode.LAYERWISE, SLICE)
    return ServedDelivery(plan, opened, client, on_end, a_recorder())


def taken(delivery: ServedDelivery) -> Fragment:
    fragment = delivery.take()
    assert fragment is not None
    return fragment


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


# --- yielding ---


def yields_of(monkeypatch: pytest.MonkeyPatch, layers: int, yielding: Callable[[], None]) -> int:
    """How often a delivery of so many layers yields, `yielding` each time; never before its first
    announcement.
    """
    events: list[str] = []

    def yield_once() -> None:
        events.append("yield")
        yielding()

    monkeypatch.setattr("os.sched_yield", yield_once)

    class Told(MemoryTransport):
        def announce(self, end_layer: int) -> None:
            events.append("announce")

    engine = MemoryEngine()
    engine.create_bucket(BucketInfo(name="b", owner="root", region="", created_s=0.0))
    staged = engine.stage("b", "k", SLICE)
    staged.write_at(0, memoryview(bytes(layers * SLICE)))
    engine.commit([StagedPut(staged, "e")])
    opened = engine.open_many("b", ["k"])
    descriptor = Descriptor(("k",), layers, 16, SLICE, DeliveryMode.LAYERWISE)
    plan = plan_chunks(descriptor, opened.placements(), DeliveryMode.LAYERWISE, SLICE)
    delivery = ServedDelivery(plan, opened, Told(layers * SLICE), lambda _: None, a_recorder())
    while (fragment := delivery.take()) is not None:
        delivery.execute(fragment)
    assert events[0] == "announce"
    assert events.count("announce") == layers
    return events.count("yield")


def nobody_runs() -> None:
    """Nobody else wants the processor."""


def somebody_runs() -> None:
    """For more than half of what a delivery gives away."""
    until_s = time.monotonic() + 0.6 * YIELD_S_MAX
    while time.monotonic() < until_s:
        pass


def test_readers_yield_between_the_first_announcement_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Not the bound on what is given away: a busy machine may stop this thread at any yield.
    monkeypatch.setattr(delivery_module, "YIELD_S_MAX", BOUND_S)
    assert [yields_of(monkeypatch, layers, nobody_runs) for layers in (1, 3, 10)] == [0, 2, 9]


def test_what_a_delivery_gives_away_to_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert yields_of(monkeypatch, 20, somebody_runs) in (1, 2)  # one, where this test was held up


# --- announcing ---


class SlowSocket(Client):
    """Its first announcement takes until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_announcing = threading.Event()
        self.go_on = threading.Event()

    def announce(self, end_layer: int) -> None:
        self.is_announcing.set()
        assert self.go_on.wait(BOUND_S)
        super().announce(end_layer)


def test_a_slow_announcement_holds_up_neither_the_scheduler_nor_other_readers() -> None:
    client, ends = SlowSocket(), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    first = taken(delivery)
    announcing = in_thread(lambda: delivery.execute(first))
    assert client.is_announcing.wait(BOUND_S)
    rest: list[bool] = []

    def others() -> None:
        rest.extend(delivery.take() is not None for _ in range(1))

    others_thread = in_thread(others)
    others_thread.join(BOUND_S)
    assert rest == [True]
    client.go_on.set()
    announcing.join(BOUND_S)


def test_announcements_of_many_readers_come_in_order_and_before_the_end() -> None:
    client, ends = SlowSocket(), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    fragments = [taken(delivery) for _ in range(LAYERS)]
    announcing = in_thread(lambda: delivery.execute(fragments[0]))
    assert client.is_announcing.wait(BOUND_S)
    for fragment in reversed(fragments[1:]):
        delivery.execute(fragment)  # leaves the announcement to the thread that is at it
    assert (client.told, ends) == ([], [])
    client.go_on.set()
    announcing.join(BOUND_S)
    assert client.told == ["announce 1", "announce 4", "close"]
    assert (delivery.state, ends) == (DeliveryState.COMPLETE, [delivery])


def test_whoever_cancels_during_an_announcement_is_told_after_it_and_once() -> None:
    client, ends = SlowSocket(), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    fragment = taken(delivery)
    announcing = in_thread(lambda: delivery.execute(fragment))
    assert client.is_announcing.wait(BOUND_S)
    for _ in range(2):
        delivery.fail(DeliveryFailed("the client is gone"))
    assert client.told == []
    client.go_on.set()
    announcing.join(BOUND_S)
    assert client.told == ["announce 1", "fail", "close"]
    assert client.failure == (1, delivery.error)
    assert ends == [delivery]


def test_a_cancellation_while_the_last_layer_is_announced_comes_too_late() -> None:
    client, ends = SlowSocket(), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    fragments = [taken(delivery) for _ in range(LAYERS)]
    client.go_on.set()
    for fragment in fragments[:-1]:
        delivery.execute(fragment)
    client.go_on.clear()
    client.is_announcing.clear()
    announcing = in_thread(lambda: delivery.execute(fragments[-1]))
    assert client.is_announcing.wait(BOUND_S)
    delivery.fail(DeliveryFailed("too late"))
    client.go_on.set()
    announcing.join(BOUND_S)
    assert client.told[-2:] == ["announce 4", "close"]
    assert (delivery.state, delivery.error, client.failure) == (DeliveryState.COMPLETE, None, None)


# --- faults ---


@pytest.mark.parametrize("end_layer", [1, 2, LAYERS])
def test_a_layer_that_cannot_be_announced_fails_the_delivery_from_there(end_layer: int) -> None:
    client, ends = Client(f"announce {end_layer}"), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    while (fragment := delivery.take()) is not None:
        delivery.execute(fragment)
    announced = [f"announce {layer}" for layer in range(1, end_layer + 1)]
    assert client.told == [*announced, "fail", "close"]
    assert client.failure == (end_layer - 1, delivery.error)
    assert (delivery.state, delivery.end_layer) == (DeliveryState.FAILED, end_layer - 1)
    assert ends == [delivery]


@pytest.mark.parametrize("fault", ["reserve 0", f"reserve {SLICE}", "written 0"])
def test_a_transport_that_breaks_fails_its_delivery_which_ends(fault: str) -> None:
    client, ends = Client(fault), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    while (fragment := delivery.take()) is not None:
        assert ends == []  # not where the scheduler's lock is held
        delivery.execute(fragment)
    assert client.told[-2:] == ["fail", "close"]
    assert (delivery.state, ends) == (DeliveryState.FAILED, [delivery])


def test_a_plan_that_breaks_fails_its_delivery_which_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    client, ends = Client(), list[ServedDelivery]()
    delivery = a_delivery(client, ends.append)
    monkeypatch.setattr(delivery, "_progress", None)
    delivery.execute(taken(delivery))
    assert client.told == ["fail", "close"]
    assert (delivery.state, ends) == (DeliveryState.FAILED, [delivery])


@pytest.mark.parametrize("is_whole", [False, True])
def test_whatever_breaks_at_the_end_the_rest_of_the_end_is_done(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = opened_chunk()

    def broken_close() -> None:
        raise Breakdown

    monkeypatch.setattr(opened, "close", broken_close)
    ends: list[ServedDelivery] = []

    def broken_end(delivery: ServedDelivery) -> None:
        ends.append(delivery)
        raise Breakdown

    client = Client("fail", "close")
    delivery = a_delivery(client, broken_end, opened)
    if not is_whole:
        delivery.fail(DeliveryFailed("nobody wants it"))
    while (fragment := delivery.take()) is not None:
        delivery.execute(fragment)
    assert client.told[-1] == "close"
    assert ("fail" in client.told) == (not is_whole)
    assert ends == [delivery]
    assert delivery.state is (DeliveryState.COMPLETE if is_whole else DeliveryState.FAILED)
    assert sum("closing its objects failed" in line for line in caplog.messages) == 1


# --- the dispatcher's threads ---


class FaultyScheduler(Scheduler[ServedDelivery]):
    """Breaks in `next` while `faults` are left; `after_take`: when a fragment was taken."""

    def __init__(self, faults: int, *, after_take: bool) -> None:
        super().__init__(a_configuration(), 0.0)
        self.faults = faults
        self._after_take = after_take

    def next(self, now_s: float) -> object:  # type: ignore[override]
        decision = super().next(now_s) if self._after_take else None
        if self.faults and self._flows:
            self.faults -= 1
            raise Breakdown
        return decision or super().next(now_s)


@pytest.fixture
def threads() -> Iterator[list[Dispatcher]]:
    running: list[Dispatcher] = []
    yield running
    for dispatcher in running:
        dispatcher.close()


@pytest.mark.parametrize("after_take", [False, True])
def test_a_scheduler_that_breaks_costs_neither_a_thread_nor_a_delivery(
    after_take: bool, threads: list[Dispatcher], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = FaultyScheduler(3, after_take=after_take)
    dispatcher = Dispatcher(2, scheduler)
    threads.append(dispatcher)
    for _ in range(2):
        ended = threading.Event()
        client = Client()

        def end(delivery: ServedDelivery, ended: threading.Event = ended) -> None:
            dispatcher.remove(delivery)
            ended.set()

        delivery = a_delivery(client, end)
        dispatcher.add(delivery, demand_of(delivery.plan))
        assert ended.wait(BOUND_S)
        assert delivery.state is DeliveryState.COMPLETE
        assert bytes(client.buffer) == bytes(range(256))[:PAYLOAD]
    assert scheduler.faults == 0
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(faults) == 1  # not a line for each


class FarScheduler(Scheduler[ServedDelivery]):
    """Without deliveries it has something to do in more seconds than any clock has."""

    asked: threading.Event

    def next(self, now_s: float) -> NextFragment[ServedDelivery] | Wait:
        if self.flows():
            return super().next(now_s)
        self.asked.set()
        return Wait(now_s + 1e30)


def test_a_thread_outlives_a_wait_that_is_longer_than_any_clock(threads: list[Dispatcher]) -> None:
    scheduler = FarScheduler(a_configuration(), 0.0)
    scheduler.asked = threading.Event()
    dispatcher = Dispatcher(1, scheduler)
    threads.append(dispatcher)
    assert scheduler.asked.wait(BOUND_S)
    ended = threading.Event()

    def end(delivery: ServedDelivery) -> None:
        dispatcher.remove(delivery)
        ended.set()

    delivery = a_delivery(Client(), end)
    dispatcher.add(delivery, demand_of(delivery.plan))
    assert ended.wait(BOUND_S)


def test_a_delivery_that_breaks_everywhere_leaves_its_threads_to_others(
    threads: list[Dispatcher],
) -> None:
    dispatcher = Dispatcher(1, a_scheduler(ServedDelivery))
    threads.append(dispatcher)
    ended = threading.Event()

    def broken_end(delivery: ServedDelivery) -> None:
        dispatcher.remove(delivery)
        raise Breakdown

    def end(delivery: ServedDelivery) -> None:
        dispatcher.remove(delivery)
        ended.set()

    broken = a_delivery(Client("announce 1", "fail", "close"), broken_end)
    whole = a_delivery(Client(), end)
    for delivery in (broken, whole):
        dispatcher.add(delivery, demand_of(delivery.plan))
    assert ended.wait(BOUND_S)
    assert (broken.state, whole.state) == (DeliveryState.FAILED, DeliveryState.COMPLETE)
