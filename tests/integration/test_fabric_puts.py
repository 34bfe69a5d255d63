"""Puts over NIXL against real processes: out of registered memory, and what ends while one runs."""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from objectcache import Client, Conflict, InvalidRequest, KvLayout, PutResult, Unavailable
from objectcache.core import TransportChoice
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.kv import KvPut, KvStored
from tests.servers import RunningServer, standing_still, start_server
from tests.storage_client import StorageClient

pytest.importorskip("nixl_cu12")

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=20_480, dtype="float16", fingerprint="put"
)
# Larger than the staging memory, so that a put is still running when a test acts on it.
LARGE = KvLayout(
    num_layers=8, chunk_tokens=16, per_layer_chunk_bytes=1 << 20, dtype="float16", fingerprint="x"
)
LARGE_COUNT = 6
SETTINGS = (
    f"storage.fabric_staging_bytes={8 << 20}",  # of one put: what is not given back is missed
    # A client that stands still for less, as a busy machine may have one do, is not given up.
    "gateway.session_heartbeat_s=60",
)


@pytest.fixture(scope="module")
def put_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module's own."""
    with start_server(tmp_path_factory.mktemp("puts"), *SETTINGS) as running:
        yield running


@contextmanager
def client_of(server: RunningServer, transport: str = "auto") -> Generator[Client]:
    keys = server.credentials
    client = Client(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport=transport,
    )
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def client(put_server: RunningServer) -> Iterator[Client]:
    with client_of(put_server) as client:
        yield client


def new_bucket(client: Client, layout: KvLayout = LAYOUT) -> KvBucket:
    return client.kv_bucket(f"puts-{secrets.token_hex(6)}", layout, create=True)


def random_chunks(chunk_count: int, layout: KvLayout = LAYOUT) -> Any:
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    return np.random.default_rng(chunk_count).integers(0, 256, shape, dtype=np.uint8)


def assert_reads_back(bucket: KvBucket, keys: list[str], chunks: Any) -> None:
    for transport, order in (("nixl", "layerwise"), ("nixl", "chunkwise"), ("body", "layerwise")):
        with bucket.fetch(keys, transport=transport, delivery=order) as delivery:
            assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2)), (transport, order)


@pytest.mark.parametrize("chunk_count", [1, 7])
def test_chunks_of_a_fabrics_target_are_stored_out_of_it(client: Client, chunk_count: int) -> None:
    bucket, chunks = new_bucket(client), random_chunks(chunk_count)
    keys = bucket.chunk_keys(np.arange(16 * chunk_count))
    target = client.fabric_target(chunks.nbytes + 1000)
    laid = target.chunks(chunk_count, LAYOUT, offset_bytes=1000)
    laid[:] = chunks
    assert bucket.put(keys, laid, transport="nixl") == PutResult(stored=chunk_count, existing=0)
    laid[:] = 0
    assert_reads_back(bucket, keys, chunks)
    target.close()
    with pytest.raises(Conflict):  # they lie in a closed target, and are copied
        bucket.put(keys, laid, transport="nixl")


def test_chunks_that_lie_elsewhere_are_copied_to_registered_memory(client: Client) -> None:
    bucket, chunks = new_bucket(client), random_chunks(7)
    keys = bucket.chunk_keys(np.arange(16 * 7))
    assert bucket.put(keys[:4], chunks[:4], transport="nixl").stored == 4
    shared = client.shared_memory_target(chunks.nbytes)
    laid = shared.chunks(7, LAYOUT)
    laid[:] = chunks
    assert bucket.put(keys[:5], laid[:5], transport="nixl") == PutResult(stored=1, existing=4)
    with bucket.put_layers(keys[5:], parent_key=keys[4], transport="nixl") as put:
        for layer in range(LAYOUT.num_layers):
            put.write_layer(chunks[5:, layer])
    assert put.result == PutResult(stored=2, existing=0)
    assert_reads_back(bucket, keys, chunks)
    target = client.fabric_target(chunks.nbytes)
    held = target.chunks(7, LAYOUT)
    held[:] = chunks
    for transport in ("shared_memory", "body", "auto"):
        assert bucket.put(keys, held, transport=transport).existing == 7
    target.close()


