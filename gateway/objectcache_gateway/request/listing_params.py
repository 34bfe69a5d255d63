"""Parameters of the listing operations, and the markers that continue a listing."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from objectcache_gateway.xml.xml_render import url_encoded
from objectcache_schemas.errors import InvalidRequest

PAGE_ENTRIES_MAX = 1000  # S3's own


@dataclass(frozen=True, slots=True)
class ListingParams:
    """One page of a listing of objects."""

    prefix: str
    delimiter: str
    start_after: str
    max_keys: int
    encoding_type: str | None

    @property
    def encoded(self) -> Callable[[str], str]:
        """How keys and prefixes are written in the answer."""
        return url_encoded if self.encoding_type else str


def listing_params(query: Mapping[str, str], start_after: str) -> ListingParams:
    """The parameters that all versions of the operation share; `start_after` is from its marker.

    Raises `InvalidRequest` naming the parameter that is wrong.
    """
    return ListingParams(
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        start_after=start_after,
        max_keys=page_size(query, "max-keys"),
        encoding_type=encoding_type(query),
    )


def v2_start_after(query: Mapping[str, str]) -> str:
    """Where a version 2 page begins: the continuation token outranks start-after."""
    token = query.get("continuation-token")
    return query.get("start-after", "") if token is None else token_to_key(token)


def page_size(query: Mapping[str, str], name: str) -> int:
    """A page size from 0 on; more than 1,000 counts as 1,000, as in S3."""
    text = query.get(name) or str(PAGE_ENTRIES_MAX)
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest(f"{name} must be a number from 0 to 2147483647")
    return min(int(text), PAGE_ENTRIES_MAX)


def encoding_type(query: Mapping[str, str]) -> str | None:
    """`url` or None; raises `InvalidRequest` for anything else."""
    value = query.get("encoding-type") or None
    if value not in (None, "url"):
        raise InvalidRequest("encoding-type can only be url")
    return value


def key_to_token(key: str) -> str:
    """A continuation token; opaque to clients."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def token_to_key(token: str) -> str:
    """The key behind a continuation token; raises `InvalidRequest` for one that is not ours."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("the continuation token is not one of this server") from error
