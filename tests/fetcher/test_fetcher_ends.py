"""What becomes of a delivery when a worker, the fetcher, its engine or the storage server ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import Busy, Client, DeliveryFailed, InvalidRequest
from objectcache.channel.http_channel import GatewayExchange, HttpChannel
from objectcache.channel.requests import GatewayRequest
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.routes.client_routes import LEFT_ALONE
from objectcache_schemas.operators.relay_report import REPORT_PATH
from tests.fetcher.fetchers import RunningFetcher, slow_fetch
from tests.integration.served import wait_until
from tests.relay.relays import (
    BOUND_S,
    BUCKET,
    CHUNKS,
    LAYOUT,
    SETTINGS,
    SLOW_BYTES_PER_S,
    TOKENS,
    check_get,
    client_of,
    nothing_left,
)
from tests.relay.test_relay_ends import READER
from tests.routes.routed import PATIENT_S
from tests.servers import RunningServer, standing_still, start_server


def routed(server: RunningServer, fetcher: RunningFetcher, **how: Any) -> Client:
    """A client whose deliveries come over the fetcher for as long as there is one."""
    credentials = server.credentials
    return Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        fetcher=fetcher.endpoint,
        **how,
    )


def test_layers_are_written_by_workers_into_the_engines_memory(
    server: RunningServer, fetcher: RunningFetcher
) -> None:
    with fetcher.client("shared_memory") as client:
        for _ in range(3):
            check_get(client)
    assert fetcher.decoded_bytes == {"plain": 3 * CHUNKS.nbytes}
    assert fetcher.samples()["fetcher_workers",] == 2
    assert fetcher.samples()["fetcher_queued_bytes",] == 0


def test_layers_and_their_ranges_come_in_bodies_too(fetcher: RunningFetcher) -> None:
    with fetcher.client("body") as client:
        check_get(client)
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(bucket.chunk_keys(TOKENS), layers=(2, 5)) as delivery:
            assert np.array_equal(delivery.wait(), CHUNKS[:, 2:5].transpose(1, 0, 2))


def test_a_killed_worker_costs_a_delivery_nothing(server: RunningServer, tmp_path: Path) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with slow_fetch(bucket, SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(1)
            for worker in fetcher.workers:
                worker.kill()
            for layer, payload in delivery:
                assert np.array_equal(payload, CHUNKS[:, layer]), f"layer {layer}"
        deaths = ("fetcher_worker_deaths_total", "signal 9")
        wait_until(lambda: fetcher.samples().get(deaths, 0) == 2, "both deaths are noticed")
        wait_until(lambda: fetcher.samples()["fetcher_workers",] == 2, "new workers come")


def test_a_fetcher_that_is_killed_fails_its_gets_at_once_and_leaves_no_worker(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        workers = fetcher.workers
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with slow_fetch(bucket, SLOW_BYTES_PER_S // 2) as delivery:
            delivery.wait_layer(1)
            fetcher.process.kill()
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait()
            missing = caught.value.details.layer
            assert missing is not None
            assert 1 < missing < LAYOUT.num_layers
            for there in range(missing):
                assert np.array_equal(delivery.ready_layer(there), CHUNKS[:, there])
        wait_until(lambda: not any(one.is_running() for one in workers), "the workers end")


def test_a_client_goes_on_directly_where_its_fetcher_is_killed(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        routed(server, fetcher, relay_timeout_s=PATIENT_S) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with slow_fetch(bucket, SLOW_BYTES_PER_S // 2) as delivery:  # which takes 6 s
            delivery.wait_layer(0)
            assert delivery.route == "relay:fetcher"
            fetcher.process.kill()
            for layer, payload in delivery:
                assert np.array_equal(payload, CHUNKS[:, layer]), f"layer {layer}"
            assert delivery.route == "direct"
        check_get(client)


@pytest.mark.parametrize("loads_before", [0, 2])  # by HTTP, then over the session itself
def test_a_fetcher_that_is_stopped_is_asked_once_a_load_and_then_left_alone(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loads_before: int,
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        routed(server, fetcher) as client,
    ):
        for _ in range(loads_before):
            check_get(client)
        asked = list[str]()
        open_exchange = HttpChannel.open

        def counted(
            channel: HttpChannel, request: GatewayRequest, timeout_s: float | None = None
        ) -> GatewayExchange:
            if channel.pool.url == fetcher.endpoint and request.path != REPORT_PATH:
                asked.append(request.target)
            return open_exchange(channel, request, timeout_s)

        monkeypatch.setattr(HttpChannel, "open", counted)
        with standing_still(fetcher.process.pid):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            keys = bucket.chunk_keys(TOKENS)

            def is_left_alone() -> bool:
                with bucket.fetch(keys, delivery="layerwise") as delivery:
                    assert np.array_equal(delivery.wait(BOUND_S), CHUNKS.transpose(1, 0, 2))
                    assert delivery.route == "direct"
                    counts = client.route_counts()
                    assert len(asked) <= counts.get(("relay:fetcher", "refused"), 0), asked
                    return delivery.route_reason == LEFT_ALONE

            wait_until(is_left_alone, "the fetcher is left alone")


def test_a_connector_loads_over_its_fetcher_and_directly_where_there_is_none(
    server: RunningServer, fetcher: RunningFetcher
) -> None:
    credentials = server.credentials
    before = fetcher.decoded_bytes.get("plain", 0)
    for url, route in ((fetcher.endpoint, "relay:fetcher"), ("http://127.0.0.1:9", "direct")):
        configuration = StoreConfiguration(
            server.endpoint,
            BUCKET,
            credentials.access_key,
            credentials.secret_key,
            fetcher=url,
            relay_timeout_s=PATIENT_S,
        )
        with configuration.connect() as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            with bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise") as delivery:
                assert np.array_equal(delivery.wait(BOUND_S), CHUNKS.transpose(1, 0, 2))
                assert delivery.transport == "shared_memory"
                assert delivery.route == route
    assert fetcher.decoded_bytes["plain"] - before == CHUNKS.nbytes


def test_an_engine_that_is_killed_ends_the_upstream_and_no_worker_maps_its_memory(
    server: RunningServer, tmp_path: Path
) -> None:
    with RunningFetcher(server, tmp_path / "fetcher.log", "relay.hold_s=0") as fetcher:
        credentials = server.credentials
        how = {
            "endpoint": fetcher.endpoint,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "transport": "shared_memory",
            "bucket": BUCKET,
            "layout": {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__},
            "keys": LAYOUT.chunk_keys(TOKENS),
            "rate": 64 << 10,  # it would take 48 s
        }
        engine = subprocess.Popen(
            [sys.executable, "-c", READER, json.dumps(how)], stdout=subprocess.PIPE
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"layer 0\n"
            assert any(mapped_files(one.pid) == 2 for one in fetcher.workers)
        finally:
            engine.kill()
            engine.wait()
            engine.stdout.close()  # type: ignore[union-attr]
        wait_until(lambda: nothing_left(fetcher), "landing memory came back", 36.0)
        wait_until(
            lambda: all(mapped_files(one.pid) <= 1 for one in fetcher.workers),
            "its memory is unmapped",
        )
        with fetcher.client("shared_memory") as client:
            check_get(client)


def mapped_files(pid: int) -> int:
    """How many memory files a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:objectcache")


