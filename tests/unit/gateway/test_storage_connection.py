"""What the gateway does when the storage server goes away, or is silent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from objectcache_gateway.storage import storage_pool
from objectcache_gateway.storage.storage_address import UnixAddress, storage_connections_max
from objectcache_gateway.storage.storage_connection import (
    ConnectionLost,
    StorageConnection,
    Unreachable,
)
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_gateway.storage.storage_pool import without_waiting
from objectcache_gateway.storage.tenant_storage import TenantStorage
from objectcache_runtime.settings import (
    GatewaySettings,
    ServerSettings,
    Settings,
    StorageSettings,
)
from objectcache_schemas.descriptor import TARGET_ID_BYTES, Descriptor, MemoryTarget
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.buckets import CreateBucket, DeleteBucket
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Done, Welcome
from objectcache_schemas.messages.kv import KvGet, KvPut, Matched
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message, is_repeatable
from objectcache_schemas.messages.reads import StatObject
from objectcache_schemas.messages.uploads import CompleteUpload, CreateUpload
from objectcache_schemas.messages.writes import CopyObject
from objectcache_schemas.operators.server_state import GetHealth
from objectcache_schemas.records import ObjectAttributes

TARGET = MemoryTarget(
    transport="shm", target_id=bytes(TARGET_ID_BYTES), offset_bytes=0, length_bytes=1 << 20, tag=1
)
CONNECTIONS_MAX = 4
WELCOME = Welcome(v=PROTOCOL_VERSION, engine="fake")
COMPLETE = CompleteUpload(bucket="b", key="k", upload_id="u", parts=((1, "e"),))
COPY = CopyObject(
    source_bucket="b",
    source_key="s",
    source_etag="e",
    bucket="b",
    key="k",
    attributes=ObjectAttributes(),
    etag="e",
)


class Storage:
    """A storage server that answers all but the `lost` th request, at which it hangs up."""

    def __init__(self, lost: int) -> None:
        self.requests = 0
        self._lost = lost

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply: Message = WELCOME
        while header := await reader.read(LENGTH.size):
            await reader.readexactly(LENGTH.unpack(header)[0])
            if reply is not WELCOME:
                self.requests += 1
                if self.requests == self._lost:
                    break
            writer.write(encode_frame(reply))
            reply = Done()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve, timeout_s: float) -> AsyncGenerator[StorageFleet]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        pool = StorageFleet([UnixAddress(path)], Limits(), CONNECTIONS_MAX, timeout_s)
        async with listening_at(path, serve, pool):
            yield pool


@asynccontextmanager
async def listening_at(path: Path, serve: Serve, pool: StorageFleet) -> AsyncGenerator[None]:
    """Until the block ends, and the pool with it."""
    handlers: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(handle(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield
    finally:
        pool.close()
        server.close()
        await asyncio.gather(*handlers)


@pytest.mark.asyncio
async def test_a_read_whose_reply_was_lost_is_sent_again() -> None:
    storage = Storage(lost=2)
    async with listening(storage.serve, 10.0) as pool:
        for _ in range(2):
            await pool.call(StatObject(bucket="b", key="k"), Done)
    assert storage.requests == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("request_", [COMPLETE, COPY, DeleteBucket(name="bbb")])
async def test_a_change_whose_reply_was_lost_is_not_made_twice(request_: Message) -> None:
    storage = Storage(lost=2)
    async with listening(storage.serve, 10.0) as pool:
        await pool.call(GetHealth(), Done)
        with pytest.raises(ConnectionLost):
            await pool.call(request_, Done)
    assert storage.requests == 2


def descriptor_with(target: MemoryTarget | None) -> bytes:
    return Descriptor(
        chunk_keys=("a",),
        num_layers=2,
        chunk_tokens=16,
        per_layer_chunk_bytes=4096,
        rdma_target=target,
    ).to_bytes()


def kv_get(target: MemoryTarget | None) -> KvGet:
    return KvGet(bucket="b", identity="i", request_id="r", descriptor=descriptor_with(target))


def kv_put(target: MemoryTarget | None) -> KvPut:
    return KvPut(bucket="b", identity="i", descriptor=descriptor_with(target))


@pytest.mark.parametrize(
    ("request_", "repeatable"),
    [
        (kv_get(None), True),
        (kv_get(TARGET), False),
        (kv_put(None), True),
        (kv_put(TARGET), False),
        (KvGet(bucket="b", identity="i", request_id="r", descriptor=b"none"), True),
        (CreateBucket(name="bbb", owner="o", region="r"), False),
        (CreateUpload(bucket="b", key="k", attributes=ObjectAttributes()), False),
    ],
)
def test_only_what_is_harmless_is_repeatable(request_: Message, repeatable: bool) -> None:
    assert is_repeatable(request_, Limits()) == repeatable


@pytest.mark.asyncio
async def test_a_call_may_be_silent_for_as_long_as_its_caller_says() -> None:
    async def welcome_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(WELCOME))
        await reader.read(-1)

    async with listening(welcome_only, timeout_s=1.0) as pool:  # they connect within it, too
        long = asyncio.create_task(pool.call(COPY, Done, timeout_s=20.0))
        lookup = asyncio.create_task(pool.call(StatObject(bucket="b", key="k"), Done))
        done, _ = await asyncio.wait({long, lookup}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {lookup}
        with pytest.raises(Unavailable):
            await lookup
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
    async with listening(welcome_only, timeout_s=20.0) as pool:
        with pytest.raises(Unavailable):
            await pool.call(COPY, Done, timeout_s=0.05)


def in_pieces(*pieces: bytes) -> Callable[..., Awaitable[None]]:
    """A server that welcomes, answers the first request in pieces, and then says no more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in ((encode_frame(WELCOME),), pieces):
            header = await reader.readexactly(LENGTH.size)
            await reader.readexactly(LENGTH.unpack(header)[0])
            for piece in reply:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        await reader.read(-1)

    return serve


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20])
async def test_a_reply_that_stops_arriving_is_given_up_in_time(cut: int) -> None:
    frame = encode_frame(Matched(matched=3, chunk_tokens=16))
    async with listening(in_pieces(frame[:cut]), timeout_s=20.0) as pool:
        async with pool.conversation() as conversation:
            with pytest.raises(Unavailable, match="does not answer"):
                await conversation.begin(GetHealth(), Matched, timeout_s=0.05)
            assert not conversation.connection.idle
        assert (pool.in_use, pool.idle) == (0, 0)


