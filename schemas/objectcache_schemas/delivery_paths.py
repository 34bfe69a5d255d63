"""The paths that a delivery can take, and the one that a request forces."""

from __future__ import annotations

import enum

from objectcache_schemas import headers
from objectcache_schemas.errors import InvalidRequest


class DeliveryPath(enum.Enum):
    """The paper's five paths (section 4.1)."""

    S3TCP = "s3tcp"  # one object in the response body
    BUFFER = "buffer"  # one object into a target, through the gateway's memory
    DIRECT = "direct"  # one object, straight into a target
    BATCH = "batch"  # many objects, chunkwise
    AGG = "agg"  # many objects, layerwise


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
