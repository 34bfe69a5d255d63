"""An engine whose reads take time fills a link all the same: many are under way at once.

Time is counted in rounds of the store: `RoundsStore` answers nobody before as many batches wait as
it takes at once, and then answers all. A delivery's time is its rounds times the store's latency,
whatever that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import DamagedData, DeliveryFailed, ObjectCacheError, Unavailable
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import plan_chunks
from objectcache_storage_server.engines.base import Engine, PrefixShape, StagedPut
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.blobs.blob_store import BlobRead, BlobStore
from objectcache_storage_server.engines.memory.memory_blobs import MemoryBlobStore
from objectcache_storage_server.testing import DelayingBlobStore, PassingBlobStore
from objectcache_storage_server.transports.memory import MemoryTransport
from tests.contract.engine_suite import BUCKET, content
from tests.contract.opened_engines.blob_engines import memory_over
from tests.schedules import a_recorder, a_scheduler, demand_of

CHUNKS, LAYERS, SLICE_BYTES = 100, 100, 512  # 10,000 slices
SLICES_EACH = 10  # of a fragment
FRAGMENTS = CHUNKS * LAYERS // SLICES_EACH
KEYS = tuple(f"chunk {number}" for number in range(CHUNKS))
SHAPE = PrefixShape(KEYS, LAYERS, SLICE_BYTES, layerwise=True)
PAYLOAD = content("payload", SHAPE.total_bytes)
BOUND_S = 60.0


class RoundsStore(PassingBlobStore):
    """Answers in rounds of `depth` batches; the last round is what is left of `batch_count`."""

    def __init__(self, inner: BlobStore, depth: int, batch_count: int) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, queue_depth=depth)
        self.rounds = 0
        self._left = batch_count
        self._waiting: list[tuple[Sequence[BlobRead], Future[None]]] = []
        self._lock = threading.Lock()

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((reads, future))
            if len(self._waiting) < min(self.capabilities.queue_depth, self._left):
                return future
            answered, self._waiting = self._waiting, []
            self._left -= len(answered)
            self.rounds += 1
        for asked, waiting in answered:
            self.inner.begin_reads(asked, deadline_s).result()
            waiting.set_result(None)
        return future


class HeldStore(PassingBlobStore):
    """Answers nobody until it is told to."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, queue_depth=4)
        self.held: list[Future[None]] = []
        self.are_all_held = threading.Event()

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # so that it can be asked for, and is not granted
        self.held.append(future)
        if len(self.held) == 4:
            self.are_all_held.set()
        return future


class ForgettingStore(PassingBlobStore):
    """Begins four batches, fails the first of them, and answers the others only when cancelled."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, queue_depth=4)
        self.begun: list[Future[None]] = []

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        future: Future[None] = Future()
        self.begun.append(future)
        if len(self.begun) == 4:
            self.begun[0].set_exception(Unavailable("one read failed"))
        return future


def filled(engine: Engine) -> Engine:
    """With the payload's chunks in it."""
    engine.create_bucket(BUCKET)
    prefix = engine.stage_prefix(BUCKET.name, SHAPE)
    prefix.write(0, memoryview(PAYLOAD))
    engine.commit([StagedPut(staged, "etag") for staged in prefix.staged])
    return engine


class Reading:
    """A delivery of the whole payload by two reader threads."""

    def __init__(self, engine: Engine) -> None:
        self.client = MemoryTransport(len(PAYLOAD))
        self.ended = threading.Event()
        depth = engine.capabilities.queue_depth
        self.dispatcher = Dispatcher(2, a_scheduler(ServedDelivery), depth)
        opened = engine.open_many(BUCKET.name, KEYS)
        descriptor = Descriptor(KEYS, LAYERS, 16, SLICE_BYTES, DeliveryMode.LAYERWISE)
        plan = plan_chunks(
            descriptor, opened.placements(), DeliveryMode.LAYERWISE, SLICES_EACH * SLICE_BYTES
        )
        self.delivery = ServedDelivery(plan, opened, self.client, self._end, a_recorder())
        self.dispatcher.add(self.delivery, demand_of(plan))

    def _end(self, delivery: ServedDelivery) -> None:
        self.dispatcher.remove(delivery)
        self.ended.set()

    def wait(self) -> None:
        """Until it has ended, whichever way."""
        assert self.ended.wait(BOUND_S)


