"""Headers that ask for what this server does not do. Ignoring one would be a silent lie."""

from __future__ import annotations

from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import InvalidRequest, Unsupported

_REFUSED_PREFIXES = (
    "x-amz-server-side-encryption",
    "x-amz-copy-source-server-side-encryption",
    "x-amz-object-lock-",
    "x-amz-grant-",
    "x-amz-if-match-",  # conditional deletes by date and size
)
_REFUSED = frozenset(
    {
        "x-amz-tagging",
        "x-amz-website-redirect-location",
        "x-amz-write-offset-bytes",
        "x-amz-rename-source",
        "x-amz-mfa",
    }
)
# Headers whose named values change nothing here; any other value is refused.
_HARMLESS_VALUES: dict[str, frozenset[str]] = {
    # One identity owns all there is, so these two canned ACLs say what holds anyway.
    "x-amz-acl": frozenset({"private", "bucket-owner-full-control"}),
    "x-amz-object-ownership": frozenset({"bucketownerenforced"}),
    "x-amz-bucket-object-lock-enabled": frozenset({"false"}),
    "x-amz-tagging-directive": frozenset({"copy"}),
}
_CONDITIONAL_DELETES = frozenset(
    {Operation.DELETE_OBJECT, Operation.DELETE_OBJECTS, Operation.DELETE_BUCKET}
)


def check_headers(head: RequestHead, operation: Operation) -> None:
    """Raise `Unsupported` or `InvalidRequest` (InvalidStorageClass) naming the first of them."""
    for name, value in head.headers:
        if name.startswith("x-amz-"):
            _check(name, value.strip())
    if operation in _CONDITIONAL_DELETES:
        for name in ("if-match", "if-none-match", "if-unmodified-since"):
            if head.header(name) is not None:
                raise Unsupported(f"{name} on a delete is not implemented")


def _check(name: str, value: str) -> None:
    if name in _REFUSED or name.startswith(_REFUSED_PREFIXES):
        raise Unsupported(f"{name} is not implemented")
    if name == "x-amz-storage-class" and value != "STANDARD":
        raise InvalidRequest("x-amz-storage-class can only be STANDARD", code="InvalidStorageClass")
    harmless = _HARMLESS_VALUES.get(name)
    if harmless is not None and value.lower() not in harmless:
        raise Unsupported(f"{name} can only be {' or '.join(sorted(harmless))}")
