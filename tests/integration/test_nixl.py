"""Deliveries over NIXL between real processes, and what is left when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache import (
    AccessDenied,
    AsyncClient,
    Client,
    DeliveryFailed,
    FabricTarget,
    InvalidRequest,
    KvBucket,
    NotFound,
    PlainTarget,
    Unavailable,
)
from objectcache.sessions import session_keeper
from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests.integration.nixl_reader import BUCKET, CHUNKS, CHUNKS_OF_ALL, LAYOUT, TOKENS
from tests.integration.served import wait_until
from tests.integration.tenants import new_tenant
from tests.servers import Credentials, RunningServer, start_server
from tests.storage_client import StorageClient

pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")

BOUND_S = 60.0  # of what ends within the deadlines; generous, because machines may be busy
PAYLOAD_BYTES = CHUNKS_OF_ALL.nbytes
SLOW_BYTES_PER_S = 512 << 10  # a layer takes a second, a delivery sixteen
BRISK_BYTES_PER_S = 4 << 20  # a delivery takes two seconds
IN_ORDER = CHUNKS_OF_ALL.transpose(1, 0, 2)
TARGETS_BYTES_MAX = 256 << 20
AGENT_DESCRIPTORS = 10  # at least, of one agent
SETTINGS = (
    "storage.fabric_timeout_s=10",
    "gateway.session_heartbeat_s=60",
    "storage.fabric_staging_bytes=33554432",
    "storage.nixl=trusting",  # root's sessions are as without it
    f"storage.targets_bytes_max={TARGETS_BYTES_MAX}",
)
HASTY = ("storage.fabric_timeout_s=6", "gateway.session_heartbeat_s=12")
UCX = {"within the host": "", "over TCP": "TLS=tcp"}


@contextmanager
def filled(folder: Path, ucx: str, *settings: str) -> Generator[RunningServer]:
    with start_server(folder, *SETTINGS, f"storage.nixl_ucx={ucx}", *settings) as server:
        with client_of(server) as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
            bucket.put(bucket.chunk_keys(TOKENS), CHUNKS_OF_ALL)
        yield server


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """UCX copies between processes."""
    with filled(tmp_path_factory.mktemp("host"), UCX["within the host"]) as server:
        yield server


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """UCX sends."""
    with filled(tmp_path_factory.mktemp("tcp"), UCX["over TCP"]) as server:
        yield server


@pytest.fixture(scope="module", params=UCX)
def hasty(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """It gives up clients soon."""
    with filled(tmp_path_factory.mktemp("hasty"), UCX[request.param], *HASTY) as server:
        yield server


@pytest.fixture(params=UCX)
def either(request: pytest.FixtureRequest) -> RunningServer:
    server: RunningServer = request.getfixturevalue(
        "host" if request.param == "within the host" else "tcp"
    )
    return server


@pytest.fixture
def client(host: RunningServer) -> Iterator[Client]:
    with client_of(host) as client:
        yield client


def client_of(server: RunningServer, credentials: Credentials | None = None) -> Client:
    pair = credentials or server.credentials
    return Client(
        server.endpoint, access_key=pair.access_key, secret_key=pair.secret_key, transport="nixl"
    )


def bucket_of(client: Client) -> tuple[KvBucket, list[str]]:
    bucket = client.kv_bucket(BUCKET, LAYOUT)
    return bucket, bucket.chunk_keys(TOKENS)


def staging_bytes(server: RunningServer) -> float:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        page = storage.ask(GetMetrics(), Metrics).text.decode()
    return next(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "objectcache_fabric_staging_bytes"
    )


def wait_for_its_memory(server: RunningServer) -> None:
    wait_until(lambda: staging_bytes(server) == 0, "staging memory to come back", BOUND_S)


# --- what arrives ---


@pytest.mark.parametrize("mode", ["layerwise", "chunkwise"])
def test_a_prefix_arrives_as_it_was_put(client: Client, host: RunningServer, mode: str) -> None:
    bucket, keys = bucket_of(client)
    with bucket.fetch(keys, delivery=mode) as delivery:
        for layer, payload in delivery:
            assert np.array_equal(payload, CHUNKS_OF_ALL[:, layer])
        assert (delivery.transport, delivery.mode) == ("nixl", mode)
    wait_for_its_memory(host)


def test_some_layers_of_a_prefix_that_is_cut_arrive(client: Client) -> None:
    bucket, keys = bucket_of(client)
    longer = [*keys, "not-stored"]
    with pytest.raises(NotFound):
        bucket.fetch(longer)
    with bucket.fetch(longer, on_missing="truncate", layers=(5, 9)) as delivery:
        assert (delivery.chunk_count, delivery.layers) == (CHUNKS, range(5, 9))
        assert np.array_equal(delivery.wait(), IN_ORDER[5:9])


def test_one_chunk_comes_by_the_direct_path(client: Client) -> None:
    bucket, keys = bucket_of(client)
    target = client.fabric_target(LAYOUT.chunk_bytes)
    with bucket.fetch(keys[3:4], path="direct", target=target) as delivery:
        assert np.array_equal(delivery.wait()[:, 0], CHUNKS_OF_ALL[3])
        assert delivery.path == "direct"
    target.close()


def test_a_target_is_filled_again_and_again_and_its_memory_stays_after_it(client: Client) -> None:
    bucket, keys = bucket_of(client)
    target = client.fabric_target(PAYLOAD_BYTES + 4096)
    assert isinstance(target, FabricTarget)
    for count in (CHUNKS, 2, CHUNKS):
        target.array[:] = 0
        with bucket.fetch(keys[:count], delivery="layerwise", target=target) as delivery:
            assert np.array_equal(delivery.wait(), IN_ORDER[:, :count])
        assert not target.array[count * LAYOUT.chunk_bytes :].any()
    target.close()
    target.close()
    assert not target.is_lost
    assert np.array_equal(target.array[:PAYLOAD_BYTES], IN_ORDER.reshape(-1))
    with pytest.raises(InvalidRequest, match="closed"):
        bucket.fetch(keys, target=target)


def test_a_buffer_of_the_callers_is_filled_where_it_is(client: Client) -> None:
    bucket, keys = bucket_of(client)
    buffer = np.zeros((2, PAYLOAD_BYTES), np.uint8)
    target = client.fabric_target(buffer=buffer[1])
    with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
        delivery.wait()
    target.close()
    assert not buffer[0].any()
    assert np.array_equal(buffer[1], IN_ORDER.reshape(-1))


def test_a_buffer_is_filled_of_which_a_part_was_a_target_before(client: Client) -> None:
    bucket, keys = bucket_of(client)
    buffer = np.zeros(PAYLOAD_BYTES, np.uint8)
    part_bytes = 2 * LAYOUT.chunk_bytes
    part = buffer[part_bytes : 2 * part_bytes]
    for memory, count in ((part, 2), (buffer, CHUNKS)):
        target = client.fabric_target(buffer=memory)
        with bucket.fetch(keys[:count], delivery="layerwise", target=target) as delivery:
            delivery.wait()
        target.close()
    assert np.array_equal(buffer, IN_ORDER.reshape(-1))


def test_two_clients_are_served_at_once(host: RunningServer) -> None:
    with client_of(host) as one, client_of(host) as other:
        one_bucket, keys = bucket_of(one)
        with (
            one_bucket.fetch(keys, delivery="layerwise") as first,
            bucket_of(other)[0].fetch(keys, delivery="layerwise") as second,
        ):
            assert np.array_equal(second.wait(), IN_ORDER)
            assert np.array_equal(first.wait(), IN_ORDER)


@pytest.mark.asyncio
async def test_the_asynchronous_client_has_targets_too(host: RunningServer) -> None:
    pair = host.credentials
    async with AsyncClient(
        host.endpoint, access_key=pair.access_key, secret_key=pair.secret_key
    ) as client:
        bucket = await client.kv_bucket(BUCKET, LAYOUT)
        target = await client.fabric_target(PAYLOAD_BYTES)
        keys = bucket.chunk_keys(TOKENS)
        async with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
            assert np.array_equal(await delivery.wait(), IN_ORDER)
            assert delivery.transport == "nixl"


# --- what is refused ---


def test_memory_that_cannot_be_a_target_is_refused(client: Client) -> None:
    for arguments in (
        {},
        {"length_bytes": 10, "buffer": bytearray(10)},
        {"buffer": b"read only"},
        {"buffer": bytearray()},
        {"buffer": np.zeros((4, 4), np.uint8)[:, 1]},
        {"buffer": object()},
        {"length_bytes": 0},
        {"length_bytes": 10, "transport": "body"},
        {"length_bytes": 10, "transport": "carrier pigeon"},
    ):
        with pytest.raises(InvalidRequest):
            client.fabric_target(**arguments)


def test_a_transport_fills_its_own_targets_alone(client: Client) -> None:
    bucket, keys = bucket_of(client)
    target = client.fabric_target(PAYLOAD_BYTES)
    with pytest.raises(InvalidRequest, match="nixl"):
        bucket.fetch(keys, target=target, transport="body")
    with pytest.raises(InvalidRequest, match="fabric_target"):
        bucket.fetch(keys, target=PlainTarget(bytearray(PAYLOAD_BYTES)), transport="nixl")
    target.close()


def test_more_memory_than_a_session_may_register_is_refused(client: Client) -> None:
    with pytest.raises(Unavailable, match=r"storage\.targets_bytes_max"):
        client.fabric_target(TARGETS_BYTES_MAX + 1)
    client.fabric_target(4096).close()  # the session goes on


def test_a_server_without_nixl_says_so_and_auto_does_without(tmp_path: Path) -> None:
    server = start_server(tmp_path / "data", "storage.nixl=off")
    with server, client_of(server) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
        keys = bucket.chunk_keys(TOKENS)
        bucket.put(keys, CHUNKS_OF_ALL, transport="auto")
        with pytest.raises(Unavailable, match=r"storage\.nixl is off"):
            bucket.fetch(keys)
        with bucket.fetch(keys, delivery="layerwise", transport="auto") as delivery:
            assert np.array_equal(delivery.wait(), IN_ORDER)
            assert delivery.transport == "shared_memory"


def test_who_may_not_use_nixl_is_denied_with_the_code(tmp_path: Path) -> None:
    with start_server(tmp_path / "data") as server:
        pair = server.credentials
        wrong = Credentials(pair.access_key, "not-the-secret")
        for credentials, code, said in (
            (wrong, "SignatureDoesNotMatch", None),
            (new_tenant(server).credentials, "AccessDenied", "NIXL is served to the root user"),
        ):
            with client_of(server, credentials) as client:
                bucket = KvBucket(client._core, BUCKET, LAYOUT)
                with pytest.raises(AccessDenied, match=said) as caught:
                    client.fabric_target(PAYLOAD_BYTES)
                assert caught.value.code == code
                with pytest.raises(AccessDenied, match=said) as caught:
                    bucket.fetch(bucket.chunk_keys(TOKENS))
                assert caught.value.code == code


def test_a_key_that_is_enabled_again_has_targets_at_once(host: RunningServer) -> None:
    tenant = new_tenant(host, "tenant")
    tenant.change_key(enabled=False)
    with client_of(host, tenant.credentials) as client:
        with pytest.raises(AccessDenied):
            client.fabric_target(4096)
        tenant.change_key(enabled=True)
        client.fabric_target(4096).close()


def test_another_tenants_target_cannot_be_named(host: RunningServer) -> None:
    stranger = new_tenant(host, "stranger")
    with client_of(host) as owner:
        mine = owner.fabric_target(LAYOUT.chunk_bytes)
        pair = stranger.credentials
        with Client(
            host.endpoint,
            access_key=pair.access_key,
            secret_key=pair.secret_key,
            transport="nixl",
        ) as client:
            bucket = client.kv_bucket("strangers-bucket", LAYOUT, create=True)
            keys = bucket.chunk_keys(TOKENS)
            bucket.put(keys, CHUNKS_OF_ALL)
            theirs = client.fabric_target(LAYOUT.chunk_bytes)
            (session,) = theirs._registered._registered
            (target_id,) = mine._registered._registered.values()
            theirs._registered._registered = {session: target_id}
            with pytest.raises(NotFound) as caught:
                bucket.fetch(keys[:1], target=theirs)
            assert caught.value.code == "NoSuchTarget"
        assert not mine.array.any()
        mine.close()


# --- what fails ---


def test_a_target_closed_in_the_middle_is_not_written_any_more(either: RunningServer) -> None:
    with client_of(either) as client:
        bucket, keys = bucket_of(client)
        buffer = np.zeros(PAYLOAD_BYTES, np.uint8)
        target = client.fabric_target(buffer=buffer)
        with bucket.fetch(
            keys, delivery="layerwise", target=target, rate_bytes_per_s=SLOW_BYTES_PER_S
        ) as delivery:
            delivery.wait_layer(1)
            target.close()
            assert not target.is_lost
            left = buffer.copy()
            wait_for_its_memory(either)
            with pytest.raises(DeliveryFailed):
                delivery.wait()
        assert not left.all()
        with bucket.fetch(keys, delivery="layerwise") as delivery:  # by the same session
            assert np.array_equal(delivery.wait(), IN_ORDER)
        assert np.array_equal(buffer, left)


def test_a_delivery_closed_in_the_middle_gives_its_memory_back(either: RunningServer) -> None:
    with client_of(either) as client:
        bucket, keys = bucket_of(client)
        for _ in range(3):
            with bucket.fetch(
                keys, delivery="layerwise", rate_bytes_per_s=BRISK_BYTES_PER_S
            ) as delivery:
                delivery.wait_layer(1)
            del delivery
        wait_for_its_memory(either)
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait(), IN_ORDER)


class Reader:
    """A client process, in the middle of a delivery."""

    def __init__(self, server: RunningServer, rate_bytes_per_s: int) -> None:
        pair = server.credentials
        how = {
            "endpoint": server.endpoint,
            "access_key": pair.access_key,
            "secret_key": pair.secret_key,
            "ucx": "",
            "rate_bytes_per_s": rate_bytes_per_s,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.nixl_reader", json.dumps(how)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_layer(self, layer: int) -> None:
        for expected in range(layer + 1):
            assert self.line() == f"layer {expected} right"

    def rest(self) -> list[str]:
        """Everything that it still says, to its end."""
        out, _ = self.process.communicate(timeout=BOUND_S)
        assert self.process.returncode == 0
        return str(out).split("\n")[:-1]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def reading(
    server: RunningServer, layer: int, rate_bytes_per_s: int = BRISK_BYTES_PER_S
) -> Generator[Reader]:
    reader = Reader(server, rate_bytes_per_s)
    try:
        reader.wait_layer(layer)
        yield reader
    finally:
        reader.process.kill()
        reader.process.communicate()


def descriptors(server: RunningServer) -> int:
    return int(psutil.Process(server.storage_pid).num_fds())


def test_a_client_that_is_killed_leaves_nothing_behind(either: RunningServer) -> None:
    level = descriptors(either)
    for layer in (0, 7):
        with reading(either, layer) as reader:
            reader.signal(signal.SIGKILL)
            wait_for_its_memory(either)
    wait_until(
        lambda: descriptors(either) < level + AGENT_DESCRIPTORS,
        f"the agents' descriptors to be closed, beyond {level}",
        BOUND_S,
    )


def test_a_client_that_stands_still_is_given_up_and_begins_again_when_it_goes_on(
    hasty: RunningServer,
) -> None:
    with client_of(hasty) as client, reading(hasty, 1, SLOW_BYTES_PER_S) as reader:
        reader.signal(signal.SIGSTOP)
        bucket, keys = bucket_of(client)
        with bucket.fetch(keys, delivery="layerwise") as delivery:  # others go on meanwhile
            assert np.array_equal(delivery.wait(), IN_ORDER)
        wait_for_its_memory(hasty)
        reader.signal(signal.SIGCONT)
        said = reader.rest()
    assert "failed" in said
    assert said[-1] == "complete"
    assert not [line for line in said if "wrong" in line]


@pytest.mark.parametrize("victim", ["storage", "gateway"])
def test_a_server_that_is_killed_fails_the_delivery_and_is_joined_again(
    tmp_path: Path, victim: str
) -> None:
    with filled(tmp_path / "data", "") as server, client_of(server) as client:
        bucket, keys = bucket_of(client)
        target = client.fabric_target(PAYLOAD_BYTES)
        with bucket.fetch(
            keys, delivery="layerwise", target=target, rate_bytes_per_s=SLOW_BYTES_PER_S
        ) as delivery:
            delivery.wait_layer(1)
            if victim == "storage":
                server.kill_storage()
            else:
                server.kill_gateway()
            begun_s = time.monotonic()
            with pytest.raises(DeliveryFailed):
                delivery.wait()
            assert time.monotonic() - begun_s < BOUND_S
            assert np.array_equal(delivery.wait_layer(1), IN_ORDER[1])
        target.close()
        assert target.is_lost
        if victim == "storage":
            server.restart_storage()
        else:
            wait_for_its_memory(server)
            server.restart_gateway()
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait(), IN_ORDER)


def test_a_try_while_the_storage_server_restarts_says_nothing_about_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_keeper, "RETRY_AFTER_S", 10 * BOUND_S)
    with filled(tmp_path / "data", "") as server, client_of(server) as client:
        server.kill_storage()
        for _ in range(2):
            with pytest.raises(Unavailable):
                client.fabric_target(4096)
        server.restart_storage()

        def has_target() -> bool:
            try:
                client.fabric_target(4096).close()
            except Unavailable:
                return False
            return True

        wait_until(has_target, "a target", BOUND_S)
