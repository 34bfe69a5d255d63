"""Conditional requests: what the conditions of a request say about an object (RFC 9110, 13)."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import InvalidRequest, PreconditionFailed, Unsupported
from objectcache_schemas.records import Condition

COPY_SOURCE_PREFIX = "x-amz-copy-source-"

# One entity tag of a list: a weak mark, then a quoted or (as S3 clients send it) a bare value.
_ETAG = re.compile(r'(W/)?(?:"([^"]*)"|([^\s,"]+))')


class ConditionOutcome(enum.Enum):
    """What to answer to a conditional read."""

    PROCEED = "proceed"
    NOT_MODIFIED = "not modified"  # 304
    FAILED = "failed"  # 412


def evaluate_read(head: RequestHead, etag: str, modified_s: float) -> ConditionOutcome:
    """Outcome of a GET or HEAD of a stored object.

    `etag` is without quotes. If-Match outranks If-Unmodified-Since, and If-None-Match outranks
    If-Modified-Since. A date that cannot be read counts as absent.
    """
    return _evaluate(head.header, etag, modified_s)


def check_copy_source(head: RequestHead, etag: str, modified_s: float) -> None:
    """Raise `PreconditionFailed` unless the x-amz-copy-source-if-* headers hold for the source."""
    outcome = _evaluate(lambda name: head.header(COPY_SOURCE_PREFIX + name), etag, modified_s)
    if outcome is not ConditionOutcome.PROCEED:
        raise PreconditionFailed("an x-amz-copy-source-if-* condition does not hold")


def range_applies(head: RequestHead, etag: str, modified_s: float) -> bool:
    """Whether If-Range allows a Range to be honoured; else the whole object is served."""
    value = head.header("if-range")
    if value is None:
        return True
    since_s = _http_date(value)
    if since_s is not None:
        return int(modified_s) == since_s
    return _is_listed(value, etag, weak=False)


def write_condition(head: RequestHead) -> Condition:
    """The condition under which a put or a completed upload becomes visible.

    `If-None-Match` and `If-Match` take one ETag or `*`. Raises `Unsupported` for the other forms
    and `InvalidRequest` for both at once.
    """
    for name in ("if-modified-since", "if-unmodified-since"):
        if head.header(name) is not None:
            raise Unsupported(f"{name} is not supported on a write")
    if_match, if_none_match = head.header("if-match"), head.header("if-none-match")
    if if_match is not None and if_none_match is not None:
        raise InvalidRequest("give if-match or if-none-match, not both", code="InvalidRequest")
    if if_none_match is not None:
        if if_none_match.strip() == "*":
            return Condition(absent=True)
        return Condition(not_etag=_single_etag("if-none-match", if_none_match))
    if if_match is not None:
        return Condition(etag=_single_etag("if-match", if_match))
    return Condition()


def _single_etag(name: str, value: str) -> str:
    match = _ETAG.fullmatch(value.strip())
    if match is None or match[1] or not (etag := match[2] or match[3]):
        raise Unsupported(f"{name} on a write takes one strong ETag or *")
    return etag


def _evaluate(
    header: Callable[[str], str | None], etag: str, modified_s: float
) -> ConditionOutcome:
    if_match, if_none_match = header("if-match"), header("if-none-match")
    if if_match is not None:
        if not _is_listed(if_match, etag, weak=False):
            return ConditionOutcome.FAILED
    elif _modified_after(header("if-unmodified-since"), modified_s) is True:
        return ConditionOutcome.FAILED
    if if_none_match is not None:
        unchanged = _is_listed(if_none_match, etag, weak=True)
    else:
        unchanged = _modified_after(header("if-modified-since"), modified_s) is False
    return ConditionOutcome.NOT_MODIFIED if unchanged else ConditionOutcome.PROCEED


def _is_listed(header: str, etag: str, *, weak: bool) -> bool:
    """Whether a list of ETags holds `etag`; `weak` also counts those marked W/."""
    if header.strip() == "*":
        return True
    return any(
        (weak or not mark) and etag == (quoted or bare)
        for mark, quoted, bare in _ETAG.findall(header)
    )


def _modified_after(header: str | None, modified_s: float) -> bool | None:
    """Whether the object changed after the header's date; None without a readable date."""
    since_s = _http_date(header) if header is not None else None
    # HTTP dates have whole seconds; a client sends back what Last-Modified said.
    return None if since_s is None else int(modified_s) > since_s


def _http_date(text: str) -> float | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
