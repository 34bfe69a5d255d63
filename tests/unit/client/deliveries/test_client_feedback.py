"""Where consumption goes: frames on the target socket, or the next descriptor."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from objectcache import AsyncClient, Client, InvalidRequest
from objectcache.async_client import AsyncKvBucket, BlockingCalls
from objectcache.channel.request_labels import current_traceparent
from objectcache.kv_bucket import KvBucket
from objectcache.landing.memory_file import MemoryFile
from objectcache.sessions.session_wire import FrameParser, SocketWire
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.sessions import (
    LayersConsumed,
    RegisterTarget,
    TargetRegistered,
    TargetRequest,
)
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    KEYS,
    LAYOUT,
    FakeGateway,
    Peer,
    Received,
    payload_of,
)
from tests.unit.client.client_shared_server import SharedServer

MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SharedServer]:
    server = SharedServer(tmp_path)
    yield server
    server.close()


def bucket_of(client: Client) -> KvBucket:
    return KvBucket(client._core, "b", LAYOUT)


def heard(server: SharedServer, count: int) -> list[LayersConsumed]:
    """The next feedback that the target socket gets."""
    return [server.targets.consumed.get(timeout=DEADLINE_S) for _ in range(count)]


def ends(messages: list[LayersConsumed]) -> list[int]:
    return [message.end_layer for message in messages]


def test_each_wait_and_the_close_tell_the_server_what_is_consumed(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            playing = server.next_get()
            playing.finish(payload_of(5))
            for layer in range(3):
                delivery.wait_layer(layer)
                assert ends(heard(server, min(layer, 1))) == [layer] * min(layer, 1)
        (last,) = heard(server, 1)
        assert (last.tag, last.end_layer) == (playing.target.tag, 3)
        assert math.isfinite(last.compute_s)
        assert last.compute_s >= 0


def test_the_server_hears_of_a_layer_before_the_next_one_arrives(server: SharedServer) -> None:
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        playing = server.next_get()
        playing.write(payload_of(5))
        playing.announce(1)
        delivery.wait_layer(0)
        waiting = threading.Thread(target=delivery.wait_layer, args=(1,))
        waiting.start()
        assert ends(heard(server, 1)) == [1]
        playing.finish(payload_of(5))
        waiting.join(DEADLINE_S)


@pytest.mark.parametrize("mode", ["layerwise", "chunkwise"])
def test_the_layers_of_a_range_are_told_as_they_are_announced(
    server: SharedServer, mode: str
) -> None:
    server.mode = mode
    with server.client() as client:
        with bucket_of(client).fetch(KEYS, layers=(1, 3)) as delivery:
            server.next_get().finish(payload_of(5)[200:])
            assert [layer for layer, _ in delivery] == [1, 2]
        assert ends(heard(server, 2)) == [2, 3]


def test_waiting_for_everything_consumes_it_when_the_delivery_is_closed(
    server: SharedServer,
) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(payload_of(5))
            delivery.wait()
            delivery.wait_layer(0)
            assert server.targets.consumed.empty()
        assert ends(heard(server, 1)) == [3]


@pytest.mark.parametrize("hears_awaited", [True, False], ids=["this release", "one before"])
def test_who_waits_for_the_whole_is_to_be_told_of_that_alone(
    server: SharedServer, hears_awaited: bool
) -> None:
    server.targets.hears_awaited = hears_awaited
    with server.client(timeout_s=DEADLINE_S) as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            playing = server.next_get()
            waiting = threading.Thread(target=delivery.wait)
            waiting.start()
            if hears_awaited:
                awaited = server.targets.awaited.get(timeout=DEADLINE_S)
                assert (awaited.tag, awaited.end_layer) == (playing.target.tag, 3)
                assert 0 < awaited.interval_s < DEADLINE_S / 2, "silence would not stand out"
            playing.finish(payload_of(5))
            waiting.join(DEADLINE_S)
        assert ends(heard(server, 1)) == [3]
        assert server.targets.awaited.empty()


def test_who_waits_for_one_layer_after_the_other_is_told_of_each(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(payload_of(5))
            assert [layer for layer, _ in delivery] == [0, 1, 2]
        assert ends(heard(server, 3)) == [1, 2, 3]
        assert server.targets.awaited.empty()


def test_an_engine_ahead_of_its_gpu_tells_by_itself(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            delivery.report_explicitly()
            server.next_get().finish(payload_of(5))
            for layer in delivery.layers:
                delivery.wait_layer(layer)
            gpu = threading.Thread(target=delivery.consumed, args=(0, 0.25))
            gpu.start()
            gpu.join(DEADLINE_S)
            numpys_own: Any = np.int64(2)
            delivery.consumed(numpys_own, 0.5)
        first, second = heard(server, 2)
        assert (first.end_layer, first.compute_s) == (1, 0.25)
        assert (second.end_layer, second.compute_s) == (3, 0.5)
        assert server.targets.consumed.empty()


@pytest.mark.parametrize("compute_s", [-1.0, math.nan, math.inf, "1"])
def test_a_told_time_that_is_none_is_named(server: SharedServer, compute_s: Any) -> None:
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        server.next_get().finish(payload_of(5))
        with pytest.raises(InvalidRequest, match="compute_s must be"):
            delivery.consumed(0, compute_s)
        with pytest.raises(InvalidRequest, match="layer 3 is not in the delivery"):
            delivery.consumed(3)


@pytest.mark.asyncio
async def test_an_asynchronous_delivery_tells_the_same(server: SharedServer) -> None:
    sync = server.client()
    async with AsyncClient(
        server.gateway.url, access_key="key", secret_key="secret", transport="shared_memory"
    ) as client:
        bucket = AsyncKvBucket(KvBucket(client._client._core, "b", LAYOUT), client._calls)
        async with bucket.fetch(KEYS) as delivery:
            playing = await asyncio.to_thread(server.next_get)
            playing.finish(payload_of(5))
            async for _layer, _kv in delivery:
                pass
        assert ends(await asyncio.to_thread(heard, server, 3)) == [1, 2, 3]
        async with bucket.fetch(KEYS) as delivery:
            delivery.report_explicitly()
            playing = await asyncio.to_thread(server.next_get)
            playing.finish(payload_of(5))
            await delivery.wait()
            delivery.consumed(2, 0.25)
        assert ends(await asyncio.to_thread(heard, server, 1)) == [3]
    sync.close()


def test_a_delivery_outlives_the_session_that_it_tells(server: SharedServer) -> None:
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        server.next_get().finish(payload_of(5))
        delivery.wait()
        server.targets.listener.break_connections()
        for layer in delivery.layers:
            delivery.wait_layer(layer)
            delivery.consumed(layer)


# --- the session's socket ------------------------------------------------------------------------


class Unread:
    """A session whose server reads nothing until it is told to."""

    def __init__(self) -> None:
        mine, self.server = socket.socketpair()
        self.server.settimeout(DEADLINE_S)
        self.session = TargetSession(SocketWire(mine, DEADLINE_S), DEADLINE_S)
        self._parser = FrameParser(MIB)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(TargetRequest)

    def receive(self) -> list[Any]:
        """The messages in what can be read now."""
        frames = self._parser.feed(self.server.recv(MIB))
        return [self._decoder.decode(frame) for frame in frames]

    def receive_until(self, found: Callable[[Any], bool]) -> list[Any]:
        messages: list[Any] = []
        while not any(found(message) for message in messages):
            messages += self.receive()
        return messages

    def close(self) -> None:
        self.server.close()
        self.session.close()


@pytest.fixture
def unread() -> Iterator[Unread]:
    unread = Unread()
    yield unread
    unread.close()


def told(end_layer: int) -> LayersConsumed:
    return LayersConsumed(tag=1, end_layer=end_layer, compute_s=0.25)


def fill(unread: Unread) -> int:
    """Tell more than the socket holds; how much that was."""
    count = 1 + 2 * unread.server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // len(
        encode_frame(told(0))
    )
    for end_layer in range(count):
        unread.session.tell(told(end_layer))
    return count


def test_a_server_that_reads_no_feedback_blocks_nobody(unread: Unread) -> None:
    count = fill(unread)
    assert not unread.session.ended
    arrived: list[LayersConsumed] = []
    unread.server.setblocking(False)
    try:
        while True:
            arrived += unread.receive()
    except BlockingIOError:
        unread.server.settimeout(DEADLINE_S)
    assert 0 < len(arrived) < count  # whole ones, from the first on, and the rest dropped
    assert arrived == [told(end_layer) for end_layer in range(len(arrived))]
    unread.session.tell(told(count))
    assert unread.receive() == [told(count)]


def test_feedback_does_not_wait_behind_a_request_that_does(unread: Unread) -> None:
    fill(unread)
    file = MemoryFile(1 << 16)
    ids: list[bytes] = []
    registering = threading.Thread(
        target=lambda: ids.append(unread.session.register(file.fd, file.length_bytes))
    )
    registering.start()
    pause = threading.Event()
    while not unread.session._sending.locked():  # it is about to be stuck in its send
        pause.wait(0.001)
    unread.session.tell(told(7_000_000))  # returns, though nobody reads

    def is_registration(message: Any) -> bool:
        return isinstance(message, RegisterTarget)

    messages = unread.receive_until(is_registration)
    if told(7_000_000) not in messages:
        messages += unread.receive_until(lambda message: message == told(7_000_000))
    unread.server.sendall(encode_frame(TargetRegistered(target_id=bytes(16))))
    registering.join(DEADLINE_S)
    assert ids == [bytes(16)]
    assert [m for m in messages if is_registration(m)] == [RegisterTarget(length_bytes=1 << 16)]


def test_threads_that_tell_at_once_send_whole_messages_and_lose_none(unread: Unread) -> None:
    def tell_some(first: int) -> None:
        for number in range(20):  # by three: not more than may wait for the one that is sending
            unread.session.tell(told(first + number))

    threads = [threading.Thread(target=tell_some, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    expected = {told(first + n).end_layer for first in (0, 1000, 2000) for n in range(20)}
    arrived: set[int] = set()
    while arrived != expected:
        arrived |= {message.end_layer for message in unread.receive()}
    for thread in threads:
        thread.join(DEADLINE_S)


def test_a_session_that_has_ended_hears_nothing_and_says_nothing(unread: Unread) -> None:
    unread.server.close()
    for end_layer in range(1000):
        unread.session.tell(told(end_layer))
    unread.session.close()
    unread.session.tell(told(1))
    assert unread.session.ended


# --- windows for bodies --------------------------------------------------------------------------


def serve_body(request: Received, peer: Peer) -> None:
    count = len(request.descriptor.chunk_keys)
    peer.answer_delivery("layerwise", count, payload_of(count))


def fetch_once(bucket: KvBucket, keys: list[str], compute_s: float | None, **asked: Any) -> None:
    """A delivery whose engine says how long each layer took it."""
    with bucket.fetch(keys, **asked) as delivery:
        for layer in delivery.layers:
            delivery.wait_layer(layer)
            if compute_s is not None:
                delivery.consumed(layer, compute_s)


def windows_of(gateway: FakeGateway) -> list[float | None]:
    return [request.descriptor.compute_window_s for request in gateway.requests]


def test_the_next_fetch_by_body_tells_how_long_the_last_ones_computed() -> None:
    with FakeGateway(serve_body) as gateway, gateway.client() as client:
        for compute_s in (0.25, 0.5, 4.0, 4.0):
            fetch_once(bucket_of(client), KEYS, compute_s)
        assert windows_of(gateway) == [None, 0.25, 0.375, 0.5]


def test_what_the_caller_says_of_its_compute_goes_before_what_was_learned() -> None:
    with FakeGateway(serve_body) as gateway, gateway.client() as client:
        bucket = bucket_of(client)
        fetch_once(bucket, KEYS, 0.25)
        fetch_once(bucket, KEYS, 0.25, compute_window_s=7.0)
        fetch_once(bucket, KEYS, 0.25, model="llama", context_tokens=100)
        fetch_once(bucket, KEYS, 0.25, context_tokens=100)
        fetch_once(bucket, KEYS, 0.25, context_tokens=99)
        fetch_once(bucket, KEYS[:2], 0.25)
        fetch_once(bucket, KEYS, 0.25)
        assert windows_of(gateway) == [None, 7.0, None, 0.25, None, None, 0.25]


def test_a_client_that_shall_not_learn_sends_no_window() -> None:
    with FakeGateway(serve_body) as gateway, gateway.client(learn_windows=False) as client:
        for _ in range(2):
            fetch_once(bucket_of(client), KEYS, 0.25)
        assert windows_of(gateway) == [None, None]


def test_the_server_learns_by_itself_from_deliveries_into_shared_memory(
    server: SharedServer,
) -> None:
    with server.client() as client:
        for _ in range(2):
            with bucket_of(client).fetch(KEYS) as delivery:
                playing = server.next_get()
                playing.finish(payload_of(5))
                delivery.wait()
                delivery.consumed(2, 0.25)
            heard(server, 1)
        gets = [r for r in server.gateway.requests if "kv-session" not in r.target]
        assert [get.descriptor.compute_window_s for get in gets] == [None, None]


def test_a_consumer_of_the_whole_says_nothing_of_its_pace(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS, compute_window_s=0.0) as delivery:
            playing = server.next_get()
            playing.finish(payload_of(5))
            for layer in delivery.layers:
                delivery.wait_layer(layer)
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(payload_of(5))
            delivery.wait()
        (last,) = heard(server, 1)
        assert last.tag != playing.target.tag


def test_what_a_consumer_of_the_whole_took_is_sent_with_no_later_request() -> None:
    with FakeGateway(serve_body) as gateway, gateway.client() as client:
        for _ in range(3):
            fetch_once(bucket_of(client), KEYS, 0.25, compute_window_s=0.0)
        fetch_once(bucket_of(client), KEYS, None)
        assert windows_of(gateway) == [0.0, 0.0, 0.0, None]


# --- spans ---------------------------------------------------------------------------------------


def test_without_opentelemetry_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    assert current_traceparent() is None


def test_the_current_span_goes_with_a_get() -> None:
    pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api is not installed")
    trace: Any = importlib.import_module("opentelemetry.trace")
    context = trace.SpanContext(0xABC, 0xDEF, False, trace.TraceFlags(1))
    with FakeGateway(serve_body) as gateway, gateway.client() as client:
        with trace.use_span(trace.NonRecordingSpan(context)):
            fetch_once(bucket_of(client), KEYS, None)
        fetch_once(bucket_of(client), KEYS, None)
        first, second = (request.headers.get("traceparent") for request in gateway.requests)
    assert first == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert second is None


@pytest.mark.asyncio
async def test_a_call_in_a_thread_sees_the_tasks_context() -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span")
    calls = BlockingCalls(1)
    span.set("mine")
    assert await calls.run(span.get) == "mine"
    calls.close()
