"""What clients notice of restarts, under load: no connection is refused, nobody disables itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from botocore.config import Config

from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState
from tests.certificates import Authority
from tests.integration.served import QUIET_SETTINGS, Served, own_environment, wait_until
from tests.integration.steady_clients import SteadyClients
from tests.processes_http import ask
from tests.s3_clients import boto3_client, call
from tests.servers import running_server, standing_still
from tests.storage_client import StorageClient

STORAGE = "objectcache_storage_server"
BODIES = [os.urandom(size_bytes) for size_bytes in (100, 4096, 4096, 300_000)]


def served_with(directory: Path, *settings: str) -> Served:
    every = (*QUIET_SETTINGS, "gateway.processes=2", "storage.engine=files", *settings)
    arguments = [part for setting in every for part in ("--set", setting)]
    return Served(directory / "data", *arguments)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Two gateways (gateway.processes) over one storage server."""
    with served_with(tmp_path) as server:
        server.wait_ready()
        yield server


def s3_of(served: Served, ca_file: str | None = None) -> Any:
    """A client whose presigned URLs are SigV4, for any body."""
    access_key, secret_key = served.credentials
    return boto3_client(
        endpoint_url=served.endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        verify=ca_file,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )


def check_nobody_suffered(clients: SteadyClients) -> None:
    assert not clients.any_disabled
    assert "ConnectionRefusedError" not in clients.errors
    assert clients.wrong_bodies == 0
    assert set(clients.statuses) <= {200, 503}


def test_both_gateways_serve_the_port(served: Served) -> None:
    assert set(served.gateway_pids()) == {0, 1}
    logs = served.data_dir / "run"
    assert {path.name for path in logs.glob("gateway-*.sock")} == {
        "gateway-0.sock",
        "gateway-1.sock",
    }
    for pid in served.gateway_pids().values():
        with standing_still(pid):
            assert served.health_status() == 200  # by the other one


def test_a_rolling_restart_refuses_and_breaks_no_connection(served: Served) -> None:
    before = served.gateway_pids()
    with SteadyClients(s3_of(served), BODIES) as clients:
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: served.errors().count("was replaced") == 2, "both to be replaced")
        clients.wait_served(20)
    check_nobody_suffered(clients)
    assert clients.errors == []
    assert set(clients.statuses) == {200}
    after = served.gateway_pids()
    assert set(after) == {0, 1}
    assert not set(after.values()) & set(before.values())
    assert served.stop() == 0


def test_a_killed_gateway_of_two_costs_its_requests_and_refuses_nobody(served: Served) -> None:
    with SteadyClients(s3_of(served), BODIES) as clients:
        victim = served.gateway_pids()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "serves again" in served.errors(), "the gateway to be started again")
        clients.wait_served(20)
    check_nobody_suffered(clients)
    assert len(clients.errors) <= len(BODIES)  # each connection breaks at most once


def test_all_gateways_killed_at_once_make_clients_wait_and_refuse_nobody(served: Served) -> None:
    with SteadyClients(s3_of(served), BODIES) as clients:
        for pid in served.gateway_pids().values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: served.errors().count("serves again") == 2, "both to be started again")
        clients.wait_served(20)
    check_nobody_suffered(clients)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_storage_server_that_is_restarted_makes_requests_wait(
    served: Served, number: signal.Signals
) -> None:
    with SteadyClients(s3_of(served), BODIES[:3]) as clients:
        os.kill(served.children()[STORAGE], number)
        wait_until(lambda: "serves again" in served.errors(), "the storage server to come back")
        clients.wait_served(20)
    check_nobody_suffered(clients)
    assert clients.errors == []


def test_a_stop_refuses_what_waits_at_once_and_finishes_what_runs(tmp_path: Path) -> None:
    bounds = ("scheduler.tenant_deliveries_max=1", "scheduler.queue_timeout_s=600")
    body = os.urandom(48 << 20)  # more than sockets hold
    with served_with(tmp_path, *bounds) as served:
        served.wait_ready()
        s3 = s3_of(served)
        s3.create_bucket(Bucket="waiting")
        s3.put_object(Bucket="waiting", Key="k", Body=body)
        running = s3.get_object(Bucket="waiting", Key="k")["Body"]
        url = s3.generate_presigned_url("get_object", {"Bucket": "waiting", "Key": "k"})
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), 60) as waiting:
            request = f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
            waiting.sendall(request.encode())
            wait_until(lambda: waiting_count(served) == 1, "the second get to wait for its turn")
            served.process.send_signal(signal.SIGTERM)
            answer = waiting.recv(4096)  # by the request's own bound it would wait ten minutes
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in answer
        assert running.read() == body
        assert served.wait_exit() == 0
        s3.close()


def waiting_count(served: Served) -> int:
    """Deliveries that wait for their turn."""
    with StorageClient(served.data_dir / "run" / "storage.sock") as storage:
        return storage.ask(GetSchedule(), ScheduleState).waiting


