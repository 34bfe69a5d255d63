"""A relay's metrics by name. docs/metrics.md says of each what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from objectcache_relay.decoding.decoded_regions import DecodedRegions
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.forward_get import ForwardMeans
from objectcache_runtime.metrics.metric_families import (
    MetricsPage,
    counter,
    gauge,
    histogram,
    level,
)


def relay_page(
    means: ForwardMeans, pool: WorkerPool | None, regions: DecodedRegions
) -> MetricsPage:
    """All of them as text; those of workers, and of what they decode into, where there are some."""

    def families() -> Iterator[Metric]:
        yield from relay_families(means)
        if pool is not None:
            yield from worker_families(pool, regions)

    return MetricsPage(families)


def relay_families(means: ForwardMeans) -> Iterator[Metric]:
    """All of them, in the document's order."""
    landings = means.landings
    counts, grants = landings.counts, landings.grants
    yield level(
        "relay_read_queue_bytes",
        "Bytes that were asked of this relay and have not come over its storage NIC.",
        landings.read_queue_bytes,
    )
    yield gauge(
        "relay_landing_bytes",
        "Landing memory, by what it is for.",
        ("state",),
        [
            (("granted",), grants.granted_bytes),
            (("free",), grants.free_bytes - grants.held_bytes),
            (("held",), grants.held_bytes),
            (("waited_for",), grants.waiting_bytes),
            (("kept",), landings.regions.kept_bytes),
        ],
    )
    yield level(
        "relay_received_bytes_per_second",
        "Bytes a second that have come while some were awaited, lately.",
        landings.rate_bytes_per_s,
    )
    yield counter(
        "relay_forwarded_bytes_total",
        "Bytes that were sent on, by how.",
        ("transport",),
        [((name,), count) for name, count in counts.forwarded_bytes.items()],
    )
    yield histogram(
        "relay_forward_lag_seconds",
        "From a layer's arrival to its announcement to the engine.",
        (),
        [((), counts.forward_lag)],
    )
    yield counter(
        "relay_deliveries_total",
        "Deliveries that ended, by the code of their error; empty is success.",
        ("code",),
        [((name,), count) for name, count in counts.ended.items()],
    )
    yield counter(
        "relay_refused_total",
        "Gets that were refused before anything was read, by reason.",
        ("reason",),
        [((name,), count) for name, count in counts.refused.items()],
    )
    yield counter(
        "relay_claims_total",
        "Gets, by whether another one was having the same prefix landed, or had just had.",
        ("outcome",),
        [((name,), count) for name, count in counts.claims.items()],
    )
    yield counter(
        "relay_dispatch_reports_total",
        "Reports to the dispatch service, by whether it took them.",
        ("outcome",),
        [((name,), count) for name, count in counts.reports.items()],
    )
    yield counter(
        "relay_reports_total",
        "Times that clients asked how busy the relay is.",
        (),
        [((), counts.asked[()])],
    )


def worker_families(pool: WorkerPool, regions: DecodedRegions) -> Iterator[Metric]:
    """Those of a fetcher's workers, in the document's order."""
    counts = pool.counts
    yield level(
        "fetcher_workers",
        "Workers that take jobs.",
        pool.ready_workers,
    )
    yield level(
        "fetcher_queued_bytes",
        "Decoded bytes of jobs that workers have not done.",
        pool.queued_bytes,
    )
    yield gauge(
        "fetcher_decoded_region_bytes",
        "Memory that is decoded into on the way to engines that share none.",
        ("state",),
        [(("held",), regions.held_bytes), (("waited_for",), regions.waiting_bytes)],
    )
    yield counter(
        "fetcher_decoded_bytes_total",
        "Bytes of slices that workers decoded, as they are stored, by what they decoded.",
        ("encoding",),
        [((name,), count) for name, count in counts.decoded_bytes.items()],
    )
    yield counter(
        "fetcher_wire_bytes_total",
        "Bytes that these were when they came.",
        ("encoding",),
        [((name,), count) for name, count in counts.wire_bytes.items()],
    )
    yield counter(
        "fetcher_worker_deaths_total",
        "Workers that ended, by how; each is followed by another.",
        ("how",),
        [((name,), count) for name, count in counts.worker_deaths.items()],
    )
