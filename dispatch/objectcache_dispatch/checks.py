"""What is wrong with a number or a name, said in one line."""

from __future__ import annotations

import math
from collections.abc import Iterable

from objectcache_schemas.errors import InvalidRequest


def check_name(field: str, name: str) -> None:
    """Raises `InvalidRequest` for an empty name."""
    if not name:
        raise InvalidRequest(f"{field} is empty; give it a name")


def check_at_least(field: str, value: float, least: float) -> None:
    """Raises `InvalidRequest` for a number that is less, infinite or none."""
    if not (math.isfinite(value) and value >= least):
        raise InvalidRequest(f"{field} is {value}; it must be finite and at least {least:g}")


def check_positive(field: str, value: float) -> None:
    """Raises `InvalidRequest` for a number that is not above zero, infinite or none."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidRequest(f"{field} is {value}; it must be finite and above 0")


def check_distinct(field: str, names: Iterable[str]) -> None:
    """Raises `InvalidRequest` for a name that is there twice."""
    seen = set[str]()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"{field} {name!r} is there twice; names must differ")
        seen.add(name)
