"""A schedule's configuration as the scheduler reckons with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from objectcache_schemas.descriptor import RATE_MIN
from objectcache_schemas.operators.schedule import ScheduleConfiguration
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_storage_server.scheduling.demand import Demand

BYTES_PER_GBIT = 1e9 / 8
DYNAMIC = "stall_dynamic"
NEED_MAX = 4.0  # of the cap: that a delivery may say it needs; bw_prop divides by what they say


@dataclass(frozen=True, slots=True)
class Terms:
    """Rates are bytes per second. The cap is infinite where there is none; a tenant without a cap
    or a weight of its own has no entry.
    """

    policy: PolicyName
    cap_bytes_per_s: float
    margin_bytes_per_s: float
    epoch_s: float
    are_for_life: bool  # rates, once assigned
    tenant_caps: Mapping[str, float]
    tenant_weights: Mapping[str, float]

    @classmethod
    def of(cls, configuration: ScheduleConfiguration) -> Terms:
        """The same in bytes per second."""
        tenants = configuration.tenants.items()
        return cls(
            policy=configuration.policy,
            cap_bytes_per_s=configuration.cap_gbps * BYTES_PER_GBIT or math.inf,
            margin_bytes_per_s=configuration.margin_gbps * BYTES_PER_GBIT,
            epoch_s=configuration.epoch_s,
            are_for_life=configuration.rates == FOR_LIFE,
            tenant_caps={
                name: share.cap_gbps * BYTES_PER_GBIT for name, share in tenants if share.cap_gbps
            },
            tenant_weights={name: share.weight for name, share in tenants},
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether pooled deliveries go by due time."""
        return self.policy == DYNAMIC

    @property
    def assigns_rates(self) -> bool:
        """Whether pooled deliveries get rates: there is a policy of rates, and a cap to divide."""
        return not self.is_dynamic and self.cap_bytes_per_s < math.inf

    def seen(self, demand: Demand) -> Demand:
        """With its tenant's weight, and a window that claims neither the whole link nor a place on
        it for next to nothing.
        """
        window_s = demand.compute_window_s
        if window_s:
            window_s = min(window_s, demand.layer_bytes / RATE_MIN)
            window_s = max(window_s, demand.layer_bytes / (NEED_MAX * self.cap_bytes_per_s))
        weight = self.tenant_weights.get(demand.tenant, 1.0)
        if weight == demand.weight and window_s == demand.compute_window_s:
            return demand
        return replace(demand, compute_window_s=window_s, weight=weight)
