"""Pieces of a body go to the engine's socket in order, and each of them ends, once."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial

import numpy as np

from objectcache.landing.targets import PlainTarget
from objectcache_relay.landing.landing_regions import LandingMemory, LandingRegion
from objectcache_relay.sinks.body_sinks import SocketSink
from objectcache_relay.sinks.piece_sink import LandedPiece
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError

BOUND_S = 30.0
PIECE_BYTES = 5 << 20  # above a turn's, and above what a pair of sockets holds
PIECES = 3
BYTES = np.random.default_rng(3).integers(0, 256, PIECES * PIECE_BYTES, np.uint8).tobytes()


class Sending:
    """A sink into one end of a pair of sockets, and what became of its pieces."""

    def __init__(self, stall_timeout_s: float) -> None:
        ours, self.engine = socket.socketpair()
        ours.setblocking(False)
        self.engine.setblocking(False)
        self.sink = SocketSink(ours.detach(), stall_timeout_s)
        self.ended: list[tuple[int, ObjectCacheError | None]] = []
        self.changed = asyncio.Event()

    def write_all(self) -> None:
        memory = PlainTarget(np.frombuffer(bytearray(BYTES), np.uint8))
        region = LandingRegion(LandingMemory(memory))
        for number in range(PIECES):
            begin = number * PIECE_BYTES
            view = region.view[begin : begin + PIECE_BYTES]
            self.sink.write(LandedPiece(region, begin, view, ()), partial(self._ended, number))

    async def until_ended(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while len(self.ended) < PIECES:
                self.changed.clear()
                await self.changed.wait()

    def close(self) -> None:
        self.sink.close()
        self.engine.close()

    def _ended(self, number: int, error: ObjectCacheError | None) -> None:
        self.ended.append((number, error))
        self.changed.set()


def test_every_byte_goes_on_in_order_and_others_have_the_loop_meanwhile() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        sending = Sending(BOUND_S)
        sending.write_all()
        assert not sending.ended  # the first is above a turn's bytes, however much is taken
        received = bytearray()
        while len(received) < len(BYTES):
            received += await asyncio.wait_for(loop.sock_recv(sending.engine, 1 << 20), BOUND_S)
        await sending.until_ended()
        assert received == BYTES
        assert sending.ended == [(number, None) for number in range(PIECES)]
        sending.close()

    asyncio.run(run())


def test_an_engine_that_takes_nothing_fails_what_is_left_and_what_comes() -> None:
    async def run() -> None:
        sending = Sending(0.05)
        sending.write_all()
        await sending.until_ended()
        assert [number for number, _ in sending.ended] == list(range(PIECES))
        for _, error in sending.ended:
            assert isinstance(error, DeliveryFailed)
            assert "relay.fabric_timeout_s" in error.message
        sending.write_all()
        assert len(sending.ended) == 2 * PIECES
        assert all(error is not None for _, error in sending.ended)
        sending.close()

    asyncio.run(run())


def test_an_engine_that_is_gone_fails_what_is_left() -> None:
    async def run() -> None:
        sending = Sending(BOUND_S)
        sending.write_all()
        sending.engine.close()
        await sending.until_ended()
        assert all(isinstance(error, DeliveryFailed) for _, error in sending.ended)
        sending.close()

    asyncio.run(run())


def test_what_nobody_wants_any_more_ends_at_once_and_closes_the_duplicate() -> None:
    async def run() -> None:
        sending = Sending(BOUND_S)
        sending.write_all()
        sending.sink.stop()
        assert [number for number, _ in sending.ended] == list(range(PIECES))
        assert all(isinstance(error, DeliveryFailed) for _, error in sending.ended)
        open_before = set(os.listdir("/proc/self/fd"))
        sending.close()
        assert len(open_before - set(os.listdir("/proc/self/fd"))) >= 2
        await asyncio.sleep(0)  # the turn that was begun does not write to a closed socket

    asyncio.run(run())
