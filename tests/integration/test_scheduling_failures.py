"""What becomes of a schedule, its bounds and its deliveries when somebody dies, stalls or stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from objectcache import Busy, Client, Delivery
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.messages.kv import DeliveryAccepted, KvGet
from objectcache_schemas.messages.reads import SendBody
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, TenantShare
from objectcache_schemas.operators.server_state import GetHealth, Health
from objectcache_schemas.policy_names import PolicyName
from tests.integration.scheduling_load import (
    LAYOUT,
    Fetching,
    Prefix,
    ScheduledServer,
    stored_prefix,
)
from tests.integration.served import BOUND_S, own_environment, wait_until
from tests.storage_client import StorageClient

CHUNK_COUNT = 32
PAYLOAD_BYTES = CHUNK_COUNT * LAYOUT.chunk_bytes
WINDOW_S = 0.004
TRANSPORTS = ["shared_memory", "body"]
IN_FLIGHT_BYTES = 512 * KIB
SOCKET_BYTES_MAX = 2 * MIB  # what two sockets may hold besides
STANDSTILL_GBPS = 0.001  # the least; seconds for a fragment, and 33 s for the payload
STANDSTILL_BYTES_PER_S = 125_000.0
SLOW_GBPS = 0.004  # 8 s for the payload
BOUND_SETTINGS = (
    "scheduler.queue_max=1",
    "scheduler.queue_timeout_s=60",
    "storage.drain_timeout_s=60",
)


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    settings = (
        *BOUND_SETTINGS,
        f"storage.delivery_in_flight_bytes_max={IN_FLIGHT_BYTES}",
        f"storage.fragment_bytes={64 * KIB}",
    )
    with ScheduledServer(tmp_path_factory.mktemp("failures") / "data", *settings) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ScheduledServer]:
    """A server that the test may stop for good."""
    with ScheduledServer(tmp_path / "data", *BOUND_SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    """A server whose storage server some tests kill or stop, by `ended_and_restarted`."""
    with ScheduledServer(tmp_path_factory.mktemp("restarting") / "data", *BOUND_SETTINGS) as server:
        yield server


@contextmanager
def ended_and_restarted(served: ScheduledServer, number: signal.Signals) -> Generator[None]:
    """End the storage server; at the end of the block it has come back."""
    said = "the storage server serves again"
    before = served.errors().count(said)
    os.kill(served.storage_pid, number)
    yield
    wait_until(lambda: served.errors().count(said) > before, "the restart")


@pytest.fixture(autouse=True)
def _no_changes(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        request.getfixturevalue("served").begin_anew()


@pytest.fixture(scope="module")
def client(served: ScheduledServer) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def prefix(client: Client) -> Prefix:
    return stored_prefix(client, "failures", CHUNK_COUNT)


@pytest.fixture(scope="module")
def s3(served: ScheduledServer) -> Iterator[Any]:
    s3 = served.s3()
    yield s3
    s3.close()


def begin(prefix: Prefix, transport: str = "body") -> Delivery:
    """A layerwise delivery of the whole prefix, in the pool."""
    return prefix.fetch(
        len(prefix.keys), transport=transport, delivery="layerwise", compute_window_s=WINDOW_S
    )


def begin_and_check(prefix: Prefix, transport: str = "body") -> tuple[str, int | None]:
    """The same, to its end: its request id and rate."""
    with begin(prefix, transport) as delivery:
        prefix.check(delivery)
        return delivery.request_id, delivery.rate_bytes_per_s


# --- clients that die or stall ---

_DYING_CLIENT = """
import sys
from objectcache import Client
from tests.integration.scheduling_load import LAYOUT
from tests.integration.test_scheduling_failures import CHUNK_COUNT, WINDOW_S
endpoint, access_key, secret_key, bucket, transport = sys.argv[1:]
client = Client(endpoint, access_key=access_key, secret_key=secret_key)
bucket = client.kv_bucket(bucket, LAYOUT)
keys = LAYOUT.chunk_keys(range(CHUNK_COUNT * LAYOUT.chunk_tokens))
options = {"delivery": "layerwise", "compute_window_s": WINDOW_S, "transport": transport}
with bucket.fetch(keys, **options) as delivery:
    print(delivery.request_id, flush=True)
    delivery.wait()
