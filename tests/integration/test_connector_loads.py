"""Loads of a vLLM worker over a real server, within the bytes that they may hold together."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.store import Store
from objectcache.connectors.vllm.worker.block_copies import WaitedCopies
from objectcache.connectors.vllm.worker.loads import Loads
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, MIB
from tests.servers import RunningServer, running_server

LAYERS = 8
LAYOUT = KvLayout(
    num_layers=LAYERS,
    chunk_tokens=16,
    per_layer_chunk_bytes=32 * KIB,
    dtype="bfloat16",
    fingerprint="f",
)
CHUNKS = 64
KEYS = [f"{number:064x}" for number in range(CHUNKS)]
LOAD_BYTES_MAX = 5 * MIB
BOUND_S = 60.0  # of a request and of a layer; generous, because machines may be busy


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that has the chunks."""
    # A client that stands still for less, as a busy machine may have one do, is not given up.
    patient = "gateway.session_heartbeat_s=60"
    with running_server(tmp_path_factory.mktemp("server") / "data", patient) as server:
        store = store_of(server)
        shape = (CHUNKS, LAYERS, LAYOUT.per_layer_chunk_bytes)
        store.bucket().put(KEYS, np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        store.close()
        yield server


def store_of(server: RunningServer, transport: str = "auto") -> Store:
    values = {
        "endpoint": server.endpoint,
        "bucket": "kv-loads",
        "credentials_file": str(server.credentials_file),
        "load_bytes_max": LOAD_BYTES_MAX,
        "transport": transport,
    }
    return Store(StoreConfiguration.from_mapping(values, {}), LAYOUT, BOUND_S)


class Worker:
    """Steps without a model between them."""

    def __init__(self, store: Store) -> None:
        layer: Any = SimpleNamespace(load=lambda blocks, slices: None)
        bucket = store.bucket()

        def fetch(plan: LoadPlan) -> Any:
            return bucket.fetch([name.decode() for name in plan.hashes], delivery="layerwise")

        self.loads = Loads(fetch, WaitedCopies(cast("Any", [layer] * LAYERS)), timeout_s=BOUND_S)

    def step(self, *loads: tuple[int, int]) -> set[int]:
        """Load these ranges of chunks at once; the chunks that failed."""
        self.loads.start(
            [
                LoadPlan(
                    request_id=f"r{number}",
                    block_ids=tuple(range(begin, end)),
                    hashes=tuple(key.encode() for key in KEYS[begin:end]),
                    context_tokens=1000,
                    weights="",
                )
                for number, (begin, end) in enumerate(loads)
            ]
        )
        for layer in range(LAYERS):
            self.loads.wait(layer)
        self.loads.end_step()
        return self.loads.take_failed_blocks()


@pytest.mark.parametrize("transport", ["auto", "nixl", "body"])
def test_steps_that_load_all_they_may_do_so_back_to_back(
    stored: RunningServer, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    store = store_of(stored, transport)
    most = LoadBudget(LOAD_BYTES_MAX, LAYOUT.chunk_bytes).chunk_count_max
    assert most * LAYOUT.chunk_bytes == 4 * MIB
    worker = Worker(store)
    steps = [[(0, most)], [(20, 20 + most // 2), (40, 44)], [(60, 61), (8, 16)], [(9, 9 + most)]]
    failed = [worker.step(*steps[number % 4]) for number in range(80)]
    assert failed == [set[int]()] * 80
    worker.loads.close()
    store.close()


def test_a_load_that_there_is_no_memory_for_keeps_no_other_from_loading(
    stored: RunningServer,
) -> None:
    store = store_of(stored)
    worker = Worker(store)
    assert worker.step((0, 40)) == set(range(40)), "larger than all of the memory"
    both = worker.step((0, 16), (20, 36))
    assert both in (set(range(16)), set(range(20, 36))), "together larger than the memory"
    assert worker.step((0, 16)) == set()
    worker.loads.close()
    store.close()


def test_the_first_load_finds_memory_that_was_made_and_registered_before(
    stored: RunningServer,
) -> None:
    store = store_of(stored)
    pool = store.client._core.shared.pool
    assert store.client.stock_memory([5 * MIB, 4 * MIB]) == 5 * MIB
    assert repr(pool) == "<TargetPool 1/1 free, 6/6.66667 MiB>"
    (region,) = pool._free
    registered = region._registered
    assert registered is not None
    worker = Worker(store)
    assert worker.step((0, 20)) == set()
    worker.loads.close()
    assert pool._region_count == 1
    assert region._registered == registered
    store.close()


def test_memory_is_not_made_for_deliveries_that_come_in_bodies(stored: RunningServer) -> None:
    store = store_of(stored, "body")
    with pytest.raises(Unavailable, match="in bodies"):
        store.client.stock_memory([MIB])
    store.close()