@pytest.mark.asyncio
async def test_a_reply_is_put_together_from_its_pieces() -> None:
    frame = encode_frame(Matched(matched=3, chunk_tokens=16))
    pieces = [frame[index : index + 1] for index in range(len(frame))]
    async with listening(in_pieces(*pieces), timeout_s=10.0) as pool:
        reply = await pool.call(GetHealth(), Matched)
        assert (reply.matched, reply.chunk_tokens) == (3, 16)
        assert (pool.in_use, pool.idle) == (0, 1)


@pytest.mark.asyncio
async def test_two_replies_that_arrive_at_once_are_told_apart() -> None:
    first, second = Matched(matched=1, chunk_tokens=16), Matched(matched=2, chunk_tokens=16)
    replies = encode_frame(first) + encode_frame(second)
    async with listening(in_pieces(replies), timeout_s=10.0) as pool, pool.conversation() as talk:
        assert (await talk.begin(GetHealth(), Matched)).matched == 1
        assert (await talk.connection.receive(Matched)).matched == 2
        with pytest.raises(Unavailable, match="does not answer"):
            await talk.connection.receive(Matched, timeout_s=0.05)


def nobody_holds(read_end: int) -> bool:
    """Whether nobody has the other end of a pipe that is empty."""
    os.set_blocking(read_end, False)
    try:
        return os.read(read_end, 1) == b""
    except BlockingIOError:
        return False


