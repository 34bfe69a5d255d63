"""Byte ranges of an object, as S3 reads them (RFC 9110, section 14)."""

from __future__ import annotations

import re

from objectcache_schemas.errors import InvalidRequest

_RANGE = re.compile(r"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
_COPY_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_DIGITS_MAX = 19  # of a 64-bit number; more only say "past the end"


def resolve_range(
    header: str | None, size_bytes: int, *, exact: bool = False
) -> tuple[int, int] | None:
    """Offset and length in bytes of what a Range header asks of an object.

    None serves the whole object: no header, one that is malformed, or several ranges, which S3
    ignores. An end past the object is cut to it, or refused with `exact`. Raises `InvalidRequest`:
    InvalidRange where no byte of the range exists, so always for an empty object; InvalidRequest
    where not all of an exact one do.
    """
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or match[0].endswith("=-"):
        return None
    first, last = match[1], match[2]
    if not first:
        return _suffix(_number(last), size_bytes)
    if last and _number(last) < _number(first):
        return None
    found = _clipped(_number(first), _number(last) if last else size_bytes, size_bytes)
    if exact and last and _number(last) >= size_bytes:
        raise _incomplete(size_bytes)
    return found


def resolve_copy_range(header: str, size_bytes: int) -> tuple[int, int]:
    """Offset and length in bytes of an x-amz-copy-source-range, which must lie in the source.

    Raises `InvalidRequest`: InvalidArgument where it is not `bytes=first-last`, InvalidRange where
    it reaches past the source.
    """
    match = _COPY_RANGE.fullmatch(header)
    first, last = (_number(match[1]), _number(match[2])) if match else (1, 0)
    if last < first:
        raise InvalidRequest("x-amz-copy-source-range must be bytes=first-last")
    if last >= size_bytes:
        raise _outside(size_bytes)
    return first, last - first + 1


def content_range(offset_bytes: int, length_bytes: int, size_bytes: int) -> str:
    """Content-Range of a partial answer; `length_bytes` is at least 1."""
    return f"bytes {offset_bytes}-{offset_bytes + length_bytes - 1}/{size_bytes}"


def unsatisfied_content_range(size_bytes: int) -> str:
    """Content-Range of a 416 answer."""
    return f"bytes */{size_bytes}"


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS_MAX else 10**_DIGITS_MAX


def _suffix(length_bytes: int, size_bytes: int) -> tuple[int, int]:
    length_bytes = min(length_bytes, size_bytes)
    if length_bytes == 0:
        raise _outside(size_bytes)
    return size_bytes - length_bytes, length_bytes


def _clipped(first: int, last: int, size_bytes: int) -> tuple[int, int]:
    if first >= size_bytes:
        raise _outside(size_bytes)
    return first, min(last, size_bytes - 1) - first + 1


def _incomplete(size_bytes: int) -> InvalidRequest:
    # Not a 416, which some clients take for the end of what they read.
    return InvalidRequest(
        f"the range ends past the object, which has {size_bytes} bytes, and this client would not "
        "notice (gateway.exact_ranges)",
        code="InvalidRequest",
    )


def _outside(size_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the range lies outside the object, which has {size_bytes} bytes", code="InvalidRange"
    )
