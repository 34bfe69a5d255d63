"""Puts out of shared memory, against a scripted gateway and target socket."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from objectcache import (
    Client,
    InvalidRequest,
    KvLayout,
    NotFound,
    PutResult,
    StorageFull,
    Unavailable,
)
from objectcache.kv_bucket import KvBucket
from objectcache.landing.held_targets import HeldTargets
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import LENGTH
from tests.unit.client.client_fakes import DEADLINE_S, FakeGateway, FakeTargetSocket, Peer, Received

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=16_384, dtype="uint8", fingerprint="put"
)
KEYS = ["a", "b", "c", "d", "e"]
CHUNKS = np.random.default_rng(11).integers(
    0, 256, (len(KEYS), LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes), np.uint8
)


class PutServer:
    """Stores what is put, in the order in which it came; by body or out of the targets."""

    def __init__(self, directory: Path) -> None:
        self.targets = FakeTargetSocket(directory)
        self.gateway = FakeGateway(self.serve)
        self.host_id: str | None = None
        self.puts: list[Descriptor] = []
        self.stored: list[bytes] = []
        self.refusal: tuple[int, bytes] | None = None  # of puts out of a target
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def serve(self, request: Received, peer: Peer) -> None:
        if "kv-session" in request.target:
            peer.answer(body=self.targets.invitation(self.host_id))
            return
        (length,) = LENGTH.unpack_from(request.body)
        descriptor = Descriptor.from_bytes(
            request.body[LENGTH.size :][:length], Limits(), of_put=True
        )
        payload = request.body[LENGTH.size + length :]
        self.puts.append(descriptor)
        if descriptor.rdma_target is not None:
            assert not payload
            self.entered.set()
            assert self.go_on.wait(DEADLINE_S)
            if self.refusal is not None:
                peer.answer(self.refusal[0], body=self.refusal[1])
                return
            payload = self.read(descriptor.rdma_target)
        self.stored.append(payload)
        count = len(descriptor.chunk_keys)
        peer.answer(body=msgspec.msgpack.encode({"v": 1, "stored": count, "existing": 0}))

    def read(self, target: MemoryTarget) -> bytes:
        end = target.offset_bytes + target.length_bytes
        return self.targets.memory[target.target_id][target.offset_bytes : end]

    def client(self, **options: object) -> Client:
        return self.gateway.client(**{"transport": "auto", "timeout_s": DEADLINE_S} | options)

    def ways(self) -> list[str]:
        """How each put came."""
        return ["memory" if put.rdma_target else "body" for put in self.puts]

    def close(self) -> None:
        self.gateway.listener.close()
        self.targets.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PutServer]:
    server = PutServer(tmp_path)
    yield server
    server.go_on.set()
    server.close()


def bucket_of(client: Client, layout: KvLayout = LAYOUT) -> KvBucket:
    return KvBucket(client._core, "b", layout)


def laid_out(client: Client, offset_bytes: int = 0) -> tuple[Any, Any]:
    """A target of the client, and the chunks within it."""
    target = client.shared_memory_target(offset_bytes + CHUNKS.nbytes + 100)
    chunks = target.chunks(len(KEYS), LAYOUT, offset_bytes)
    chunks[:] = CHUNKS
    return target, chunks


def test_chunks_in_a_target_are_put_where_they_lie(server: PutServer) -> None:
    with server.client() as client:
        _, chunks = laid_out(client, offset_bytes=4096)
        assert bucket_of(client).put(KEYS, chunks) == PutResult(stored=5, existing=0)
        bucket_of(client).put(KEYS[1:3], chunks[1:3], parent_key="a")
        bucket_of(client).put(KEYS[2:], [chunks[2], chunks[3], chunks[4].data.cast("B")])
        assert "<TargetPool 0/0 free" in repr(client)
        assert server.targets.registered_count == 1  # nothing was copied
    assert server.stored == [CHUNKS.tobytes(), CHUNKS[1:3].tobytes(), CHUNKS[2:].tobytes()]
    offsets = [put.rdma_target.offset_bytes for put in server.puts if put.rdma_target]
    chunk_bytes = LAYOUT.chunk_bytes
    assert offsets == [4096, 4096 + chunk_bytes, 4096 + 2 * chunk_bytes]
    assert [put.parent_key for put in server.puts] == [None, "a", None]


def test_other_memory_is_copied_into_the_clients_own_and_that_is_reused(
    server: PutServer,
) -> None:
    with server.client() as client:
        _, chunks = laid_out(client)
        for data in (CHUNKS, CHUNKS.tobytes(), list(CHUNKS), chunks[::-1]):
            bucket_of(client).put(KEYS, data)
            gc.collect()
        assert server.targets.registered_count == 2
        assert "<TargetPool 1/1 free" in repr(client)
    assert server.ways() == ["memory"] * 4
    assert server.stored == [CHUNKS.tobytes()] * 3 + [CHUNKS[::-1].tobytes()]


def test_a_small_payload_goes_by_body_unless_memory_is_demanded(server: PutServer) -> None:
    with server.client() as client:
        bucket_of(client).put(KEYS[:1], CHUNKS[:1])
        bucket_of(client).put(KEYS[:1], CHUNKS[:1], transport="shared_memory")
    assert server.ways() == ["body", "memory"]
    assert server.stored == [CHUNKS[:1].tobytes()] * 2


def test_a_transport_that_is_named_is_obeyed(server: PutServer) -> None:
    with server.client() as client:
        _, chunks = laid_out(client)
        bucket_of(client).put(KEYS, chunks, transport="body")
        with bucket_of(client).put_layers(KEYS, transport="body") as put:
            for layer in range(LAYOUT.num_layers):
                put.write_layer(chunks[:, layer])
        server.host_id = "another boot id"
        with pytest.raises(InvalidRequest, match="transport"):
            bucket_of(client).put(KEYS, chunks, transport="pigeon")
    assert server.ways() == ["body", "body"]


def test_without_a_session_the_body_is_used_and_a_demand_is_told_why(server: PutServer) -> None:
    server.host_id = "another boot id"
    with server.client() as client:
        bucket_of(client).put(KEYS, CHUNKS)
        with bucket_of(client).put_layers(KEYS) as put:
            for layer in range(LAYOUT.num_layers):
                put.write_layer(CHUNKS[:, layer])
        with pytest.raises(Unavailable, match="another host"):
            bucket_of(client).put(KEYS, CHUNKS, transport="shared_memory")
    assert server.ways() == ["body", "body"]
    assert server.stored == [CHUNKS.tobytes(), CHUNKS.transpose(1, 0, 2).tobytes()]


def test_layers_are_laid_into_memory_and_stored_at_the_end(server: PutServer) -> None:
    with server.client() as client, bucket_of(client).put_layers(KEYS, parent_key="p") as put:
        for layer in range(LAYOUT.num_layers):
            kv = CHUNKS[:, layer].copy()
            put.write_layer(kv)
            kv[:] = 0  # the memory is the caller's again
            assert not server.puts
    assert put.result == PutResult(stored=5, existing=0)
    (descriptor,) = server.puts
    assert (descriptor.delivery, descriptor.parent_key) == (DeliveryMode.LAYERWISE, "p")
    assert server.stored == [CHUNKS.transpose(1, 0, 2).tobytes()]


def test_a_layer_put_that_is_abandoned_or_dropped_gives_its_memory_back(server: PutServer) -> None:
    with server.client() as client:
        put = bucket_of(client).put_layers(KEYS)
        put.write_layer(CHUNKS[:, 0])
        put.abandon()
        del put
        assert "<TargetPool 1/1 free" in repr(client)
        dropped = bucket_of(client).put_layers(KEYS)
        dropped.write_layer(CHUNKS[:, 0])
        assert "<TargetPool 0/1 free" in repr(client)
        del dropped
        gc.collect()
        assert "<TargetPool 1/1 free" in repr(client)
    assert not server.puts


@pytest.mark.parametrize("from_target", [True, False])
def test_a_target_that_the_server_lost_falls_back_to_the_body(
    server: PutServer, from_target: bool
) -> None:
    server.refusal = (404, b"<Error><Code>NoSuchTarget</Code><Message>gone</Message></Error>")
    with server.client() as client:
        chunks = laid_out(client)[1] if from_target else CHUNKS
        assert bucket_of(client).put(KEYS, chunks).stored == 5
        with pytest.raises(NotFound, match="gone"):
            bucket_of(client).put(KEYS, chunks, transport="shared_memory")
    assert server.ways() == ["memory", "body", "memory"]
    assert server.stored == [CHUNKS.tobytes()]


def test_any_other_refusal_is_raised_and_the_memory_is_free(server: PutServer) -> None:
    server.refusal = (507, b"<Error><Code>StorageFull</Code><Message>full</Message></Error>")
    with server.client() as client:
        for _ in range(2):
            with pytest.raises(StorageFull):
                bucket_of(client).put(KEYS, CHUNKS)
            gc.collect()
        assert "<TargetPool 1/1 free" in repr(client)
        assert server.targets.registered_count == 1
    assert server.ways() == ["memory", "memory"]


def test_memory_of_a_put_whose_end_is_unknown_is_withdrawn_first(server: PutServer) -> None:
    server.refusal = (500, b"no XML at all")
    server.targets.hold_releases = True
    with server.client(transport="shared_memory") as client:
        target, chunks = laid_out(client)
        with pytest.raises(Exception, match="500"):
            bucket_of(client).put(KEYS, chunks)
        with pytest.raises(InvalidRequest, match="in use by a put"):
            target.claim(0)
        server.targets.answer_release()


def test_no_delivery_is_begun_into_a_target_that_a_put_reads(server: PutServer) -> None:
    server.go_on.clear()
    with server.client() as client:
        target, chunks = laid_out(client)
        results: list[PutResult] = []
        put = threading.Thread(target=lambda: results.append(bucket_of(client).put(KEYS, chunks)))
        put.start()
        assert server.entered.wait(DEADLINE_S)
        with pytest.raises(InvalidRequest, match="in use by a put"):
            bucket_of(client).fetch(KEYS, target=target)
        server.go_on.set()
        put.join(DEADLINE_S)
        assert results == [PutResult(stored=5, existing=0)]
        target.claim(0).settle()


def test_a_closed_targets_memory_is_put_like_any_other(server: PutServer) -> None:
    with server.client() as client:
        target, chunks = laid_out(client)
        target.close()
        bucket_of(client).put(KEYS, chunks)
        assert server.targets.registered_count == 2
    assert server.stored == [CHUNKS.tobytes()]


def test_a_payload_over_the_clients_memory_goes_by_body_unless_memory_is_demanded(
    server: PutServer,
) -> None:
    with server.client(target_bytes_max=65_536) as client:
        bucket_of(client).put(KEYS, CHUNKS)
        with pytest.raises((InvalidRequest, Busy), match="target_bytes_max"):
            bucket_of(client).put(KEYS, CHUNKS, transport="shared_memory")
    assert server.ways() == ["body"]


def test_a_view_of_chunks_ends_within_the_target(server: PutServer) -> None:
    with server.client() as client:
        target = client.shared_memory_target(2 * LAYOUT.chunk_bytes)
        assert target.chunks(1, LAYOUT, LAYOUT.chunk_bytes).shape == (1, 4, 16_384)
        assert target.chunks(0, LAYOUT).shape == (0, 4, 16_384)
        for count, offset_bytes in ((3, 0), (2, 1), (1, -1), (-1, 0)):
            with pytest.raises(InvalidRequest, match="the target holds"):
                target.chunks(count, LAYOUT, offset_bytes)


def test_only_memory_that_lies_in_a_target_whole_is_found(server: PutServer) -> None:
    with server.client() as client:
        target = client.shared_memory_target(1000)
        targets = HeldTargets()
        targets.add(target)
        begin = target.array.ctypes.data
        assert targets.holding(begin, 1000) == (target, 0)
        assert targets.holding(begin + 300, 700) == (target, 300)
        assert targets.holding(begin - 1, 10) is None
        assert targets.holding(begin + 300, 701) is None


def test_a_parent_that_is_no_key_is_refused_here(server: PutServer) -> None:
    wrong: Any = b"a"
    with server.client() as client, pytest.raises(InvalidRequest, match="parent_key"):
        bucket_of(client).put(KEYS, CHUNKS, parent_key=wrong)
    assert not server.puts
