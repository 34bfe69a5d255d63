"""NIXL's two sides in one process: what a client may say, and what becomes of its peer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from objectcache_fabrics.nixl import endpoint as nixl_endpoint
from objectcache_fabrics.nixl import fabric as nixl
from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent
from objectcache_fabrics.nixl.endpoint import NixlEndpoint
from objectcache_fabrics.nixl.fabric import METADATA_BYTES_MAX, NixlFabric, NixlPeer
from objectcache_fabrics.peers import WriteTimeout
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_schemas.errors import (
    DeliveryFailed,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
)
from objectcache_schemas.messages.sessions import LayersReady, RegisterRemoteTarget

pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")

BUFFER = 64 << 10
TIMEOUT_S = 20.0
PROMPT_TIMEOUT_S = 0.3  # of a write that nobody will take


def remote_of(message: RegisterRemoteTarget) -> RemoteMemory:
    return RemoteMemory(message.address, message.length_bytes, device_id=message.device_id)


class Pair:
    """A server's peer and the client it serves."""

    def __init__(self, fabric: NixlFabric, *, looks: bool = True) -> None:
        self.peer, answer = fabric.open(b"")
        assert isinstance(self.peer, NixlPeer)
        self.heard: list[LayersReady] = []
        self.told = threading.Event()
        self._goes_on = threading.Event()
        self.endpoint = NixlEndpoint("lo", "")
        self.endpoint.connect(answer, self._hear, lambda message: None)
        if looks:
            self.endpoint.listen(1)
        self.memory = np.zeros(4 * BUFFER, np.uint8)

    def _hear(self, event: LayersReady) -> None:
        self.heard.append(event)
        self.told.set()

    def register(self) -> tuple[RemoteMemory, RegisterRemoteTarget]:
        memory = DeviceMemory(self.memory.ctypes.data, self.memory.nbytes, self.memory)
        message, _ = self.endpoint.register(memory)
        return remote_of(message), message

    def admitted(self) -> RemoteMemory:
        remote, message = self.register()
        self.peer.admit(remote, message.metadata)
        return remote

    def stand_still(self, patience_s: float = TIMEOUT_S) -> None:
        """As a stopped process does: its agent takes nothing until `close`. The server waits for it
        for so long from now on; before, it answers, however busy the machine is.
        """
        stands = threading.Event()

        def stand(agent: NixlAgent) -> None:
            stands.set()
            assert self._goes_on.wait(2 * TIMEOUT_S)

        threading.Thread(target=self.endpoint._call, args=(stand,), daemon=True).start()
        assert stands.wait(TIMEOUT_S)
        assert isinstance(self.peer, NixlPeer)
        self.peer._timeout = self.peer._timeout._replace(timeout_s=patience_s)

    def close(self) -> None:
        self._goes_on.set()
        self.peer.close()
        self.endpoint.close()


@pytest.fixture
def staging() -> StagingMemory:
    return StagingMemory(BUFFER, 4 * BUFFER)


@pytest.fixture
def fabric(staging: StagingMemory) -> Iterator[NixlFabric]:
    fabric = NixlFabric(staging, "lo", "", WriteTimeout(TIMEOUT_S))
    yield fabric
    fabric.close()


@pytest.fixture
def pair(fabric: NixlFabric) -> Iterator[Pair]:
    pair = Pair(fabric)
    yield pair
    pair.close()


class Done(Future[ObjectCacheError | None]):
    """A `WriteDone` that can be waited for."""

    def __call__(self, error: ObjectCacheError | None) -> None:
        self.set_result(error)


def staged(staging: StagingMemory, byte: int) -> memoryview:
    view = staging.take(BUFFER)
    view[:] = bytes([byte]) * BUFFER
    return view


def test_bytes_are_written_where_they_belong_and_then_announced(
    pair: Pair, staging: StagingMemory
) -> None:
    remote, done = pair.admitted(), Done()
    pair.peer.write(remote, BUFFER, staged(staging, 7), done)
    assert done.result(TIMEOUT_S) is None
    assert np.all(pair.memory[BUFFER : 2 * BUFFER] == 7)
    assert not pair.memory[:BUFFER].any()
    assert not pair.memory[2 * BUFFER :].any()
    pair.peer.announce(5, 9)
    assert pair.told.wait(TIMEOUT_S)
    assert pair.heard == [LayersReady(tag=5, end_layer=9)]


