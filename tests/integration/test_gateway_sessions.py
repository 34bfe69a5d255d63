"""Sessions through the gateway: who is let in, and what ends one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import join_session
from objectcache.channel.signing import Signer
from objectcache.sessions.web_wire import WebWire
from objectcache_gateway.handlers.kv.client_sessions import MESSAGE_BYTES_MAX
from objectcache_schemas import headers
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    WireError,
)
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.sessions import (
    JoinSession,
    LayersConsumed,
    OpenFabric,
    RegisterRemoteTarget,
    RegisterTarget,
    ReleaseTarget,
    ReturnCredits,
    TargetEvent,
)
from tests.integration.served import wait_until
from tests.s3_clients import call
from tests.servers import RunningServer, start_server

TIMEOUT_S = 60.0
SESSIONS_MAX = 3
# A client that stands still for less, as a busy machine may have one do, is not given up.
PATIENT = "gateway.session_heartbeat_s=60"
MESSAGES_PER_S = 5  # of the slow server
_EVENT: msgspec.msgpack.Decoder[TargetEvent] = msgspec.msgpack.Decoder(TargetEvent)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("sessions")
    with start_server(
        folder,
        f"storage.sessions_max={SESSIONS_MAX}",
        "storage.nixl=off",
        "storage.session_messages_per_s=1000000",
        PATIENT,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Reads few messages of a session."""
    folder = tmp_path_factory.mktemp("slow")
    rate = f"storage.session_messages_per_s={MESSAGES_PER_S}"
    with start_server(folder, "storage.nixl=off", rate, PATIENT) as running:
        yield running


def signer_of(server: RunningServer, secret_key: str | None = None) -> Signer:
    pair = server.credentials
    key = SigningKey(pair.access_key, secret_key or pair.secret_key, None)
    return Signer(Endpoint.parse(server.endpoint), "us-east-1", lambda: key)


def join(server: RunningServer, secret_key: str | None = None) -> WebWire:
    sign = signer_of(server, secret_key).signed_headers
    return WebWire.join(Endpoint.parse(server.endpoint), sign, None, TIMEOUT_S)


@pytest.fixture
def joined(server: RunningServer) -> Iterator[Any]:
    """The library's connection, joined."""
    wires: list[WebWire] = []

    def try_to_join() -> bool:  # earlier tests' sessions may be ending still
        try:
            wires.append(join(server))
        except Busy:
            return False
        return True

    wait_until(try_to_join, "a session", TIMEOUT_S)
    yield wires[0]._connection
    wires[0].close()


def answer(connection: Any, message: Message) -> TargetEvent:
    connection.send(msgspec.msgpack.encode(message))
    return _EVENT.decode(connection.recv(TIMEOUT_S))


def test_a_wrong_signature_is_denied(server: RunningServer) -> None:
    with pytest.raises(AccessDenied) as caught:
        join(server, "not-the-secret")
    assert caught.value.code == "SignatureDoesNotMatch"


def test_an_unsigned_request_is_denied(server: RunningServer) -> None:
    url = f"ws://{server.host}:{server.port}/?{headers.KV_SESSION}"
    with pytest.raises(Exception, match="403"), connect(url, proxy=None):
        pass


def test_a_session_that_its_client_closed_is_logged_as_one_that_went_well(
    server: RunningServer, joined: Any
) -> None:
    log = server.data_dir / "gateway.log"

    def logged(status: str) -> int:
        lines = log.read_text().splitlines()
        return sum('"operation":"JoinKvSession"' in line and status in line for line in lines)

    closed, aborted = logged('"status":101'), logged('"status":"aborted"')
    joined.close()
    wait_until(lambda: logged('"status":101') == closed + 1, "a line", TIMEOUT_S)
    assert logged('"status":"aborted"') == aborted


@pytest.mark.parametrize("frame", [b"\x82\x01x", b"\x89\x00", b"\x82\x7e\x01\x00"])
def test_a_frame_that_is_not_masked_ends_the_session(joined: Any, frame: bytes) -> None:
    """RFC 6455, section 5.1. A masked ping before it, in the same bytes, is answered."""
    joined.socket.sendall(b"\x89\x81\x00\x00\x00\x00x" + frame)
    with pytest.raises(ConnectionClosed) as caught:
        joined.recv(TIMEOUT_S)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1002


