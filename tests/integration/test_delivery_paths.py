"""The five paths (paper, section 4.1) over HTTP and real servers: the same bytes, as asked for."""

from __future__ import annotations

import dataclasses
import mmap
import os
import secrets
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import (
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
    WireError,
)
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.leases import EndLease, LeaseTarget, TargetLeased
from objectcache_schemas.messages.sessions import (
    DeliveryFailure,
    LayersReady,
    ReleaseTarget,
    TargetReleased,
)
from objectcache_schemas.operators.engine_status import EngineState, GetEngineStatus
from objectcache_schemas.operators.traces import GetTraces, Traces
from objectcache_schemas.records import BucketPolicy, StoredEncoding
from tests.s3_clients import (
    Answer,
    call,
    open_socket,
    receive_answer,
    s3_client,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient, TargetClient

LAYERS, SLICE_BYTES = 5, 40_961
CHUNK_BYTES = LAYERS * SLICE_BYTES
KEYS = ("first", "second", "third")
OFFSET_BYTES, TAIL_BYTES = 5000, 3000
AUTO, LAYERWISE, CHUNKWISE = DeliveryMode.AUTO, DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE
NOTHING: Mapping[str, object] = {}
LARGE_SLICE_BYTES = 8 << 20
LARGE_BYTES = LAYERS * LARGE_SLICE_BYTES
LARGE = Descriptor(("large",), LAYERS, 16, LARGE_SLICE_BYTES, CHUNKWISE)


def put_chunks(server: RunningServer, bucket: str, asked: Descriptor, payload: bytes) -> None:
    head = asked.to_bytes()
    body = len(head).to_bytes(4, "big") + head + payload
    assert call(server, "POST", f"/{bucket}?kv-put", body).status == 200


@pytest.fixture(params=[None, StoredEncoding.PLANES_ZSTD], ids=["plain", "encoded"])
def payload(request: pytest.FixtureRequest, server: RunningServer, bucket: str) -> bytes:
    """The bytes of `KEYS`, chunk after chunk, which are stored in `bucket`: as they are or encoded,
    which is the same to all who read them.
    """
    data = secrets.token_bytes(len(KEYS) * CHUNK_BYTES)
    if request.param is not None:
        data = data.translate(bytes(byte & 15 for byte in range(256)))
        policy = BucketPolicy(encoding=request.param)
        with StorageClient(server.run_dir / "storage.sock") as client:
            client.ask(SetPolicy(bucket=bucket, policy=policy), Done)
    put_chunks(server, bucket, Descriptor(KEYS, LAYERS, 16, SLICE_BYTES, CHUNKWISE), data)
    with StorageClient(server.run_dir / "storage.sock") as client:
        status = client.ask(GetEngineStatus(), EngineState).status
    assert request.param is None or 0 < status.encoded_bytes < status.decoded_bytes
    return data


def layerwise(payload: bytes, chunk_count: int) -> bytes:
    starts = [chunk * CHUNK_BYTES for chunk in range(chunk_count)]
    return b"".join(
        payload[start + layer * SLICE_BYTES : start + (layer + 1) * SLICE_BYTES]
        for layer in range(LAYERS)
        for start in starts
    )


class Session:
    """A client's session with one target, whose part for a payload begins in mid-page."""

    def __init__(self, target: TargetClient, target_id: bytes, memory: mmap.mmap) -> None:
        self.client, self.target_id, self.memory = target, target_id, memory

    def rdma_target(self, length_bytes: int, tag: int = 7) -> MemoryTarget:
        return MemoryTarget(
            transport="shared_memory",
            target_id=self.target_id,
            offset_bytes=OFFSET_BYTES,
            length_bytes=length_bytes,
            tag=tag,
        )

    def end_event(self) -> LayersReady | DeliveryFailure:
        """The event that ends a delivery of all layers."""
        while True:
            event = self.client.event()
            if isinstance(event, DeliveryFailure):
                return event
            assert isinstance(event, LayersReady), event
            if event.end_layer == LAYERS:
                return event

    def release(self) -> None:
        self.client.send(ReleaseTarget(target_id=self.target_id))
        assert self.client.event() == TargetReleased(target_id=self.target_id)


@contextmanager
def session_of(
    storage: StorageClient, payload_bytes: int, identity: str = "root"
) -> Generator[Session]:
    with TargetClient(storage, identity) as client:
        target_id, memory = client.register(OFFSET_BYTES + payload_bytes + TAIL_BYTES)
        yield Session(client, target_id, memory)


@pytest.fixture
def storage(server: RunningServer) -> Iterator[StorageClient]:
    with StorageClient(server.run_dir / "storage.sock") as client:
        yield client


@pytest.fixture
def session(storage: StorageClient) -> Iterator[Session]:
    with session_of(storage, len(KEYS) * CHUNK_BYTES) as opened:
        yield opened


def kv_get(
    server: RunningServer, bucket: str, asked: Descriptor, path: str | None = None
) -> Answer:
    headers = {} if path is None else {"x-objectcache-path": path}
    return call(server, "POST", f"/{bucket}?kv-get", asked.to_bytes(), headers)


def descriptor(
    chunk_count: int, delivery: DeliveryMode = AUTO, target: MemoryTarget | None = None
) -> Descriptor:
    return Descriptor(
        KEYS[:chunk_count], LAYERS, 16, SLICE_BYTES, delivery=delivery, rdma_target=target
    )


def message_of(answer: Answer) -> str:
    return answer.xml.findtext("Message") or ""


# --- all five, forced or not ---------------------------------------------------------------------


def test_a_plain_get_is_s3tcp_forced_or_not(
    server: RunningServer, bucket: str, payload: bytes
) -> None:
    for headers in ({}, {"x-objectcache-path": "s3tcp"}):
        answer = call(server, "GET", f"/{bucket}/first", headers=headers)
        assert answer.body == payload[:CHUNK_BYTES]
        assert answer.headers["x-objectcache-path"] == "s3tcp"
        assert answer.headers["x-objectcache-transport"] == "tcp"


@pytest.mark.parametrize(
    ("forced", "chunk_count", "delivery", "taken", "mode"),
    [
        ("direct", 1, AUTO, "direct", None),
        ("direct", 1, LAYERWISE, "direct", LAYERWISE),
        (None, 1, CHUNKWISE, "direct", CHUNKWISE),
        ("buffer", 1, AUTO, "buffer", CHUNKWISE),
        ("buffer", 1, LAYERWISE, "buffer", LAYERWISE),
        ("batch", 3, AUTO, "batch", CHUNKWISE),
        (None, 3, CHUNKWISE, "batch", CHUNKWISE),
        ("batch", 1, AUTO, "batch", CHUNKWISE),
        ("agg", 3, AUTO, "agg", LAYERWISE),
        (None, 3, LAYERWISE, "agg", LAYERWISE),
        ("agg", 1, AUTO, "agg", LAYERWISE),
    ],
)
def test_every_path_into_a_target_delivers_its_payload_and_says_its_name(
    server: RunningServer,
    bucket: str,
    payload: bytes,
    session: Session,
    forced: str | None,
    chunk_count: int,
    delivery: DeliveryMode,
    taken: str,
    mode: DeliveryMode | None,
) -> None:
    length_bytes = chunk_count * CHUNK_BYTES
    asked = descriptor(chunk_count, delivery, session.rdma_target(length_bytes))
    answer = kv_get(server, bucket, asked, forced)
    assert answer.status == 200
    assert answer.headers["x-objectcache-path"] == taken
    assert answer.headers["x-objectcache-transport"] == "shared_memory"
    assert msgspec.msgpack.decode(answer.body) == {
        "v": 1,
        "chunk_count": chunk_count,
        "payload_bytes": length_bytes,
    }
    if mode is not None:
        assert answer.headers["x-objectcache-delivery"] == mode.value
    in_layers = answer.headers["x-objectcache-delivery"] == "layerwise"
    wanted = layerwise(payload, chunk_count) if in_layers else payload[:length_bytes]
    assert session.end_event() == LayersReady(tag=7, end_layer=LAYERS)
    end_bytes = OFFSET_BYTES + length_bytes
    assert session.memory[OFFSET_BYTES:end_bytes] == wanted
    assert not any(session.memory[:OFFSET_BYTES])
    assert not any(session.memory[end_bytes:])
    session.release()


@pytest.mark.parametrize(
    ("forced", "chunk_count", "delivery", "taken"),
    [
        ("batch", 3, AUTO, "batch"),
        ("agg", 3, AUTO, "agg"),
        (None, 3, LAYERWISE, "agg"),
        (None, 1, CHUNKWISE, "batch"),
        (None, 1, LAYERWISE, "agg"),
    ],
)
def test_a_prefix_in_the_response_body_is_batch_or_agg_over_tcp(
    server: RunningServer,
    bucket: str,
    payload: bytes,
    forced: str | None,
    chunk_count: int,
    delivery: DeliveryMode,
    taken: str,
) -> None:
    answer = kv_get(server, bucket, descriptor(chunk_count, delivery), forced)
    assert answer.headers["x-objectcache-path"] == taken
    assert answer.headers["x-objectcache-transport"] == "tcp"
    in_layers = taken == "agg"
    assert answer.headers["x-objectcache-delivery"] == ("layerwise" if in_layers else "chunkwise")
    whole = payload[: chunk_count * CHUNK_BYTES]
    assert answer.body == (layerwise(payload, chunk_count) if in_layers else whole)


def test_the_header_form_takes_a_path_too(
    server: RunningServer, bucket: str, payload: bytes
) -> None:
    headers = {
        "x-objectcache-descriptor": descriptor(3).to_header(),
        "x-objectcache-path": "agg",
    }
    answer = call(server, "GET", f"/{bucket}/third", headers=headers)
    assert answer.headers["x-objectcache-path"] == "agg"
    assert answer.body == layerwise(payload, 3)


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "chunk_count", "delivery", "has_target", "why"),
    [
        ("agg", 2, CHUNKWISE, False, "agg is layerwise, the descriptor's delivery is chunkwise"),
        ("batch", 2, LAYERWISE, True, "batch is chunkwise, the descriptor's delivery is layerwise"),
        ("direct", 2, AUTO, True, "use agg or batch"),
        ("buffer", 2, AUTO, True, "use agg or batch"),
        ("direct", 1, AUTO, False, "rdma_target"),
        ("buffer", 1, AUTO, False, "rdma_target"),
        ("s3tcp", 1, AUTO, False, "plain GET"),
        ("fast", 1, AUTO, False, "s3tcp, buffer, direct, batch, agg"),
    ],
)
def test_a_path_that_cannot_be_taken_is_a_400_with_the_remedy(
    server: RunningServer,
    bucket: str,
    payload: bytes,
    session: Session,
    path: str,
    chunk_count: int,
    delivery: DeliveryMode,
    has_target: bool,
    why: str,
) -> None:
    target = session.rdma_target(len(payload)) if has_target else None
    answer = kv_get(server, bucket, descriptor(chunk_count, delivery, target), path)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert why in message_of(answer)
    assert not any(session.memory[:])


