"""What every store checks of a call before it asks its system."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from objectcache_storage_server.engines.stores.shared_store import (
    NAME_BYTES_MAX,
    StoreCapabilities,
    StoreTimeout,
)

_NAME = re.compile(r"(?!\.{1,2}(/|$))[A-Za-z0-9._-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*")


def check_name(name: str) -> str:
    """The name. Raises `ValueError` where the contract does not allow it."""
    if len(name) > NAME_BYTES_MAX or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} is no name of an object: at most {NAME_BYTES_MAX} ASCII letters, digits, "
            'and . - _ / without a part that is empty, "." or ".."'
        )
    return name


def check_put(
    name: str, parts: Sequence[memoryview], capabilities: StoreCapabilities, deadline_s: float
) -> int:
    """The object's bytes. Raises `ValueError`, and `StoreTimeout` where it is too late already."""
    check_name(name)
    size_bytes = sum(part.nbytes for part in parts)
    if not 0 < size_bytes <= capabilities.object_bytes_max:
        raise ValueError(
            f"{name} has {size_bytes} bytes: an object of the {capabilities.name} store has 1 to "
            f"{capabilities.object_bytes_max}"
        )
    check_deadline(deadline_s, f"put {name}")
    return size_bytes


def check_append(
    number: int, record: bytes, capabilities: StoreCapabilities, deadline_s: float
) -> None:
    """Raises `ValueError`, and `StoreTimeout` where it is too late already."""
    if number < 0 or not 0 < len(record) <= capabilities.record_bytes_max:
        raise ValueError(
            f"record {number} has {len(record)} bytes: numbers begin at 0, and a record of the "
            f"{capabilities.name} store has 1 to {capabilities.record_bytes_max} bytes"
        )
    check_deadline(deadline_s, f"append record {number}")


def check_deadline(deadline_s: float, operation: str) -> None:
    """Raises `StoreTimeout` where the deadline has passed: then nothing was done."""
    if time.monotonic() >= deadline_s:
        raise StoreTimeout(f"{operation}: no time is left for it")
