"""A storage server's metrics by name. docs/metrics.md says of each what to do about it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from objectcache_runtime.metrics.metric_cells import Counts
from objectcache_runtime.metrics.metric_families import (
    Labelled,
    MetricsPage,
    counter,
    gauge,
    histogram,
    level,
    total,
)
from objectcache_schemas.messages.quotas import GetUsage
from objectcache_schemas.operators.schedule import ScheduledNic
from objectcache_storage_server.counts.storage_counts import (
    SUCCESS,
    StorageCounts,
    TenantCell,
)
from objectcache_storage_server.deliveries.delivery import ServedDelivery
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.metrics.engine_families import (
    engine_call_families,
    engine_families,
)
from objectcache_storage_server.quotas.bucket_usage import bucket_usage
from objectcache_storage_server.s3.lifecycle import LifecycleCounts
from objectcache_storage_server.scheduling.scheduler import Scheduler
from objectcache_storage_server.tracing.recorder import PHASES

_TENANT_COUNTERS: tuple[tuple[str, str, Callable[[TenantCell], float]], ...] = (
    (
        "tenant_delivered_bytes_total",
        "Bytes that were read for a tenant's deliveries.",
        lambda cell: cell.delivered_bytes,
    ),
    (
        "tenant_stall_seconds_total",
        "How long clients say that they waited for layers.",
        lambda cell: cell.stall_s,
    ),
    (
        "tenant_stalls_total",
        "Waits for a layer that clients say they had.",
        lambda cell: cell.stalls,
    ),
    (
        "tenant_compute_seconds_total",
        "How long clients say that they computed on layers.",
        lambda cell: cell.compute_s,
    ),
    (
        "tenant_consumed_layers_total",
        "Layers that clients say they are through with.",
        lambda cell: cell.consumed_layers,
    ),
)

_NIC_GAUGES: dict[str, tuple[str, Callable[[ScheduledNic], float]]] = {
    "nic_queue_bytes": (
        "Bytes that running deliveries have still to send to a storage NIC.",
        lambda nic: nic.queued_bytes,
    ),
    "nic_deliveries": (
        "Deliveries to a storage NIC that run.",
        lambda nic: nic.deliveries,
    ),
    "nic_held_deliveries": (
        "Of these, those that wait because the NIC may not be sent more yet.",
        lambda nic: nic.held,
    ),
}


def storage_page(means: GetMeans, lifecycle: LifecycleCounts) -> MetricsPage:
    """All of them as text."""
    return MetricsPage(lambda: storage_families(means, lifecycle))


def storage_families(means: GetMeans, lifecycle: LifecycleCounts) -> Iterator[Metric]:
    """All of them, in the document's order. Takes engine and scheduler locks for copies only."""
    counts = means.counts
    yield from _of_deliveries(counts)
    yield from _of_times(counts)
    yield from _of_schedule(means)
    yield from _of_nics(means)
    yield from _of_tenants(means)
    yield from _of_errors(counts)
    yield from _of_lifecycle(lifecycle)
    yield from engine_call_families(counts.engine)
    yield from engine_families(means.calls.engine.totals())
    yield from _of_server(means)


def _by_one(counts: Counts[str]) -> Labelled:
    return [((label,), value) for label, value in counts.items()]


def _by_name(values: Mapping[str, float]) -> Labelled:
    return [((name,), value) for name, value in values.items()]


def _of_deliveries(counts: StorageCounts) -> Iterator[Metric]:
    cells = list(counts.deliveries.items())
    yield counter(
        "deliveries_total",
        "Deliveries that ended, by mode, path, transport and outcome.",
        ("delivery", "path", "transport", "outcome"),
        [((*kind[:-1], kind.error_code or SUCCESS), cell.count) for kind, cell in cells],
    )
    read_bytes: Counter[str] = Counter()
    spared_bytes: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    phases_s = dict.fromkeys(PHASES, 0.0)
    for kind, cell in cells:
        read_bytes[kind.path] += cell.read_bytes
        spared_bytes[kind.path] += cell.spared_bytes
        if not kind.error_code:
            chunks[kind.path] += cell.chunks
        for phase, seconds in zip(PHASES, cell.phases_s, strict=True):
            phases_s[phase] += seconds
    yield counter(
        "delivered_bytes_total",
        "Bytes that were read for deliveries.",
        ("path",),
        _by_name(read_bytes),
    )
    yield counter(
        "spared_bytes_total",
        "Bytes that deliveries had fewer than what they are decoded.",
        ("path",),
        _by_name(spared_bytes),
    )
    yield counter(
        "delivered_chunks_total",
        "Chunks, and plain objects, that were delivered whole.",
        ("path",),
        _by_name(chunks),
    )
    yield counter(
        "delivery_phase_seconds_total",
        "Where deliveries' time went.",
        ("phase",),
        _by_name(phases_s),
    )