@pytest.mark.parametrize("path", ["buffer", "direct", "batch", "agg", "fast"])
def test_a_plain_get_that_forces_another_path_is_a_400(
    server: RunningServer, bucket: str, payload: bytes, path: str
) -> None:
    answer = call(server, "GET", f"/{bucket}/first", headers={"x-objectcache-path": path})
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert "x-objectcache-path" in message_of(answer)


def test_a_staged_delivery_into_anothers_target_or_a_short_one_is_refused(
    server: RunningServer, bucket: str, payload: bytes, storage: StorageClient
) -> None:
    with session_of(storage, CHUNK_BYTES, "mallory") as stranger:
        target = stranger.rdma_target(CHUNK_BYTES)
        answer = kv_get(server, bucket, descriptor(1, target=target), "buffer")
        assert (answer.status, answer.code) == (404, "NoSuchTarget")
        assert not any(stranger.memory[:])
    with session_of(storage, CHUNK_BYTES) as own:
        for target in (own.rdma_target(CHUNK_BYTES - 1), own.rdma_target(CHUNK_BYTES + 9000)):
            answer = kv_get(server, bucket, descriptor(1, target=target), "buffer")
            assert (answer.status, answer.code) == (400, "InvalidDescriptor")
            assert "length_bytes" in message_of(answer)
        assert not any(own.memory[:])
        own.release()


