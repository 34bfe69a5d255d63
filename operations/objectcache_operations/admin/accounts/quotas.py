"""Quotas as people write them, and as they are shown. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from objectcache_runtime.amounts import NONE, parse_size_bytes, size_text
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import AMOUNT_MAX, QuotaChange
from objectcache_schemas.records import Quota

REQUESTS_PER_S_MAX = 1e9


@dataclass(frozen=True, slots=True)
class QuotaFlags:
    """The flags of a quota, as written; None was not given."""

    stored: str | None = None
    objects: str | None = None
    requests: str | None = None
    in_flight: str | None = None
    deliveries: str | None = None


def quota_change(flags: QuotaFlags) -> QuotaChange:
    """What the flags change; raises `InvalidRequest` naming the flag."""
    values = {
        "stored_bytes": _size("--stored", flags.stored),
        "object_count": _count("--objects", flags.objects),
        "requests_per_s": _rate("--requests", flags.requests),
        "in_flight_bytes": _size("--in-flight", flags.in_flight),
        "deliveries": _count("--deliveries", flags.deliveries),
    }
    if all(value is msgspec.UNSET for value in values.values()):
        raise InvalidRequest(
            "nothing to set: give --stored, --objects, --requests, --in-flight or --deliveries"
        )
    return QuotaChange(**values)  # type: ignore[arg-type]  # each of its field's type


def _size(flag: str, text: str | None) -> int | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    if text.lower() == NONE:
        return None
    try:
        return parse_size_bytes(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{flag}: {error.message}, or {NONE}") from error


def _count(flag: str, text: str | None) -> int | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    if text.lower() == NONE:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= AMOUNT_MAX):
        raise InvalidRequest(f"{flag}: {text!r} is no whole number, or {NONE}")
    return int(text)


def _rate(flag: str, text: str | None) -> float | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    if text.lower() == NONE:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= REQUESTS_PER_S_MAX:
        raise InvalidRequest(f"{flag}: {text!r} is no number of requests a second, or {NONE}")
    return rate


def quota_lines(quota: Quota) -> list[str]:
    """A quota, a line for each limit."""
    return [
        f"stored        {_size_text(quota.stored_bytes)}",
        f"objects       {_number_text(quota.object_count)}",
        f"requests      {_number_text(quota.requests_per_s, '/s')}",
        f"in flight     {_size_text(quota.in_flight_bytes)}",
        f"deliveries    {_number_text(quota.deliveries)}",
    ]


def _size_text(size_bytes: int | None) -> str:
    return NONE if size_bytes is None else size_text(size_bytes)


def _number_text(number: float | None, unit: str = "") -> str:
    if number is None:
        return NONE
    text = f"{number:,}" if isinstance(number, int) else f"{number:,.6f}".rstrip("0").rstrip(".")
    return f"{text}{unit}"


def used_text(used_bytes: int, limit_bytes: int | None) -> str:
    """Such as "1.5 GiB of 10.0 GiB"."""
    used = size_text(used_bytes)
    return used if limit_bytes is None else f"{used} of {size_text(limit_bytes)}"


def counted_text(count: int, limit: int | None) -> str:
    """Such as "12 of 1,000"."""
    return f"{count:,}" if limit is None else f"{count:,} of {limit:,}"
