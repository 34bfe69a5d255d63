"""Changes of the schedule from what an operator wrote. Pure.

Everything raises `InvalidRequest` that names what was written and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from objectcache_runtime.amounts import (
    NONE,
    duration_text,
    gbps_text,
    parse_duration_s,
    parse_rate_gbps,
    parse_size_bytes,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import CAP_GBPS_MAX, CAP_GBPS_MIN
from objectcache_schemas.operators.schedule import ScheduleChanges, TenantShare
from objectcache_schemas.policy_names import POLICIES, RATES, PolicyName, RatesName

EPOCH_MIN_S, EPOCH_MAX_S = 0.001, 10.0
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
DELIVERIES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class TenantFlags:
    """The flags of `schedule tenant`, as written; None was not given."""

    weight: float | None = None
    cap: str | None = None
    deliveries_max: str | None = None


def policy_of(text: str) -> PolicyName:
    """The policy of this name."""
    if text not in POLICIES:
        raise InvalidRequest(f"no policy is called {text!r}; give one of {', '.join(POLICIES)}")
    policy: PolicyName = msgspec.convert(text, PolicyName)
    return policy


def rates_of(text: str) -> RatesName:
    """How long an assigned rate holds."""
    if text not in RATES:
        raise InvalidRequest(f"rates cannot hold {text!r}; give one of {', '.join(RATES)}")
    rates: RatesName = msgspec.convert(text, RatesName)
    return rates


def cap_gbps_of(text: str) -> float:
    """A cap; 0 for none, which a plain 0 is too, as in scheduler.cap_gbps."""
    if text == "0":
        return 0.0
    cap_gbps = rate_gbps_of(text)
    if 0 < cap_gbps < CAP_GBPS_MIN:
        raise InvalidRequest(
            f"{text!r} is below {gbps_text(CAP_GBPS_MIN)}, the least cap; give {NONE} for no cap"
        )
    return cap_gbps


def rate_gbps_of(text: str) -> float:
    """A cap or margin; 0 for none."""
    if text.lower() == NONE:
        return 0.0
    try:
        rate_gbps = parse_rate_gbps(text)
    except InvalidRequest as error:
        raise _or_none(error) from error
    if rate_gbps > CAP_GBPS_MAX:
        raise InvalidRequest(f"{text!r} is above {gbps_text(CAP_GBPS_MAX)}, the largest rate")
    return rate_gbps


def epoch_s_of(text: str) -> float:
    """The time between two divisions of the link."""
    epoch_s = parse_duration_s(text)
    if not EPOCH_MIN_S <= epoch_s <= EPOCH_MAX_S:
        bounds = f"{duration_text(EPOCH_MIN_S)} to {duration_text(EPOCH_MAX_S)}"
        raise InvalidRequest(f"{text!r} is out of bounds; an epoch takes {bounds}")
    return epoch_s


def threshold_bytes_of(text: str) -> int:
    """The payload from which `auto` is layerwise; with none it always is."""
    if text.lower() == NONE:
        return 0
    try:
        return parse_size_bytes(text)
    except InvalidRequest as error:
        raise _or_none(error) from error


_READERS: dict[str, Callable[[str], Any]] = {
    "policy": policy_of,
    "cap_gbps": cap_gbps_of,
    "margin_gbps": rate_gbps_of,
    "epoch_s": epoch_s_of,
    "rates": rates_of,
    "layerwise_threshold_bytes": threshold_bytes_of,
}


def change_of(field: str, written: str) -> ScheduleChanges:
    """The change of one field."""
    return ScheduleChanges(**{field: _READERS[field](written)})


def share_changes_of(flags: TenantFlags) -> dict[str, Any]:
    """Values of the given flags by the share's fields."""
    changes: dict[str, Any] = {}
    if flags.weight is not None:
        changes["weight"] = _weight(flags.weight)
    if flags.cap is not None:
        changes["cap_gbps"] = cap_gbps_of(flags.cap)
    if flags.deliveries_max is not None:
        changes["deliveries_max"] = _deliveries_max(flags.deliveries_max)
    return changes


def changed_share(current: TenantShare | None, changes: dict[str, Any]) -> TenantShare:
    """The share with some of its values changed; a tenant without one begins with the defaults."""
    return msgspec.structs.replace(current or TenantShare(), **changes)


def _weight(weight: float) -> float:
    if math.isnan(weight) or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise InvalidRequest(f"--weight: {weight:g} is not from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    return weight


def _deliveries_max(text: str) -> int:
    if text.lower() == NONE:
        return 0
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:8]) <= DELIVERIES_MAX):
        raise InvalidRequest(
            f"--deliveries-max: {text!r} is no number from 1 to {DELIVERIES_MAX}; give {NONE} for "
            "that of everybody"
        )
    return int(text)


def _or_none(error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"{error.message}, or {NONE}")
