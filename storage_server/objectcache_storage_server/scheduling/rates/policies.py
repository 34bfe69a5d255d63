"""The policies that assign each delivery a rate (paper, sections 3.6 and 5.7, Tables A4 and A9).

Each is a weighting: a link is shared in proportion to it, and whoever would get more than its own
limit gets that limit, which leaves more for the others (water-filling). Where all limits fit,
everybody has its limit and the rest of the link stays free.

| policy | in proportion to | at most |
| --- | --- | --- |
| equal | w | |
| kv_prop | w L s | |
| bw_prop | w s / c | |
| stall_opt | sqrt(w s), which minimises the sum of w s / r | s / c, the zero-stall rate |
| calibrated_stall_opt | sqrt(w s) | s / c and the margin |

Nobody gets more than its client wants. A tenant's cap bounds the sum of its deliveries, and so does
what a storage NIC carries, the sum of those that go to it. The level at which a tenant reaches its
cap is the same whatever the others do, so sharing the cap inside the tenant first, and taking the
result as further limits of its deliveries, is exact and needs no repetition. All that go to a NIC
are of one tenant, so the same holds of the NIC within the tenant, and comes before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt

from objectcache_schemas.policy_names import PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination

OwnerT = TypeVar("OwnerT", str, Destination)
Weighting = Callable[[Sequence[Demand]], list[float]]
Limiting = Callable[[Sequence[Demand], float], list[float]]
Floats = npt.NDArray[np.float64]

ARRAYS_MIN = 64  # demands: of more, arrays are quicker
BY_WHAT_IS_LEFT = frozenset({"kv_prop"})  # policies whose shares change while layers are sent


def assigned_rates(
    policy: str,
    demands: Sequence[Demand],
    cap_bytes_per_s: float,
    margin_bytes_per_s: float = 0.0,
    tenant_caps: Mapping[str, float] = {},
    nic_caps: Mapping[Destination, float] = {},
) -> list[float]:
    """Bytes per second of each demand, in their order; the sum is at most the cap.

    `policy` is one of `RATE_POLICIES`. `tenant_caps` is bytes per second by tenant, `nic_caps` the
    same by what NICs carry; who has no entry has no cap of its own. A rate is infinite where
    neither a cap nor a limit bounds it.

    A demand without a compute window has no zero-stall rate: stall_opt sets it no limit, and
    bw_prop gives it its weight's share of the cap before the others share the rest.
    """
    weighting, limiting = _POLICIES[policy]
    weights, limits = weighting(demands), limiting(demands, margin_bytes_per_s)
    limits = [min(limit, demand.rate_max) for limit, demand in zip(limits, demands, strict=True)]
    if nic_caps:
        _limit_together([(one.tenant, one.nic) for one in demands], weights, limits, nic_caps)
    if tenant_caps:
        _limit_together([one.tenant for one in demands], weights, limits, tenant_caps)
    return water_filled(weights, limits, cap_bytes_per_s)


def water_filled(weights: Sequence[float], limits: Sequence[float], budget: float) -> list[float]:
    """`min(limit, level * weight)` of each, at the one level where they use up the budget; the
    limits where these fit. Weights are above 0. O(n log n).
    """
    if len(limits) > ARRAYS_MIN:
        return _water_filled_arrays(np.array(weights), np.array(limits), budget)
    if sum(limits) <= budget:
        return list(limits)
    reached_at = [limit / weight for limit, weight in zip(limits, weights, strict=True)]
    order = sorted(range(len(limits)), key=reached_at.__getitem__, reverse=True)
    # Added up from the last one to reach its limit: taking weights off a sum would lose the small.
    weights_left = list(accumulate(weights[index] for index in order))
    left, level = budget, 0.0
    for index, weight_left in zip(reversed(order), reversed(weights_left), strict=True):
        level = max(level, left / weight_left)  # it rises; rounding must not make it 0
        if level <= reached_at[index]:
            break
        left -= limits[index]
    return [min(limit, level * weight) for limit, weight in zip(limits, weights, strict=True)]


def _water_filled_arrays(weights: Floats, limits: Floats, budget: float) -> list[float]:
    """The same, of many."""
    if float(limits.sum()) <= budget:
        return list(map(float, limits))
    reached_at = limits / weights
    order = np.argsort(reached_at, kind="stable")
    weights_left = np.cumsum(weights[order][::-1])[::-1]
    before = np.concatenate(([0.0], np.cumsum(limits[order])[:-1]))
    levels = np.maximum.accumulate(np.maximum((budget - before) / weights_left, 0.0))
    held = levels <= reached_at[order]
    level = levels[int(held.argmax()) if held.any() else -1]
    rates: list[float] = np.minimum(limits, level * weights).tolist()
    return rates


def _limit_together(
    owners: Sequence[OwnerT],
    weights: list[float],
    limits: list[float],
    caps: Mapping[OwnerT, float],
) -> None:
    """Lower the limits of demands to what the cap of their tenant, or their NIC, allows them."""
    members: dict[OwnerT, list[int]] = {}
    for index, owner in enumerate(owners):
        if owner in caps:
            members.setdefault(owner, []).append(index)
    for owner, indices in members.items():
        shares = water_filled(
            [weights[index] for index in indices],
            [limits[index] for index in indices],
            caps[owner],
        )
        for index, share in zip(indices, shares, strict=True):
            limits[index] = share


def _equal_weights(demands: Sequence[Demand]) -> list[float]:
    return [demand.weight for demand in demands]


def _payload_weights(demands: Sequence[Demand]) -> list[float]:
    return [demand.weight * demand.payload_bytes for demand in demands]


def _bandwidth_weights(demands: Sequence[Demand]) -> list[float]:
    """Weighted zero-stall rates. Who has none counts as their mean, which makes its share of the
    cap its share of the weights.
    """
    rates = [demand.zero_stall_rate for demand in demands]
    known = [(d.weight, rate) for d, rate in zip(demands, rates, strict=True) if rate < math.inf]
    if not known:
        return _equal_weights(demands)
    mean = sum(weight * rate for weight, rate in known) / sum(weight for weight, _ in known)
    return [
        demand.weight * (rate if rate < math.inf else mean)
        for demand, rate in zip(demands, rates, strict=True)
    ]


def _stall_weights(demands: Sequence[Demand]) -> list[float]:
    return [math.sqrt(demand.weight * demand.layer_bytes) for demand in demands]


def _no_limits(demands: Sequence[Demand], _margin_bytes_per_s: float) -> list[float]:
    return [math.inf] * len(demands)


def _zero_stall_limits(demands: Sequence[Demand], _margin_bytes_per_s: float) -> list[float]:
    return [demand.zero_stall_rate for demand in demands]


def _calibrated_limits(demands: Sequence[Demand], margin_bytes_per_s: float) -> list[float]:
    return [demand.zero_stall_rate + margin_bytes_per_s for demand in demands]


_POLICIES: dict[str, tuple[Weighting, Limiting]] = {
    "equal": (_equal_weights, _no_limits),
    "kv_prop": (_payload_weights, _no_limits),
    "bw_prop": (_bandwidth_weights, _no_limits),
    "stall_opt": (_stall_weights, _zero_stall_limits),
    "calibrated_stall_opt": (_stall_weights, _calibrated_limits),
}
RATE_POLICIES: tuple[PolicyName, ...] = tuple(
    policy for policy in get_args(PolicyName) if policy in _POLICIES
)
