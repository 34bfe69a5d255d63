"""Several storage servers and gateways on one store in a folder: who is lost or added, nobody
notices, and what one server knows all do.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ClientError

import objectcache
from objectcache_schemas.errors import NotFound, ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.operators.server_list import GetServers, Servers
from objectcache_storage_server.engines.stores.open_store import create_store
from tests.integration.fleet import ROOT, RunningFleet
from tests.integration.served import wait_until
from tests.integration.steady_clients import SteadyClients
from tests.integration.test_admin_of_several_servers import FleetAdmin
from tests.integration.test_several_storage_servers import fetched, fill
from tests.s3_clients import boto3_client
from tests.storage_client import StorageClient

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=16 << 10, dtype="uint8", fingerprint="t"
)
CHUNKS_EACH = 4
BODIES = [os.urandom(size_bytes) for size_bytes in (100, 4096, 300_000)]
DEADLINE_S = 12.0
COMPUTES_S = 0.02  # an engine, between two turns


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    """Three storage servers behind two gateways. One reaches all over TLS; the other was told of
    the first alone, has heard of the others from it, and reaches them over their sockets.
    """
    with shared_fleet(tmp_path, 3, is_tls=True) as running:
        running.add_gateway("second-gateway", [running.servers[0].address])
        running.wait_until_known()
        yield running


def shared_fleet(directory: Path, count: int, *, is_tls: bool = False) -> RunningFleet:
    address = f"file://{directory / 'store'}"
    create_store(address)
    engine = f"storage.engine={address}"
    return RunningFleet(directory, count, engine, is_tls=is_tls)


class Conversing:
    """An engine that puts a new prefix each turn and fetches the one before, in a thread, through
    whichever gateway it was given.
    """

    def __init__(self, fleet: RunningFleet, endpoint: str, transport: str, seed: int) -> None:
        self.errors: list[ObjectCacheError] = []
        self.turns = 0
        self.wrong = 0
        self.stored: list[int] = []  # turns whose put was acknowledged
        self._seed = seed
        self._stop = threading.Event()
        self._client = fleet.client(endpoint, transport=transport, timeout_s=DEADLINE_S)
        self._bucket = self._client.kv_bucket("conversations", LAYOUT, create=True)
        self._thread = threading.Thread(target=self._run)

    def keys(self, turn: int) -> list[str]:
        first = (self._seed * 100_000 + turn) * 16 * CHUNKS_EACH
        return self._bucket.chunk_keys(list(range(first, first + 16 * CHUNKS_EACH)))

    def chunks(self, turn: int) -> Any:
        shape = (CHUNKS_EACH, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
        drawn = np.random.default_rng((self._seed, turn))
        return drawn.integers(0, 256, shape, dtype=np.uint8)

    def fetch(self, turn: int) -> None:
        chunks = self.chunks(turn)
        with self._bucket.fetch(self.keys(turn), timeout_s=DEADLINE_S) as delivery:
            for layer in range(LAYOUT.num_layers):
                self.wrong += not np.array_equal(delivery.wait_layer(layer), chunks[:, layer])

    def _fetch_soon(self, turn: int) -> None:
        """A server that has not replayed the put yet says that there is nothing, which to an engine
        is a miss as any other.
        """
        wait_until(partial(self._is_fetched, turn), f"turn {turn} to be replayed", DEADLINE_S)

    def _is_fetched(self, turn: int) -> bool:
        try:
            self.fetch(turn)
        except NotFound:
            return False
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            turn = self.turns
            try:
                self._bucket.put(self.keys(turn), self.chunks(turn), timeout_s=DEADLINE_S)
                self.stored.append(turn)
                self._fetch_soon(turn)
            except ObjectCacheError as error:
                self.errors.append(error)
            self.turns += 1
            self._stop.wait(COMPUTES_S)

    def wait_turns(self, more: int) -> None:
        wanted = self.turns + more
        wait_until(lambda: self.turns >= wanted, f"{more} more turns")

    def check_all(self) -> None:
        """Every put that was acknowledged is there."""
        for turn in self.stored:
            self._fetch_soon(turn)  # which server is asked is drawn
        assert self.wrong == 0

    def __enter__(self) -> Conversing:
        self._thread.start()
        self.wait_turns(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Load:
    """boto3's presigned URLs and SDKs, through both gateways."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self.clients = SteadyClients(fleet.s3(), BODIES)
        ways = [(one, way) for one in fleet.endpoints for way in ("auto", "body")]
        self.engines = [
            Conversing(fleet, endpoint, way, seed) for seed, (endpoint, way) in enumerate(ways)
        ]

    def wait(self) -> None:
        self.clients.wait_served(8)
        for engine in self.engines:
            engine.wait_turns(3)

    def __enter__(self) -> Load:
        self.clients.__enter__()
        for engine in self.engines:
            engine.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.__exit__()
        for engine in self.engines:
            engine.__exit__()

    def check_nobody_noticed(self) -> None:
        assert self.clients.errors == []
        assert set(self.clients.statuses) == {200}
        assert [engine.errors for engine in self.engines] == [[]] * len(self.engines)
        self.check_nothing_lost()

    def check_few_noticed(self) -> None:
        """One request in flight at each client, at most."""
        assert set(self.clients.statuses) <= {200, 503}
        assert len(self.clients.errors) + self.clients.statuses[503] <= len(BODIES)
        assert all(len(engine.errors) <= 1 for engine in self.engines), [
            engine.errors for engine in self.engines
        ]
        self.check_nothing_lost()

    def check_nothing_lost(self) -> None:
        assert self.clients.wrong_bodies == 0
        for engine in self.engines:
            engine.check_all()