def test_lent_memory_is_written_from_until_it_is_taken_back(
    pair: Pair, staging: StagingMemory
) -> None:
    remote = pair.admitted()
    source = np.full(2 * BUFFER, 7, np.uint8)
    lent = DeviceMemory(source.ctypes.data, source.nbytes, source)
    for _ in range(2):  # lending it again changes nothing
        pair.peer.lend(lent, lambda: pytest.fail("the agent has ended"))
    done = Done()
    pair.peer.write(remote, BUFFER, source.data[:BUFFER], done)
    assert done.result(TIMEOUT_S) is None
    assert pair.memory[BUFFER : 2 * BUFFER].tolist() == [7] * BUFFER
    held = weakref.ref(source)
    pair.peer.take_back(lent)
    del source, lent
    again = Done()
    pair.peer.write(remote, 0, staged(staging, 1), again)  # its thread has passed it
    assert again.result(TIMEOUT_S) is None
    gc.collect()
    assert held() is None


def test_memory_is_read_out_of_the_clients(pair: Pair, staging: StagingMemory) -> None:
    remote, done = pair.admitted(), Done()
    pair.memory[3 * BUFFER :] = 9
    view = staged(staging, 0)
    pair.peer.read(remote, 3 * BUFFER, view, done)
    assert done.result(TIMEOUT_S) is None
    assert bytes(view) == b"\x09" * BUFFER


@pytest.mark.parametrize("metadata", [b"", b"nonsense", os.urandom(300)])
def test_metadata_that_is_none_is_refused_and_the_peer_goes_on(pair: Pair, metadata: bytes) -> None:
    remote, message = pair.register()
    with pytest.raises(InvalidRequest, match="metadata"):
        pair.peer.admit(remote, metadata)
    pair.peer.admit(remote, message.metadata)


def test_metadata_that_was_cut_is_refused(pair: Pair) -> None:
    remote, message = pair.register()
    with pytest.raises((InvalidRequest, Unavailable)):
        pair.peer.admit(remote, message.metadata[:-20])


def test_metadata_that_is_too_long_never_meets_the_library(pair: Pair) -> None:
    remote, message = pair.register()
    with pytest.raises(InvalidRequest, match=f"at most {METADATA_BYTES_MAX}"):
        pair.peer.admit(remote, message.metadata + bytes(METADATA_BYTES_MAX))


def test_the_metadata_of_another_session_is_refused(pair: Pair, fabric: NixlFabric) -> None:
    other = Pair(fabric)
    try:
        _, message = other.register()
        mine, _ = pair.register()
        with pytest.raises(InvalidRequest, match="name"):
            pair.peer.admit(mine, message.metadata)
    finally:
        other.close()


@pytest.mark.parametrize(("before", "more"), [(0, 1), (1, 0), (-1, 0)])
def test_memory_that_the_metadata_does_not_cover_is_refused(
    pair: Pair, before: int, more: int
) -> None:
    remote, message = pair.register()
    outside = replace(
        remote, address=remote.address + before, length_bytes=remote.length_bytes + more
    )
    if before == 1:
        outside = replace(remote, address=remote.address + 1)
    with pytest.raises(InvalidRequest, match="cover"):
        pair.peer.admit(outside, message.metadata)
    pair.peer.admit(remote, message.metadata)


def test_a_session_may_register_a_bounded_number_of_times(
    fabric: NixlFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "METADATA_LOADS_MAX", 2)
    pair = Pair(fabric)
    try:
        pair.admitted()
        pair.admitted()
        with pytest.raises(InvalidRequest, match="2 times"):
            pair.admitted()
    finally:
        pair.close()


