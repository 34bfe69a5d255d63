"""What the environment asks for, and which spans a delivery becomes. No network."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from objectcache_runtime import span_export
from objectcache_runtime.span_export import close_provider, is_asked_for, open_provider
from objectcache_schemas.errors import DeliveryFailed
from objectcache_storage_server.tracing import export
from objectcache_storage_server.tracing.export import DeliveryExport, open_export
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

sdk = pytest.importorskip(
    "opentelemetry.sdk.trace", reason="OpenTelemetry is not installed (objectcache[otel])"
)
from opentelemetry.sdk.trace.export import (  # noqa: E402 - once it is known to be installed
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

BOUND_S = 20.0
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Collected(SpanExporter):
    """Stands where the exporter to a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.may_go.wait(BOUND_S)
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to let go."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@pytest.fixture
def collected() -> Collected:
    return Collected()


@pytest.fixture
def exporting(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeliveryExport]:
    monkeypatch.setattr(export, "CLOSE_STEP_S", BOUND_S)
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(collected))
    opened = DeliveryExport(provider)
    yield opened
    collected.may_go.set()
    opened.close()


def close_whole(exporting: DeliveryExport) -> None:
    """Close it, and wait for what is sent after it has given up waiting."""
    exporting.close()
    join_flushing()


def join_flushing() -> None:
    for thread in threading.enumerate():
        if thread.name == "span-flush":
            thread.join(BOUND_S)


def ended_delivery(error: DeliveryFailed | None = None) -> DeliveryRecorder:
    record = DeliveryRecorder(
        "ABC",
        "bucket",
        "root",
        started_s=10.0,
        started_unix_s=1000.0,
        traceparent=TRACEPARENT,
    )
    record.accepted(
        path="agg",
        transport="tcp",
        delivery="layerwise",
        policy="equal",
        chunk_count=1,
        payload_bytes=20,
        first_layer=0,
        end_layer=2,
        compute_window_s=None,
        window_source="none",
        rate_bytes_per_s=5.0,
        now_s=11.0,
    )
    for layer in range(2):
        record.fragment_begun(layer, 11.0 + layer)
        record.fragment_read(layer, 10, 1.0, 12.0 + layer)
        record.layers_ready(layer + 1, 12.0 + layer)
    record.ended(14.0, error.to_wire() if error else None)
    return record


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
    ],
)
def test_the_standard_variables_ask_for_spans(environment: Mapping[str, str], asked: bool) -> None:
    assert is_asked_for(environment) is asked


def test_an_exporter_that_is_not_served_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_asked_for({"OTEL_TRACES_EXPORTER": "zipkin"})
    assert "['zipkin'] is not served; otlp is" in caplog.text


def test_without_the_packages_one_warning_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_import = builtins.__import__

    def without_opentelemetry(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_opentelemetry)
    assert open_provider("x", {}) is None
    assert caplog.records == []
    assert open_export({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "objectcache[otel]" in record.message


def test_a_delivery_is_a_child_of_its_request(
    exporting: DeliveryExport, collected: Collected
) -> None:
    exporting.submit(ended_delivery())
    close_whole(exporting)
    spans = {span.name: span for span in collected.spans}
    assert set(spans) == {
        "objectcache.delivery",
        "objectcache.acceptance",
        "objectcache.transfer",
    }
    delivery = spans["objectcache.delivery"]
    assert delivery.context.trace_id == 0x0123456789ABCDEF0123456789ABCDEF
    assert delivery.parent.span_id == 0x0123456789ABCDEF
    assert (delivery.start_time, delivery.end_time) == (1000 * 10**9, 1004 * 10**9)
    assert delivery.attributes["objectcache.storage_s"] == 2.0
    assert delivery.attributes["objectcache.network_s"] == 1.0
    assert delivery.attributes["objectcache.rate_bytes_per_s"] == 5.0
    assert delivery.attributes["objectcache.engine_s"] == 2.0
    assert "objectcache.compute_window_s" not in delivery.attributes
    transfer = spans["objectcache.transfer"]
    assert transfer.parent.span_id == delivery.context.span_id
    assert (transfer.start_time, transfer.end_time) == (1001 * 10**9, 1004 * 10**9)
    assert [(event.name, event.timestamp) for event in transfer.events] == [
        ("layer ready", 1002 * 10**9),
        ("layer ready", 1003 * 10**9),
    ]
    assert [event.attributes["objectcache.layer"] for event in transfer.events] == [0, 1]


def test_an_error_is_a_code_without_its_text(
    exporting: DeliveryExport, collected: Collected
) -> None:
    exporting.submit(ended_delivery(DeliveryFailed("chunk-key-of-a-customer is damaged")))
    close_whole(exporting)
    (delivery,) = [span for span in collected.spans if span.name == "objectcache.delivery"]
    assert not delivery.status.is_ok
    assert delivery.attributes["objectcache.error_code"] == "DeliveryFailed"
    assert "customer" not in "".join(span.to_json() for span in collected.spans)


def test_what_finds_no_room_is_dropped_and_said_once(
    exporting: DeliveryExport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered, may_go = threading.Event(), threading.Event()

    def stuck(recorder: DeliveryRecorder) -> None:
        entered.set()
        may_go.wait(BOUND_S)

    monkeypatch.setattr(exporting, "export", stuck)
    exporting.submit(ended_delivery())
    assert entered.wait(BOUND_S)
    record = ended_delivery()
    for _ in range(export.QUEUED_MAX + 5):
        exporting.submit(record)
    may_go.set()
    assert caplog.text.count("some are dropped") == 1


def test_a_collector_that_hangs_does_not_hold_the_end_up(
    collected: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(collected))
    collected.may_go.clear()
    provider.get_tracer("test").start_span("x").end()
    close_provider(provider, timeout_s=0.05)
    assert "not all sent within 0.05 s" in caplog.text
    collected.may_go.set()
    join_flushing()
    assert [span.name for span in collected.spans] == ["x"]
    assert span_export.FLUSH_TIMEOUT_S > 0.05
