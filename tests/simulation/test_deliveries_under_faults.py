"""Many deliveries, a faulty engine and slow clients, in one thread and in the same order each run.

The schedule and the deliveries are the server's own; the clients' side is simulated. A failure
prints the seed; `SEEDS` alone decides what happens.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import DeliveryFailed, Unavailable
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.plan import (
    plan_chunks,
)
from objectcache_storage_server.engines.base import Engine, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import NextFragment
from objectcache_storage_server.testing import FaultyEngine
from objectcache_storage_server.transports.memory import MemoryTransport
from tests.schedules import a_recorder, a_scheduler, demand_of

CHUNKS, LAYERS, SLICE, FRAGMENT = 7, 4, 64, 150
DELIVERIES = 12
DATA = np.random.default_rng(9).integers(0, 256, (CHUNKS, LAYERS, SLICE), np.uint8)
SEEDS = range(60)


class SlowClient(MemoryTransport):
    """Has room for a few fragments at a time, and takes them when the simulation says so."""

    def __init__(self, length_bytes: int, room: int) -> None:
        super().__init__(length_bytes)
        self.room = room

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        return True


class Simulation:
    """Runs deliveries to their ends, one random step at a time."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.random = random.Random(seed)
        self.schedule = a_scheduler(ServedDelivery)
        self.ended: list[ServedDelivery] = []
        self.taken: list[tuple[ServedDelivery, Fragment]] = []  # by readers that have not finished
        self.clients: dict[ServedDelivery, SlowClient] = {}
        for _ in range(DELIVERIES):
            mode = self.random.choice([DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE])
            self.start(engine, mode)

    def start(self, engine: Engine, mode: DeliveryMode) -> None:
        keys = tuple(f"k{index}" for index in range(self.random.randint(1, CHUNKS)))
        descriptor = Descriptor(keys, LAYERS, 16, SLICE, mode)
        opened = engine.open_many("b", keys)
        plan = plan_chunks(descriptor, opened.placements(), mode, FRAGMENT)
        client = SlowClient(plan.payload_bytes, self.random.randint(1, 3))
        delivery = ServedDelivery(plan, opened, client, self.end, a_recorder())
        self.clients[delivery] = client
        self.schedule.add(delivery, demand_of(plan), 0.0, pooled=False)

    def end(self, delivery: ServedDelivery) -> None:
        self.ended.append(delivery)
        self.schedule.remove(delivery, 0.0)

    def step(self) -> None:
        """A reader takes or finishes a fragment, a client takes one, or rarely a client goes."""
        choice = self.random.random()
        if choice < 0.45 and len(self.taken) < 3:
            work = self.schedule.next(0.0)
            if isinstance(work, NextFragment):
                self.taken.append((work.job, work.fragment))
        elif choice < 0.8 and self.taken:
            delivery, fragment = self.taken.pop(self.random.randrange(len(self.taken)))
            delivery.execute(fragment)
        elif choice < 0.995:
            delivery = self.random.choice(list(self.clients))
            self.clients[delivery].room += 1
            self.schedule.wake(delivery, 0.0)
        else:
            self.random.choice(list(self.clients)).fail(DeliveryFailed("the client is gone"))

    def check(self) -> None:
        """All ended once, let everything go, and are whole or say where they stop."""
        assert len(self.ended) == len(set(self.ended)) == DELIVERIES
        for delivery, client in self.clients.items():
            assert client.closed
            chunks = DATA[: len(client.buffer) // (LAYERS * SLICE)]
            layerwise = getattr(delivery.plan, "mode", None) is DeliveryMode.LAYERWISE
            payload = np.frombuffer(client.buffer, np.uint8)
            assert client.announced == sorted(set(client.announced))
            if layerwise:  # every announced layer is in place, also after a failure
                got = payload.reshape(LAYERS, -1)[: delivery.end_layer]
                expected = chunks.transpose(1, 0, 2).reshape(LAYERS, -1)[: delivery.end_layer]
                assert (got == expected).all()
            if delivery.state is DeliveryState.COMPLETE:
                assert client.failure is None
                assert client.written_bytes == len(client.buffer)
                assert client.announced[-1] == LAYERS
                if not layerwise:
                    assert payload.tobytes() == chunks.tobytes()
            else:
                assert client.failure is not None
                layer, error = client.failure
                assert layer == delivery.end_layer < LAYERS
                assert isinstance(error, Unavailable | DeliveryFailed)


def stocked_engine() -> MemoryEngine:
    engine = MemoryEngine()
    engine.create_bucket(BucketInfo(name="b", owner="root", region="", created_s=0.0))
    puts = []
    for index in range(CHUNKS):
        staged = engine.stage("b", f"k{index}", SLICE)
        staged.write_at(0, memoryview(DATA[index].tobytes()))
        puts.append(StagedPut(staged, "e"))
    engine.commit(puts)
    return engine


@pytest.mark.parametrize("seed", SEEDS)
def test_every_delivery_ends_whole_or_says_where_it_stops(seed: int) -> None:
    engine = FaultyEngine(stocked_engine(), seed, fault_rate=0.01, operations={"read_many"})
    simulation = Simulation(engine, seed)
    for _ in range(50_000):
        if len(simulation.ended) == DELIVERIES and not simulation.taken:
            break
        simulation.step()
    simulation.check()


def test_the_simulation_sees_both_ends() -> None:
    """Over all seeds some deliveries complete, some fail on the engine, some on their client."""
    states = {DeliveryState.COMPLETE: 0, DeliveryState.FAILED: 0}
    faults = 0
    for seed in SEEDS:
        engine = FaultyEngine(stocked_engine(), seed, fault_rate=0.01, operations={"read_many"})
        simulation = Simulation(engine, seed)
        while len(simulation.ended) < DELIVERIES or simulation.taken:
            simulation.step()
        faults += engine.fault_count
        for delivery in simulation.ended:
            states[delivery.state] += 1
    assert min(states.values()) > 50
    assert 0 < faults < states[DeliveryState.FAILED]