def test_a_staged_delivery_of_a_missing_chunk_is_an_ordinary_miss(
    server: RunningServer, bucket: str, session: Session
) -> None:
    asked = descriptor(1, target=session.rdma_target(CHUNK_BYTES))
    answer = kv_get(server, bucket, asked, "buffer")
    assert (answer.status, answer.code) == (404, "NoSuchKey")
    session.release()


# --- the lease behind the Buffer path ------------------------------------------------------------


def lease_of(session: Session, changes: Mapping[str, object] = NOTHING) -> LeaseTarget:
    target = session.rdma_target(CHUNK_BYTES)
    request = LeaseTarget(
        identity="root",
        transport=target.transport,
        target_id=target.target_id,
        offset_bytes=target.offset_bytes,
        length_bytes=target.length_bytes,
        tag=target.tag,
        payload_bytes=CHUNK_BYTES,
        first_layer=1,
        end_layer=LAYERS,
    )
    return msgspec.structs.replace(request, **changes)


def take_lease(storage: StorageClient, request: LeaseTarget) -> mmap.mmap:
    """The whole file behind a lease."""
    storage.send(request)
    data, descriptors, _, _ = socket.recv_fds(storage.socket, 4, 1)
    (descriptor,) = descriptors
    try:
        reply = msgspec.msgpack.decode(storage.receive_bytes(int.from_bytes(data, "big")))
        assert reply == {"op": TargetLeased.__name__}
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def test_a_lease_lends_the_targets_own_memory_and_its_end_is_announced(
    storage: StorageClient, session: Session
) -> None:
    memory = take_lease(storage, lease_of(session))
    memory[OFFSET_BYTES : OFFSET_BYTES + 5] = b"bytes"
    storage.ask(EndLease(), Done)
    assert session.end_event() == LayersReady(tag=7, end_layer=LAYERS)
    assert session.memory[OFFSET_BYTES : OFFSET_BYTES + 5] == b"bytes"
    memory = take_lease(storage, lease_of(session))
    cut = WireError("DeliveryFailed", "cut")
    storage.ask(EndLease(error=cut), Done)
    assert session.end_event() == DeliveryFailure(tag=7, failed_layer=1, error=cut)
    session.release()


