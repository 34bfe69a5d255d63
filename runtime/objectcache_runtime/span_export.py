"""Whether and how a server's spans leave its process: OpenTelemetry, in OTLP over HTTP.

The standard environment variables decide, and configure the OpenTelemetry SDK, which reads them
itself: OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or OTEL_TRACES_EXPORTER
ask for it, OTEL_SDK_DISABLED and an exporter of "none" forbid it. Without them nothing of
OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

EXPORTER = "otlp"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
FLUSH_TIMEOUT_S = 3.0  # at the end of the process, for what was not sent yet

logger = logging.getLogger("objectcache.span_export")


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the variables ask for spans; logs where they ask for what is not served."""
    exporters = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "").split(",")]
    exporters = [name for name in exporters if name]
    has_endpoint = any(environment.get(name) for name in ENDPOINTS)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporters == ["none"]:
        return False
    if not exporters:
        return has_endpoint
    if EXPORTER not in exporters:
        logger.warning("OTEL_TRACES_EXPORTER %s is not served; %s is", exporters, EXPORTER)
    return EXPORTER in exporters


def open_provider(service_name: str, environment: Mapping[str, str]) -> TracerProvider | None:
    """Where spans go; None where none are asked for, or the packages are not installed.

    A background thread sends them in batches from a bounded queue; what finds no room is dropped.
    """
    if not is_asked_for(environment):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning(
            "spans are asked for by OTEL_... variables, and OpenTelemetry is not installed: "
            "install objectcache[otel]"
        )
        return None
    protocol = next(filter(None, map(environment.get, PROTOCOLS)), PROTOCOL)
    if protocol != PROTOCOL:
        logger.warning("OTLP over %s is not served; spans are sent as %s", protocol, PROTOCOL)
    named = {} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service_name}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def close_provider(provider: TracerProvider, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Send what is left, for at most this long; a collector that is away holds nobody up."""
    flushing = threading.Thread(target=provider.shutdown, name="span-flush", daemon=True)
    flushing.start()
    flushing.join(timeout_s)
    if flushing.is_alive():
        logger.warning("spans were not all sent within %g s", timeout_s)


def parent_context(traceparent: str) -> Context:
    """What a span is a child of: a W3C traceparent, or nothing where it is empty."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent_of(span: Span) -> str:
    """The W3C traceparent that makes another process's span a child of this one."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
