"""What ties a request to the logs and traces of others."""

from __future__ import annotations

import importlib
import sys

from objectcache_schemas import headers

_PROPAGATION = "opentelemetry.trace.propagation.tracecontext"


def current_traceparent() -> str | None:
    """The current span of OpenTelemetry as W3C Trace Context; None where there is none.

    The API is an extra (`objectcache[otel]`). A process that has not imported it has no span.
    """
    if "opentelemetry.trace" not in sys.modules:
        return None
    carrier: dict[str, str] = {}
    importlib.import_module(_PROPAGATION).TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(headers.TRACEPARENT)
