"""Whatever other tenants do, a victim's small requests go on."""

from __future__ import annotations

import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from benchmarks.victim.attacks import (
    Attack,
    PacedPut,
    Peer,
    SlowReader,
    StalledPut,
    SteadyReader,
    ThreeBytePut,
)
from benchmarks.victim.signed_http import Signer
from objectcache_schemas import headers
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject
from objectcache_schemas.messages.sessions import CreateSession, JoinSession, SessionTicket
from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests.integration.served import wait_until
from tests.integration.tenants import Tenant, grant, new_tenant
from tests.s3_clients import Answer, open_socket, send_head, signed_headers
from tests.servers import RunningServer, start_server
from tests.storage_client import EventClient, StorageClient

FRAGMENTS, PUTS, SESSIONS, DELIVERIES = 32, 16, 16, 64
FRAGMENT_BYTES = 64 * KIB
DOCUMENT_BYTES_MAX = 8 * MIB
SETTINGS = (
    "storage.engine=memory",
    f"storage.fragment_bytes={FRAGMENT_BYTES}",
    f"storage.delivery_in_flight_bytes_max={4 * FRAGMENT_BYTES}",
    f"storage.server_in_flight_bytes_max={FRAGMENTS * FRAGMENT_BYTES}",
    f"storage.puts_max={PUTS}",
    f"storage.put_staging_bytes_max={64 * MIB}",
    f"storage.deliveries_max={DELIVERIES}",
    f"gateway.document_bytes_max={DOCUMENT_BYTES_MAX}",
    f"storage.sessions_max={SESSIONS}",
    "scheduler.queue_timeout_s=30",
)
LARGE_BYTES = 16 * MIB  # far more than sockets hold
BODY_BYTES = 200 * KIB
READ_RATE = 20e3  # bytes a second of each slow reader
DELAY_S_MAX = 20.0  # of one request of the victim; far above what is documented
ROUNDS = 4
STEADY_RATE = 512e3  # bytes a second of each honest reader
KEPT_RATE = 400e3  # at which an object of LARGE_BYTES takes longer than a request may wait
STEADY_S = 6.0  # three windows of whoever is watched
STEADY_BYTES = 40 * MIB  # a minute of an honest reader's, less the seconds that sockets hold
STEADY_PAUSE_S = 0.5  # of a client; one that stands still for longer is slow
TRIES = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("shares") / "data", *SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def large(server: RunningServer) -> str:
    """The path of an object that every attacker may read."""
    owner = new_tenant(server, "owner")
    path = f"/{owner.new_bucket()}/large"
    assert owner.call("PUT", path, bytes(LARGE_BYTES)).status == 200
    return path


def attackers(server: RunningServer, large: str, count: int) -> list[Tenant]:
    bucket = large.split("/")[1]
    made = [new_tenant(server, "attacker") for _ in range(count)]
    for tenant in made:
        tenant.change_user(grants=(grant(bucket, "read", "write"),))
    return made


def signer(tenant: Tenant) -> Signer:
    return Signer(
        tenant.server.endpoint, tenant.credentials.access_key, tenant.credentials.secret_key
    )


def slow_readers(tenants: list[Tenant], large: str, count: int) -> list[Peer]:
    return [SlowReader(signer(one), large, READ_RATE) for one in tenants for _ in range(count)]


def puts(
    tenants: list[Tenant], large: str, count: int, kind: Callable[[Signer, str], Peer]
) -> list[Peer]:
    return [kind(signer(one), f"{large}-{one.name}-{n}") for one in tenants for n in range(count)]