def _of_times(counts: StorageCounts) -> Iterator[Metric]:
    yield histogram(
        "delivery_duration_seconds",
        "From a request's arrival at the gateway to the end of its delivery.",
        ("path",),
        [((path,), cell) for path, cell in counts.delivery_seconds.items()],
    )
    yield histogram(
        "delivery_first_layer_seconds",
        "From a request's arrival at the gateway until its first layer was in place.",
        ("path",),
        [((path,), cell) for path, cell in counts.first_layer_seconds.items()],
    )
    yield histogram(
        "delivery_queue_seconds",
        "How long a delivery waited, for its turn, for memory, or held back by its rate.",
        (),
        [((), counts.queue_seconds)],
    )
    yield histogram(
        "delivery_rate_ratio",
        "What a delivery achieved of the rate that it was assigned.",
        ("policy",),
        [((policy,), cell) for policy, cell in counts.rate_ratios.items()],
    )
    yield counter(
        "put_chunks_total",
        "Chunks of kv-puts, by whether they were stored or had been.",
        ("result",),
        _by_one(counts.put_chunks),
    )
    yield counter(
        "encoded_puts_total",
        "kv-puts that came encoded and were stored, by their bucket.",
        ("bucket",),
        _by_one(counts.encoded_puts),
    )


def _of_schedule(means: GetMeans) -> Iterator[Metric]:
    policy = means.schedule.policy
    allocated, achieved = means.schedule.dispatcher.with_scheduler(_rates)
    yield gauge(
        "allocated_bytes_per_second",
        "Rates assigned to the deliveries that use them, together.",
        ("policy",),
        [((policy,), allocated)],
    )
    yield gauge(
        "achieved_bytes_per_second",
        "What all deliveries read together, over the last second.",
        ("policy",),
        [((policy,), achieved)],
    )
    yield level("deliveries_running", "Deliveries that run.", means.gates.entrance.running)
    yield gauge(
        "deliveries_waiting",
        "Requests for deliveries that wait, for their tenant's turn or for memory.",
        ("reason",),
        [
            (("turn",), means.gates.entrance.waiting),
            (("memory",), means.gates.bodies.waiting),
            (("staging",), means.gates.staging.waiting),
        ],
    )
    yield level(
        "in_flight_bytes",
        "Memory promised to deliveries into sockets.",
        means.gates.pool.promised_bytes,
    )
    yield level(
        "fabric_staging_bytes",
        "Staging memory promised to deliveries over fabrics.",
        means.staging.promised_bytes,
    )


def _of_nics(means: GetMeans) -> Iterator[Metric]:
    counts = means.counts
    yield counter(
        "nic_bytes_total",
        "Bytes that were read for deliveries to a storage NIC, by the tenant's name for it.",
        ("tenant", "nic"),
        counts.nic_bytes.items(),
    )
    yield counter(
        "nic_unpaced_deliveries_total",
        "Deliveries that named one storage NIC more than their tenant may use at once.",
        (),
        [((), means.schedule.dispatcher.with_scheduler(lambda one: one.nics.beyond_count))],
    )
    nics = means.schedule.nics()
    for name, (text, value) in _NIC_GAUGES.items():
        values: dict[tuple[str, str], float] = {}
        for one in nics:
            labels = counts.nic_labels(one.tenant, one.nic)
            values[labels] = values.get(labels, 0) + value(one)
        yield gauge(name, text, ("tenant", "nic"), list(values.items()))


def _rates(scheduler: Scheduler[ServedDelivery]) -> tuple[float, float]:
    return scheduler.assigned_bytes_per_s, scheduler.meter.rate_bytes_per_s(time.monotonic())


def _of_tenants(means: GetMeans) -> Iterator[Metric]:
    cells = list(means.counts.tenants.items())
    for name, text, value in _TENANT_COUNTERS:
        yield counter(name, text, ("tenant",), [((who,), value(cell)) for who, cell in cells])
    yield from _of_activity(means)
    yield from _of_usage(means)


