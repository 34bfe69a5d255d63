"""A prefix of many times the landing memory comes through it, layer after layer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from objectcache import DeliveryFailed, KvLayout
from objectcache.landing.targets import SharedMemoryTarget
from objectcache_runtime.settings import RelaySettings
from objectcache_schemas.descriptor import RATE_MIN
from objectcache_schemas.operators.server_state import GetHealth, Health
from tests.encoded_delivery.prefixes import ZSTD, client_of, store_as
from tests.fetcher.fetchers import RunningFetcher
from tests.fetcher.payloads import bfloat16s
from tests.integration.served import wait_until
from tests.relay.relays import NIXL, landing_mapped_bytes, nothing_left
from tests.relay.relays import SETTINGS as NIXL_SETTINGS
from tests.servers import RunningServer, standing_still, start_server, stop_whole
from tests.storage_client import StorageClient

BOUND_S = 60.0
BUCKET = "large"
CHUNKS = 32
LAYOUT = KvLayout(
    num_layers=40,
    chunk_tokens=16,
    per_layer_chunk_bytes=64 << 10,
    dtype="bfloat16",
    fingerprint="large",
)
LANDING_BYTES = 4 << 20
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens)
SETTINGS = (f"relay.landing_bytes={LANDING_BYTES}", "relay.hold_s=0")
TRANSPORTS = ("shared_memory", "body")  # that a ring is filled by


@pytest.fixture(scope="module")
def data() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return bfloat16s(CHUNKS, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)


@pytest.fixture(scope="module")
def large_server(
    tmp_path_factory: pytest.TempPathFactory,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("large"), *NIXL_SETTINGS) as running:
        with client_of(running) as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
            store_as(running, BUCKET, ZSTD)
            keys = bucket.chunk_keys(TOKENS)
            for first in range(0, CHUNKS, 8):
                bucket.put(keys[first : first + 8], data[first : first + 8])
        yield running


class MemoryWatch:
    """What a fetcher's processes have at most, sampled in a thread: memory of their own, and what
    is landing: as the fetcher counts it, and as the system does, in the process that maps most.
    """

    def __init__(self, fetcher: RunningFetcher, target: SharedMemoryTarget) -> None:
        """`target` is the engine's, which is mapped too."""
        self._fetcher = fetcher
        self._target = target
        self.mapped_bytes_max = 0
        self.own_bytes_max = self.landing_bytes_max = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._look()

    def _look(self) -> None:
        pids = [self._fetcher.process.pid, *(one.pid for one in self._fetcher.workers)]
        self.own_bytes_max = max(self.own_bytes_max, sum(map(own_bytes, pids)))
        mapped_bytes = max(landing_mapped_bytes(pid, self._target) for pid in pids)
        self.mapped_bytes_max = max(self.mapped_bytes_max, mapped_bytes)
        landing = self._fetcher.samples()
        granted = sum(landing["landing_bytes", state] for state in ("granted", "held", "kept"))
        self.landing_bytes_max = max(self.landing_bytes_max, int(granted))

    def __enter__(self) -> MemoryWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def own_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system counts it")


@pytest.mark.parametrize(
    ("transport", "times"),
    [*product(TRANSPORTS, (4, 16, 20)), pytest.param("nixl", 16, marks=NIXL.marks)],
)
def test_a_prefix_of_many_times_the_landing_memory_is_decoded_within_it(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    times: int,
    transport: str,
) -> None:
    landing_bytes = data.nbytes // times
    settings = (
        f"relay.landing_bytes={landing_bytes}",
        "relay.hold_s=0",
        f"relay.transport={transport}",
    )
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        target = client.shared_memory_target(data.nbytes)
        with bucket.fetch(keys, delivery="layerwise", layers=(0, 2), target=target) as delivery:
            delivery.wait(BOUND_S)  # what is made once: memory of a small ring's size, too
        asked_before = fetcher.samples()["claims_total", "miss"]
        target.claim(BOUND_S).settle()
        before = sum(own_bytes(pid) for pid in (fetcher.process.pid, *worker_pids(fetcher)))
        with (
            MemoryWatch(fetcher, target) as watch,
            bucket.fetch(keys, delivery="layerwise", target=target) as delivery,
        ):
            for layer, payload in delivery:
                assert np.array_equal(payload, data[:, layer]), f"layer {layer}"
        asked = fetcher.samples()["claims_total", "miss"] - asked_before
        assert asked == 1
        assert 0 < watch.landing_bytes_max <= landing_bytes
        assert 0 < watch.mapped_bytes_max <= landing_bytes * 1.1
        assert watch.own_bytes_max - before < data.nbytes // 8
        assert fetcher.decoded_bytes == {ZSTD: data.nbytes + data[:, :2].nbytes}
        wait_until(lambda: nothing_left(fetcher), "landing memory came back")
        with bucket.fetch(keys, delivery="layerwise", layers=(5, 31)) as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data[:, 5:31].transpose(1, 0, 2))


