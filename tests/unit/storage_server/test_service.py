"""What the storage server's connections share: who is let in, how long, and what it is charged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import Busy, InvalidRequest, NotFound, Unavailable, WireError
from objectcache_schemas.limits import KIB, MIB, Limits
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.kv import DeliveryAccepted, DeliveryEnded, KvGet
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.sessions import JoinSession
from objectcache_schemas.messages.uploads import CompleteUpload, CreateUpload, Upload
from objectcache_schemas.messages.writes import PinObjects, PutObject, SendData
from objectcache_schemas.records import BucketInfo, BucketPolicy, ObjectAttributes
from objectcache_storage_server.admission.client_pace import ClientPace
from objectcache_storage_server.connections.server import StorageServer
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.sessions import Session
from objectcache_storage_server.deliveries.prefix_gets import serve_kv_get
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.bucket_requests import set_policy
from objectcache_storage_server.s3.copy_requests import complete
from objectcache_storage_server.s3.object_puts import serve_put_object
from objectcache_storage_server.s3.object_requests import pin_objects
from objectcache_storage_server.s3.upload_requests import create_upload
from objectcache_storage_server.service import Service
from objectcache_storage_server.testing import DelayingBlobStore, WrappedEngine
from objectcache_storage_server.transports.body import BodyTransport
from tests.contract.engine_suite import put
from tests.contract.opened_engines.blob_engines import memory_over
from tests.schedules import a_recorder
from tests.storage_client import sealed_memory_file

T = TypeVar("T")
BUCKET = BucketInfo(name="bucket", owner="o", region="r", created_s=0.0)
DEADLINE_S = 20.0
_REPLY: msgspec.msgpack.Decoder[StorageReply] = msgspec.msgpack.Decoder(StorageReply)


class Host:
    """A service over the memory engine, and the two ends of one gateway connection."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        engine.create_bucket(BUCKET)
        multipart.create_bucket(engine)
        self.service = Service(settings, engine)
        self.gateway, self.stream = self.connection()

    def connection(self) -> tuple[socket.socket, StreamSocket]:
        far, near = socket.socketpair()
        far.settimeout(DEADLINE_S)
        return far, StreamSocket(near)

    async def reply(self, far: socket.socket) -> StorageReply | WireError:
        """The next message at the gateway's end."""
        return await asyncio.to_thread(_receive, far)


def _receive(far: socket.socket) -> StorageReply | WireError:
    (length,) = LENGTH.unpack(far.recv(LENGTH.size, socket.MSG_WAITALL))
    return _REPLY.decode(far.recv(length, socket.MSG_WAITALL))


@asynccontextmanager
async def hosted(
    limits: Limits = Limits(),  # noqa: B008 - frozen
    server: ServerSettings = ServerSettings(data_dir="/nonexistent"),  # noqa: B008 - frozen
    engine: Engine | None = None,
    **storage: object,
) -> AsyncGenerator[Host]:
    changed = msgspec.convert(storage, StorageSettings)
    host = Host(Settings(limits=limits, server=server, storage=changed), engine or MemoryEngine())
    try:
        yield host
    finally:
        host.gateway.close()
        host.stream.close()
        host.service.close()


# --- checks ---


@pytest.mark.asyncio
async def test_one_check_of_a_store_runs_at_a_time() -> None:
    async with hosted() as host, hosted() as other:
        with host.service.checks.admitted():
            with pytest.raises(Busy, match="another check"), host.service.checks.admitted():
                pass
            with other.service.checks.admitted():  # of another store
                pass
        with host.service.checks.admitted():
            pass


@pytest.mark.asyncio
async def test_a_server_that_stops_begins_no_check() -> None:
    async with hosted() as host:
        host.service.gates.draining = True
        with pytest.raises(Unavailable), host.service.checks.admitted():
            pass


