"""The storage server as a process, spoken to in its own protocol."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget, OnMissing
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
)
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.buckets import Buckets, ListBuckets, SetLayout
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import (
    DeliveryAccepted,
    DeliveryEnded,
    KvGet,
    KvMatch,
    KvPut,
    Matched,
)
from objectcache_schemas.messages.reads import (
    BodySent,
    CloseObject,
    ObjectOpened,
    OpenObject,
    SendBody,
)
from objectcache_schemas.messages.sessions import (
    CreateSession,
    DeliveryFailure,
    JoinSession,
    LayersReady,
    RegisterTarget,
    ReleaseTarget,
    SessionTicket,
    TargetReleased,
)
from objectcache_schemas.messages.writes import (
    AbortPut,
    CommitPut,
    DeleteObjects,
    PutObject,
    SendData,
)
from objectcache_schemas.operators.server_state import GetHealth, Health
from tests.integration.served import BOUND_S, wait_until
from tests.servers import ServerProcess
from tests.storage_client import (
    EventClient,
    FrameClient,
    StorageClient,
    TargetClient,
    sealed_memory_file,
)

N, L, S = 6, 4, 65_536
KEYS = tuple(f"{index:064x}" for index in range(N))
CHUNKS = np.random.default_rng(3).integers(0, 256, (N, L, S), np.uint8)
LAYERWISE, CHUNKWISE = DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE
SETTINGS = (
    "storage.fragment_bytes=131072",
    "storage.delivery_in_flight_bytes_max=262144",
    "storage.server_in_flight_bytes_max=1048576",
    "storage.layerwise_threshold_bytes=1000000",
    "storage.deliveries_max=8",
    "scheduler.queue_max=0",
)


def command(data_dir: Path, *settings: str) -> list[str]:
    """Command line of a storage server."""
    module = [sys.executable, "-m", "objectcache_storage_server", "--data-dir", str(data_dir)]
    return module + [part for one in settings for part in ("--set", one)]


class StorageProcess:
    """A storage server of this test's own."""

    def __init__(self, data_dir: Path, *settings: str) -> None:
        arguments = ["--data-dir", str(data_dir)]
        arguments += [part for one in settings for part in ("--set", one)]
        log = data_dir / "storage.log"
        self.process = ServerProcess("objectcache_storage_server", arguments, log)
        self.path = self.process.wait_ready()

    def connect(self) -> StorageClient:
        return StorageClient(self.path)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            os.kill(self.process.pid, number)
        return self.process.wait_or_kill()


@pytest.fixture(scope="module", params=["memory", "files"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StorageProcess]:
    with filled(tmp_path_factory.mktemp("d"), f"storage.engine={request.param}") as process:
        yield process


@pytest.fixture
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageProcess]:
    """One that soon cuts whoever takes nothing."""
    stall = "storage.send_stall_timeout_s=1.0"
    with filled(tmp_path_factory.mktemp("d"), "storage.engine=memory", stall) as process:
        yield process


@contextlib.contextmanager
def filled(data_dir: Path, *settings: str) -> Generator[StorageProcess]:
    process = StorageProcess(data_dir, *SETTINGS, *settings)
    try:
        with process.connect() as client:
            client.create_bucket("kv")
            descriptor = Descriptor(KEYS, L, 16, S, CHUNKWISE)
            assert client.kv_put("kv", descriptor.to_bytes(), CHUNKS.tobytes()) == (N, 0)
        yield process
    finally:
        status = process.stop()
    assert status == 0


@pytest.fixture
def client(server: StorageProcess) -> Iterator[StorageClient]:
    """A connection, when nothing is left of the tests before."""
    with server.connect() as client:
        wait_for_nothing_in_flight(client)
        yield client


def wait_for_nothing_in_flight(client: StorageClient) -> None:
    """Who has all of a delivery, or left it, knows that before the server has ended it."""

    def is_nothing() -> bool:
        health = client.ask(GetHealth(), Health)
        return (health.deliveries_in_flight, health.in_flight_bytes) == (0, 0)

    wait_until(is_nothing, "all deliveries to end")


def kv_get(descriptor: Descriptor, identity: str = "root") -> KvGet:
    return KvGet(bucket="kv", identity=identity, request_id="r1", descriptor=descriptor.to_bytes())


