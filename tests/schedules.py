"""Schedulers, recorders and demands as tests need them."""

from __future__ import annotations

from typing import TypeVar

from objectcache_schemas.operators.schedule import ScheduleConfiguration, TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, PolicyName, RatesName
from objectcache_storage_server.deliveries.plan import Plan
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import ScheduledJob
from objectcache_storage_server.scheduling.scheduler import Scheduler
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

JobT = TypeVar("JobT", bound=ScheduledJob)


def a_configuration(
    policy: PolicyName = "stall_dynamic",
    cap_gbps: float = 0.0,
    *,
    margin_gbps: float = 5.0,
    epoch_s: float = 0.01,
    rates: RatesName = EVERY_EPOCH,
    tenants: dict[str, TenantShare] | None = None,
) -> ScheduleConfiguration:
    """A schedule in force."""
    return ScheduleConfiguration(
        policy=policy,
        cap_gbps=cap_gbps,
        margin_gbps=margin_gbps,
        epoch_s=epoch_s,
        rates=rates,
        layerwise_threshold_bytes=0,
        tenants=tenants or {},
    )


def a_scheduler(job_type: type[JobT]) -> Scheduler[JobT]:
    """One without a cap."""
    return Scheduler(a_configuration(), 0.0)


def a_recorder(name: str = "") -> DeliveryRecorder:
    """A recorder of whatever comes."""
    return DeliveryRecorder(name, "b", "root", started_s=0.0, started_unix_s=0.0)


def demand_of(plan: Plan) -> Demand:
    """Of a delivery without a compute window."""
    layers = plan.end_layer - plan.first_layer
    return Demand(max(1, plan.payload_bytes // layers), None, layers)