def test_orphans_finish_what_they_began_and_what_is_asked_meanwhile(served: Served) -> None:
    s3 = s3_of(served)
    s3.create_bucket(Bucket="orphans")
    s3.put_object(Bucket="orphans", Key="small", Body=b"x" * 1000)
    parts = urlsplit(served.endpoint)
    address = (str(parts.hostname), parts.port or 0)

    def path_of(operation: str, key: str) -> str:
        signed = urlsplit(s3.generate_presigned_url(operation, {"Bucket": "orphans", "Key": key}))
        return f"{signed.path}?{signed.query}"

    orphans = [psutil.Process(pid) for pid in served.children().values()]
    orphans += [psutil.Process(pid) for pid in served.gateway_pids().values()]
    with (
        contextlib.closing(http.client.HTTPConnection(*address, timeout=60)) as asking,
        socket.create_connection(address, 60) as putting,
    ):
        asking.request("GET", path_of("get_object", "small"))
        assert len(asking.getresponse().read()) == 1000
        head = f"PUT {path_of('put_object', 'large')} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        putting.sendall(f"{head}Content-Length: 3000000\r\n\r\n".encode() + bytes(1_000_000))
        wait_until(lambda: any(state["requests_in_flight"] for state in states(served)), "the put")
        served.process.kill()
        wait_until(lambda: all(state["draining"] for state in states(served)), "the drain")
        asking.request("GET", path_of("get_object", "small"))
        answer = asking.getresponse()
        assert (answer.status, len(answer.read())) == (200, 1000)
        putting.sendall(bytes(2_000_000))
        assert putting.recv(4096).startswith(b"HTTP/1.1 200")
    s3.close()
    _, alive = psutil.wait_procs(orphans, timeout=60)
    assert not alive


def states(served: Served) -> list[dict[str, Any]]:
    """What the gateways that still serve say of themselves."""
    found: list[dict[str, Any]] = []
    for path in sorted((served.data_dir / "run").glob("gateway-*.sock")):
        with contextlib.suppress(OSError, http.client.HTTPException):
            found.append(json.loads(ask(path, "GET", "/state")[1]))
    return found


def test_a_server_without_a_storage_server_answers_503_with_retry_after(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", "storage.engine=memory") as server:
        server.kill_storage()
        with socket.create_connection((server.host, server.port), 60) as client:
            client.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 403")  # an anonymous request
        s3 = boto3_client(
            endpoint_url=server.endpoint,
            aws_access_key_id=server.credentials.access_key,
            aws_secret_access_key=server.credentials.secret_key,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}),
        )
        with pytest.raises(s3.exceptions.ClientError) as caught:
            s3.list_buckets()
        s3.close()
        answer = caught.value.response["ResponseMetadata"]
        assert answer["HTTPStatusCode"] == 503
        assert int(answer["HTTPHeaders"]["retry-after"]) >= 1


def test_what_an_engine_can_compute_instead_waits_for_no_restart(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, ThreadPoolExecutor(1) as threads:
        assert call(server, "PUT", "/prefixes").status == 200
        match = msgspec.msgpack.encode({"v": 1, "chunk_keys": ["a"]})
        asked = {
            "/prefixes?kv-match": match,
            "/prefixes?kv-get": Descriptor(("a",), 2, 16, 4096).to_bytes(),
            "/?kv-session": b"",
        }
        served = [call(server, "POST", path, body).status for path, body in asked.items()]
        assert 503 not in served
        server.kill_storage()
        waiting = threads.submit(call, server, "GET", "/prefixes")
        answers = [call(server, "POST", path, body) for path, body in asked.items()]
        assert not waiting.done()
        server.restart_storage()
        assert waiting.result().status in (200, 503)  # the latter where the start took over 5 s
        assert [(a.status, a.headers["Retry-After"]) for a in answers] == 3 * [(503, "1")]
        assert call(server, "POST", "/prefixes?kv-match", match).status == 200


def test_sighup_takes_a_renewed_certificate_without_a_broken_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    pair = authority.pair("server")
    settings = (f"gateway.tls_certificate={pair.certificate}", f"gateway.tls_key={pair.key}")
    with served_with(tmp_path, *settings, "gateway.tls_reload_s=3600") as served:
        served.wait_ready()
        tls = ssl.create_default_context(cafile=str(authority.file))
        with SteadyClients(s3_of(served, str(authority.file)), BODIES, tls) as clients:
            authority.pair("server")
            served.process.send_signal(signal.SIGHUP)
            wait_until(lambda: served.errors().count("was replaced") == 2, "the new gateways")
            clients.wait_served(20)
        check_nobody_suffered(clients)
        assert clients.errors == []
        assert served.stop() == 0


def test_connections_wait_while_a_server_under_socket_activation_is_upgraded(
    tmp_path: Path,
) -> None:
    """As systemd does it: the socket outlives `serve`, and the next one takes it over."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        with activated(tmp_path, listener) as first:
            first.wait_ready()
            assert first.endpoint == f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert first.health_status() == 200
            assert first.stop() == 0
        with socket.create_connection(listener.getsockname(), 60) as waiting:
            waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            with activated(tmp_path, listener) as second:
                second.wait_ready()
                assert waiting.recv(4096).startswith(b"HTTP/1.1 200")
                assert second.stop() == 0


def activated(directory: Path, listener: socket.socket) -> Served:
    """`serve` with the socket as descriptor 3, and the variables that systemd sets."""
    program = (
        "import os, sys\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
    )
    served = Served.__new__(Served)
    served.data_dir = directory / "data"
    served._errors = directory / "activated.stderr"
    with served._errors.open("w") as errors:
        served.process = subprocess.Popen(
            [
                *(sys.executable, "-c", program, str(listener.fileno())),
                *("-m", "objectcache_operations", "serve", "--data-dir", str(served.data_dir)),
                *("--set", "storage.engine=files"),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=(listener.fileno(),),
            env=own_environment(),
        )
    served.printed, served.endpoint = [], ""
    return served