def fetch(client: StorageClient, descriptor: Descriptor) -> tuple[DeliveryAccepted, bytes]:
    accepted = client.ask(kv_get(descriptor), DeliveryAccepted)
    length_bytes = accepted.body_bytes
    client.send(SendBody(offset_bytes=0, length_bytes=length_bytes, into_socket=False))
    return accepted, client.receive_bytes(length_bytes)


@pytest.mark.parametrize("layers", [None, (1, 3), (3, 4)])
@pytest.mark.parametrize("mode", [LAYERWISE, CHUNKWISE])
def test_a_body_is_the_payload_in_the_order_asked(
    client: StorageClient, mode: DeliveryMode, layers: tuple[int, int] | None
) -> None:
    accepted, body = fetch(client, Descriptor(KEYS, L, 16, S, mode, layers))
    first, end = layers or (0, L)
    wanted = CHUNKS[:, first:end]
    assert body == (wanted.transpose(1, 0, 2) if mode is LAYERWISE else wanted).tobytes()
    assert (accepted.delivery, accepted.chunk_count) == (mode.value, N)
    assert accepted.layer_bytes == N * S


def test_auto_chooses_by_the_threshold(client: StorageClient) -> None:
    small, _ = fetch(client, Descriptor(KEYS[:3], L, 16, S))
    large, _ = fetch(client, Descriptor(KEYS[:4], L, 16, S))
    assert (small.delivery, large.delivery) == ("chunkwise", "layerwise")


def test_a_body_goes_into_a_socket_that_is_passed(client: StorageClient) -> None:
    accepted = client.ask(kv_get(Descriptor(KEYS, L, 16, S, LAYERWISE)), DeliveryAccepted)
    near, far = socket.socketpair()
    with near, far:
        received: list[bytes] = []
        taker = threading.Thread(
            target=lambda: received.append(far.recv(accepted.body_bytes, socket.MSG_WAITALL))
        )
        taker.start()
        choice = SendBody(offset_bytes=0, length_bytes=accepted.body_bytes, into_socket=True)
        sent = client.ask(choice, BodySent, near.fileno())
        taker.join()
    assert sent.length_bytes == accepted.body_bytes
    assert received == [CHUNKS.transpose(1, 0, 2).tobytes()]
    wait_for_nothing_in_flight(client)


def test_an_accepted_delivery_may_be_let_go_unsent(client: StorageClient) -> None:
    client.ask(kv_get(Descriptor(KEYS, L, 16, S, LAYERWISE)), DeliveryAccepted)
    client.ask(CloseObject(), Done)
    wait_for_nothing_in_flight(client)


def test_a_missing_chunk_is_named_and_truncation_delivers_what_is_before_it(
    client: StorageClient,
) -> None:
    keys = (*KEYS[:2], "missing", *KEYS[2:])
    with pytest.raises(NotFound, match=r"chunk_keys\[2\]") as caught:
        client.ask(kv_get(Descriptor(keys, L, 16, S)), DeliveryAccepted)
    assert caught.value.details.missing_index == 2
    descriptor = Descriptor(keys, L, 16, S, LAYERWISE, on_missing=OnMissing.TRUNCATE)
    accepted, body = fetch(client, descriptor)
    assert accepted.chunk_count == 2
    assert body == CHUNKS[:2].transpose(1, 0, 2).tobytes()
    with pytest.raises(NotFound) as caught:
        fetch(client, Descriptor(("no",), L, 16, S, on_missing=OnMissing.TRUNCATE))
    assert caught.value.details.missing_index == 0


def test_a_chunk_of_another_size_does_not_fit_and_is_named(client: StorageClient) -> None:
    client.put("kv", "odd", b"x" * 100)
    with pytest.raises(InvalidRequest, match="'odd'") as caught:
        client.ask(kv_get(Descriptor((KEYS[0], "odd"), L, 16, S)), DeliveryAccepted)
    assert caught.value.code == "DescriptorMismatch"


def test_match_counts_the_leading_chunks(client: StorageClient) -> None:
    for keys, count in ((KEYS, N), ((*KEYS[:3], "x", *KEYS[3:]), 3), (("x", *KEYS), 0), ((), 0)):
        assert client.ask(KvMatch(bucket="kv", chunk_keys=keys), Matched).matched == count
    with pytest.raises(NotFound):
        client.ask(KvMatch(bucket="nowhere", chunk_keys=KEYS), Matched)


