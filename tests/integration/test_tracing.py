"""One request id from the SDK to the operator's view, and spans to a real collector."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from objectcache import Client, KvLayout
from objectcache.kv_bucket import KvBucket
from objectcache_operations.console.app import app
from objectcache_schemas.operators.traces import DeliveryTrace
from tests.integration.served import wait_until
from tests.relay.span_collector import Collector, attributes, collecting
from tests.s3_clients import s3_client
from tests.servers import RunningServer, ServerProcess, start_server

LAYOUT = KvLayout(
    num_layers=6, chunk_tokens=16, per_layer_chunk_bytes=8192, dtype="float16", fingerprint="trace"
)
CHUNK_COUNT = 20
TRACE_ID, SPAN_ID = "0123456789abcdef0123456789abcdef", "0123456789abcdef"


def client_of(server: RunningServer) -> Client:
    keys = server.credentials
    return Client(server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key)


@pytest.fixture
def prefix(server: RunningServer) -> Iterator[tuple[KvBucket, list[str]]]:
    with client_of(server) as client:
        yield stored_prefix(client)


def stored_prefix(client: Client) -> tuple[KvBucket, list[str]]:
    bucket = client.kv_bucket(f"trace-{secrets.token_hex(6)}", LAYOUT, create=True)
    keys = bucket.chunk_keys(np.arange(CHUNK_COUNT * LAYOUT.chunk_tokens))
    shape = (CHUNK_COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
    bucket.put(keys, np.zeros(shape, dtype=np.uint8))
    return bucket, keys


@pytest.fixture(scope="module", autouse=True)
def admin_api(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The admin API beside the server, which `objectcache admin` asks."""
    flags = [
        *("--data-dir", str(server.data_dir), "--set", f"server.run_dir={server.run_dir}"),
        *("--set", "admin.listen=off"),
    ]
    log = tmp_path_factory.mktemp("admin") / "log"
    process = ServerProcess("objectcache_gateway.admin", flags, log)
    process.wait_ready()
    yield process
    process.terminate()


def admin_trace(server: RunningServer, *arguments: str) -> Result:
    where = ["--data-dir", str(server.data_dir), "--set", f"server.run_dir={server.run_dir}"]
    developers = {name: None for name in os.environ if name.startswith("OBJECTCACHE_")}
    return CliRunner(env=developers).invoke(app, ["admin", "trace", *arguments, *where])


def traces_of(server: RunningServer, request_id: str) -> list[DeliveryTrace]:
    result = admin_trace(server, request_id, "--json")
    assert result.exit_code == 0, result.stderr
    return msgspec.convert(json.loads(result.stdout), list[DeliveryTrace])


def trace_of_ended(server: RunningServer, request_id: str) -> DeliveryTrace:
    """The one trace, once the server has ended it: its client may know that a little sooner."""
    found: list[DeliveryTrace] = []

    def has_ended() -> bool:
        found[:] = traces_of(server, request_id)
        return found[0].duration_s is not None

    wait_until(has_ended, "the end of a trace")
    (trace,) = found
    return trace


