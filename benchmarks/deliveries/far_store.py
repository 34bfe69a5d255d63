"""A store that is far away against one that is near: 10,000 slices by two reader threads.

The blobs are in memory, and each batch of reads is answered after a fixed time, whatever else is
under way. So what a delivery loses with a longer time is what the readers do not keep under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row, Samples
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_schemas.operators.schedule import ScheduleConfiguration
from objectcache_schemas.policy_names import EVERY_EPOCH
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.deliveries.delivery import ServedDelivery
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import plan_chunks
from objectcache_storage_server.engines.base import Engine, PrefixShape, StagedPut
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.catalog_engine import DamageCount
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.memory.memory_blobs import MemoryBlobStore
from objectcache_storage_server.engines.memory.memory_catalog import MemoryCatalog
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.scheduler import Scheduler
from objectcache_storage_server.testing import DelayingBlobStore
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.memory import MemoryTransport

GROUP = "A store far away"
CHUNKS, LAYERS, SLICE_BYTES = 100, 100, 32 * KIB
FRAGMENT_BYTES = 2 * MIB
READER_THREADS = 2
DEPTH = 64
NEAR_S, FAR_S = 50e-6, (0.001, 0.005, 0.02)
KEYS = tuple(f"chunk {number}" for number in range(CHUNKS))
SHAPE = PrefixShape(KEYS, LAYERS, SLICE_BYTES, layerwise=False)


def measure_far_store(bench: Bench) -> Iterator[Row]:
    """A row for each time that a read takes."""
    client = MemoryTransport(SHAPE.total_bytes)
    delays_s = [NEAR_S]
    engine = _filled(delays_s)
    samples = Samples()
    try:
        _deliver(engine, client)  # makes the client's pages
        for _ in range(bench.scale.repeats):
            for delay_s in (NEAR_S, *FAR_S):
                delays_s[0] = delay_s
                samples.take(_name(delay_s), lambda: _deliver(engine, client))
    finally:
        engine.close()
    near_s = samples.median_s(_name(NEAR_S))
    for delay_s in FAR_S:
        name = _name(delay_s)
        # The last fragments are waited for once; before that the link is full.
        by_hand = near_s / (near_s + delay_s)
        yield Row(
            group=GROUP,
            name=f"{CHUNKS * LAYERS:,} slices, {name}",
            unit="GiB/s",
            samples=tuple(SHAPE.total_bytes / GIB / each for each in samples.seconds[name]),
            ratio=near_s / samples.median_s(name),
            ratio_of=f"the same, {_name(NEAR_S)}",
            goal="flat: what one wait costs",
            by_hand=f"one wait of {1000 * delay_s:g} ms: {by_hand:.2f}",
            details={"queue_depth": DEPTH, "fragment_bytes": FRAGMENT_BYTES},
        )


def _name(delay_s: float) -> str:
    return f"{1000 * delay_s:g} ms a read"


def _filled(delay_s: list[float]) -> Engine:
    store = DelayingBlobStore(MemoryBlobStore(), lambda: delay_s[0], DEPTH)
    engine = BlobEngine("memory", MemoryCatalog(), store, CHUNKS, FlushLatch(), DamageCount())
    engine.create_bucket(BucketInfo(name="far", owner="bench", region="", created_s=time.time()))
    prefix = engine.stage_prefix("far", SHAPE)
    piece = memoryview(bytes(SHAPE.chunk_bytes))
    for index in range(CHUNKS):
        prefix.write(index * SHAPE.chunk_bytes, piece)
    engine.commit([StagedPut(staged, "etag") for staged in prefix.staged])
    return engine


def _deliver(engine: Engine, client: MemoryTransport) -> None:
    configuration = ScheduleConfiguration(
        policy="stall_dynamic",
        cap_gbps=0.0,
        margin_gbps=5.0,
        epoch_s=0.01,
        rates=EVERY_EPOCH,
        layerwise_threshold_bytes=0,
        tenants={},
    )
    dispatcher = Dispatcher(READER_THREADS, Scheduler(configuration, time.monotonic()), DEPTH)
    ended = threading.Event()
    opened = engine.open_many("far", KEYS)
    descriptor = Descriptor(KEYS, LAYERS, 16, SLICE_BYTES, DeliveryMode.LAYERWISE)
    plan = plan_chunks(descriptor, opened.placements(), DeliveryMode.LAYERWISE, FRAGMENT_BYTES)
    recorder = DeliveryRecorder("far", "far", "bench", started_s=0.0, started_unix_s=0.0)
    delivery = ServedDelivery(plan, opened, client, lambda _: ended.set(), recorder)
    dispatcher.add(delivery, Demand(plan.payload_bytes // LAYERS, None, LAYERS))
    ended.wait()
    assert delivery.error is None, delivery.error
    dispatcher.remove(delivery)
    dispatcher.close()
