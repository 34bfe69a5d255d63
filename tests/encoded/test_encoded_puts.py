"""Puts whose slices were encoded by the client: what is stored is what a plain put stores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from objectcache import Client, KvLayout
from objectcache.core import TransportChoice
from objectcache.encoding_choice.put_account import PutAccounts
from objectcache.kv_bucket import KvBucket
from objectcache.puts.encode_layers import EncodedLayers
from objectcache.puts.put_request import PutRequest
from objectcache.puts.put_sinks import put_body
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import Conflict, InvalidRequest, ObjectCacheError, StorageFull
from objectcache_schemas.limits import KIB
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import BucketUsage, GetUsage, Usage
from objectcache_schemas.records import BucketPolicy, StoredEncoding, Verification
from tests.integration.served import BOUND_S, QUIET_SETTINGS, Served, wait_until
from tests.integration.test_metrics import samples_of, storage_page, value
from tests.s3_clients import s3_client
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

STORAGE = "objectcache_storage_server"
ZSTD, DEFLATE = "planes-zstd", "planes-deflate"
LAYOUT = KvLayout(
    num_layers=3,
    chunk_tokens=16,
    per_layer_chunk_bytes=20 * KIB,
    dtype="torch.bfloat16",
    fingerprint="put encoded",
)
CHUNKS = 5
SHAPE = (CHUNKS, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
KEYS = [f"chunk-{number}" for number in range(CHUNKS)]
Bytes = npt.NDArray[np.uint8]


def numbers(seed: int, shape: tuple[int, int, int] = SHAPE) -> Bytes:
    """bfloat16 of a normal distribution, and of layer 1 bytes that do not shrink."""
    generator = np.random.default_rng(seed)
    floats = generator.standard_normal((*shape[:2], shape[2] // 2), np.float32)
    data = (floats.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    data[:, 1] = generator.integers(0, 256, data[:, 1].shape, np.uint8)
    return data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("storage.compaction_bytes_per_s=0", "storage.nixl=trusting")  # as it was put
    with start_server(tmp_path_factory.mktemp("encoded-puts"), *settings) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    keys = server.credentials
    with Client(server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key) as opened:
        yield opened


def bucket_of(server: RunningServer, client: Client, name: str, **policy: Any) -> KvBucket:
    bucket = client.kv_bucket(name, LAYOUT, create=True)
    with StorageClient(server.run_dir / "storage.sock") as storage:
        storage.ask(SetPolicy(bucket=name, policy=BucketPolicy(**policy)), Done)
    return bucket


def usage_of(server: RunningServer, bucket: str) -> BucketUsage:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        (usage,) = storage.ask(GetUsage(bucket=bucket), Usage).buckets
    return usage


def objects_of(server: RunningServer, bucket: str) -> dict[str, tuple[bytes, str]]:
    """Body and ETag of each object, as a plain S3 client gets them."""
    s3 = s3_client(server)
    found = {}
    for one in s3.list_objects_v2(Bucket=bucket).get("Contents", []):
        answer = s3.get_object(Bucket=bucket, Key=one["Key"])
        found[one["Key"]] = (answer["Body"].read(), answer["ETag"])
    s3.close()
    return found


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("stored", [ZSTD, DEFLATE, None])
@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_what_is_put_encoded_reads_as_what_is_put_plain(
    server: RunningServer,
    client: Client,
    transport: str,
    stored: str | None,
    verification: Verification,
) -> None:
    name = f"{transport}-{stored}-{verification.value}".replace("_", "-").lower()
    encoding = None if stored is None else StoredEncoding(stored)
    plain = bucket_of(server, client, f"plain-{name}")
    bucket = bucket_of(server, client, f"put-{name}", encoding=encoding, verification=verification)
    data = numbers(1)
    plain.put(KEYS, data)
    assert bucket.put(KEYS[:2], data[:2], transport=transport, encoding=ZSTD).stored == 2
    with bucket.put_layers(KEYS[2:], transport=transport, encoding=ZSTD) as put:
        for layer in range(LAYOUT.num_layers):
            put.write_layer(data[2:, layer])
    assert put.result is not None
    assert put.result.stored == 3

    objects = objects_of(server, bucket.name)
    assert objects == objects_of(server, plain.name)
    assert [objects[key][0] for key in KEYS] == [chunk.tobytes() for chunk in data]
    usage = usage_of(server, bucket.name)
    assert usage.stored_bytes == data.nbytes
    assert (usage.encoded_bytes > 0) is (stored is not None)
    assert bucket.put(KEYS, data).existing == CHUNKS
    assert bucket.put(KEYS, data, encoding=DEFLATE).existing == CHUNKS
    with pytest.raises(Conflict):
        bucket.put(KEYS, numbers(2), encoding=ZSTD)


def put_request(bucket: str, keys: list[str], **changed: Any) -> PutRequest:
    descriptor = Descriptor(
        tuple(keys),
        LAYOUT.num_layers,
        LAYOUT.chunk_tokens,
        LAYOUT.per_layer_chunk_bytes,
        DeliveryMode.CHUNKWISE,
        **changed,
    )
    return PutRequest(bucket, descriptor, TransportChoice.BODY, BOUND_S, ZSTD, 2)


def encoded_payload(bucket: str, data: Bytes) -> tuple[PutRequest, bytes]:
    """A put and its payload, as a client sends it."""
    layers = EncodedLayers(put_request(bucket, KEYS[: len(data)]), ZSTD)
    for layer in range(LAYOUT.num_layers):
        layers.add(list(data[:, layer]))
    encoded = layers.payload()
    assert encoded is not None
    put, parts = encoded
    return put, b"".join(parts)


@pytest.mark.parametrize("stored", [ZSTD, None])
def test_a_damaged_byte_of_a_payload_is_told_by_its_chunk_and_stores_nothing(
    server: RunningServer, client: Client, stored: str | None
) -> None:
    encoding = None if stored is None else StoredEncoding(stored)
    bucket = bucket_of(server, client, f"damaged-{stored}".lower(), encoding=encoding)
    put, payload = encoded_payload(bucket.name, numbers(3))
    core = client._core  # pyright: ignore[reportPrivateUsage]
    for position in (0, 70, 90, len(payload) // 2, len(payload) - 1):
        damaged = bytearray(payload)
        damaged[position] ^= 0x10
        what = "payload: a directory" if position < 64 else r"chunk_keys\[.\] \('chunk-.'\)"
        with pytest.raises(InvalidRequest, match=what) as caught:
            put_body(core, put, [memoryview(damaged)])
        assert caught.value.code == "BadDigest"
    assert objects_of(server, bucket.name) == {}
    assert put_body(core, put, [memoryview(payload)]).stored == CHUNKS


def test_a_payload_of_another_length_than_it_says_is_refused(
    server: RunningServer, client: Client
) -> None:
    bucket = bucket_of(server, client, "lengths")
    put, payload = encoded_payload(bucket.name, numbers(4))
    core = client._core  # pyright: ignore[reportPrivateUsage]
    for wrong in (len(payload) - 64, len(payload) + 64):
        descriptor = Descriptor(
            put.descriptor.chunk_keys,
            *SHAPE[1:2],
            LAYOUT.chunk_tokens,
            SHAPE[2],
            DeliveryMode.LAYERWISE,
            encoded_bytes=wrong,
        )
        other = PutRequest(bucket.name, descriptor, TransportChoice.BODY, BOUND_S)
        with pytest.raises(InvalidRequest, match="encoded_bytes"):
            put_body(core, other, [memoryview(payload.ljust(wrong, b"\0")[:wrong])])
    assert objects_of(server, bucket.name) == {}


def test_quotas_count_what_is_decoded(server: RunningServer, client: Client) -> None:
    data = numbers(5)
    bucket = bucket_of(
        server, client, "quota", encoding=StoredEncoding(ZSTD), quota_bytes=data.nbytes - 1
    )
    with pytest.raises(StorageFull):
        bucket.put(KEYS, data, encoding=ZSTD)
    assert bucket.put(KEYS[:-1], data[:-1], encoding=ZSTD).stored == CHUNKS - 1


def test_what_does_not_shrink_is_put_plain(server: RunningServer, client: Client) -> None:
    bucket = bucket_of(server, client, "random")
    data = np.random.default_rng(6).integers(0, 256, SHAPE, np.uint8)
    assert bucket.put(KEYS[:2], data[:2], encoding=ZSTD).stored == 2
    with bucket.put_layers(KEYS[2:], encoding=ZSTD) as put:
        for layer in range(LAYOUT.num_layers):
            put.write_layer(data[2:, layer])
    stored = objects_of(server, bucket.name)
    assert [stored[key][0] for key in KEYS] == [chunk.tobytes() for chunk in data]


def test_automatic_puts_store_what_they_are_given(server: RunningServer, client: Client) -> None:
    bucket = bucket_of(server, client, "automatic", encoding=StoredEncoding(ZSTD))
    shape = (24, *SHAPE[1:])  # over a MiB: puts that teach
    for number in range(4):
        data = numbers(number, shape)
        keys = [f"{number}-{chunk}" for chunk in range(len(data))]
        assert bucket.put(keys, data, encoding="auto").stored == len(data)
        with bucket.fetch(keys) as delivery:
            for layer in range(LAYOUT.num_layers):
                assert np.array_equal(delivery.wait_layer(layer), data[:, layer])
    assert "0 B/s" not in repr(client._core.put_accounts)  # pyright: ignore[reportPrivateUsage]


def test_metrics_count_encoded_puts_and_what_a_bucket_holds_encoded(
    server: RunningServer, client: Client
) -> None:
    bucket = bucket_of(server, client, "metered", encoding=StoredEncoding(ZSTD))
    data = numbers(9)
    bucket.put(KEYS[:2], data[:2], encoding=ZSTD)
    bucket.put(KEYS[2:4], data[2:4], encoding=ZSTD)
    bucket.put(KEYS[4:], data[4:])
    found = samples_of(storage_page(server))
    assert value(found, "objectcache_encoded_puts_total", bucket=bucket.name) == 2
    usage = usage_of(server, bucket.name)
    assert usage.decoded_bytes == data.nbytes
    encoded_bytes = value(found, "objectcache_bucket_encoded_bytes", bucket=bucket.name)
    assert encoded_bytes == usage.encoded_bytes > 0
    decoded_bytes = value(found, "objectcache_bucket_decoded_bytes", bucket=bucket.name)
    assert decoded_bytes == usage.decoded_bytes


def test_automatic_puts_that_do_not_shrink_count_as_trials_of_no_use(
    server: RunningServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PutAccounts, "encodes", lambda *_: True)
    noted: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: noted.append(name)

    for name in ("ended", "not_shorter"):
        monkeypatch.setattr(PutAccounts, name, note(name))
    bucket = bucket_of(server, client, "in-vain")
    data = np.random.default_rng(8).integers(0, 256, (24, *SHAPE[1:]), np.uint8)
    assert bucket.put([f"whole-{n}" for n in range(24)], data, encoding="auto").stored == 24
    with bucket.put_layers([f"layers-{n}" for n in range(24)], encoding="auto") as put:
        for layer in range(LAYOUT.num_layers):
            put.write_layer(data[:, layer])
    assert noted == ["not_shorter"] * 2


def test_a_put_over_nixl_may_be_encoded(server: RunningServer) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    keys = server.credentials
    with Client(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport="nixl",
        put_encoding=ZSTD,
    ) as client:
        bucket = bucket_of(server, client, "nixl", encoding=StoredEncoding(ZSTD))
        data = numbers(7)
        assert bucket.put(KEYS, data).stored == CHUNKS
        stored = objects_of(server, bucket.name)
        assert [stored[key][0] for key in KEYS] == [chunk.tobytes() for chunk in data]


def test_what_was_acknowledged_encoded_is_there_after_a_kill(tmp_path: Path) -> None:
    shape = (8, *SHAPE[1:])
    acknowledged: list[int] = []
    quiet = [argument for one in QUIET_SETTINGS for argument in ("--set", one)]
    with Served(tmp_path / "store", *quiet) as served:
        served.wait_ready()
        access_key, secret_key = served.credentials
        with Client(served.endpoint, access_key=access_key, secret_key=secret_key) as client:
            bucket = client.kv_bucket("killed", LAYOUT, create=True)
            with StorageClient(served.data_dir / "run" / "storage.sock") as storage:
                policy = BucketPolicy(encoding=StoredEncoding(ZSTD))
                storage.ask(SetPolicy(bucket="killed", policy=policy), Done)
            enough, ended = threading.Event(), threading.Event()

            def put_many(first: int) -> None:
                for number in range(first, first + 10_000):
                    if ended.is_set():
                        return
                    try:
                        bucket.put(names(number), numbers(number, shape), encoding=ZSTD)
                    except ObjectCacheError:  # of the put that the kill has cut
                        continue
                    acknowledged.append(number)
                    if len(acknowledged) >= 20:
                        enough.set()

            def names(number: int) -> list[str]:
                return [f"{number}-{chunk}" for chunk in range(shape[0])]

            threads = [
                threading.Thread(target=put_many, args=(worker * 10_000,)) for worker in range(3)
            ]
            for thread in threads:
                thread.start()
            assert enough.wait(BOUND_S)
            pids = served.children()
            os.kill(pids[STORAGE], signal.SIGKILL)
            ended.set()
            for thread in threads:
                thread.join(BOUND_S)
                assert not thread.is_alive()
            wait_until(
                lambda: (
                    served.children().get(STORAGE) not in (None, pids[STORAGE])
                    and served.health_status() == 200
                ),
                "the storage server to serve again",
            )
            for number in acknowledged:
                data = numbers(number, shape)
                with bucket.fetch(names(number)) as delivery:
                    for layer in range(LAYOUT.num_layers):
                        assert np.array_equal(delivery.wait_layer(layer), data[:, layer])
