"""Puts out of a client's memory against real processes, and every way they can be read back."""

from __future__ import annotations

import hashlib
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import msgspec
import numpy as np
import pytest

from objectcache import AsyncClient, Client, Conflict, KvLayout, NotFound, PutResult
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.kv import KvMatch, KvPut, KvStored, Matched
from objectcache_schemas.messages.sessions import ReleaseTarget, TargetReleased
from tests.s3_clients import Answer, call, send, signed_headers
from tests.servers import RunningServer, standing_still, start_server
from tests.storage_client import StorageClient, TargetClient

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=20_480, dtype="float16", fingerprint="put"
)
# Larger than several pieces, so that a put is still running when a test acts on it.
LARGE = KvLayout(
    num_layers=8, chunk_tokens=16, per_layer_chunk_bytes=1 << 20, dtype="float16", fingerprint="x"
)
LARGE_COUNT = 9


@pytest.fixture(scope="module")
def put_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module's own, which its tests stop and flood."""
    with start_server(tmp_path_factory.mktemp("puts"), "storage.engine=files") as running:
        yield running


@pytest.fixture
def client(put_server: RunningServer) -> Iterator[Client]:
    with client_of(put_server) as client:
        yield client


def client_of(server: RunningServer, **options: Any) -> Client:
    keys = server.credentials
    return Client(
        server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key, **options
    )


def new_bucket(client: Client, layout: KvLayout = LAYOUT) -> KvBucket:
    return client.kv_bucket(f"puts-{secrets.token_hex(6)}", layout, create=True)


def random_chunks(chunk_count: int, layout: KvLayout = LAYOUT) -> Any:
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    return np.random.default_rng(chunk_count).integers(0, 256, shape, dtype=np.uint8)


def assert_reads_back(
    server: RunningServer, bucket: KvBucket, keys: list[str], chunks: Any
) -> None:
    """By every transport, in every order, and as ordinary objects."""
    for transport in ("shared_memory", "body"):
        for order in ("layerwise", "chunkwise"):
            with bucket.fetch(keys, transport=transport, delivery=order) as delivery:
                assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
    for key, chunk in zip(keys, chunks, strict=True):
        assert call(server, "GET", f"/{bucket.name}/{key}").body == chunk.tobytes()


@pytest.mark.parametrize("chunk_count", [1, 7])
def test_chunks_of_a_target_are_stored_and_read_back(
    put_server: RunningServer, client: Client, chunk_count: int
) -> None:
    bucket, chunks = new_bucket(client), random_chunks(chunk_count)
    keys = bucket.chunk_keys(np.arange(16 * chunk_count))
    target = client.shared_memory_target(chunks.nbytes + 1000)
    laid = target.chunks(chunk_count, LAYOUT, offset_bytes=1000)
    laid[:] = chunks
    stored = PutResult(stored=chunk_count, existing=0)
    assert bucket.put(keys, laid, transport="shared_memory") == stored
    laid[:] = 0
    assert_reads_back(put_server, bucket, keys, chunks)
    existing = PutResult(stored=0, existing=chunk_count)
    for transport in ("shared_memory", "body"):
        assert bucket.put(keys, chunks, transport=transport) == existing


@pytest.mark.parametrize("transport", ["shared_memory", "body"])
def test_a_put_behind_its_parent_and_one_by_layers_read_back(
    put_server: RunningServer, client: Client, transport: str
) -> None:
    bucket, chunks = new_bucket(client), random_chunks(9)
    keys = bucket.chunk_keys(np.arange(16 * 9))
    bucket.put(keys[:4], chunks[:4], transport=transport)
    with bucket.put_layers(keys[4:], parent_key=keys[3], transport=transport) as put:
        for layer in range(LAYOUT.num_layers):
            assert bucket.match(keys) == 4  # a whole body may be stored before the put is left
            put.write_layer(chunks[4:, layer])
    assert put.result == PutResult(stored=5, existing=0)
    assert_reads_back(put_server, bucket, keys, chunks)


@pytest.mark.asyncio
async def test_the_asynchronous_client_puts_out_of_its_targets(put_server: RunningServer) -> None:
    keys = put_server.credentials
    async with AsyncClient(
        put_server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key
    ) as client:
        bucket = await client.kv_bucket(f"puts-{secrets.token_hex(6)}", LAYOUT, create=True)
        target = await client.shared_memory_target(6 * LAYOUT.chunk_bytes)
        laid, chunk_keys = target.chunks(6, LAYOUT), bucket.chunk_keys(np.arange(96))
        laid[:] = random_chunks(6)
        await bucket.put(chunk_keys[:2], laid[:2], transport="shared_memory")
        await bucket.put(chunk_keys[2:], laid[2:], parent_key=chunk_keys[1])
        async with bucket.fetch(chunk_keys) as delivery:
            assert np.array_equal(await delivery.wait(), random_chunks(6).transpose(1, 0, 2))


