"""What a client does about a session that could not be joined, and what it says."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from objectcache import Client, FabricSettings, InvalidRequest
from objectcache.channel.endpoint import Endpoint
from objectcache.landing.fabric_regions import FabricRegion
from objectcache.sessions import session_keeper, session_watch
from objectcache.sessions.fabric_joining import join_fabric
from objectcache.sessions.session_keeper import (
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    RETRY_AFTER_S,
    SessionKeeper,
    pause_s,
)
from objectcache.sessions.session_wire import SocketWire
from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_fabrics.nixl import endpoint as nixl_endpoint
from objectcache_fabrics.nixl.endpoint import NixlEndpoint
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.sessions import MoveSession, NixlNames


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Joining:
    """Refuses with `refuse`, and joins where that is None; counts how often it was asked."""

    def __init__(self, refuse: ObjectCacheError | None) -> None:
        self.refuse = refuse
        self.asked = 0
        self.joined: list[TargetSession] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._peers: list[socket.socket] = []

    def __call__(self) -> TargetSession:
        self.asked += 1
        assert self.may_answer.wait(30.0)
        if self.refuse is not None:
            raise self.refuse
        near, far = socket.socketpair()
        self._peers.append(far)
        self.joined.append(TargetSession(SocketWire(near, 1.0), 1.0))
        return self.joined[-1]

    def ask_to_move(self, session: TargetSession) -> None:
        """As the server of the latest session; returns when it was heard."""
        self._peers[-1].sendall(encode_frame(MoveSession()))
        wait_until(lambda: session.is_asked_to_move)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def test_an_outage_is_left_alone_for_ever_longer_but_never_for_long() -> None:
    outage, pauses = Unavailable("the storage server cannot be reached"), [0.0]
    while pauses[-1] < PAUSE_MAX_S:
        pauses.append(pause_s(outage, pauses[-1]))
    assert pauses[1] == PAUSE_MIN_S
    assert pauses == sorted(set(pauses))
    assert pause_s(outage, PAUSE_MAX_S) == PAUSE_MAX_S < RETRY_AFTER_S


def test_what_does_not_change_by_itself_is_left_alone_and_a_busy_server_is_not() -> None:
    assert pause_s(Unsupported("NIXL is not installed"), 0.0) == RETRY_AFTER_S
    assert pause_s(InvalidRequest("no such operation"), PAUSE_MAX_S) == RETRY_AFTER_S
    assert pause_s(Busy("storage.sessions_max are open"), PAUSE_MAX_S) == 0.0


@pytest.mark.parametrize("error", [Unsupported("not here"), Unavailable("an outage")])
def test_a_failure_is_told_again_without_asking_again(
    error: ObjectCacheError, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RETRY_AFTER_S", "PAUSE_MIN_S", "PAUSE_MAX_S"):
        monkeypatch.setattr(session_keeper, name, 1e6)  # none ends meanwhile
    joining = Joining(error)
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    for _ in range(3):
        with pytest.raises(Unavailable, match=f"^no session: {error.message}$"):
            keeper.session()
    assert joining.asked == 1
    assert error.message in repr(keeper)


@pytest.mark.parametrize("kind", [Busy, Unavailable])
def test_what_a_server_says_of_when_to_come_again_is_passed_on(
    kind: type[ObjectCacheError],
) -> None:
    keeper = SessionKeeper(
        Joining(kind("storage.sessions_max", retry_after_s=3.0)),
        "no session",
        ThreadReserve("test"),
    )
    with pytest.raises(Unavailable, match="no session") as caught:
        keeper.session()
    assert caught.value.details.retry_after_s == 3.0


def test_a_denial_keeps_its_code_and_is_asked_about_each_time() -> None:
    joining = Joining(AccessDenied("wrong", code="SignatureDoesNotMatch"))
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    for _ in range(2):
        with pytest.raises(AccessDenied, match="wrong") as caught:
            keeper.session()
        assert caught.value.code == "SignatureDoesNotMatch"
    assert joining.asked == 2
    joining.refuse = None
    assert not keeper.session().ended  # the key was enabled
    keeper.close()
    joining.close()


def test_a_session_that_was_joined_ends_the_pauses_before_it() -> None:
    joining = Joining(Unavailable("an outage"))
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    for _ in range(2):
        with pytest.raises(Unavailable):
            keeper.session()
        keeper._refused_until_s = 0.0  # the pause is over
    assert keeper._pause_s == 2 * PAUSE_MIN_S
    joining.refuse = None
    first = keeper.session()
    assert keeper.session() is first
    first.close()
    joining.refuse = Unavailable("an outage")
    with pytest.raises(Unavailable):
        keeper.session()
    assert keeper._pause_s == PAUSE_MIN_S
    keeper.close()
    joining.close()


def test_a_session_that_is_asked_to_move_is_left_once_another_one_was_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_watch, "PING_INTERVAL_S", 1e6)  # a left one does not end meanwhile
    joining = Joining(None)
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    first = keeper.session()
    joining.ask_to_move(first)
    joining.may_answer.clear()
    assert keeper.session() is keeper.session() is first  # which works while another is joined
    joining.may_answer.set()
    wait_until(lambda: keeper.session() is not first)
    second = keeper.session()
    assert keeper.session() is second
    assert joining.asked == 2
    assert (first.is_left, first.ended, second.is_left) == (True, False, False)
    keeper.close()
    assert first.ended
    assert second.ended
    joining.close()


def test_a_session_that_is_asked_to_move_stays_where_no_other_can_be_had() -> None:
    joining = Joining(None)
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    first = keeper.session()
    joining.ask_to_move(first)
    joining.refuse = Unsupported("not here")
    assert keeper.session() is first
    wait_until(lambda: not keeper._is_moving)
    assert joining.asked == 2
    assert keeper.session() is first
    assert not first.is_left
    joining.refuse = None
    first.close()
    assert keeper.session() is not first  # at once: no failure to move is remembered
    keeper.close()
    joining.close()


def test_a_session_that_was_joined_for_a_closed_client_is_ended() -> None:
    joining = Joining(None)
    keeper = SessionKeeper(joining, "no session", ThreadReserve("test"))
    first = keeper.session()
    joining.ask_to_move(first)
    joining.may_answer.clear()
    assert keeper.session() is first
    keeper.close()
    joining.may_answer.set()
    wait_until(lambda: len(joining.joined) == 2)
    wait_until(lambda: joining.joined[1].ended)
    joining.close()


def not_installed() -> Any:
    raise Unavailable("NIXL is not installed")


def no_device(name: str) -> Any:
    raise Unavailable(f"there is no RDMA device {name}")


def test_a_fabric_that_this_process_lacks_is_unsupported_and_no_server_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sign(request: Any) -> dict[str, str]:
        raise AssertionError("a server was to be asked")

    def joined(transport: str) -> None:
        endpoint = Endpoint.parse("http://127.0.0.1:1")
        join_fabric(transport, endpoint, sign, None, 1.0, FabricSettings(verbs_device="none0"))

    monkeypatch.setattr("objectcache_fabrics.nixl.agent.library", not_installed)
    monkeypatch.setattr("objectcache_fabrics.verbs.endpoint.VerbsDevice", no_device)
    with pytest.raises(Unsupported, match="NIXL is not installed"):
        joined("nixl")
    with pytest.raises(Unsupported, match="none0"):
        joined("verbs")


def never_ready(*arguments: str) -> Any:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("agent", "timeout_s", "kind", "said"),
    [
        (lambda *arguments: no_device(arguments[1]), 30.0, Unsupported, "nosuch0"),
        (never_ready, 0.05, Unavailable, "has not answered"),
    ],
)
def test_an_agent_that_does_not_start_is_an_error_of_ours(
    agent: Callable[..., Any],
    timeout_s: float,
    kind: type[ObjectCacheError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_endpoint, "NixlAgent", agent)
    monkeypatch.setattr(nixl_endpoint, "TIMEOUT_S", timeout_s)
    endpoint = NixlEndpoint("nosuch0")
    answer = msgspec.msgpack.encode(NixlNames(server="server", client="client"))
    with pytest.raises(kind, match=said):
        endpoint.connect(answer, lambda event: None, lambda message: None)


def test_memory_that_there_is_not_is_told_in_bytes() -> None:
    with pytest.raises(Unavailable, match=r"^no 1152921504606846976 bytes of memory"):
        FabricRegion(1 << 60)


def client_with(fabric: Any) -> Callable[[], Client]:
    def make() -> Client:
        return Client("http://127.0.0.1:1", access_key="a", secret_key="s", fabric=fabric())

    return make


@pytest.mark.parametrize(
    ("fabric", "said"),
    [
        (dict, "fabric must be a FabricSettings, got dict"),
        (lambda: {"nixl_devices": "lo"}, "fabric must be a FabricSettings, got dict"),
        (ssl.create_default_context, "fabric must be a FabricSettings, got SSLContext"),
        (lambda: FabricSettings(nixl_devices=["lo"]), "nixl_devices must be a string, got list"),  # type: ignore[arg-type]
        (lambda: FabricSettings(verbs_device=None), "verbs_device must be a string"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_fabrics_that_are_none_are_refused_when_the_client_is_made(
    fabric: Any, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        client_with(fabric)()