class _OfGpu:
    """An array that says that it lies in a GPU."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def test_an_array_of_a_gpu_is_put_by_its_address_out_of_the_target_that_holds_it(
    client: Client,
) -> None:
    """The memory is this host's: what finds it is the same."""
    bucket, chunks = new_bucket(client), random_chunks(3)
    target = client.fabric_target(chunks.nbytes)
    target.chunks(3, LAYOUT)[:] = chunks
    of_gpu = _OfGpu(target.address + LAYOUT.chunk_bytes, chunks.shape[1:])
    assert bucket.put(["one"], of_gpu).stored == 1
    assert_reads_back(bucket, ["one"], chunks[1:2])
    with pytest.raises(InvalidRequest, match="fabric_target"):
        bucket.put(["one"], _OfGpu(target.address + 1 + 2 * LAYOUT.chunk_bytes, chunks.shape[1:]))
    with pytest.raises(InvalidRequest, match="the layout needs"):
        bucket.put(["one", "two"], of_gpu)
    with pytest.raises(InvalidRequest, match="fabric_target"):
        bucket.put(["one"], of_gpu, transport="shared_memory")
    target.close()


def test_other_bytes_out_of_a_target_are_a_conflict_and_store_nothing(client: Client) -> None:
    bucket, chunks = new_bucket(client), random_chunks(4)
    keys = bucket.chunk_keys(np.arange(64))
    bucket.put(keys[:2], chunks[:2])
    with pytest.raises(Conflict):
        bucket.put(keys, chunks ^ 1, transport="nixl")
    assert bucket.match(keys) == 2


def test_what_does_not_fit_the_target_is_refused_and_stores_nothing(
    put_server: RunningServer, client: Client
) -> None:
    bucket = new_bucket(client)
    target = client.fabric_target(2 * LAYOUT.chunk_bytes)
    memory = client._core.memory(TransportChoice.NIXL)  # pyright: ignore[reportPrivateUsage]
    region = target._registered  # pyright: ignore[reportPrivateUsage]
    good: dict[str, Any] = {
        "transport": "nixl",
        "target_id": region.target_id(memory.sessions.session()),
        "offset_bytes": 0,
        "length_bytes": LAYOUT.chunk_bytes,
        "tag": 0,
    }
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({}, "mallory", "NoSuchTarget"),
        ({"target_id": secrets.token_bytes(16)}, "root", "NoSuchTarget"),
        ({"length_bytes": LAYOUT.chunk_bytes - 1}, "root", "InvalidDescriptor"),
        ({"offset_bytes": LAYOUT.chunk_bytes + 1}, "root", "InvalidDescriptor"),
        ({"transport": "shared_memory"}, "root", "InvalidDescriptor"),
        ({"transport": "pigeon"}, "root", "NotImplemented"),
    ]
    shape = (LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.per_layer_chunk_bytes)
    with StorageClient(put_server.run_dir / "storage.sock") as storage:
        for changes, identity, code in wrong:
            asked = MemoryTarget(**(good | changes))
            descriptor = Descriptor(("a",), *shape, DeliveryMode.CHUNKWISE, rdma_target=asked)
            request = KvPut(bucket=bucket.name, identity=identity, descriptor=descriptor.to_bytes())
            with pytest.raises(ObjectCacheError) as refused:
                storage.ask(request, KvStored)
            assert refused.value.code == code, changes
    assert bucket.match(["a"]) == 0
    target.close()


# --- failures ------------------------------------------------------------------------------------

_CHILD = """
import sys, objectcache
from tests.integration.test_fabric_puts import LARGE, LARGE_COUNT, random_chunks
endpoint, access_key, secret_key, bucket, turns = sys.argv[1:]
client = objectcache.Client(endpoint, access_key=access_key, secret_key=secret_key)
bucket = client.kv_bucket(bucket, LARGE)
target = client.fabric_target(LARGE_COUNT * LARGE.chunk_bytes)
chunks = target.chunks(LARGE_COUNT, LARGE)
chunks[:] = random_chunks(LARGE_COUNT, LARGE)
for turn in range(int(turns)):
    print("putting", flush=True)
    bucket.put([f"{turn} {n}" for n in range(LARGE_COUNT)], chunks, transport="nixl")
"""


@contextmanager
def putting(
    server: RunningServer, bucket: KvBucket, turns: int = 1000
) -> Generator[subprocess.Popen[bytes]]:
    """A client of its own that is about to be in the middle of its second put."""
    keys = server.credentials
    arguments = [server.endpoint, keys.access_key, keys.secret_key, bucket.name, str(turns)]
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            for _ in range(2):
                assert child.stdout.readline() == b"putting\n"
            yield child
        finally:
            child.kill()


