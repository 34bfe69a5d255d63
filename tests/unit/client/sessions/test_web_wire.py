"""What a gateway sees of the end of a client's session."""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("websockets", reason="websockets is not installed")

from websockets.exceptions import ConnectionClosed
from websockets.frames import Close
from websockets.sync.server import ServerConnection, serve

from objectcache.channel.endpoint import Endpoint
from objectcache.sessions import web_wire
from objectcache.sessions.fabric_session import FabricSession
from objectcache.sessions.target_session import TargetSession
from objectcache.sessions.web_wire import WebWire
from objectcache_fabrics.endpoints import FabricEndpoint
from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_schemas import headers
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.sessions import (
    LayersConsumed,
    LayersFreed,
    LayersReady,
    RegisterRemoteTarget,
)

TIMEOUT_S = 20.0
Closes = queue.SimpleQueue[Close | None]
Handler = Callable[[ServerConnection], None]


@contextmanager
def gateway(handler: Handler) -> Generator[Endpoint]:
    with serve(
        handler,
        "127.0.0.1",
        0,
        subprotocols=[headers.SESSION_PROTOCOL],  # type: ignore[list-item]
        ping_interval=None,
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Endpoint.parse(f"http://127.0.0.1:{server.socket.getsockname()[1]}")
        finally:
            server.shutdown()
            thread.join()


def join(endpoint: Endpoint) -> WebWire:
    return WebWire.join(endpoint, lambda request: {}, None, TIMEOUT_S)


@pytest.fixture
def closes() -> Closes:
    """Of every session that has ended: the Close frame that the client sent, or None."""
    return queue.SimpleQueue()


@pytest.fixture
def listening(closes: Closes) -> Iterator[Endpoint]:
    def listen(connection: ServerConnection) -> None:
        try:
            for _ in connection:
                pass
        except ConnectionClosed:
            pass
        closes.put(connection.protocol.close_rcvd)

    with gateway(listen) as endpoint:
        yield endpoint


class Endpointless(FabricEndpoint):
    """A fabric whose endpoint ends on a thread of its own, as NIXL's does."""

    name = "none"

    def __init__(self) -> None:
        self._is_open = True

    def hello(self) -> bytes:
        raise Unavailable("no such fabric")

    def connect(
        self,
        answer: bytes,
        heard: Callable[[LayersReady], None],
        tell: Callable[[Message], None],
    ) -> None:
        raise AssertionError

    def register(self, memory: DeviceMemory) -> tuple[RegisterRemoteTarget, object]:
        raise AssertionError

    def unregister(self, registered: object) -> None:
        raise AssertionError

    def listen(self, deliveries: int) -> None:
        raise AssertionError

    def close(self) -> None:
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        thread = threading.Thread(target=self.on_end)
        thread.start()
        thread.join()


def test_a_session_that_is_closed_says_so_to_the_gateway(
    listening: Endpoint, closes: Closes
) -> None:
    session = TargetSession(join(listening), TIMEOUT_S)
    session.tell(LayersConsumed(tag=1, end_layer=1, compute_s=0.1))
    session.close()
    session.close()
    close = closes.get(timeout=TIMEOUT_S)
    assert close is not None
    assert close.code == 1000


def test_a_session_whose_fabric_ends_with_it_says_so_too(
    listening: Endpoint, closes: Closes
) -> None:
    with pytest.raises(Unavailable, match="no such fabric"):
        FabricSession(join(listening), Endpointless(), TIMEOUT_S)
    close = closes.get(timeout=TIMEOUT_S)
    assert close is not None
    assert close.code == 1000


def test_a_session_that_is_lost_says_nothing(listening: Endpoint, closes: Closes) -> None:
    join(listening).shut_down()
    assert closes.get(timeout=TIMEOUT_S) is None


def test_a_gateway_that_reads_nothing_takes_no_more_and_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits is not driven out by what comes later; and neither a Close frame that cannot be
    sent nor a thread in the middle of sending makes the end wait.
    """
    monkeypatch.setattr(web_wire, "PING_INTERVAL_S", 1e6)  # nothing else ends the connection
    done = threading.Event()
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def read_nothing(connection: ServerConnection) -> None:
        connection.recv_flow_control.acquire()  # the library's thread reads no more
        accepted.put(connection.socket)
        done.wait()
        connection.recv_flow_control.release()

    with gateway(read_nothing) as endpoint, ExitStack() as ended:
        ended.callback(done.set)
        wire = join(endpoint)
        session = TargetSession(wire, TIMEOUT_S)
        accepted.get(timeout=TIMEOUT_S)
        sending = threading.Thread(target=send_without_end, args=(wire,))
        sending.start()
        wait_until_full(wire)
        with pytest.raises(BlockingIOError, match="takes no more now"):
            say_more_than_waits(wire)
        session.close()
        sending.join()
        assert session.ended


def send_without_end(wire: WebWire) -> None:
    message = RegisterRemoteTarget(length_bytes=1, address=1, metadata=bytes(60_000))
    try:
        while True:
            wire.send(message)
    except OSError:
        pass


def say_more_than_waits(wire: WebWire) -> None:
    # Many more: a few may still be sent, where the kernel had not yet moved all it could.
    for end_layer in range(100 * web_wire.LATER_MAX):
        wire.send_now(LayersFreed(tag=1, end_layer=end_layer))


def wait_until_full(wire: WebWire) -> None:
    """Until the socket takes no more, which its sender is waiting for."""
    poll = select.poll()
    poll.register(wire._connection.socket, select.POLLOUT)
    while poll.poll(0):
        pass
