"""Listing with a delimiter, over an engine's plain ordered scan.

Pure but for the scan it is given. A rolled-up prefix is skipped, not read through, so work follows
the size of the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from objectcache_schemas.messages.reads import Listing, ListObjects
from objectcache_schemas.records import ObjectInfo

# scan(prefix, start_after, limit): objects with a key greater than start_after, in key order
Scan = Callable[[str, str, int], list[ObjectInfo]]

LIST_LIMIT_MAX = 1000  # S3's own, for one answer
_AHEAD_GROWTH = 4  # of what is read at once, while nothing rolls up
_LAST = "\U0010ffff" * 300  # 1,200 bytes, greater than any rest of a key


def list_objects(
    request: ListObjects, scan: Scan, shown: Callable[[str], str] = lambda key: key
) -> Listing:
    """One page of a listing. `shown` is the part of a stored key that may roll up."""
    limit = max(0, min(request.limit, LIST_LIMIT_MAX))
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    position, last = _skip_rolled(request, request.start_after), request.start_after
    ahead = 1 if request.delimiter else limit + 1
    while limit:
        ahead = min(ahead, limit - len(objects) - len(prefixes) + 1)
        page = scan(request.prefix, position, ahead)
        ahead *= _AHEAD_GROWTH
        for info in page:
            if info.key <= position:
                continue  # rolled up with one before it
            if len(objects) + len(prefixes) == limit:
                return _listing(objects, prefixes, last)
            rolled = _common_prefix(shown(info.key), request)
            if rolled is None:
                objects.append(info)
                position = last = info.key
            else:
                prefixes.append(rolled)
                position, last = rolled + _LAST, rolled
                ahead = 1  # what follows is passed over; perhaps it rolls up again
        if not page:
            break
    return _listing(objects, prefixes, None)


def _listing(
    objects: list[ObjectInfo], prefixes: list[str], next_start_after: str | None
) -> Listing:
    return Listing(
        objects=tuple(objects), common_prefixes=tuple(prefixes), next_start_after=next_start_after
    )


def _common_prefix(key: str, request: ListObjects) -> str | None:
    if not request.delimiter:
        return None
    end = key.find(request.delimiter, len(request.prefix))
    return None if end < 0 else key[: end + len(request.delimiter)]


def _skip_rolled(request: ListObjects, start_after: str) -> str:
    """Where to scan from: past a common prefix that `start_after` names."""
    if not start_after.startswith(request.prefix):
        return start_after
    return (
        start_after + _LAST if _common_prefix(start_after, request) == start_after else start_after
    )
