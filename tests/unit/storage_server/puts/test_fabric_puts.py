"""Puts out of memory that a fabric reaches: what is read when, and what ends while one runs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_runtime.settings import (
    SchedulerSettings,
    ServerSettings,
    Settings,
    StorageSettings,
)
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import (
    Busy,
    DamagedData,
    DeliveryFailed,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
    WireError,
)
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.puts import fabric_source
from objectcache_storage_server.puts.fabric_source import staged_piece_bytes
from objectcache_storage_server.puts.prefix_puts import serve_kv_put
from objectcache_storage_server.service import Service
from tests.unit.fabrics.held_peer import HeldPeer, QuietSession

N, L, S = 5, 4, 64 << 10
KEYS = tuple("abcde")
CHUNKS = np.random.default_rng(6).integers(0, 256, (N, L, S), np.uint8)
PAYLOAD = CHUNKS.tobytes()
FRAGMENT_BYTES = 128 << 10
STAGING_BYTES = 1 << 20  # eight buffers, of which a put is granted four
OFFSET_BYTES = 100
DEADLINE_S = 20.0
_REPLY: msgspec.msgpack.Decoder[StorageReply | WireError] = msgspec.msgpack.Decoder(StorageReply)


class Host:
    """A service, a client's memory on a fabric, and the gateway's end of one conversation."""

    def __init__(self, *, is_prompt: bool = False, queue_timeout_s: float = DEADLINE_S) -> None:
        engine = MemoryEngine()
        engine.create_bucket(BucketInfo(name="kv", owner="o", region="r", created_s=0.0))
        settings = Settings(
            server=ServerSettings(data_dir="/nonexistent"),
            storage=StorageSettings(
                fragment_bytes=FRAGMENT_BYTES,
                target_fragment_bytes_max=FRAGMENT_BYTES,
                fabric_staging_bytes=STAGING_BYTES,
            ),
            scheduler=SchedulerSettings(queue_timeout_s=queue_timeout_s),
        )
        self.service = Service(settings, engine)
        near, self.gateway = socket.socketpair()
        self.gateway.settimeout(DEADLINE_S)
        self.stream = StreamSocket(near)
        self.peer = HeldPeer(OFFSET_BYTES + len(PAYLOAD), is_prompt=is_prompt)
        self.peer.memory[OFFSET_BYTES:] = PAYLOAD
        self.session = QuietSession("alice", self.stream)
        self.target = self.peer.register(self.service.targets, self.session, self.session.post)

    def start(self, identity: str = "alice", **changes: object) -> asyncio.Task[None]:
        fields = {
            "transport": "nixl",
            "target_id": self.target.target_id,
            "offset_bytes": OFFSET_BYTES,
            "length_bytes": len(PAYLOAD),
            "tag": 0,
        }
        asked = msgspec.convert(fields | changes, MemoryTarget)
        descriptor = Descriptor(KEYS, L, 16, S, DeliveryMode.CHUNKWISE, rdma_target=asked)
        request = KvPut(bucket="kv", identity=identity, descriptor=descriptor.to_bytes())
        return asyncio.create_task(
            serve_kv_put(self.service.puts, Conversation(self.stream), request)
        )

    def reply(self) -> StorageReply | WireError:
        (length,) = LENGTH.unpack(self.gateway.recv(LENGTH.size))
        return _REPLY.decode(self.gateway.recv(length, socket.MSG_WAITALL))

    def is_unused(self) -> bool:
        """Nothing is stored, no put is counted, and no memory is held."""
        service = self.service
        is_free = service.fabrics.staging.promised_bytes == 0 and not self.target.leases
        return is_free and not service.gates.slots.puts and service.engine.match("kv", KEYS) == 0

    def close(self) -> None:
        self.gateway.close()
        self.stream.close()
        self.service.close()


@asynccontextmanager
async def hosted(
    *, is_prompt: bool = False, queue_timeout_s: float = DEADLINE_S
) -> AsyncGenerator[Host]:
    host = Host(is_prompt=is_prompt, queue_timeout_s=queue_timeout_s)
    try:
        yield host
    finally:
        host.close()


@pytest.mark.asyncio
async def test_a_payload_is_stored_out_of_its_part_of_the_clients_memory() -> None:
    async with hosted(is_prompt=True) as host:
        await host.start()
        assert host.reply() == KvStored(stored=N, existing=0)
        with host.service.engine.open_many("kv", KEYS) as opened:
            for index in range(N):
                got = bytearray(L * S)
                opened.read_into(index, 0, memoryview(got))
                assert got == CHUNKS[index].tobytes()
        await host.start()
        assert host.reply() == KvStored(stored=0, existing=N)
        assert host.service.fabrics.staging.promised_bytes == 0
        assert not host.target.leases


@pytest.mark.asyncio
async def test_pieces_are_read_ahead_within_the_grant_and_stored_in_order() -> None:
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        assert [move.offset_bytes for move in host.peer.moves] == [
            OFFSET_BYTES + index * FRAGMENT_BYTES for index in range(4)
        ]
        host.peer.finish(3)  # the last first
        host.peer.finish(1)
        await asyncio.sleep(0)
        assert len(host.peer.moves) == 2  # what was read waits for what lies before it
        while not put.done():
            if host.peer.moves:
                host.peer.finish()
            await asyncio.sleep(0)
        assert host.reply() == KvStored(stored=N, existing=0)
        with host.service.engine.open_many("kv", KEYS) as opened:
            got = bytearray(L * S)
            opened.read_into(4, 0, memoryview(got))
            assert got == CHUNKS[4].tobytes()


@pytest.mark.asyncio
async def test_a_target_released_while_it_is_read_is_free_when_its_reads_have_ended() -> None:
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        released = threading.Event()
        host.service.targets.release(host.target, released.set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not put.done()  # its answer says that the memory is free
        assert not released.is_set()
        while host.peer.moves:
            host.peer.finish()
        with pytest.raises(NotFound, match="released"):
            await put
        assert released.is_set()
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_put_that_the_engine_fails_is_answered_when_its_reads_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = asyncio.Event()

    async def fail(*_: object) -> None:
        written.set()
        raise DamagedData("rotten", key="a")

    monkeypatch.setattr(fabric_source, "write_piece", fail)
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        host.peer.finish()
        async with asyncio.timeout(DEADLINE_S):
            await written.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not put.done()
        while host.peer.moves:
            host.peer.finish()
        with pytest.raises(DamagedData):
            await put
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_client_that_is_lost_fails_the_put_stores_nothing_and_its_session_ends() -> None:
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        host.peer.finish()
        while host.peer.moves:
            host.peer.fail(DeliveryFailed("the client's session has ended"))
        with pytest.raises(DeliveryFailed, match="session has ended"):
            await put
        assert await host.session.is_given_up()
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_gateway_that_hangs_up_ends_the_put() -> None:
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        host.gateway.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionEnded):
            await put
        while host.peer.moves:
            host.peer.finish()
        assert not await host.session.is_given_up()
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_cancelled_put_holds_its_memory_until_its_reads_have_ended() -> None:
    async with hosted() as host:
        put = host.start()
        await host.peer.until_held(4)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert host.target.leases
        assert host.service.fabrics.staging.promised_bytes
        while host.peer.moves:
            host.peer.finish()
        await asyncio.sleep(0)
        assert host.is_unused()


@pytest.mark.asyncio
async def test_a_put_waits_for_storage_fabric_staging_bytes_and_says_so_when_none_comes() -> None:
    async with hosted(queue_timeout_s=0.05) as host:
        staging = host.service.fabrics.staging
        taken_bytes = staging.reserve(STAGING_BYTES, FRAGMENT_BYTES)
        with pytest.raises(Busy, match=r"storage\.fabric_staging_bytes is 1048576"):
            await host.start()
        staging.release(taken_bytes - FRAGMENT_BYTES)
        taken_bytes = staging.reserve(STAGING_BYTES - 2 * FRAGMENT_BYTES, FRAGMENT_BYTES)
        put = host.start()
        await host.peer.until_held(1)
        assert len(host.peer.moves) == 1  # one buffer was left
        host.peer.is_prompt = True
        host.peer.finish()
        await put
        assert host.reply() == KvStored(stored=N, existing=0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"length_bytes": len(PAYLOAD) - 1}, InvalidRequest, "the payload of the put has"),
        ({"length_bytes": len(PAYLOAD) + 1}, InvalidRequest, "the payload of the put has"),
        ({"offset_bytes": OFFSET_BYTES + 1}, InvalidRequest, "the target holds"),
        ({"target_id": bytes(16)}, NotFound, "not registered"),
        ({"identity": "mallory"}, NotFound, "not registered"),
        ({"transport": "verbs"}, InvalidRequest, "registered for 'nixl'"),
        ({"transport": "shared_memory"}, InvalidRequest, "registered for 'nixl'"),
        ({"transport": "pigeon"}, Unsupported, "shared_memory, nixl, verbs"),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_read(
    changes: dict[str, str], error: type[ObjectCacheError], named: str
) -> None:
    async with hosted() as host:
        with pytest.raises(error, match=named):
            await host.start(**changes)
        assert not host.peer.moves
        assert host.is_unused()


SLICES = st.sampled_from([1, 100, 4097, 65_536, 3 << 20, 30 << 20])


@given(SLICES, st.sampled_from([64 << 10, 2 << 20, 5 << 20]))
def test_pieces_are_whole_blocks_that_a_buffer_holds(slice_bytes: int, buffer_bytes: int) -> None:
    shape = PrefixShape(["a", "b"], 3, slice_bytes, layerwise=True)
    block_bytes = slice_block_bytes(slice_bytes)
    if block_bytes > buffer_bytes:
        with pytest.raises(InvalidRequest, match=r"storage\.fragment_bytes"):
            staged_piece_bytes(shape, buffer_bytes)
        return
    size = staged_piece_bytes(shape, buffer_bytes)
    assert size % block_bytes == 0
    assert buffer_bytes - block_bytes < size <= buffer_bytes
