"""Which bucket and key a request names: path style, virtual-host style, absolute-form targets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KEY_BYTES_MAX

_ABSOLUTE = re.compile(r"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """An HTTP request target, still encoded."""

    raw_path: str
    raw_query: str  # without the question mark
    authority: str | None = None  # of an absolute-form target


@dataclass(frozen=True, slots=True)
class Address:
    """The resource of a request. Without a bucket it is the service, without a key the bucket."""

    bucket: str | None = None
    key: str | None = None


def split_target(target: str) -> RequestTarget:
    """Take a request target apart; raises `InvalidRequest` for `*` and authority forms."""
    absolute = _ABSOLUTE.fullmatch(target)
    authority, rest = (absolute[1], absolute[2]) if absolute else (None, target)
    path, _, query = rest.partition("?")
    if absolute and not path:
        path = "/"
    if not path.startswith("/"):
        raise InvalidRequest("the request target must be a path or an absolute URL")
    return RequestTarget(path, query, authority)


def check_authority(target: RequestTarget, host: str) -> None:
    """Raise `InvalidRequest` where an absolute-form target and the signed Host header differ."""
    if target.authority is not None and target.authority.lower() != host.lower():
        raise InvalidRequest("the target's authority and the host header differ")


def resolve_address(raw_path: str, host: str, domains: Sequence[str]) -> Address:
    """The bucket and key of a request.

    A host below one of `domains` names the bucket, and the path the key; any other host is path
    style. Paths are not normalised: `//` and `..` are parts of keys. Raises `InvalidRequest` for
    names that break S3's rules (InvalidBucketName, KeyTooLongError, InvalidArgument).
    """
    bucket = _virtual_host_bucket(host, domains)
    raw_key = raw_path[1:]
    if bucket is None:
        raw_bucket, _, raw_key = raw_path[1:].partition("/")
        bucket = _decode("bucket", raw_bucket)
    if not bucket:
        if raw_key:
            raise InvalidRequest("the path names no bucket", code="InvalidBucketName")
        return Address()
    check_bucket_name(bucket)
    return Address(bucket, decode_key(raw_key) if raw_key else None)


def check_bucket_name(name: str) -> None:
    """Raise `InvalidRequest` (InvalidBucketName) unless S3's rules for new buckets allow it."""
    legal = (
        _BUCKET_NAME.fullmatch(name)
        and not any(pair in name for pair in ("..", ".-", "-."))
        and not _IP_ADDRESS.fullmatch(name)
        and not name.startswith(_RESERVED_PREFIXES)
        and not name.endswith(_RESERVED_SUFFIXES)
    )
    if not legal:
        raise InvalidRequest(
            "a bucket name has 3 to 63 of a-z 0-9 . - and begins and ends with a letter or digit, "
            "and so does each of its labels between dots",
            code="InvalidBucketName",
        )


def decode_key(raw_key: str) -> str:
    """The key behind its percent-encoding; raises `InvalidRequest` over the limits of keys."""
    key = _decode("key", raw_key)
    check_key(key)
    return key


def check_key(key: str) -> None:
    """Raise `InvalidRequest` unless `key` has 1 to 1,024 bytes of UTF-8 and no NUL."""
    if not key or "\0" in key:
        raise InvalidRequest("a key must not be empty or hold a NUL")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidRequest(f"the key is over {KEY_BYTES_MAX} bytes", code="KeyTooLongError")


def _virtual_host_bucket(host: str, domains: Sequence[str]) -> str | None:
    before, _, port = host.rpartition(":")
    name = (before if port.isdecimal() else host).lower()
    for domain in domains:
        suffix = "." + domain.lower()
        if name.endswith(suffix) and len(name) > len(suffix):
            return name.removesuffix(suffix)
    return None


def _decode(what: str, raw: str) -> str:
    try:
        return unquote_to_bytes(raw.encode("utf-8", "surrogateescape")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the {what} must be percent-encoded UTF-8") from error
