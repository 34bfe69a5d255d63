"""Bodies that trickle: what they hold, and for how long."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests.integration.served import wait_until
from tests.integration.tenants import Tenant, new_tenant
from tests.s3_clients import Answer, call, open_socket, receive_answer, send_head, signed_headers
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

SMALL_BYTES = 64 << 10  # received whole before a put begins
LARGE_BYTES = SMALL_BYTES + 1
PAUSE_S = 0.02


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    settings = (
        "storage.engine=memory",
        "storage.puts_max=4",
        "scheduler.queue_max=0",
        "gateway.body_stall_timeout_s=30",
    )
    with start_server(tmp_path / "data", *settings) as running:
        yield running


def begun(
    server: RunningServer, tenant: Tenant, path: str, size_bytes: int, sent_bytes: int = 1
) -> socket.socket:
    """A PUT whose client was told to go on, and has sent `sent_bytes`."""
    named = signed_headers(
        server,
        "PUT",
        path,
        headers={"Expect": "100-continue", "Content-Length": str(size_bytes)},
        payload_hash="UNSIGNED-PAYLOAD",
        credentials=tenant.credentials,
    )
    connection = open_socket(server)
    send_head(connection, "PUT", path, named)
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
    connection.sendall(b"x" * sent_bytes)
    return connection


def ended(connection: socket.socket, size_bytes: int, sent_bytes: int = 1) -> int:
    connection.sendall(b"x" * (size_bytes - sent_bytes))
    return receive_answer(connection, "PUT").status


def test_a_tenant_whose_bodies_trickle_leaves_slots_to_others(server: RunningServer) -> None:
    slow, other = new_tenant(server, "slow"), new_tenant(server, "other")
    slow_bucket, other_bucket = slow.new_bucket(), other.new_bucket()
    with ExitStack() as open_:
        trickling = [
            open_.enter_context(
                begun(server, slow, f"/{slow_bucket}/{number}", LARGE_BYTES, SMALL_BYTES)
            )
            for number in range(3)
        ]
        wait_until(lambda: puts_running(server) == 3, "all to have a slot")
        refused = slow.call("PUT", f"/{slow_bucket}/more", b"x" * LARGE_BYTES)
        assert (refused.status, refused.code) == (503, "SlowDown")
        assert refused.headers["Retry-After"] == "1"
        assert "3 puts are running, storage.puts_max is 4" in (
            refused.xml.findtext("Message") or ""
        )
        assert other.call("PUT", f"/{other_bucket}/key", b"x" * LARGE_BYTES).status == 200
        assert [ended(one, LARGE_BYTES, SMALL_BYTES) for one in trickling] == [200] * 3
    assert slow.call("PUT", f"/{slow_bucket}/more", b"x" * LARGE_BYTES).status == 200


def puts_running(server: RunningServer) -> int:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        page = storage.ask(GetMetrics(), Metrics).text.decode()
    found = re.search(r"^objectcache_puts_running ([0-9.]+)", page, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_large_bodies_of_which_little_has_come_hold_no_slot(server: RunningServer) -> None:
    slow = new_tenant(server, "slow")
    bucket = slow.new_bucket()
    with ExitStack() as open_:
        for number in range(8):
            open_.enter_context(begun(server, slow, f"/{bucket}/{number}", LARGE_BYTES, 3))
        assert puts_running(server) == 0
        assert slow.call("PUT", f"/{bucket}/large", b"x" * LARGE_BYTES).status == 200


def test_small_bodies_that_trickle_hold_no_slot(server: RunningServer) -> None:
    slow = new_tenant(server, "slow")
    bucket = slow.new_bucket()
    upload = slow.call("POST", f"/{bucket}/upload?uploads").xml.findtext("{*}UploadId")
    paths = [f"/{bucket}/{number}" for number in range(4)]
    paths += [f"/{bucket}/upload?partNumber={number}&uploadId={upload}" for number in (1, 2)]
    with ExitStack() as open_:
        trickling = [open_.enter_context(begun(server, slow, path, SMALL_BYTES)) for path in paths]
        assert slow.call("PUT", f"/{bucket}/large", b"x" * LARGE_BYTES).status == 200
        assert [ended(one, SMALL_BYTES) for one in trickling] == [200] * len(paths)
    assert slow.call("GET", f"/{bucket}/3").body == b"x" * SMALL_BYTES


def trickled(server: RunningServer, size_bytes: int) -> Answer:
    """The answer to a PUT whose bytes come one by one, until there is one."""
    named = signed_headers(server, "PUT", "/bbb/k", payload_hash="UNSIGNED-PAYLOAD")
    with open_socket(server) as connection:
        send_head(connection, "PUT", "/bbb/k", named | {"Content-Length": str(size_bytes)})
        for _ in range(size_bytes):
            if select.select([connection], [], [], PAUSE_S)[0]:
                break
            connection.sendall(b"x")
        return receive_answer(connection, "PUT")


def test_a_body_below_the_least_rate_is_given_up_though_it_never_stops(tmp_path: Path) -> None:
    settings = (
        "storage.engine=memory",
        "gateway.body_stall_timeout_s=1",
        "gateway.body_rate_bytes_per_s_min=1000000",
    )
    with start_server(tmp_path / "data", *settings) as server:
        call(server, "PUT", "/bbb")
        for size_bytes in (1000, LARGE_BYTES):
            answer = trickled(server, size_bytes)
            assert (answer.status, answer.code) == (400, "RequestTimeout")
            assert answer.headers["Connection"] == "close"
            assert "gateway.body_rate_bytes_per_s_min" in (answer.xml.findtext("Message") or "")
            assert call(server, "GET", "/bbb/k").status == 404
