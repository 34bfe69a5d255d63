"""What real processes count, and how it is read from outside."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache import Client, KvLayout
from objectcache_schemas.messages.buckets import ConfigureBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.server_state import GetMetrics, Metrics, SetLogLevel
from objectcache_schemas.records import BucketConfiguration, Quota
from tests.integration.served import wait_until
from tests.processes_http import ask
from tests.s3_clients import s3_client
from tests.servers import RunningServer, ServerProcess, start_server
from tests.storage_client import StorageClient

LAYOUT = KvLayout(
    num_layers=4,
    chunk_tokens=16,
    per_layer_chunk_bytes=4096,
    dtype="float16",
    fingerprint="counted",
)
CHUNKS = 8
CHUNKWISE = {"delivery": "chunkwise", "path": "batch", "transport": "tcp"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of its own, so that what is counted is what these tests do."""
    with start_server(tmp_path_factory.mktemp("counted")) as running:
        work(running)
        yield running


def work(server: RunningServer) -> None:
    """A put, a get and a miss; then a prefix is put twice, matched, and delivered both ways."""
    s3 = s3_client(server)
    s3.create_bucket(Bucket="plain-bucket")
    s3.put_object(Bucket="plain-bucket", Key="a", Body=b"x" * 5000)
    s3.get_object(Bucket="plain-bucket", Key="a")["Body"].read()
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket="plain-bucket", Key="b")
    s3.create_bucket(Bucket="small-bucket")
    none = BucketConfiguration(quota=Quota(object_count=0))
    with StorageClient(server.run_dir / "storage.sock") as storage:
        request = ConfigureBucket(
            name="small-bucket", configuration=none, replaces=BucketConfiguration()
        )
        storage.ask(request, Done)
    with pytest.raises(s3.exceptions.ClientError, match="QuotaExceeded"):
        s3.put_object(Bucket="small-bucket", Key="a", Body=b"x")
    s3.close()
    pair = server.credentials
    with Client(server.endpoint, access_key=pair.access_key, secret_key=pair.secret_key) as client:
        bucket = client.kv_bucket("kv-bucket", LAYOUT, create=True)
        keys = bucket.chunk_keys(np.arange(2 * CHUNKS * LAYOUT.chunk_tokens))
        chunks = np.ones((CHUNKS, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes), dtype=np.uint8)
        bucket.put(keys[:CHUNKS], chunks)
        bucket.put(keys[:CHUNKS], chunks)
        assert bucket.match(keys) == CHUNKS
        with bucket.fetch(
            keys[:CHUNKS], delivery="layerwise", transport="shared_memory"
        ) as running:
            for layer, _ in running:
                running.consumed(layer, 0.25)
            running.wait()
        with bucket.fetch(keys[:CHUNKS], delivery="chunkwise", transport="body") as running:
            running.wait()
        # A client has the last byte of a body before the server has counted it, and one that is
        # gone by then may be taken for one that left.
        last = ("objectcache_deliveries_total", frozenset({**CHUNKWISE, "outcome": "ok"}.items()))
        wait_until(lambda: last in samples_of(storage_page(server)), "the body to be counted")


def gateway_page(server: RunningServer) -> str:
    status, body = ask(server.run_dir / "gateway-0.sock", "GET", "/metrics")
    assert status == 200
    return body.decode()


def storage_page(server: RunningServer) -> str:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        return storage.ask(GetMetrics(), Metrics).text.decode()