def test_a_layerwise_put_stores_the_same_chunks(client: StorageClient) -> None:
    keys = tuple(f"lw{index}" for index in range(N))
    descriptor = Descriptor(keys, L, 16, S, LAYERWISE)
    payload = CHUNKS.transpose(1, 0, 2).tobytes()
    assert client.kv_put("kv", descriptor.to_bytes(), payload) == (N, 0)
    assert client.kv_put("kv", descriptor.to_bytes(), payload) == (0, N)
    _, body = fetch(client, Descriptor(keys, L, 16, S, CHUNKWISE))
    assert body == CHUNKS.tobytes()


def test_other_bytes_under_a_key_are_a_conflict_and_store_nothing_of_the_request(
    client: StorageClient,
) -> None:
    descriptor = Descriptor(("fresh", KEYS[0]), L, 16, S, CHUNKWISE)
    with pytest.raises(Conflict, match=KEYS[0]):
        client.kv_put("kv", descriptor.to_bytes(), CHUNKS[1:3].tobytes())
    assert client.ask(KvMatch(bucket="kv", chunk_keys=("fresh",)), Matched).matched == 0


@pytest.mark.parametrize(
    ("descriptor", "named"),
    [
        (Descriptor(("a",), 1, 1, 8), "delivery"),
        (Descriptor(("a",), 2, 1, 8, LAYERWISE, (0, 1)), "layers"),
        (Descriptor(("a", "a"), 1, 1, 8, LAYERWISE), "twice"),
        (Descriptor(tuple(map(str, range(4097))), 1, 1, 8, LAYERWISE), "put_chunks_max"),
    ],
)
def test_a_put_that_makes_no_sense_is_refused_before_its_data(
    client: StorageClient, descriptor: Descriptor, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        client.ask(KvPut(bucket="kv", identity="root", descriptor=descriptor.to_bytes()), SendData)


def test_an_aborted_short_or_abandoned_put_leaves_nothing(
    server: StorageProcess, client: StorageClient
) -> None:
    descriptor = Descriptor(("gone1", "gone2"), L, 16, S, CHUNKWISE).to_bytes()
    begin = KvPut(bucket="kv", identity="root", descriptor=descriptor)
    payload = CHUNKS[:2].tobytes()
    client.ask(begin, SendData)
    client.send_data([payload])
    client.ask(AbortPut(), Done)
    client.ask(begin, SendData)
    client.send_data([payload[:-1]])
    with pytest.raises(InvalidRequest, match="ended after"):
        client.ask(CommitPut(), Done)
    with server.connect() as other:
        other.ask(begin, SendData)
        other.socket.sendall(LENGTH.pack(len(payload)) + payload[:1000])
    with server.connect() as other:
        other.ask(begin, SendData)
        with pytest.raises((InvalidRequest, ConnectionError)):
            _send_one_byte_too_many(other, payload)
    for key in ("gone1", "gone2"):
        assert client.ask(KvMatch(bucket="kv", chunk_keys=(key,)), Matched).matched == 0


def _send_one_byte_too_many(client: StorageClient, payload: bytes) -> None:
    client.send_data([payload, b"x"])
    client.ask(CommitPut(), Done)


def test_a_bucket_with_a_layout_checks_gets_and_puts(client: StorageClient) -> None:
    client.create_bucket("laid-out")
    layout = KvLayout(
        num_layers=L, chunk_tokens=16, per_layer_chunk_bytes=S, dtype="u8", fingerprint="m"
    )
    client.ask(SetLayout(bucket="laid-out", layout=layout), Done)
    client.ask(SetLayout(bucket="laid-out", layout=layout), Done)
    with pytest.raises(InvalidRequest, match="num_layers"):
        client.kv_put("laid-out", Descriptor(("a",), 2, 16, S, LAYERWISE).to_bytes(), b"")
    with pytest.raises(InvalidRequest, match="KV layout"):
        client.ask(PutObject(bucket="laid-out", key="a", size_bytes=5), SendData)
    client.ask(PutObject(bucket="laid-out", key="a", size_bytes=None), SendData)
    client.send_data([b"12345"])
    with pytest.raises(InvalidRequest, match="KV layout"):
        client.ask(CommitPut(), Done)
    client.put("laid-out", "a", CHUNKS[0].tobytes())
    client.put("laid-out", "a", CHUNKS[0].tobytes())
    with pytest.raises(Conflict):
        client.put("laid-out", "a", CHUNKS[1].tobytes())


def target_descriptor(
    target_id: bytes, length: int, tag: int = 5, keys: tuple[str, ...] = KEYS
) -> Descriptor:
    target = MemoryTarget(
        transport="shared_memory", target_id=target_id, offset_bytes=0, length_bytes=length, tag=tag
    )
    return Descriptor(keys, L, 16, S, LAYERWISE, rdma_target=target)


def test_a_delivery_into_shared_memory_announces_each_layer_in_order(
    client: StorageClient,
) -> None:
    with TargetClient(client) as session:
        target_id, memory = session.register(N * L * S)
        accepted = client.ask(kv_get(target_descriptor(target_id, N * L * S)), DeliveryAccepted)
        assert (accepted.body_bytes, accepted.layer_bytes) == (0, N * S)
        seen = 0
        while seen < L:
            event = session.event()
            assert isinstance(event, LayersReady)
            assert event.tag == 5
            for layer in range(seen, event.end_layer):
                got = memory[layer * N * S : (layer + 1) * N * S]
                assert got == CHUNKS[:, layer].tobytes()
            seen = event.end_layer
        ended = client.reply(DeliveryEnded)
        assert ended == DeliveryEnded(payload_bytes=N * L * S)
        session.send(ReleaseTarget(target_id=target_id))
        assert session.event() == TargetReleased(target_id=target_id)
        with pytest.raises(NotFound):
            client.ask(kv_get(target_descriptor(target_id, N * L * S)), DeliveryAccepted)


def test_a_target_of_another_identity_or_too_small_or_of_another_transport_is_refused(
    client: StorageClient,
) -> None:
    with TargetClient(client, "alice") as session:
        target_id, _ = session.register(N * L * S - 1)
        with pytest.raises(NotFound):
            client.ask(kv_get(target_descriptor(target_id, 10), "mallory"), DeliveryAccepted)
        with pytest.raises(InvalidRequest, match="length_bytes"):
            client.ask(
                kv_get(target_descriptor(target_id, N * L * S - 1), "alice"), DeliveryAccepted
            )
        other = MemoryTarget(
            transport="pigeon", target_id=target_id, offset_bytes=0, length_bytes=1, tag=1
        )
        with pytest.raises(Unsupported, match=r"pigeon.*shared_memory"):
            client.ask(
                kv_get(Descriptor(KEYS, L, 16, S, rdma_target=other), "alice"), DeliveryAccepted
            )


def test_a_target_dies_with_its_session(client: StorageClient) -> None:
    session = TargetClient(client)
    target_id, _ = session.register(N * L * S)
    session.close()

    def is_dead() -> bool:
        try:
            client.ask(kv_get(target_descriptor(target_id, N * L * S)), DeliveryAccepted)
        except NotFound:
            return True
        ended = client.reply(DeliveryEnded)
        assert ended.error is None or ended.error.code == "NoSuchTarget"
        return False

    wait_until(is_dead, "the target to die with its session")


def test_a_client_that_punches_holes_into_its_target_loses_its_session_and_no_other_does(
    client: StorageClient,
) -> None:
    with TargetClient(client) as other, TargetClient(client) as session:
        target_id, memory = session.register(N * L * S)
        other_id, _ = other.register(N * L * S)
        memory.madvise(mmap.MADV_REMOVE, 0, S)
        with pytest.raises(InvalidRequest, match="holes"):
            client.ask(kv_get(target_descriptor(target_id, N * L * S)), DeliveryAccepted)
        with pytest.raises(EOFError):
            session.event()
        client.ask(kv_get(target_descriptor(other_id, N * L * S)), DeliveryAccepted)
        assert client.reply(DeliveryEnded).error is None


def test_a_client_that_punches_while_it_registers_never_has_the_server_fill_the_holes(
    client: StorageClient,
) -> None:
    length_bytes = 64 << 20
    has_begun = threading.Event()

    def punch_from_the_end(descriptor: int) -> None:
        with mmap.mmap(descriptor, length_bytes) as memory:
            has_begun.set()
            for offset_bytes in range(length_bytes - (1 << 20), 0, -(1 << 20)):
                memory.madvise(mmap.MADV_REMOVE, offset_bytes, 1 << 20)

    descriptor = sealed_memory_file(length_bytes)
    try:
        with TargetClient(client) as session, ThreadPoolExecutor(1) as threads:
            punching = threads.submit(punch_from_the_end, descriptor)
            has_begun.wait()
            session.send(RegisterTarget(length_bytes=length_bytes), descriptor)
            with contextlib.suppress(InvalidRequest):
                session.event()
            punching.result()
        assert os.fstat(descriptor).st_blocks * 512 <= 4 << 20
    finally:
        os.close(descriptor)


def test_a_ticket_is_good_once_and_a_stranger_has_none(client: StorageClient) -> None:
    with TargetClient(client) as session, EventClient(session.ticket.socket_path) as thief:
        thief.send(JoinSession(v=1, ticket=session.ticket.ticket))
        with pytest.raises(AccessDenied):
            thief.event()
    ticket = client.ask(CreateSession(identity="root"), SessionTicket)
    with EventClient(ticket.socket_path) as stranger:
        stranger.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(InvalidRequest, match="not a message"):
            stranger.event()
        with pytest.raises((EOFError, ConnectionError)):
            stranger.receive_bytes(1)


def test_a_slow_client_is_cut_after_the_stall_timeout_and_holds_only_its_grant(
    hasty: StorageProcess,
) -> None:
    with hasty.connect() as client, hasty.connect() as slow:
        accepted = slow.ask(kv_get(Descriptor(KEYS, L, 16, S, LAYERWISE)), DeliveryAccepted)
        assert 0 < client.ask(GetHealth(), Health).in_flight_bytes <= 262_144
        near, far = socket.socketpair()
        with near, far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            choice = SendBody(offset_bytes=0, length_bytes=accepted.body_bytes, into_socket=True)
            slow.send(choice, near.fileno())
            assert client.ask(GetHealth(), Health).in_flight_bytes <= 262_144
            with pytest.raises(EOFError):
                slow.receive_bytes(1)  # the stall timeout cuts it
        _, body = fetch(client, Descriptor(KEYS, L, 16, S, LAYERWISE))
        assert len(body) == N * L * S
        wait_for_nothing_in_flight(client)


def test_a_gateway_that_hangs_up_ends_its_deliveries(
    server: StorageProcess, client: StorageClient
) -> None:
    for _ in range(20):
        leaver = server.connect()
        accepted = leaver.ask(kv_get(Descriptor(KEYS, L, 16, S, LAYERWISE)), DeliveryAccepted)
        length = accepted.body_bytes
        leaver.send(SendBody(offset_bytes=0, length_bytes=length, into_socket=False))
        leaver.receive_bytes(1000)
        leaver.close()
        wait_for_nothing_in_flight(client)


def test_deliveries_over_the_servers_limits_are_told_to_slow_down(
    server: StorageProcess, client: StorageClient
) -> None:
    held = [server.connect() for _ in range(5)]
    try:
        whole = kv_get(Descriptor(KEYS, L, 16, S, LAYERWISE))
        with pytest.raises(Busy, match="server_in_flight_bytes_max"):  # noqa: PT012
            for one in held:
                one.ask(whole, DeliveryAccepted)
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize("plain", [False, True])
def test_deliveries_over_deliveries_max_are_told_to_slow_down(
    server: StorageProcess, client: StorageClient, plain: bool
) -> None:
    held = [server.connect() for _ in range(8)]
    slice_of_one = kv_get(Descriptor(KEYS[:1], L, 16, S, LAYERWISE, (0, 1)))
    try:
        for number, one in enumerate(held):
            of_another = msgspec.structs.replace(slice_of_one, identity=f"tenant-{number}")
            one.ask(of_another, DeliveryAccepted)
        client.send(OpenObject(bucket="kv", key=KEYS[0]) if plain else slice_of_one)
        with pytest.raises(Busy, match="deliveries_max"):
            client.reply(DeliveryAccepted)
        held[0].ask(CloseObject(), Done)
        fetch(client, Descriptor(KEYS[:1], L, 16, S, LAYERWISE, (0, 1)))
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\xff\xff\xff\xff", b"\0\0\0\2\x81\x01"],
)
def test_garbage_ends_its_own_connection_only(
    server: StorageProcess, client: StorageClient, garbage: bytes
) -> None:
    for handshake in (False, True):
        victim = server.connect() if handshake else FrameClient(server.path)
        with victim:
            victim.socket.sendall(garbage)
            with pytest.raises((EOFError, ConnectionError)):
                victim.receive_bytes(1)
    assert client.ask(ListBuckets(), Buckets).buckets


