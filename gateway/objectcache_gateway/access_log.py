"""One line a request. Never secrets, signatures or queries, and names only escaped."""

from __future__ import annotations

import logging

from objectcache_gateway.exchange import Exchange

logger = logging.getLogger("objectcache.gateway.access")


def log_access(exchange: Exchange, status: int | str, elapsed_s: float) -> None:
    """Log a request that ended with an HTTP status, or with a word where it got none."""
    asked = exchange.asked
    logger.info(
        "%s %s %s bucket=%s key=%s in=%d out=%d ms=%.1f id=%s identity=%s",
        exchange.request.method,
        status,
        asked.operation.value if asked else "-",
        _name(asked.address.bucket if asked else None),
        _name(asked.address.key if asked else None),
        exchange.received_bytes,
        exchange.sent_bytes,
        elapsed_s * 1000,
        exchange.request_id,
        asked.identity if asked else "-",
    )


def _name(name: str | None) -> str:
    return "-" if name is None else ascii(name)
