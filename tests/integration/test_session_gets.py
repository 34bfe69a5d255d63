"""Gets over a session itself: who may, when not any more, and what ends them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from objectcache import (
    AccessDenied,
    Client,
    DeliveryFailed,
    InvalidRequest,
    KvLayout,
    NotFound,
    Unavailable,
)
from objectcache.channel.requests import open_session
from objectcache.channel.responses import SessionReply, parse_reply
from objectcache.kv_bucket import KvBucket
from objectcache.sessions.target_session import own_host_id
from objectcache_schemas.accounts import Access
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.buckets import Bucket, GetBucket
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.kv import DeliveryAccepted, DeliveryEnded, KvGet, ReadPass
from objectcache_schemas.messages.sessions import (
    CancelGet,
    GetBegun,
    GetEnded,
    GetPrefix,
    LayersAwaited,
    LayersReady,
    PassGiven,
    SessionTicket,
)
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory
from objectcache_schemas.operators.server_state import GetHealth, Health
from objectcache_schemas.operators.traces import GetTraces, Traces
from tests.integration.served import wait_until
from tests.integration.tenants import Tenant, grant, new_tenant
from tests.relay.relays import RunningRelay
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient, TargetClient

LAYERS = 24
LAYOUT = KvLayout(
    num_layers=LAYERS,
    chunk_tokens=16,
    per_layer_chunk_bytes=4096,
    dtype="uint8",
    fingerprint="passed",
)
COUNT = 12
SLOW_BYTES_PER_S = 65_536.0  # the lowest there is: the payload takes 18 s, its first layer 0.75 s
LONG_COUNT = 100  # whose payload takes 150 s then
BOUND_S = 30.0


def client_of(tenant: Tenant) -> Client:
    pair = tenant.credentials
    return Client(
        tenant.server.endpoint,
        access_key=pair.access_key,
        secret_key=pair.secret_key,
        transport="shared_memory",
    )


class Engine:
    """A client with a stored prefix, which counts the requests that it makes over HTTP."""

    def __init__(self, tenant: Tenant, bucket: str = "") -> None:
        self.client = client_of(tenant)
        self.requests = 0
        channel = self.client._core.channel
        opening = channel.open

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return opening(*arguments)

        channel.open = counted  # type: ignore[method-assign, assignment]
        if bucket:
            self.bucket = KvBucket(self.client._core, bucket, LAYOUT)
        else:
            self.bucket = self.client.kv_bucket(tenant.new_bucket(), LAYOUT, create=True)
        self.keys = self.bucket.chunk_keys(np.arange(COUNT * LAYOUT.chunk_tokens))
        shape = (COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
        self.chunks = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
        if not bucket:
            self.bucket.put(self.keys, self.chunks, transport="body")

    def fetch(self) -> int:
        """Fetch and check all of it; returns how many requests that took."""
        before = self.requests
        with self.bucket.fetch(self.keys, delivery="layerwise") as delivery:
            for layer, kv in delivery:
                assert np.array_equal(kv, self.chunks[:, layer])
        assert delivery.path == "agg"
        assert delivery.request_id
        return self.requests - before

    def fetch_when_served(self) -> int:
        """The same, once the storage server has started again."""
        deadline_s = time.monotonic() + BOUND_S
        while True:
            try:
                return self.fetch()
            except Unavailable:
                assert time.monotonic() < deadline_s

    def fetch_twice(self) -> int:
        """Requests of the second of two fetches, the first of which may be refused a pass."""
        self.fetch()
        return self.fetch()

    def wait_denied(self) -> None:
        """The session serves nothing more at once; over HTTP the gateway has to hear of it."""

        def is_denied() -> bool:
            try:
                assert self.fetch() > 0
            except AccessDenied:
                return True
            return False

        wait_until(is_denied, "the gateway to hear of the change")


def under_way(storage: StorageClient) -> list[str]:
    """The request ids of the gets that run or wait for their turn."""
    traces = storage.ask(GetTraces(limit=100), Traces).traces
    return [trace.request_id for trace in traces if trace.duration_s is None]


@pytest.fixture
def tenant(server: RunningServer) -> Tenant:
    return new_tenant(server, "engine")


@pytest.fixture
def engine(tenant: Tenant) -> Iterator[Engine]:
    engine = Engine(tenant)
    with engine.client:
        yield engine


def test_the_first_get_goes_over_http_and_those_after_it_over_the_session(engine: Engine) -> None:
    assert engine.fetch_twice() == 0
    assert [engine.fetch() for _ in range(3)] == [0, 0, 0]


def test_options_and_refusals_are_those_of_any_get(engine: Engine) -> None:
    engine.fetch()
    before = engine.requests
    with engine.bucket.fetch(engine.keys, layers=(2, 4), delivery="chunkwise") as delivery:
        part = delivery.wait()
    assert np.array_equal(part, engine.chunks[:, 2:4].transpose(1, 0, 2))
    missing = [*engine.keys, "0" * 64]
    with pytest.raises(NotFound) as caught:
        engine.bucket.fetch(missing)
    assert caught.value.details.missing_index == COUNT
    with engine.bucket.fetch(missing, on_missing="truncate") as delivery:
        assert delivery.chunk_count == COUNT
        delivery.wait()
    with pytest.raises(NotFound, match="profile"):
        engine.bucket.fetch(engine.keys, model="nosuch")
    assert engine.requests == before


def test_a_key_that_is_revoked_gets_nothing_more_from_its_session(
    tenant: Tenant, engine: Engine
) -> None:
    assert engine.fetch_twice() == 0
    tenant.change_key(enabled=False)
    engine.wait_denied()


def test_a_change_of_other_accounts_costs_a_request_and_nothing_else(
    server: RunningServer, engine: Engine
) -> None:
    assert engine.fetch_twice() == 0
    new_tenant(server, "somebody")
    assert engine.fetch_twice() == 0


def test_a_bucket_that_was_deleted_and_made_anew_is_asked_for_over_http(
    tenant: Tenant, engine: Engine
) -> None:
    assert engine.fetch_twice() == 0
    for key in engine.keys:
        assert tenant.call("DELETE", f"/{engine.bucket.name}/{key}").status == 204
    assert tenant.call("DELETE", f"/{engine.bucket.name}").status == 204
    with pytest.raises(NotFound) as caught:
        engine.fetch()
    assert caught.value.code == "NoSuchBucket"
    engine.client.kv_bucket(engine.bucket.name, LAYOUT, create=True)
    before = engine.requests
    with pytest.raises(NotFound) as caught:
        engine.fetch()
    assert (caught.value.code, engine.requests - before) == ("NoSuchKey", 1)


def test_a_grant_that_was_taken_back_and_one_of_a_prefix_give_no_pass(
    server: RunningServer, engine: Engine
) -> None:
    name = engine.bucket.name
    with StorageClient(server.run_dir / "storage.sock") as storage:
        created_s = storage.ask(GetBucket(name=name), Bucket).info.created_s

    def granted(prefix: str) -> Any:
        whole = grant(name, Access.READ, prefix=prefix)
        return (msgspec.structs.replace(whole, bucket_created_s=created_s),)

    reader = new_tenant(server, "reader", grants=granted(""))
    other = Engine(reader, name)
    with other.client:
        assert other.fetch_twice() == 0
        reader.change_user(grants=())
        other.wait_denied()
        prefixes = tuple(granted(digit)[0] for digit in "0123456789abcdef")
        reader.change_user(grants=prefixes)  # every key, but not the bucket
        assert other.fetch_twice() == 1


def test_a_delivery_that_is_closed_early_ends_at_the_server_and_frees_its_target(
    engine: Engine,
) -> None:
    engine.fetch()
    size_bytes = COUNT * LAYOUT.chunk_bytes
    with closing(engine.client.shared_memory_target(size_bytes)) as target:
        for _ in range(3):
            with engine.bucket.fetch(
                engine.keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S, target=target
            ) as delivery:
                delivery.wait_layer(0)
            assert not delivery.progress.complete
        with engine.bucket.fetch(engine.keys, delivery="layerwise", target=target) as delivery:
            assert np.array_equal(delivery.wait(), engine.chunks.transpose(1, 0, 2))


def test_a_get_that_is_given_up_while_it_waits_for_its_turn_lets_go_of_it(tmp_path: Path) -> None:
    bounds = ("scheduler.tenant_deliveries_max=1", "scheduler.queue_timeout_s=600")
    fragment = "storage.fragment_bytes=65536"  # a get of one alone would have another turn
    with start_server(tmp_path, *bounds, fragment, "storage.nixl=off") as server:
        engine = Engine(new_tenant(server))
        keys = [f"long-{number}" for number in range(LONG_COUNT)]
        with engine.client, StorageClient(server.run_dir / "storage.sock") as storage:
            engine.bucket.put(keys, np.zeros((LONG_COUNT, *engine.chunks.shape[1:]), np.uint8))
            assert engine.fetch_twice() == 0
            with engine.bucket.fetch(
                keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S
            ) as running:
                before = engine.requests
                with pytest.raises(Unavailable):
                    engine.bucket.fetch(
                        engine.keys, delivery="layerwise", transport="shared_memory", timeout_s=0.3
                    )
                assert engine.requests == before
                wait_until(lambda: len(under_way(storage)) == 1, "the get to let go of its turn")
                assert under_way(storage) == [running.request_id]
                assert not running.progress.complete
            assert engine.fetch() == 0


@pytest.mark.parametrize("setting", ["storage.session_pass_s=0", "gateway.audit_log=audit.log"])
def test_every_get_goes_over_http_where_sessions_are_given_no_pass(
    tmp_path: Path, setting: str
) -> None:
    """storage.session_pass_s, and a server whose audit log is to name every request."""
    setting = setting.replace("audit.log", str(tmp_path / "audit.log"))
    with start_server(tmp_path / "data", setting, "storage.nixl=off") as server:
        engine = Engine(new_tenant(server))
        with engine.client:
            assert engine.fetch_twice() == 1


def test_a_pass_ends_with_its_time(tmp_path: Path) -> None:
    """storage.session_pass_s"""
    with start_server(tmp_path, "storage.session_pass_s=1", "storage.nixl=off") as server:
        engine = Engine(new_tenant(server))
        with engine.client:
            wait_until(lambda: engine.fetch() == 0, "a pass")
            wait_until(lambda: engine.fetch() > 0, "its end")
            wait_until(lambda: engine.fetch() == 0, "another pass")


def test_a_storage_server_that_dies_fails_its_gets_and_the_next_one_is_asked_over_http(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path, "storage.nixl=off") as server:
        engine = Engine(new_tenant(server))
        with engine.client:
            engine.fetch()
            with engine.bucket.fetch(
                engine.keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S
            ) as delivery:
                delivery.wait_layer(0)
                server.kill_storage()
                with pytest.raises(DeliveryFailed):
                    delivery.wait(BOUND_S)
            server.restart_storage()
            assert engine.fetch_when_served() > 0
            deadline_s = time.monotonic() + BOUND_S
            while engine.fetch():  # until the gateway follows the accounts again
                assert time.monotonic() < deadline_s


def test_a_server_that_stops_finishes_the_gets_of_sessions_and_has_logged_each(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path, "storage.nixl=off", "storage.log_level=info") as server:
        engine = Engine(new_tenant(server))
        with engine.client:
            wait_until(lambda: engine.fetch() == 0, "a pass")
            with engine.bucket.fetch(
                engine.keys, delivery="layerwise", rate_bytes_per_s=12 * SLOW_BYTES_PER_S
            ) as delivery:
                delivery.wait_layer(0)
                server.storage.signal_stop()
                assert np.array_equal(delivery.wait(BOUND_S), engine.chunks.transpose(1, 0, 2))
            assert server.storage.wait() == 0
        lines = (tmp_path / "storage.log").read_text().splitlines()
        gets = [line for line in lines if "session_get" in line]
        (line,) = [line for line in gets if delivery.request_id in line]
        assert engine.bucket.name in line


class Raw:
    """A session in its own protocol, with a target and a pass for a tenant's bucket."""

    def __init__(self, server: RunningServer, engine: Engine, tenant: Tenant) -> None:
        self.storage = StorageClient(server.run_dir / "storage.sock")
        self.engine, self.tenant = engine, tenant
        self.session = self.new_session()
        self.target_id, self.memory = self.session.register(COUNT * LAYOUT.chunk_bytes)

    def new_session(self) -> TargetClient:
        return TargetClient(self.storage, self.tenant.name, self.tenant.key.access_key)

    def descriptor(
        self, tag: int, rate_bytes_per_s: float | None = None, target_id: bytes | None = None
    ) -> bytes:
        target = MemoryTarget(
            transport="shared_memory",
            target_id=target_id or self.target_id,
            offset_bytes=0,
            length_bytes=len(self.memory),
            tag=tag,
        )
        return Descriptor(
            tuple(self.engine.keys),
            LAYOUT.num_layers,
            LAYOUT.chunk_tokens,
            LAYOUT.per_layer_chunk_bytes,
            DeliveryMode.LAYERWISE,
            rdma_target=target,
            rate_bytes_per_s=rate_bytes_per_s,
        ).to_bytes()

    def ask_for_pass(self) -> bool:
        """What a gateway does; whether the session was told of a pass."""
        watch = WatchDirectory(known_version=1, known_buckets_version=1, timeout_s=0)
        known = self.storage.ask(watch, Directory)
        get = KvGet(
            bucket=self.engine.bucket.name,
            identity=self.tenant.name,
            request_id="r",
            descriptor=self.descriptor(1),
            read_pass=ReadPass(self.tenant.key.access_key, known.version, known.buckets_version),
        )
        self.storage.ask(get, DeliveryAccepted)
        assert self.storage.reply(DeliveryEnded).error is None
        heard = [self.session.event()]
        while not (isinstance(heard[-1], LayersReady) and heard[-1].end_layer == LAYERS):
            heard.append(self.session.event())
        return PassGiven(bucket=self.engine.bucket.name, lives_s=60.0) in heard

    def get(self, tag: int, *more: msgspec.Struct, **fields: Any) -> None:
        """Ask; `more` reaches the server with it, however slow this process is."""
        asked: dict[str, Any] = {
            "tag": tag,
            "bucket": self.engine.bucket.name,
            "descriptor": self.descriptor(tag),
            "request_id": "r",
        }
        messages = (GetPrefix(**(asked | fields)), *more)
        self.session.socket.sendall(b"".join(map(encode_frame, messages)))

    def end(self, tag: int) -> GetEnded:
        """How a get ended, whatever was said before."""
        while True:
            event = self.session.event()
            if isinstance(event, GetEnded) and event.tag == tag:
                return event

    def refusal(self, tag: int, **fields: Any) -> ObjectCacheError:
        self.get(tag, **fields)
        error = self.end(tag).error
        assert error is not None
        return ObjectCacheError.from_wire(error)


