"""The transport contract over verbs: the suite of every transport, on a real queue pair."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.descriptor import DeliveryMode, MemoryTarget
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.sessions import DeliveryFailure
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.transports.staged import StagedTransport
from objectcache_storage_server.transports.targets import TargetOwner, TargetRegistry
from tests.contract import test_transports as contract
from tests.contract.test_transports import Harness, dispatcher, engine
from tests.rdma.guest.peers import WAIT_S, Client, Server

__all__ = ["dispatcher", "engine"]  # fixtures
TAG = 77
SKIPPED_BYTES = 100  # of the target, before the payload


class VerbsHarness(Harness):
    """A client's endpoint and a server's peer in one process."""

    def __init__(self, wake: Callable[[], None], ended: asyncio.Event) -> None:
        self._server = Server()
        self._client = Client("rxe0", contract.PAYLOAD + SKIPPED_BYTES)
        peer = self._client.join(self._server)
        staging = self._server.staging
        registry = TargetRegistry(1 << 30)
        memory = RemoteTargetMemory("verbs", self._client.memory, peer, self._post)
        self._target = registry.register_remote(TargetOwner("alice"), memory)
        asked = MemoryTarget(
            transport="verbs",
            target_id=self._target.target_id,
            offset_bytes=SKIPPED_BYTES,
            length_bytes=contract.PAYLOAD,
            tag=TAG,
        )
        self._events: list[msgspec.Struct] = []
        self._ended = ended
        self._quiet = threading.Event()
        self.transport: StagedTransport = StagedTransport(
            registry.lease("alice", asked, contract.PAYLOAD),
            TAG,
            staging,
            ReservedMemory(staging, staging.reserve(4 * staging.buffer_bytes)),
            wake,
            self._fail,
            0,
        )
        self.transport.when_quiet(self._quiet.set)

    def _post(self, event: msgspec.Struct) -> None:
        self._events.append(event)

    def _fail(self, error: ObjectCacheError) -> None:
        raise AssertionError(error)

    async def payload(self, mode: DeliveryMode) -> bytes:
        seen = 0
        while seen < contract.LAYERS:
            tag, end_layer = await asyncio.to_thread(self._client.next_heard)
            assert (tag, seen < end_layer) == (TAG, True)
            for layer in range(seen, end_layer):
                if mode is DeliveryMode.LAYERWISE:
                    assert self._layer(layer) == contract.DATA[:, layer].tobytes()
            seen = end_layer
        return self._client.array[SKIPPED_BYTES:].tobytes()

    def _layer(self, layer: int) -> bytes:
        layer_bytes = contract.CHUNKS * contract.SLICE
        begin = SKIPPED_BYTES + layer * layer_bytes
        return self._client.array[begin : begin + layer_bytes].tobytes()

    async def failure(self) -> tuple[int, ObjectCacheError]:
        await self._ended.wait()
        event = self._events[-1]
        assert isinstance(event, DeliveryFailure)
        assert event.tag == TAG
        return event.failed_layer, ObjectCacheError.from_wire(event.error)

    def released(self) -> bool:
        assert self._quiet.wait(WAIT_S)
        return not self._target.leases and self._server.staging.promised_bytes == 0

    def close(self) -> None:
        self._client.close()
        self._server.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "TIMEOUT_S", WAIT_S)


@pytest.mark.parametrize("mode", [DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE])
def test_the_payload_arrives_whole_and_the_memory_is_let_go(
    engine: Engine, dispatcher: Dispatcher, mode: DeliveryMode
) -> None:
    contract.test_the_payload_arrives_whole_and_the_memory_is_let_go(
        engine, dispatcher, VerbsHarness, mode
    )


def test_a_failure_names_the_first_incomplete_layer_and_the_memory_is_let_go(
    engine: Engine, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract.test_a_failure_names_the_first_incomplete_layer_and_the_memory_is_let_go(
        engine, dispatcher, VerbsHarness, monkeypatch
    )


def test_a_cancelled_delivery_ends_and_lets_its_memory_go(
    engine: Engine, dispatcher: Dispatcher
) -> None:
    contract.test_a_cancelled_delivery_ends_and_lets_its_memory_go(engine, dispatcher, VerbsHarness)