# --- hidden buckets ---


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "request_",
    [
        SetPolicy(bucket=multipart.BUCKET, policy=BucketPolicy(ttl_s=1.0)),
        PinObjects(bucket=multipart.BUCKET, keys=("key",), pinned=True),
        SetPolicy(bucket=".", policy=BucketPolicy()),
    ],
)
async def test_the_servers_own_buckets_are_nobodys_to_operate(request_: Message) -> None:
    async with hosted() as host:
        serve = set_policy if isinstance(request_, SetPolicy) else pin_objects
        with pytest.raises(NotFound) as caught:
            serve(host.service, request_)  # type: ignore[arg-type]
        assert caught.value.code == "NoSuchBucket"


# --- puts ---


def put_of(size_bytes: int | None) -> PutObject:
    return PutObject(bucket=BUCKET.name, key="key", size_bytes=size_bytes)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("object_bytes_max", "put_staging_bytes_max", "left_bytes"),
    [(60_000, 100_000, 27_500), (200_000, 100_000, 12_500)],
)
async def test_a_put_of_unknown_length_counts_as_the_largest_that_it_may_become(
    object_bytes_max: int, put_staging_bytes_max: int, left_bytes: int
) -> None:
    limits = Limits(object_bytes_max=object_bytes_max)
    async with hosted(limits, put_staging_bytes_max=put_staging_bytes_max) as host:
        service = host.service
        putting = asyncio.create_task(
            serve_put_object(service.puts, Conversation(host.stream), put_of(None))
        )
        assert isinstance(await host.reply(host.gateway), SendData)
        with pytest.raises(Busy, match=r"storage\.put_staging_bytes_max"):
            service.gates.puts.take_now("other", left_bytes + 1)
        with service.gates.put_now(left_bytes, "other"):
            pass
        putting.cancel()
        await asyncio.wait([putting])
        with service.gates.put_now(service.gates.slots.put_bytes_max, "other"):
            pass  # all of it is given back


@pytest.mark.asyncio
async def test_a_put_that_could_never_be_staged_is_too_large_and_not_too_early() -> None:
    async with hosted(put_staging_bytes_max=1000, puts_max=1) as host:
        with pytest.raises(InvalidRequest) as caught:
            await host.service.gates.put(BUCKET, "other", 1, 751, 751).__aenter__()
        assert caught.value.code == "EntityTooLarge"
        host.service.gates.puts.take_now("other", 750)
        with pytest.raises(Busy, match=r"storage\.puts_max"):
            host.service.gates.puts.take_now("other", 0)


@pytest.mark.asyncio
async def test_a_put_beyond_the_largest_object_is_refused_before_its_data() -> None:
    async with hosted(Limits(object_bytes_max=1000)) as host:
        with pytest.raises(InvalidRequest, match=r"limits\.object_bytes_max") as caught:
            await serve_put_object(host.service.puts, Conversation(host.stream), put_of(1001))
        assert caught.value.code == "EntityTooLarge"


@pytest.mark.asyncio
@pytest.mark.parametrize("joined_object_bytes_max", [9, 10])
async def test_parts_are_joined_up_to_the_largest_joined_object(
    joined_object_bytes_max: int,
) -> None:
    limits = Limits(joined_object_bytes_max=joined_object_bytes_max)
    async with hosted(limits) as host:
        service, data = host.service, b"ten bytes."
        create = CreateUpload(bucket=BUCKET.name, key="key", attributes=ObjectAttributes())
        upload = create_upload(service.uploads, create)
        assert isinstance(upload, Upload)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        part = multipart.part_key(upload.info.upload_id, 1)
        put(service.engine, part, data, bucket=multipart.BUCKET, etag=etag)
        request = CompleteUpload(
            bucket=BUCKET.name, key="key", upload_id=upload.info.upload_id, parts=((1, etag),)
        )
        if joined_object_bytes_max == len(data):
            joined = await complete(service.uploads, request)
            assert joined.info.size_bytes == len(data)
            return
        with pytest.raises(InvalidRequest, match=r"limits\.joined_object_bytes_max") as caught:
            await complete(service.uploads, request)
        assert caught.value.code == "EntityTooLarge"