@pytest.mark.parametrize("transport", ["shared_memory", "body"])
def test_one_request_id_leads_from_the_sdk_to_the_breakdown(
    server: RunningServer, prefix: tuple[KvBucket, list[str]], transport: str, tmp_path: Path
) -> None:
    bucket, keys = prefix
    with bucket.fetch(
        keys, delivery="layerwise", transport=transport, compute_window_s=0.001
    ) as delivery:
        for layer in range(LAYOUT.num_layers):
            delivery.wait_layer(layer)
        request_id = delivery.request_id
    trace = trace_of_ended(server, request_id)
    assert (trace.bucket, trace.delivery, trace.transport != "tcp") == (
        bucket.name,
        "layerwise",
        transport == "shared_memory",
    )
    assert trace.payload_bytes == CHUNK_COUNT * LAYOUT.num_layers * LAYOUT.per_layer_chunk_bytes
    assert trace.window_source == "descriptor"
    seconds = {phase.name: phase.seconds for phase in trace.phases}
    assert trace.duration_s is not None
    assert sum(seconds.values()) == pytest.approx(trace.duration_s + seconds["client"])
    assert seconds["storage"] > 0
    assert seconds["control_plane"] > 0
    times = [(layer.first_read_s, layer.ready_s) for layer in trace.layers]
    assert len(times) == LAYOUT.num_layers
    latest_s = 0.0
    for begun_s, ready_s in times:
        assert begun_s is not None
        assert ready_s is not None
        assert 0 < begun_s < ready_s <= trace.duration_s
        assert ready_s >= latest_s
        latest_s = ready_s
    svg_file = tmp_path / "trace.svg"
    shown = admin_trace(server, request_id, "--svg", str(svg_file))
    assert shown.exit_code == 0, shown.stderr
    assert "control_plane" in shown.stdout
    assert request_id in svg_file.read_text("utf-8")
    assert request_id in admin_trace(server).stdout


def test_all_but_the_network_lies_within_what_the_client_saw(
    server: RunningServer, prefix: tuple[KvBucket, list[str]]
) -> None:
    bucket, keys = prefix
    begun_s = time.monotonic()
    with bucket.fetch(keys, transport="shared_memory") as delivery:
        delivery.wait()
        request_id = delivery.request_id
    measured_s = time.monotonic() - begun_s
    trace = trace_of_ended(server, request_id)
    seconds = {phase.name: phase.seconds for phase in trace.phases}
    before_the_last_byte_s = sum(seconds.values()) - seconds["network"]
    assert before_the_last_byte_s < measured_s
    assert trace.layers[-1].ready_s is not None
    assert trace.layers[-1].ready_s + seconds["client"] < measured_s


@pytest.mark.parametrize(
    ("asked_s", "source", "word", "window_s"),
    [
        (0.25, "descriptor", "told", 0.25),
        (0.0, "whole", "whole", None),
        (1e-12, "disbelieved", "disbelieved", None),
    ],
)
def test_a_trace_says_what_window_counted_whose_word_it_was_and_what_was_reported(
    server: RunningServer,
    prefix: tuple[KvBucket, list[str]],
    asked_s: float,
    source: str,
    word: str,
    window_s: float | None,
) -> None:
    bucket, keys = prefix
    with bucket.fetch(
        keys, delivery="layerwise", transport="shared_memory", compute_window_s=asked_s
    ) as delivery:
        assert delivery.window_source == source
        for layer in delivery.layers:
            delivery.wait_layer(layer)
            delivery.consumed(layer, 0.125)
        request_id = delivery.request_id
    trace = trace_of_ended(server, request_id)
    assert (trace.window_source, trace.compute_window_s) == (source, window_s)
    assert trace.reported_window_s == (None if source == "whole" else 0.125)
    shown = admin_trace(server, request_id)
    assert f"({word})" in shown.stdout
    assert ("125ms reported" in shown.stdout) == (source != "whole")


def test_what_the_gpu_consumed_is_in_the_timeline(
    server: RunningServer, prefix: tuple[KvBucket, list[str]]
) -> None:
    bucket, keys = prefix
    with bucket.fetch(keys, delivery="layerwise", compute_window_s=0.001) as delivery:
        for number in range(LAYOUT.num_layers):
            delivery.wait_layer(number)
            delivery.consumed(number, 0.001)
        request_id = delivery.request_id

        def is_consumed() -> bool:
            layers = traces_of(server, request_id)[0].layers
            return all(layer.consumed_s is not None for layer in layers)

        wait_until(is_consumed, "the last layer's consumption")
    (trace,) = traces_of(server, request_id)
    for layer in trace.layers:
        assert layer.ready_s is not None
        assert layer.consumed_s is not None
        assert layer.consumed_s > layer.ready_s