def samples_of(page: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_a_gateway_counts_requests_by_operation_status_and_tenant(counted: RunningServer) -> None:
    found = samples_of(gateway_page(counted))
    requests = "objectcache_requests_total"
    assert value(found, requests, operation="GetObject", status="200") == 1
    assert value(found, requests, operation="GetObject", status="404") == 1
    assert value(found, requests, operation="PutObject", status="200") == 1
    assert value(found, "objectcache_request_errors_total", code="NoSuchKey") >= 1
    assert value(found, "objectcache_request_first_byte_seconds_count", operation="GetObject") == 2
    sent = value(found, "objectcache_response_sent_bytes_total", operation="GetObject")
    assert 5000 < sent < 6000  # the object, and the document of the error
    received = value(found, "objectcache_request_received_bytes_total", operation="PutObject")
    assert received == 5000
    assert value(found, "objectcache_tenant_requests_total", tenant="root", status="200") >= 6


def test_a_quota_that_refuses_is_counted_by_its_field(counted: RunningServer) -> None:
    found = samples_of(gateway_page(counted))
    assert value(found, "objectcache_quota_refusals_total", quota="object_count") == 1


def test_a_match_counts_hits_and_misses_in_chunks_and_in_tokens(counted: RunningServer) -> None:
    found = samples_of(gateway_page(counted))
    for result in ("hit", "miss"):
        labels = {"tenant": "root", "result": result}
        assert value(found, "objectcache_match_chunks_total", **labels) == CHUNKS
        tokens = value(found, "objectcache_match_tokens_total", **labels)
        assert tokens == CHUNKS * LAYOUT.chunk_tokens


def test_a_storage_server_counts_deliveries_by_mode_path_and_transport(
    counted: RunningServer,
) -> None:
    deliveries = "objectcache_deliveries_total"
    layerwise = {"delivery": "layerwise", "path": "agg", "transport": "shared_memory"}
    found = samples_of(storage_page(counted))
    assert value(found, deliveries, **layerwise, outcome="ok") == 1
    assert value(found, deliveries, **CHUNKWISE, outcome="ok") == 1
    prefix_bytes = CHUNKS * LAYOUT.chunk_bytes
    assert value(found, "objectcache_delivered_bytes_total", path="agg") == prefix_bytes
    assert value(found, "objectcache_delivered_chunks_total", path="batch") == CHUNKS
    assert value(found, "objectcache_delivery_first_layer_seconds_count", path="agg") == 1
    assert value(found, "objectcache_put_chunks_total", result="stored") == CHUNKS
    assert value(found, "objectcache_put_chunks_total", result="existing") == CHUNKS
    stored = value(found, "objectcache_tenant_stored_bytes", tenant="root")
    assert stored == prefix_bytes + 5000
    assert value(found, "objectcache_tenant_objects", tenant="root") == CHUNKS + 1
    assert value(found, "objectcache_engine_operation_seconds_count", operation="commit") >= 3
    assert value(found, "objectcache_engine_operation_seconds_count", operation="read") >= 2


def test_layers_that_a_client_says_it_consumed_are_counted_once(counted: RunningServer) -> None:
    layers = ("objectcache_tenant_consumed_layers_total", frozenset({("tenant", "root")}))

    def consumed() -> float:
        return samples_of(storage_page(counted)).get(layers, 0.0)

    wait_until(lambda: consumed() >= LAYOUT.num_layers, "what is told unanswered")
    found = samples_of(storage_page(counted))
    assert found[layers] == LAYOUT.num_layers
    compute_s = value(found, "objectcache_tenant_compute_seconds_total", tenant="root")
    assert compute_s == pytest.approx(0.25 * LAYOUT.num_layers)
    assert value(found, "objectcache_tenant_stall_seconds_total", tenant="root") >= 0


def test_the_control_socket_is_its_users_own_and_refuses_what_it_does_not_know(
    counted: RunningServer,
) -> None:
    path = counted.run_dir / "gateway-0.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(path, "GET", "/secrets")[0] == 404
    assert ask(path, "PUT", "/metrics")[0] == 404
    status, body = ask(path, "GET", "/state")
    state = json.loads(body)
    assert (status, state["pid"], state["draining"]) == (200, counted.gateway_pid, False)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"level": "loud"}', "level must be one of debug, info, warning, error"),
        ("{}", "level"),
        ("level=debug", "the body must be like"),
        (json.dumps({"level": "x" * 2000}), "over 1024 bytes"),
    ],
    ids=["unknown level", "no level", "no JSON", "too long"],
)
def test_a_log_level_that_is_none_is_refused(counted: RunningServer, body: str, says: str) -> None:
    status, answer = ask(counted.run_dir / "gateway-0.sock", "PUT", "/log-level", body)
    assert status == 400
    assert says in answer.decode()


