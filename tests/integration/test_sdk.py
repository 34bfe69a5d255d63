"""The SDK against real processes: every transport, both modes, and the ways a delivery can end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import objectcache
from objectcache import (
    AccessDenied,
    AsyncClient,
    Client,
    Conflict,
    DeliveryFailed,
    InvalidRequest,
    KvLayout,
    NotFound,
    PlainTarget,
    Unavailable,
)
from objectcache.boto3_integration import core_of, register
from objectcache.kv_bucket import KvBucket
from tests.integration.served import begun_in_time
from tests.servers import RunningServer, running_server, stop_whole

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="float16", fingerprint="sdk"
)
# Large enough that a delivery is still running when a test acts on it.
LARGE = KvLayout(
    num_layers=96, chunk_tokens=16, per_layer_chunk_bytes=4 << 20, dtype="float16", fingerprint="x"
)
BOUND_S = 30.0
TRANSPORTS = ["shared_memory", "body"]
MODES = ["layerwise", "chunkwise"]


def client_of(server: RunningServer, **options: Any) -> Client:
    keys = server.credentials
    return Client(
        server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key, **options
    )


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


def new_bucket(client: Client, layout: KvLayout = LAYOUT) -> KvBucket:
    return client.kv_bucket(f"sdk-{secrets.token_hex(6)}", layout, create=True)


def random_chunks(chunk_count: int, layout: KvLayout = LAYOUT) -> Any:
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    return np.random.default_rng(chunk_count).integers(0, 256, shape, dtype=np.uint8)


def stored_prefix(bucket: KvBucket, chunk_count: int) -> tuple[list[str], Any]:
    keys = bucket.chunk_keys(np.arange(chunk_count * bucket.layout.chunk_tokens))
    chunks = random_chunks(chunk_count, bucket.layout)
    assert bucket.put(keys, chunks).stored == chunk_count
    return keys, chunks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engines_loop_reads_back_what_was_put(client: Client, transport: str) -> None:
    bucket = new_bucket(client)
    stored, chunks = stored_prefix(bucket, 7)
    tokens = list(range(7 * 16)) + [9999] * 40
    keys = bucket.chunk_keys(tokens)
    assert (len(keys), keys[:7]) == (9, stored)
    matched = bucket.match(keys)
    assert matched == 7
    with bucket.fetch(keys[:matched], compute_window_s=0.0088, transport=transport) as delivery:
        assert delivery.transport == transport
        for layer in range(LAYOUT.num_layers):
            kv = delivery.wait_layer(layer)
            assert np.array_equal(kv, chunks[:, layer])
        arrivals_s = list(delivery.arrivals_s)
        assert arrivals_s == sorted(arrivals_s, key=lambda s: s or 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [None, (0, 1), (2, 5)])
@pytest.mark.parametrize("chunk_count", [1, 60, 61, 300])
def test_bytes_are_those_of_a_numpy_transpose(
    client: Client, transport: str, mode: str, layers: tuple[int, int] | None, chunk_count: int
) -> None:
    bucket, keys, chunks = _shared_prefix(client)
    with bucket.fetch(
        keys[:chunk_count], delivery=mode, layers=layers, transport=transport
    ) as delivery:
        assert (delivery.mode, delivery.transport) == (mode, transport)
        first, end = layers or (0, LAYOUT.num_layers)
        expected = chunks[:chunk_count, first:end].transpose(1, 0, 2)
        assert np.array_equal(delivery.wait(), expected)


_PREFIXES: dict[int, tuple[KvBucket, list[str], Any]] = {}


def _shared_prefix(client: Client) -> tuple[KvBucket, list[str], Any]:
    if id(client) not in _PREFIXES:
        bucket = new_bucket(client)
        _PREFIXES[id(client)] = (bucket, *stored_prefix(bucket, 300))
    return _PREFIXES[id(client)]


def test_auto_takes_shared_memory_on_one_host(client: Client) -> None:
    bucket, keys, chunks = _shared_prefix(client)
    for _ in range(2):
        with bucket.fetch(keys) as delivery:
            assert delivery.transport == "shared_memory"
            assert delivery.request_id
            assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_missing_chunk_is_named_or_the_prefix_is_cut_there(
    client: Client, transport: str
) -> None:
    bucket = new_bucket(client)
    keys, chunks = stored_prefix(bucket, 6)
    broken = [*keys[:4], "0" * 64, keys[5]]
    with pytest.raises(NotFound) as caught:
        bucket.fetch(broken, transport=transport)
    assert caught.value.details.missing_index == 4
    with bucket.fetch(broken, on_missing="truncate", transport=transport) as delivery:
        assert delivery.chunk_count == 4
        assert np.array_equal(delivery.wait(), chunks[:4].transpose(1, 0, 2))
    assert bucket.match(broken) == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_explicit_targets_are_filled(client: Client, transport: str) -> None:
    bucket, keys, chunks = _shared_prefix(client)
    expected = chunks[:9].transpose(1, 0, 2).tobytes()
    size = len(expected)
    if transport == "body":
        memory = np.zeros(size + 5, np.uint8)
        target: objectcache.Target = PlainTarget(memory)
    else:
        target = client.shared_memory_target(size + 5)
        memory = target.array
    for _ in range(2):
        with bucket.fetch(
            keys[:9], target=target, transport=transport, delivery="layerwise"
        ) as delivery:
            payload = delivery.wait()
        assert np.shares_memory(payload, memory)
        assert memory[:size].tobytes() == expected
        assert not memory[size:].any()
        memory[:] = 0
    with pytest.raises(InvalidRequest, match="the target holds"):
        bucket.fetch(keys[:10], target=target, transport=transport)


def test_layers_are_put_as_they_are_finished(client: Client) -> None:
    bucket = new_bucket(client)
    keys, chunks = bucket.chunk_keys(bytes(range(48))), random_chunks(3)
    with bucket.put_layers(keys) as put:
        for layer in range(LAYOUT.num_layers):
            assert bucket.match(keys) == 0  # nothing is visible before the end
            put.write_layer(chunks[:, layer])
    assert put.result == objectcache.PutResult(stored=3, existing=0)
    with bucket.fetch(keys, delivery="chunkwise") as delivery:
        assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))


def test_an_abandoned_put_leaves_nothing(client: Client) -> None:
    bucket = new_bucket(client)
    keys, chunks = bucket.chunk_keys(bytes(range(48))), random_chunks(3)
    with bucket.put_layers(keys) as put:
        put.write_layer(chunks[:, 0])
        put.abandon()
    assert bucket.match(keys) == 0
    assert bucket.put(keys, chunks).stored == 3


def test_a_deleted_chunk_ends_the_prefix_and_may_be_put_again(client: Client) -> None:
    bucket = new_bucket(client)
    keys, chunks = stored_prefix(bucket, 4)
    for _ in range(2):
        bucket.delete(keys[2])
        assert bucket.match(keys) == 2
    assert bucket.put(keys[2:3], chunks[2:3] ^ 1).stored == 1
    with pytest.raises(InvalidRequest, match="must be a string"):
        bucket.delete(keys[:1])  # type: ignore[arg-type]


def test_the_same_bytes_exist_and_other_bytes_conflict(client: Client) -> None:
    bucket = new_bucket(client)
    keys, chunks = stored_prefix(bucket, 4)
    more = [*keys, "f" * 64]
    grown = np.concatenate([chunks, chunks[:1]])
    assert bucket.put(more, grown) == objectcache.PutResult(stored=1, existing=4)
    grown[2, 0, 0] ^= 1
    with pytest.raises(Conflict) as caught:
        bucket.put([*more, "e" * 64], np.concatenate([grown, chunks[:1]]))
    assert caught.value.code == "ContentConflict"
    assert bucket.match(["e" * 64]) == 0
    put = bucket.put_layers(keys)
    for layer in range(LAYOUT.num_layers):
        put.write_layer(chunks[:, layer] ^ 1)
    with pytest.raises(Conflict):
        put.close()


def test_a_buckets_layout_guards_it(client: Client) -> None:
    bucket = new_bucket(client)
    assert client.get_layout(bucket.name) == LAYOUT
    other = KvLayout(
        num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="float16", fingerprint="y"
    )
    for create in (False, True):
        with pytest.raises(Conflict) as caught:
            client.kv_bucket(bucket.name, other, create=create)
        assert caught.value.code == "KvLayoutConflict"
    with pytest.raises(NotFound):
        client.kv_bucket("sdk-no-such-bucket", LAYOUT)
    plain = f"sdk-{secrets.token_hex(6)}"
    client.create_bucket(plain)
    stored_prefix(client.kv_bucket(plain, LAYOUT), 2)
    with pytest.raises(Conflict) as caught:
        client.delete_bucket(plain)
    assert caught.value.code == "BucketNotEmpty"


def test_a_wrong_secret_is_denied(server: RunningServer) -> None:
    stranger = Client(server.endpoint, access_key="nobody", secret_key="x")
    with stranger, pytest.raises(AccessDenied):
        stranger.get_layout("b")


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_asynchronous_client_mirrors_it(server: RunningServer, transport: str) -> None:
    keys = server.credentials
    async with AsyncClient(
        server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key, connections_max=8
    ) as client:
        bucket = await client.kv_bucket(f"sdk-{secrets.token_hex(6)}", LAYOUT, create=True)
        chunk_keys, chunks = bucket.chunk_keys(bytes(160)), random_chunks(10)
        async with bucket.put_layers(chunk_keys) as put:
            for layer in range(LAYOUT.num_layers):
                await put.write_layer(chunks[:, layer])
        assert await bucket.match(chunk_keys) == 10

        async def consume(count: int) -> None:
            async with bucket.fetch(chunk_keys[:count], transport=transport) as delivery:
                assert delivery.transport == transport
                async for layer, kv in delivery:
                    assert np.array_equal(kv, chunks[:count, layer])

        await asyncio.gather(*(consume(count) for count in range(1, 11)))
        with pytest.raises(NotFound):
            await bucket.fetch(["0" * 64])
        await bucket.delete(chunk_keys[4])
        assert await bucket.match(chunk_keys) == 4


def test_a_boto3_client_has_the_extension(server: RunningServer) -> None:
    session = boto3.Session()
    register(session)
    keys = server.credentials
    s3: Any = session.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
    )
    name = f"sdk-{secrets.token_hex(6)}"
    s3.create_bucket(Bucket=name)
    s3.put_kv_layout(Bucket=name, KvLayout=LAYOUT)
    assert s3.get_kv_layout(Bucket=name)["KvLayout"] == LAYOUT
    chunk_keys, chunks = LAYOUT.chunk_keys(bytes(64)), random_chunks(4)
    s3.put_object(Bucket=name, Key=chunk_keys[0], Body=chunks[0].tobytes())
    put = s3.kv_put(Bucket=name, ChunkKeys=chunk_keys, KvLayout=LAYOUT, Body=chunks)
    assert put == {"Stored": 3, "Existing": 1}
    assert s3.kv_match(Bucket=name, ChunkKeys=[*chunk_keys, "x"])["Matched"] == 4
    answer = s3.kv_get(Bucket=name, ChunkKeys=chunk_keys, KvLayout=LAYOUT)
    with answer["Body"] as delivery:
        assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
    assert s3.get_object(Bucket=name, Key=chunk_keys[2])["Body"].read() == chunks[2].tobytes()
    core_of(s3).close()
    s3.close()


@contextmanager
def serving_large(data_dir: Path) -> Generator[RunningServer]:
    """A server with one large chunk in memory."""
    with running_server(data_dir, "storage.engine=memory") as server:
        with client_of(server) as client:
            bucket = client.kv_bucket("large", LARGE, create=True)
            bucket.put(["large"], np.zeros((1, LARGE.num_layers, 4 << 20), np.uint8))
        yield server


@pytest.fixture
def doomed_server(tmp_path: Path) -> Iterator[RunningServer]:
    """One of the test's own, which may kill it."""
    with serving_large(tmp_path / "data") as server:
        yield server


