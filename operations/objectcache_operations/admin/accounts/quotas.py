"""Quotas as people write them, and as they are shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from objectcache_runtime.amounts import NONE, parse_size_bytes, size_text
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import AMOUNT_MAX, QuotaChange
from objectcache_schemas.records import Quota

T = TypeVar("T")

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
        "deliveries": _deliveries("--deliveries", flags.deliveries),
    }
    if all(value is msgspec.UNSET for value in values.values()):
        raise InvalidRequest(
            "nothing to set: give --stored, --objects, --requests, --in-flight or --deliveries"
        )
    return QuotaChange(**values)  # type: ignore[arg-type]  # each of its field's type


def _size(flag: str, text: str | None) -> int | msgspec.UnsetType | None:
    return msgspec.UNSET if text is None else amount_or_none(flag, parse_size_bytes, text)


def _count(flag: str, text: str | None) -> int | msgspec.UnsetType | None:
    return msgspec.UNSET if text is None else amount_or_none(flag, _whole_number, text)


def _deliveries(flag: str, text: str | None) -> int | msgspec.UnsetType | None:
    number = _count(flag, text)
    if number == 0:
        raise InvalidRequest(f"{flag}: 0 would have every get tried again for ever; give 1 or more")
    return number


def _rate(flag: str, text: str | None) -> float | msgspec.UnsetType | None:
    return msgspec.UNSET if text is None else amount_or_none(flag, _requests_per_s, text)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= AMOUNT_MAX):
        raise InvalidRequest(f"{text!r} is no whole number")
    return int(text)


def _requests_per_s(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= REQUESTS_PER_S_MAX:
        raise InvalidRequest(f"{text!r} is no number of requests a second")
    return rate


def amount_or_none(flag: str, parse: Callable[[str], T], text: str) -> T | None:
    """What a flag gives; None for "none". Raises `InvalidRequest` naming the flag."""
    if text.lower() == NONE:
        return None
    try:
        return parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{flag}: {error.message}, or {NONE}") from error


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
