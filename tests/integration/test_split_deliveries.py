"""Deliveries that two storage servers share: each writes its chunks of every layer into one target.

They share a store in a folder. What each did is read in its log, where a get over a session has a
line.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import objectcache
from objectcache.channel import requests
from objectcache.channel.responses import SessionReply, parse_reply
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, NotFound
from objectcache_schemas.layout import KvLayout
from objectcache_storage_server.engines.stores.open_store import create_store
from tests.integration.fleet import RunningFleet
from tests.integration.served import wait_until

LAYOUT = KvLayout(
    num_layers=16, chunk_tokens=16, per_layer_chunk_bytes=64 << 10, dtype="uint8", fingerprint="t"
)
CHUNK_COUNT = 9
TOKENS = list(range(16 * CHUNK_COUNT))
SHAPE = (CHUNK_COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
CHUNKS = np.random.default_rng(11).integers(0, 256, SHAPE, dtype=np.uint8)
SLOW_BYTES_PER_S = 3 << 20  # a whole delivery takes three seconds
SLOWER_BYTES_PER_S = SLOW_BYTES_PER_S / 8
DEADLINE_S = 20.0

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed"
)


@contextmanager
def running_fleet(directory: Path) -> Iterator[RunningFleet]:
    """Two servers of one store, both of which know the prefix."""
    address = f"file://{directory / 'store'}"
    create_store(address)
    engine = f"storage.engine={address}"
    with RunningFleet(directory, 2, engine, "storage.log_level=info") as fleet:
        with fleet.client() as client:
            bucket = client.kv_bucket("kvs", LAYOUT, create=True)
            bucket.put(bucket.chunk_keys(TOKENS), CHUNKS)
        wait_for_both(fleet)
        fleet.wait_until_replayed()
        yield fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("split")) as running:
        yield running


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    """One whose servers may be killed."""
    with running_fleet(tmp_path) as running:
        yield running


@pytest.fixture
def bucket(fleet: RunningFleet) -> Iterator[objectcache.KvBucket]:
    with fleet.client(split_from_bytes=1) as client:
        yield client.kv_bucket("kvs", LAYOUT)


def wait_for_both(fleet: RunningFleet) -> None:
    """Until the gateway has heard of every server."""
    with fleet.client(split_from_bytes=1) as client:
        servers = client._core.shared.servers

        def both() -> bool:
            servers._listed_until_s = 0.0
            return len(servers.sessions()) == 2

        wait_until(both, "sessions with both servers")


def check(delivery: objectcache.Delivery, layers: range = range(LAYOUT.num_layers)) -> None:
    for layer in layers:
        assert np.array_equal(delivery.wait_layer(layer), CHUNKS[: delivery.chunk_count, layer])


def gets(fleet: RunningFleet, request_id: str) -> list[int]:
    """How many deliveries of this name each server has had, over its sessions."""
    logs = [fleet.log(one.name).splitlines() for one in fleet.servers]
    return [sum("session_get" in line and request_id in line for line in log) for log in logs]


def test_each_server_delivers_its_part_under_one_name(
    fleet: RunningFleet, bucket: objectcache.KvBucket
) -> None:
    wait_for_passes(fleet, bucket)


def wait_for_passes(fleet: RunningFleet, bucket: objectcache.KvBucket) -> None:
    """Fetch until both sessions get by themselves."""
    keys = bucket.chunk_keys(TOKENS)
    request_ids: list[str] = []

    def is_in_both_logs() -> bool:
        """Those over HTTP are in none, until the sessions may ask by themselves."""
        with bucket.fetch(keys) as delivery:
            check(delivery)
            assert delivery.path == "agg"
            assert delivery.transport == "shared_memory"
            assert delivery.chunk_count == CHUNK_COUNT
        request_ids.append(delivery.request_id)
        return any(gets(fleet, one) == [1, 1] for one in request_ids)

    wait_until(is_in_both_logs, "a delivery's line in both logs")


def test_layers_and_targets_of_the_callers(bucket: objectcache.KvBucket) -> None:
    keys = bucket.chunk_keys(TOKENS)
    client = objectcache.Client.from_core(bucket._core)
    target = client.shared_memory_target(CHUNKS.nbytes + 4096)
    for _ in range(3):
        target.array[:] = 0
        with bucket.fetch(keys, layers=(3, 9), target=target) as delivery:
            check(delivery, range(3, 9))
    target.close()


def test_a_prefix_that_is_stored_in_part(bucket: objectcache.KvBucket) -> None:
    keys = bucket.chunk_keys([*TOKENS, *range(5000, 5032)])
    with bucket.fetch(keys, on_missing="truncate") as delivery:
        assert delivery.chunk_count == CHUNK_COUNT
        check(delivery)
    with pytest.raises(NotFound) as caught:
        bucket.fetch(keys)
    assert caught.value.details.missing_index == CHUNK_COUNT
    with bucket.fetch(bucket.chunk_keys(TOKENS)) as delivery:
        check(delivery)


def test_memory_is_used_again(bucket: objectcache.KvBucket) -> None:
    keys = bucket.chunk_keys(TOKENS)
    for _ in range(20):
        with bucket.fetch(keys) as delivery:
            delivery.wait_layer(LAYOUT.num_layers - 1)
        del delivery
    pool = bucket._core.shared.pool
    wait_until(lambda: "1/1 free" in repr(pool), "one region to be free again")


def test_a_delivery_that_is_closed_early_stops_at_both(
    fleet: RunningFleet, bucket: objectcache.KvBucket
) -> None:
    keys = bucket.chunk_keys(TOKENS)
    wait_for_passes(fleet, bucket)
    with bucket.fetch(keys, rate_bytes_per_s=SLOWER_BYTES_PER_S) as slow:
        slow.wait_layer(0)
    with pytest.raises(DeliveryFailed):
        slow.wait_layer(LAYOUT.num_layers - 1)
    wait_until(lambda: gets(fleet, slow.request_id) == [1, 1], "both to have ended")
    with bucket.fetch(keys) as delivery:
        check(delivery)


@pytest.mark.parametrize("over_sessions", [False, True], ids=["http", "sessions"])
def test_a_server_that_is_killed_is_stood_in_for(
    own_fleet: RunningFleet, over_sessions: bool
) -> None:
    with own_fleet.client(split_from_bytes=1, timeout_s=DEADLINE_S) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        if over_sessions:
            with bucket.fetch(keys) as first:
                check(first)
        with bucket.fetch(keys, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(2)
            own_fleet.servers[1].process.kill()
            check(delivery)
        with bucket.fetch(keys) as after:
            check(after)


@pytest.mark.parametrize("over_sessions", [False, True], ids=["http", "sessions"])
def test_layers_of_two_versions_of_a_chunk_are_never_put_together(
    own_fleet: RunningFleet, over_sessions: bool
) -> None:
    with own_fleet.client(split_from_bytes=1, timeout_s=60.0) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        names = bucket.chunk_keys(TOKENS)
        if over_sessions:
            with bucket.fetch(names) as first:
                check(first)
        with bucket.fetch(names, rate_bytes_per_s=SLOWER_BYTES_PER_S / 2) as delivery:
            delivery.wait_layer(0)
            for name, chunk in ((names[0], CHUNKS[0]), (names[-1], CHUNKS[-1])):
                bucket.delete(name)
                bucket.put([name], 255 - chunk[np.newaxis])
            own_fleet.wait_until_replayed()  # either of them may have stored what is new
            own_fleet.servers[1].process.kill()
            with pytest.raises(DeliveryFailed, match="not known to be those"):
                check(delivery)
        with bucket.fetch(names) as after:
            layer = after.wait_layer(LAYOUT.num_layers - 1)
            assert np.array_equal(layer[-1], 255 - CHUNKS[-1, -1])


@needs_nixl
def test_over_a_fabric_it_is_the_same(own_fleet: RunningFleet) -> None:
    with own_fleet.client(transport="nixl", split_from_bytes=1, timeout_s=DEADLINE_S) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        keys = bucket.chunk_keys(TOKENS)

        def by_both() -> bool:
            with bucket.fetch(keys) as delivery:
                check(delivery)
            return gets(own_fleet, delivery.request_id) == [1, 1]

        wait_until(by_both, "both servers to have delivered a part over their sessions")
        buffer = np.zeros(CHUNKS.nbytes, np.uint8)
        target = client.fabric_target(buffer=buffer)
        with bucket.fetch(keys, target=target, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(2)
            own_fleet.servers[1].process.kill()
            check(delivery)
        with bucket.fetch(keys) as after:
            check(after)


def test_a_server_that_stands_still_is_stood_in_for(own_fleet: RunningFleet) -> None:
    with own_fleet.client(split_from_bytes=1, timeout_s=30.0) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(keys) as first:
            check(first)
        with bucket.fetch(keys, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(2)
            with own_fleet.servers[0].standing_still():
                check(delivery)
            with bucket.fetch(keys) as after:  # while the server that woke up may still write
                check(after)


def test_a_server_that_stops_lets_its_part_end(own_fleet: RunningFleet) -> None:
    with own_fleet.client(split_from_bytes=1, timeout_s=DEADLINE_S) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(keys) as first:
            check(first)
        stopping = threading.Thread(target=own_fleet.servers[0].process.terminate)
        with bucket.fetch(keys, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(1)
            stopping.start()
            check(delivery)
        while stopping.is_alive():
            with bucket.fetch(keys) as during:
                check(during)
        stopping.join()


def test_a_delivery_fails_when_nobody_is_left(own_fleet: RunningFleet) -> None:
    with own_fleet.client(split_from_bytes=1, timeout_s=DEADLINE_S) as client:
        bucket = client.kv_bucket("kvs", LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(keys, rate_bytes_per_s=SLOWER_BYTES_PER_S) as delivery:
            delivery.wait_layer(0)
            for server in own_fleet.servers:
                server.process.kill()
            begun_s = time.monotonic()
            with pytest.raises(DeliveryFailed):
                delivery.wait_layer(LAYOUT.num_layers - 1)
            assert time.monotonic() - begun_s < DEADLINE_S
            assert np.array_equal(delivery.wait_layer(0), CHUNKS[:, 0])


def test_what_is_no_number_of_bytes_is_refused(fleet: RunningFleet) -> None:
    with pytest.raises(InvalidRequest, match="split_from_bytes"):
        fleet.client(split_from_bytes=-1)


def test_a_server_id_is_checked(bucket: objectcache.KvBucket) -> None:
    channel = bucket._core.channel
    for server_id in (b"", b"1234567"):
        with pytest.raises(InvalidRequest, match="x-objectcache-server-id must be 16"):
            channel.call(requests.open_session("", server_id))
    gone = parse_reply(channel.call(requests.open_session("", bytes(8))).body, SessionReply, "it")
    assert gone.ticket  # of another server: who asks is no worse off than without the header