def test_a_ring_at_a_rate_keeps_no_other_from_the_memory(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
) -> None:
    room = f"relay.landing_bytes={2 * LANDING_BYTES}"  # half of it for what comes at a rate
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", room, SETTINGS[1]) as fetcher,
        fetcher.client("shared_memory") as slow,
        fetcher.client("shared_memory") as other,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        of_slow, of_other = (client.kv_bucket(BUCKET, LAYOUT) for client in (slow, other))
        with of_slow.fetch(
            keys, delivery="layerwise", rate_bytes_per_s=RATE_MIN
        ) as slow_one:  # a layer takes half a minute
            assert fetcher.samples()["landing_bytes", "granted"] == LANDING_BYTES
            with of_other.fetch(keys, delivery="layerwise") as delivery:
                assert np.array_equal(delivery.wait(BOUND_S), data.transpose(1, 0, 2))
            assert not slow_one.progress.complete
        wait_until(lambda: nothing_left(fetcher), "landing memory came back")
        with of_slow.fetch(keys, delivery="layerwise", rate_bytes_per_s=64 << 20) as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data.transpose(1, 0, 2))


def worker_pids(fetcher: RunningFetcher) -> list[int]:
    return [one.pid for one in fetcher.workers]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_engines_with_prefixes_over_the_memory_and_one_with_a_small_one_all_get_them(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    transport: str,
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}", f"fetcher.wait_s={BOUND_S:g}")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as one,
        fetcher.client("shared_memory") as other,
        fetcher.client("shared_memory") as small,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        buckets = [client.kv_bucket(BUCKET, LAYOUT) for client in (one, other)]
        first = buckets[0].fetch(keys, delivery="layerwise")
        second = buckets[1].fetch(keys[:31], delivery="layerwise")
        few = small.kv_bucket(BUCKET, LAYOUT)

        def all_of_few() -> bool:
            with few.fetch(keys[:1], delivery="layerwise") as third:
                return np.array_equal(third.wait(BOUND_S), data[:1].transpose(1, 0, 2))

        with first, second, ThreadPoolExecutor() as threads:
            with standing_still(*worker_pids(fetcher)):  # rings let nothing go
                wait_until(lambda: free_bytes(fetcher) < LAYOUT.chunk_bytes, "rings have it all")
                came = threads.submit(all_of_few)
                with pytest.raises(TimeoutError):
                    came.result(10 * RelaySettings().wait_s)  # past that of a relay it waits
            assert came.result(BOUND_S)
            assert np.array_equal(first.wait(BOUND_S), data.transpose(1, 0, 2))
            assert np.array_equal(second.wait(BOUND_S), data[:31].transpose(1, 0, 2))
        assert not [labels for labels in fetcher.samples() if labels[0] == "refused_total"]


def test_a_small_prefix_finds_landing_memory_beside_two_rings(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
) -> None:
    settings = (
        f"relay.landing_bytes={4 * LANDING_BYTES}",
        "relay.hold_s=0",
        f"relay.fabric_timeout_s={BOUND_S:g}",  # nobody kills the workers
        "fetcher.wait_s=1",
    )
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as one,
        fetcher.client("shared_memory") as other,
        fetcher.client("shared_memory") as small,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        of_one, of_other, few = (client.kv_bucket(BUCKET, LAYOUT) for client in (one, other, small))
        with standing_still(*worker_pids(fetcher)):  # rings let nothing go
            first = of_one.fetch(keys, delivery="layerwise")
            second = of_other.fetch(keys[:31], delivery="layerwise")
            third = few.fetch(keys[:1], delivery="layerwise")  # it is accepted
        with first, second, third:
            assert np.array_equal(third.wait(BOUND_S), data[:1].transpose(1, 0, 2))
            assert np.array_equal(first.wait(BOUND_S), data.transpose(1, 0, 2))
            assert np.array_equal(second.wait(BOUND_S), data[:31].transpose(1, 0, 2))
        assert not [labels for labels in fetcher.samples() if labels[0] == "refused_total"]