class RelayRaw(Raw):
    """The same with a relay, which is one more server whose sessions get, and asks for no pass."""

    def __init__(
        self, server: RunningServer, engine: Engine, tenant: Tenant, relay: RunningRelay
    ) -> None:
        self.relay = relay
        super().__init__(server, engine, tenant)

    def new_session(self) -> TargetClient:
        with self.relay.client() as client:
            answer = client._core.channel.call(open_session(own_host_id()))
        reply = parse_reply(answer.body, SessionReply, "a session")
        return TargetClient(
            SessionTicket(
                ticket=reply.ticket,
                socket_path=reply.socket_path,
                host_id=reply.host_id,
                expires_s=reply.expires_s,
            )
        )

    def ask_for_pass(self) -> bool:
        return True


@pytest.fixture
def raw(server: RunningServer, engine: Engine, tenant: Tenant) -> Iterator[Raw]:
    raw = Raw(server, engine, tenant)
    with raw.storage, raw.session:
        yield raw


@pytest.fixture(params=["storage server", "relay"])
def either(
    request: pytest.FixtureRequest,
    server: RunningServer,
    engine: Engine,
    tenant: Tenant,
    tmp_path: Path,
) -> Iterator[Raw]:
    """What is so of a storage server's sessions is so of those of a relay before it."""
    if request.param != "relay":
        yield request.getfixturevalue("raw")
        return
    with RunningRelay(server, tmp_path / "relay.log", job=tenant.credentials) as relay:
        raw = RelayRaw(server, engine, tenant, relay)
        with raw.storage, raw.session:
            yield raw


