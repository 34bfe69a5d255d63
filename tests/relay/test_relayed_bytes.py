"""Deliveries through a relay, between real processes: every byte is compared."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from objectcache import (
    AccessDenied,
    Busy,
    Client,
    NotFound,
)
from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.signing import Signer
from objectcache.core import TransportChoice
from objectcache.deliveries.fetch_into_target import TargetPlace, ask_session
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.sessions.web_wire import WebWire
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState
from tests.integration.served import wait_until
from tests.relay.relays import (
    BOUND_S,
    BUCKET,
    CHUNK_COUNT,
    CHUNKS,
    HAS_NIXL,
    LAYOUT,
    NIXL,
    PAYLOAD_BYTES,
    SLOW_BYTES_PER_S,
    TOKENS,
    RunningRelay,
    check_get,
    client_of,
    nothing_left,
)
from tests.servers import RunningServer
from tests.storage_client import StorageClient


@pytest.mark.parametrize("upstream", ["shared_memory", NIXL, "body"])
def test_every_byte_arrives_over_every_way_in_and_out(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory, upstream: str
) -> None:
    log = tmp_path_factory.mktemp("relay") / "relay.log"
    ways_out = ["body", "shared_memory", *(["nixl"] if HAS_NIXL else [])]
    with RunningRelay(server, log, f"relay.transport={upstream}") as relay:
        for transport in ways_out:
            with relay.client(transport) as client:
                for _ in range(3):  # over HTTP, then over the session itself
                    check_get(client)
                bucket = client.kv_bucket(BUCKET, LAYOUT)
                keys = bucket.chunk_keys(TOKENS)
                assert bucket.match(keys) == CHUNK_COUNT
                with bucket.fetch(keys, delivery="chunkwise") as delivery:
                    assert np.array_equal(delivery.wait(), CHUNKS.transpose(1, 0, 2))
                    assert delivery.transport == transport
                with bucket.fetch(keys, delivery="layerwise", layers=(3, 5)) as some:
                    assert np.array_equal(some.wait(), CHUNKS.transpose(1, 0, 2)[3:5])
                missing = bucket.chunk_keys(np.arange(10_000, 10_016))
                with bucket.fetch([*keys, *missing], on_missing="truncate") as longest:
                    assert longest.chunk_count == CHUNK_COUNT
                    assert np.array_equal(longest.wait(), CHUNKS.transpose(1, 0, 2))
        wait_until(lambda: nothing_left(relay), "landing memory came back")


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_a_delivery_has_the_content_that_a_direct_one_has(
    server: RunningServer, relay: RunningRelay, transport: str
) -> None:
    """By which a client knows whether it may go on with the layers of another server."""
    keys = LAYOUT.chunk_keys(TOKENS)
    with relay.client(transport) as over, client_of(server) as direct:
        told: set[str | None] = set()
        for client in (direct, over):
            for _ in range(2):  # over HTTP, then over the session itself
                for layers in (None, (3, 5)):
                    with client.kv_bucket(BUCKET, LAYOUT).fetch(keys, layers=layers) as delivery:
                        delivery.wait()
                        told.add(delivery.content)
        assert len(told) == 1, told
        with over.kv_bucket(BUCKET, LAYOUT).fetch(keys[:-1]) as shorter:
            shorter.wait()
            assert shorter.content not in {None, *told}


def test_what_is_not_stored_is_refused_as_a_direct_get_is(relay: RunningRelay) -> None:
    with relay.client() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with pytest.raises(NotFound) as caught:
            bucket.fetch([*keys[:2], "0" * 64])
        assert caught.value.details.missing_index == 2
    wait_until(lambda: nothing_left(relay), "landing memory came back")


def test_whoever_has_another_key_is_refused(server: RunningServer, relay: RunningRelay) -> None:
    key = server.credentials.access_key
    for access_key, secret_key in ((key, "wrong" * 8), ("SOMEBODY", "x" * 40)):
        with Client(relay.endpoint, access_key=access_key, secret_key=secret_key) as client:
            bucket_keys = LAYOUT.chunk_keys(TOKENS)
            with pytest.raises(AccessDenied):
                client.kv_bucket(BUCKET, LAYOUT).fetch(bucket_keys)
        with Client(relay.endpoint, access_key=access_key, secret_key=secret_key) as client:
            with pytest.raises(AccessDenied):
                client.get_layout(BUCKET)
            with pytest.raises(AccessDenied):
                client.shared_memory_target(1 << 16)
            if HAS_NIXL:
                with pytest.raises(AccessDenied):
                    client.fabric_target(1 << 16)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /relayed/key HTTP/1.1", 403),
        ("GET /?kv-session HTTP/1.1", 403),
        ("GET /relay/report HTTP/1.1", 403),
        ("PUT /relayed/key HTTP/1.1", 403),
        ("OPTIONS * HTTP/1.1", 400),
        ("GET /%ff?%ff HTTP/1.1\r\nAuthorization: AWS4-HMAC-SHA256 Credential=\xff/", 400),
    ],
)
def test_what_is_not_signed_or_makes_no_sense_is_refused(
    relay: RunningRelay, line: str, status: int
) -> None:
    address = urlsplit(relay.endpoint)
    with socket.create_connection((address.hostname, address.port), BOUND_S) as connected:
        head = f"{line}\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n"
        connected.sendall(head.encode("latin-1"))
        answer = b"".join(iter(lambda: connected.recv(1 << 16), b""))
    assert answer.split()[1] == str(status).encode(), answer
    assert nothing_left(relay)


def test_a_frame_of_an_engine_that_is_not_masked_ends_its_session(
    server: RunningServer, relay: RunningRelay
) -> None:
    """RFC 6455, section 5.1."""
    key = SigningKey(server.credentials.access_key, server.credentials.secret_key, None)
    endpoint = Endpoint.parse(relay.endpoint)
    sign = Signer(endpoint, "us-east-1", lambda: key).signed_headers
    wire = WebWire.join(endpoint, sign, None, BOUND_S)
    with closing(wire._connection) as connection:
        connection.socket.sendall(b"\x82\x01x")
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(BOUND_S)
    wire.close()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1002


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_many_engines_at_once_share_little_landing_memory_and_get_their_bytes(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    settings = (
        f"relay.landing_bytes={8 << 20}",  # for two of four engines
        "relay.wait_s=60",
        "relay.in_flight_bytes_max=65536",
    )
    with (
        RunningRelay(server, tmp_path / "relay.log", *settings) as relay,
        ThreadPoolExecutor(4) as threads,
        relay.client(transport) as shared,
    ):
        own = [relay.client(transport) for _ in range(2)]
        engines = [shared, shared, *own]
        for done in [threads.submit(check_get, engine) for engine in engines * 4]:
            done.result(BOUND_S)
        for client in own:
            client.close()
        wait_until(lambda: nothing_left(relay), "landing memory came back")


def test_a_get_that_finds_no_landing_memory_is_refused_before_anything_is_read(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("relay") / "relay.log"
    room = f"relay.landing_bytes={4 << 20}"  # for one of 3 MiB
    with (
        RunningRelay(server, log, room, "relay.wait_s=0.2") as relay,
        relay.client() as slow,
        relay.client() as other,
    ):
        bucket = slow.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(
            keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S // 2
        ) as delivery:  # which takes 6 s
            delivery.wait_layer(0)
            with pytest.raises(Busy, match=r"landing memory"):
                other.kv_bucket(BUCKET, LAYOUT).fetch(keys)
            assert np.array_equal(delivery.wait(), CHUNKS.transpose(1, 0, 2))
        wait_until(lambda: nothing_left(relay), "landing memory came back")
        check_get(other)


@pytest.mark.parametrize("transport", ["shared_memory", NIXL])
def test_a_delivery_of_a_part_of_a_prefix_lies_in_its_rows(
    relay: RunningRelay, transport: str
) -> None:
    """Which a session asks of each of several servers that share a delivery."""
    with relay.client(transport) as client:
        core = client._core
        choice = TransportChoice(transport)
        session = core.memory(choice).sessions.session()
        target = (
            client.shared_memory_target(PAYLOAD_BYTES)
            if transport == "shared_memory"
            else client.fabric_target(PAYLOAD_BYTES)
        )
        descriptor = Descriptor(
            tuple(LAYOUT.chunk_keys(TOKENS)[2:5]),
            LAYOUT.num_layers,
            LAYOUT.chunk_tokens,
            LAYOUT.per_layer_chunk_bytes,
            DeliveryMode.LAYERWISE,
            part=(2, CHUNK_COUNT),
        )
        request = FetchRequest(BUCKET, descriptor, None, choice, BOUND_S, time.monotonic())
        progress = request.progress(BOUND_S)
        place = TargetPlace(transport, 0, PAYLOAD_BYTES)
        landing = target.claim(BOUND_S)
        head, receiver, _ = ask_session(
            core, request, descriptor, place, landing, progress, session
        )
        with client.kv_bucket(BUCKET, LAYOUT).fetch(descriptor.chunk_keys) as same_chunks:
            same_chunks.wait()
            assert head.content == same_chunks.content is not None
        receiver.start(core.threads)
        progress.wait(LAYOUT.num_layers - 1, BOUND_S)
        rows = target.array.reshape(LAYOUT.num_layers, CHUNK_COUNT, LAYOUT.per_layer_chunk_bytes)
        assert np.array_equal(rows[:, 2:5], CHUNKS.transpose(1, 0, 2)[:, 2:5])
        assert not rows[:, :2].any()
        assert not rows[:, 5:].any()
        assert receiver.join(BOUND_S)
        target.close()


@pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
def test_nixl_takes_the_classes_of_traffic(server: RunningServer, tmp_path: Path) -> None:
    settings = ("relay.ib_traffic_class=32", "relay.ib_service_level=1", "relay.ip_dscp=8")
    with (
        RunningRelay(server, tmp_path / "relay.log", *settings) as relay,
        relay.client("nixl") as client,
    ):
        check_get(client)


def test_a_relay_names_its_own_nic_and_not_the_engines(
    server: RunningServer, tmp_path: Path
) -> None:
    settings = ("relay.nic=node7", "relay.nic_bytes_per_s=1e9")
    with (
        RunningRelay(server, tmp_path / "relay.log", *settings) as relay,
        relay.client("body", nic="engine", nic_bytes_per_s=1e6) as client,
        StorageClient(server.run_dir / "storage.sock") as connection,
    ):
        check_get(client)
        nics = connection.ask(GetSchedule(), ScheduleState).nics
        assert [(one.nic, one.nic_bytes_per_s) for one in nics] == [("node7", 1e9)]
        assert nics[0].sent_bytes == CHUNKS.nbytes
