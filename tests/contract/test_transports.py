"""The transport contract, for every transport: what a delivery hands over arrives, or its failure.

Each harness plays the client's side. Where bytes become visible differs; that they are the payload,
in place before their layer is announced, does not.
"""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_fabrics.nixl.endpoint import NixlEndpoint
from objectcache_fabrics.nixl.fabric import NixlFabric
from objectcache_fabrics.peers import WriteTimeout
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import DamagedData, DeliveryFailed, ObjectCacheError
from objectcache_schemas.messages.sessions import DeliveryFailure, LayersReady
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.admission.client_pace import ClientPace
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import ChunkPlan, plan_chunks
from objectcache_storage_server.engines.base import Engine, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport
from objectcache_storage_server.transports.body import BodyTransport
from objectcache_storage_server.transports.memory import MemoryTransport
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport
from objectcache_storage_server.transports.staged import StagedTransport
from objectcache_storage_server.transports.targets import Lease, TargetOwner, TargetRegistry
from tests.schedules import a_recorder, a_scheduler, demand_of
from tests.storage_client import sealed_memory_file

CHUNKS, LAYERS, SLICE = 9, 5, 4096
FRAGMENT = 3 * SLICE
PAYLOAD = CHUNKS * LAYERS * SLICE
DATA = np.random.default_rng(5).integers(0, 256, (CHUNKS, LAYERS, SLICE), np.uint8)
TIMEOUT_S = 20.0


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = MemoryEngine()
    engine.create_bucket(BucketInfo(name="b", owner="root", region="", created_s=0.0))
    puts = []
    for index in range(CHUNKS):
        staged = engine.stage("b", f"k{index}", SLICE)
        staged.write_at(0, memoryview(DATA[index].tobytes()))
        puts.append(StagedPut(staged, "e"))
    engine.commit(puts)
    yield engine
    engine.close()


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(2, a_scheduler(ServedDelivery))
    yield dispatcher
    dispatcher.close()


class Harness(ABC):
    """One transport with the client's side of it."""

    transport: Transport

    @abstractmethod
    async def payload(self, mode: DeliveryMode) -> bytes:
        """Wait for the whole payload."""

    @abstractmethod
    async def failure(self) -> tuple[int, ObjectCacheError]:
        """Wait for the failure: the first layer that is not complete, and why."""

    @abstractmethod
    def released(self) -> bool:
        """Whether the transport has let its memory go."""

    def close(self) -> None:  # noqa: B027 - most harnesses hold nothing
        """Let go of the client's side."""


class MemoryHarness(Harness):
    def __init__(self, wake: Callable[[], None], ended: asyncio.Event) -> None:
        self.transport: MemoryTransport = MemoryTransport(PAYLOAD)
        self._ended = ended

    async def payload(self, mode: DeliveryMode) -> bytes:
        await self._ended.wait()
        return bytes(self.transport.buffer)

    async def failure(self) -> tuple[int, ObjectCacheError]:
        await self._ended.wait()
        assert self.transport.failure is not None
        return self.transport.failure

    def released(self) -> bool:
        return self.transport.closed