@pytest.fixture
def reading() -> Iterator[Callable[[Engine], Reading]]:
    begun: list[Reading] = []

    def begin(engine: Engine) -> Reading:
        begun.append(Reading(engine))
        return begun[-1]

    yield begin
    for one in begun:
        one.dispatcher.close()


@pytest.mark.parametrize("depth", [1, 2, 7, 64])
def test_two_threads_keep_as_many_reads_under_way_as_the_store_takes(
    depth: int, reading: Callable[[Engine], Reading]
) -> None:
    engine = memory_over(lambda store: RoundsStore(store, depth, FRAGMENTS))
    one = reading(filled(engine))
    one.wait()
    assert one.delivery.state is DeliveryState.COMPLETE
    assert one.client.buffer == PAYLOAD
    assert isinstance(engine.store, RoundsStore)
    assert engine.store.rounds == -(-FRAGMENTS // depth)  # and not FRAGMENTS / 2 threads


@pytest.mark.parametrize("delay_s", [0.001, 0.02])
def test_layers_arrive_whole_and_in_order_whatever_a_read_takes(
    delay_s: float, reading: Callable[[Engine], Reading]
) -> None:
    engine = memory_over(lambda store: DelayingBlobStore(store, lambda: delay_s, queue_depth=64))
    one = reading(filled(engine))
    one.wait()
    assert one.client.buffer == PAYLOAD
    assert one.client.announced == sorted(one.client.announced)
    assert one.client.announced[-1] == LAYERS


def test_a_delivery_that_fails_ends_when_its_reads_have_landed_and_not_before(
    reading: Callable[[Engine], Reading],
) -> None:
    engine = memory_over(HeldStore)
    one = reading(filled(engine))
    store = engine.store
    assert isinstance(store, HeldStore)
    assert store.are_all_held.wait(BOUND_S)
    one.delivery.fail(DeliveryFailed("its client is gone"))
    assert not one.ended.is_set()
    assert not one.client.closed
    for future in store.held[:3]:
        future.set_result(None)
    assert not one.ended.wait(0.05)
    store.held[3].set_exception(Unavailable("the store is gone"))
    one.wait()
    assert one.client.closed
    assert str(one.delivery.error) == "its client is gone"
    assert len(store.held) == 4


def test_reads_of_a_delivery_that_fails_are_cancelled(
    reading: Callable[[Engine], Reading],
) -> None:
    engine = memory_over(lambda store: DelayingBlobStore(store, lambda: 3600.0, queue_depth=4))
    one = reading(filled(engine))
    one.delivery.fail(DeliveryFailed("its client is gone"))
    one.wait()
    assert one.client.buffer == bytes(len(PAYLOAD))


def test_a_read_that_fails_cancels_the_other_reads_of_its_delivery(
    reading: Callable[[Engine], Reading],
) -> None:
    engine = memory_over(ForgettingStore)
    one = reading(filled(engine))
    store = engine.store
    assert isinstance(store, ForgettingStore)
    try:
        one.wait()
        failed, *others = store.begun  # another may have begun before the failure was noted
        assert not failed.cancelled()
        assert len(others) >= 3
        assert all(future.cancelled() for future in others)
    finally:
        for future in store.begun:
            future.cancel()
    assert str(one.delivery.error) == "one read failed"


@pytest.mark.parametrize("error", [Unavailable("away"), DamagedData("rot", key="chunk 0")])
def test_what_a_read_fails_with_is_what_the_client_is_told(
    error: ObjectCacheError, reading: Callable[[Engine], Reading]
) -> None:
    class Failing(PassingBlobStore):
        def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(error)
            return future

    def deep(store: BlobStore) -> BlobStore:
        failing = Failing(store)
        failing.capabilities = replace(store.capabilities, queue_depth=8)
        return failing

    engine: BlobEngine = memory_over(deep)
    one = reading(filled(engine))
    one.wait()
    assert one.client.failure == (0, error)
    assert engine.damaged_count == 0


def test_a_store_that_reads_by_waiting_is_asked_by_as_many_threads_as_there_are(
    reading: Callable[[Engine], Reading],
) -> None:
    class Counting(PassingBlobStore):
        names: set[str] = set()  # noqa: RUF012  of one test

        def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
            self.names.add(threading.current_thread().name)
            return super().begin_reads(reads, deadline_s)

    engine = memory_over(Counting)
    assert engine.capabilities.queue_depth == MemoryBlobStore.capabilities.queue_depth == 0
    one = reading(filled(engine))
    one.wait()
    assert one.client.buffer == PAYLOAD
    assert Counting.names <= {"reader-0", "reader-1"}
