"""The gateway's part of the Buffer path, against a storage server that plays each ending."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from objectcache_gateway.answering.buffer_path_memory import BufferPathMemory
from objectcache_gateway.buffer_path.leased_target import LeasedMemory, StagedTarget
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_schemas.errors import Busy, DeliveryFailed, NotFound, Unavailable, WireError
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import DeliveryEnded
from objectcache_schemas.messages.leases import EndLease
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.reads import SendBody
from tests.storage_client import sealed_memory_file

OFFSET_BYTES, PAYLOAD_BYTES = 5000, 300_000
FIRST_LAYER = 3
BOUND_S = 20.0
_MESSAGE = msgspec.msgpack.Decoder(SendBody | EndLease)


class Peer:
    """The storage server's end of one connection."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> SendBody | EndLease | None:
        """The next message; None where the gateway has closed."""
        header = await self._take(LENGTH.size)
        return _MESSAGE.decode(await self._take(*LENGTH.unpack(header))) if header else None

    async def _take(self, length_bytes: int) -> bytes:
        data = b""
        while len(data) < length_bytes:
            received = await self._loop.sock_recv(self._socket, length_bytes - len(data))
            if not received:
                return b""
            data += received
        return data

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def reply(self, message: Message | WireError) -> None:
        await self.send(encode_frame(message))

    def close(self) -> None:
        self._socket.close()


@dataclass
class Stage:
    """A filling under way, with a peer for its lease and one for its body."""

    filling: asyncio.Task[DeliveryEnded]
    lease: Peer
    body: Peer
    lease_connection: StorageConnection
    file: mmap.mmap


@asynccontextmanager
async def stage() -> AsyncGenerator[Stage]:
    descriptor = sealed_memory_file(OFFSET_BYTES + PAYLOAD_BYTES + 5000)
    file = mmap.mmap(descriptor, 0)
    memory = LeasedMemory(descriptor, OFFSET_BYTES, PAYLOAD_BYTES)
    os.close(descriptor)
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    for connected in ours:
        connected.setblocking(False)
    lease, body = (StorageConnection(connected, BOUND_S) for connected in ours)
    lease.idle = False  # as TargetLeased leaves it
    peers = [Peer(connected) for connected in theirs]
    target = StagedTarget(lease, memory, FIRST_LAYER, BOUND_S)
    with BufferPathMemory().piece(PAYLOAD_BYTES, "a") as piece:
        filling = asyncio.create_task(target.fill(body, piece))
        try:
            async with asyncio.timeout(BOUND_S):
                yield Stage(filling, peers[0], peers[1], lease, file)
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            memory.close()
            lease.close()
            body.close()
            for peer in peers:
                peer.close()


@pytest.mark.asyncio
async def test_the_payload_is_written_into_its_part_of_the_target_and_nowhere_else() -> None:
    payload = secrets.token_bytes(PAYLOAD_BYTES)
    async with stage() as played:
        wanted = SendBody(offset_bytes=0, length_bytes=PAYLOAD_BYTES, into_socket=False)
        assert await played.body.receive() == wanted
        await played.body.send(payload)
        assert await played.lease.receive() == EndLease()
        end = OFFSET_BYTES + PAYLOAD_BYTES
        assert played.file[:] == bytes(OFFSET_BYTES) + payload + bytes(len(played.file) - end)
        await played.lease.reply(Done())
        assert await played.filling == DeliveryEnded(payload_bytes=PAYLOAD_BYTES)
        assert played.lease_connection.idle


@pytest.mark.asyncio
async def test_a_target_that_is_released_midway_is_written_no_more_and_its_lease_closed() -> None:
    released = NotFound("the target was released", code="NoSuchTarget").to_wire()
    async with stage() as played:
        await played.body.receive()
        await played.body.send(b"\1" * 1000)
        await played.lease.reply(released)
        ended = await played.filling
        assert ended == DeliveryEnded(payload_bytes=0, error=released, failed_layer=FIRST_LAYER)
        assert await played.lease.receive() is None
        before = played.file[:]
        await played.body.send(b"\2" * 1000)
        assert played.file[:] == before