def test_other_bytes_out_of_a_target_are_a_conflict_and_store_nothing(client: Client) -> None:
    bucket, chunks = new_bucket(client), random_chunks(4)
    keys = bucket.chunk_keys(np.arange(64))
    bucket.put(keys[:2], chunks[:2])
    with pytest.raises(Conflict):
        bucket.put(keys, chunks ^ 1, transport="shared_memory")
    assert bucket.match(keys) == 2
    bucket.put(keys, chunks, transport="shared_memory")
    assert bucket.match(keys) == 4


class Registered:
    """A session with one target, spoken to in its own protocol, that holds `chunks`."""

    def __init__(self, server: RunningServer, chunks: Any, identity: str) -> None:
        self.server = server
        self.storage = StorageClient(server.run_dir / "storage.sock")
        self.session = TargetClient(self.storage, identity)
        self.target_id, self.memory = self.session.register(chunks.nbytes)
        self.memory[:] = chunks.tobytes()

    def descriptor(self, keys: list[str], layout: KvLayout, **changes: Any) -> Descriptor:
        fields: dict[str, Any] = {
            "transport": "shared_memory",
            "target_id": self.target_id,
            "offset_bytes": 0,
            "length_bytes": len(self.memory),
            "tag": 0,
        }
        return Descriptor(
            tuple(keys),
            layout.num_layers,
            layout.chunk_tokens,
            layout.per_layer_chunk_bytes,
            DeliveryMode.CHUNKWISE,
            rdma_target=MemoryTarget(**(fields | changes)),
        )

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.storage.close()


def http_put(
    server: RunningServer, bucket: str, descriptor: Descriptor, more: bytes = b""
) -> Answer:
    head = descriptor.to_bytes()
    return call(server, "POST", f"/{bucket}?kv-put", LENGTH.pack(len(head)) + head + more)


def test_what_is_wrong_with_a_target_is_a_4xx_and_stores_nothing(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client), random_chunks(2)
    keys = ["a", "b"]
    with Registered(put_server, chunks, "somebody else") as other:
        answer = http_put(put_server, bucket.name, other.descriptor(keys, LAYOUT))
        assert (answer.status, answer.code) == (404, "NoSuchTarget")
        length = len(other.memory)
        wrong: list[tuple[dict[str, Any], int, str]] = [
            ({"target_id": secrets.token_bytes(16)}, 404, "NoSuchTarget"),
            ({"length_bytes": length - 1}, 400, "InvalidDescriptor"),
            ({"length_bytes": length + 1}, 400, "InvalidDescriptor"),
            ({"offset_bytes": 1}, 404, "NoSuchTarget"),  # of another: nothing is told of it
            ({"transport": "pigeon"}, 501, "NotImplemented"),
        ]
        for changes, status, code in wrong:
            answer = http_put(put_server, bucket.name, other.descriptor(keys, LAYOUT, **changes))
            assert (answer.status, answer.code) == (status, code), changes
    assert bucket.match(keys) == 0


def test_a_body_with_a_target_ends_behind_the_descriptor_and_is_verified_first(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client), random_chunks(2)
    with Registered(put_server, chunks, "root") as registered:
        descriptor = registered.descriptor(["a", "b"], LAYOUT)
        assert http_put(put_server, bucket.name, descriptor, b"x").code == "IncompleteBody"
        head = descriptor.to_bytes()
        path, body = f"/{bucket.name}?kv-put", LENGTH.pack(len(head)) + head
        headers = signed_headers(put_server, "POST", path, body)
        tampered = body.replace(b"\xa1a\xa1b", b"\xa1a\xa1c")
        assert hashlib.sha256(tampered).digest() != hashlib.sha256(body).digest()
        answer = send(put_server, "POST", path, tampered, headers)
        assert answer.code == "XAmzContentSHA256Mismatch"
        assert bucket.match(["a"]) == 0
        answer = send(put_server, "POST", path, body, headers)
        assert msgspec.msgpack.decode(answer.body) == {"v": 1, "stored": 2, "existing": 0}