def test_a_gateway_with_other_limits_is_refused(server: StorageProcess) -> None:
    with pytest.raises(InvalidRequest, match="limits"):
        StorageClient(server.path, Limits(put_chunks_max=7))


def test_a_range_outside_an_object_is_refused_and_the_object_let_go(client: StorageClient) -> None:
    client.put("kv", "object", b"0123456789")
    for offset, length in ((0, 11), (-1, 5), (5, -1), (11, 0)):
        client.ask(OpenObject(bucket="kv", key="object"), ObjectOpened)
        client.send(SendBody(offset_bytes=offset, length_bytes=length, into_socket=False))
        with pytest.raises(ObjectCacheError, match="range"):
            client.reply(Done)
    client.ask(OpenObject(bucket="kv", key="object"), ObjectOpened)
    client.send(SendBody(offset_bytes=3, length_bytes=4, into_socket=False))
    assert client.receive_bytes(4) == b"3456"
    client.ask(DeleteObjects(bucket="kv", keys=("object",)), Done)
    with pytest.raises(NotFound):
        client.ask(OpenObject(bucket="kv", key="object"), ObjectOpened)


def test_sigterm_lets_a_delivery_finish_and_then_stops(tmp_path: Path) -> None:
    process = StorageProcess(tmp_path, "storage.engine=memory", *SETTINGS)
    try:
        with process.connect() as client:
            client.create_bucket("kv")
            descriptor = Descriptor(KEYS, L, 16, S, CHUNKWISE)
            client.kv_put("kv", descriptor.to_bytes(), CHUNKS.tobytes())
            accepted = client.ask(kv_get(descriptor), DeliveryAccepted)
            length = accepted.body_bytes
            client.send(SendBody(offset_bytes=0, length_bytes=length, into_socket=False))
            first = client.receive_bytes(1000)
            process.process.signal_stop()
            assert first + client.receive_bytes(length - 1000) == CHUNKS.tobytes()
        assert process.process.wait() == 0
        assert not os.path.exists(process.path)
    finally:
        process.stop(signal.SIGKILL)