class BodyHarness(Harness):
    transport_class = BodyTransport

    def __init__(self, wake: Callable[[], None], ended: asyncio.Event) -> None:
        self._pool = BufferPool(FRAGMENT, 2 * FRAGMENT)
        self.transport: BodyTransport = self.transport_class(
            self._pool,
            ReservedMemory(self._pool, self._pool.reserve(2 * FRAGMENT)),
            ClientPace("a", 0, "took a body"),
            wake,
            a_recorder(),
        )
        near, self._far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAGMENT)
        self._stream = StreamSocket(near)
        self._sending = asyncio.ensure_future(self.transport.send(self._stream, PAYLOAD, TIMEOUT_S))

    async def payload(self, mode: DeliveryMode) -> bytes:
        received = await asyncio.to_thread(self._far.recv, PAYLOAD, socket.MSG_WAITALL)
        await self._sending
        return received

    async def failure(self) -> tuple[int, ObjectCacheError]:
        draining = asyncio.to_thread(self._far.recv, PAYLOAD, socket.MSG_WAITALL)
        task = asyncio.ensure_future(draining)
        try:
            await self._sending
        except ObjectCacheError as error:
            self._stream.close()
            received = await task
            assert len(received) < PAYLOAD  # cut before its length
            return len(received) // (CHUNKS * SLICE), error
        raise AssertionError("the send went through")

    def released(self) -> bool:
        self.transport.release()  # by whoever called `send`, which has ended
        self.transport.release()
        return self._pool.promised_bytes == 0

    def close(self) -> None:
        self._sending.cancel()
        self._stream.close()
        self._far.close()


class SharedMemoryHarness(Harness):
    def __init__(self, wake: Callable[[], None], ended: asyncio.Event) -> None:
        descriptor = sealed_memory_file(PAYLOAD + 100)
        self._memory = mmap.mmap(descriptor, PAYLOAD + 100)
        self._registry = TargetRegistry(1 << 30)
        target = self._registry.register(TargetOwner("alice"), descriptor, PAYLOAD + 100)
        os.close(descriptor)
        self._target = target
        self._events: list[msgspec.Struct] = []
        self._ended = ended
        self._seen = 0
        asked = MemoryTarget(
            transport="shared_memory",
            target_id=target.target_id,
            offset_bytes=100,
            length_bytes=PAYLOAD,
            tag=77,
        )
        lease = self._registry.lease("alice", asked, PAYLOAD)
        self.transport: SharedMemoryTransport = SharedMemoryTransport(lease, 77, self._post)

    def _post(self, event: msgspec.Struct) -> None:
        self._events.append(event)
        if isinstance(event, LayersReady):
            self._check_layers(event.end_layer)

    def _check_layers(self, end_layer: int) -> None:
        """What is announced is in place at that moment, not later."""
        for layer in range(self._seen, end_layer):
            start = 100 + layer * CHUNKS * SLICE
            if self._layerwise:
                assert self._memory[start : start + CHUNKS * SLICE] == DATA[:, layer].tobytes()
        self._seen = end_layer

    _layerwise = True

    async def payload(self, mode: DeliveryMode) -> bytes:
        self._layerwise = mode is DeliveryMode.LAYERWISE
        await self._ended.wait()
        assert self._events[-1] == LayersReady(tag=77, end_layer=LAYERS)
        return self._memory[100:]

    async def failure(self) -> tuple[int, ObjectCacheError]:
        await self._ended.wait()
        event = self._events[-1]
        assert isinstance(event, DeliveryFailure)
        assert event.tag == 77
        return event.failed_layer, ObjectCacheError.from_wire(event.error)

    def released(self) -> bool:
        return not self._target.leases