def test_nothing_is_written_to_memory_that_the_engine_has_taken_back(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        target = client.shared_memory_target(CHUNKS.nbytes)
        workers = fetcher.workers
        for worker in workers:
            worker.suspend()
        with bucket.fetch(keys, delivery="layerwise", target=target):
            fetcher.wait_queued(1)
        with pytest.raises(InvalidRequest, match="in use"):
            target.claim(0.5)  # a worker that was sent a job may still write
        before = target.array.copy()
        for worker in workers:
            worker.resume()
        target.claim(BOUND_S).settle()
        after = target.array.copy()
        time.sleep(0.5)
        assert np.array_equal(after, target.array)
        assert (before != after).any()  # by what was under way


def test_a_storage_server_that_is_restarted_fails_the_get_and_the_next_goes_well(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path / "store", *SETTINGS) as server:
        with client_of(server) as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
            bucket.put(bucket.chunk_keys(TOKENS), CHUNKS)
        with (
            RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
            fetcher.client("shared_memory") as client,
        ):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            with slow_fetch(bucket, SLOW_BYTES_PER_S // 4) as delivery:  # it would take 12 s
                delivery.wait_layer(1)
                server.kill_storage()
                with pytest.raises(DeliveryFailed) as caught:
                    delivery.wait()
                missing = caught.value.details.layer
                assert missing is not None
                for there in range(missing):
                    assert np.array_equal(delivery.ready_layer(there), CHUNKS[:, there])
            wait_until(lambda: nothing_left(fetcher), "landing memory came back")
            server.restart_storage()
            check_get(client)


def test_a_fetcher_that_is_told_to_stop_finishes_what_it_has_and_refuses_the_next(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log", "relay.drain_timeout_s=30") as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        workers = fetcher.workers
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with slow_fetch(bucket, SLOW_BYTES_PER_S // 3) as delivery:  # which takes 9 s
            delivery.wait_layer(0)
            for worker in workers:
                worker.terminate()  # as a service's manager does, to all processes
            fetcher.process.signal_stop()
            wait_until(lambda: fetcher.report()["is_draining"], "the fetcher drains")
            with fetcher.client() as other, pytest.raises(Busy, match="about to stop"):
                other.kv_bucket(BUCKET, LAYOUT).fetch(keys, timeout_s=0.5)
            assert np.array_equal(delivery.wait(BOUND_S), CHUNKS.transpose(1, 0, 2))
        assert fetcher.process.wait() == 0
        assert not any(one.is_running() for one in workers)


def test_the_engines_of_other_users_may_not_join(server: RunningServer, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can run an engine as another user")
    engine = (
        "import socket, sys, os\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "joined = socket.socket(socket.AF_UNIX)\n"
        "joined.settimeout(20)\n"
        "joined.connect(sys.argv[1])\n"
        "print(len(joined.recv(1)) if sys.argv[2] == 'out' else 'in')\n"
    )
    for users, word in (("", "out"), ("65534", "in")):
        log = tmp_path / f"fetcher-{word}.log"
        settings = ("storage.target_socket_mode=666", f"fetcher.users={users}")
        with RunningFetcher(server, log, *settings) as fetcher:
            fetcher.run_dir.chmod(0o755)
            path = str(fetcher.run_dir / "fetcher-targets.sock")
            said = subprocess.run(
                [sys.executable, "-c", engine, path, word],
                check=True,
                capture_output=True,
                timeout=BOUND_S,
            )
            assert said.stdout.strip() == (b"0" if word == "out" else b"in")
            refused = "a process of user 65534 may not join (fetcher.users)"
            if word == "out":
                wait_until(partial(says, log, refused), "it says so")
            assert says(log, refused) is (word == "out")


def says(log: Path, words: str) -> bool:
    return words in log.read_text()
