"""The deliveries in flight on one screen: who, how far, how fast. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from objectcache_operations.admin.tables import table_of
from objectcache_runtime.amounts import (
    duration_text,
    payload_text,
    rate_text,
    share_text,
    size_text,
)
from objectcache_schemas.operators.admin_api import DeliveriesReply

ROWS_MAX = 100
COLUMNS = (
    *("delivery", "tenant", "NIC"),
    *("sent", "of", "rate", "assigned", "layer", "consumed", "age"),
)
TENANT_COLUMNS = ("tenant", "deliveries", "in flight")


def achieved_rates(now: DeliveriesReply, before: DeliveriesReply) -> dict[str, float]:
    """Bytes a second of each delivery between two looks; of one that is new, since it began.

    A request id may be used again: what has sent less than before is another delivery.
    """
    sent_before = {one.request_id: one.sent_bytes for one in before.deliveries}
    elapsed_s = now.at_s - before.at_s
    rates: dict[str, float] = {}
    for one in now.deliveries:
        sent = sent_before.get(one.request_id)
        if sent is not None and one.sent_bytes >= sent and elapsed_s > 0:
            rates[one.request_id] = (one.sent_bytes - sent) / elapsed_s
        elif one.age_s > 0:
            rates[one.request_id] = one.sent_bytes / one.age_s
    return rates


def top_document(now: DeliveriesReply, before: DeliveriesReply) -> dict[str, Any]:
    """One look for programs: what the server said, and the rates between the two looks."""
    return {"now": now, "achieved_bytes_per_s": achieved_rates(now, before)}


def top_view(now: DeliveriesReply, before: DeliveriesReply) -> RenderableType:
    """The fastest first."""
    rates = achieved_rates(now, before)
    ordered = sorted(now.deliveries, key=lambda one: -rates.get(one.request_id, 0.0))
    rows = [
        [
            one.request_id,
            one.tenant,
            one.nic or "-",
            share_text(one.sent_bytes, one.payload_bytes),
            payload_text(one.payload_bytes, one.decoded_bytes),
            rate_text(rates.get(one.request_id)),
            rate_text(one.rate_bytes_per_s),
            f"{one.next_layer}/{one.num_layers}" if one.pooled else "-",
            f"{one.consumed_layers}" if one.pooled else "-",
            duration_text(one.age_s),
        ]
        for one in ordered[:ROWS_MAX]
    ]
    tenants = [
        [one.identity, f"{one.deliveries:,}", size_text(one.in_flight_bytes)] for one in now.tenants
    ]
    head = (
        f"{now.delivery_count:,} deliveries, {now.waiting:,} waiting, "
        f"{rate_text(now.rate_bytes_per_s)} over the last second"
    )
    parts: list[RenderableType] = [Text(head, style="bold")]
    if tenants:
        parts.append(table_of(TENANT_COLUMNS, tenants, TENANT_COLUMNS[1:]))
    if rows:
        parts.append(table_of(COLUMNS, rows, COLUMNS[3:]))
    return Group(*parts)