"""


@contextmanager
def client_process(
    served: ScheduledServer, bucket: str, transport: str
) -> Generator[subprocess.Popen[str]]:
    """Another process that fetches the prefix, and prints its request id once it may begin."""
    arguments = [served.endpoint, *served.credentials, bucket, transport]
    with subprocess.Popen(
        [sys.executable, "-c", _DYING_CLIENT, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=own_environment(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_share_of_a_client_that_is_killed_goes_to_who_waits_for_a_rate(
    served: ScheduledServer, prefix: Prefix, transport: str
) -> None:
    served.change(ScheduleChanges(policy="equal", cap_gbps=STANDSTILL_GBPS, rates="for_life"))
    with client_process(served, prefix.bucket.name, transport) as dying:
        assert dying.stdout is not None
        killed_id = dying.stdout.readline().strip()
        (shown,) = served.state().deliveries
        assert (shown.request_id, shown.rate_bytes_per_s) == (killed_id, STANDSTILL_BYTES_PER_S)
        waiting = Fetching(begin, prefix)
        wait_until(lambda: served.state().delivery_count == 2, "another to wait for a rate")
        assert served.state().deliveries[1].rate_bytes_per_s is None
        dying.kill()
        delivery: Delivery = waiting.outcome()  # it has a rate
    with delivery:
        assert delivery.rate_bytes_per_s == STANDSTILL_BYTES_PER_S
        (left,) = served.state().deliveries
        assert left.request_id == delivery.request_id
        trace = served.trace(killed_id)
        assert trace.error is not None, "it was through before it was killed"
        served.change(ScheduleChanges(cap_gbps=0))
        prefix.check(delivery)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_share_of_a_client_that_is_killed_goes_to_who_runs(
    served: ScheduledServer, prefix: Prefix, transport: str
) -> None:
    served.change(ScheduleChanges(policy="equal", cap_gbps=STANDSTILL_GBPS))
    with begin(prefix) as first, client_process(served, prefix.bucket.name, transport) as dying:
        assert dying.stdout is not None
        killed_id = dying.stdout.readline().strip()
        wait_until(lambda: rates(served) == [STANDSTILL_BYTES_PER_S / 2] * 2, "both to have half")
        assert {shown.request_id for shown in served.state().deliveries} == {
            first.request_id,
            killed_id,
        }
        dying.kill()
        wait_until(lambda: rates(served) == [STANDSTILL_BYTES_PER_S], "the other to have it all")
        served.change(ScheduleChanges(cap_gbps=0))
        prefix.check(first)


def rates(served: ScheduledServer) -> list[float | None]:
    """Of all deliveries, bytes per second."""
    return [shown.rate_bytes_per_s for shown in served.state().deliveries]


def test_whoever_is_killed_while_it_waits_for_a_rate_is_forgotten(
    served: ScheduledServer, prefix: Prefix
) -> None:
    served.change(ScheduleChanges(policy="equal", cap_gbps=STANDSTILL_GBPS, rates="for_life"))
    with begin(prefix) as first, client_process(served, prefix.bucket.name, "body") as dying:
        wait_until(lambda: served.state().delivery_count == 2, "the other to wait for a rate")
        dying.kill()
        wait_until(lambda: served.state().delivery_count == 1, "it to be forgotten")
        assert served.state().deliveries[0].request_id == first.request_id


def stall(served: ScheduledServer, prefix: Prefix, identity: str = "slow") -> StorageClient:
    """A gateway whose delivery is asked for."""
    descriptor = Descriptor(
        tuple(prefix.keys),
        LAYOUT.num_layers,
        LAYOUT.chunk_tokens,
        LAYOUT.per_layer_chunk_bytes,
        DeliveryMode.LAYERWISE,
        compute_window_s=WINDOW_S,
    )
    connection = served.connect()
    connection.send(
        KvGet(
            bucket=prefix.bucket.name,
            identity=identity,
            request_id="slow",
            descriptor=descriptor.to_bytes(),
        )
    )
    return connection


@pytest.mark.parametrize("policy", ["equal", "calibrated_stall_opt", "stall_dynamic"])
def test_a_client_that_takes_nothing_holds_up_nobody_and_loses_nothing(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> None:
    served.change(ScheduleChanges(policy=policy, cap_gbps=0.2, epoch_s=10))
    with stall(served, prefix) as slow:
        wait_until(lambda: served.state().delivery_count == 1, "the slow one")
        others = [Fetching(begin_and_check, prefix, one) for one in TRANSPORTS]
        if policy != "stall_dynamic":
            wait_until(lambda: served.state().delivery_count == 3, "the others")
        served.change(ScheduleChanges(epoch_s=0.01))  # all are admitted at once
        slow.reply(DeliveryAccepted)
        slow.send(SendBody(offset_bytes=0, length_bytes=PAYLOAD_BYTES, into_socket=False))
        rates = [fetching.outcome()[1] for fetching in others]
        assert all(rate is None for rate in rates) == (policy == "stall_dynamic")
        wait_until(lambda: served.state().delivery_count == 1, "the others to leave")
        (shown,) = served.state().deliveries
        assert shown.request_id == "slow"
        assert shown.sent_bytes <= IN_FLIGHT_BYTES + SOCKET_BYTES_MAX
        served.change(ScheduleChanges(cap_gbps=0))  # changes do not wake it for nothing
        assert served.state().deliveries[0].sent_bytes <= IN_FLIGHT_BYTES + SOCKET_BYTES_MAX
        payload = slow.receive_bytes(PAYLOAD_BYTES)
    assert payload == prefix.chunks.transpose(1, 0, 2).tobytes()


# --- a storage server that dies ---


def test_a_storage_server_that_is_killed_fails_what_runs_and_what_waits_and_keeps_its_schedule(
    restarting: ScheduledServer,
) -> None:
    changes = ScheduleChanges(
        policy="equal",
        cap_gbps=STANDSTILL_GBPS,
        margin_gbps=2.0,
        rates="for_life",
        tenants={"acme": TenantShare(weight=3.0, cap_gbps=1.0, deliveries_max=7)},
    )
    with restarting.client() as client:
        prefix = stored_prefix(client, "killed", CHUNK_COUNT)
        before = restarting.change(changes, reset=True).configuration
        shared = begin(prefix, "shared_memory")
        waiting = [Fetching(begin, prefix, one) for one in TRANSPORTS]
        chunkwise = prefix.fetch(CHUNK_COUNT, transport="body", delivery="chunkwise")
        wait_until(lambda: restarting.state().delivery_count == 4, "all")
        with ended_and_restarted(restarting, signal.SIGKILL):
            for delivery in (shared, chunkwise):
                with delivery, pytest.raises(DeliveryFailed):
                    delivery.wait(BOUND_S)
            for fetching in waiting:
                with pytest.raises(Unavailable):
                    fetching.outcome()
        state = restarting.state()
        assert (state.configuration, state.changes) == (before, changes)
        assert state.delivery_count == 0
        restarting.change(ScheduleChanges(cap_gbps=0.5))
        for transport in TRANSPORTS:
            assert begin_and_check(prefix, transport)[1] is not None


@pytest.mark.parametrize("text", ['{"cap_gbps": 1', '{"policy": "best"}'])
def test_a_broken_schedule_stops_the_start_with_one_line_that_names_the_file(
    tmp_path: Path, text: str
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    file = data_dir / "schedule.json"
    file.write_text(text)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "objectcache_operations", "serve"),
            *("--data-dir", str(data_dir), "--listen", "127.0.0.1:0"),
        ],
        capture_output=True,
        text=True,
        env=own_environment(),
        timeout=BOUND_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    lines = [line for line in ended.stderr.splitlines() if str(file) in line]
    assert len(lines) == 1, ended.stderr
    assert "mend that, or delete the file" in lines[0]
    assert "Traceback" not in ended.stderr


def test_a_schedule_that_broke_while_it_ran_stops_everything_at_the_restart(
    own_server: ScheduledServer,
) -> None:
    (own_server.data_dir / "schedule.json").write_text("{")
    os.kill(own_server.storage_pid, signal.SIGKILL)
    assert own_server.wait_exit() != 0
    file = own_server.data_dir / "schedule.json"
    assert f"{file} cannot be read as a changed schedule" in own_server.errors()


# --- bounds ---


def at_the_bound(served: ScheduledServer, prefix: Prefix) -> tuple[Delivery, Delivery]:
    """Two deliveries of root, which may have no more, that do not get far."""
    share = TenantShare(deliveries_max=2)
    served.change(ScheduleChanges(cap_gbps=STANDSTILL_GBPS, tenants={"root": share}))
    return begin(prefix, "shared_memory"), begin(prefix, "body")


def test_past_the_bound_one_waits_and_the_next_is_told_when_to_come_back(
    served: ScheduledServer, prefix: Prefix, s3: Any
) -> None:
    asked = {"Bucket": prefix.bucket.name, "Key": prefix.keys[0]}
    first, second = at_the_bound(served, prefix)
    with first, second:
        third = Fetching(lambda: s3.get_object(**asked)["Body"].read())
        wait_until(lambda: served.state().waiting == 1, "the third to wait")
        with pytest.raises(ClientError) as caught:
            s3.get_object(**asked)
        answer: Any = caught.value.response
        with pytest.raises(Busy, match=r"its queue is full \(scheduler\.queue_max is 1\)") as busy:
            begin(prefix)
        assert served.state().waiting == 1
        served.change(ScheduleChanges(cap_gbps=0))
        assert third.outcome() == prefix.chunks[0].tobytes()
        for delivery in (first, second):
            prefix.check(delivery)
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == (
        503,
        "SlowDown",
    )
    assert (
        "2 deliveries of 'root' are running, its deliveries_max is 2" in answer["Error"]["Message"]
    )
    header = answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"]
    assert re.fullmatch(r"[1-9]|[12][0-9]|30", header)
    assert busy.value.details.retry_after_s is not None
    assert 1 <= busy.value.details.retry_after_s <= 30


def ask_for_object(served: ScheduledServer, path: str) -> socket.socket:
    """A bare connection on which a presigned path is asked for."""
    parts = urlsplit(served.endpoint)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), BOUND_S)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return connection


def test_whoever_hangs_up_while_it_waits_frees_its_place_in_the_queue(
    served: ScheduledServer, prefix: Prefix
) -> None:
    path = served.presigned_path(prefix.bucket.name, prefix.keys[0])
    first, second = at_the_bound(served, prefix)
    with first, second:
        for _ in range(3):
            with ask_for_object(served, path):
                wait_until(lambda: served.state().waiting == 1, "it to wait")
            wait_until(lambda: served.state().waiting == 0, "it to leave")
        third = Fetching(begin_and_check, prefix)
        wait_until(lambda: served.state().waiting == 1, "the third to wait")
        first.close()
        wait_until(lambda: served.state().waiting == 0, "the third to be let in")
        served.change(ScheduleChanges(cap_gbps=0))
        third.outcome()


def test_the_gateways_bound_is_another_one_and_counts_those_who_wait(tmp_path: Path) -> None:
    settings = ("gateway.requests_in_flight_max=3", "scheduler.queue_max=5")
    with ScheduledServer(tmp_path / "data", *settings) as served, served.client() as client:
        prefix = stored_prefix(client, "bounds", CHUNK_COUNT)
        first, second = at_the_bound(served, prefix)
        with first, second:
            third = Fetching(begin_and_check, prefix)
            wait_until(lambda: served.state().waiting == 1, "the third to wait")
            for _ in range(5):
                with pytest.raises(Busy, match=r"gateway\.requests_in_flight_max is reached"):
                    begin(prefix)
            assert served.state().waiting == 1
            served.change(ScheduleChanges(), reset=True)
            third.outcome()
            for delivery in (first, second):
                prefix.check(delivery)
        for _ in range(10):  # no place was lost
            begin_and_check(prefix)


# --- memory ---

MEMORY_BYTES = 4 * MIB
HOLDER_COUNT = 4


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    """A server with memory for four bodies of a fragment each."""
    settings = (
        f"storage.server_in_flight_bytes_max={MEMORY_BYTES}",
        f"storage.delivery_in_flight_bytes_max={MEMORY_BYTES // HOLDER_COUNT}",
        f"storage.fragment_bytes={MEMORY_BYTES // HOLDER_COUNT}",
        "scheduler.queue_timeout_s=60",
        "storage.client_rate_bytes_per_s_min=0",
    )
    with ScheduledServer(tmp_path_factory.mktemp("tight") / "data", *settings) as server:
        yield server


@pytest.fixture(scope="module")
def tight_prefix(tight: ScheduledServer) -> Iterator[Prefix]:
    with tight.client() as client:
        yield stored_prefix(client, "tight", CHUNK_COUNT)


def health(served: ScheduledServer) -> tuple[int, int]:
    """Deliveries that were let in, and the bytes that they were promised."""
    with served.connect() as connection:
        shown = connection.ask(GetHealth(), Health)
    return shown.deliveries_in_flight, shown.in_flight_bytes


@contextmanager
def all_memory_held(served: ScheduledServer, prefix: Prefix) -> Generator[list[StorageClient]]:
    """Clients of different tenants whose deliveries hold all memory: they read nothing."""
    wait_until(lambda: health(served) == (0, 0), "earlier deliveries to end")
    with ExitStack() as open_:
        holders = [
            open_.enter_context(stall(served, prefix, f"holder-{number}"))
            for number in range(HOLDER_COUNT)
        ]
        for one in holders:
            one.reply(DeliveryAccepted)
            one.send(SendBody(offset_bytes=0, length_bytes=PAYLOAD_BYTES, into_socket=False))
        wait_until(lambda: health(served) == (HOLDER_COUNT, MEMORY_BYTES), "all memory to be held")
        yield holders
    wait_until(lambda: health(served) == (0, 0), "all memory to come back")


def test_many_more_bodies_than_fit_into_memory_all_arrive(
    tight: ScheduledServer, tight_prefix: Prefix
) -> None:
    with all_memory_held(tight, tight_prefix):
        fetches = [Fetching(begin_and_check, tight_prefix) for _ in range(20)]
        wait_until(lambda: health(tight)[0] == HOLDER_COUNT + 20, "all to come")
        assert tight.state().delivery_count == HOLDER_COUNT  # the others wait
    for one in fetches:
        one.outcome()
    wait_until(lambda: health(tight) == (0, 0), "all memory to come back")


@pytest.mark.parametrize("how", ["hangs up", "reads"])
def test_whoever_waits_for_memory_is_served_once_one_who_holds_it_lets_go(
    tight: ScheduledServer, tight_prefix: Prefix, how: str
) -> None:
    s3 = tight.s3()
    key = tight_prefix.keys[0]
    with all_memory_held(tight, tight_prefix) as holders:
        prefix = Fetching(begin_and_check, tight_prefix)
        wait_until(lambda: health(tight)[0] == HOLDER_COUNT + 1, "the prefix to wait")
        plain = Fetching(
            lambda: s3.get_object(Bucket=tight_prefix.bucket.name, Key=key)["Body"].read()
        )
        wait_until(lambda: health(tight)[0] == HOLDER_COUNT + 2, "the object to wait")
        assert health(tight)[1] == MEMORY_BYTES
        assert prefix.is_alive()
        assert plain.is_alive()
        if how == "reads":
            holders[0].receive_bytes(PAYLOAD_BYTES)
        else:
            holders[0].close()
        prefix.outcome()
        assert plain.outcome() == tight_prefix.chunks[0].tobytes()
        wait_until(lambda: health(tight)[0] == HOLDER_COUNT - 1, "both to end")
    s3.close()


def test_whoever_hangs_up_while_it_waits_for_memory_holds_up_nobody(
    tight: ScheduledServer, tight_prefix: Prefix
) -> None:
    with all_memory_held(tight, tight_prefix) as holders:
        for _ in range(3):
            with stall(tight, tight_prefix):
                wait_until(lambda: health(tight)[0] == HOLDER_COUNT + 1, "it to wait")
            wait_until(lambda: health(tight)[0] == HOLDER_COUNT, "it to leave")
        assert health(tight)[1] == MEMORY_BYTES
        holders[0].close()
        begin_and_check(tight_prefix)


# --- an orderly end ---


def test_a_drain_refuses_those_who_wait_and_lets_those_who_run_finish(
    restarting: ScheduledServer,
) -> None:
    changes = ScheduleChanges(cap_gbps=SLOW_GBPS, tenants={"root": TenantShare(deliveries_max=2)})
    with restarting.client() as client:
        prefix = stored_prefix(client, "drained", CHUNK_COUNT // 2)
        restarting.change(changes, reset=True)
        first, second = (begin(prefix, transport) for transport in TRANSPORTS)
        third = Fetching(begin, prefix)
        wait_until(lambda: restarting.state().waiting == 1, "the third to wait")
        with first, second, ended_and_restarted(restarting, signal.SIGTERM):
            with pytest.raises(Unavailable, match="the storage server is stopping") as refused:
                third.outcome()
            assert refused.value.row.http_status == 503
            assert (first.arrivals_s[-1], second.arrivals_s[-1]) == (None, None)
            for delivery in (first, second):
                prefix.check(delivery)


def test_a_drain_refuses_those_who_wait_for_a_rate(restarting: ScheduledServer) -> None:
    with restarting.client() as client:
        prefix = stored_prefix(client, "rated", CHUNK_COUNT)
        changes = ScheduleChanges(policy="equal", cap_gbps=SLOW_GBPS, rates="for_life")
        restarting.change(changes, reset=True)
        first = begin(prefix)
        others = [Fetching(begin, prefix, transport) for transport in TRANSPORTS]
        wait_until(lambda: restarting.state().delivery_count == 3, "the others to wait")
        with first, ended_and_restarted(restarting, signal.SIGTERM):
            for other in others:
                with pytest.raises(Unavailable, match=r"is stopping|cannot be reached"):
                    other.outcome()  # refused, and no other server is there to go to
            assert first.arrivals_s[-1] is None
            prefix.check(first)


def two_run_and_one_waits(state: ScheduleState) -> bool:
    """A delivery that still waits for its rate is refused by a stop like one that waits for its
    turn; one that has sent a byte has its rate.
    """
    running = [each for each in state.deliveries if each.sent_bytes]
    return len(running) == 2 and state.waiting == 1


def test_everything_that_serves_stops_with_deliveries_in_every_state(
    own_server: ScheduledServer,
) -> None:
    with own_server.client() as client:
        prefix = stored_prefix(client, "stopped", CHUNK_COUNT)
        share = TenantShare(deliveries_max=2)
        slow = ScheduleChanges(policy="equal", cap_gbps=SLOW_GBPS, tenants={"root": share})
        own_server.change(slow)
        fetches = [Fetching(begin_and_check, prefix) for _ in range(3)]
        wait_until(lambda: two_run_and_one_waits(own_server.state()), "two to run, one to wait")
        own_server.change(ScheduleChanges(cap_gbps=0.05))
        assert own_server.stop() == 0
        outcomes: list[bool] = []
        for fetching in fetches:
            try:
                fetching.outcome()
                outcomes.append(True)
            except ObjectCacheError:
                outcomes.append(False)
        assert outcomes.count(True) >= 2