def _of_activity(means: GetMeans) -> Iterator[Metric]:
    in_flight_bytes: Counter[str] = Counter()
    deliveries: Counter[str] = Counter()
    for tenant in means.books.in_flight.tenants():
        name = means.counts.names[tenant.identity]
        in_flight_bytes[name] += tenant.in_flight_bytes
        deliveries[name] += tenant.deliveries
    yield gauge(
        "tenant_in_flight_bytes",
        "Bytes of a tenant's puts and deliveries that are under way.",
        ("tenant",),
        _by_name(in_flight_bytes),
    )
    yield gauge(
        "tenant_deliveries", "A tenant's deliveries that run.", ("tenant",), _by_name(deliveries)
    )


def _of_usage(means: GetMeans) -> Iterator[Metric]:
    stored_bytes: Counter[str] = Counter()
    objects: Counter[str] = Counter()
    encoded_bytes: Counter[str] = Counter()
    decoded_bytes: Counter[str] = Counter()
    buckets = bucket_usage(means.calls.engine, GetUsage())
    for bucket in buckets:
        name = means.counts.names[bucket.owner]
        stored_bytes[name] += bucket.stored_bytes
        objects[name] += bucket.object_count
        if bucket.encoded_bytes:
            name = means.counts.buckets[bucket.bucket]
            encoded_bytes[name] += bucket.encoded_bytes
            decoded_bytes[name] += bucket.decoded_bytes
    yield level("buckets", "Buckets.", len(buckets))
    yield gauge(
        "tenant_stored_bytes",
        "Bytes that the buckets of a tenant hold.",
        ("tenant",),
        _by_name(stored_bytes),
    )
    yield gauge(
        "tenant_objects",
        "Objects that the buckets of a tenant hold.",
        ("tenant",),
        _by_name(objects),
    )
    yield gauge(
        "bucket_encoded_bytes",
        "Bytes of a bucket's frames, of the chunks that are stored encoded.",
        ("bucket",),
        _by_name(encoded_bytes),
    )
    yield gauge(
        "bucket_decoded_bytes",
        "Bytes that these chunks have decoded.",
        ("bucket",),
        _by_name(decoded_bytes),
    )


def _of_errors(counts: StorageCounts) -> Iterator[Metric]:
    yield counter(
        "storage_errors_total",
        "Requests of gateways that were answered with an error, by its code.",
        ("code",),
        _by_one(counts.errors),
    )


def _of_lifecycle(counts: LifecycleCounts) -> Iterator[Metric]:
    yield total(
        "lifecycle_sweeps_total", "Searches for what lifecycle rules expire.", counts.sweeps
    )
    yield total(
        "lifecycle_failures_total",
        "Buckets that a search gave up on, until the next.",
        counts.failures,
    )
    yield total(
        "lifecycle_expired_objects_total",
        "Objects that lifecycle rules expired.",
        counts.expired_objects,
    )
    yield total(
        "lifecycle_expired_bytes_total",
        "Bytes of objects that lifecycle rules expired.",
        counts.expired_bytes,
    )
    yield total(
        "lifecycle_aborted_uploads_total",
        "Uploads that lifecycle rules aborted.",
        counts.aborted_uploads,
    )


def _of_server(means: GetMeans) -> Iterator[Metric]:
    counts = means.counts
    yield level("puts_running", "Puts that run.", means.gates.slots.puts)
    yield level("puts_waiting", "Puts that wait for a slot.", means.gates.puts.waiting)
    yield counter(
        "slow_clients_cut_total",
        "Bodies and puts that were cut for their clients' rate while others waited.",
        ("kind",),
        [
            (("body",), means.gates.slow_bodies.cut_count),
            (("put",), means.gates.slow_puts.cut_count),
        ],
    )
    yield level("put_staging_bytes", "Bytes of unfinished puts.", means.gates.slots.staged_bytes)
    yield level(
        "storage_gateway_connections",
        "Connections from gateways and the admin server.",
        counts.gateway_connections,
    )
    yield level(
        "storage_client_connections", "Connections to the target socket.", counts.client_connections
    )
    yield level("targets", "Targets that clients have registered.", means.targets.count)
    yield level(
        "storage_draining",
        "1 while the storage server takes no more work.",
        means.gates.takes_no_work,
    )