class NixlHarness(Harness):
    """The client is in this process: UCX copies between its memory and itself."""

    def __init__(self, wake: Callable[[], None], ended: asyncio.Event) -> None:
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self._seen = 0
        self.layerwise = True
        self.wrong_layers: list[int] = []
        self.failures: list[msgspec.Struct] = []
        self._staging = StagingMemory(FRAGMENT, 2 * FRAGMENT)
        self._fabric = NixlFabric(self._staging, "lo", "", WriteTimeout(TIMEOUT_S))
        self._peer, answer = self._fabric.open(b"")
        self._endpoint = NixlEndpoint("lo", "")
        self._endpoint.connect(answer, self._hear, lambda message: None)
        self._endpoint.listen(1)
        self._memory = np.zeros(PAYLOAD + 100, np.uint8)
        lease = self._lease()
        self.transport: StagedTransport = StagedTransport(
            lease,
            77,
            self._staging,
            ReservedMemory(self._staging, self._staging.reserve(2 * FRAGMENT)),
            wake,
            self._broken,
            0,
        )

    def _lease(self) -> Lease:
        memory = DeviceMemory(self._memory.ctypes.data, self._memory.nbytes, self._memory)
        message, _ = self._endpoint.register(memory)
        remote = RemoteMemory(message.address, message.length_bytes, message.key, message.device_id)
        self._peer.admit(remote, message.metadata)
        registry = TargetRegistry(1 << 30)
        target_memory = RemoteTargetMemory("nixl", remote, self._peer, self.failures.append)
        self._target = registry.register_remote(TargetOwner("alice"), target_memory)
        asked = MemoryTarget(
            transport="nixl",
            target_id=self._target.target_id,
            offset_bytes=100,
            length_bytes=PAYLOAD,
            tag=77,
        )
        return registry.lease("alice", asked, PAYLOAD)

    def _hear(self, event: LayersReady) -> None:
        """On the endpoint's thread. What is announced is in place at that moment, not later."""
        for layer in range(self._seen, event.end_layer if self.layerwise else 0):
            start = 100 + layer * CHUNKS * SLICE
            if self._memory[start : start + CHUNKS * SLICE].tobytes() != DATA[:, layer].tobytes():
                self.wrong_layers.append(layer)
        self._seen = event.end_layer
        if event.end_layer == LAYERS:
            self._loop.call_soon_threadsafe(self._heard.set)

    @staticmethod
    def _broken(error: ObjectCacheError) -> None:
        raise AssertionError(f"a write failed: {error}")

    async def payload(self, mode: DeliveryMode) -> bytes:
        await self._ended.wait()
        await self._heard.wait()
        assert self.wrong_layers == []
        return self._memory[100:].tobytes()

    async def failure(self) -> tuple[int, ObjectCacheError]:
        await self._ended.wait()
        (event,) = self.failures
        assert isinstance(event, DeliveryFailure)
        assert event.tag == 77
        return event.failed_layer, ObjectCacheError.from_wire(event.error)

    def released(self) -> bool:
        return not self._target.leases and self._staging.promised_bytes == 0

    def close(self) -> None:
        self._fabric.close()
        self._endpoint.close()


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed"
)
HARNESSES = [
    MemoryHarness,
    BodyHarness,
    SharedMemoryHarness,
    pytest.param(NixlHarness, marks=needs_nixl),
]


class Run:
    """A delivery over one harness."""

    def __init__(
        self, engine: Engine, dispatcher: Dispatcher, kind: type, mode: DeliveryMode
    ) -> None:
        descriptor = Descriptor(tuple(f"k{n}" for n in range(CHUNKS)), LAYERS, 16, SLICE, mode)
        opened = engine.open_many("b", descriptor.chunk_keys)
        self.plan: ChunkPlan = plan_chunks(descriptor, opened.placements(), mode, FRAGMENT)
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._dispatcher = dispatcher
        self.harness: Harness = kind(self._wake, self.ended)
        self.delivery = ServedDelivery(
            self.plan, opened, self.harness.transport, self._on_end, a_recorder()
        )

    def _wake(self) -> None:
        self._dispatcher.wake(self.delivery)

    def start(self) -> None:
        self._dispatcher.add(self.delivery, demand_of(self.plan))

    def _on_end(self, delivery: ServedDelivery) -> None:
        self._dispatcher.remove(delivery)
        self.harness.transport.when_quiet(self._quiet)

    def _quiet(self) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)


