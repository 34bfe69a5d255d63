"""Gets over the relay as OpenTelemetry spans, where the environment asks for them.

A get is the span `objectcache.relay`, a child of the engine's and the parent of what is asked
upstream for it. It carries the bucket, sizes and codes; never a key of an object, a credential, an
error's text or a byte of a payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from objectcache_relay.landing.upstream import AskedForward
from objectcache_runtime.span_export import (
    close_provider,
    open_provider,
    parent_context,
    traceparent_of,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

DEFECT = "a defect"


def open_tracer(service: str, environment: Mapping[str, str]) -> ForwardTracer:
    """The tracer that the environment asks for; see `span_export`."""
    return ForwardTracer(open_provider(service, environment))


@dataclass(frozen=True, slots=True)
class SentOn:
    """What a get that was accepted sends on. `is_first_use`: it was asked upstream for it; others
    are sent what landed for another get.
    """

    chunk_count: int
    payload_bytes: int
    is_first_use: bool


class ForwardTracer:
    """Makes a span of each get; without a provider only what engines say is passed on."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("objectcache.relay") if provider else None

    def begin(self, asked: AskedForward, transport: str) -> tuple[AskedForward, ForwardSpan]:
        """A get begins; it is asked upstream as the one that is returned."""
        if self._tracer is None:
            return asked, ForwardSpan(None)
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            "objectcache.relay",
            parent_context(asked.traceparent),
            kind=SpanKind.SERVER,
            attributes={
                "objectcache.request_id": asked.request_id,
                "objectcache.bucket": asked.bucket,
                "objectcache.transport": transport,
            },
        )
        return replace(asked, traceparent=traceparent_of(span)), ForwardSpan(span)

    def close(self) -> None:
        """Send what is queued, within a bound."""
        if self._provider is not None:
            close_provider(self._provider)


class ForwardSpan:
    """The span of one get, or none."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def end(self, code: str | None, sent: SentOn | None) -> None:
        """The get has ended: with this error's code, empty for success, None for a defect; `sent`
        where it was accepted.
        """
        span = self._span
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        if sent is not None:
            span.set_attribute("objectcache.chunk_count", sent.chunk_count)
            span.set_attribute("objectcache.payload_bytes", sent.payload_bytes)
            span.set_attribute("objectcache.first_use", sent.is_first_use)
        if code:
            span.set_attribute("objectcache.error_code", code)
        if code != "":
            span.set_status(Status(StatusCode.ERROR, code or DEFECT))
        span.end()