def test_a_session_without_a_pass_gets_nothing(raw: Raw) -> None:
    assert isinstance(raw.refusal(2), AccessDenied)


def test_a_get_is_answered_with_its_beginning_its_layers_and_its_end(either: Raw) -> None:
    raw = either
    assert raw.ask_for_pass()
    raw.memory[:] = bytes(len(raw.memory))
    raw.get(3)
    begun = raw.session.event()
    assert isinstance(begun, GetBegun)
    content = begun.content
    assert content
    expected = GetBegun(tag=3, delivery="layerwise", chunk_count=COUNT, path="agg", content=content)
    assert begun == expected
    ended = raw.end(3)
    assert ended == GetEnded(tag=3, payload_bytes=len(raw.memory))
    assert raw.memory[:] == raw.engine.chunks.transpose(1, 0, 2).tobytes()


def test_a_client_that_waits_for_the_whole_is_spared_what_comes_before(either: Raw) -> None:
    raw = either
    assert raw.ask_for_pass()
    raw.memory[:] = bytes(len(raw.memory))
    awaited = LayersAwaited(tag=3, end_layer=LAYERS, interval_s=30.0)
    raw.get(3, awaited, descriptor=raw.descriptor(3, 8 * SLOW_BYTES_PER_S))
    ends = []
    whole = raw.engine.chunks.transpose(1, 0, 2).tobytes()
    while not isinstance(event := raw.session.event(), GetEnded):
        if isinstance(event, LayersReady):
            ends.append(event.end_layer)
            arrived_bytes = event.end_layer * len(whole) // LAYERS
            assert raw.memory[:arrived_bytes] == whole[:arrived_bytes]
    assert event == GetEnded(tag=3, payload_bytes=len(raw.memory))
    assert ends[-1] == LAYERS
    assert len(ends) <= 3, "but for what was there before it was told"