@pytest.mark.parametrize("mode", [DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE])
@pytest.mark.parametrize("kind", HARNESSES)
def test_the_payload_arrives_whole_and_the_memory_is_let_go(
    engine: Engine, dispatcher: Dispatcher, kind: type, mode: DeliveryMode
) -> None:
    async def run() -> None:
        one = Run(engine, dispatcher, kind, mode)
        if isinstance(one.harness, SharedMemoryHarness):
            one.harness._layerwise = mode is DeliveryMode.LAYERWISE
        if isinstance(one.harness, NixlHarness):
            one.harness.layerwise = mode is DeliveryMode.LAYERWISE
        one.start()
        payload = await asyncio.wait_for(one.harness.payload(mode), TIMEOUT_S)
        expected = DATA.transpose(1, 0, 2) if mode is DeliveryMode.LAYERWISE else DATA
        assert payload == expected.tobytes()
        await asyncio.wait_for(one.ended.wait(), TIMEOUT_S)
        assert one.delivery.state is DeliveryState.COMPLETE
        assert one.harness.released()
        one.harness.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", HARNESSES)
def test_a_failure_names_the_first_incomplete_layer_and_the_memory_is_let_go(
    engine: Engine, dispatcher: Dispatcher, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        one = Run(engine, dispatcher, kind, DeliveryMode.LAYERWISE)
        opened = one.delivery._opened
        read_many = opened.read_many

        def read_until_layer_2(reads: object, buffer: memoryview) -> None:
            if reads[0].offset_bytes >= 2 * SLICE:  # type: ignore[index]
                raise DamagedData("rotten", key="k0")
            read_many(reads, buffer)  # type: ignore[arg-type]

        monkeypatch.setattr(opened, "read_many", read_until_layer_2, raising=True)
        one.start()
        layer, error = await asyncio.wait_for(one.harness.failure(), TIMEOUT_S)
        assert isinstance(error, DamagedData)
        assert layer <= 2  # with two readers, the layers before may not be through either
        await asyncio.wait_for(one.ended.wait(), TIMEOUT_S)
        assert one.harness.released()
        one.harness.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", HARNESSES)
def test_a_cancelled_delivery_ends_and_lets_its_memory_go(
    engine: Engine, dispatcher: Dispatcher, kind: type
) -> None:
    async def run() -> None:
        one = Run(engine, dispatcher, kind, DeliveryMode.LAYERWISE)
        one.delivery.fail(DeliveryFailed("nobody wants it"))
        await asyncio.wait_for(one.ended.wait(), TIMEOUT_S)
        assert one.harness.released()
        one.start()  # reads nothing any more
        if isinstance(one.harness, BodyHarness):
            with pytest.raises(DeliveryFailed):
                await one.harness._sending
        one.harness.close()

    asyncio.run(run())


class RefusingTransport(BodyTransport):
    """Tells when it first had no room."""

    def __init__(
        self,
        pool: BufferPool,
        grant: ReservedMemory,
        pace: ClientPace,
        wake: Callable[[], None],
        recorder: DeliveryRecorder,
    ) -> None:
        super().__init__(pool, grant, pace, wake, recorder)
        self.refused = asyncio.Event()

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        granted = super().reserve(offset_bytes, length_bytes)
        if not granted:
            self._loop.call_soon_threadsafe(self.refused.set)
        return granted


def test_a_body_reads_no_further_ahead_than_its_grant(
    engine: Engine, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the body: reading stops at the grant, and goes on when somebody does."""

    async def run() -> None:
        monkeypatch.setattr(BodyHarness, "transport_class", RefusingTransport)
        one = Run(engine, dispatcher, BodyHarness, DeliveryMode.LAYERWISE)
        harness = one.harness
        assert isinstance(harness, BodyHarness)
        transport = harness.transport
        assert isinstance(transport, RefusingTransport)
        one.start()
        await asyncio.wait_for(transport.refused.wait(), TIMEOUT_S)
        assert 0 < sum(len(view) for view in transport._buffers.values()) <= 2 * FRAGMENT
        payload = await asyncio.wait_for(harness.payload(DeliveryMode.LAYERWISE), TIMEOUT_S)
        assert payload == DATA.transpose(1, 0, 2).tobytes()
        await asyncio.wait_for(one.ended.wait(), TIMEOUT_S)
        harness.close()

    asyncio.run(run())