def test_memory_registered_again_at_its_address_is_written_again(
    pair: Pair, staging: StagingMemory
) -> None:
    for byte in (1, 2):
        memory = DeviceMemory(pair.memory.ctypes.data, pair.memory.nbytes, pair.memory)
        message, registered = pair.endpoint.register(memory)
        remote, done = remote_of(message), Done()
        pair.peer.admit(remote, message.metadata)
        pair.peer.write(remote, 0, staged(staging, byte), done)
        assert done.result(TIMEOUT_S) is None
        assert pair.memory[0] == byte
        pair.endpoint.unregister(registered)


@pytest.mark.parametrize("is_let_go", [True, False])
@pytest.mark.parametrize("first", [(1, 2), (0, 2), (2, 4), (0, 4)])
def test_memory_that_overlaps_what_was_registered_before_is_written_wherever_it_lies(
    pair: Pair, staging: StagingMemory, first: tuple[int, int], is_let_go: bool
) -> None:
    view = staged(staging, 7)
    for begin, end in (first, (0, 4), (1, 4), (1, 3)):
        part = pair.memory[begin * BUFFER : end * BUFFER]
        message, registered = pair.endpoint.register(
            DeviceMemory(part.ctypes.data, part.nbytes, part)
        )
        remote = remote_of(message)
        pair.peer.admit(remote, message.metadata)
        pair.memory[:] = 0
        for offset_bytes in range(0, part.nbytes, BUFFER):
            done = Done()
            pair.peer.write(remote, offset_bytes, view, done)
            assert done.result(TIMEOUT_S) is None
        assert np.all(part == 7)
        assert np.count_nonzero(pair.memory) == part.nbytes
        if is_let_go:
            pair.endpoint.unregister(registered)


@pytest.mark.parametrize("before", [False, True])
def test_memory_that_overlaps_other_memory_of_its_device_is_refused_and_the_session_goes_on(
    pair: Pair, staging: StagingMemory, before: bool
) -> None:
    """As from a client whose registrations are all of one device, a GPU's for instance."""
    whole = MemoryPiece(pair.memory.ctypes.data, pair.memory.nbytes)
    part = MemoryPiece(whole.address + BUFFER, BUFFER)

    def told(piece: MemoryPiece) -> bytes:
        metadata: bytes = pair.endpoint._call(lambda agent: agent.metadata(agent.register(piece)))
        return metadata

    first, second = (whole, part) if before else (part, whole)
    for piece in (first, first):
        remote = RemoteMemory(piece.address, piece.length_bytes)
        pair.peer.admit(remote, told(piece))
    metadata = told(second)
    with pytest.raises(InvalidRequest, match="overlaps other memory that this session"):
        pair.peer.admit(RemoteMemory(second.address, second.length_bytes), metadata)
    done = Done()
    pair.peer.write(remote, 0, staged(staging, 7), done)
    assert done.result(TIMEOUT_S) is None


def test_a_client_that_has_ended_fails_its_writes_and_the_peer_with_them(
    fabric: NixlFabric, staging: StagingMemory
) -> None:
    stopped = Pair(NixlFabric(staging, "lo", "TLS=tcp", WriteTimeout(TIMEOUT_S, "patience")))
    try:
        remote, message = stopped.register()
        stopped.peer.admit(remote, message.metadata)
        stopped.stand_still(PROMPT_TIMEOUT_S)
        done, later = Done(), Done()
        stopped.peer.write(remote, 0, staged(staging, 7), done)
        error = done.result(TIMEOUT_S)
        assert isinstance(error, DeliveryFailed)
        assert error.message.endswith(f"{PROMPT_TIMEOUT_S:g} s (patience)")
        stopped.peer.write(remote, 0, staged(staging, 7), later)
        assert isinstance(later.result(0), DeliveryFailed)  # at once, in the caller's thread
        with pytest.raises(Unavailable):
            stopped.peer.admit(remote, message.metadata)
        assert "0 transfers" in repr(stopped.peer)
    finally:
        stopped.close()