def test_a_rolling_upgrade_under_load_fails_no_request(fleet: RunningFleet) -> None:
    with Load(fleet) as load:
        for server in fleet.servers:
            assert server.process.terminate() == 0
            load.wait()
            server.restart()
            load.wait()
    load.check_nobody_noticed()


def test_a_killed_server_costs_what_was_in_flight_there(fleet: RunningFleet) -> None:
    with Load(fleet) as load:
        fleet.servers[0].process.kill()
        load.wait()
        fleet.servers[0].restart()
        load.wait()
    load.check_few_noticed()


def test_a_server_that_stands_still_costs_the_same_after_a_while(fleet: RunningFleet) -> None:
    with Load(fleet) as load:
        with fleet.servers[1].standing_still():
            load.wait()
        load.wait()
    load.check_few_noticed()


def test_a_server_is_added_and_all_gateways_find_it(tmp_path: Path) -> None:
    with shared_fleet(tmp_path, 1) as fleet:
        admin = FleetAdmin(fleet)
        with Load(fleet) as load:
            fleet.add_server()
            load.wait()
            wait_until(lambda: len(listed(admin)) == 2, "the server to be found")
            fleet.wait_until_known()
            fleet.servers[0].process.terminate()
            load.wait()
        load.check_nobody_noticed()


def test_sessions_move_to_a_server_that_is_added_and_no_request_fails(tmp_path: Path) -> None:
    with shared_fleet(tmp_path, 1) as fleet, ExitStack() as running:
        engines = [Conversing(fleet, fleet.endpoint, "shared_memory", seed) for seed in range(4)]
        for engine in engines:
            running.enter_context(engine)
        added = running.enter_context(StorageClient(fleet.add_server().address))
        moved = lambda: added.ask(GetServers(), Servers).answering.sessions == 2  # noqa: E731
        wait_until(moved, "half of the sessions to move")
        with StorageClient(fleet.servers[0].address) as first:
            left = lambda: first.ask(GetServers(), Servers).answering.sessions == 2  # noqa: E731
            wait_until(left, "the sessions that were left to end")
        for engine in engines:
            engine.wait_turns(2)
        running.close()
        assert [engine.errors for engine in engines] == [[]] * 4
        for engine in engines:
            engine.check_all()


def listed(admin: FleetAdmin) -> list[Any]:
    servers: list[Any] = admin.told("servers", "list")["servers"]
    return [one for one in servers if one["ok"]]


