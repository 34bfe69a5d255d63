"""Moves between staging memory and a client's: what waits for what, and when memory comes back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from objectcache_fabrics.staged_moves import StagedMoves
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import ReservedMemory
from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import DeliveryFailed, NotFound
from objectcache_storage_server.transports.targets import Lease, TargetRegistry
from tests.unit.fabrics.held_peer import HeldPeer, QuietSession

BUFFER_BYTES = 4096
PAYLOAD_BYTES = 3 * BUFFER_BYTES
OFFSET_BYTES = 100
DEADLINE_S = 20.0


class Bench:
    """Moves under a grant of two buffers, into a target that is larger than the payload."""

    def __init__(self, near: StreamSocket) -> None:
        self.peer = HeldPeer(OFFSET_BYTES + PAYLOAD_BYTES + 50)
        self.peer.memory[:] = bytes(n % 251 for n in range(len(self.peer.memory)))
        self.pool = StagingMemory(BUFFER_BYTES, 2 * BUFFER_BYTES)
        self.registry = TargetRegistry(1 << 20)
        session = QuietSession("alice", near)
        self.target = self.peer.register(self.registry, session, session.post)
        asked = MemoryTarget(
            transport="nixl",
            target_id=self.target.target_id,
            offset_bytes=OFFSET_BYTES,
            length_bytes=PAYLOAD_BYTES,
            tag=1,
        )
        self.lease: Lease = self.registry.lease("alice", asked, PAYLOAD_BYTES)
        grant = ReservedMemory(self.pool, self.pool.reserve(2 * BUFFER_BYTES, BUFFER_BYTES))
        self.broken = 0
        self.moves = StagedMoves(self.lease, self.pool, grant, self._break)

    def _break(self) -> None:
        self.broken += 1

    @property
    def is_let_go(self) -> bool:
        return self.pool.promised_bytes == 0 and not self.target.leases


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench]:
    ours, theirs = socket.socketpair()
    stream = StreamSocket(ours)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Bench(stream)
    finally:
        stream.close()
        theirs.close()


async def turns() -> None:
    """A few turns of the loop: what another thread asked for has happened then."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_reads_arrive_in_any_order_and_take_the_leases_part_alone() -> None:
    async with bench() as one:
        moves, peer = one.moves, one.peer
        first, second = moves.take(BUFFER_BYTES), moves.take(1000)
        assert not moves.has_room
        arrived = moves.read(0, first), moves.read(2 * BUFFER_BYTES, second)
        peer.finish(1)
        await moves.until(arrived[1].done)
        assert not arrived[0].done()
        begin = OFFSET_BYTES + 2 * BUFFER_BYTES
        assert second == peer.memory[begin : begin + 1000]
        peer.finish()
        await moves.until(arrived[0].done)
        assert first == peer.memory[OFFSET_BYTES : OFFSET_BYTES + BUFFER_BYTES]
        moves.give_back(first)
        assert moves.has_room
        moves.close()
        assert one.is_let_go


@pytest.mark.asyncio
async def test_a_buffer_comes_back_when_it_was_written_and_not_before() -> None:
    async with bench() as one:
        moves, peer = one.moves, one.peer
        before = bytes(peer.memory)
        for index in range(2):
            piece = moves.take(BUFFER_BYTES)
            piece[:] = bytes([index + 1]) * BUFFER_BYTES
            moves.write(index * BUFFER_BYTES, piece)
        waiting = asyncio.ensure_future(moves.until(lambda: moves.has_room))
        await turns()
        assert not waiting.done()
        peer.finish(1)
        await waiting
        written = asyncio.ensure_future(moves.written())
        await turns()
        assert not written.done()
        peer.finish()
        await written
        end = OFFSET_BYTES + 2 * BUFFER_BYTES
        wanted = b"\1" * BUFFER_BYTES + b"\2" * BUFFER_BYTES
        assert peer.memory == before[:OFFSET_BYTES] + wanted + before[end:]
        moves.close()
        assert one.is_let_go


@pytest.mark.asyncio
async def test_closing_lets_go_only_when_nothing_moves() -> None:
    async with bench() as one:
        moves, peer = one.moves, one.peer
        moves.write(0, moves.take(BUFFER_BYTES))
        idle = moves.take(BUFFER_BYTES)
        moves.close()
        moves.close()
        assert one.target.leases
        assert one.pool.promised_bytes == 2 * BUFFER_BYTES
        quiet = asyncio.ensure_future(moves.quiet())
        await turns()
        assert not quiet.done()
        peer.finish()
        await quiet
        assert one.is_let_go
        again = one.pool.take(BUFFER_BYTES), one.pool.take(BUFFER_BYTES)
        assert {one.pool.offset_of(view) for view in again} == {0, BUFFER_BYTES}
        assert one.pool.offset_of(idle) in {0, BUFFER_BYTES}


@pytest.mark.asyncio
async def test_the_first_error_is_the_one_that_is_raised() -> None:
    async with bench() as one:
        moves, peer = one.moves, one.peer
        for index in range(2):
            moves.write(index * BUFFER_BYTES, moves.take(BUFFER_BYTES))
        peer.fail(DeliveryFailed("no write was taken"))
        with pytest.raises(DeliveryFailed, match="no write was taken"):
            await moves.written()
        moves.fail(ConnectionEnded())
        assert one.broken == 1
        peer.fail(DeliveryFailed("the session has ended"))
        await moves.quiet()
        with pytest.raises(DeliveryFailed, match="no write was taken"):
            await moves.until(lambda: True)
        moves.close()
        assert one.is_let_go


@pytest.mark.asyncio
async def test_a_released_target_ends_the_moves_and_is_free_when_they_have_ended() -> None:
    async with bench() as one:
        moves, peer = one.moves, one.peer
        moves.write(0, moves.take(BUFFER_BYTES))
        released = threading.Event()
        releasing = threading.Thread(target=one.registry.release, args=(one.target, released.set))
        releasing.start()
        with pytest.raises(NotFound, match="released"):
            await moves.written()
        releasing.join()
        assert one.broken == 0  # the peer is as good as it was
        moves.close()
        assert not released.is_set()
        peer.finish()
        await moves.quiet()
        assert released.is_set()
        assert one.is_let_go


@pytest.mark.asyncio
async def test_a_watermark_goes_to_the_client_as_it_is() -> None:
    async with bench() as one:
        one.moves.announce(7, 32)
        assert one.peer.announced == [(7, 32)]
        assert repr(one.moves) == "<StagedMoves 0 under way, 0 buffers out>"
        one.moves.close()