def test_slow_gets_of_one_engine_keep_no_other_from_the_landing_memory(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
) -> None:
    settings = (f"relay.landing_bytes={16 << 20}", "relay.hold_s=0", "fetcher.wait_s=600")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as slow,
        fetcher.client("shared_memory") as other,
        ThreadPoolExecutor(8) as threads,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        of_slow, of_other = (client.kv_bucket(BUCKET, LAYOUT) for client in (slow, other))
        has_come = threading.Event()

        def get_slowly(first: int) -> None:
            """Two chunks of 2.5 MiB, in 80 s."""
            with of_slow.fetch(
                keys[first : first + 2], delivery="layerwise", rate_bytes_per_s=RATE_MIN
            ):
                assert has_come.wait(2 * BOUND_S)

        try:
            slow_ones = [threads.submit(get_slowly, first) for first in range(0, 16, 2)]
            wait_until(
                lambda: fetcher.report()["read_queue_bytes"] > 7 * 2 * LAYOUT.chunk_bytes,
                "eight of them have memory, or wait for it",
            )
            with of_other.fetch(
                keys[16:18], delivery="layerwise", timeout_s=40.0
            ) as delivery:  # before any of the slow ones can have ended
                payload = delivery.wait(BOUND_S)
                assert np.array_equal(payload, data[16:18].transpose(1, 0, 2))
            assert fetcher.report()["read_queue_bytes"] > 7 * LAYOUT.chunk_bytes
        finally:
            has_come.set()
        for one in slow_ones:
            one.result(BOUND_S)
        assert not [labels for labels in fetcher.samples() if labels[0] == "refused_total"]


def free_bytes(fetcher: RunningFetcher) -> float:
    return fetcher.samples()["landing_bytes", "free"]


@pytest.mark.parametrize(
    ("engine", "transport"),
    [
        ("shared_memory", "shared_memory"),
        ("body", "shared_memory"),
        ("body", "body"),
        pytest.param("shared_memory", "nixl", marks=NIXL.marks),
    ],
)
def test_plain_layers_go_round_in_the_memory(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    engine: str,
    transport: str,
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}", "fetcher.encodings=")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client(engine) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(keys, delivery="layerwise", layers=(3, 40)) as delivery:
            for layer, payload in delivery:
                assert np.array_equal(payload, data[:, layer]), f"layer {layer}"
        assert fetcher.samples()["claims_total", "miss"] == 1
        assert ZSTD not in fetcher.decoded_bytes
        wait_until(lambda: nothing_left(fetcher), "landing memory came back")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_lets_go_of_a_full_ring_has_its_memory_back(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    transport: str,
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        target = client.shared_memory_target(CHUNKS * LAYOUT.chunk_bytes)
        for _ in range(3):
            with standing_still(*worker_pids(fetcher)):
                with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
                    fetcher.wait_queued(LANDING_BYTES)  # the ring is full
                assert not delivery.progress.complete
            target.claim(BOUND_S).settle()
            wait_until(lambda: nothing_left(fetcher), "landing memory came back")
        with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data.transpose(1, 0, 2))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_worker_had_of_a_ring_when_it_was_killed_another_decodes(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    transport: str,
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        killed, *others = worker_pids(fetcher)
        stop_whole(killed)
        with standing_still(*others):
            delivery = bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise")
            fetcher.wait_queued(LANDING_BYTES)  # the ring is full
            os.kill(killed, signal.SIGKILL)
        with delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data.transpose(1, 0, 2))
        assert fetcher.samples()["fetcher_worker_deaths_total", "signal 9"] == 1
        wait_until(lambda: nothing_left(fetcher), "landing memory came back")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_byte_that_changes_in_a_ring_fails_its_delivery_at_its_layer_or_before(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
    transport: str,
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}")
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with standing_still(*worker_pids(fetcher)):
            delivery = bucket.fetch(keys, delivery="layerwise")
            fetcher.wait_queued(LANDING_BYTES)  # two layers have landed
            change_byte_of_second_layer(fetcher)
        with delivery:
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait(BOUND_S)
            missing = caught.value.details.layer  # the other worker may still be at the first
            assert missing in {0, 1}
            assert len([key for key in keys if key in str(caught.value)]) == 1
            if missing:
                assert np.array_equal(delivery.ready_layer(0), data[:, 0])
        wait_until(lambda: nothing_left(fetcher), "landing memory came back")
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data.transpose(1, 0, 2))
        log = tmp_path / "fetcher.log"
        wait_until(lambda: "is whole" in log.read_text(), "the chunk was looked at")


