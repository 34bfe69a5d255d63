"""Which of the paper's paths a fetch may ask for, and what that leaves open (section 4.1)."""

from __future__ import annotations

from typing import Any

from objectcache.arguments import checked_choice
from objectcache.core import TransportChoice
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import InvalidRequest

_MODES = {DeliveryPath.AGG: DeliveryMode.LAYERWISE, DeliveryPath.BATCH: DeliveryMode.CHUNKWISE}
_INTO_TARGETS = (DeliveryPath.BUFFER, DeliveryPath.DIRECT)


def checked_path(path: Any) -> DeliveryPath | None:
    """A path that a fetch can take, or None for the server's choice; raises `InvalidRequest`."""
    if path is None:
        return None
    forced = checked_choice("path", DeliveryPath, path)
    if forced is DeliveryPath.S3TCP:
        raise InvalidRequest(
            "path s3tcp is a plain GET of one object: use get_object of an S3 client, "
            "or one of buffer, direct, batch, agg here"
        )
    return forced


def mode_of(path: DeliveryPath | None, asked: DeliveryMode) -> DeliveryMode:
    """The delivery mode that goes with the path; raises `InvalidRequest` where another is asked."""
    implied = asked if path is None else _MODES.get(path, asked)
    if asked not in (DeliveryMode.AUTO, implied):
        assert path is not None
        raise InvalidRequest(
            f"path {path.value} is {implied.value}: delivery must be {implied.value} or auto, "
            f"got {asked.value!r}"
        )
    return implied


def transport_of(
    path: DeliveryPath | None,
    asked: TransportChoice,
    chunk_count: int,
    of_target: str | None = None,
) -> TransportChoice:
    """The transport that goes with the path; raises `InvalidRequest` where it has none.

    `of_target` is the one that alone fills the caller's target.
    """
    if path not in _INTO_TARGETS:
        return asked
    if chunk_count != 1:
        raise InvalidRequest(
            f"path {path.value} delivers one object: chunk_keys must name 1 chunk, "
            f"got {chunk_count}; use batch or agg for more"
        )
    if asked is TransportChoice.BODY:
        raise InvalidRequest(
            f"path {path.value} writes into registered memory: "
            "transport must be shared_memory, nixl, verbs or auto, got 'body'"
        )
    if asked is not TransportChoice.AUTO:
        return asked
    return TransportChoice(of_target or TransportChoice.SHARED_MEMORY.value)