LABELS = [
    ("\n" * 70, float("nan")),
    ("\x1b[2Jforged", -5.0),
    ("Z" * 50_000, 1e9),
    ("", float("inf")),
]


@pytest.mark.parametrize(("request_id", "client_s"), LABELS, ids=["line", "escape", "long", "none"])
def test_labels_of_a_get_over_a_session_are_held_to_the_forms_of_the_headers(
    either: Raw, request_id: str, client_s: float
) -> None:
    raw = either
    assert raw.ask_for_pass()
    raw.get(3, request_id="mine-3.b", client_s=1.5)
    assert raw.end(3).error is None
    raw.memory[:] = bytes(len(raw.memory))
    raw.get(4, request_id=request_id, client_s=client_s, traceparent="\x1b[2J")
    assert raw.end(4).error is None
    traces = raw.storage.ask(GetTraces(limit=100), Traces).traces
    of_bucket = [one for one in traces if one.bucket == raw.engine.bucket.name]
    named = [one.request_id for one in of_bucket]
    assert "mine-3.b" in named
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", one) for one in named), named
    if isinstance(raw, RelayRaw):
        return  # asks upstream itself, with its own time, or not at all for what it still holds
    assert re.fullmatch("[0-9A-F]{16}", named[0])
    spent = [{phase.name: phase.seconds for phase in one.phases} for one in of_bucket]
    assert (spent[0]["client"], spent[1]["client"]) == (0.0, 1.5)