def assert_whole_or_nothing(bucket: KvBucket, chunks: Any) -> None:
    for turn in itertools.count():
        keys = [f"{turn} {index}" for index in range(LARGE_COUNT)]
        matched = bucket.match(keys)
        assert matched in (0, LARGE_COUNT)
        if not matched:
            return
        with bucket.fetch(keys) as delivery:
            assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))


def test_a_client_killed_during_a_put_leaves_whole_prefixes_and_no_staging_memory_taken(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
    with putting(put_server, bucket) as child:
        child.kill()
        child.wait()
        more = [f"after {index}" for index in range(LARGE_COUNT)]
        assert bucket.put(more, chunks, transport="nixl").stored == LARGE_COUNT
    assert_whole_or_nothing(bucket, chunks)


def test_a_target_closed_during_a_put_stores_all_or_nothing(client: Client) -> None:
    bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
    target = client.fabric_target(chunks.nbytes)
    laid = target.chunks(LARGE_COUNT, LARGE)
    laid[:] = chunks
    target.close()
    keys = [f"0 {index}" for index in range(LARGE_COUNT)]
    assert bucket.put(keys, laid, transport="nixl").stored == LARGE_COUNT  # copied
    assert_whole_or_nothing(bucket, chunks)


def test_a_client_stopped_during_a_put_within_the_host_goes_on_and_puts_again(
    put_server: RunningServer, client: Client
) -> None:
    bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
    with putting(put_server, bucket, turns=4) as child:
        with standing_still(child.pid):
            more = [f"after {index}" for index in range(LARGE_COUNT)]
            assert bucket.put(more, chunks, transport="nixl").stored == LARGE_COUNT
        said, complaint = child.communicate(timeout=60)
        assert child.returncode == 0, complaint
        assert said == b"putting\n" * 2
    assert_whole_or_nothing(bucket, chunks)
    assert bucket.match([f"3 {index}" for index in range(LARGE_COUNT)]) == LARGE_COUNT


def test_a_stopped_client_is_given_up_after_storage_fabric_timeout_s_and_others_go_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Over TCP (storage.nixl_ucx): a copy within a host needs nothing of the stopped client.

    What becomes of the client is not looked at. UCX may end a process that carries out a read when
    its connection is given up (docs/security.md).
    """
    settings = (*SETTINGS, "storage.fabric_timeout_s=6", "storage.nixl_ucx=TLS=tcp")
    with (
        start_server(tmp_path_factory.mktemp("stopped"), *settings) as server,
        client_of(server) as client,
    ):
        bucket, chunks = new_bucket(client, LARGE), random_chunks(LARGE_COUNT, LARGE)
        with putting(server, bucket) as child, standing_still(child.pid):
            more = [f"after {index}" for index in range(LARGE_COUNT)]
            assert bucket.put(more, chunks, transport="nixl").stored == LARGE_COUNT
        assert_whole_or_nothing(bucket, chunks)


def test_a_storage_server_killed_during_a_put_is_an_error_in_bounded_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with start_server(tmp_path_factory.mktemp("killed"), *SETTINGS) as server:
        with client_of(server) as client:
            bucket = new_bucket(client, LARGE)
            with putting(server, bucket) as child:
                server.kill_storage()
                assert child.stderr is not None
                said = child.stderr.read()  # ends when the child does
                assert child.wait() == 1
                assert b"Unavailable" in said
        server.restart_storage()
        with client_of(server) as client:
            again = client.kv_bucket(bucket.name, LARGE)
            assert_whole_or_nothing(again, random_chunks(LARGE_COUNT, LARGE))


def test_a_server_without_nixl_says_so_where_it_is_demanded_and_is_put_to_otherwise(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        start_server(tmp_path_factory.mktemp("off"), "storage.nixl=off") as server,
        client_of(server, "nixl") as client,
    ):
        bucket = new_bucket(client)
        with pytest.raises(Unavailable, match=r"storage\.nixl is off"):
            bucket.put(["a"], random_chunks(1))
        with pytest.raises(Unavailable, match=r"storage\.nixl is off"):
            client.fabric_target(4096)
        assert bucket.put(["a"], random_chunks(1), transport="auto").stored == 1