@pytest.mark.asyncio
async def test_a_release_that_crosses_the_end_of_the_lease_is_the_outcome() -> None:
    released = NotFound("the target was released", code="NoSuchTarget").to_wire()
    async with stage() as played:
        await played.body.receive()
        await played.body.send(bytes(PAYLOAD_BYTES))
        assert await played.lease.receive() == EndLease()
        await played.lease.reply(released)
        assert (await played.filling).error == released
        assert not played.lease_connection.idle


@pytest.mark.asyncio
async def test_a_payload_that_is_cut_fails_the_delivery_and_the_lease_goes_on() -> None:
    async with stage() as played:
        await played.body.receive()
        await played.body.send(b"\1" * 1000)
        played.body.close()
        told = await played.lease.receive()
        assert isinstance(told, EndLease)
        assert told.error is not None
        assert told.error.code == "DeliveryFailed"
        assert f"byte 1000 of {PAYLOAD_BYTES}" in told.error.message
        await played.lease.reply(Done())
        ended = await played.filling
        assert (ended.error, ended.failed_layer) == (told.error, FIRST_LAYER)
        assert played.lease_connection.idle


@pytest.mark.asyncio
async def test_a_storage_server_that_goes_away_ends_the_delivery() -> None:
    async with stage() as played:
        await played.body.receive()
        played.lease.close()
        ended = await played.filling
        assert ended.error is not None
        assert ended.error.code == "ServiceUnavailable"


@pytest.mark.asyncio
async def test_a_cancelled_filling_says_so_by_leaving_its_connections_in_use() -> None:
    async with stage() as played:
        await played.body.receive()
        await played.body.send(b"\1" * 1000)
        played.filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await played.filling
        assert not played.lease_connection.idle
        before = played.file[:]
        await played.body.send(b"\2" * 1000)
        assert played.file[:] == before


def test_a_tenant_with_its_share_of_the_pieces_is_told_to_slow_down_and_others_are_not() -> None:
    staging = BufferPathMemory(pieces_max=4)
    with ExitStack() as taken:
        sizes = (1000, 1 << 30, 1)
        pieces = [taken.enter_context(staging.piece(size, "a")) for size in sizes]
        assert [len(piece) for piece in pieces] == [1000, 256 << 10, 1]
        with pytest.raises(Busy, match="direct"), staging.piece(1, "a"):
            pass
        taken.enter_context(staging.piece(1, "b"))
        with pytest.raises(Busy, match="4 deliveries are staged in the gateway, 0 of them"):
            taken.enter_context(staging.piece(1, "c"))
        assert repr(staging) == "<BufferPathMemory 4/4 in use, 256 KiB each>"
    with staging.piece(1, "c"):
        assert repr(staging) == "<BufferPathMemory 1/4 in use, 256 KiB each>"


def test_a_part_that_a_file_does_not_hold_is_not_mapped() -> None:
    descriptor = sealed_memory_file(8192)
    try:
        with pytest.raises(Unavailable, match="cannot map"):
            LeasedMemory(descriptor, 4096, 4097)
    finally:
        os.close(descriptor)


def test_what_would_fill_a_hole_is_not_written() -> None:
    descriptor = sealed_memory_file(8192)
    try:
        memory = LeasedMemory(descriptor, 0, 8192)
        memory.write(4096, memoryview(b"written"))
        with mmap.mmap(descriptor, 8192) as own:
            assert own[4096:4103] == b"written"
            own.madvise(mmap.MADV_REMOVE, 0, 4096)
        with pytest.raises(DeliveryFailed, match="holes"):
            memory.write(0, memoryview(b"written"))
        assert os.fstat(descriptor).st_blocks * 512 == 4096
        memory.close()
    finally:
        os.close(descriptor)
