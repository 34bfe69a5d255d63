"""Puts out of registered memory: what ends while one runs, and who may still touch what."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_runtime.settings import ServerSettings, Settings
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import (
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    StorageFull,
    Unsupported,
    WireError,
)
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import PrefixShape, Staged, StagedPrefix
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.puts.prefix_puts import serve_kv_put
from objectcache_storage_server.puts.target_source import PIECE_BYTES, piece_bytes
from objectcache_storage_server.service import Service
from objectcache_storage_server.testing import WrappedEngine
from objectcache_storage_server.transports.targets import RegisteredTarget, TargetOwner
from tests.storage_client import sealed_memory_file

N, L, S = 3, 4, 4096
KEYS = ("a", "b", "c")
CHUNKS = np.random.default_rng(5).integers(0, 256, (N, L, S), np.uint8)
PAYLOAD = CHUNKS.tobytes()
DEADLINE_S = 20.0
_REPLY: msgspec.msgpack.Decoder[StorageReply | WireError] = msgspec.msgpack.Decoder(StorageReply)


class _Gated(StagedPrefix):
    """Tells that a write has begun and waits; `gate` says when it goes on."""

    def __init__(self, engine: GatedEngine, inner: StagedPrefix) -> None:
        self._engine = engine
        self._inner = inner
        self.staged: Sequence[Staged] = inner.staged

    def write(self, position_bytes: int, data: memoryview) -> None:
        self._engine.writing.set()
        assert self._engine.gate.wait(DEADLINE_S)
        if self._engine.fails:
            raise StorageFull("no room")
        self._engine.touched.append(bytes(data))
        self._inner.write(position_bytes, data)


class GatedEngine(WrappedEngine):
    """The memory engine, whose puts stop in their first write until `gate` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.writing, self.gate = threading.Event(), threading.Event()
        self.touched: list[bytes] = []
        self.shapes: list[PrefixShape] = []
        self.fails = False

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        self.shapes.append(shape)
        return _Gated(self, self.inner.stage_prefix(bucket, shape))


class Host:
    """A service, a client's registered memory, and the gateway's end of one conversation."""

    def __init__(self) -> None:
        self.engine = GatedEngine()
        self.engine.create_bucket(BucketInfo(name="kv", owner="o", region="r", created_s=0.0))
        self.service = Service(
            Settings(server=ServerSettings(data_dir="/nonexistent")), self.engine
        )
        self.owner = TargetOwner("alice")
        self.target, self.memory = self.register(len(PAYLOAD))
        self.memory[:] = PAYLOAD
        near, self.gateway = socket.socketpair()
        self.gateway.settimeout(DEADLINE_S)
        self.stream = StreamSocket(near)

    def register(self, length_bytes: int) -> tuple[RegisteredTarget, mmap.mmap]:
        descriptor = sealed_memory_file(length_bytes)
        try:
            memory = mmap.mmap(descriptor, length_bytes)
            return self.service.targets.register(self.owner, descriptor, length_bytes), memory
        finally:
            os.close(descriptor)

    def start(
        self, identity: str = "alice", parent_key: str | None = None, **changes: object
    ) -> asyncio.Task[None]:
        fields = {
            "transport": "shared_memory",
            "target_id": self.target.target_id,
            "offset_bytes": 0,
            "length_bytes": len(PAYLOAD),
            "tag": 0,
        }
        asked = msgspec.convert(fields | changes, MemoryTarget)
        descriptor = Descriptor(
            KEYS, L, 16, S, DeliveryMode.CHUNKWISE, rdma_target=asked, parent_key=parent_key
        )
        request = KvPut(bucket="kv", identity=identity, descriptor=descriptor.to_bytes())
        put = serve_kv_put(self.service.puts, Conversation(self.stream), request)
        return asyncio.create_task(put)

    async def started(self) -> asyncio.Task[None]:
        """A put that stands in its first write."""
        task = self.start()
        assert await asyncio.to_thread(self.engine.writing.wait, DEADLINE_S)
        return task

    def reply(self) -> StorageReply | WireError:
        (length,) = LENGTH.unpack(self.gateway.recv(LENGTH.size))
        return _REPLY.decode(self.gateway.recv(length, socket.MSG_WAITALL))

    def is_unused(self) -> bool:
        """Nothing is stored, no put is counted, and no lease is held."""
        most_bytes = self.service.gates.slots.put_bytes_max
        with suppress(NotFound), self.service.gates.put_now(most_bytes, "x"):
            pass
        return self.engine.match("kv", KEYS) == 0 and not self.target.leases

    def close(self) -> None:
        self.engine.gate.set()
        self.gateway.close()
        self.stream.close()
        self.service.close()


