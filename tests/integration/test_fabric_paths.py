"""The five paths (paper, section 4.1) with a target that NIXL reaches: the same bytes by each."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import Client, DeliveryFailed, InvalidRequest, KvLayout, NotFound
from objectcache.kv_bucket import KvBucket
from objectcache_schemas import headers
from tests.integration.tenants import new_tenant
from tests.s3_clients import call, open_socket, signed_headers
from tests.servers import Credentials, RunningServer, start_server

pytest.importorskip("nixl_cu12")

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=40_961, dtype="float16", fingerprint="p"
)
LARGE = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=8 << 20, dtype="float16", fingerprint="l"
)
NOTHING: Mapping[str, str] = {}
KEYS = ["first", "second", "third"]
CHUNKS = np.random.default_rng(9).integers(
    0, 256, (len(KEYS), LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes), np.uint8
)
SETTINGS = (
    f"storage.fabric_staging_bytes={8 << 20}",  # of one delivery: what is not given back is missed
    "storage.nixl=trusting",  # root's sessions are as without it
    # A client that stands still for less, as a busy machine may have one do, is not given up.
    "gateway.session_heartbeat_s=60",
)


@pytest.fixture(scope="module")
def path_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module's own, whose gateway its tests kill."""
    with start_server(tmp_path_factory.mktemp("paths"), *SETTINGS) as running:
        yield running


