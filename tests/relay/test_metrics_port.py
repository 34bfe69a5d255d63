"""Strangers at the port of a relay's and a fetcher's metrics, which asks nobody who they are."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_relay.metrics_port import CONNECTIONS_MAX
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import BOUND_S, RunningRelay, check_get, prometheus_text
from tests.relay.test_relay_strangers import is_ended
from tests.servers import RunningServer


@pytest.fixture(scope="module", params=[RunningRelay, RunningFetcher], ids=["relay", "fetcher"])
def log_and_port(
    request: pytest.FixtureRequest,
    server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, int]]:
    kind: type[RunningRelay] = request.param
    log = tmp_path_factory.mktemp(kind.name) / f"{kind.name}.log"
    with kind(server, log):
        found = re.search(r"metrics: port ([0-9]+)", log.read_text())
        assert found is not None
        yield log, int(found[1])


def answer(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), BOUND_S) as asking:
        asking.sendall(request)
        data = b""
        while piece := asking.recv(1 << 16):
            data += piece
        return data


@pytest.mark.parametrize(
    "junk",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nbad header: Marked\r\n\r\n",
        b"\x16\x03\x01Marked\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nx: " + b"Marked" * 10_000 + b"\r\n\r\n",
    ],
    ids=["length", "field", "tls", "long"],
)
def test_junk_is_refused_without_an_echo_or_a_traceback(
    log_and_port: tuple[Path, int], junk: bytes
) -> None:
    log, port = log_and_port
    told = answer(port, junk)
    assert told.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b"Server: ObjectCache-" in told
    assert b"Marked" not in told
    said = log.read_text()
    assert "unreadable request" in said
    assert "Traceback" not in said
    assert "Marked" not in said


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /metrics", b" 200 "),
        (b"HEAD /metrics", b" 200 "),
        (b"POST /metrics", b" 405 "),
        (b"GET /other", b" 404 "),
    ],
)
def test_what_is_answered_names_the_process(
    log_and_port: tuple[Path, int], line: bytes, status: bytes
) -> None:
    told = answer(log_and_port[1], line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = told.partition(b"\r\n\r\n")
    assert status in head.partition(b"\r\n")[0]
    assert b"Server: ObjectCache-" in head
    assert (b"objectcache_relay_read_queue_bytes" in body) == (line == b"GET /metrics")


def test_silent_connections_leave_engines_their_descriptors(
    server: RunningServer, tmp_path: Path
) -> None:
    log = tmp_path / "fetcher.log"
    with RunningFetcher(server, log) as fetcher, contextlib.ExitStack() as closing:
        resource.prlimit(fetcher.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        found = re.search(r"metrics: port ([0-9]+)", log.read_text())
        assert found is not None
        for _ in range(400):
            closing.enter_context(socket.create_connection(("127.0.0.1", int(found[1])), BOUND_S))
        with fetcher.client("shared_memory") as engine:
            check_get(engine)
        assert "cannot accept" not in log.read_text()


def test_silent_connections_keep_nobody_out(log_and_port: tuple[Path, int]) -> None:
    _, port = log_and_port
    with contextlib.ExitStack() as closing:
        silent = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S))
            for _ in range(3 * CONNECTIONS_MAX)
        ]
        wait_until(
            lambda: sum(map(is_ended, silent)) >= len(silent) - CONNECTIONS_MAX,
            "all but a port's places are ended",
        )
        assert "objectcache_relay_read_queue_bytes" in prometheus_text(port)
        wait_until(
            lambda: sum(map(is_ended, silent)) >= len(silent) - CONNECTIONS_MAX // 2,
            "those that say nothing do not keep more than half of the places",
        )
