"""The Buffer path into memory that a fabric reaches: the gateway's part and the server's."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from objectcache_gateway.buffer_path.leased_target import FabricStagedTarget
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, NotFound, ObjectCacheError
from objectcache_schemas.messages.kv import DeliveryEnded
from objectcache_schemas.messages.leases import EndLease, LeaseTarget, TargetLeased
from objectcache_schemas.messages.sessions import DeliveryFailure
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.leases.lend_target import serve_lease
from objectcache_storage_server.service import Service
from tests.unit.fabrics.held_peer import HeldPeer, QuietSession

PAYLOAD_BYTES, OFFSET_BYTES = 300_001, 5000
FRAGMENT_BYTES = 64 << 10
FIRST_LAYER, END_LAYER, TAG = 1, 5, 9
DEADLINE_S = 20.0


class Stage:
    """A service with a client's target, one lease's connection, and one for the payload."""

    def __init__(self, *, is_prompt: bool) -> None:
        settings = Settings(
            server=ServerSettings(data_dir="/nonexistent"),
            storage=StorageSettings(
                fragment_bytes=FRAGMENT_BYTES,
                target_fragment_bytes_max=FRAGMENT_BYTES,
                fabric_staging_bytes=1 << 20,
            ),
        )
        self.service = Service(settings, MemoryEngine())
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        for connected in ours:
            connected.setblocking(False)
        self.lease, self.body = (StorageConnection(one, DEADLINE_S) for one in ours)
        self.stream = StreamSocket(theirs[0])
        self.sender = theirs[1]
        self.peer = HeldPeer(OFFSET_BYTES + PAYLOAD_BYTES + 77, is_prompt=is_prompt)
        self.session = QuietSession("alice", self.stream)
        self.target = self.peer.register(self.service.targets, self.session, self.session.post)
        self.talk = Conversation(self.stream)

    @property
    def request(self) -> LeaseTarget:
        return LeaseTarget(
            identity="alice",
            transport="nixl",
            target_id=self.target.target_id,
            offset_bytes=OFFSET_BYTES,
            length_bytes=PAYLOAD_BYTES,
            tag=TAG,
            payload_bytes=PAYLOAD_BYTES,
            first_layer=FIRST_LAYER,
            end_layer=END_LAYER,
        )

    @property
    def is_let_go(self) -> bool:
        return not self.target.leases and self.service.fabrics.staging.promised_bytes == 0

    def close(self) -> None:
        self.lease.close()
        self.body.close()
        self.stream.close()
        self.sender.close()
        self.service.close()


@dataclass
class Filled:
    """A filling under way, on both sides."""

    stage: Stage
    serving: asyncio.Task[None]
    filling: asyncio.Task[DeliveryEnded]


@asynccontextmanager
async def filling(*, is_prompt: bool) -> AsyncGenerator[Filled]:
    stage = Stage(is_prompt=is_prompt)
    try:
        async with asyncio.timeout(DEADLINE_S):
            stage.lease.idle = False  # as sending the request would leave it
            serving = asyncio.create_task(
                serve_lease(stage.service.gets, stage.talk, stage.request)
            )
            await stage.lease.receive(TargetLeased)
            target = FabricStagedTarget(stage.lease, PAYLOAD_BYTES, FIRST_LAYER, DEADLINE_S)
            piece = memoryview(bytearray(100_000))
            yield Filled(stage, serving, asyncio.create_task(target.fill(stage.body, piece)))
    finally:
        stage.close()


async def send(stage: Stage, payload: bytes) -> None:
    """Send the payload's bytes, as the storage server does."""
    await asyncio.to_thread(stage.sender.sendall, payload)


async def ended_with(served: asyncio.Task[None], stage: Stage) -> ObjectCacheError:
    """What the lease ended with, told to the gateway as a connection tells it."""
    with pytest.raises(ObjectCacheError) as caught:
        await served
    assert stage.talk.given_up
    await stage.talk.send(caught.value.to_wire())
    stage.stream.close()
    return caught.value


@pytest.mark.asyncio
async def test_the_payload_lands_in_its_part_of_the_clients_memory_and_nowhere_else() -> None:
    payload = secrets.token_bytes(PAYLOAD_BYTES)
    async with filling(is_prompt=True) as run:
        await send(run.stage, payload)
        assert await run.filling == DeliveryEnded(payload_bytes=PAYLOAD_BYTES)
        await run.serving
        assert run.stage.peer.memory == bytes(OFFSET_BYTES) + payload + bytes(77)
        assert run.stage.peer.announced == [(TAG, END_LAYER)]
        assert run.stage.session.posted == []
        assert run.stage.lease.idle
        assert run.stage.is_let_go


