"""Policies by the scheduler itself, under virtual time, on a link without overheads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_schemas.operators.schedule import ScheduleConfiguration, TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import Scheduler, Wait

LAYERS_MAX = 400_000  # of all requests; about ten seconds
FRAGMENTS_WANTED = 200_000  # of all requests
LAYER_FRAGMENTS_MAX = 16
EPOCH_S = 0.01
EPOCHS_MAX = 200  # about: each works out the rates of all requests


def layer_arrivals(
    policy: PolicyName,
    demands: Sequence[Demand],
    cap_bytes_per_s: float,
    tenant_caps: Mapping[str, float],
    margin_bytes_per_s: float = 0.0,
) -> list[list[float]]:
    """When each layer of each demand has arrived, in seconds; all begin at 0.

    Raises `InvalidRequest` where there are more layers than LAYERS_MAX.
    """
    layers = sum(demand.num_layers for demand in demands)
    if layers > LAYERS_MAX:
        raise InvalidRequest(
            f"{policy} is simulated for at most {LAYERS_MAX:,} layers of all requests together, "
            f"not {layers:,}; give fewer requests, or a policy of rates with --rates for_life"
        )
    configuration = _configuration(
        policy, demands, cap_bytes_per_s, tenant_caps, margin_bytes_per_s
    )
    scheduler: Scheduler[_Delivery] = Scheduler(configuration, now_s=0.0)
    layer_fragments = _layer_fragments(layers)
    deliveries = [_Delivery(demand, layer_fragments) for demand in demands]
    for delivery in deliveries:
        scheduler.add(delivery, delivery.demand, 0.0, pooled=True)
    _run(scheduler, cap_bytes_per_s)
    assert all(delivery.is_sent for delivery in deliveries)
    return [delivery.arrivals_s for delivery in deliveries]


def _run(scheduler: Scheduler[_Delivery], cap_bytes_per_s: float) -> None:
    """Let the link carry one fragment after the other."""
    now_s = free_s = 0.0
    while True:
        step = scheduler.next(now_s)
        if isinstance(step, Wait):
            if step.until_s == math.inf:
                return
            now_s = max(now_s, step.until_s)
            continue
        free_s = max(now_s, free_s) + step.fragment.length_bytes / cap_bytes_per_s
        step.job.arrived(step.fragment, free_s)
        if step.job.is_sent:
            scheduler.remove(step.job, now_s)


def _layer_fragments(layers: int) -> int:
    """The finer, the nearer to a link that can be divided at will; the coarser, the sooner done."""
    return max(1, min(LAYER_FRAGMENTS_MAX, FRAGMENTS_WANTED // layers))


def _configuration(
    policy: PolicyName,
    demands: Sequence[Demand],
    cap_bytes_per_s: float,
    tenant_caps: Mapping[str, float],
    margin_bytes_per_s: float,
) -> ScheduleConfiguration:
    carrying_s = sum(demand.payload_bytes for demand in demands) / cap_bytes_per_s
    return ScheduleConfiguration(
        policy=policy,
        cap_gbps=cap_bytes_per_s / BYTES_PER_GBIT,
        margin_gbps=margin_bytes_per_s / BYTES_PER_GBIT,
        epoch_s=max(EPOCH_S, carrying_s / EPOCHS_MAX),
        rates=EVERY_EPOCH,
        layerwise_threshold_bytes=0,
        tenants={
            demand.tenant: TenantShare(
                weight=demand.weight, cap_gbps=tenant_caps.get(demand.tenant, 0.0) / BYTES_PER_GBIT
            )
            for demand in demands
        },
    )


class _Delivery:
    """A job whose client always has room."""

    def __init__(self, demand: Demand, layer_fragments: int) -> None:
        self.demand = demand
        self.arrivals_s: list[float] = []
        self._fragment_bytes = math.ceil(demand.layer_bytes / layer_fragments)
        self._taken_bytes = 0

    @property
    def is_sent(self) -> bool:
        """Whether every layer has arrived."""
        return len(self.arrivals_s) == self.demand.num_layers

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """See `delivery_flow.ScheduledJob`."""

    def take(self) -> Fragment | None:
        """The next piece of the layer that is on its way."""
        layer, in_layer = divmod(self._taken_bytes, self.demand.layer_bytes)
        if layer == self.demand.num_layers:
            return None
        length = min(self._fragment_bytes, self.demand.layer_bytes - in_layer)
        fragment = Fragment(self._taken_bytes, length, 0, 1, layer, layer + 1)
        self._taken_bytes += length
        return fragment

    def arrived(self, fragment: Fragment, now_s: float) -> None:
        """The fragment's last byte is there."""
        end_bytes = fragment.offset_bytes + fragment.length_bytes
        if end_bytes == fragment.end_layer * self.demand.layer_bytes:
            self.arrivals_s.append(now_s)

    def __repr__(self) -> str:
        return f"<_Delivery {len(self.arrivals_s)}/{self.demand.num_layers} layers>"