def test_the_control_socket_answers_rubbish_as_json_without_a_traceback(
    counted: RunningServer,
) -> None:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(20)
        connected.connect(str(counted.run_dir / "gateway-0.sock"))
        connected.sendall(b"\x16\x03\x01 rubbish\r\n\r\n")
        answer = b"".join(iter(lambda: connected.recv(4096), b""))
    assert b" 400 Bad Request\r\n" in answer
    assert b'"code":"InvalidRequest"' in answer
    assert b"rubbish" not in answer
    assert ask(counted.run_dir / "gateway-0.sock", "GET", "/state")[0] == 200
    assert "Traceback" not in (counted.data_dir / "gateway.log").read_text("utf-8")


def test_log_levels_change_at_run_time(tmp_path: Path) -> None:
    settings = ("gateway.log_level=error", "storage.log_level=error", "server.log_format=json")
    with start_server(tmp_path / "data", *settings) as running:
        s3 = s3_client(running)
        s3.create_bucket(Bucket="quiet-bucket")
        sock = running.run_dir / "gateway-0.sock"
        answer = ask(sock, "PUT", "/log-level", '{"level": "info"}')
        assert answer == (200, b'{"level":"info"}')
        s3.create_bucket(Bucket="loud-bucket")
        with StorageClient(running.run_dir / "storage.sock") as storage:
            assert storage.ask(SetLogLevel(level="info"), Done) == Done()
        s3.close()
        running.gateway.terminate()
        running.storage.terminate()
    lines = [
        json.loads(line)
        for name in ("gateway.log", "storage.log")
        for line in (tmp_path / "data" / name).read_text().splitlines()
    ]
    requests = [line for line in lines if line["message"] == "request"]
    assert [line["bucket"] for line in requests] == ["loud-bucket"]
    assert requests[0]["status"] == 200
    assert {line["process"] for line in lines} == {"gateway-0", "storage"}


@contextmanager
def admin_beside(server: RunningServer) -> Iterator[Path]:
    """The socket of an admin server of its data directory."""
    arguments = [
        *("--data-dir", str(server.data_dir), "--set", f"server.run_dir={server.run_dir}"),
        *("--set", "admin.listen=off"),
    ]
    process = ServerProcess("objectcache_gateway.admin", arguments, server.data_dir / "admin.log")
    try:
        process.wait_ready()
        yield server.run_dir / "admin.sock"
    finally:
        process.terminate()


def page_with(socket_path: Path, *processes: str) -> tuple[str, int]:
    """The admin server's page once all of these are in it, and how often it was asked for: a
    process that does not answer within a second is left out, as on a busy machine any may be.
    """
    pages: list[str] = []

    def has_all() -> bool:
        status, body = ask(socket_path, "GET", "/metrics")
        assert status == 200
        pages.append(body.decode())
        found = samples_of(pages[-1])
        up = "objectcache_process_up"
        return all(value(found, up, process="admin", scraped=one) for one in processes)

    wait_until(has_all, f"{processes} to answer")
    return pages[-1], len(pages)


def test_the_admin_server_puts_all_pages_together(counted: RunningServer) -> None:
    with admin_beside(counted) as socket_path:
        page, _ = page_with(socket_path, "storage", "gateway-0")
    for family in re.findall(r"^# TYPE (\S+)", page, re.M):
        assert page.count(f"# TYPE {family} ") == 1
    found = samples_of(page)
    requests = {"operation": "PutObject", "status": "200", "process": "gateway-0"}
    assert value(found, "objectcache_requests_total", **requests) == 1
    assert value(found, "process_open_fds", process="storage") > 3


def test_a_process_that_does_not_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    with start_server(tmp_path) as running, admin_beside(running) as socket_path:
        running.kill_gateway()
        page_with(socket_path)
        page, more_times = page_with(socket_path, "storage")
    found: Any = samples_of(page)
    assert value(found, "objectcache_process_up", process="admin", scraped="gateway-0") == 0
    labels = {"process": "admin", "scraped": "gateway-0"}
    assert value(found, "objectcache_scrape_failures_total", **labels) == 1 + more_times
    processes = {dict(labels).get("process") for _, labels in found}
    assert processes == {"storage", "admin"}
