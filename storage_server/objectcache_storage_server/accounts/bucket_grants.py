"""Grants bound to the buckets that they were given on, so that no later bucket inherits them. Pure.

A bucket is told from a later one of the same name by when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from objectcache_schemas.accounts import ANY_BUCKET, Access, Grant
from objectcache_schemas.errors import NotFound

CreatedSOf = Callable[
    [str], float | None
]  # when the bucket of a name was made; None: there is none


def bound(grants: Iterable[Grant], created_s_of: CreatedSOf) -> tuple[Grant, ...]:
    """The grants with the buckets there are, one for each bucket and prefix.

    Left out are those on buckets that are gone. Raises `NotFound` (NoSuchBucket) for one that is to
    be bound and has no bucket.
    """
    return _merged(_bound(grants, created_s_of))


def rebound(
    grants: Iterable[Grant], before: Mapping[str, float], created_s_of: CreatedSOf
) -> tuple[Grant, ...]:
    """The grants that held while buckets were made at the times of `before`, on those there are."""
    held = (one for one in grants if _held(one, before) and _exists(one, created_s_of))
    freed = (msgspec.structs.replace(one, bucket_created_s=None) for one in held)
    return bound(freed, created_s_of)


def _bound(grants: Iterable[Grant], created_s_of: CreatedSOf) -> Iterator[Grant]:
    for grant in grants:
        if grant.bucket == ANY_BUCKET:
            yield msgspec.structs.replace(grant, bucket_created_s=None)
            continue
        created_s = created_s_of(grant.bucket)
        if grant.bucket_created_s is None and created_s is None:
            raise NotFound(
                f"there is no bucket {grant.bucket!r} to give access to; make it first",
                code="NoSuchBucket",
            )
        if grant.bucket_created_s in (None, created_s):
            yield msgspec.structs.replace(grant, bucket_created_s=created_s)


def _held(grant: Grant, before: Mapping[str, float]) -> bool:
    if grant.bucket == ANY_BUCKET or grant.bucket_created_s is None:
        return True
    return grant.bucket_created_s == before.get(grant.bucket)


def _exists(grant: Grant, created_s_of: CreatedSOf) -> bool:
    return grant.bucket == ANY_BUCKET or created_s_of(grant.bucket) is not None


def _merged(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    held: dict[tuple[str, str], Grant] = {}
    for grant in grants:
        place = grant.bucket, grant.prefix
        given = {*grant.access, *(held[place].access if place in held else ())}
        ordered = tuple(one for one in Access if one in given)
        held[place] = msgspec.structs.replace(grant, access=ordered)
    return tuple(held.values())