def test_a_plain_request_is_told_to_upgrade(server: RunningServer) -> None:
    response = call(server, "GET", f"/?{join_session().query}")
    assert response.status == 400
    assert b"WebSocket" in response.body


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (OpenFabric(transport="nixl"), "storage.nixl is off"),
        (OpenFabric(transport="smoke"), "there are shared_memory, nixl and verbs"),
        (RegisterRemoteTarget(length_bytes=10, address=4096), "OpenFabric"),
        (RegisterTarget(length_bytes=4096), "memory file"),
        (ReleaseTarget(target_id=b"0123456789abcdef"), "not registered"),
        (JoinSession(v=PROTOCOL_VERSION, ticket=b"x"), "joined already"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_session_goes_on(
    joined: Any, message: Message, said: str
) -> None:
    joined.send(msgspec.msgpack.encode(ReturnCredits(count=5)))  # neither is answered
    joined.send(msgspec.msgpack.encode(LayersConsumed(tag=1, end_layer=1, compute_s=0.1)))
    for _ in range(2):
        error = answer(joined, message)
        assert isinstance(error, WireError)
        assert said in error.message


def test_a_message_that_is_none_ends_the_session_with_the_reason(joined: Any) -> None:
    joined.send(b"\xc1")
    error = _EVENT.decode(joined.recv(TIMEOUT_S))
    assert isinstance(error, WireError)
    with pytest.raises(ConnectionClosed):
        joined.recv(TIMEOUT_S)


@pytest.mark.parametrize(
    ("message", "code"), [("text", 1000), (bytes(MESSAGE_BYTES_MAX + 1), 1009)]
)
def test_text_and_a_message_that_is_too_long_end_the_session(
    joined: Any, message: str | bytes, code: int
) -> None:
    joined.send(message)
    with pytest.raises(ConnectionClosed):
        joined.recv(TIMEOUT_S)
    assert joined.close_code == code


def test_a_message_of_the_greatest_length_is_read(joined: Any) -> None:
    def encoded(padding_bytes: int) -> bytes:
        fields = {"op": "RegisterRemoteTarget", "length_bytes": 4096, "address": 4096}
        return msgspec.msgpack.encode({**fields, "metadata": bytes(padding_bytes)})

    padding_bytes = MESSAGE_BYTES_MAX - (len(encoded(60_000)) - 60_000)
    message = encoded(padding_bytes)
    assert len(message) == MESSAGE_BYTES_MAX
    for _ in range(2):
        joined.send(message)
        error = _EVENT.decode(joined.recv(TIMEOUT_S))
        assert isinstance(error, WireError)
        assert "OpenFabric" in error.message


def test_a_flood_is_read_at_the_session_s_rate_and_others_are_served_meanwhile(
    slow_server: RunningServer,
) -> None:
    """storage.session_messages_per_s"""
    started_s = time.monotonic()
    wire = join(slow_server)
    connection: Any = wire._connection
    nonsense = msgspec.msgpack.encode(ReleaseTarget(target_id=b"0123456789abcdef"))
    burst = 2 * MESSAGES_PER_S
    for _ in range(burst + 3 * MESSAGES_PER_S):
        connection.send(nonsense)
    for answers in range(1, burst + MESSAGES_PER_S + 1):
        connection.recv(TIMEOUT_S)
        assert call(slow_server, "GET", "/").status == 200
        read_max = burst + MESSAGES_PER_S * (time.monotonic() - started_s) + 1
        assert answers <= read_max
    wire.close()


def test_pings_take_of_the_session_s_rate(slow_server: RunningServer) -> None:
    started_s = time.monotonic()
    wire = join(slow_server)
    connection: Any = wire._connection
    pongs = [connection.ping() for _ in range(3 * MESSAGES_PER_S)]
    for number, pong in enumerate(pongs, 1):
        assert pong.wait(TIMEOUT_S)
        read_max = 2 * MESSAGES_PER_S + MESSAGES_PER_S * (time.monotonic() - started_s) + 1
        assert number <= read_max
    wire.close()


def test_no_extension_is_agreed_on(server: RunningServer, joined: Any) -> None:
    """Not compression either, where a few bytes are many."""
    sign = signer_of(server).signed_headers(join_session())
    joined.close()
    url = f"ws://{server.host}:{server.port}/?{headers.KV_SESSION}"
    signed = {name: value for name, value in sign.items() if name != "host"}
    opened: list[Any] = []

    def can_open() -> bool:
        try:
            opened.append(
                connect(
                    url,
                    proxy=None,
                    compression="deflate",
                    additional_headers=signed,
                    user_agent_header=None,
                )
            )
        except InvalidStatus:
            return False  # earlier tests' sessions may be ending still
        return True

    wait_until(can_open, "a session", TIMEOUT_S)
    with opened[0] as connection:
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


def test_one_session_more_than_are_served_is_turned_away_until_one_ends(
    server: RunningServer, joined: Any
) -> None:
    wires = []

    def has_room() -> bool:
        try:
            wires.append(join(server))
        except Busy:
            return False
        return True

    for _ in range(SESSIONS_MAX - 1):
        wait_until(has_room, "an earlier test's session to be let go", TIMEOUT_S)
    with pytest.raises(Busy, match=r"storage\.sessions_max"):
        join(server)
    wires.pop().close()
    wait_until(has_room, "the session that ended to be let go", TIMEOUT_S)
    for wire in wires:
        wire.close()


def test_a_client_that_takes_no_answers_is_let_go(tmp_path: Path) -> None:
    """It asks for refusals without end and reads none of them."""
    nonsense = msgspec.msgpack.encode(ReleaseTarget(target_id=b"0123456789abcdef"))
    settings = ("storage.session_messages_per_s=1000000", "gateway.session_heartbeat_s=1")
    with start_server(tmp_path / "data", "storage.nixl=off", *settings) as server:
        wire = join(server)
        connection: Any = wire._connection

        def ask_without_end() -> None:
            while True:
                connection.send(nonsense)

        with pytest.raises((ConnectionClosed, OSError)):
            ask_without_end()
        wire.close()
