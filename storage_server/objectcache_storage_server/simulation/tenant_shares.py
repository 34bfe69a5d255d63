"""Tenants with a weight or a cap of their own, as flags name them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import CAP_GBPS_MAX, CAP_GBPS_MIN
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_storage_server.simulation.arrivals import tenant_name

SHARES_MAX = 64  # a column each
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
FORM = "--tenant must be like 3=2 or tenant-3=2:10 (weight, and cap in Gbps)"

_SHARE = re.compile(r"(?:tenant-)?([0-9]{1,9})=([^:]*)(?::(.*))?")


def read_shares(texts: Sequence[str], tenant_count: int | None) -> dict[str, TenantShare]:
    """The share of each tenant that is named. Raises `InvalidRequest` for what is not like FORM."""
    if texts and tenant_count is None:
        raise InvalidRequest("--tenant is of one of several: say how many with --tenants")
    if len(texts) > SHARES_MAX:
        raise InvalidRequest(f"--tenant may be given {SHARES_MAX} times, got {len(texts)}")
    shares: dict[str, TenantShare] = {}
    for text in texts:
        name, share = _read(text, tenant_count or 0)
        if name in shares:
            raise InvalidRequest(f"--tenant names {name} twice")
        shares[name] = share
    return shares


def _read(text: str, tenant_count: int) -> tuple[str, TenantShare]:
    match = _SHARE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{FORM}, got {text!r}")
    number, weight, cap = match.groups()
    if not 1 <= int(number) <= tenant_count:
        raise InvalidRequest(f"--tenant {text}: --tenants has numbers from 1 to {tenant_count}")
    share = TenantShare(
        weight=_number(text, "weight", weight, WEIGHT_MIN, WEIGHT_MAX),
        cap_gbps=0.0 if cap is None else _number(text, "cap", cap, CAP_GBPS_MIN, CAP_GBPS_MAX),
    )
    return tenant_name(int(number)), share


def _number(text: str, name: str, digits: str, least: float, most: float) -> float:
    try:
        number = float(digits)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise InvalidRequest(f"--tenant {text}: the {name} must be from {least:g} to {most:g}")
    return number