@contextmanager
def client_of(server: RunningServer, credentials: Credentials | None = None) -> Generator[Client]:
    keys = credentials or server.credentials
    client = Client(server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def client(path_server: RunningServer) -> Iterator[Client]:
    with client_of(path_server) as client:
        yield client


@pytest.fixture(scope="module")
def bucket(client: Client) -> KvBucket:
    made = client.kv_bucket("paths", LAYOUT, create=True)
    made.put(KEYS, CHUNKS)
    return made


@pytest.mark.parametrize(
    ("forced", "count", "delivery", "taken", "mode"),
    [
        ("buffer", 1, "auto", "buffer", "chunkwise"),
        ("buffer", 1, "layerwise", "buffer", "layerwise"),
        ("direct", 1, "auto", "direct", None),
        (None, 1, "chunkwise", "direct", "chunkwise"),
        ("batch", 3, "auto", "batch", "chunkwise"),
        (None, 3, "chunkwise", "batch", "chunkwise"),
        ("agg", 3, "auto", "agg", "layerwise"),
        ("agg", 1, "auto", "agg", "layerwise"),
    ],
)
def test_every_path_into_a_fabrics_target_delivers_its_payload_and_says_its_name(
    client: Client,
    bucket: KvBucket,
    forced: str | None,
    count: int,
    delivery: str,
    taken: str,
    mode: str | None,
) -> None:
    target = client.fabric_target(count * LAYOUT.chunk_bytes + 3000)
    target.array[:] = 7
    with bucket.fetch(KEYS[:count], path=forced, delivery=delivery, target=target) as fetched:
        payload = fetched.wait()
        assert np.array_equal(payload, CHUNKS[:count].transpose(1, 0, 2))
        assert (fetched.path, fetched.transport) == (taken, "nixl")
        assert mode in (None, fetched.mode)
    assert np.all(target.array[count * LAYOUT.chunk_bytes :] == 7)
    with bucket.fetch(KEYS[:count], path=forced, delivery=delivery, transport="nixl") as fetched:
        assert np.array_equal(fetched.wait(), CHUNKS[:count].transpose(1, 0, 2))
        assert (fetched.path, fetched.transport) == (taken, "nixl")
    target.close()


def test_the_fifth_is_a_plain_get(path_server: RunningServer, bucket: KvBucket) -> None:
    answer = call(path_server, "GET", "/paths/second")
    assert answer.headers["x-objectcache-path"] == "s3tcp"
    assert answer.body == CHUNKS[1].tobytes()


def test_a_part_of_the_layers_is_staged_like_the_whole(client: Client, bucket: KvBucket) -> None:
    with bucket.fetch(KEYS[:1], path="buffer", transport="nixl", layers=(1, 3)) as fetched:
        assert np.array_equal(fetched.wait(), CHUNKS[:1, 1:3].transpose(1, 0, 2))


def test_what_the_buffer_path_cannot_do_is_said_before_anything_is_staged(
    client: Client, bucket: KvBucket
) -> None:
    with pytest.raises(InvalidRequest, match="1 chunk"):
        bucket.fetch(KEYS, path="buffer", transport="nixl")
    with pytest.raises(NotFound):
        bucket.fetch(["absent"], path="buffer", transport="nixl")
    target = client.fabric_target(LAYOUT.chunk_bytes)
    with pytest.raises(InvalidRequest, match="'nixl'"):
        bucket.fetch(KEYS[:1], path="buffer", transport="shared_memory", target=target)
    target.close()


def test_a_tenant_other_than_root_is_served_where_storage_nixl_is_trusting(
    path_server: RunningServer,
) -> None:
    tenant = new_tenant(path_server)
    with client_of(path_server, tenant.credentials) as client:
        bucket = client.kv_bucket(f"of-{tenant.name}", LAYOUT, create=True)
        assert bucket.put(KEYS, CHUNKS, transport="nixl").stored == len(KEYS)
        for path in ("agg", "batch"):
            with bucket.fetch(KEYS, path=path, transport="nixl") as fetched:
                assert np.array_equal(fetched.wait(), CHUNKS.transpose(1, 0, 2))
        with bucket.fetch(KEYS[:1], path="buffer", transport="nixl") as fetched:
            assert np.array_equal(fetched.wait(), CHUNKS[:1].transpose(1, 0, 2))


# --- deliveries that do not end well -------------------------------------------------------------


@pytest.fixture(scope="module")
def large(client: Client) -> tuple[KvBucket, Any]:
    bucket = client.kv_bucket("large", LARGE, create=True)
    shape = (1, LARGE.num_layers, LARGE.per_layer_chunk_bytes)
    chunk = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    bucket.put(["large"], chunk)
    return bucket, chunk


def check_usable(client: Client, chunk: Any) -> None:
    """A staged delivery comes whole, for which all of the staging memory is needed."""
    bucket = client.kv_bucket("large", LARGE)
    with bucket.fetch(["large"], path="buffer", transport="nixl") as fetched:
        assert np.array_equal(fetched.wait(), chunk.transpose(1, 0, 2))


def test_a_target_closed_while_it_is_filled_is_not_written_any_more(
    client: Client, large: tuple[KvBucket, Any]
) -> None:
    bucket, chunk = large
    target = client.fabric_target(LARGE.chunk_bytes)
    fetched = bucket.fetch(["large"], path="buffer", target=target)
    fetched.close()
    target.close()
    check_usable(client, chunk)
    before = target.array.copy()
    check_usable(client, chunk)
    assert np.array_equal(target.array, before)


def test_a_gateway_killed_while_it_stages_fails_the_delivery_and_leaves_no_memory_taken(
    path_server: RunningServer, large: tuple[KvBucket, Any]
) -> None:
    _, chunk = large
    with client_of(path_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        with bucket.fetch(["large"], path="buffer", transport="nixl") as fetched:
            path_server.kill_gateway()
            with suppress(DeliveryFailed):  # unless it had been done already
                assert np.array_equal(fetched.wait(), chunk.transpose(1, 0, 2))
    path_server.restart_gateway()
    with client_of(path_server) as client:
        check_usable(client, chunk)


# --- the session itself --------------------------------------------------------------------------


def upgraded(server: RunningServer, changes: Mapping[str, str] = NOTHING) -> bytes:
    """All that a gateway sends to a client that asks for a session and then says nothing."""
    path = "/?kv-session"
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": b64encode(secrets.token_bytes(16)).decode(),
        "Sec-WebSocket-Protocol": headers.SESSION_PROTOCOL,
    }
    sent = signed_headers(server, "GET", path, b"") | upgrade | dict(changes)
    with open_socket(server) as connection:
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        received = b""
        while piece := connection.recv(4096):  # ends when the gateway closes
            received += piece
    return received


def test_a_client_that_answers_no_ping_is_given_up_after_gateway_session_heartbeat_s(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path / "data", "gateway.session_heartbeat_s=0.5") as server:
        received = upgraded(server)
    assert received.startswith(b"HTTP/1.1 101")
    assert b"\x89\x00" in received  # a ping, which was not answered


@pytest.mark.parametrize(
    "changes",
    [{"Sec-WebSocket-Version": "99"}, {"Sec-WebSocket-Key": "short"}, {"Upgrade": "tcp"}],
)
def test_an_upgrade_that_makes_no_sense_is_an_error_that_says_so(
    path_server: RunningServer, changes: dict[str, str]
) -> None:
    received = upgraded(path_server, changes | {"Connection": "Upgrade, close"})
    assert received.startswith(b"HTTP/1.1 400")
    assert b"WebSocket" in received
