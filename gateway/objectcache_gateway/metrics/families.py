"""A gateway's metrics by name. docs/metrics.md says of each what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from objectcache_gateway.metrics.levels import GatewayLevels
from objectcache_gateway.metrics.request_counts import (
    OperationCell,
    RequestCounts,
    TenantRequestCell,
)
from objectcache_runtime.metrics.metric_families import (
    Labelled,
    MetricsPage,
    counter,
    gauge,
    histogram,
    level,
    total,
)

HIT, MISS = "hit", "miss"


def gateway_page(counts: RequestCounts, levels: Callable[[], GatewayLevels]) -> MetricsPage:
    """All of them as text."""
    return MetricsPage(lambda: gateway_families(counts, levels))


def gateway_families(
    counts: RequestCounts, levels: Callable[[], GatewayLevels]
) -> Iterator[Metric]:
    """All of them, in the document's order."""
    yield from _of_operations(list(counts.operations.items()))
    yield from _of_tenants(list(counts.tenants.items()))
    yield from _of_failures(counts)
    yield from _of_levels(counts, levels())


def _of_operations(cells: list[tuple[str, OperationCell]]) -> Iterator[Metric]:
    yield counter(
        "requests_total",
        "Requests that ended, by operation and HTTP status.",
        ("operation", "status"),
        [
            ((name, str(status)), count)
            for name, cell in cells
            for status, count in list(cell.statuses.items())
        ],
    )
    yield histogram(
        "request_duration_seconds",
        "From a request's head to the end of its response.",
        ("operation",),
        [((name,), cell.duration) for name, cell in cells],
    )
    yield histogram(
        "request_first_byte_seconds",
        "From a request's head to the head of its response.",
        ("operation",),
        [((name,), cell.first_byte) for name, cell in cells],
    )
    yield counter(
        "request_received_bytes_total",
        "Bytes of request bodies, with their framing.",
        ("operation",),
        [((name,), cell.received_bytes) for name, cell in cells],
    )
    yield counter(
        "response_sent_bytes_total",
        "Bytes of response bodies.",
        ("operation",),
        [((name,), cell.sent_bytes) for name, cell in cells],
    )


def _of_tenants(cells: list[tuple[str, TenantRequestCell]]) -> Iterator[Metric]:
    yield counter(
        "tenant_requests_total",
        "Requests that ended, by tenant and HTTP status.",
        ("tenant", "status"),
        [
            ((name, str(status)), count)
            for name, cell in cells
            for status, count in list(cell.statuses.items())
        ],
    )
    yield counter(
        "tenant_received_bytes_total",
        "Bytes of request bodies, by tenant.",
        ("tenant",),
        [((name,), cell.received_bytes) for name, cell in cells],
    )
    yield counter(
        "tenant_sent_bytes_total",
        "Bytes of response bodies, by tenant.",
        ("tenant",),
        [((name,), cell.sent_bytes) for name, cell in cells],
    )
    yield counter(
        "match_chunks_total",
        "Chunks that kv-match was asked for, by whether they were stored.",
        ("tenant", "result"),
        _hits_and_misses(cells, lambda cell: (cell.matched_chunks, cell.missed_chunks)),
    )
    yield counter(
        "match_tokens_total",
        "The same in tokens, in buckets with a KV layout.",
        ("tenant", "result"),
        _hits_and_misses(cells, lambda cell: (cell.matched_tokens, cell.missed_tokens)),
    )


def _hits_and_misses(
    cells: list[tuple[str, TenantRequestCell]],
    numbers: Callable[[TenantRequestCell], tuple[int, int]],
) -> Labelled:
    for name, cell in cells:
        hits, misses = numbers(cell)
        if hits or misses:
            yield (name, HIT), hits
            yield (name, MISS), misses


def _of_failures(counts: RequestCounts) -> Iterator[Metric]:
    yield counter(
        "request_errors_total",
        "Requests that were answered with an error, by its code.",
        ("code",),
        [((code,), count) for code, count in list(counts.errors.items())],
    )
    yield counter(
        "authentication_failures_total",
        "Requests whose sender could not be established, by error code.",
        ("code",),
        [((code,), count) for code, count in list(counts.authentication_failures.items())],
    )
    yield counter(
        "quota_refusals_total",
        "Requests that a quota refused, by its field.",
        ("quota",),
        [((quota,), count) for quota, count in list(counts.quota_refusals.items())],
    )
    yield counter(
        "rdma_declines_total",
        "Requests for a transfer by RDMA (x-amz-rdma-token) that were declined, by operation.",
        ("operation",),
        [((name,), count) for name, count in list(counts.rdma_declines.items())],
    )
    yield total(
        "unreadable_requests_total",
        "Requests that were not HTTP, or over a limit of its parser.",
        counts.unreadable,
    )


def _of_levels(counts: RequestCounts, levels: GatewayLevels) -> Iterator[Metric]:
    yield level("requests_in_flight", "Requests that are being served.", levels.requests_in_flight)
    yield level("client_connections", "Open client connections.", levels.connections)
    yield total(
        "client_connections_total",
        "Client connections that were accepted.",
        counts.accepted_connections,
    )
    yield level(
        "client_connections_unsigned",
        "Open client connections on which nobody has shown a good signature.",
        levels.strangers,
    )
    yield counter(
        "turned_away_total",
        "Connections and requests that were refused, or ended for others, for want of room.",
        ("what",),
        [((name,), count) for name, count in levels.turned_away.by_name().items()],
    )
    yield gauge(
        "gateway_storage_connections",
        "Connections to the storage server.",
        ("state",),
        [
            (("in_use",), levels.storage_connections_in_use),
            (("idle",), levels.storage_connections_idle),
        ],
    )
    yield level("gateway_draining", "1 while the process takes no more work.", levels.draining)
    yield total(
        "audit_log_lines_total", "Lines of the audit log that were written.", levels.audit_lines
    )
    yield total(
        "audit_log_lines_lost_total",
        "Lines of the audit log that could not be written.",
        levels.audit_lines_lost,
    )