def test_a_refused_delivery_leaves_a_trace(
    server: RunningServer, prefix: tuple[KvBucket, list[str]]
) -> None:
    bucket, _ = prefix
    keys = bucket.chunk_keys(np.arange(4 * LAYOUT.chunk_tokens) + 10_000)
    with pytest.raises(Exception, match="is not stored"), bucket.fetch(keys) as delivery:
        delivery.wait()
    found = admin_trace(server, "--last", "5", "--json")
    traces = msgspec.convert(json.loads(found.stdout), list[DeliveryTrace])
    refused = next(trace for trace in traces if trace.bucket == bucket.name)
    assert refused.error is not None
    assert refused.error.code == "NoSuchKey"
    assert refused.layers == ()


def test_an_unknown_request_id_exits_with_1(server: RunningServer) -> None:
    result = admin_trace(server, "NEVER-SENT")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "scheduler.traces_kept" in result.stderr


# --- OpenTelemetry ---


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting(monkeypatch) as running:
        yield running


def test_a_traced_delivery_reaches_a_collector_as_one_trace(
    collector: Collector, tmp_path: Path
) -> None:
    with start_server(tmp_path / "data") as server:
        secret = server.credentials.secret_key
        with client_of(server) as client:
            bucket, keys = stored_prefix(client)
            with bucket.fetch(keys) as delivery:
                delivery.wait()
                request_id = delivery.request_id
        s3 = s3_client(server)
        s3.meta.events.register(
            "before-sign.s3.GetObject",
            lambda request, **_: request.headers.add_header(
                "traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"
            ),
        )
        plain = s3.get_object(Bucket=bucket.name, Key=keys[0])
        plain["Body"].read()
        s3.close()
        server.stop()  # which sends what is queued
    (gateway,) = collector.named("objectcache.request", request_id)
    (storage,) = collector.named("objectcache.delivery", request_id)
    assert (gateway[0], storage[0]) == ("objectcache-gateway", "objectcache-storage")
    request, delivered = gateway[1], storage[1]
    assert delivered.trace_id == request.trace_id
    assert delivered.parent_span_id == request.span_id
    assert attributes(request)["http.response.status_code"] == 200
    facts = attributes(delivered)
    assert facts["objectcache.bucket"] == bucket.name
    assert facts["objectcache.payload_bytes"] == (
        CHUNK_COUNT * LAYOUT.num_layers * LAYOUT.per_layer_chunk_bytes
    )
    assert facts["objectcache.storage_s"] > 0
    (transfer,) = [
        span
        for _, span in collector.spans
        if span.name == "objectcache.transfer" and span.parent_span_id == delivered.span_id
    ]
    assert [event.name for event in transfer.events] == ["layer ready"] * LAYOUT.num_layers
    plain_id = plain["ResponseMetadata"]["HTTPHeaders"]["x-amz-request-id"]
    ((_, plain_request),) = collector.named("objectcache.request", plain_id)
    assert plain_request.trace_id.hex() == TRACE_ID
    assert plain_request.parent_span_id.hex() == SPAN_ID
    assert attributes(plain_request)["objectcache.sent_bytes"] == LAYOUT.chunk_bytes
    ((_, plain_delivery),) = collector.named("objectcache.delivery", plain_id)
    assert plain_delivery.parent_span_id == plain_request.span_id
    sent = b"".join(collector.bodies)
    assert secret.encode() not in sent
    assert keys[0].encode() not in sent


def test_a_collector_that_is_away_costs_no_delivery(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # of what is left at the end
    with start_server(tmp_path / "data") as server:
        with client_of(server) as client:
            bucket, keys = stored_prefix(client)
            for _ in range(3):
                with bucket.fetch(keys) as delivery:
                    delivery.wait()
        assert server.gateway.terminate() == 0
        assert server.storage.terminate() == 0