# --- deliveries ---

SMALL = Descriptor(("chunk",), 4, 16, 64 * KIB, DeliveryMode.LAYERWISE)
LARGE = Descriptor(("chunk",), 2, 16, 512 * KIB, DeliveryMode.LAYERWISE)


async def deliver_into_target(host: Host, asked: Descriptor) -> DeliveryEnded:
    """How a delivery of one chunk of zeros into a client's memory ended."""
    service, length_bytes = host.service, asked.chunk_bytes
    put(service.engine, "chunk", bytes(length_bytes), block_bytes=asked.per_layer_chunk_bytes)
    client, near = host.connection()
    session = Session("alice", near)
    file = sealed_memory_file(length_bytes)
    target = service.targets.register(session, file, length_bytes)
    os.close(file)
    where = MemoryTarget(
        transport="shared_memory",
        target_id=target.target_id,
        offset_bytes=0,
        length_bytes=length_bytes,
        tag=1,
    )
    descriptor = dataclasses.replace(asked, rdma_target=where).to_bytes()
    request = KvGet(bucket=BUCKET.name, identity="alice", request_id="r", descriptor=descriptor)
    await serve_kv_get(service.gets, Conversation(host.stream), request)
    assert isinstance(await host.reply(host.gateway), DeliveryAccepted)
    ended = await host.reply(host.gateway)
    assert isinstance(ended, DeliveryEnded)
    assert not target.leases
    service.targets.release(target, lambda: None)
    near.close()
    client.close()
    return ended


@pytest.mark.asyncio
async def test_a_delivery_into_a_target_that_nobody_reads_for_ends_at_its_timeout() -> None:
    async with hosted(delivery_timeout_s=0.01) as host:
        host.service.schedule.dispatcher.close()  # no reader thread is left
        ended = await deliver_into_target(host, SMALL)
        assert ended.error is not None
        assert "storage.delivery_timeout_s" in ended.error.message
        assert (ended.payload_bytes, ended.failed_layer) == (0, 0)


@pytest.mark.asyncio
async def test_an_engine_has_as_many_reads_under_way_as_it_asks_for() -> None:
    engine = memory_over(lambda store: DelayingBlobStore(store, lambda: 0.001, queue_depth=16))
    async with hosted(engine=engine, fragment_bytes=64 * KIB, reader_threads=1) as host:
        assert "0/16 batches under way" in repr(host.service.schedule.dispatcher)
        ended = await deliver_into_target(host, SMALL)
        assert ended.error is None
        assert ended.payload_bytes == SMALL.chunk_bytes
        assert "0/16 batches under way" in repr(host.service.schedule.dispatcher)


@pytest.mark.asyncio
async def test_the_health_says_whose_clients_were_cut_lately() -> None:
    async with hosted() as host:
        assert host.service.health().degraded == ""
        host.service.gates.slow_puts.cut_lately.add(time.monotonic(), 3)
        assert host.service.health().degraded == "lately: 3 puts cut for slow clients"


