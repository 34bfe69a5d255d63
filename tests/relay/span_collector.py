"""A small OTLP collector, for tests of spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BOUND_S = 60.0


class Collector:
    """A small OTLP collector on loopback."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # service name and span
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        assert path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for resource in request.resource_spans:
            names = {entry.key: entry.value for entry in resource.resource.attributes}
            service = names["service.name"].string_value
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]

    def named(self, name: str, request_id: str) -> list[tuple[str, Any]]:
        return [
            (service, span)
            for service, span in self.spans
            if span.name == name and attributes(span).get("objectcache.request_id") == request_id
        ]

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(BOUND_S)
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {
        entry.key: getattr(entry.value, entry.value.WhichOneof("value"))
        for entry in span.attributes
    }


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that processes send spans to which start meanwhile."""
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        pytest.importorskip(module, reason="OpenTelemetry is not installed (objectcache[otel])")
    running = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield running
    running.stop()
