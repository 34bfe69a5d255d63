"""What a connector loads at once has memory, and gets it back before the next step needs it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from objectcache.connectors.sglang.page_store import PageStaging
from objectcache.connectors.store.configuration import LOAD_BYTES_MAX, StoreConfiguration
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.store.outage import Outage
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.worker.block_copies import WaitedCopies
from objectcache.connectors.vllm.worker.loads import Loads
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.gpu.device import CopyFailed, DeviceFailed
from objectcache.landing.memory_file import file_bytes_for
from objectcache.landing.regions import Landing
from objectcache.landing.target_pool import MemoryInUse, TargetPool, pool_bytes_for
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, Unavailable
from objectcache_schemas.limits import KIB, MIB

LAYERS = 3
GIVEN = {
    "endpoint": "http://127.0.0.1:9000",
    "bucket": "kv-cache",
    "access_key": "key",
    "secret_key": "secret",
}


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is freed but by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- how much at once ---


def test_one_load_has_as_many_chunks_as_fit_with_what_their_memory_is_rounded_up_by() -> None:
    for bytes_max in (100 * KIB, MIB, 3 * MIB, 7 * MIB, 24 * MIB):
        budget = LoadBudget(bytes_max, 10 * KIB)
        most = budget.chunk_count_max
        assert file_bytes_for(most * 10 * KIB) <= bytes_max < file_bytes_for((most + 1) * 10 * KIB)
        assert (budget.fitting(most - 1), budget.fitting(most + 1)) == (most - 1, most)
    with pytest.raises(InvalidRequest, match="'load_bytes_max' is 65535; one chunk of this model"):
        LoadBudget(64 * KIB - 1, 10 * KIB)


def test_loads_of_one_step_share_the_bytes_and_the_number_until_the_next_one() -> None:
    budget = LoadBudget(8 * MIB, MIB, loads_max=3)
    budget.take(4)
    budget.take(2)
    assert budget.has_room(2)
    assert not budget.has_room(3)
    budget.take(1)
    assert not budget.has_room(1)
    budget.give_back(4)
    assert budget.has_room(4)
    assert repr(budget) == "<LoadBudget 2 loads, 3/8 MiB>"
    budget.clear()
    assert budget.has_room(8)


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_the_budget_has_room_in_the_pool_whatever_was_there_before(seed: int) -> None:
    chance = random.Random(seed)
    budget = LoadBudget(5 * MIB, 48 * KIB, loads_max=6)
    pool = TargetPool(pool_bytes_for(budget.bytes_max))
    for _ in range(60):
        budget.clear()
        step: list[Landing] = []
        for _ in range(8):
            count = budget.fitting(chance.randint(1, chance.choice([2, 20, 200])))
            if budget.has_room(count):
                budget.take(count)
                step.append(pool.lease(count * 48 * KIB, 0))
        assert step
        while step:
            step.pop().settle()


def test_the_clients_memory_is_what_the_setting_needs() -> None:
    assert StoreConfiguration.from_mapping(GIVEN, {}).load_bytes_max == LOAD_BYTES_MAX
    chosen = StoreConfiguration.from_mapping({**GIVEN, "load_bytes_max": 24 * MIB}, {})
    with chosen.connect() as client:
        assert client._core.settings.target_bytes_max == pool_bytes_for(24 * MIB) == 32 * MIB
    for wrong in (64 * KIB - 1, True, "4 GiB", 1.5e6):
        with pytest.raises(InvalidRequest, match="'load_bytes_max' must be 65536 bytes"):
            StoreConfiguration.from_mapping({**GIVEN, "load_bytes_max": wrong}, {})


# --- memory that is about to come back ---


class EndingCondition(threading.Condition):
    """While somebody waits, a thread lets go of an array."""

    def __init__(self, held: list[Landing]) -> None:
        super().__init__()
        self._held = held

    def wait(self, timeout: float | None = None) -> bool:
        self._held.clear()
        return super().wait(timeout)


def test_arrays_of_a_delivery_that_has_ended_are_waited_for() -> None:
    pool = TargetPool(MIB)
    held = [pool.lease(MIB, 0)]
    held[0].settle()
    pool._condition = EndingCondition(held)
    with without_collector():
        assert len(pool.lease(MIB, 10.0).array) == MIB


def test_arrays_of_a_delivery_that_goes_on_are_not_waited_for() -> None:
    pool = TargetPool(MIB)
    held = [pool.lease(MIB, 0)]
    pool._condition = EndingCondition(held)
    with pytest.raises(MemoryInUse, match="target_bytes_max"):
        pool.lease(MIB, 10.0)
    assert held


def test_a_device_that_fails_is_no_outage_of_the_store() -> None:
    outage = Outage(logging.getLogger("objectcache.connectors"))
    for error in (DeviceFailed("cudaMemcpyAsync: CUDA error 719"), CopyFailed("a link failed")):
        outage.failed("a load", error)
    assert outage.rest_s == 0.0
    outage.failed("a load", Unavailable("no answer"))
    assert outage.rest_s > 0.0


def test_memory_of_the_clients_own_that_is_in_use_is_no_outage() -> None:
    outage = Outage(logging.getLogger("objectcache.connectors"))
    outage.failed("a load", MemoryInUse("no room for 7 bytes"))
    outage.failed("a load", InvalidRequest("the payload needs 7 bytes of memory"))
    assert outage.rest_s == 0.0
    assert outage.failure_count == 2


# --- vLLM's loads ---


class HeldDelivery:
    """A delivery whose end the server is slow with."""

    chunk_count, slice_bytes, layers = 2, 8, range(LAYERS)

    def __init__(self, fails_at: int = LAYERS) -> None:
        self._fails_at = fails_at
        self._payload = np.zeros((LAYERS, 2, 8), np.uint8)
        self.progress = LayerProgress(0, LAYERS)
        self.asked_meanwhile = threading.Event()
        self.closed = False

    def wait_layer(self, layer: int, timeout_s: float) -> Any:
        self.progress.advance(layer + 1)
        if layer == self._fails_at:
            try:
                raise OSError("the connection broke")
            except OSError as error:
                raise DeliveryFailed("cut", layer=layer) from error
        return self._payload[layer]

    def close(self) -> None:
        self.asked_meanwhile.wait(0.2)  # for what must not come
        self.closed = True


def plan_of(name: str) -> LoadPlan:
    return LoadPlan(name, (3, 4), (b"a", b"b"), 100, "w")


def loads_of(deliveries: list[Any]) -> Loads:
    layer = SimpleNamespace(load=lambda blocks, slices: None)
    return Loads(
        lambda plan: deliveries.pop(0), WaitedCopies(cast("Any", [layer] * LAYERS)), timeout_s=10.0
    )


def step(loads: Loads, name: str) -> None:
    loads.start([plan_of(name)])
    for layer in range(LAYERS):
        loads.wait(layer)
    loads.end_step()


def test_a_step_asks_for_nothing_before_the_deliveries_of_the_last_one_are_closed() -> None:
    first, closed = HeldDelivery(), list[bool]()

    def fetch(plan: LoadPlan) -> Any:
        closed.append(first.closed)
        first.asked_meanwhile.set()
        return first if plan.request_id == "first" else HeldDelivery()

    layer = SimpleNamespace(load=lambda blocks, slices: None)
    loads = Loads(fetch, WaitedCopies(cast("Any", [layer] * LAYERS)), timeout_s=10.0)
    loads.start([plan_of("first")])
    for number in range(LAYERS):
        loads.wait(number)
    first.asked_meanwhile.clear()
    loads.end_step()
    step(loads, "second")
    assert closed == [False, True]
    loads.close()


@pytest.mark.parametrize("fails_at", [LAYERS, 1], ids=["whole", "failed"])
def test_a_delivery_that_is_closed_holds_its_memory_no_longer(fails_at: int) -> None:
    deliveries: list[Any] = [HeldDelivery(fails_at)]
    deliveries[0].asked_meanwhile.set()
    memory = weakref.ref(deliveries[0]._payload)
    loads = loads_of(deliveries)
    with without_collector():
        step(loads, "r")
        for closed in loads._shared.closing():
            closed.result(10.0)
        assert memory() is None
    assert loads.take_failed_blocks() == (set[int]() if fails_at == LAYERS else {3, 4})
    loads.close()


# --- SGLang's memory for puts ---


@pytest.mark.parametrize(
    ("transport", "asked"),
    [("auto", "shared"), ("shared_memory", "shared"), ("nixl", "fabric"), ("verbs", "fabric")],
)
def test_memory_for_puts_is_what_the_transport_reads(transport: str, asked: str) -> None:
    made: list[tuple[str, int]] = []

    def make(kind: str, length_bytes: int) -> Any:
        made.append((kind, length_bytes))
        raise Unavailable("not here")

    client: Any = SimpleNamespace(
        shared_memory_target=lambda length: make("shared", length),
        fabric_target=lambda length: make("fabric", length),
    )
    given = StoreConfiguration.from_mapping(GIVEN, {})
    chosen = dataclasses.replace(given, transport=transport)  # the fabrics' packages or not
    staging = PageStaging(chosen.put_memory(client), 4096)
    with staging.memory() as memory:
        assert len(memory) == 4096
    assert made == [(asked, 4096)]


def test_puts_in_bodies_need_no_memory_that_a_server_reads() -> None:
    chosen = StoreConfiguration.from_mapping({**GIVEN, "transport": "body"}, {})
    assert chosen.put_memory(cast("Any", None)) is None
