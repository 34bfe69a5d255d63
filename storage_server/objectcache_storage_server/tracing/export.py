"""Deliveries as OpenTelemetry spans.

A delivery that has ended becomes the span `objectcache.delivery`, a child of the request's, with
two children: `objectcache.acceptance`, until it may be read, and `objectcache.transfer`, from then
to its end, with an event for each layer. The phases alternate, so they are attributes and not
spans. Spans carry names of buckets and tenants, sizes, times and codes; never a key of an object, a
credential, an error's text or a byte of a payload.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from objectcache_runtime.span_export import (
    close_provider,
    open_provider,
    parent_context,
)
from objectcache_schemas.operators.traces import DeliveryTrace, LayerTrace
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE_NAME = "objectcache-storage"
NANOSECONDS = 1_000_000_000
CLOSE_STEP_S = 0.5  # to turn what is queued into spans, before those are sent
QUEUED_MAX = 1024  # deliveries that ended and are not spans yet

logger = logging.getLogger("objectcache.storage_server.export")

Attributes = dict[str, str | int | float]


def open_export(environment: Mapping[str, str]) -> DeliveryExport | None:
    """The export that the environment asks for, or None; see `span_export`."""
    provider = open_provider(SERVICE_NAME, environment)
    return None if provider is None else DeliveryExport(provider)


class DeliveryExport:
    """Makes spans of deliveries in a thread of its own: hundreds of microseconds each are nothing
    that a delivery should wait for.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("objectcache.storage_server")
        self._queue: queue.Queue[DeliveryRecorder | None] = queue.Queue(QUEUED_MAX)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def submit(self, recorder: DeliveryRecorder) -> None:
        """Have a delivery that has ended exported; dropped where too many wait. Never blocks."""
        try:
            self._queue.put_nowait(recorder)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("over %d deliveries wait for export; some are dropped", QUEUED_MAX)

    def _run(self) -> None:
        while (recorder := self._queue.get()) is not None:
            try:
                self.export(recorder)
            except Exception:
                logger.exception("delivery %s could not be exported", recorder.request_id)

    def export(self, recorder: DeliveryRecorder) -> None:
        """Make the spans of a delivery that has ended, or of a request that was refused."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        trace = recorder.trace()
        begin_ns = int(trace.started_unix_s * NANOSECONDS)
        end_ns = begin_ns + int((trace.duration_s or 0.0) * NANOSECONDS)
        delivery = self._tracer.start_span(
            "objectcache.delivery",
            parent_context(recorder.traceparent),
            kind=SpanKind.SERVER,
            attributes=delivery_attributes(trace) | {"objectcache.engine_s": recorder.engine_s},
            start_time=begin_ns,
        )
        if trace.error is not None:
            delivery.set_status(Status(StatusCode.ERROR, trace.error.code))
        if delivery.is_recording() and recorder.accepted_after_s is not None:
            accepted_ns = begin_ns + int(recorder.accepted_after_s * NANOSECONDS)
            inside = set_span_in_context(delivery)
            self._child("objectcache.acceptance", inside, begin_ns, accepted_ns)
            transfer = self._begin_child("objectcache.transfer", inside, accepted_ns)
            _add_layers(transfer, trace, begin_ns)
            transfer.end(end_ns)
        delivery.end(end_ns)

    def _child(self, name: str, inside: Context, begin_ns: int, end_ns: int) -> None:
        self._begin_child(name, inside, begin_ns).end(end_ns)

    def _begin_child(self, name: str, inside: Context, begin_ns: int) -> Span:
        return self._tracer.start_span(name, inside, start_time=begin_ns)

    def close(self) -> None:
        """Send what is queued, within a bound; nothing may be submitted any more."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_STEP_S)
            self._thread.join(CLOSE_STEP_S)
        close_provider(self._provider)


def delivery_attributes(trace: DeliveryTrace) -> Attributes:
    """What a span says of a delivery."""
    facts: dict[str, str | int | float | None] = {
        "request_id": trace.request_id,
        "bucket": trace.bucket,
        "tenant": trace.tenant,
        "path": trace.path,
        "transport": trace.transport,
        "delivery": trace.delivery,
        "policy": trace.policy,
        "chunk_count": trace.chunk_count,
        "payload_bytes": trace.payload_bytes,
        "decoded_bytes": trace.decoded_bytes,
        "layer_count": len(trace.layers),
        "compute_window_s": trace.compute_window_s,
        "window_source": trace.window_source,
        "reported_window_s": trace.reported_window_s,
        "rate_bytes_per_s": trace.rate_bytes_per_s,
        "achieved_bytes_per_s": trace.achieved_bytes_per_s,
        "nic": trace.nic or None,
        "error_code": trace.error.code if trace.error else None,
    }
    facts |= {f"{phase.name}_s": phase.seconds for phase in trace.phases}
    return {f"objectcache.{name}": fact for name, fact in facts.items() if fact is not None}


def _add_layers(span: Span, trace: DeliveryTrace, begin_ns: int) -> None:
    """One event a layer, when it is in place; OTEL_SPAN_EVENT_COUNT_LIMIT bounds them."""
    for layer in trace.layers:
        if layer.ready_s is not None:
            at_ns = begin_ns + int(layer.ready_s * NANOSECONDS)
            span.add_event("layer ready", _layer_attributes(layer), at_ns)


def _layer_attributes(layer: LayerTrace) -> Attributes:
    times = {"first_read_s": layer.first_read_s, "consumed_s": layer.consumed_s}
    known: Attributes = {
        f"objectcache.{name}": time_s for name, time_s in times.items() if time_s is not None
    }
    return {"objectcache.layer": layer.layer, **known}
