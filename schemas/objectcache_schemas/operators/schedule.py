"""The schedule: what operators see of it and change."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.limits import CAP_GBPS_MAX
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.policy_names import PolicyName, RatesName


class TenantShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one tenant may take."""

    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0  # of its stalls, and its share
    cap_gbps: Annotated[float, msgspec.Meta(ge=0, le=CAP_GBPS_MAX)] = 0.0  # 0 is none of its own
    deliveries_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # 0: the setting's


class ScheduleChanges(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What an operator changed; None leaves a setting as it is. Kept in DATA_DIR/schedule.json."""

    policy: PolicyName | None = None
    cap_gbps: Annotated[float, msgspec.Meta(ge=0, le=CAP_GBPS_MAX)] | None = None
    margin_gbps: Annotated[float, msgspec.Meta(ge=0, le=CAP_GBPS_MAX)] | None = None
    epoch_s: Annotated[float, msgspec.Meta(ge=0.001, le=10)] | None = None
    rates: RatesName | None = None
    layerwise_threshold_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tenants: dict[str, TenantShare | None] = {}  # None: as everybody else again


class ScheduleConfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The schedule in force: the settings, and over them what an operator changed."""

    policy: PolicyName
    cap_gbps: float
    margin_gbps: float
    epoch_s: float
    rates: RatesName
    layerwise_threshold_bytes: int
    tenants: dict[str, TenantShare] = {}


class ScheduledDelivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One running delivery as the scheduler sees it."""

    request_id: str
    tenant: str
    pooled: bool  # shares the pool; else it takes its fair share of what is read
    layer_bytes: int
    num_layers: int
    compute_window_s: float | None
    window_source: str
    rate_bytes_per_s: float | None
    sent_bytes: int
    payload_bytes: int
    next_layer: int
    consumed_layers: int
    age_s: float
    nic: str = ""  # that it goes to; empty where its client names none
    decoded_bytes: int = 0  # of the payload, more than it has where it is encoded; 0: not known


class ScheduledNic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One storage NIC that deliveries go to, by the name that its tenant gives it."""

    tenant: str
    nic: str
    nic_bytes_per_s: float | None  # as its tenant says; None: nobody said, so nothing is paced
    achieved_bytes_per_s: float  # over the last second
    sent_bytes: int  # since it was named first
    queued_bytes: int  # that running deliveries have still to send there
    deliveries: int
    held: int  # of these, those that wait until it may be sent more


class ScheduleState(Message, frozen=True):
    """Reply to `GetSchedule` and `SetSchedule`."""

    configuration: ScheduleConfiguration
    changes: ScheduleChanges  # those in force over the settings
    deliveries: tuple[ScheduledDelivery, ...]  # the first 1,000
    delivery_count: int
    waiting: int  # requests in their tenants' queues, and for memory
    rate_bytes_per_s: float  # of all deliveries, over the last second
    nics: tuple[ScheduledNic, ...] = ()  # the first 1,000


@request(ScheduleState, repeatable=False, changes=Changes.NOTHING)
class GetSchedule(Message, frozen=True):
    """Ask for the schedule."""


@request(ScheduleState, repeatable=False, changes=Changes.SCHEDULE)
class SetSchedule(Message, frozen=True):
    """Change the schedule of the running server, and keep the changes.

    `reset` forgets all earlier changes first.
    """

    changes: ScheduleChanges
    reset: bool = False