def test_a_killed_server_tells_a_target_by_ending_its_session(tmp_path: Path) -> None:
    process = StorageProcess(tmp_path, "storage.engine=memory", *SETTINGS)
    try:
        with process.connect() as client, TargetClient(client) as session:
            process.stop(signal.SIGKILL)
            with pytest.raises((EOFError, ConnectionError)):
                session.receive_bytes(1)
    finally:
        process.stop(signal.SIGKILL)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("storage.engine=tape", "local, files or memory"),
        ("storage.nothing=1", "storage.nothing"),
        ("storage.deliveries_max=many", "deliveries_max"),
    ],
)
def test_wrong_settings_stop_it_with_one_line(tmp_path: Path, setting: str, named: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "objectcache_storage_server"),
            *("--data-dir", str(tmp_path), "--set", setting),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_failure_event_and_the_outcome_agree_when_the_target_is_released_mid_delivery(
    client: StorageClient,
) -> None:
    with TargetClient(client) as session:
        target_id, _ = session.register(N * L * S)
        client.send(kv_get(target_descriptor(target_id, N * L * S)))
        session.send(ReleaseTarget(target_id=target_id))
        try:
            client.reply(DeliveryAccepted)
        except NotFound:
            return  # the release came first
        ended = client.reply(DeliveryEnded)
        events = [session.event()]
        while not isinstance(events[-1], TargetReleased):
            events.append(session.event())
        failures = [event for event in events if isinstance(event, DeliveryFailure)]
        assert bool(failures) == (ended.error is not None)