@pytest.fixture(scope="module")
def large_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One for the tests after which it serves as before."""
    with serving_large(tmp_path_factory.mktemp("large")) as server:
        yield server


def running_delivery(
    bucket: KvBucket, transport: str, timeout_s: float = BOUND_S
) -> objectcache.Delivery:
    delivery = bucket.fetch(
        ["large"], delivery="layerwise", transport=transport, timeout_s=timeout_s
    )
    try:
        delivery.wait_layer(0, BOUND_S)
    except DeliveryFailed:
        delivery.close()
        raise
    return delivery


def stopped_delivery(
    server: RunningServer, bucket: KvBucket, transport: str, timeout_s: float = BOUND_S
) -> objectcache.Delivery:
    """A delivery whose storage server was stopped before it could send the last layer."""
    for _ in range(20):
        delivery = running_delivery(bucket, transport, timeout_s)
        stop_whole(server.storage_pid)
        if delivery.arrivals_s[-1] is None:
            return delivery
        os.kill(server.storage_pid, signal.SIGCONT)  # this process was slower: again
        delivery.close()
    raise AssertionError("no delivery was caught running")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_storage_server_that_is_killed_fails_the_delivery_soon(
    doomed_server: RunningServer, transport: str
) -> None:
    with client_of(doomed_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        with stopped_delivery(doomed_server, bucket, transport) as delivery:
            doomed_server.kill_storage()
            started_s = time.monotonic()
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait()
            assert time.monotonic() - started_s < BOUND_S
            assert caught.value.details.layer in range(1, LARGE.num_layers)
            assert not delivery.wait_layer(0).any()
        with pytest.raises(Unavailable):
            bucket.match(["large"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_storage_server_that_hangs_fails_the_delivery_after_the_timeout(
    large_server: RunningServer, transport: str
) -> None:
    with client_of(large_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        try:
            delivery = begun_in_time(
                lambda timeout_s: stopped_delivery(large_server, bucket, transport, timeout_s),
                (1.0, 5.0, BOUND_S),
            )
            with delivery, pytest.raises(DeliveryFailed):
                delivery.wait()
        finally:
            os.kill(large_server.storage_pid, signal.SIGCONT)
        with bucket.fetch(["large"], transport=transport, layers=(0, 2)) as delivery:
            assert delivery.wait().shape == (2, 1, 4 << 20)


def test_a_gateway_that_is_killed_fails_the_delivery_soon(doomed_server: RunningServer) -> None:
    with client_of(doomed_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        with stopped_delivery(doomed_server, bucket, "shared_memory") as delivery:
            doomed_server.kill_gateway()
            with pytest.raises(DeliveryFailed):
                delivery.wait()
            os.kill(doomed_server.storage_pid, signal.SIGCONT)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_a_delivery_early_leaves_the_server_serving(
    large_server: RunningServer, transport: str
) -> None:
    with client_of(large_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        for _ in range(3):
            with running_delivery(bucket, transport) as delivery:
                pass
            del delivery
        with bucket.fetch(["large"], transport=transport) as delivery:
            assert not delivery.wait().any()


_DYING_CLIENT = """
import sys, objectcache
from tests.integration.test_sdk import LARGE, running_delivery
endpoint, access_key, secret_key, transport = sys.argv[1:]
client = objectcache.Client(endpoint, access_key=access_key, secret_key=secret_key)
bucket = client.kv_bucket("large", LARGE)
while True:
    with running_delivery(bucket, transport) as delivery:
        print("running", flush=True)
        delivery.wait()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_dies_leaves_the_server_serving(
    large_server: RunningServer, transport: str
) -> None:
    keys = large_server.credentials
    arguments = [large_server.endpoint, keys.access_key, keys.secret_key, transport]
    with subprocess.Popen(
        [sys.executable, "-c", _DYING_CLIENT, *arguments], stdout=subprocess.PIPE
    ) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"running\n"
        dying.kill()
    with client_of(large_server) as client:
        bucket = client.kv_bucket("large", LARGE)
        with bucket.fetch(["large"], transport=transport) as delivery:
            assert not delivery.wait().any()


def test_a_restarted_storage_server_is_joined_again(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, client_of(server) as client:
        bucket = new_bucket(client)
        keys, chunks = stored_prefix(bucket, 3)
        target = client.shared_memory_target(3 * LAYOUT.chunk_bytes)
        for _ in range(2):
            for memory in (None, target):
                with bucket.fetch(keys, target=memory) as delivery:
                    assert delivery.transport == "shared_memory"
                    assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
            server.restart_storage()
