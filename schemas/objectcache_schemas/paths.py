"""The path that a request forces, as its header names it."""

from __future__ import annotations

from objectcache_schemas import headers
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages import DeliveryPath

_NAMES = ", ".join(path.value for path in DeliveryPath)


def parse_path(text: str) -> DeliveryPath | None:
    """The path that a request forces; None for the empty text, which leaves it to the server.

    Raises `InvalidRequest` for anything that is none of the five.
    """
    if not text:
        return None
    try:
        return DeliveryPath(text)
    except ValueError:
        raise InvalidRequest(
            f"{headers.PATH} must be one of {_NAMES}", code="InvalidRequest"
        ) from None


def cannot_take(path: DeliveryPath, why: str) -> InvalidRequest:
    """The error for a path that is forced and cannot be taken; `why` goes on after its name."""
    return InvalidRequest(f"{headers.PATH}: {path.value} {why}", code="InvalidRequest")
