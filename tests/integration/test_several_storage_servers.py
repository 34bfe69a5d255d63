"""Gateways before several storage servers: who is asked, and what becomes of requests whose server
goes, dies or stands still.

The servers have stores of their own here, with the same in each: what is looked at is the way of a
request. What a shared store is good for is another matter (`test_shared_store`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import objectcache
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from tests.integration.fleet import RunningFleet
from tests.integration.served import wait_until
from tests.integration.steady_clients import SteadyClients

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=64 << 10, dtype="uint8", fingerprint="t"
)
TOKENS = list(range(16 * 8))
BODIES = [os.urandom(size_bytes) for size_bytes in (100, 4096, 300_000, 1 << 20)]
DEADLINE_S = 12.0  # of a fetch, which fails where a server that stands still holds it for longer
CHUNKS = np.random.default_rng(7).integers(0, 256, (8, 4, 64 << 10), dtype=np.uint8)


def fill(client: objectcache.Client, s3: Any) -> None:
    bucket = client.kv_bucket("kvs", LAYOUT, create=True)
    bucket.put(bucket.chunk_keys(TOKENS), CHUNKS)
    s3.create_bucket(Bucket="steady")
    for number, body in enumerate(BODIES):
        s3.put_object(Bucket="steady", Key=f"object-{number}", Body=body)


@pytest.fixture(params=[False, True], ids=["sockets", "tls"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningFleet]:
    with RunningFleet(tmp_path, 2, "storage.engine=files", is_tls=request.param) as running:
        running.each_alone(fill)
        yield running


def fetched(client: objectcache.Client, transport: str | None = None) -> bool:
    """Get the prefix; whether all of it is right."""
    bucket = client.kv_bucket("kvs", LAYOUT)
    with bucket.fetch(bucket.chunk_keys(TOKENS), transport=transport) as delivery:
        for layer in range(LAYOUT.num_layers):
            if not np.array_equal(delivery.wait_layer(layer), CHUNKS[:, layer]):
                return False
    return True


class Fetching:
    """A client that fetches again and again, in a thread."""

    def __init__(self, fleet: RunningFleet, transport: str) -> None:
        self.errors: list[ObjectCacheError] = []
        self.count = 0
        self.all_right = True
        self._stop = threading.Event()
        self._client = fleet.client(transport=transport, timeout_s=DEADLINE_S)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.all_right &= fetched(self._client)
                self.count += 1
            except ObjectCacheError as error:
                self.errors.append(error)

    def wait_more(self, more: int) -> None:
        wanted = self.count + more
        wait_until(lambda: self.count >= wanted, f"{more} more fetches; errors {self.errors}")

    def __enter__(self) -> Fetching:
        self._thread.start()
        self.wait_more(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def check_nobody_noticed(clients: SteadyClients) -> None:
    assert clients.errors == []
    assert clients.wrong_bodies == 0
    assert set(clients.statuses) == {200}


def test_a_server_that_stops_costs_no_request(fleet: RunningFleet) -> None:
    with (
        SteadyClients(fleet.s3(), BODIES) as clients,
        Fetching(fleet, "auto") as in_memory,
        Fetching(fleet, "body") as in_bodies,
    ):
        for server in fleet.servers:
            assert server.process.terminate() == 0
            clients.wait_served(10)
            for fetching in (in_memory, in_bodies):
                fetching.wait_more(5)
            server.restart()
            clients.wait_served(10)
    check_nobody_noticed(clients)
    for fetching in (in_memory, in_bodies):
        assert fetching.errors == []
        assert fetching.all_right


def test_a_server_that_is_killed_costs_what_it_was_doing(fleet: RunningFleet) -> None:
    with (
        SteadyClients(fleet.s3(), BODIES) as clients,
        Fetching(fleet, "auto") as in_memory,
        Fetching(fleet, "body") as in_bodies,
    ):
        fleet.servers[0].process.kill()
        clients.wait_served(10)
        for fetching in (in_memory, in_bodies):
            fetching.wait_more(5)
    assert clients.wrong_bodies == 0
    assert set(clients.statuses) <= {200, 503}
    assert len(clients.errors) + clients.statuses[503] <= len(BODIES)  # one that was in flight each
    for fetching in (in_memory, in_bodies):
        assert len(fetching.errors) <= 1
        assert fetching.all_right


def test_a_server_that_stands_still_holds_nobody_for_long(fleet: RunningFleet) -> None:
    with (
        SteadyClients(fleet.s3(), BODIES) as clients,
        Fetching(fleet, "auto") as in_memory,
        Fetching(fleet, "body") as in_bodies,
        fleet.servers[0].standing_still(),
    ):
        clients.wait_served(10)
        for fetching in (in_memory, in_bodies):
            fetching.wait_more(5)
    assert clients.wrong_bodies == 0
    assert set(clients.statuses) <= {200, 503}
    assert len(clients.errors) + clients.statuses[503] <= len(BODIES)
    for fetching in (in_memory, in_bodies):
        assert len(fetching.errors) <= 1
        assert fetching.all_right


def test_a_session_stays_with_its_server_and_gets_its_bytes_there(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, 3, "storage.engine=files") as fleet:
        fleet.each_alone(fill)
        for _ in range(4):
            with fleet.client(transport="shared_memory") as client:
                for _ in range(10):
                    assert fetched(client)


def test_a_session_goes_on_at_another_server_when_its_own_ends(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, 2, "storage.engine=files") as fleet:
        fleet.each_alone(fill)
        with fleet.client(transport="shared_memory") as client:
            for server in fleet.servers:
                assert fetched(client)
                os.kill(server.process.pid, signal.SIGTERM)
                assert server.process.wait() == 0
                assert fetched(client)
                server.restart()
                wait_until(lambda: _holds(client), "the session to be joined")


def _holds(client: objectcache.Client) -> bool:
    try:
        return fetched(client)
    except ObjectCacheError:
        return False