def test_staging_memory_of_a_write_that_may_go_on_is_never_handed_out_again(
    fabric: NixlFabric, staging: StagingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Pair(NixlFabric(staging, "lo", "TLS=tcp", WriteTimeout(TIMEOUT_S)))
    assert isinstance(stopped.peer, NixlPeer)
    names, close = stopped.peer.names, NixlAgent.close
    held: list[object] = []

    def close_while_held(agent: NixlAgent) -> bool:
        if agent.name == names.server:
            held.append(agent._agent.agent)
        return close(agent)

    monkeypatch.setattr(NixlAgent, "close", close_while_held)
    try:
        remote = stopped.admitted()
        stopped.stand_still(PROMPT_TIMEOUT_S)
        reserved_bytes = staging.reserve(BUFFER)
        view, done = staged(staging, 7), Done()
        lost = staging.offset_of(view)
        stopped.peer.write(remote, 0, view, done)
        assert isinstance(done.result(TIMEOUT_S), DeliveryFailed)
        staging.put(view)
        staging.release(reserved_bytes)
        assert staging.capacity_bytes == 3 * BUFFER
        rest = [staging.take(BUFFER) for _ in range(3)]
        assert lost not in {staging.offset_of(each) for each in rest}
        assert staging.reserve(4 * BUFFER) < 4 * BUFFER
    finally:
        held.clear()
        stopped.close()


def test_a_peer_that_was_lost_says_so_once_before_its_writes_end_and_one_that_was_closed_does_not(
    staging: StagingMemory,
) -> None:
    fabric = NixlFabric(staging, "lo", "TLS=tcp", WriteTimeout(TIMEOUT_S))
    lost, closed = Pair(fabric), Pair(fabric)
    heard: list[str] = []
    ended = threading.Event()

    def end(error: ObjectCacheError | None) -> None:
        heard.append(f"{type(error).__name__}: {error}")
        ended.set()

    try:
        remote = lost.admitted()
        lost.peer.when_broken(lambda: heard.append("broken"))
        closed.peer.when_broken(lambda: heard.append("closed"))
        closed.peer.close()
        lost.stand_still(PROMPT_TIMEOUT_S)
        lost.peer.write(remote, 0, staged(staging, 7), end)
        assert ended.wait(TIMEOUT_S)
        assert heard[0] == "broken"
        assert "DeliveryFailed" in heard[1]
        assert "by a WRITE" in heard[1]
        lost.peer.when_broken(lambda: heard.append("at once"))
        assert heard[2:] == ["at once"]
    finally:
        lost.close()
        closed.close()
        fabric.close()


def test_a_listener_that_fails_keeps_nobody_else_from_being_told(
    staging: StagingMemory,
) -> None:
    fabric = NixlFabric(staging, "lo", "TLS=tcp", WriteTimeout(TIMEOUT_S))
    pair = Pair(fabric)
    remote, told = pair.admitted(), Done()

    def fail(error: ObjectCacheError | None) -> None:
        raise RuntimeError("the loop is closed")

    pair.peer.write(remote, 0, staged(staging, 7), fail)
    pair.peer.write(remote, 0, staged(staging, 7), told)
    assert told.result(TIMEOUT_S) is None  # and the peer goes on
    pair.stand_still()
    last = Done()
    for done in (fail, last):
        pair.peer.write(remote, 0, staged(staging, 7), done)
    pair.peer.close()
    assert isinstance(last.result(TIMEOUT_S), DeliveryFailed)
    fabric.close()
    pair.close()


def test_looks_at_what_does_not_move_grow_rare_and_never_much_later_than_its_end() -> None:
    assert nixl.poll_pause_s(0) == nixl.POLL_PAUSE_S
    assert nixl.poll_pause_s(3600) == nixl.POLL_PAUSE_MAX_S
    pauses = [nixl.poll_pause_s(still_s / 1e5) for still_s in range(2000)]
    assert pauses == sorted(pauses)
    assert all(
        pause_s <= max(nixl.POLL_PAUSE_S, still_s / 1e5 / 8)
        for still_s, pause_s in enumerate(pauses)
    )


def test_a_client_looks_less_often_for_layers_that_come_slowly_and_is_late_by_little() -> None:
    pauses = [nixl_endpoint.look_pause_s(between_s / 1e5) for between_s in range(2000)]
    assert pauses == sorted(pauses)
    assert pauses[0] == nixl_endpoint.LOOK_PAUSE_S
    assert pauses[-1] == nixl_endpoint.LOOK_PAUSE_MAX_S
    assert all(
        pause_s <= max(nixl_endpoint.LOOK_PAUSE_S, between_s / 1e5 / 16)
        for between_s, pause_s in enumerate(pauses)
    )


def test_closing_a_peer_fails_what_is_under_way_and_lets_its_agent_go(
    staging: StagingMemory,
) -> None:
    fabric = NixlFabric(staging, "lo", "TLS=tcp", WriteTimeout(TIMEOUT_S))
    pair = Pair(fabric)
    remote = pair.admitted()
    pair.stand_still()
    descriptors = len(os.listdir("/proc/self/fd"))
    moves = [Done() for _ in range(4)]
    for move in moves:
        pair.peer.write(remote, 0, staged(staging, 7), move)
    pair.peer.close()
    pair.peer.close()
    assert all(isinstance(move.result(TIMEOUT_S), DeliveryFailed) for move in moves)
    fabric.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors  # its sockets are closed
    pair.close()


def test_settings_that_ucx_refuses_are_named(staging: StagingMemory) -> None:
    with pytest.raises(Unavailable, match="NIXL cannot be started"):
        NixlFabric(staging, "no-such-device", "", WriteTimeout(TIMEOUT_S)).open(b"")


def test_several_devices_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(Unavailable, match=r"(lo,eth0).*name them in UCX_NET_DEVICES"):
        NixlAgent("alone", "lo,eth0", "")


def test_an_error_of_the_librarys_does_not_keep_its_agent(staging: StagingMemory) -> None:
    agent = NixlAgent("alone", "lo", "")
    agent.register(MemoryPiece(staging.address, staging.length_bytes))
    here = MemoryPiece(staging.address, 10)
    inner = weakref.ref(agent._agent.agent)
    with pytest.raises(InvalidRequest) as caught:
        agent.start("WRITE", [here], [here], "nobody")
    assert caught.value.__context__ is None
    assert agent.close()
    assert agent.close()
    gc.collect()
    assert inner() is None


def test_an_agent_that_something_still_refers_to_says_that_it_has_not_ended() -> None:
    agent = NixlAgent("alone", "lo", "")
    held = agent._agent.agent
    assert not agent.close()
    assert not agent.close()
    del held


def test_an_endpoint_that_has_ended_registers_nothing_and_says_when_it_ends(
    fabric: NixlFabric,
) -> None:
    pair = Pair(fabric)
    ended: list[str] = []
    pair.endpoint.on_end = lambda: ended.append("yes")
    pair.endpoint.close()
    pair.endpoint.close()
    assert ended == ["yes"]
    with pytest.raises(Unavailable, match="ended"):
        pair.register()
    pair.close()


def test_an_answer_that_makes_no_sense_opens_nothing() -> None:
    endpoint = NixlEndpoint()
    with pytest.raises(Unavailable, match="makes no sense"):
        endpoint.connect(b"\xff", lambda event: None, lambda message: None)
    endpoint.close()


def test_a_process_that_used_an_agent_ends_well() -> None:
    """The host's RDMA drivers and the wheel bring a netlink library each."""
    source = (
        "from objectcache_fabrics.nixl.agent import NixlAgent\n"
        "NixlAgent('alone', 'lo', '').close()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("ucx_settings", "is_said"), [("TLS=none", False), ("TLS=none,LOG_LEVEL=warn", True)]
)
def test_ucx_logs_nothing_unless_its_settings_ask_for_it(ucx_settings: str, is_said: bool) -> None:
    """Its errors name addresses and keys of peers."""
    source = (
        "from objectcache_fabrics.nixl.agent import NixlAgent\n"
        f"NixlAgent('alone', 'lo', {ucx_settings!r})\n"
    )
    environment = {name: value for name, value in os.environ.items() if "UCX" not in name}
    done = subprocess.run(
        [sys.executable, "-c", source],
        check=False,
        timeout=60,
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 1
    assert b"NIXL cannot be started" in done.stderr
    assert (b"ucp_context.c" in done.stdout + done.stderr) == is_said