def level(server: RunningServer, name: str) -> float:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        page = storage.ask(GetMetrics(), Metrics).text.decode()
    found = re.findall(rf"^objectcache_{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE)
    return sum(map(float, found))


class Victim:
    """A tenant whose small requests are timed."""

    def __init__(self, server: RunningServer, body_bytes: int = BODY_BYTES) -> None:
        self.tenant = new_tenant(server, "victim")
        self.body_bytes = body_bytes
        self.bucket = self.tenant.new_bucket()
        self.keys = tuple(f"chunk-{number}" for number in range(4))
        for key in (*self.keys, "body"):
            self.must("PUT", f"/{self.bucket}/{key}", bytes(body_bytes))
        self.must("PUT", f"/{self.bucket}/small", bytes(4096))

    def must(
        self, method: str, path: str, body: bytes = b"", named: dict[str, str] | None = None
    ) -> float:
        begun_s = time.monotonic()
        answer = self.tenant.call(method, path, body, named)
        assert answer.status == 200, (method, path, answer.status, answer.body[:500])
        return time.monotonic() - begun_s

    def goes_on(self, under: str) -> None:
        """A few rounds of all its requests: none is refused, each is answered in time."""
        chunk = Descriptor(self.keys, 2, 16, self.body_bytes // 2, DeliveryMode.LAYERWISE)
        delivery = {headers.DESCRIPTOR: chunk.to_header()}
        delays_s: list[float] = []
        for number in range(ROUNDS):
            delays_s += (
                self.must("GET", f"/{self.bucket}/small"),
                self.must("GET", f"/{self.bucket}/body"),
                self.must("GET", f"/{self.bucket}/{self.keys[-1]}", named=delivery),
                self.must("PUT", f"/{self.bucket}/small-{number}", bytes(4096)),
                self.must("PUT", f"/{self.bucket}/body-{number}", bytes(self.body_bytes)),
            )
        p99_s = sorted(delays_s)[len(delays_s) * 99 // 100]
        print(f"{under}: p50 {statistics.median(delays_s):.3f} s, p99 {p99_s:.3f} s")
        assert max(delays_s) < DELAY_S_MAX


@pytest.fixture(scope="module")
def victim(server: RunningServer) -> Victim:
    return Victim(server)


def test_bodies_that_are_read_slowly_leave_memory_to_others(
    server: RunningServer, large: str, victim: Victim
) -> None:
    with Attack(slow_readers(attackers(server, large, 1), large, FRAGMENTS)):
        wait_until(lambda: level(server, "deliveries_waiting") > 0, "some to wait for memory")
        victim.goes_on("slow readers of one tenant")


def test_large_gets_of_one_key_leave_small_ones_to_its_other_clients(
    server: RunningServer,
) -> None:
    """The readers keep above the least rate, and are never cut; they hold all that one tenant may
    have for longer than the others may wait.
    """
    client = Victim(server, FRAGMENT_BYTES // 4)
    path = f"/{client.bucket}/large"
    client.must("PUT", path, bytes(LARGE_BYTES))
    readers = [SteadyReader(signer(client.tenant), path, KEPT_RATE) for _ in range(DELIVERIES)]
    with Attack(readers):
        wait_until(lambda: level(server, "deliveries_waiting") >= DELIVERIES // 2, "many to wait")
        client.goes_on("large gets of the same key")


TURNS, FILES_KEPT = 4, 4
FEW_TURNS = (
    "storage.engine=files",
    f"storage.fragment_bytes={FRAGMENT_BYTES}",
    f"storage.deliveries_max={TURNS}",
    f"storage.open_objects_max={FILES_KEPT}",
    "storage.client_rate_bytes_per_s_min=0",
    "scheduler.queue_timeout_s=60",
)


class Askers:
    """Gateways' connections to a server with few turns, each of which asks for an object and says
    nothing more.
    """

    def __init__(self, server: RunningServer, opened: ExitStack) -> None:
        self._path = server.run_dir / "storage.sock"
        self._opened = opened
        storage = self._connect()
        storage.create_bucket("few")
        storage.put("few", "small", bytes(FRAGMENT_BYTES))
        storage.put("few", "large", bytes(2 * FRAGMENT_BYTES))
        for number in range(4 * TURNS):
            storage.put("few", f"large-{number}", bytes(2 * FRAGMENT_BYTES))

    def ask(self, key: str) -> StorageClient:
        client = self._connect()
        client.send(OpenObject(bucket="few", key=key))
        return client

    def _connect(self) -> StorageClient:
        return self._opened.enter_context(StorageClient(self._path))


def open_files(server: RunningServer, folder: Path) -> int:
    """How many files below the folder its storage server has open."""
    names: list[str] = []
    for link in Path(f"/proc/{server.storage_pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(link))
    return sum(name.startswith(str(folder)) for name in names)


def test_large_gets_that_wait_for_their_turn_hold_no_open_file(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with start_server(data_dir, *FEW_TURNS) as server, ExitStack() as opened:
        askers = Askers(server, opened)
        before = open_files(server, data_dir)
        for number in range(4 * TURNS):
            askers.ask(f"large-{number}")
        wait_until(lambda: level(server, "deliveries_waiting") > 3 * TURNS, "the others to wait")
        assert open_files(server, data_dir) <= before + TURNS + FILES_KEPT


def test_large_gets_wait_for_no_small_one(tmp_path: Path) -> None:
    with start_server(tmp_path / "data", *FEW_TURNS) as server, ExitStack() as opened:
        askers = Askers(server, opened)
        for _ in range(TURNS):
            askers.ask("small")
        wait_until(lambda: level(server, "deliveries_waiting") == 1, "the last one to wait")
        assert askers.ask("large").reply(ObjectOpened).info.size_bytes == 2 * FRAGMENT_BYTES
        assert level(server, "deliveries_waiting") == 1


def test_puts_of_three_bytes_hold_nothing(
    server: RunningServer, large: str, victim: Victim
) -> None:
    peers = puts(attackers(server, large, 2), large, PUTS, ThreeBytePut)
    with Attack(peers) as attack:
        wait_until(lambda: attack.connected == len(peers), "all to be connected")
        victim.goes_on("puts of three bytes")
        wait_until(lambda: level(server, "puts_running") == 0, "the victim's last put to end")


@pytest.mark.parametrize("tenant_count", [2, PUTS + 1])
def test_puts_that_stand_still_leave_slots_to_others_or_are_cut(
    server: RunningServer, large: str, victim: Victim, tenant_count: int
) -> None:
    kind = partial(StalledPut, size_bytes=MIB)
    peers = puts(attackers(server, large, tenant_count), large, 4, kind)
    with Attack(peers):
        least = min(PUTS, 3 * tenant_count)
        wait_until(lambda: level(server, "puts_running") >= least, "them to have slots")
        victim.goes_on(f"puts that stand still, of {tenant_count} tenants")


def test_puts_that_declare_nearly_all_there_is_leave_others_theirs(
    server: RunningServer, large: str, victim: Victim
) -> None:
    """storage.put_staging_bytes_max: the clients keep above the rate, and are never cut."""
    tenants = attackers(server, large, 4)
    sizes = (40 * MIB, 24 * MIB, 16 * MIB, 40 * MIB)
    peers = [
        PacedPut(signer(one), f"{large}-{one.name}", size)
        for one, size in zip(tenants, sizes, strict=True)
    ]
    with Attack(peers):
        wait_until(lambda: level(server, "puts_waiting") > 0, "some to wait")
        victim.goes_on("puts that declare much")
        assert level(server, "puts_waiting") > 0


def test_more_slow_readers_of_more_tenants_than_there_is_memory_are_cut(
    server: RunningServer, large: str, victim: Victim
) -> None:
    peers = slow_readers(attackers(server, large, FRAGMENTS + 1), large, 1)
    with Attack(peers):
        wait_until(lambda: level(server, "deliveries_waiting") > 0, "some to wait for memory")
        victim.goes_on(f"slow readers of {FRAGMENTS + 1} tenants")
        assert level(server, "slow_clients_cut_total") > 0


def test_readers_twice_as_fast_as_the_least_rate_are_not_cut(
    server: RunningServer, large: str
) -> None:
    """storage.client_rate_bytes_per_s_min, where sockets take megabytes at once. On a busy machine
    the readers may stand still, and are slow then.
    """
    for _ in range(TRIES):
        attack = steady_readers_beside_waiting_ones(server, large)
        if attack.times_lost == 0:
            return
        assert attack.paused_s > STEADY_PAUSE_S
    pytest.fail(f"no reader went on for {STEADY_S} s: one paused for {attack.paused_s} s")


def steady_readers_beside_waiting_ones(server: RunningServer, large: str) -> Attack:
    """The readers, which have ended."""
    readers = attackers(server, large, FRAGMENTS)
    path = f"{large}-steady"
    assert readers[0].call("PUT", path, bytes(STEADY_BYTES)).status == 200
    honest = [SteadyReader(signer(one), path, STEADY_RATE) for one in readers]
    waiting = slow_readers(attackers(server, large, 3), large, 4)
    cut_before = level(server, "slow_clients_cut_total")
    with Attack(honest) as attack:
        wait_until(lambda: level(server, "deliveries_running") >= FRAGMENTS, "all to have begun")
        with Attack(waiting):
            wait_until(lambda: level(server, "deliveries_waiting") > 0, "some to wait for memory")
            time.sleep(STEADY_S)
            assert level(server, "deliveries_waiting") > 0
        print(f"{level(server, 'slow_clients_cut_total') - cut_before} of the slow were cut")
    return attack


def unfinished(tenant: Tenant, target: str, body: bytes) -> socket.socket:
    """A connection with a POST that announces more than `body` and sends no more than that."""
    connection = open_socket(tenant.server)
    announced = {"Content-Length": str(8 * MIB)}
    named = signed_headers(
        tenant.server,
        "POST",
        target,
        payload_hash="UNSIGNED-PAYLOAD",
        credentials=tenant.credentials,
    )
    send_head(connection, "POST", target, {**named, **announced})
    connection.sendall(body)
    return connection


@pytest.mark.parametrize("operation", ["kv-match", "kv-put"])
def test_documents_that_stand_still_leave_memory_to_others(
    server: RunningServer, large: str, victim: Victim, operation: str
) -> None:
    """gateway.document_bytes_max, of which one tenant has three quarters."""
    holder = attackers(server, large, 1)[0]
    bucket = large.split("/")[1]
    begun = LENGTH.pack(7 * MIB) + bytes(192 * KIB)
    match = msgspec.msgpack.encode({"v": 1, "chunk_keys": [f"{n:064}" for n in range(4096)]})
    with ExitStack() as opened:

        def answer() -> Answer:
            return holder.call("POST", f"/{bucket}?kv-match", match)

        def is_refused_beside_one_more() -> bool:
            opened.enter_context(unfinished(holder, f"/{bucket}?{operation}", begun))
            return answer().status == 503

        wait_until(is_refused_beside_one_more, "the tenant to have its share")
        refused = answer()
        assert refused.code == "SlowDown"
        assert b"gateway.document_bytes_max" in refused.body
        victim.must("POST", f"/{victim.bucket}?kv-match", match)
        victim.goes_on(f"unfinished documents of {operation}")
    wait_until(lambda: answer().status == 200, "what was held to be given back")


def session(storage: StorageClient, identity: str) -> EventClient:
    """A session that is joined. Raises `Busy`."""
    ticket = storage.ask(CreateSession(identity=identity), SessionTicket)
    client = EventClient(ticket.socket_path)
    client.send(JoinSession(v=PROTOCOL_VERSION, ticket=ticket.ticket))
    try:
        client.event()
    except BaseException:
        client.close()
        raise
    return client


def test_tenants_that_open_all_the_sessions_they_can_leave_some_to_others(
    server: RunningServer,
) -> None:
    """storage.sessions_max"""
    delays_s: list[float] = []
    with ExitStack() as opened:
        storage = opened.enter_context(StorageClient(server.run_dir / "storage.sock"))
        for identity in ("first", "second", "third"):
            with pytest.raises(Busy, match=r"of this user; storage\.sessions_max is 16"):  # noqa: PT012
                while True:
                    opened.enter_context(session(storage, identity))
        for number in range(4):
            begun_s = time.monotonic()
            opened.enter_context(session(storage, f"victim-{number}"))
            delays_s.append(time.monotonic() - begun_s)
    print(f"sessions beside three greedy tenants: p99 {max(delays_s):.3f} s")
    assert max(delays_s) < DELAY_S_MAX