class CountingReads(WrappedEngine):
    """The memory engine, which tells how long each fragment was."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.lengths: list[int] = []

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        if operation == "read_many":
            self.lengths.append(size_bytes)
        return super().call(operation, size_bytes, action)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("reader_threads", "fragment_bytes_max", "expected_bytes"),
    [(1, 128 * KIB, 128 * KIB), (1, 512 * KIB, 512 * KIB), (2, 512 * KIB, 256 * KIB)],
)
async def test_fragments_into_a_target_are_large_and_a_layer_is_shared_by_all_readers(
    reader_threads: int, fragment_bytes_max: int, expected_bytes: int
) -> None:
    engine = CountingReads()
    async with hosted(
        engine=engine,
        fragment_bytes=64 * KIB,
        target_fragment_bytes_max=fragment_bytes_max,
        reader_threads=reader_threads,
    ) as host:
        await deliver_into_target(host, LARGE)
        assert set(engine.lengths) == {expected_bytes}
        assert sum(engine.lengths) == LARGE.chunk_bytes
        assert host.service.schedule.reader_threads == reader_threads


@pytest.mark.asyncio
async def test_fragments_into_a_target_are_of_the_size_that_the_engine_asks_for() -> None:
    engine = CountingReads()
    engine.capabilities = replace(engine.capabilities, read_bytes=128 * KIB)
    async with hosted(engine=engine, fragment_bytes=64 * KIB, reader_threads=2) as host:
        await deliver_into_target(host, LARGE)
        assert set(engine.lengths) == {128 * KIB}
        assert sum(engine.lengths) == LARGE.chunk_bytes


@given(st.integers(1, 64 * KIB), st.lists(st.integers(1, 64 * KIB), max_size=20))
def test_no_buffer_takes_more_memory_than_it_is_charged(
    buffer_bytes: int, lengths: list[int]
) -> None:
    pool = BufferPool(buffer_bytes, 64 * MIB)
    for length_bytes in lengths:
        view = pool.take(min(length_bytes, buffer_bytes))
        assert memoryview(view.obj).nbytes <= pool.charged_bytes(len(view))
        pool.put(view)
    assert pool.charged_bytes(sum(lengths)) >= sum(lengths)


@pytest.mark.asyncio
async def test_a_buffer_that_is_not_full_takes_its_whole_share_of_a_grant() -> None:
    pool = BufferPool(1000, 10_000)
    transport = BodyTransport(
        pool,
        ReservedMemory(pool, pool.reserve(2000)),
        ClientPace("a", 0, "took a body"),
        lambda: None,
        a_recorder(),
    )
    assert transport.reserve(0, 600)
    assert transport.reserve(600, 600)
    assert not transport.reserve(1200, 100)  # though only 1,200 bytes are wanted so far
    transport.release()
    assert pool.promised_bytes == 0


# --- sockets ---


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["600", "660"])
async def test_the_target_socket_is_open_to_whom_its_mode_says(mode: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = ServerSettings(data_dir=folder, run_dir=folder)
        async with hosted(server=server, target_socket_mode=mode) as host:
            listening = StorageServer(host.service)
            await listening.start()
            await asyncio.sleep(0)  # its tasks own the sockets from their first turn on
            found = [
                stat.S_IMODE(os.stat(path).st_mode)
                for path in (
                    host.service.settings.target_socket,
                    host.service.settings.storage_socket,
                )
            ]
            await listening.drain(timeout_s=0.0)
    assert found == [int(mode, 8), 0o600]


def silent_client(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(DEADLINE_S)
    client.connect(str(path))
    return client


@pytest.mark.asyncio
async def test_where_the_target_socket_is_full_the_oldest_that_has_not_joined_ends() -> None:
    """Twice storage.sessions_max."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerSettings(data_dir=folder, run_dir=folder)
        async with hosted(server=server, sessions_max=2) as host:
            listening = StorageServer(host.service)
            await listening.start()
            path = host.service.settings.target_socket
            joined = await asyncio.to_thread(silent_client, path)
            ticket = host.service.tickets.issue("alice", time.monotonic())
            joined.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket)))
            assert await asyncio.to_thread(joined.recv, 1)
            silent = [await asyncio.to_thread(silent_client, path) for _ in range(5)]
            for ended in silent[:2]:
                assert await asyncio.to_thread(ended.recv, 1) == b""
            assert host.service.counts.client_connections == 4
            for still in (joined, *silent[2:]):
                still.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while still.recv(4096):  # what the joined one was told
                        pass
                    raise AssertionError("it was ended")
            await listening.drain(timeout_s=0.0)
            for client in (joined, *silent):
                client.close()
