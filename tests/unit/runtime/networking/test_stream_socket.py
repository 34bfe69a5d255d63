"""Frames on a socket in the event loop: taken in pieces, with what came beside them."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import msgspec
import pytest
import uvloop

from objectcache_runtime.networking.stream_socket import (
    RECEIVE_BYTES,
    ConnectionEnded,
    StreamSocket,
)
from objectcache_schemas.messages.buckets import GetBucket
from objectcache_schemas.messages.frames import LENGTH, encode_frame

DECODER = msgspec.msgpack.Decoder(GetBucket)


P = ParamSpec("P")


def in_loops(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in the loop that the servers use, and in the one that clients may."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))
        uvloop.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def pair(*, reads_ahead: bool = True) -> AsyncGenerator[tuple[socket.socket, StreamSocket]]:
    peer, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = StreamSocket(ours)
    stream.reads_ahead = reads_ahead
    try:
        async with asyncio.timeout(20):
            yield peer, stream
    finally:
        stream.close()
        peer.close()


@in_loops
async def test_a_peer_that_has_hung_up_is_known_though_what_it_sent_is_not_received() -> None:
    async with pair() as (peer, stream):
        peer.sendall(b"something")
        assert not stream.has_hung_up()
        peer.shutdown(socket.SHUT_RDWR)
        assert stream.has_hung_up()
    assert stream.has_hung_up()


@in_loops
async def test_frames_that_arrive_together_are_received_one_by_one() -> None:
    async with pair() as (peer, stream):
        peer.sendall(b"".join(encode_frame(GetBucket(name=f"bucket-{n}")) for n in range(5)))
        names = [(await stream.receive_frame(DECODER)).name for _ in range(5)]
        assert names == [f"bucket-{number}" for number in range(5)]


@in_loops
async def test_a_frame_that_arrives_byte_by_byte_is_one_frame() -> None:
    async with pair() as (peer, stream):
        receiving = asyncio.ensure_future(stream.receive_frame(DECODER))
        for byte in encode_frame(GetBucket(name="slow")):
            await asyncio.sleep(0)
            peer.send(bytes([byte]))
        assert (await receiving).name == "slow"


@pytest.mark.parametrize("size_bytes", [1, RECEIVE_BYTES - 5, RECEIVE_BYTES, 5 * RECEIVE_BYTES + 3])
@in_loops
async def test_data_after_a_message_arrives_whole(size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    async with pair() as (peer, stream):
        sending = asyncio.to_thread(
            peer.sendall,
            encode_frame(GetBucket(name="b")) + LENGTH.pack(size_bytes) + data + LENGTH.pack(0),
        )
        sent = asyncio.ensure_future(sending)
        await stream.receive_frame(DECODER)
        memory = bytearray(await stream.receive_length())
        await stream.receive_into(memoryview(memory))
        assert bytes(memory) == data
        assert await stream.receive_length() == 0
        await sent


@in_loops
async def test_a_descriptor_comes_with_its_message() -> None:
    async with pair() as (peer, stream):
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(peer, [encode_frame(GetBucket(name="b"))], [write_end])
            await stream.receive_frame(DECODER)
            descriptor = stream.take_descriptor()
            assert descriptor is not None
            os.write(descriptor, b"x")
            os.close(descriptor)
            assert os.read(read_end, 1) == b"x"
            assert stream.take_descriptor() is None
        finally:
            os.close(read_end)
            os.close(write_end)


@pytest.mark.parametrize("reads_ahead", [False, True])
@in_loops
async def test_a_descriptor_is_not_passed_on_to_programs_that_are_started(
    reads_ahead: bool,
) -> None:
    async with pair(reads_ahead=reads_ahead) as (peer, stream):
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(peer, [encode_frame(GetBucket(name="b"))], [write_end])
            await stream.receive_frame(DECODER)
            descriptor = stream.take_descriptor()
            assert descriptor is not None
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
        finally:
            os.close(read_end)
            os.close(write_end)


@pytest.mark.parametrize("reads_ahead", [False, True])
@in_loops
async def test_a_descriptor_that_nobody_asked_for_is_closed(reads_ahead: bool) -> None:
    async with pair(reads_ahead=reads_ahead) as (peer, stream):
        stream.takes_descriptors = False
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(peer, [encode_frame(GetBucket(name="b"))], [write_end])
            assert (await stream.receive_frame(DECODER)).name == "b"
            assert stream.take_descriptor() is None
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        assert os.read(read_end, 1) == b""  # the end: nobody holds the other one
        os.close(read_end)


@in_loops
async def test_the_end_is_told_from_silence_in_every_wait() -> None:
    async with pair() as (peer, stream):
        receiving = asyncio.ensure_future(stream.receive_frame(DECODER))
        await asyncio.sleep(0)
        peer.close()
        with pytest.raises(ConnectionEnded):
            await receiving
        await stream.closed_by_peer()


@in_loops
async def test_what_was_taken_out_of_turn_counts_as_a_peer_that_left() -> None:
    async with pair() as (peer, stream):
        peer.sendall(encode_frame(GetBucket(name="a")) + encode_frame(GetBucket(name="b")))
        await stream.receive_frame(DECODER)
        await stream.closed_by_peer()
        assert (await stream.receive_frame(DECODER)).name == "b"


@in_loops
async def test_a_wait_that_was_cancelled_leaves_the_next_one_whole() -> None:
    async with pair() as (peer, stream):
        watching = asyncio.ensure_future(stream.closed_by_peer())
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        peer.sendall(encode_frame(GetBucket(name="after")))
        assert (await stream.receive_frame(DECODER)).name == "after"


@in_loops
async def test_bytes_that_nobody_waits_for_do_not_keep_the_loop_busy() -> None:
    async with pair() as (peer, stream):
        peer.sendall(encode_frame(GetBucket(name="a")))
        await stream.receive_frame(DECODER)
        watching = asyncio.ensure_future(stream.closed_by_peer())
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        peer.sendall(encode_frame(GetBucket(name="b")))
        # Two rounds of the loop: in the first it is told of the bytes, and stops watching.
        for _ in range(3):
            await asyncio.to_thread(os.sched_yield)
        assert not stream.is_watched
        assert (await stream.receive_frame(DECODER)).name == "b"


@in_loops
async def test_descriptors_of_frames_in_a_row_come_each_with_its_own() -> None:
    async with pair(reads_ahead=False) as (peer, stream):
        pipes = [os.pipe() for _ in range(3)]
        try:
            for number, (_, write_end) in enumerate(pipes):
                peer.sendall(encode_frame(GetBucket(name="plain")))
                socket.send_fds(peer, [encode_frame(GetBucket(name=f"{number}"))], [write_end])
            for number, (read_end, _) in enumerate(pipes):
                assert (await stream.receive_frame(DECODER)).name == "plain"
                assert stream.take_descriptor() is None
                assert (await stream.receive_frame(DECODER)).name == f"{number}"
                descriptor = stream.take_descriptor()
                assert descriptor is not None
                os.write(descriptor, b"%d" % number)
                os.close(descriptor)
                assert os.read(read_end, 1) == b"%d" % number
        finally:
            for ends in pipes:
                os.close(ends[0])
                os.close(ends[1])