def test_a_gateway_that_hangs_up_ends_its_lease_and_leaves_the_target_usable(
    server: RunningServer, storage: StorageClient, session: Session
) -> None:
    with StorageClient(server.run_dir / "storage.sock") as gateway:
        take_lease(gateway, lease_of(session))
    event = session.end_event()
    assert isinstance(event, DeliveryFailure)
    assert event.error.code == "DeliveryFailed"
    take_lease(storage, lease_of(session))
    storage.ask(EndLease(), Done)
    session.end_event()
    session.release()


def test_a_released_target_is_let_go_only_when_the_gateway_has_stopped(
    server: RunningServer, session: Session
) -> None:
    with StorageClient(server.run_dir / "storage.sock") as gateway:
        take_lease(gateway, lease_of(session))
        session.client.send(ReleaseTarget(target_id=session.target_id))
        with pytest.raises(NotFound, match="released"):
            gateway.reply(Done)
        session.client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            session.client.socket.recv(1, socket.MSG_PEEK)
        session.client.socket.settimeout(20.0)
        gateway.send(EndLease())
        event = session.client.event()
        assert isinstance(event, DeliveryFailure)
        assert event.error.code == "NoSuchTarget"
        assert session.client.event() == TargetReleased(target_id=session.target_id)
        with pytest.raises(EOFError):
            gateway.receive_bytes(1)


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({"identity": "mallory"}, NotFound, "not registered"),
        ({"target_id": bytes(16)}, NotFound, "not registered"),
        ({"target_id": b"short"}, InvalidRequest, "16 bytes"),
        ({"transport": "rdma"}, Unsupported, "there are shared_memory, nixl, verbs"),
        ({"payload_bytes": CHUNK_BYTES + 1}, InvalidRequest, "length_bytes"),
        ({"offset_bytes": -1}, InvalidRequest, "offset_bytes"),
        ({"offset_bytes": 1 << 62}, InvalidRequest, "offset_bytes"),
    ],
)
def test_a_lease_that_may_not_be_is_refused_and_the_connection_goes_on(
    storage: StorageClient,
    session: Session,
    changes: dict[str, object],
    kind: type[ObjectCacheError],
    why: str,
) -> None:
    with pytest.raises(kind, match=why):
        storage.ask(lease_of(session, changes), TargetLeased)
    take_lease(storage, lease_of(session))
    storage.ask(EndLease(), Done)
    session.end_event()
    session.release()