def change_byte_of_second_layer(fetcher: RunningFetcher) -> None:
    """Of what lies in the ring, encoded: in a body behind the first, else in the second half."""
    place = LANDING_BYTES // 2 + (LAYOUT.per_layer_chunk_bytes * CHUNKS) // 8
    for descriptor in fetcher.memory_files():
        if os.fstat(descriptor).st_size == LANDING_BYTES:
            (byte,) = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 1]), place)
            return
    raise AssertionError("there is no landing memory")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_storage_server_that_ends_while_a_ring_is_full_fails_the_delivery_with_its_layer(
    tmp_path: Path, data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], transport: str
) -> None:
    settings = (*SETTINGS, f"relay.transport={transport}")
    with start_server(tmp_path / "store") as server:
        with client_of(server) as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
            bucket.put(bucket.chunk_keys(TOKENS), data)
        with (
            RunningFetcher(server, tmp_path / "fetcher.log", *settings) as fetcher,
            fetcher.client("shared_memory") as client,
        ):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            with standing_still(*worker_pids(fetcher)):
                delivery = bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise")
                fetcher.wait_queued(LANDING_BYTES)  # the ring is full
                server.kill_storage()
            with delivery:
                with pytest.raises(DeliveryFailed) as caught:
                    delivery.wait(BOUND_S)
                missing = caught.value.details.layer
                assert missing is not None
                assert missing < LAYOUT.num_layers
                for there in range(missing):
                    assert np.array_equal(delivery.ready_layer(there), data[:, there])
            wait_until(lambda: nothing_left(fetcher), "landing memory came back")


def test_a_fetcher_that_is_killed_while_its_ring_is_full_leaves_the_server_free(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
) -> None:
    with (
        RunningFetcher(large_server, tmp_path / "killed.log", *SETTINGS) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with standing_still(*worker_pids(fetcher)):
            delivery = bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise")
            fetcher.wait_queued(LANDING_BYTES)  # the ring is full
            fetcher.process.kill()
        with delivery, pytest.raises(DeliveryFailed):
            delivery.wait(BOUND_S)
        wait_until(lambda: deliveries_under_way(large_server) == 0, "the server let it go")


def deliveries_under_way(server: RunningServer) -> int:
    with closing(StorageClient(server.run_dir / "storage.sock")) as storage:
        return storage.ask(GetHealth(), Health).deliveries_in_flight


def test_chunks_that_are_stored_encoded_and_plain_go_round_together(
    large_server: RunningServer,
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    tmp_path: Path,
) -> None:
    with client_of(large_server) as client:
        bucket = client.kv_bucket("mixed", LAYOUT, create=True)
        keys = bucket.chunk_keys(TOKENS)
        bucket.put(keys[:5], data[:5])
        store_as(large_server, "mixed", ZSTD)
        bucket.put(keys[5:9], data[5:9])
    with (
        RunningFetcher(large_server, tmp_path / "fetcher.log", *SETTINGS) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket("mixed", LAYOUT)
        with bucket.fetch(keys[:9], delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), data[:9].transpose(1, 0, 2))
        assert fetcher.samples()["claims_total", "miss"] == 1
        assert fetcher.decoded_bytes[ZSTD] == data[5:9].nbytes
