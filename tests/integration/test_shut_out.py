"""Whoever fills a gateway's connections and places shuts nobody else out.

The limits are small, so that few clients fill them. The victim makes a connection for each request,
as somebody does who was not there before.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from tests.integration.tenants import Tenant, new_tenant
from tests.integration.test_s3_wire import receive_rest, until
from tests.processes_http import ask
from tests.s3_clients import (
    open_socket,
    receive_answer,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server

CONNECTIONS_MAX, REQUESTS_MAX = 24, 8
ROUNDS = 20
BOUND_S = 30.0  # generous: machines are busy
LAYERS, SLICE_BYTES = 4, 4096
SLOW_BODY_BYTES = 32 << 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = (
        "storage.engine=memory",
        f"gateway.connections_max={CONNECTIONS_MAX}",
        f"gateway.requests_in_flight_max={REQUESTS_MAX}",
    )
    with start_server(tmp_path_factory.mktemp("shut-out") / "data", *settings) as running:
        yield running


@pytest.fixture(scope="module")
def victim(server: RunningServer) -> Tenant:
    return new_tenant(server, "victim")


@pytest.fixture(scope="module")
def bucket(victim: Tenant) -> str:
    name = victim.new_bucket()
    assert victim.call("PUT", f"/{name}/small", b"small").status == 200
    assert victim.call("PUT", f"/{name}/chunk", b"k" * LAYERS * SLICE_BYTES).status == 200
    return name


@pytest.fixture(scope="module")
def greedy(server: RunningServer) -> list[tuple[Tenant, str]]:
    tenants = [new_tenant(server, f"greedy{number}") for number in range(3)]
    return [(one, one.new_bucket()) for one in tenants]


def small_get(victim: Tenant, bucket: str) -> bool:
    return victim.call("GET", f"/{bucket}/small").body == b"small"


def small_put(victim: Tenant, bucket: str) -> bool:
    return victim.call("PUT", f"/{bucket}/put", b"put").status == 200


def delivery(victim: Tenant, bucket: str) -> bool:
    asked = Descriptor(
        ("chunk",), LAYERS, 16, SLICE_BYTES, delivery=DeliveryMode.LAYERWISE
    ).to_bytes()
    answer = victim.call("POST", f"/{bucket}?kv-get", asked)
    return answer.body == b"k" * LAYERS * SLICE_BYTES


def check_victim(attack: str, victim: Tenant, bucket: str) -> None:
    """All of the victim's requests succeed, within the bound."""
    for request in (small_get, small_put, delivery):
        took_s: list[float] = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            assert request(victim, bucket), f"{attack}: {request.__name__}"
            took_s.append(time.perf_counter() - began_s)
        took_s.sort()
        print(
            f"{attack}: {request.__name__} p50 {took_s[ROUNDS // 2]:.4f} s, p99 {took_s[-1]:.4f} s"
        )
        assert took_s[-1] < BOUND_S


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# --- who has shown no signature ------------------------------------------------------------------


def silent(server: RunningServer) -> socket.socket:
    return open_socket(server)


def half_a_head(server: RunningServer) -> socket.socket:
    connection = open_socket(server)
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    return connection


def refused_and_kept(server: RunningServer) -> socket.socket:
    connection = open_socket(server)
    send_head(connection, "GET", "/nobody/signs", {"Host": "x"})
    assert receive_answer(connection).status == 403
    return connection


def refusals_unread(server: RunningServer) -> socket.socket:
    """Many refusals that nobody reads, which stand in the gateway."""
    connection = open_socket(server)
    connection.setblocking(False)
    head = b"GET /" + b"x" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    try:
        for _ in range(2000):
            connection.send(head * 20)
    except (BlockingIOError, ConnectionError):
        pass
    return connection


@pytest.mark.parametrize("attack", [silent, half_a_head, refused_and_kept, refusals_unread])
def test_strangers_shut_nobody_out(
    server: RunningServer,
    victim: Tenant,
    bucket: str,
    attack: Callable[[RunningServer], socket.socket],
) -> None:
    with ExitStack() as held:
        kept = held.enter_context(open_socket(server))
        path = f"/{bucket}/small"
        named = signed_headers(server, "GET", path, credentials=victim.credentials)
        send_head(kept, "GET", path, named)
        assert receive_answer(kept).status == 200
        first, *_ = [held.enter_context(attack(server)) for _ in range(2 * CONNECTIONS_MAX)]
        check_victim(attack.__name__, victim, bucket)
        first.settimeout(BOUND_S)
        receive_rest(first)
        send_head(kept, "GET", path, named)
        assert receive_answer(kept).status == 200, "it has shown a signature before"