@pytest.mark.asyncio
async def test_a_descriptor_beside_an_error_is_closed_and_not_taken_for_the_next_ones() -> None:
    near, far = socket.socketpair()
    read_end, write_end = os.pipe()
    connection = StorageConnection(near, timeout_s=10.0)
    try:
        refusal = encode_frame(Unavailable("no memory").to_wire())
        socket.send_fds(far, [refusal], [write_end])
        os.close(write_end)
        with pytest.raises(Unavailable, match="no memory"):
            await connection.ask_for_descriptor(GetHealth(), Matched)
        assert connection.idle
        assert nobody_holds(read_end)
        far.sendall(encode_frame(Matched(matched=1, chunk_tokens=16)))
        reply, descriptor = await connection.ask_for_descriptor(GetHealth(), Matched)
        assert (reply.matched, descriptor) == (1, None)
    finally:
        connection.close()
        far.close()
        os.close(read_end)


@pytest.mark.asyncio
async def test_a_descriptor_beside_a_reply_that_was_to_have_none_is_closed() -> None:
    near, far = socket.socketpair()
    read_end, write_end = os.pipe()
    connection = StorageConnection(near, timeout_s=10.0)
    try:
        reply = encode_frame(Matched(matched=1, chunk_tokens=16))
        socket.send_fds(far, [reply], [write_end])
        os.close(write_end)
        assert (await connection.ask(GetHealth(), Matched)).matched == 1
        assert nobody_holds(read_end)
        far.sendall(reply)
        _, descriptor = await connection.ask_for_descriptor(GetHealth(), Matched)
        assert descriptor is None
    finally:
        connection.close()
        far.close()
        os.close(read_end)


@pytest.mark.asyncio
async def test_connections_over_storage_connections_max_are_told_to_slow_down() -> None:
    async with listening(Storage(lost=0).serve, 10.0) as pool, contextlib.AsyncExitStack() as used:
        for _ in range(CONNECTIONS_MAX):
            await used.enter_async_context(pool.conversation())
        with pytest.raises(Busy, match=r"gateway\.storage_connections_max"):
            await pool.call(GetHealth(), Done)
        await used.aclose()
        await pool.call(GetHealth(), Done)


@pytest.mark.asyncio
async def test_a_tenant_leaves_connections_to_others_and_to_the_gateway_itself() -> None:
    async with listening(Storage(lost=0).serve, 10.0) as pool, contextlib.AsyncExitStack() as used:
        greedy = TenantStorage(pool, "greedy")
        with pytest.raises(Busy, match="of them for this user") as refused:  # noqa: PT012
            for _ in range(CONNECTIONS_MAX):
                await used.enter_async_context(greedy.conversation())
        assert refused.value.details.retry_after_s == 1.0
        assert 0 < pool.in_use < CONNECTIONS_MAX
        await TenantStorage(pool, "other").call(GetHealth(), Done)
        await pool.call(GetHealth(), Done)


@pytest.mark.parametrize(
    ("processes", "connections_max", "each"),
    [(1, 1024, 704), (2, 1024, 352), (1, 4096, 704), (4, 4096, 704), (9, 16, 1)],
)
def test_all_gateways_of_a_host_leave_the_storage_server_its_other_connections(
    processes: int, connections_max: int, each: int
) -> None:
    """gateway.storage_connections_max and storage.connections_max"""
    settings = Settings(
        server=ServerSettings(data_dir="/nonexistent"),
        gateway=GatewaySettings(processes=processes),
        storage=StorageSettings(connections_max=connections_max),
    )
    assert storage_connections_max(settings) == each


@pytest.mark.asyncio
async def test_requests_wait_for_a_server_that_is_away_and_those_without_waiting_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_pool, "RECONNECT_WAIT_S", 3600.0)
    path = tmp_path / "socket"
    pool = StorageFleet([UnixAddress(path)], Limits(), CONNECTIONS_MAX, 10.0)
    waiting = asyncio.create_task(pool.call(GetHealth(), Done))
    with without_waiting():
        for _ in range(2):
            async with asyncio.timeout(30.0):
                with pytest.raises(Unreachable):
                    await pool.call(GetHealth(), Done)
    assert not waiting.done()
    async with listening_at(path, Storage(lost=0).serve, pool):
        await waiting
