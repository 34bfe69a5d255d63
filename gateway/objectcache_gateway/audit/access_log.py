"""One line a request. Never secrets, signatures or queries, and names only escaped."""

from __future__ import annotations

import logging

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_runtime.logs import log_fields

logger = logging.getLogger("objectcache.gateway.access")


def log_access(exchange: Exchange, status: int | str, elapsed_s: float) -> None:
    """Log a request that ended with an HTTP status, or with a word where it got none."""
    if not logger.isEnabledFor(logging.INFO):
        return
    asked = exchange.asked
    address = asked.address if asked else None
    fields: dict[str, object] = {
        "method": exchange.request.method,
        "status": status,
        "operation": asked.operation.value if asked else "",
        "bucket": _name(address.bucket) if address else "",
        "key": _name(address.key) if address else "",
        "identity": asked.identity if asked else "",
        "received_bytes": exchange.received_bytes,
        "sent_bytes": exchange.sent_bytes,
        "duration_ms": round(elapsed_s * 1000, 3),
        "first_byte_ms": _milliseconds(exchange.first_byte_s),
        "error_code": exchange.error_code,
        "request_id": exchange.request_id,
    }
    log_fields(logger, logging.INFO, "request", fields)


def _name(name: str | None) -> str:
    if name is None:
        return ""
    return name if name.isprintable() else ascii(name)[1:-1]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