def test_what_one_server_is_told_all_know(tmp_path: Path) -> None:
    with shared_fleet(tmp_path, 2) as fleet:
        for number in range(2):
            fleet.add_gateway(f"of-{number}", [fleet.servers[number].address])
        admin = FleetAdmin(fleet)
        user = admin.told("user", "add", "alice")
        keys = (user["key"]["access_key"], user["key"]["secret_key"])
        admin.told("schedule", "set-cap", "9Gbps")
        for endpoint in fleet.endpoints:
            s3 = user_s3(endpoint, *keys)
            wait_until(partial(answers, s3.list_buckets), "the user to be known")
        s3 = user_s3(fleet.endpoints[1], *keys)
        s3.create_bucket(Bucket="hers")
        other = user_s3(fleet.endpoints[2], *keys)
        other.put_object(Bucket="hers", Key="k", Body=b"body")
        taken = [admin.told("checkpoint") for _ in range(2)]
        assert 0 < taken[0]["number"] < taken[1]["number"]
        assert all(one["size_bytes"] > 0 and one["taken_s"] > 0 for one in taken)
        said = admin.run("checkpoint").stdout
        assert re.fullmatch(r"took the checkpoint [\d,]+: [\d.]+ [KM]iB in [\d.]+ s\n", said), said
        assert s3.get_object(Bucket="hers", Key="k")["Body"].read() == b"body"
        for server in fleet.servers:
            os.kill(server.process.pid, signal.SIGTERM)
            assert server.process.wait() == 0
        shutil.rmtree(fleet.directory / fleet.servers[1].name)  # what it knew of the log
        fleet.servers[1].restart()
        wait_until(
            lambda: answers(lambda: other.get_object(Bucket="hers", Key="k")), "the server to serve"
        )
        assert admin.told("schedule", "show")["configuration"]["cap_gbps"] == 9


def user_s3(endpoint: str, access_key: str, secret_key: str) -> Any:
    return boto3_client(
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
    )


def answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except ClientError:
        return False
    return True


def test_a_server_with_another_master_key_does_not_start(tmp_path: Path) -> None:
    with shared_fleet(tmp_path, 1) as fleet:
        settings = [f"server.run_dir={fleet.run_dir / 'other'}", *fleet.settings]
        process = fleet.start(
            "objectcache_storage_server",
            "other",
            settings,
            {"OBJECTCACHE_MASTER_KEY": "b3RoZXItb3RoZXItb3RoZXItb3RoZXItb3RoZXItMzI="},
        )
        assert process.wait() == 2
        assert "all servers of a store have the same" in fleet.log("other")
    assert ROOT.secret_key not in fleet.log("other")


def test_a_session_gets_by_itself_whichever_server_the_gateway_follows(tmp_path: Path) -> None:
    with shared_fleet(tmp_path, 3) as fleet:
        fill_once(fleet)
        fleet.wait_until_replayed()
        for _ in range(4):  # sessions at servers that were drawn
            with fleet.client(transport="shared_memory") as client:
                wait_until(partial(goes_over_session, client), "a pass")


def fill_once(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        fill(client, fleet.s3())


def has_all(client: objectcache.Client) -> bool:
    try:
        return fetched(client)
    except NotFound:
        return False


def goes_over_session(client: objectcache.Client) -> bool:
    """Whether a fetch takes no request over HTTP but the one that looks at the bucket's layout."""
    channel = client._core.channel
    opening = channel.open
    count = 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return opening(*arguments)

    channel.open = counted  # type: ignore[method-assign, assignment]
    try:
        assert fetched(client)
    finally:
        channel.open = opening  # type: ignore[method-assign]
    return count == 1


def test_parts_that_went_to_several_servers_make_one_object(tmp_path: Path) -> None:
    part = os.urandom(5 << 20)
    with shared_fleet(tmp_path, 3) as fleet:
        for server in fleet.servers:
            fleet.add_gateway(f"of-{server.name}", [server.address])
        fronts = [fleet.s3(endpoint) for endpoint in fleet.endpoints[1:]]
        fronts[0].create_bucket(Bucket="parts")
        upload = fronts[1].create_multipart_upload(Bucket="parts", Key="k")["UploadId"]
        named = {"Bucket": "parts", "Key": "k", "UploadId": upload}
        etags = [
            front.upload_part(**named, PartNumber=number, Body=part)["ETag"]
            for number, front in enumerate(fronts, start=1)
        ]
        listed_parts = fronts[0].list_parts(**named)["Parts"]
        assert [one["ETag"] for one in listed_parts] == etags
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, start=1)]
        fleet.servers[1].process.kill()  # which took one of the parts
        fronts[2].complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
        assert fronts[0].get_object(Bucket="parts", Key="k")["Body"].read() == 3 * part