def test_what_a_session_may_not_ask_for_is_refused_and_costs_it_nothing(
    server: RunningServer, either: Raw
) -> None:
    raw = either
    assert raw.ask_for_pass()
    stranger = Engine(new_tenant(server, "stranger"))
    stranger.client.close()
    assert raw.ask_for_pass()
    refusals = {
        "another tenant's bucket": raw.refusal(2, bucket=stranger.bucket.name),
        "no bucket": raw.refusal(3, bucket="nosuch"),
        "no descriptor": raw.refusal(4, descriptor=b"\xc1garbage"),
        "another get's tag": raw.refusal(5, descriptor=raw.descriptor(6)),
        "into the body": raw.refusal(7, descriptor=_without_target(raw.descriptor(7))),
        "staged in a gateway": raw.refusal(8, path="buffer"),
        "no path": raw.refusal(9, path="scenic"),
    }
    with raw.new_session() as other:
        target_id, _ = other.register(COUNT * LAYOUT.chunk_bytes)
        elsewhere = raw.descriptor(10, target_id=target_id)
        refusals["another session's target"] = raw.refusal(10, descriptor=elsewhere)
    assert {what: error.code for what, error in refusals.items()} == {
        "another tenant's bucket": "AccessDenied",
        "no bucket": "NoSuchBucket" if isinstance(raw, RelayRaw) else "AccessDenied",
        "no descriptor": "InvalidDescriptor",
        "another get's tag": "InvalidArgument",
        "into the body": "InvalidArgument",
        "staged in a gateway": "InvalidArgument",
        "no path": "InvalidArgument",
        "another session's target": "InvalidArgument",
    }
    raw.get(11)
    assert raw.end(11).error is None