# --- deliveries that do not end well -------------------------------------------------------------


@pytest.fixture
def lone_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of the test's own, with one large chunk in the bucket `kv-large`."""
    with start_server(tmp_path / "data") as running:
        client = s3_client(running)
        client.create_bucket(Bucket="kv-large")
        client.close()
        put_chunks(running, "kv-large", LARGE, bytes(LARGE_BYTES))
        yield running


def begin_staged(server: RunningServer, target: MemoryTarget) -> socket.socket:
    """A staged delivery of the large chunk, once its response has begun."""
    body = dataclasses.replace(LARGE, rdma_target=target).to_bytes()
    headers = signed_headers(
        server, "POST", "/kv-large?kv-get", body, {"x-objectcache-path": "buffer"}
    ) | {"Content-Length": str(len(body))}
    connection = open_socket(server)
    send_head(connection, "POST", "/kv-large?kv-get", headers)
    connection.sendall(body)
    begun = connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL)
    assert begun == b"HTTP/1.1 200"
    return connection


def check_usable(server: RunningServer, session: Session) -> None:
    """A staged delivery into the same memory comes whole, and the target can be released."""
    session.memory[:] = b"\1" * len(session.memory)
    asked = dataclasses.replace(LARGE, rdma_target=session.rdma_target(LARGE_BYTES))
    answer = kv_get(server, "kv-large", asked, "buffer")
    assert msgspec.msgpack.decode(answer.body)["payload_bytes"] == LARGE_BYTES
    assert session.end_event() == LayersReady(tag=7, end_layer=LAYERS)
    end_bytes = OFFSET_BYTES + LARGE_BYTES
    assert session.memory[OFFSET_BYTES:end_bytes] == bytes(LARGE_BYTES)
    assert session.memory[end_bytes:] == b"\1" * TAIL_BYTES
    session.release()


def test_a_gateway_that_is_killed_while_it_stages_leaves_the_target_usable(
    lone_server: RunningServer,
) -> None:
    with (
        StorageClient(lone_server.run_dir / "storage.sock") as storage,
        session_of(storage, LARGE_BYTES) as session,
    ):
        with begin_staged(lone_server, session.rdma_target(LARGE_BYTES)):
            lone_server.kill_gateway()
            session.end_event()  # whichever it is: it may have been done already
        lone_server.restart_gateway()
        check_usable(lone_server, session)