@pytest.mark.asyncio
async def test_it_is_announced_when_its_last_byte_was_written_and_no_more_is_staged_meanwhile() -> (
    None
):
    async with filling(is_prompt=False) as run:
        stage = run.stage
        await send(stage, bytes(PAYLOAD_BYTES))
        await stage.peer.until_held(4)
        assert stage.service.fabrics.staging.promised_bytes == 4 * FRAGMENT_BYTES
        while not run.serving.done():
            assert not run.filling.done()
            assert not stage.peer.announced
            await stage.peer.until_held(1)
            stage.peer.finish()
            for _ in range(20):
                await asyncio.sleep(0)
        assert stage.peer.announced == [(TAG, END_LAYER)]
        assert (await run.filling).error is None


@pytest.mark.asyncio
async def test_a_target_that_is_released_ends_the_lease_when_nothing_moves_any_more() -> None:
    async with filling(is_prompt=False) as run:
        stage = run.stage
        await send(stage, bytes(150_000))
        await stage.peer.until_held(1)
        released = threading.Event()
        stage.service.targets.release(stage.target, released.set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not run.serving.done()
        assert not released.is_set()
        assert stage.session.posted == []  # its memory may still be written
        while stage.peer.moves:
            stage.peer.finish()
        error = await ended_with(run.serving, stage)
        assert isinstance(error, NotFound)
        assert released.is_set()
        await send(stage, bytes(PAYLOAD_BYTES - 150_000))
        ended = await run.filling
        assert ended == DeliveryEnded(
            payload_bytes=0, error=error.to_wire(), failed_layer=FIRST_LAYER
        )
        (event,) = stage.session.posted
        assert event == DeliveryFailure(tag=TAG, failed_layer=FIRST_LAYER, error=error.to_wire())
        assert not stage.peer.announced


@pytest.mark.asyncio
async def test_a_client_that_takes_no_write_fails_the_delivery_and_its_session_ends() -> None:
    async with filling(is_prompt=False) as run:
        stage = run.stage
        await send(stage, bytes(100_000))
        await stage.peer.until_held(1)
        while stage.peer.moves:
            stage.peer.fail(DeliveryFailed("no write for 10 s (storage.fabric_timeout_s)"))
        error = await ended_with(run.serving, stage)
        assert "fabric_timeout_s" in error.message
        assert stage.is_let_go
        assert await stage.session.is_given_up()


@pytest.mark.asyncio
async def test_a_payload_that_is_cut_is_told_and_the_lease_ends_in_order() -> None:
    async with filling(is_prompt=True) as run:
        stage = run.stage
        await send(stage, b"\1" * 1000)
        stage.sender.close()
        ended = await run.filling
        assert ended.error is not None
        assert ended.error.code == "DeliveryFailed"
        assert f"of {PAYLOAD_BYTES}" in ended.error.message
        await run.serving
        (event,) = stage.session.posted
        assert isinstance(event, DeliveryFailure)
        assert event.error == ended.error
        assert stage.lease.idle
        assert not stage.peer.announced
        assert stage.is_let_go


@pytest.mark.asyncio
async def test_a_gateway_that_hangs_up_fails_the_delivery_for_the_client() -> None:
    async with filling(is_prompt=True) as run:
        stage = run.stage
        await send(stage, b"\1" * 1000)
        await stage.peer.asked.wait()
        run.filling.cancel()
        await asyncio.gather(run.filling, return_exceptions=True)
        stage.lease.close()
        with pytest.raises(ConnectionEnded):
            await run.serving
        (event,) = stage.session.posted
        assert isinstance(event, DeliveryFailure)
        assert "gateway is gone" in event.error.message
        assert stage.is_let_go


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("data_bytes", "why"),
    [(PAYLOAD_BYTES + 1, "over 300001 bytes"), (PAYLOAD_BYTES - 1, "after 300000 of 300001")],
)
async def test_a_gateway_that_sends_another_length_is_refused(data_bytes: int, why: str) -> None:
    stage = Stage(is_prompt=True)
    try:
        serving = asyncio.create_task(serve_lease(stage.service.gets, stage.talk, stage.request))
        await stage.lease.receive(TargetLeased)
        sending = asyncio.create_task(stage.lease.send_data([bytes(data_bytes)]))
        if data_bytes < PAYLOAD_BYTES:
            await sending
            await stage.lease.end_data()
            await stage.lease.send(EndLease())
        with pytest.raises(InvalidRequest, match=why):
            await serving
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert stage.is_let_go
        assert not stage.peer.announced
    finally:
        stage.close()


@pytest.mark.asyncio
async def test_a_lease_is_refused_without_its_staging_memory_being_kept() -> None:
    stage = Stage(is_prompt=True)
    try:
        for identity, kind in (("mallory", NotFound), ("alice", InvalidRequest)):
            request = LeaseTarget(
                identity=identity,
                transport="nixl",
                target_id=stage.target.target_id,
                offset_bytes=OFFSET_BYTES,
                length_bytes=PAYLOAD_BYTES,
                tag=TAG,
                payload_bytes=PAYLOAD_BYTES + 1,
                first_layer=FIRST_LAYER,
                end_layer=END_LAYER,
            )
            with pytest.raises(kind):
                await serve_lease(stage.service.gets, stage.talk, request)
        assert stage.is_let_go
    finally:
        stage.close()