def test_a_parent_is_for_puts_alone_and_is_no_chunk_of_the_put(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client), random_chunks(2)
    fields = (5, 16, 20_480, DeliveryMode.CHUNKWISE)
    good = Descriptor(("a", "b"), *fields, parent_key="p")
    assert http_put(put_server, bucket.name, good, chunks.tobytes()).status == 200
    answer = call(put_server, "POST", f"/{bucket.name}?kv-get", good.to_bytes())
    assert (answer.status, answer.code) == (400, "InvalidDescriptor")
    assert "parent_key" in (answer.xml.findtext("Message") or "")
    own = Descriptor(("a", "b"), *fields, parent_key="b")
    answer = http_put(put_server, bucket.name, own, chunks.tobytes())
    assert (answer.status, answer.code) == (400, "InvalidDescriptor")


def test_a_target_released_during_a_put_stores_all_or_nothing(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
    outcomes: set[str] = set()
    for turn in range(2):
        keys = [f"{turn} {index}" for index in range(LARGE_COUNT)]
        with Registered(put_server, chunks, "alice") as one:
            request = KvPut(
                bucket=bucket.name,
                identity="alice",
                descriptor=one.descriptor(keys, LARGE).to_bytes(),
            )
            with standing_still(put_server.storage_pid):
                one.storage.send(request)
                one.session.send(ReleaseTarget(target_id=one.target_id))
            assert one.session.event() == TargetReleased(target_id=one.target_id)
            one.memory[:] = bytes(len(one.memory))  # it is the client's alone now
            try:
                assert one.storage.reply(KvStored).stored == LARGE_COUNT
                outcomes.add("stored")
            except NotFound:
                outcomes.add("released")
            stored = one.storage.ask(
                KvMatch(bucket=bucket.name, chunk_keys=tuple(keys)), Matched
            ).matched
        if stored:
            assert stored == LARGE_COUNT
            with bucket.fetch(keys) as delivery:
                assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
    assert outcomes <= {"stored", "released"}


_DYING_CLIENT = """
import sys, objectcache
from tests.integration.test_shared_puts import LARGE, LARGE_COUNT, random_chunks
endpoint, access_key, secret_key, bucket = sys.argv[1:]
client = objectcache.Client(endpoint, access_key=access_key, secret_key=secret_key)
bucket = client.kv_bucket(bucket, LARGE)
target = client.shared_memory_target(LARGE_COUNT * LARGE.chunk_bytes)
chunks = target.chunks(LARGE_COUNT, LARGE)
chunks[:] = random_chunks(LARGE_COUNT, LARGE)
for turn in range(1000):
    print("putting", flush=True)
    bucket.put([f"{turn} {n}" for n in range(LARGE_COUNT)], chunks, transport="shared_memory")
"""


def test_a_client_killed_during_a_put_leaves_whole_prefixes_and_a_server_that_serves(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
    keys = put_server.credentials
    arguments = [put_server.endpoint, keys.access_key, keys.secret_key, bucket.name]
    with subprocess.Popen(
        [sys.executable, "-c", _DYING_CLIENT, *arguments], stdout=subprocess.PIPE
    ) as dying:
        assert dying.stdout is not None
        for _ in range(2):
            assert dying.stdout.readline() == b"putting\n"
        dying.kill()
    for turn in range(4):
        turn_keys = [f"{turn} {index}" for index in range(LARGE_COUNT)]
        matched = bucket.match(turn_keys)
        assert matched in (0, LARGE_COUNT)
        if matched:
            with bucket.fetch(turn_keys) as delivery:
                assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
    more = [f"after {index}" for index in range(LARGE_COUNT)]
    assert bucket.put(more, chunks).stored == LARGE_COUNT


def test_memory_that_changes_during_a_put_is_damage_of_its_own_at_worst(
    put_server: RunningServer, client: Client
) -> None:
    bucket = new_bucket(client, LARGE)
    target = client.shared_memory_target(LARGE_COUNT * LARGE.chunk_bytes)
    chunks = target.chunks(LARGE_COUNT, LARGE)
    own, keys = random_chunks(1, LARGE), [str(index) for index in range(LARGE_COUNT)]
    bucket.put(["whole"], own)
    done = threading.Event()

    def scribble() -> None:
        value = 0
        while not done.is_set():
            value = (value + 1) % 256
            chunks[:, :, ::4096] = value

    careless = threading.Thread(target=scribble)
    careless.start()
    try:
        bucket.put(keys, chunks, transport="shared_memory")
    finally:
        done.set()
        careless.join()
    for key in keys:
        with suppress(HTTPException):  # the body of a damaged object is cut
            assert call(put_server, "GET", f"/{bucket.name}/{key}").status in (200, 404, 500)
    with bucket.fetch(["whole"]) as delivery:
        assert np.array_equal(delivery.wait(), own.transpose(1, 0, 2))