def test_a_get_is_cancelled_by_its_tag_and_a_tag_is_one_gets(either: Raw) -> None:
    raw = either
    assert raw.ask_for_pass()
    raw.get(2, descriptor=raw.descriptor(2, SLOW_BYTES_PER_S))
    assert isinstance(raw.session.event(), GetBegun)
    raw.session.send(CancelGet(tag=99))
    raw.get(2)
    with pytest.raises(InvalidRequest, match="tag"):
        raw.end(99)
    raw.session.send(CancelGet(tag=2))
    error = raw.end(2).error
    assert error is not None
    assert error.code == "DeliveryFailed"
    refused = raw.refusal(3, bucket="other").code
    assert refused == ("NoSuchBucket" if isinstance(raw, RelayRaw) else "AccessDenied")


def test_gets_of_a_client_that_dies_end(either: Raw) -> None:
    raw = either
    assert raw.ask_for_pass()
    for tag in range(2, 6):
        raw.get(tag, descriptor=raw.descriptor(tag, SLOW_BYTES_PER_S))
    assert isinstance(raw.session.event(), GetBegun)
    raw.session.close()
    deadline_s = time.monotonic() + BOUND_S
    while raw.storage.ask(GetHealth(), Health).deliveries_in_flight:
        assert time.monotonic() < deadline_s


def _without_target(descriptor: bytes) -> bytes:
    fields = msgspec.msgpack.decode(descriptor)
    del fields["rdma_target"]
    return msgspec.msgpack.encode(fields)
