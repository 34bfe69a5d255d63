"""Word of the layers that a ring's client has freed, where the connection takes nothing more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from objectcache.sessions import session_watch
from objectcache.sessions.session_wire import FrameParser, SocketWire
from objectcache.sessions.target_session import TOLD_MAX, LayerSink, TargetSession
from objectcache_schemas.messages.sessions import (
    LayersConsumed,
    LayersFreed,
    TargetRequest,
)

TIMEOUT_S = 30.0
_REQUEST: msgspec.msgpack.Decoder[TargetRequest] = msgspec.msgpack.Decoder(TargetRequest)


class Deaf(LayerSink):
    """A delivery that is looked at by nobody."""

    def advance(self, ready_end: int) -> None: ...

    def fail(self, reason: str, cause: BaseException | None = None) -> None: ...


class Server:
    """The far end of a session, which reads when it is asked to."""

    def __init__(self) -> None:
        near, self._far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self._far.settimeout(TIMEOUT_S)
        self._parser = FrameParser(1 << 20)
        self.wire = SocketWire(near, TIMEOUT_S)
        self.session = TargetSession(self.wire, TIMEOUT_S)

    def fill(self) -> None:
        """Until the socket takes no more."""
        with suppress(BlockingIOError):
            while True:
                self.wire.send_now(LayersConsumed(tag=99, end_layer=1, compute_s=0.0))

    def freed_until(self, last: LayersFreed) -> list[LayersFreed]:
        """What is said of freed layers, up to this."""
        heard: list[LayersFreed] = []
        while last not in heard:
            for frame in self._parser.feed(self._far.recv(4096)):
                request = _REQUEST.decode(frame)
                if isinstance(request, LayersFreed):
                    heard.append(request)
        return heard

    def close(self) -> None:
        self._far.close()
        self.session.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(session_watch, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(session_watch, "SILENT_PINGS_MAX", 1_000_000)
    one = Server()
    yield one
    one.close()


def test_what_found_no_room_goes_by_the_next_pings_and_the_last_word_of_each_get_alone(
    server: Server,
) -> None:
    first, second, ended = (server.session.listen(Deaf()) for _ in range(3))
    server.fill()
    for end_layer in (1, 2, 3):
        server.session.free_layers(first, end_layer)
    server.session.free_layers(ended, 4)
    server.session.free_layers(second, 5)
    server.session.forget(ended)
    server.session.free_layers(ended, 6)
    last = LayersFreed(tag=second, end_layer=5)
    assert server.freed_until(last) == [LayersFreed(tag=first, end_layer=3), last]


def test_more_that_is_told_while_another_thread_sends_does_not_drive_it_out(
    server: Server,
) -> None:
    tag = server.session.listen(Deaf())
    server.fill()
    sending = threading.Thread(
        target=server.session.release, args=(bytes(16), lambda is_quiet: None)
    )
    sending.start()
    while not server.session._sending.locked():
        assert sending.is_alive()
    server.session.free_layers(tag, 7)
    for _ in range(TOLD_MAX + 1):
        server.session.tell(LayersConsumed(tag=99, end_layer=1, compute_s=0.0))
    freed = LayersFreed(tag=tag, end_layer=7)
    assert server.freed_until(freed) == [freed]
    sending.join()
