"""Grants and scopes as people write them: BUCKET[/PREFIX]=ACCESS[,ACCESS]. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from objectcache_operations.admin.printable import printable
from objectcache_schemas.accounts import Access, Grant
from objectcache_schemas.errors import InvalidRequest

FORM = "BUCKET[/PREFIX]=ACCESS[,ACCESS]"
ACCESSES = tuple(access.value for access in Access)


def access_of(words: Iterable[str]) -> tuple[Access, ...]:
    """The accesses of these names, also of several between commas; raises `InvalidRequest` naming
    one that is none.
    """
    found: list[Access] = []
    for word in ",".join(words).split(","):
        if word not in ACCESSES:
            raise InvalidRequest(f"{word!r} is no access; give some of {', '.join(ACCESSES)}")
        found.append(Access(word))
    return tuple(dict.fromkeys(found))


def grant_of(text: str) -> Grant:
    """The grant that is written; raises `InvalidRequest` naming it and the form."""
    where, equals, words = text.rpartition("=")
    bucket, _, prefix = where.partition("/")
    if not equals or not bucket or not words:
        raise InvalidRequest(
            f"{text!r} is not {FORM}, such as models=read,write or models/llama/=read; * is every "
            "bucket"
        )
    return Grant(bucket=bucket, prefix=prefix, access=access_of([words]))


def grant_text(grant: Grant) -> str:
    """A grant as it is written."""
    where = f"{grant.bucket}/{grant.prefix}" if grant.prefix else grant.bucket
    return f"{printable(where)}={','.join(access.value for access in grant.access)}"


def grants_text(grants: Iterable[Grant], empty: str = "-") -> str:
    """Grants on one line."""
    return " ".join(map(grant_text, grants)) or empty
