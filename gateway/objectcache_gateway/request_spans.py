"""The gateway's spans: `objectcache.request`, where the environment asks for OpenTelemetry.

A span carries the operation, the bucket, the status and sizes; never a key of an object, a header,
a query, a credential or a byte of a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_runtime.span_export import (
    close_provider,
    open_provider,
    parent_context,
    traceparent_of,
)
from objectcache_schemas import headers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE_NAME = "objectcache-gateway"
SERVER_FAULT_STATUS = 500


def open_tracer(environment: Mapping[str, str]) -> RequestTracer:
    """The tracer that the environment asks for; see `span_export`."""
    return RequestTracer(open_provider(SERVICE_NAME, environment))


class RequestTracer:
    """Makes a span of each request; without a provider it does nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("objectcache.gateway") if provider else None

    def begin(self, exchange: Exchange) -> Span | None:
        """A request begins. `exchange.traceparent` becomes what its storage span is a child of."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        request = exchange.request
        span = self._tracer.start_span(
            "objectcache.request",
            parent_context(request.headers.get(headers.TRACEPARENT, "")),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": request.method,
                "objectcache.request_id": exchange.request_id,
            },
        )
        exchange.traceparent = traceparent_of(span)
        return span

    def end(self, span: Span | None, exchange: Exchange, status: int | str) -> None:
        """The request has ended, with an HTTP status, or with a word where it got none."""
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        asked = exchange.asked
        if asked is not None:
            span.set_attribute("objectcache.operation", asked.operation.value)
            if asked.address.bucket is not None:
                span.set_attribute("objectcache.bucket", asked.address.bucket)
        span.set_attribute("objectcache.received_bytes", exchange.received_bytes)
        span.set_attribute("objectcache.sent_bytes", exchange.sent_bytes)
        if isinstance(status, int):
            span.set_attribute("http.response.status_code", status)
        if isinstance(status, str) or status >= SERVER_FAULT_STATUS:
            span.set_status(Status(StatusCode.ERROR, str(status)))
        span.end()

    def close(self) -> None:
        """Send what is queued, within a bound."""
        if self._provider is not None:
            close_provider(self._provider)
