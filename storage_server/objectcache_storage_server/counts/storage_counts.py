"""What is counted of deliveries, clients' stalls, puts and refusals. From any thread."""

from __future__ import annotations

import threading
from typing import NamedTuple

from objectcache_runtime.metrics.metric_cells import (
    OTHER,
    RATIOS,
    BoundedNames,
    Cells,
    Counts,
    Histogram,
)
from objectcache_runtime.metrics.recent_count import RecentCount
from objectcache_schemas.errors import StorageFull
from objectcache_storage_server.counts.engine_times import EngineTimes
from objectcache_storage_server.tracing.recorder import PHASES, DeliveryRecorder

SUCCESS = "ok"
NICS_IN_METRICS_MAX = 256  # of all tenants; whoever comes later is counted with others
BUCKETS_IN_METRICS_MAX = 256  # those with encoded chunks or puts, likewise
STORED, EXISTING = "stored", "existing"
STALL_MIN_S = 0.0001  # a wait below it is the price of asking
_QUEUE = PHASES.index("queue")


class DeliveryKind(NamedTuple):
    """The labels of a delivery that has ended."""

    delivery: str  # the mode; empty where it was refused before that was chosen
    path: str
    transport: str
    error_code: str  # empty where it succeeded


class DeliveryCell:
    """The deliveries of one kind. Changed under the lock of `StorageCounts`."""

    __slots__ = ("chunks", "count", "phases_s", "read_bytes", "spared_bytes")

    def __init__(self) -> None:
        self.count = self.read_bytes = self.spared_bytes = self.chunks = 0
        self.phases_s = [0.0] * len(PHASES)


class TenantCell:
    """What one tenant was delivered, and what its clients say of it. Changed as that is."""

    __slots__ = ("compute_s", "consumed_layers", "delivered_bytes", "stall_s", "stalls")

    def __init__(self) -> None:
        self.delivered_bytes = self.consumed_layers = self.stalls = 0
        self.stall_s = self.compute_s = 0.0


class StorageCounts:
    """The numbers of one storage server since its start."""

    def __init__(self, tenants_max: int) -> None:
        """`tenants_max`: `admin.tenants_in_metrics_max`."""
        self.names = BoundedNames(tenants_max)
        self._nics = BoundedNames(NICS_IN_METRICS_MAX)
        self.nic_bytes: Counts[tuple[str, str]] = Counts()  # by tenant and its name for the NIC
        self.engine = EngineTimes()
        self.deliveries: Cells[DeliveryKind, DeliveryCell] = Cells(DeliveryCell)
        self.tenants: Cells[str, TenantCell] = Cells(TenantCell)
        self.delivery_seconds: Cells[str, Histogram] = Cells(Histogram)  # by path
        self.first_layer_seconds: Cells[str, Histogram] = Cells(Histogram)  # by path
        self.queue_seconds = Histogram()
        self.rate_ratios: Cells[str, Histogram] = Cells(lambda: Histogram(RATIOS))  # by policy
        self.put_chunks: Counts[str] = Counts()  # by whether they were new
        self.buckets = BoundedNames(BUCKETS_IN_METRICS_MAX)
        self.encoded_puts: Counts[str] = Counts()  # by their bucket's name among these
        self.errors: Counts[str] = Counts()  # by code
        self.full_lately = RecentCount()  # requests that found no space; in the event loop only
        self.gateway_connections = 0  # in the event loop only, as is the next
        self.client_connections = 0
        self._lock = threading.Lock()

    def nic_labels(self, tenant: str, nic: str) -> tuple[str, str]:
        """What a NIC is called in metrics: its tenant, and the tenant's name for it."""
        known = self._nics[f"{tenant}/{nic}"]  # no NIC's name holds a slash
        return (OTHER, OTHER) if known == OTHER else (self.names[tenant], nic)

    def delivery_ended(self, recorder: DeliveryRecorder) -> None:
        """A delivery ended, or was refused."""
        ended = recorder.summary()
        path = ended.path
        cell = self.deliveries[
            DeliveryKind(ended.delivery, path, ended.transport, ended.error_code)
        ]
        tenant = self.tenants[self.names[ended.tenant]]
        if ended.nic and ended.read_bytes:
            self.nic_bytes.add(self.nic_labels(ended.tenant, ended.nic), ended.read_bytes)
        phases_s = ended.phases_s
        with self._lock:
            cell.count += 1
            cell.read_bytes += ended.read_bytes
            cell.spared_bytes += ended.spared_bytes
            cell.chunks += ended.chunk_count
            for phase, seconds in enumerate(phases_s):
                cell.phases_s[phase] += seconds
            tenant.delivered_bytes += ended.read_bytes
        self.queue_seconds.observe(phases_s[_QUEUE])
        if not ended.delivery:
            return
        self.delivery_seconds[path].observe(ended.duration_s)
        if ended.first_layer_s is not None:
            self.first_layer_seconds[path].observe(ended.first_layer_s)
        if ended.rate_bytes_per_s and ended.achieved_bytes_per_s and not ended.error_code:
            ratio = ended.achieved_bytes_per_s / ended.rate_bytes_per_s
            self.rate_ratios[ended.policy].observe(ratio)

    def request_refused(self, code: str, now_s: float) -> None:
        """A request was answered with an error; in the event loop."""
        self.errors.add(code)
        if code == StorageFull.default_code:
            self.full_lately.add(now_s)

    def layers_consumed(
        self, tenant: str, layers: int, compute_s: float, waited_s: float | None
    ) -> None:
        """A client is through with more layers: each computed so long, and waited for, together."""
        if layers <= 0:
            return
        cell = self.tenants[self.names[tenant]]
        with self._lock:
            cell.consumed_layers += layers
            cell.compute_s += layers * compute_s
            if waited_s is not None and waited_s >= STALL_MIN_S:
                cell.stall_s += waited_s
                cell.stalls += 1