@asynccontextmanager
async def hosted() -> AsyncIterator[Host]:
    host = Host()
    try:
        yield host
    finally:
        host.close()


@pytest.mark.asyncio
async def test_a_payload_is_stored_out_of_the_clients_memory() -> None:
    async with hosted() as host:
        host.engine.gate.set()
        await host.start(parent_key="before")
        assert host.reply() == KvStored(stored=N, existing=0)
        assert host.engine.shapes[0].parent_key == "before"
        with host.engine.open_many("kv", KEYS) as opened:
            for index in range(N):
                got = bytearray(L * S)
                opened.read_into(index, 0, memoryview(got))
                assert got == CHUNKS[index].tobytes()
        await host.start()
        assert host.reply() == KvStored(stored=0, existing=N)
        assert not host.target.leases


@pytest.mark.asyncio
async def test_releasing_the_target_fails_the_put_and_is_answered_when_nothing_reads_it() -> None:
    async with hosted() as host:
        put = await host.started()
        released = threading.Event()
        host.service.targets.release(host.target, released.set)
        assert not released.is_set()  # the write still reads the memory
        host.engine.gate.set()
        with pytest.raises(NotFound, match="released"):
            await put
        assert released.is_set()
        assert host.is_unused()
        with pytest.raises(NotFound):
            await host.start()


@pytest.mark.asyncio
async def test_a_gateway_that_hangs_up_leaves_nothing_stored() -> None:
    async with hosted() as host:
        put = await host.started()
        host.gateway.shutdown(socket.SHUT_RDWR)
        for _ in range(20):  # turns of the loop, until the watcher has seen it
            await asyncio.sleep(0)
        host.engine.gate.set()
        with pytest.raises(ConnectionEnded):
            await put
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_cancelled_put_ends_only_when_its_write_does() -> None:
    async with hosted() as host:
        put = await host.started()
        put.cancel()
        done, _ = await asyncio.wait([put], timeout=0)
        assert not done
        assert host.target.leases
        host.engine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert host.is_unused()


@pytest.mark.asyncio
async def test_an_engine_that_fails_leaves_nothing_and_lets_the_target_go() -> None:
    async with hosted() as host:
        host.engine.fails = True
        host.engine.gate.set()
        with pytest.raises(StorageFull):
            await host.start()
        assert host.is_unused()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"length_bytes": len(PAYLOAD) - 1}, InvalidRequest, "the payload of the put has"),
        ({"length_bytes": len(PAYLOAD) + 1}, InvalidRequest, "the payload of the put has"),
        ({"offset_bytes": 1}, InvalidRequest, "the target holds"),
        ({"target_id": bytes(16)}, NotFound, "not registered"),
        ({"identity": "mallory"}, NotFound, "not registered"),
        ({"transport": "pigeon"}, Unsupported, "pigeon"),
        ({"parent_key": "b"}, InvalidRequest, "parent_key"),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_read(
    changes: dict[str, str], error: type[ObjectCacheError], named: str
) -> None:
    async with hosted() as host:
        with pytest.raises(error, match=named):
            await host.start(**changes)
        assert not host.engine.writing.is_set()
        assert host.is_unused()


@pytest.mark.asyncio
async def test_memory_that_changes_during_the_put_is_stored_damaged_at_worst() -> None:
    async with hosted() as host:
        put = await host.started()
        host.memory[: L * S] = bytes(L * S)
        host.engine.gate.set()
        await put
        assert host.engine.touched == [bytes(L * S) + PAYLOAD[L * S :]]
        with host.engine.open_many("kv", KEYS) as opened:
            got = bytearray(L * S)
            opened.read_into(1, 0, memoryview(got))
            assert got == CHUNKS[1].tobytes()


SIZES = st.sampled_from([1, 100, 4097, 65_536, 3 << 20, 30 << 20, 64 << 20])


@given(st.integers(1, 600), st.integers(1, 80), SIZES, st.booleans())
def test_pieces_are_whole_chunks_slices_or_blocks(
    chunk_count: int, num_layers: int, slice_bytes: int, layerwise: bool
) -> None:
    keys = [str(index) for index in range(chunk_count)]
    shape = PrefixShape(keys, num_layers, slice_bytes, layerwise)
    size = piece_bytes(shape)
    assert size > 0
    assert size % slice_block_bytes(slice_bytes) == 0
    assert size <= PIECE_BYTES
    if slice_bytes <= PIECE_BYTES:
        assert size % slice_bytes == 0
    if not layerwise and shape.chunk_bytes <= PIECE_BYTES:
        assert size % shape.chunk_bytes == 0
        assert size > PIECE_BYTES - shape.chunk_bytes