def test_a_client_that_hangs_up_while_its_object_is_staged_ends_the_delivery(
    lone_server: RunningServer,
) -> None:
    with (
        StorageClient(lone_server.run_dir / "storage.sock") as storage,
        session_of(storage, LARGE_BYTES) as session,
    ):
        begin_staged(lone_server, session.rdma_target(LARGE_BYTES)).close()
        session.end_event()
        check_usable(lone_server, session)


def test_a_client_that_releases_its_target_while_it_is_staged_gets_its_memory_back(
    lone_server: RunningServer,
) -> None:
    with StorageClient(lone_server.run_dir / "storage.sock") as storage:
        with (
            session_of(storage, LARGE_BYTES) as session,
            begin_staged(lone_server, session.rdma_target(LARGE_BYTES)) as connection,
        ):
            session.client.send(ReleaseTarget(target_id=session.target_id))
            events = [session.client.event()]
            while not isinstance(events[-1], TargetReleased):
                events.append(session.client.event())
            outcome = msgspec.msgpack.decode(receive_answer(connection).body)
            codes = [event.error.code for event in events if isinstance(event, DeliveryFailure)]
            assert codes == ([outcome["error_code"]] if "error_code" in outcome else [])
        with session_of(storage, LARGE_BYTES) as another:
            check_usable(lone_server, another)


# --- ids -----------------------------------------------------------------------------------------


def test_a_clients_request_id_is_adopted_in_answers_and_errors(
    server: RunningServer, bucket: str, payload: bytes
) -> None:
    headers = {"x-objectcache-request-id": "step-7_a.B"}
    for answer in (
        call(server, "GET", f"/{bucket}/first", headers=headers),
        call(server, "POST", f"/{bucket}?kv-get", descriptor(2).to_bytes(), headers),
        call(server, "GET", f"/{bucket}/absent", headers=headers),
    ):
        assert answer.headers["x-objectcache-request-id"] == "step-7_a.B"
        assert answer.headers["x-amz-request-id"] == "step-7_a.B"
    assert answer.xml.findtext("RequestId") == "step-7_a.B"


@pytest.mark.parametrize("text", ["two words", "x" * 65, "<id>", "id=1"])
def test_another_id_is_replaced_by_the_gateways_own(
    server: RunningServer, bucket: str, text: str
) -> None:
    headers = {"x-objectcache-request-id": text}
    answer = call(server, "GET", f"/{bucket}/absent", headers=headers)
    made = answer.headers["x-objectcache-request-id"]
    assert len(made) == 16
    assert answer.xml.findtext("RequestId") == made


def test_what_the_client_says_of_its_request_reaches_the_trace(
    server: RunningServer, bucket: str, payload: bytes, storage: StorageClient
) -> None:
    word = secrets.token_hex(6)
    of_prefix = {
        "x-objectcache-request-id": f"prefix-{word}",
        "x-objectcache-client-seconds": "1.25",
        "x-objectcache-path": "agg",
    }
    call(server, "POST", f"/{bucket}?kv-get", descriptor(2).to_bytes(), of_prefix)
    of_object = {
        "x-objectcache-request-id": f"object-{word}",
        "x-objectcache-client-seconds": "2.5",
    }
    call(server, "GET", f"/{bucket}/first", headers=of_object)
    told: list[tuple[str, str, float]] = []
    for name in ("prefix", "object"):
        (trace,) = storage.ask(GetTraces(request_id=f"{name}-{word}"), Traces).traces
        seconds = {phase.name: phase.seconds for phase in trace.phases}
        told.append((trace.path, trace.transport, seconds["client"]))
    assert told == [("agg", "tcp", 1.25), ("s3tcp", "tcp", 2.5)]