# --- tenants -------------------------------------------------------------------------------------


def test_a_tenants_idle_connections_are_lent_to_it_and_taken_back(
    server: RunningServer, victim: Tenant, bucket: str, greedy: list[tuple[Tenant, str]]
) -> None:
    tenant, _ = greedy[0]
    with ExitStack() as held:
        idle = [held.enter_context(open_socket(server)) for _ in range(CONNECTIONS_MAX - 2)]
        for connection in idle:
            send_head(
                connection,
                "GET",
                "/",
                signed_headers(server, "GET", "/", credentials=tenant.credentials),
            )
            assert receive_answer(connection).status == 200
        kept = [held.enter_context(open_socket(server)) for _ in range(2)]
        for connection in kept:
            send_head(
                connection,
                "GET",
                f"/{bucket}/small",
                signed_headers(server, "GET", f"/{bucket}/small", credentials=victim.credentials),
            )
            assert receive_answer(connection).status == 200
        check_victim("idle connections of a tenant", victim, bucket)
        assert all(is_open(connection) for connection in kept)
        open_count = sum(is_open(connection) for connection in idle)
        assert CONNECTIONS_MAX // 2 < open_count < len(idle)


def slow_put(server: RunningServer, tenant: Tenant, bucket: str, name: str) -> socket.socket:
    """A put whose client was told to go on and sends three bytes."""
    path = f"/{bucket}/{name}"
    named = signed_headers(
        server,
        "PUT",
        path,
        headers={"Expect": "100-continue", "Content-Length": str(SLOW_BODY_BYTES)},
        payload_hash="UNSIGNED-PAYLOAD",
        credentials=tenant.credentials,
    )
    connection = open_socket(server)
    send_head(connection, "PUT", path, named)
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
    connection.sendall(b"xxx")
    return connection


@pytest.mark.parametrize("tenants", [1, 2, 3])
def test_puts_that_stand_still_hold_no_place_that_another_tenant_needs(
    server: RunningServer,
    victim: Tenant,
    bucket: str,
    greedy: list[tuple[Tenant, str]],
    tenants: int,
) -> None:
    with ExitStack() as held:
        slow: list[socket.socket] = []
        for number in range(REQUESTS_MAX):
            tenant, own = greedy[number % tenants]
            put = slow_put(server, tenant, own, str(number))
            slow.append(held.enter_context(put))
        check_victim(f"slow puts of {tenants}", victim, bucket)
        given_up = receive_answer(slow[0], "PUT")
        assert (given_up.status, given_up.code) == (503, "SlowDown")
        assert given_up.headers["Retry-After"] == "1"
        for put in slow[1:]:
            put.sendall(b"x" * (SLOW_BODY_BYTES - 3))
        assert [receive_answer(put, "PUT").status for put in slow[1:]] == [200] * (len(slow) - 1)


# --- what is said of it --------------------------------------------------------------------------


def crowded(server: RunningServer) -> str:
    state = json.loads(ask(server.run_dir / "gateway-0.sock", "GET", "/state")[1])
    return str(state["crowded"])


def test_the_gateways_state_and_log_say_that_clients_were_turned_away(
    server: RunningServer,
) -> None:
    with ExitStack() as held:
        for _ in range(2 * CONNECTIONS_MAX):
            held.enter_context(open_socket(server))
        until(lambda: "connections ended on which nobody had signed" in crowded(server))
    log = server.data_dir / "gateway.log"
    until(lambda: "clients were turned away" in log.read_text())


def test_a_head_without_an_end_is_refused(server: RunningServer) -> None:
    with open_socket(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        for number in range(100):
            try:
                connection.sendall(f"X-{number}: ".encode() + b"x" * 4000 + b"\r\n")
            except ConnectionError:
                break
        rest = receive_rest(connection)
        assert rest == b"" or rest.startswith(b"HTTP/1.1 431 ")
