"""Engines whose memory workers do not map: they decode into the fetcher's own, and a fabric, or a
body, has it from there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from objectcache import DeliveryFailed, InvalidRequest
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from tests.encoded_delivery.prefixes import BUCKET, DATA, KEYS, LAYOUT, client_of
from tests.fetcher.fetchers import RunningFetcher
from tests.fetcher.test_fetched_encodings import (
    BOUND_S,
    change_byte_of_newest_layer,
    check,
    encoded_server,
)
from tests.integration.served import wait_until
from tests.relay.relays import HAS_NIXL, NIXL, nothing_left
from tests.relay.test_relay_ends import READER
from tests.routes.routed import PATIENT_S
from tests.servers import RunningServer

LAYER_BYTES = DATA[:, 0].nbytes
LAYERS_FIRST = DATA.transpose(1, 0, 2)
RATE = 1 << 18  # of wire bytes: a layer takes 0.75 s
ONE_REGION = f"relay.in_flight_bytes_max={PIECE_BYTES_MAX}"


@contextmanager
def workers_stopped(fetcher: RunningFetcher) -> Generator[list[psutil.Process]]:
    """They stand still until the block ends."""
    workers = fetcher.workers
    for worker in workers:
        worker.suspend()
    try:
        yield workers
    finally:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.resume()


@pytest.mark.parametrize("transport", ["body", NIXL])
def test_a_killed_worker_costs_a_delivery_nothing_and_what_comes_behind_its_job_waits(
    encoded_server: RunningServer, tmp_path: Path, transport: str
) -> None:
    keys = KEYS[:10]  # so few that a layer is one job
    layer_bytes = LAYER_BYTES * len(keys) // len(KEYS)
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log") as fetcher,
        fetcher.client(transport) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with workers_stopped(fetcher) as (first, second):
            delivery = bucket.fetch(keys, delivery="layerwise")
            fetcher.wait_queued(2 * layer_bytes)
            second.resume()
            wait_until(lambda: sum(fetcher.decoded_bytes.values()) > 0, "the second one decodes")
            first.kill()
        with delivery:
            assert np.array_equal(delivery.wait(BOUND_S), LAYERS_FIRST[:, : len(keys)])
        wait_until(lambda: fetcher.samples()["fetcher_workers",] == 2, "a new worker comes")
        assert fetcher.samples()["fetcher_worker_deaths_total", "signal 9"] == 1
        assert sum(fetcher.decoded_bytes.values()) == LAYOUT.num_layers * layer_bytes


@pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
def test_a_client_goes_on_directly_where_its_fetcher_is_killed(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log") as fetcher,
        client_of(
            encoded_server, fetcher=fetcher.endpoint, transport="nixl", relay_timeout_s=PATIENT_S
        ) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(KEYS, delivery="layerwise", rate_bytes_per_s=RATE) as delivery:
            delivery.wait_layer(0)
            assert delivery.route == "relay:fetcher"
            fetcher.process.kill()
            assert np.array_equal(delivery.wait(BOUND_S), LAYERS_FIRST)
            assert delivery.route == "direct"


@pytest.mark.parametrize("transport", ["body", NIXL])
def test_a_byte_that_changes_fails_its_delivery_behind_the_layers_before_it(
    encoded_server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", "relay.hold_s=0") as fetcher,
        fetcher.client(transport) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with workers_stopped(fetcher):
            delivery = bucket.fetch(KEYS, delivery="layerwise")
            fetcher.wait_queued(3 * LAYER_BYTES)
            chunk, layer = change_byte_of_newest_layer(fetcher)
        with delivery:
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait(BOUND_S)
            missing = caught.value.details.layer
            assert missing is not None
            for there in range(missing):
                assert np.array_equal(delivery.ready_layer(there), DATA[:, there])
            if transport == "body":  # which is cut, and says nothing
                assert missing == layer
            else:  # layers are announced over the fabric, which the session may overtake
                assert missing <= layer
                assert KEYS[chunk] in str(caught.value)
        log = tmp_path / "fetcher.log"
        wait_until(
            lambda: f"{KEYS[chunk]} was damaged here, and is whole" in log.read_text(),
            "the chunk was looked at",
        )
        assert fetcher.samples()["deliveries_total", "DamagedData"] == 1
        check(client)


@pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
def test_nothing_is_written_to_memory_that_the_engine_has_taken_back(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log") as fetcher,
        fetcher.client("nixl") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        target = client.fabric_target(DATA.nbytes)
        for worker in fetcher.workers:
            worker.suspend()
        with bucket.fetch(KEYS, delivery="layerwise", target=target):
            fetcher.wait_queued(LAYER_BYTES)
            assert fetcher.samples()["fetcher_decoded_region_bytes", "held"] >= LAYER_BYTES
        with pytest.raises(InvalidRequest, match="in use"):
            target.claim(0.5)  # the get has not ended where the workers are
        before = target.array.copy()
        for worker in fetcher.workers:
            worker.resume()
        target.claim(BOUND_S).settle()
        time.sleep(0.5)  # in which a write that is late would be seen
        assert np.array_equal(before, target.array)
        samples = fetcher.samples()
        assert samples["fetcher_queued_bytes",] == 0
        assert samples["fetcher_decoded_region_bytes", "held"] == 0


@pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
def test_an_engine_that_is_killed_leaves_its_region_to_the_next(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    settings = ("relay.hold_s=0", ONE_REGION)
    with RunningFetcher(encoded_server, tmp_path / "fetcher.log", *settings) as fetcher:
        credentials = encoded_server.credentials
        how = {
            "endpoint": fetcher.endpoint,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "transport": "nixl",
            "bucket": BUCKET,
            "layout": {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__},
            "keys": KEYS,
            "rate": RATE // 2,
        }
        engine = subprocess.Popen(
            [sys.executable, "-c", READER, json.dumps(how)], stdout=subprocess.PIPE
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"layer 0\n"
            for worker in fetcher.workers:
                worker.suspend()
            fetcher.wait_queued(1)
        finally:
            engine.kill()
            engine.wait()
            engine.stdout.close()  # type: ignore[union-attr]
        for worker in fetcher.workers:
            worker.resume()
        wait_until(lambda: nothing_left(fetcher), "landing memory came back", 36.0)
        with fetcher.client("nixl") as client:
            check(client)


def test_engines_share_no_more_memory_than_was_set(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", ONE_REGION) as fetcher,
        ExitStack() as stack,
        ThreadPoolExecutor(4) as threads,
    ):
        transports = ["body", "body", *(["nixl"] * 2 if HAS_NIXL else ["body"])]
        clients = [stack.enter_context(fetcher.client(name)) for name in transports]
        for _ in range(2):
            list(threads.map(check, clients))
        assert sum(fetcher.decoded_bytes.values()) == 2 * len(clients) * DATA.nbytes
        assert mapped_regions(fetcher.process.pid) == 1


def mapped_regions(pid: int) -> int:
    """Memory files that are as long as what a piece is decoded into."""
    bounds = [
        [int(one, 16) for one in line.split()[0].split("-")]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:objectcache" in line
    ]
    return sum(end - begin == PIECE_BYTES_MAX for begin, end in bounds)


__all__ = ["encoded_server"]
